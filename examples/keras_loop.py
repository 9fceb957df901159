"""Keras 3, a loop of one's own, with a schedule of the learning rate and float16:

horovodrun -np 2 python examples/keras_loop.py
"""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import horovod_onebit.tf as onebit


def make_data(examples):
    random = np.random.default_rng(0)  # the same on all workers, as files would be
    x = random.standard_normal((examples, 64)).astype("float32")
    return x, (x @ random.standard_normal((64, 10))).argmax(1)


def main():
    hvd.init()
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)  # leaves memory to the CUDA kernels
    keras.mixed_precision.set_global_policy("mixed_float16")
    x, y = make_data(8192)
    share = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank())
    batches = share.shuffle(4096).batch(64, drop_remainder=True)

    layers = keras.layers
    model = keras.Sequential([layers.Input((64,)), layers.Dense(512, activation="relu"), layers.Dense(10)])
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rate = keras.optimizers.schedules.CosineDecay(0.0, 180, warmup_target=2e-3, warmup_steps=20)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(rate))
    optimizer = onebit.DistributedOptimizer(scaled, warmup_steps=40)
    optimizer.build(model.trainable_variables)
    onebit.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            scaled_loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for epoch in range(3):
        for inputs, labels in batches:
            loss = train_step(inputs, labels)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {float(loss):.3f}", flush=True)
    if hvd.rank() == 0:
        print(optimizer.stats())


if __name__ == "__main__":
    main()

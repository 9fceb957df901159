"""Keras 3, model.fit:

horovodrun -np 2 python examples/keras_fit.py
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
    x, y = make_data(8192)
    held_out, x, y = (x[:1024], y[:1024]), x[1024:], y[1024:]
    x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]  # this worker's share
    steps = len(x) // 64
    batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat().batch(64)

    layers = keras.layers
    model = keras.Sequential([layers.Input((64,)), layers.Dense(512, activation="relu"), layers.Dense(10)])
    optimizer = onebit.DistributedOptimizer(keras.optimizers.AdamW(1e-3), warmup_steps=20)  # or recipe="exact"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)
    callbacks = [
        onebit.callbacks.BroadcastGlobalVariablesCallback(0),  # all start from worker 0's weights
        onebit.callbacks.MetricAverageCallback(),  # before whatever reads metrics
        keras.callbacks.EarlyStopping("val_loss", patience=3),
        onebit.callbacks.BestModelCheckpoint("best.keras", "val_loss"),  # written by worker 0
    ]
    model.fit(
        batches, steps_per_epoch=steps, epochs=3, validation_data=held_out, callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )  # fmt: skip
    if hvd.rank() == 0:
        print(optimizer.stats())


if __name__ == "__main__":
    main()

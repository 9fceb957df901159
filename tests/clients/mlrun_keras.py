"""MLRun's interface for Keras, which wraps the optimizer by itself and puts Horovod's callbacks into ``fit``.

Run by ``python -m horovod_onebit.install --warmup-steps 4``.
"""

import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
from mlrun.frameworks.tf_keras.mlrun_interface import TFKerasMLRunInterface

STEPS, EPOCHS = 10, 2


class Watch(keras.callbacks.Callback):
    """Compares the replicas of all workers after every batch."""

    phases: tuple[str, ...] = ()

    def on_train_batch_end(self, batch, logs=None):
        weights = np.concatenate([np.ravel(w) for w in self.model.get_weights()])
        rows = hvd.allgather(weights[None]).numpy()
        if not np.isfinite(weights).all() or not (rows == rows[0]).all():
            raise AssertionError(f"the replicas differ after step {len(self.phases) + 1}")
        self.phases += (self.model.optimizer.phase.value,)


def main(case):
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())  # MLRun broadcasts
    layers = keras.layers
    model = keras.Sequential([layers.Input((32,)), layers.Dense(64, activation="relu"), layers.Dense(10)])
    TFKerasMLRunInterface.add_interface(obj=model)
    model.use_horovod()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss, metrics=["accuracy"], jit_compile=False)
    assert np.isclose(float(model.optimizer.learning_rate), 1e-3 * hvd.size())  # MLRun scales it
    x = np.random.default_rng(hvd.rank()).standard_normal((16 * STEPS, 32)).astype(np.float32)
    y = x[:, :10].argmax(1)
    validation = {"validation_data": (x[:32], y[:32]), "validation_steps": 2 * hvd.size()}
    watch = Watch()
    model.fit(
        x=x,
        y=y,
        batch_size=16,
        epochs=EPOCHS,
        steps_per_epoch=STEPS // EPOCHS * hvd.size(),  # MLRun divides it by the number of workers
        callbacks=[watch],
        verbose=0,
        **(validation if case == "validated" else {}),
    )
    model.evaluate(x=x, y=y, batch_size=16, steps=2 * hvd.size(), verbose=0)
    if len(watch.phases) != STEPS or watch.phases[-1] != "compressed":
        raise AssertionError(f"{STEPS} steps were expected, compressed in the end, but they were {watch.phases}")
    print(f"worker {hvd.rank()}: {STEPS} steps, replicas equal", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

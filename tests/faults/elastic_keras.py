"""As elastic_torch.py, in Keras."""

import os
import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np

import horovod_onebit.tf as onebit
from horovod_onebit import Recipe
from horovod_onebit.tf import elastic

folder, steps, exchange = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
hvd.init()
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.Input((24,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(8)])
teacher = np.random.default_rng(0).standard_normal((24, 8)).astype(np.float32)
recipe = Recipe(block_size=64, min_compressed_size=64, exchange=exchange)
optimizer = onebit.DistributedOptimizer(keras.optimizers.AdamW(3e-3), warmup_steps=5, recipe=recipe)
model.compile(optimizer=optimizer, loss="mse")
optimizer.build(model.trainable_variables)
(folder / f"{os.environ['HOROVOD_HOSTNAME']}+{os.getpid()}.pid").touch()


def note(text):
    with (folder / "log").open("a") as log:
        log.write(f"{hvd.rank()} {os.getpid()} {text}\n")


@elastic.run
def train(state):
    residuals = sum(float(np.abs(r).sum()) for r in optimizer.feedback_state_dict().values())
    note(f"trains from step {state.step} with {hvd.size()} workers, residuals {residuals:.6f}")
    while state.step < steps:
        x = np.random.default_rng(1000 * state.step + hvd.rank()).standard_normal((16, 24)).astype(np.float32)
        loss = float(model.train_on_batch(x, x @ teacher))
        state.step += 1
        if hvd.rank() == 0:
            (folder / "step.new").write_text(f"{state.step} {hvd.size()} {loss}")
            (folder / "step.new").replace(folder / "step")  # never seen half written
        if state.step % 5 == 0:
            state.commit()
        time.sleep(0.02)
    return loss


loss = train(elastic.KerasState(model, step=0))
np.savez(folder / f"weights-{hvd.rank()}.npz", *[np.array(v) for v in model.trainable_variables])
note(f"done with {hvd.size()} workers, loss {loss:.4f}, {optimizer.phase.value}")

"""``horovodrun python resize_keras.py FOLDER EXCHANGE``: as resize.py, in Keras."""

import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from horovod.tensorflow.functions import allgather_object

import horovod_onebit.tf as onebit
from horovod_onebit import Recipe
from tests.ranks.keras_common import LOSS, OPTIMIZERS, RANK, assert_replicas_equal, batch, build, wrap
from tests.ranks.total_residuals import total_residuals


def everybody(optimizer):
    return allgather_object(optimizer._compressor.engine.residuals(), name="residuals")


def main():
    logging.basicConfig()
    folder, exchange = Path(sys.argv[1]), sys.argv[2]
    model = build()
    recipe = Recipe(exchange=exchange, block_size=64)
    model.compile(optimizer=wrap(OPTIMIZERS["adamw"](), warmup_steps=3, recipe=recipe), loss=LOSS)
    if (folder / "latest.json").exists():
        onebit.load_checkpoint(folder, model)
        before, after = np.load(folder / "residuals.npz"), total_residuals(everybody(model.optimizer), servers=False)
        assert set(before.files) == after.keys()
        for name in before.files:
            np.testing.assert_allclose(after[name], before[name], rtol=1e-5, atol=1e-6)
    for step in range(10, 16):
        model.train_on_batch(*batch(step))
    assert_replicas_equal(model)
    onebit.save_checkpoint(folder, model)
    found = total_residuals(everybody(model.optimizer), servers=True)
    assert all(np.abs(value).sum() > 0 for value in found.values())
    if RANK == 0:
        np.savez(folder / "residuals.npz", **found)
    sys.stdout.write("went on\n")


if __name__ == "__main__":
    main()

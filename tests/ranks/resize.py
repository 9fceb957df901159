"""``horovodrun python resize.py FOLDER EXCHANGE``: go on from the folder's checkpoint, if there is one; save one."""

import logging
import sys
from pathlib import Path

import numpy as np

import horovod_onebit.torch as onebit
from horovod_onebit import Recipe
from tests.ranks.torch_common import Net, assert_replicas_equal, train, wrap
from tests.ranks.total_residuals import total_residuals
from tests.ranks.world import end, world


def everybody(optimizer):
    return world.allgather_object(optimizer._compressor.engine.residuals(), name="residuals")


def main():
    logging.basicConfig()
    folder, exchange = Path(sys.argv[1]), sys.argv[2]
    model = Net()
    optimizer = wrap(model, warmup_steps=3, recipe=Recipe(exchange=exchange, block_size=64))
    if (folder / "latest.json").exists():
        onebit.load_checkpoint(folder, model, optimizer)
        before, after = np.load(folder / "residuals.npz"), total_residuals(everybody(optimizer), servers=False)
        assert set(before.files) == after.keys()
        for name in before.files:
            np.testing.assert_allclose(after[name], before[name], rtol=1e-5, atol=1e-6)
    train(model, optimizer, 6, start=10)
    assert_replicas_equal(model)
    onebit.save_checkpoint(folder, model, optimizer)
    found = total_residuals(everybody(optimizer), servers=True)
    assert any(np.abs(value).sum() > 0 for value in found.values())
    if world.rank() == 0:
        np.savez(folder / "residuals.npz", **found)
    sys.stdout.write("went on\n")


if __name__ == "__main__":
    main()
    end()

"""``horovodrun python resize.py FOLDER EXCHANGE``: go on from the folder's checkpoint, if there is one; save one."""

import logging
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

import horovod_onebit.torch as onebit
from horovod_onebit import Recipe
from tests.ranks.torch_common import Net, assert_replicas_equal, train, wrap


def owed(optimizer, servers):
    """What all errors together owe to the weights, by parameter."""
    total = {}
    for name, value in sorted(optimizer.feedback_state_dict().items()):
        if not name.startswith("onebit.server."):
            total[name] = hvd.allreduce(value, name=f"owed.{name}")
    from horovod_onebit.torch.checkpoint import _saved

    own = _saved(optimizer._compressor)
    for one in hvd.allgather_object(own, name="servers") if servers else []:
        for key, places in one["served"].items():
            start = 0
            for name, lo, hi in places:
                total[name][lo:hi] += one["feedback"][key][start : start + hi - lo]
                start += hi - lo
    return total


def main():
    logging.basicConfig()
    folder, exchange = Path(sys.argv[1]), sys.argv[2]
    model = Net()
    optimizer = wrap(model, warmup_steps=3, recipe=Recipe(exchange=exchange, block_size=64))
    if (folder / "latest.json").exists():
        onebit.load_checkpoint(folder, model, optimizer)
        before = torch.load(folder / "owed", weights_only=True)
        after = owed(optimizer, servers=False)
        assert before.keys() == after.keys()
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)
    train(model, optimizer, 6, start=10)
    assert_replicas_equal(model)
    onebit.save_checkpoint(folder, model, optimizer)
    found = owed(optimizer, servers=True)
    if hvd.rank() == 0:
        torch.save(found, folder / "owed")
    sys.stdout.write("went on\n")


if __name__ == "__main__":
    main()

"""``python alone.py WHAT ...``, in two processes that no launcher ends: one does something else in its sixth step, each
time with a new model."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=8))

from horovod_onebit import OnebitError  # noqa: E402
from tests.ranks.torch_common import RANK, Net, train, wrap  # noqa: E402


def main(what):
    model = Net()
    optimizer = wrap(model, warmup_steps=8 if what.endswith("in_warmup") else 2)
    train(model, optimizer, 5)
    if RANK == 1:
        if what.startswith("dies_in_backward"):  # when what is of the last layers has left
            model.first.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        elif what.startswith("dies"):
            os._exit(3)
        if what.startswith("sleeps"):
            time.sleep(20)
            return
        if what.startswith("learning_rate"):
            optimizer.param_groups[0]["lr"] = 0.5
        if what.startswith("flushes"):
            optimizer.check_replicas()
    train(model, optimizer, 1, start=5)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        start = time.monotonic()
        try:
            main(each)
        except OnebitError as error:
            sys.stdout.write(f"{type(error).__name__} after {time.monotonic() - start:.0f} s: {error}\n")

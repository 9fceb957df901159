"""What each process of `benchmarks/local.py` runs; worker 0 prints one line of JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import horovod.torch as hvd
import numpy as np
import torch

from horovod_onebit.torch.collectives import HorovodCollectives

SIZE, ROUNDS = 4 * 2**20, 15


def nanoseconds(work: Callable[[], object]) -> float:
    """The median, for each parameter."""
    times = []
    for _ in range(ROUNDS):
        hvd.barrier()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e9 * statistics.median(times) / SIZE


def main() -> None:
    hvd.init()
    collectives, grads = HorovodCollectives(), np.ones(SIZE, np.float32)
    bits = np.zeros(SIZE // 8, np.uint8)

    def by_alltoall() -> None:
        parts = collectives.alltoall(grads, "parts").wait().reshape(collectives.size, -1)
        parts.mean(axis=0)

    tensor = torch.from_numpy(grads)
    found = {
        "allreduce": nanoseconds(lambda: collectives.allreduce(grads, "sum").wait()),
        "reduce-scatter": nanoseconds(lambda: hvd.reducescatter(tensor, name="scattered", op=hvd.Sum)),
        "alltoall and addition": nanoseconds(by_alltoall),
        "allgather of a bit a parameter": nanoseconds(lambda: collectives.allgather(bits, "bits").wait()),
    }
    if hvd.rank() == 0:
        sys.stdout.write(f"RESULT {json.dumps(found)}\n")


if __name__ == "__main__":
    main()

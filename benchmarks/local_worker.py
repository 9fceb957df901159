"""What each process of `benchmarks/local.py` runs; worker 0 prints one line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from benchmarks.measure import Loaded, Way, Workers, compare, pairs_of
from horovod_onebit.torch.horovod import HorovodCollectives

SIZE = 4 * 2**20


def ways() -> dict[str, Callable[[], object]]:
    collectives, grads = HorovodCollectives(), np.ones(SIZE, np.float32)
    bits = np.zeros(SIZE // 8, np.uint8)

    def by_alltoall() -> None:
        parts = collectives.alltoall(grads, "parts").wait().reshape(collectives.size, -1)
        parts.mean(axis=0)

    tensor = torch.from_numpy(grads)
    return {
        "allreduce": lambda: collectives.allreduce(grads, "sum").wait(),
        "reduce-scatter": lambda: hvd.reducescatter(tensor, name="scattered", op=hvd.Sum),
        "alltoall and addition": by_alltoall,
        "allgather of a bit a parameter": lambda: collectives.allgather(bits, "bits").wait(),
    }


def timed(work: Callable[[], object]) -> Way:
    """A call is ``SIZE`` steps, so that what is reported is for one parameter."""

    def run() -> None:
        work()

    run()
    return Way(run, steps=SIZE, calls=15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--anyway", action="store_true")
    options = parser.parse_args()
    hvd.init()
    found: dict[str, Any]
    try:
        timed_ways = {name: timed(work) for name, work in ways().items()}
        pairs = pairs_of(list(timed_ways), ["allreduce"])
        found = compare(timed_ways, pairs, Workers(hvd), seconds=options.seconds, anyway=options.anyway)
    except Loaded as error:
        found = {"refused": str(error)}
    if hvd.rank() == 0:
        sys.stdout.write(f"RESULT {json.dumps(found)}\n")
    hvd.barrier()


if __name__ == "__main__":
    main()

"""What each process of `benchmarks/local.py` runs; worker 0 prints one line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.distributed as dist

from benchmarks.measure import Loaded, Way, Workers, compare, pairs_of
from horovod_onebit.torch import transport
from horovod_onebit.torch.horovod import HorovodCollectives

SIZE = 4 * 2**20


Ways = dict[str, Callable[[], object]]


def ways(collectives: Any) -> Ways:
    """By what the library asks of either transport."""
    grads, bits = np.ones(SIZE, np.float32), np.zeros(SIZE // 8, np.uint8)

    def by_alltoall() -> None:
        parts = collectives.alltoall(grads, "parts").wait().reshape(collectives.size, -1)
        parts.mean(axis=0)

    return {
        "allreduce": lambda: collectives.allreduce(grads, "sum").wait(),
        "alltoall and addition": by_alltoall,
        "allgather of a bit a parameter": lambda: collectives.allgather(bits, "bits").wait(),
    }


def over_horovod() -> Ways:
    tensor = torch.ones(SIZE)
    half = tensor.half()
    more = {
        "reduce-scatter": lambda: hvd.reducescatter(tensor, name="scattered", op=hvd.Sum),
        "allreduce in float16": lambda: hvd.allreduce(half, name="half", op=hvd.Sum),
    }
    return ways(HorovodCollectives()) | more


def over_torch(store: str) -> Ways:
    """Over Gloo, whatever Horovod takes; what ``DistributedDataParallel`` sums in 16 bits, too."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=hvd.rank(), world_size=hvd.size())
    own = transport.choose(process_group=dist.group.WORLD, call="the benchmark").collectives()
    found = dict(ways(own))
    for dtype in (torch.float16, torch.bfloat16):
        tensor = torch.zeros(SIZE, dtype=dtype)
        found[f"allreduce in {str(dtype).removeprefix('torch.')}"] = lambda tensor=tensor: dist.all_reduce(tensor)
    return {f"torch.distributed, {name}": work for name, work in found.items()}


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
        with tempfile.TemporaryDirectory() as folder:
            store = hvd.broadcast_object(f"{folder}/store")
            timed_ways = {name: timed(work) for name, work in (over_horovod() | over_torch(store)).items()}
        pairs = pairs_of(list(timed_ways), ["allreduce"])
        found = compare(timed_ways, pairs, Workers(hvd), seconds=options.seconds, anyway=options.anyway)
    except Loaded as error:
        found = {"refused": str(error)}
    if hvd.rank() == 0:
        sys.stdout.write(f"RESULT {json.dumps(found)}\n")
    hvd.barrier()


if __name__ == "__main__":
    main()

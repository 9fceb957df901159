"""What every process of `benchmarks/target.py` runs: trains each way until the test loss is low enough.

Prints one line of JSON on rank 0. The clock stands still while the test loss is computed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from benchmarks.link_job import received, take_core
from benchmarks.link_worker import named, start_gloo
from benchmarks.measure import Loaded, Workers, order, others, refuse, usage
from benchmarks.peers import DiLoCo, over_horovod, powersgd
from horovod_onebit import Recipe
from jobs.data import Task, load
from jobs.options import Options, parse

sys.path.append(str(Path(__file__).resolve().parents[1] / "torch"))

from networks import build

EXACT = 20
"""Steps of the warm-up, where the way says how many."""
START = 2
"""Exact steps that PyTorch's PowerSGD begins with: the fewest that it takes."""
ROWS = 128
"""Test examples."""
TRIES = 3
"""How often a run is tried that other processes disturb."""


class Trained(NamedTuple):
    """A model and what trains it. ``every`` is the number of steps after which all workers have the same weights."""

    module: torch.nn.Module
    model: Any
    optimizer: Any
    every: int = 1


Make = Callable[[torch.nn.Module, Any, str], Trained]


def horovod(compression: Any) -> Make:
    def make(module: torch.nn.Module, optimizer: Any, name: str) -> Trained:
        optimizer = hvd.DistributedOptimizer(optimizer, named(name, module), compression=compression)
        return Trained(module, module, optimizer)

    return make


def low_rank(rank: int) -> Make:
    return lambda module, optimizer, name: Trained(module, powersgd(module, rank, start=START), optimizer)


def every_step(**options: Any) -> Make:
    def make(module: torch.nn.Module, optimizer: Any, name: str) -> Trained:
        optimizer = onebit.DistributedOptimizer(
            optimizer, named(name, module), process_set=hvd.global_process_set, **options
        )
        return Trained(module, module, optimizer)

    return make


def local(every: int, **options: Any) -> Make:
    def make(module: torch.nn.Module, optimizer: Any, name: str) -> Trained:
        schedule = onebit.Local(every=every, **options)
        optimizer = onebit.DistributedOptimizer(
            optimizer, named(name, module), schedule=schedule, process_set=hvd.global_process_set
        )
        return Trained(module, module, optimizer, every)

    return make


def diloco(every: int, **outer: float) -> Make:
    def make(module: torch.nn.Module, optimizer: Any, name: str) -> Trained:
        return Trained(module, module, DiLoCo(optimizer, every, over_horovod(name), **outer), every)

    return make


WAYS: dict[str, Make] = {
    "horovod fp32": horovod(hvd.Compression.none),
    "horovod fp16": horovod(hvd.Compression.fp16),
    "ddp powersgd 1": low_rank(1),
    "ddp powersgd 4": low_rank(4),
    "diloco 16": diloco(16),
    "diloco 16 mean": diloco(16, lr=1.0, momentum=0.0),
    "onebit default": every_step(),
    "onebit": every_step(recipe=Recipe(warmup="exact"), warmup_steps=EXACT),
    "onebit three bits": every_step(
        recipe=Recipe(warmup="three_bit"), warmup_steps=EXACT, compression=hvd.Compression.fp16
    ),
    "onebit local 8": local(8),
    "onebit local 16": local(16, freeze=0),
    "onebit local 16 hidden": local(16, delay=4),
}


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x).flatten(0, -2), y.flatten())


@torch.no_grad()
def test_loss(module: torch.nn.Module, task: Task) -> float:
    """The mean of what each worker finds on its share of the test examples; the same on all. Collective."""
    x, y = (torch.from_numpy(a[:ROWS][hvd.rank() :: hvd.size()]) for a in (task.test_x, task.test_y))
    return float(hvd.allreduce(loss_of(module, x, y), name="test_loss"))


def train(way: str, task: Task, options: Options, target: float, evaluate: int) -> dict[str, Any]:
    """Seconds, steps and received bytes until the test loss is at most ``target``, if it is ``reached``. Collective."""
    torch.manual_seed(options.seed)
    module = build(options.task, options.width, task.train_x.shape[1], task.classes)
    optimizer = torch.optim.AdamW(module.parameters(), lr=options.lr, weight_decay=options.weight_decay, fused=True)
    trained = WAYS[way](module, optimizer, f"{way}.{options.seed}")
    evaluate = max(evaluate, trained.every)
    seconds, done, loss, before = 0.0, 0, float("inf"), received()
    while done < options.steps and loss > target:
        batches = [task.batch(options, done + i, hvd.rank(), hvd.size()) for i in range(evaluate)]
        hvd.barrier()
        start = time.perf_counter()
        for x, y in batches:
            trained.optimizer.zero_grad()
            loss_of(trained.model, torch.from_numpy(x), torch.from_numpy(y)).backward()
            trained.optimizer.step()
        hvd.barrier()
        seconds += time.perf_counter() - start
        done += evaluate
        loss = test_loss(trained.module, task)
    nbytes = received() - before
    return {"seconds": seconds, "steps": done, "loss": loss, "received": nbytes, "reached": loss <= target}


def undisturbed(run: Callable[[], dict[str, Any]], workers: Workers, *, anyway: bool) -> dict[str, Any]:
    """What ``run`` finds, and how many cores others used meanwhile; again, if these were too many. Collective."""
    for _ in range(TRIES):
        before = usage()
        found = run()
        everybody = workers.gather((before, usage()))
        found["load"] = workers.agree(others([a for a, _ in everybody], [b for _, b in everybody]))
        try:
            refuse(found["load"], anyway=anyway)
        except Loaded as error:
            disturbed = error
        else:
            return found
    raise disturbed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", default="127.0.0.1", help="the addresses of all workers, comma-separated")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated, with _ for spaces")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--evaluate", type=int, default=4, help="steps between two evaluations")
    parser.add_argument("--anyway", action="store_true")
    own, rest = parser.parse_known_args()
    options = parse(rest)
    torch.set_num_threads(1)
    hvd.init()
    take_core(hvd.rank())
    ways = [way.replace("_", " ") for way in own.ways.split(",")]
    if any(way.startswith("ddp") for way in ways):
        start_gloo(own.hosts)
    task, workers = load(options), Workers(hvd)
    found: dict[str, Any] = {way: [] for way in ways}
    try:
        for seed in range(own.seeds):
            for way in order(ways, seed):
                one = replace(options, seed=seed)
                result = undisturbed(
                    lambda way=way, one=one: train(way, task, one, own.target, own.evaluate), workers, anyway=own.anyway
                )
                found[way].append(result)
                if hvd.rank() == 0:
                    print(f"{way}, seed {seed}: {result}", file=sys.stderr, flush=True)
    except Loaded as error:
        found = {"refused": str(error)}
    if hvd.rank() == 0:
        sys.stdout.write(f"RESULT {json.dumps({'ways': found, 'workers': hvd.size()})}\n")
    workers.barrier()


if __name__ == "__main__":
    main()

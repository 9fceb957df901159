"""One process of study 21: horovodrun ... python -m studies.clock_worker --hosts A,B [--seed S] SETTING WAY"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks.link_job import received, take_core
from benchmarks.link_worker import start_gloo
from benchmarks.measure import Workers
from benchmarks.target_worker import (
    Make,
    diloco,
    every_step,
    horovod,
    local,
    loss_of,
    low_rank,
    test_loss,
    undisturbed,
)
from horovod_onebit import Recipe
from jobs.options import parse
from studies import clock, large
from studies.magnitudes import networks

MAKE: dict[str, Make] = {
    "float32": horovod(hvd.Compression.none),
    "float16": horovod(hvd.Compression.fp16),
    "powersgd 1": low_rank(1),
    "powersgd 4": low_rank(4),
    "diloco 16": diloco(16, lr=1.0, momentum=0.0),  # the best ones of study 18
    "diloco 64": diloco(64, lr=1.0, momentum=0.0),
    "onebit": every_step(compression=hvd.Compression.fp16),
    "onebit two": every_step(compression=hvd.Compression.fp16, recipe=Recipe(warmup="two_bit")),
    "onebit 20": every_step(warmup_steps=20, compression=hvd.Compression.fp16),
    "local": local(8),
}


def timed(work: Callable[[], None]) -> float:
    """The seconds that ``work`` takes until the slowest worker has done it; the same on all. Collective."""
    hvd.barrier()
    start = time.perf_counter()
    work()
    hvd.barrier()
    return float(hvd.broadcast(torch.tensor(time.perf_counter() - start), 0, name="seconds"))


def train(way: str, setting: clock.Setting, seed: int) -> dict[str, Any]:
    """By look: the seconds, steps and received bytes until then, and the test loss. Collective.

    The clock stands still during looks, of which there are ``clock.LOOKS``, or one after each round.
    """
    rank, workers, task = hvd.rank(), hvd.size(), large.data()
    torch.manual_seed(seed)
    module = networks().CharacterModel(large.TOKENS, setting.width, large.LAYERS, setting.heads, large.LENGTH)
    optimizer = torch.optim.AdamW(module.parameters(), lr=clock.RATE, weight_decay=0.1)
    trained = MAKE[way](module, optimizer, way)
    options = parse(["--seed", str(seed), "--batch-size", str(setting.rows)])
    found: dict[str, Any] = {"seconds": [0.0], "steps": [0], "received": [0], "losses": [test_loss(module, task)]}
    end = 60 * setting.minutes
    done, count, between = 0, trained.every, end / clock.LOOKS

    def steps() -> None:
        for step in range(done, done + count):
            for group in trained.optimizer.param_groups:
                group["lr"] = clock.RATE * min(1.0, (step + 1) / clock.RISE)
            x, y = (torch.from_numpy(a) for a in task.batch(options, step, rank, workers))
            trained.optimizer.zero_grad()
            loss_of(trained.model, x, y).backward()
            trained.optimizer.step()

    while found["seconds"][-1] < end:
        before = received()
        seconds = timed(steps)
        found["received"].append(found["received"][-1] + received() - before)
        found["seconds"].append(found["seconds"][-1] + seconds)
        found["steps"].append(done := done + count)
        found["losses"].append(test_loss(module, task))
        count = trained.every * max(1, round(between / seconds * count / trained.every))
    return found | {"parameters": sum(p.numel() for p in module.parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", required=True, help="the addresses of all workers, comma-separated")
    parser.add_argument("--seed", type=int, default=0)
    for name, known in (("setting", clock.SETTINGS), ("way", MAKE)):
        parser.add_argument(name, choices=[one.replace(" ", "_") for one in known])
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    take_core(hvd.rank())
    name, way = (one.replace("_", " ") for one in (options.setting, options.way))
    if way.startswith("powersgd"):
        start_gloo(options.hosts)
    workers = Workers(hvd)
    found = undisturbed(lambda: train(way, clock.SETTINGS[name], options.seed), workers, anyway=True)
    if hvd.rank() == 0:
        sys.stdout.write(f"RESULT {json.dumps(found)}\n")
    workers.barrier()


if __name__ == "__main__":
    main()

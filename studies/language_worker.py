"""One process of study 10's real workers, as any PyTorch job uses this library.

horovodrun -np 4 python studies/language_worker.py EXCHANGE SEED
"""

from __future__ import annotations

import json
import sys

import horovod.torch as hvd
import torch

import horovod_onebit.torch as onebit
from horovod_onebit.recipe import Recipe
from studies.language import KIND
from studies.rates import Cell, Result, begin, losses, rate_at, result_of


def train(cell: Cell, exchange: str) -> Result:
    """What ``rates.train`` gives, but for the number of exact steps."""
    models, data, options = begin(cell)
    model, rank, workers = models[0], hvd.rank(), hvd.size()
    optimizer = onebit.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=cell.rate),
        named_parameters=model.named_parameters(),
        recipe=Recipe(exchange=exchange, warmup="exact"),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(KIND.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(cell, step)
        optimizer.zero_grad()
        loss, _ = losses(model, *data.batch(options, step, rank, workers))
        loss.backward()
        optimizer.step()
    stats = optimizer.stats()
    return result_of(model, data, bits=8 * stats.bytes_sent / stats.parameters / KIND.steps)


def main() -> None:
    exchange, seed = sys.argv[1:]
    hvd.init()
    result = train(Cell("language", hvd.size(), KIND.rates[0], "auto", int(seed)), exchange)
    if hvd.rank() == 0:
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

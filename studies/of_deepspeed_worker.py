"""One process of study 14: an optimizer of DeepSpeed's in DeepSpeed's engine, on the CPU.

torchrun --standalone --nproc-per-node 2 studies/of_deepspeed_worker.py TASK RATE SEED OPTIMIZER OPTIONS

Two things in DeepSpeed's compressed exchange do not run on a CPU, and are replaced: its packer of bits, which is there
for Intel's GPUs only, and an allgather of numbers without a dimension, which Gloo refuses. Neither changes a value.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.comm import compressed

from studies.of_deepspeed import packed, unpacked
from studies.rates import Cell, Result, begin, losses, rate_at, result_of


class Packer:
    """What DeepSpeed's ``PackbitsBuilder`` is."""

    def load(self) -> Packer:
        return self

    def packbits(self, values: torch.Tensor, _size: int, _rank: int) -> torch.Tensor:
        return torch.from_numpy(packed(values.numpy()))

    def unpackbits(self, signs: torch.Tensor, _size: int, _rank: int) -> torch.Tensor:
        return torch.from_numpy(unpacked(signs.numpy()))


def on_a_cpu() -> None:
    """Put in what DeepSpeed's exchange has no code for here."""
    gather = compressed.dist.all_gather

    def all_gather(found: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> Any:
        return gather(found, torch.atleast_1d(tensor), group=group)

    compressed.dist.all_gather = all_gather
    compressed.PackbitsBuilder = Packer


def train(cell: Cell, optimizer: str, options: dict[str, Any]) -> Result:
    """Test loss and accuracy of a run."""
    (model, *_), data, seen = begin(cell)
    rank, workers, batch = deepspeed.comm.get_rank(), cell.workers, cell.kind.batch
    parameters = {"lr": cell.rate, "comm_backend_name": "compressed", **options}
    config = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch // workers,
        "optimizer": {"type": optimizer, "params": parameters},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(cell.kind.steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = rate_at(cell, step)
        loss, _ = losses(engine, *data.batch(seen, step, rank, workers))
        engine.backward(loss)
        engine.step()
    return result_of(model, data)


def main() -> None:
    task, rate, seed, optimizer, options = sys.argv[1:]
    on_a_cpu()
    deepspeed.init_distributed("gloo")
    cell = Cell(task, deepspeed.comm.get_world_size(), float(rate), None, int(seed))
    result = train(cell, optimizer, json.loads(options))
    if deepspeed.comm.get_rank() == 0:
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

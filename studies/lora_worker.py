"""One process of study 20: all runs that are missing, one after the other, as any PyTorch job trains.

horovodrun -np 2 python studies/lora_worker.py
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import horovod.torch as hvd
import torch

import horovod_onebit.torch as onebit
from studies.fine_tuning import base
from studies.lora import ALPHA, RANK, TARGETS, Run, missing
from studies.rates import Cell, Result, begin, kept, losses, rate_at, result_of

NEAR = 20
"""Steps before the first compressed one, and after it, over which norms are averaged."""


def adapted(model: torch.nn.Module) -> Any:
    """``model`` with LoRA's matrices, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS)))


def train(run: Run) -> Result:
    """What ``rates.train`` gives, and what was clipped."""
    way = run.way
    cell = Cell("source", hvd.size(), run.rate, way.warmup, run.seed)
    models, data, options = begin(cell)
    models[0].load_state_dict(base()[0])
    model = adapted(models[0]) if way.lora else models[0]
    optimizer = onebit.DistributedOptimizer(
        torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=run.rate),
        named_parameters=[(name, p) for name, p in model.named_parameters() if p.requires_grad],
        recipe=way.recipe, warmup_steps=way.warmup, schedule=way.schedule,
    )  # fmt: skip
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    norms: tuple[list[float], list[float]] = [], []  # in exact steps, in compressed ones
    exact_steps = 0
    scaler = torch.amp.GradScaler("cpu", enabled=way.half)
    for step in range(cell.kind.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(cell, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=way.half):
            loss, _ = losses(model, *data.batch(options, step, hvd.rank(), hvd.size()))
        scaler.scale(loss).backward()
        compressed = optimizer.phase == "compressed"
        exact_steps += not compressed
        if way.max_norm is not None:
            norms[compressed].append(optimizer.clip_grad_norm_(way.max_norm))
        scaler.step(optimizer)
        scaler.update()
    optimizer.flush()
    stats = optimizer.stats()
    return result_of(
        model.merge_and_unload() if way.lora else model, data,
        bits=8 * stats.bytes_sent / stats.parameters / cell.kind.steps, skipped=stats.skipped_steps,
        parameters=stats.parameters, exact_steps=exact_steps, **clipping(run, *norms),
    )  # fmt: skip


def clipping(run: Run, exact: list[float], compressed: list[float]) -> Result:
    """Which share of steps was clipped, and the mean norms before and after compression starts."""
    if run.way.max_norm is None:
        return {}
    found = {"clipped": mean(norm > run.way.max_norm for norm in exact + compressed)}
    if exact and compressed:
        found |= {"norm before": mean(exact[-NEAR:]), "norm after": mean(compressed[:NEAR])}
    return found


def main() -> None:
    hvd.init()
    for run in hvd.broadcast_object(missing(), root_rank=0):
        result = train(run)
        if hvd.rank() == 0:
            print(run.name, kept(run.name, result.copy), flush=True)
    if hvd.rank() == 0:
        print("RESULT {}", flush=True)


if __name__ == "__main__":
    main()

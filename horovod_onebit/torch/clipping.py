"""Gradient clipping that is the same on all workers, where averaged gradients do not exist."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import horovod.torch as hvd
import torch

from horovod_onebit.warmup import Phase

if TYPE_CHECKING:
    from horovod_onebit.torch.compressor import Compressor


def clip_grad_norm_(compressor: Compressor, max_norm: float) -> float:
    """Scale all gradients alike on all workers; see ``DistributedOptimizer.clip_grad_norm_``."""
    grads = [p.grad for p in compressor.exact_steps if p.grad is not None]
    squares = float(sum(g.detach().double().square().sum() for g in grads))
    if compressor.phase is Phase.COMPRESSED:
        total = torch.tensor([squares], dtype=torch.float64)
        name = f"{compressor.engine.name}.norm"
        mean = hvd.allreduce(total, name=name, op=hvd.Average, process_set=compressor.process_set)
        squares = float(mean) * (compressor.engine.collectives.size**2 if compressor.sum_gradients else 1)
    norm = math.sqrt(squares)
    if not norm <= max_norm:
        for g in grads:
            g.mul_(max_norm / (norm + 1e-6))
    return norm

"""The peers that exchange float32 less often, or matrices of low rank: DiLoCo, and PyTorch's PowerSGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

Average = Callable[[Sequence[torch.Tensor]], None]
"""Puts the workers' mean into each of these tensors. Collective."""


def over_horovod(name: str) -> Average:
    """By Horovod, in float32; ``name`` begins the names of the collectives."""
    import horovod.torch as hvd

    def average(tensors: Sequence[torch.Tensor]) -> None:
        for handle in [hvd.allreduce_async_(t, name=f"{name}.{i}", op=hvd.Average) for i, t in enumerate(tensors)]:
            hvd.synchronize(handle)

    return average


class DiLoCo:
    """``every`` steps of ``inner`` on each worker alone, then one outer step with the mean of what they have moved
    (Douillard et al. 2023, arXiv 2311.08105, Algorithm 1).

    With a the weights that all workers had when the round began, and w_i what worker i's steps made of them, the outer
    gradient is the mean of a - w_i. The outer optimizer is Nesterov's SGD; ``lr`` and ``momentum`` are the paper's.
    """

    def __init__(self, inner: Any, every: int, average: Average, *, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.inner, self.every, self.average = inner, every, average
        self.weights = [p for group in inner.param_groups for p in group["params"]]
        self.anchors = [p.detach().clone() for p in self.weights]
        self.outer = torch.optim.SGD(self.anchors, lr=lr, momentum=momentum, nesterov=momentum > 0)
        self.steps = 0

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        """One inner step, and the outer one if the round ends. Collective then."""
        self.inner.step()
        self.steps += 1
        if self.steps % self.every == 0:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """The outer step; all workers have the same weights afterwards. Collective."""
        for anchor, p in zip(self.anchors, self.weights, strict=True):
            anchor.grad = anchor - p
        self.average([anchor.grad for anchor in self.anchors if anchor.grad is not None])
        self.outer.step()
        self.outer.zero_grad()
        for anchor, p in zip(self.anchors, self.weights, strict=True):
            p.copy_(anchor)


def powersgd(module: torch.nn.Module, rank: int, start: int) -> DistributedDataParallel:
    """``module``, whose gradients PyTorch's hook compresses from step ``start`` on."""
    model = DistributedDataParallel(module, bucket_cap_mb=1000)  # over Gloo it crashes with more than one bucket
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model

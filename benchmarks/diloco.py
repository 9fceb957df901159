"""DiLoCo in float32, the peer of 1-bit local steps (Douillard et al. 2023, arXiv 2311.08105, Algorithm 1)."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch


class DiLoCo:
    """``every`` steps of ``inner`` on each worker alone, then one outer step with the mean of what they have moved.

    With a the weights that all workers had when the round began, and w_i what worker i's steps made of them, the outer
    gradient is the mean of a - w_i, averaged by Horovod in float32. The outer optimizer is Nesterov's SGD; ``lr`` and
    ``momentum`` are the paper's. ``name`` begins the names of the collectives.
    """

    def __init__(self, inner: Any, every: int, *, lr: float = 0.7, momentum: float = 0.9, name: str = "diloco") -> None:
        self.inner, self.every, self.name = inner, every, name
        self.weights = [p for group in inner.param_groups for p in group["params"]]
        self.anchors = [p.detach().clone() for p in self.weights]
        self.outer = torch.optim.SGD(self.anchors, lr=lr, momentum=momentum, nesterov=True)
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
        handles = []
        for i, (anchor, p) in enumerate(zip(self.anchors, self.weights, strict=True)):
            anchor.grad = anchor - p
            handles.append(hvd.allreduce_async_(anchor.grad, name=f"{self.name}.{i}", op=hvd.Average))
        for handle in handles:
            hvd.synchronize(handle)
        self.outer.step()
        self.outer.zero_grad()
        for anchor, p in zip(self.anchors, self.weights, strict=True):
            p.copy_(anchor)

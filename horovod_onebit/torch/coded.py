"""Gradients that are averaged in few bits in the warm-up (``Recipe.warmup``).

What they are in units of is not saved: a run that is resumed in its warm-up, or loads a state, takes the exact steps
again of which it is learned. All is float32 in the host's memory, wherever the gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from horovod_onebit.coded import FIRST, CodedMean
from horovod_onebit.engine import Engine
from horovod_onebit.rules import Tensor
from horovod_onebit.tasks import Task
from horovod_onebit.torch.parameters import Parameters


class Coded:
    """Belongs to the gradients of one ``DistributedOptimizer``, which takes ``sums`` of them, or means."""

    def __init__(self, parameters: Parameters, engine: Engine, *, sums: bool) -> None:
        self._parameters = parameters
        self._mean = CodedMean(engine)
        self._sums = sums
        self._loads = 0

    @property
    def _factor(self) -> int:
        """What the mean is multiplied by."""
        return self._mean.engine.collectives.size if self._sums else 1

    def learns(self, p: torch.Tensor) -> bool:
        """Whether the gradient of ``p`` is to be averaged in few bits in its warm-up."""
        return self._parameters.compressible(p)

    def takes(self, p: torch.Tensor) -> bool:
        """Whether the next average of the gradient of ``p`` is in few bits. Alike on all workers, or an error."""
        return self.learns(p) and self._unit(p).variance_steps >= FIRST

    def describe(self) -> dict[str, int]:
        """Of each parameter that learns, how many averages there were: they must be the same on all workers."""
        parameters = self._parameters
        return {parameters.names[p]: self._unit(p).variance_steps for p in parameters.exact() if self.learns(p)}

    def observe(self, parameters: Iterable[torch.Tensor]) -> None:
        """The gradients of ``parameters`` are exact averages, and finite."""
        factor = self._factor
        for p in parameters:
            self._mean.observe(self._unit(p), _flat(p) / factor if factor > 1 else _flat(p))

    def average(self, parameters: Iterable[torch.Tensor], beside: Task[bool]) -> Task[None]:
        """The gradients of ``parameters`` become the averages; infinity on all workers if those of some worker, or what
        is averaged ``beside`` them, is not finite. Collective."""
        each = list(parameters)
        units = [self._unit(p) for p in each]
        if not (yield from self._mean.mean(units, [_flat(p) for p in each], beside)):
            for p in each:
                p.grad = torch.full_like(p, math.inf)
            return
        factor = self._factor
        for p, unit in zip(each, units, strict=True):
            assert p.grad is not None
            p.grad.copy_(torch.from_numpy(unit.weight).view(p.shape))
            if factor > 1:
                p.grad.mul_(factor)

    def forget(self, names: Iterable[str]) -> None:
        """These are averaged no more. Local."""
        self._mean.forget(names)

    def forget_world(self) -> None:
        """There are other workers now, some of which have seen nothing: all begin anew. Local."""
        self._mean.forget()
        self._mean.engine.forget_world()

    def _unit(self, p: torch.Tensor) -> Tensor:
        """What the core keeps of ``p``; nothing yet since a state was loaded."""
        if self._loads != self._parameters.loads:
            self._mean.forget()
            self._loads = self._parameters.loads
        return self._mean.tensor(self._parameters.names[p], p.numel())


def _flat(p: torch.Tensor) -> Any:
    """The gradient of ``p``, flat float32, in the order of its elements; zeros if it has none. It may share memory."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad.detach().reshape(-1).to("cpu", torch.float32).numpy()

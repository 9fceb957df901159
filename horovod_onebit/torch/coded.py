"""Gradients that are averaged in few bits in the warm-up (``Recipe.warmup``), on their way during the backward pass.

What they are in units of is saved in checkpoints, and not in the optimizer's state: a run that loads such a state takes
the exact steps again of which it is learned. Gradients on a GPU are worked on there, where the CUDA kernels can; all
others are float32 in the host's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from horovod_onebit.coded import CodedMean, Learned
from horovod_onebit.engine import Engine, Plan
from horovod_onebit.exchange import Lane
from horovod_onebit.handshake import Finite
from horovod_onebit.rules import Tensor
from horovod_onebit.tasks import Task
from horovod_onebit.torch.arrays import gradient_of, nonzero
from horovod_onebit.torch.collectives import tensor_of
from horovod_onebit.torch.early import Early
from horovod_onebit.torch.parameters import Parameters
from horovod_onebit.warmup import EXACT_FIRST


class Coded:
    """Belongs to the gradients of one ``DistributedOptimizer``, which takes ``sums`` of them, or means."""

    def __init__(self, parameters: Parameters, engine: Engine, *, sums: bool, lane: Lane | None) -> None:
        self._parameters = parameters
        self._mean = CodedMean(engine, divides=parameters.adapter.divides, lane=lane)
        self._sums = sums
        self._averaged: list[torch.Tensor] = []  # the last time, in the order of the layout
        self._early = Early(self._mean.engine)

    @property
    def _factor(self) -> int:
        """What the mean is multiplied by."""
        return self._mean.engine.collectives.size if self._sums else 1

    def learns(self, p: torch.Tensor) -> bool:
        """Whether the gradient of ``p`` is to be averaged in few bits in its warm-up."""
        return self._parameters.compressible(p)

    def takes(self, p: torch.Tensor) -> bool:
        """Whether the next average of the gradient of ``p`` is in few bits. Alike on all workers, or an error."""
        return self.learns(p) and self._unit(p).variance_steps >= EXACT_FIRST

    def describe(self) -> dict[str, int]:
        """Of each parameter that learns, how many averages there were: they must be the same on all workers."""
        parameters = self._parameters
        return {parameters.names[p]: self._unit(p).variance_steps for p in parameters.exact() if self.learns(p)}

    @property
    def elements(self) -> int:
        """See ``CodedMean.elements``."""
        return self._mean.elements

    @torch.no_grad()
    def observe(self, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients of ``parameters`` are exact averages, and finite."""
        units, means = list[Tensor](), list[Any]()
        grads = [gradient_of(p) for p in parameters]
        for p, grad, found in zip(parameters, grads, nonzero(grads), strict=True):
            if found:
                units.append(self._unit(p))
                means.append(self._flat(p, grad.float() / self._factor if self._factor > 1 else grad))
        self._mean.observe(units, means)

    @property
    def generation(self) -> str:
        return self._mean.engine.generation

    def computed(self, p: torch.Tensor, now: Callable[[], Sequence[torch.Tensor]]) -> None:
        """The gradient of ``p`` is final: let messages leave that waited for it alone, if the next average is of the
        same parameters as the last one; it is of ``now()``. Local."""

        def begin() -> tuple[Plan | None, Mapping[torch.Tensor, torch.Tensor]]:
            found = now()
            plan = self._mean.begin([self._unit(one) for one in found]) if self._same(found) else None
            return plan, {one: one for one in found}

        self._early.computed(p, begin, self._gradient)

    def leave(self) -> None:
        """Let all leave, gradients that are missing as zeros, if some of it has: see ``Engine.leave``."""
        engine, plan = self._mean.engine, self._early.plan
        if plan is not None and engine.layout is not None and self._early.incomplete:
            engine.send_rest({number: self._gradient(p) for number, p in enumerate(self._early.parts)}, plan)
        self._early.leave()

    def _same(self, now: Sequence[torch.Tensor]) -> bool:
        return list(map(id, now)) == list(map(id, self._averaged))

    def stale(self, now: Callable[[], Sequence[torch.Tensor]]) -> bool:
        """Whether something has left, and the average is to be of other parameters, ``now()``, than it was then."""
        return self._early.plan is not None and not self._same(now())

    def recall(self, changed: Iterable[torch.Tensor]) -> Task[None]:
        """Take back what some workers have sent of this step; ``changed`` are parameters whose gradients have changed
        since, and the errors of these are lost. Collective."""
        yield from self._mean.recall([self._gradient(p) for p in self._averaged])
        self.reset_residuals(changed)
        self._early.over()

    def reset_residuals(self, changed: Iterable[torch.Tensor]) -> None:
        """The errors of ``changed``, which cannot be restored, are zero."""
        self._mean.engine.feedback.reset([self._parameters.names[p] for p in changed])

    def cancel(self, *, by_all: bool) -> None:
        """See ``Engine.cancel``."""
        self._mean.engine.cancel(by_all=by_all)
        self._early.over()

    @property
    def sent_finite(self) -> Finite:
        """See ``Engine.sent_finite``."""
        return Finite.UNKNOWN if self._early.plan is None else self._mean.engine.sent_finite

    def average(self, parameters: Iterable[torch.Tensor], beside: Task[bool], *, certain: bool = False) -> Task[None]:
        """The gradients of ``parameters`` become the averages; infinity on all workers if those of some worker, or what
        is averaged ``beside`` them, is not finite. ``certain``: all workers have sent finite ones. Collective."""
        each = self._averaged = list(parameters)
        self._early.over()
        units = [self._unit(p) for p in each]
        gradients = [self._gradient(p) for p in each]
        if not (yield from self._mean.mean(units, gradients, beside, certain=certain)):
            for p in each:
                gradient_of(p).fill_(math.inf)
            return
        factor = self._factor
        for p, unit in zip(each, units, strict=True):
            assert p.grad is not None
            p.grad.copy_(tensor_of(unit.weight).view(p.shape))
            if factor > 1:
                p.grad.mul_(factor)

    def forget(self, names: Iterable[str] | None = None) -> None:
        """These are averaged no more; or another state was loaded, and of all nothing is known any more. Local."""
        self._mean.forget(names)
        if names is None:
            self._averaged = []
            self._early.over()

    def forget_world(self) -> None:
        """There are other workers now, some of which have seen nothing: all begin anew. Local."""
        self._mean.forget_world()
        self._averaged = []
        self._early.over()

    def state(self) -> Learned | None:
        """See ``CodedMean.state``."""
        return self._mean.state()

    def load(self, saved: Learned | None) -> None:
        """See ``CodedMean.load``."""
        self._mean.load(saved)
        self._averaged = []
        self._early.over()

    def check(self, saved: Learned | None, sizes: Mapping[str, int]) -> None:
        """See ``CodedMean.check``."""
        self._mean.check(saved, sizes)

    def _unit(self, p: torch.Tensor) -> Tensor:
        """What the core keeps of ``p``."""
        place = self._parameters.placement.of(p)
        zeros = None if place is None else place.zeros
        return self._mean.tensor(self._parameters.names[p], p.numel(), zeros)

    def _gradient(self, p: torch.Tensor) -> Any:
        """The gradient of ``p`` as the core sees it."""
        return self._flat(p, gradient_of(p))

    def _flat(self, p: torch.Tensor, grad: torch.Tensor) -> Any:
        """``grad`` of ``p``, flat, in the order of its elements, where ``p`` is worked on. It may share memory."""
        grad, place = grad.detach().reshape(-1), self._parameters.placement.of(p)
        if place is None:
            return grad.to("cpu", torch.float32).numpy()
        return place.array((grad if grad.dtype in place.dtypes else grad.to(torch.float32)).contiguous())

"""Messages that leave during the backward pass: a bucket is sent when all of its gradients are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from horovod_onebit.engine import Engine, Plan
from horovod_onebit.layout import Layout

Begin = Callable[[], tuple[Plan | None, Mapping[torch.Tensor, Any]]]
"""The plan of a step, None if nothing may leave in it yet; and by parameter, in the order of the engine's layout, what
stands for it."""


class Early:
    """What leaves of one engine's messages before its step does.

    Attributes:
        plan: of the step that is being sent; None while nothing is.
        parts: of that step, by number of the tensor, what stands for the parameter.
    """

    plan: Plan | None
    parts: list[Any]

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._layout: Layout | None = None
        self.over()

    def over(self) -> None:
        """The step is over, or nothing of it may leave any more: the next gradient is the first of another. Local."""
        self._asked, self.plan, self.parts = False, None, []

    def computed(self, p: torch.Tensor, begin: Begin, gradient: Callable[[Any], Any]) -> None:
        """The gradient of ``p`` is final: send the buckets that waited for it alone. ``begin`` is asked at the first
        one of a step; ``gradient`` gives that of a part, flat, as the core sees it. Local."""
        if not self._asked:
            self._asked = True
            plan, parts = begin()
            if plan is not None:
                self._start(parts)
                self.plan = plan
        if self.plan is not None:
            self._send(p, gradient, self.plan)

    @property
    def incomplete(self) -> bool:
        """Whether some message of the step that is being sent waits for gradients."""
        return any(self._missing)

    def leave(self) -> None:
        """See ``Engine.leave``."""
        if self.plan is not None:
            self._engine.leave(self.plan)

    def _start(self, parts: Mapping[torch.Tensor, Any]) -> None:
        layout = self._engine.layout
        assert layout is not None
        if layout is not self._layout:
            self._layout = layout
            self._members = [{piece.tensor for piece in bucket.pieces} for bucket in layout.buckets]
            self._of: list[list[int]] = [[] for _ in layout.tensors]
            for index, tensors in enumerate(self._members):
                for tensor in tensors:
                    self._of[tensor].append(index)
        self._missing = [len(tensors) for tensors in self._members]
        self.parts, self._numbers = list(parts.values()), {p: i for i, p in enumerate(parts)}

    @torch.no_grad()
    def _send(self, p: torch.Tensor, gradient: Callable[[Any], Any], plan: Plan) -> None:
        grads: dict[int, Any] = {}
        for bucket in self._of[self._numbers[p]]:
            self._missing[bucket] -= 1
            if not self._missing[bucket]:
                for number in self._members[bucket] - grads.keys():
                    grads[number] = gradient(self.parts[number])
                self._engine.send(bucket, grads, plan)

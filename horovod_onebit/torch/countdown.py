"""Which buckets of a layout have all of their gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from horovod_onebit.layout import Layout


class Countdown:
    """Which tensor is in which bucket of a layout, and how many gradients each bucket still waits for."""

    def __init__(self) -> None:
        self._layout: Layout | None = None

    def start(self, layout: Layout, parameters: Iterable[torch.Tensor]) -> None:
        """At the first of the gradients of ``parameters``, in the order of ``layout``."""
        if layout is not self._layout:
            self._layout = layout
            self.members = [{piece.tensor for piece in bucket.pieces} for bucket in layout.buckets]
            self._of: list[list[int]] = [[] for _ in layout.tensors]
            for index, tensors in enumerate(self.members):
                for tensor in tensors:
                    self._of[tensor].append(index)
        self._missing = [len(tensors) for tensors in self.members]
        self._numbers = {p: i for i, p in enumerate(parameters)}

    def complete(self, p: torch.Tensor) -> list[int]:
        """The gradient of ``p`` is there: the buckets that now have all of theirs."""
        buckets = self._of[self._numbers[p]]
        for bucket in buckets:
            self._missing[bucket] -= 1
        return [bucket for bucket in buckets if not self._missing[bucket]]

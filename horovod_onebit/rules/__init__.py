"""One optimizer algorithm per file. A rule is a frozen value: the hyperparameters of one step.

A rule sees one tensor at a time. It says what to send (``encode``), what to do with the workers' mean (``apply``, for
each part that a message holds, then ``finish``), how to take ``encode`` back (``restore``), and what the exact,
uncompressed step is (``exact_step``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.kernels.reference import Array, Bytes, Spec, denominator
from horovod_onebit.recipe import Recipe

HEADROOM = 1024.0
"""See ``Rule.largest_scale``."""


@dataclass
class Tensor:
    """One parameter of this worker and what the rules keep for it: flat float32 arrays of one length.

    Attributes:
        weight, momentum: updated in place by ``apply``, alike on every worker.
        variance: the second moment, frozen once compression starts; None for rules that have none.
        residual: the error feedback, this worker's own.
        step: optimizer steps taken so far.
        variance_steps: steps that the second moment has seen; its bias is corrected by that many.
        fresh: the weights at the last exchange, which 0/1 Adam keeps besides; else None.
        layer: a few numbers that a rule keeps for the whole parameter; else None.
        sums: what ``measure`` found.
    """

    name: str
    weight: Array
    momentum: Array
    variance: Array | None
    residual: Array
    step: int = 0
    variance_steps: int = 0
    fresh: Array | None = None
    layer: Array | None = None
    sums: Sequence[NDArray[np.float64]] = ()

    def part(self, start: int, stop: int) -> Tensor:
        """Elements ``start:stop``, as views."""
        if start == 0 and stop == self.weight.size:
            return self
        piece = slice(start, stop)
        return Tensor(
            self.name,
            self.weight[piece],
            self.momentum[piece],
            None if self.variance is None else self.variance[piece],
            self.residual[piece],
            self.step,
            self.variance_steps,
            None if self.fresh is None else self.fresh[piece],
            self.layer,
        )


@dataclass(frozen=True)
class Context:
    """What a rule needs to know besides the tensor."""

    kernels: ModuleType
    recipe: Recipe
    workers: int


class Rule:
    """What all rules share; a rule fills in ``coding``, ``apply`` and ``exact_step``."""

    name: str
    lr: float
    encodes_gradients: ClassVar[bool] = True
    """Whether a message of several workers' mean gradient is as good as a message of each."""

    def coding(self, tensor: Tensor, block_size: int, context: Context) -> tuple[Array | None, Array | None, Spec]:
        """How to compress ``tensor``: the second moment or None, the weights (for L2 decay) or None, the scalars."""
        raise NotImplementedError

    def largest_scale(self, tensor: Tensor, block_size: int, context: Context) -> float:
        """A bound on the scales of any message, infinity where there is none.

        The update u is clipped to [-k, k], so that a block of n elements has |u| <= k sqrt(n). With the
        scale "guarded" a message loses at most the share q = sqrt(1 - 3 / (4 n)) of c = u + error, so that
        |error| <= q (|u| + |error|) stays below k sqrt(n) / (1 - q), and a scale, at most |c| / sqrt(n), below
        k / (1 - q) <= k (8 n / 3). What a server of a two-stage exchange compresses is made of such scales, so that
        its own are below k (8 n / 3)^2. ``HEADROOM`` is for residuals that began elsewhere: with the clip of more
        workers, or handed over when the workers changed.
        """
        variance, _, spec = self.coding(tensor, block_size, context)
        if variance is None or spec.scale == "rms":
            return math.inf
        return HEADROOM * float(spec.clip) * (8 * block_size / 3) ** 2

    def apply(self, tensor: Tensor, scales: Array, bits: Bytes, block_size: int, context: Context) -> None:
        """Take step number ``tensor.step + 1`` with the mean of all messages: (n, blocks), (n, bytes)."""
        raise NotImplementedError

    def init(self, tensor: Tensor) -> None:
        """Give a new ``tensor`` what this rule keeps besides momentum and second moment."""

    def begin(self, tensor: Tensor, context: Context) -> None:
        """The last exact step of ``tensor`` was taken; what follows is compressed."""

    def measure(self, tensor: Tensor, context: Context) -> None:
        """All parts of ``tensor`` were applied: start to find out what ``finish`` must know of the whole of it."""

    def finish(self, tensor: Tensor, context: Context) -> None:
        """All parts of ``tensor`` were applied and it was measured: do what needs the whole of it."""

    def local_step(self, tensor: Tensor, grad: Array, context: Context) -> None:
        """A step of this worker alone, for rules that have such steps."""
        raise NotImplementedError

    def pending(self, tensor: Tensor, context: Context) -> Array | None:
        """What local steps have moved since the last exchange, in host memory; None if nothing, on all alike."""
        return None

    def settle(self, tensor: Tensor, mean: Array, context: Context) -> None:
        """Take over the ``mean`` of what all workers have ``pending``."""

    def exact_step(self, tensor: Tensor, grad: Array) -> None:
        """Take step number ``tensor.step + 1`` with the exact mean gradient, and count it. All in host memory."""
        raise NotImplementedError

    def exact_step_anywhere(self, tensor: Tensor, grad: Array, context: Context) -> None:
        """``exact_step`` for tensors that may lie elsewhere; they then go to the host's memory and back: it is rare."""
        names = [name for name in ("weight", "momentum", "variance") if getattr(tensor, name) is not None]
        here = replace(tensor, **{name: context.kernels.host(getattr(tensor, name)) for name in names})
        self.exact_step(here, grad)
        for name in names:
            if getattr(here, name) is not getattr(tensor, name):
                context.kernels.write(getattr(tensor, name), getattr(here, name))
        tensor.step, tensor.variance_steps = here.step, here.variance_steps

    def encode(
        self, tensor: Tensor, grad: Array, scales: Array, bits: Bytes, block_size: int, context: Context
    ) -> bool:
        """Compress this worker's contribution into ``scales`` and ``bits``, update the residual; all finite?"""
        variance, weight, spec = self.coding(tensor, block_size, context)
        return context.kernels.encode(grad, tensor.momentum, variance, weight, tensor.residual, scales, bits, spec)

    def restore(
        self, tensor: Tensor, grad: Array, scales: Array, bits: Bytes, block_size: int, context: Context
    ) -> None:
        """Undo ``encode`` of the same arguments."""
        variance, weight, spec = self.coding(tensor, block_size, context)
        context.kernels.restore(grad, tensor.momentum, variance, weight, tensor.residual, scales, bits, spec)


def largest_scale(parts: Sequence[tuple[Rule, Tensor, int]], context: Context) -> float:
    """The bound on the scales of a message of ``parts``: rule, tensor, block size."""
    different = {(id(rule), block_size): (rule, tensor, block_size) for rule, tensor, block_size in parts}
    return max((rule.largest_scale(tensor, size, context) for rule, tensor, size in different.values()), default=0.0)


def norms_of(tensors: Sequence[Tensor], rules: Sequence[Rule], context: Context) -> tuple[float, float]:
    """Euclidean norms of this worker's error feedback and of the momentum, in the space that is compressed.

    Over all ``tensors``; a full pass over memory, so for reports rather than for every step.
    """
    error = momentum = 0.0
    host = context.kernels.host
    for tensor, rule in zip(tensors, rules, strict=True):
        variance, _, spec = rule.coding(tensor, 8, context)
        m, residual = host(tensor.momentum), host(tensor.residual)
        if variance is not None:
            m = m / denominator(host(variance), spec)
        momentum += float(np.dot(m, m))
        error += float(np.dot(residual, residual))
    return float(np.sqrt(error)), float(np.sqrt(momentum))

"""The workers' mean gradient in few bits, for any optimizer. What is sent is in units of D, the root of a moving
average of its squares, in which all elements are of one size.

    c_i   = g_i / D + error_i;   C_i = Q(c_i);   error_i <- c_i - C_i        D = sqrt(v + floor)
    g     = D sum_i C_i / n                                                 the same on all workers
    v     <- beta2 v + (1 - beta2) g^2
    error_i <- error_i D / D'                                               D' is that of the next step

``v`` is made of what all have decoded, so that it is alike on all workers and follows the gradient. Its bias is
corrected. An element that has never had a gradient rests (see ``rest``). Levels must have a zero among them: without
it, an element that has no gradient beside others of many units is told of more than its own unit in each step, and D
grows for ever. One bit is not enough: all codes are then of one size, and v keeps its proportions.

What one step lacks of a gradient the next ones bring, whatever becomes of D: an error is kept in units of the D that it
will be sent with. A gradient far beyond the outermost level arrives in pieces over many steps. Sums come out right, so
that SGD moves as far as it should. ``floor`` is ``SHARE`` of the mean of v over the tensor, so that there are not too
many pieces where the gradient has hardly been more than zero until now.

With an optimizer that divides by a second moment (``Gradient.divides``) no error is kept. It divides by what has
arrived, and so goes as far: the squares of k pieces would add up to a k-th of the square. Few bits are fine enough that
errors, which come some steps late, cost more than they bring (study 12). An element that is too small beside its
block's scale to be told of is told of again when D has followed it down, which takes as long as v remembers. Elements
far below the rest of their tensor matter as much as any other, so that there is no floor; a gradient is within
``MOST``, lest the others of its block have a scale made by it. The residual then has what tells that an element which
rests is wanted, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.formulas import (
    TINY,
    ZERO,
    Number,
    absolute,
    alive,
    f32,
    forgets,
    maximum,
    minimum,
    moving,
    rests,
    sqrt,
    where,
)
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rules import Context, Rule, Tensor, Use, finish_step, scalars

BETA2 = 0.999
SHARE = 0.01
LARGEST = f32(1e30)
"""The most that v may be, and what is contributed where all errors are kept: infinity would silence an element for
ever."""
MOST = 32.0
"""The most that an element contributes, with up to 64 workers: an element whose gradient was not zero in one of 1,000
steps has a D of that gradient divided by sqrt(1000). Where gradients are noise, contributions grow with the root of the
number of workers."""
EVERY = 16
"""Steps between two looks at the mean of v, after the first ones."""


class Scalars(NamedTuple):
    """``correction`` is that of the bias of v; ``start`` is the square of D of elements that rest; ``keep`` and
    ``take`` are beta2 and what it leaves; ``then_...`` are those of the next step; ``most`` bounds what is
    contributed."""

    correction: Number
    floor: Number
    start: Number
    keep: Number
    take: Number
    then_correction: Number
    then_floor: Number
    then_start: Number
    most: Number


def _unit(v: Number, correction: Number, floor: Number, start: Number) -> Number:
    return maximum(sqrt(where(alive(v), v * correction + floor, start)), TINY)


def _later(p: Scalars, v: Number, g: Number) -> Number:
    later = minimum(p.keep * v + p.take * g * g, LARGEST)
    return where(alive(v), maximum(later, TINY), later)  # what moves does not come to rest again


@rests
def contribute(p: Scalars, g: Number, _e: Number, v: Number, _w: Number, _a: Number) -> Number:
    c = g / _unit(v, p.correction, p.floor, p.start)
    return where(absolute(g) <= LARGEST, minimum(maximum(c, -p.most), p.most), c)  # NaN and Inf stay


@forgets
def contribute_only(p: Scalars, g: Number, m: Number, v: Number, w: Number, a: Number) -> Number:
    return contribute(p, g, m, v, w, a)


def receive(p: Scalars, x: Number, e: Number, v: Number, _w: Number, _a: Number) -> Any:
    unit = _unit(v, p.correction, p.floor, p.start)
    g = moving(x, v) * unit
    then = _later(p, v, g)
    return e * (unit / _unit(then, p.then_correction, p.then_floor, p.then_start)), then, g


def receive_only(p: Scalars, x: Number, _e: Number, v: Number, _w: Number, _a: Number) -> Any:
    g = moving(x, v) * sqrt(v * p.correction)  # as of ``_unit``: there is no floor, and of what rests nothing is told
    return None, _later(p, v, g), g


def observe(p: Scalars, g: Number, _m: Number, v: Number, _w: Number, _a: Number) -> Any:
    return None, _later(p, v, g), g


def rescale(p: Scalars, _g: Number, e: Number, v: Number, g: Number, _a: Number) -> Any:
    """After ``receive``: a server's error, of which ``g`` was the mean gradient and ``v`` is what it has become."""
    before = maximum((v - p.take * g * g) / p.keep, ZERO)
    unit, then = _unit(before, p.correction, p.floor, p.start), _unit(v, p.then_correction, p.then_floor, p.then_start)
    return e * (unit / then), None, None


def root(_p: Scalars, _g: Number, _m: Number, v: Number, _w: Number, _a: Number) -> Any:
    return sqrt(v), sqrt(v)


@lru_cache(maxsize=256)
def _scalars(divides: bool, steps: int, start: float, then: float, workers: int) -> Scalars:
    """Of a tensor that has had so many ``steps``; most tensors have the same."""
    correction, then_correction = (1 / (1 - BETA2**count) for count in (max(steps, 1), steps + 1))
    start, then = (max(each, correction * float(TINY)) for each in (start, then))
    return scalars(
        Scalars,
        correction=correction,
        floor=0.0 if divides else start,
        start=start,
        keep=BETA2,
        take=1 - BETA2,
        then_correction=then_correction,
        then_floor=0.0 if divides else then,
        then_start=then,
        most=max(MOST, 4 * math.sqrt(workers)) if divides else float(LARGEST),
    )


@dataclass(frozen=True)
class Gradient(Rule):
    """Of the tensors that this rule sees, the "weight" is where the mean gradient goes, the "momentum" is the residual
    and ``layer`` has ``start`` of this step and the next. ``divides``: the optimizer that takes the mean gradient
    divides by a second moment of each element."""

    divides: bool = False
    lr: float = 1.0
    name: str = "gradient"

    def init(self, tensor: Tensor) -> None:
        tensor.layer = np.zeros(2, np.float32)

    @property
    def owes_resting(self) -> bool:
        return not self.divides

    def _scalars(self, tensor: Tensor, workers: int = 1) -> Scalars:
        assert tensor.layer is not None
        return _scalars(self.divides, tensor.variance_steps, *map(float, tensor.layer), workers)

    def contribution(self, tensor: Tensor, context: Context) -> Use:
        formula = contribute_only if self.divides else contribute
        return Use(formula, self._scalars(tensor, context.workers))

    def motion(self, tensor: Tensor, context: Context) -> Use:
        return Use(receive_only if self.divides else receive, self._scalars(tensor))

    def exact(self, tensor: Tensor) -> Use:
        return Use(observe, self._scalars(tensor))

    def lengths(self, tensor: Tensor, context: Context) -> Use | None:
        seen = tensor.variance_steps + 1
        looks = seen <= EVERY or seen % EVERY == 0
        return Use(root, self._scalars(tensor)) if looks else None

    def finish(self, tensor: Tensor, sums: NDArray[np.float64] | None, context: Context) -> None:
        assert tensor.layer is not None
        tensor.variance_steps += 1
        tensor.layer[0] = tensor.layer[1]
        if sums is not None:
            mean = float(sums[0]) / tensor.weight.size / (1 - BETA2**tensor.variance_steps)
            # A power of two: the same where the sum was rounded otherwise.
            tensor.layer[1] = 2.0 ** round(math.log2(SHARE * mean)) if mean > 0 else 0.0

    def first_variance(self, tensor: Tensor) -> float:
        if not self.divides:
            return super().first_variance(tensor)  # the floor is enough
        p = self._scalars(tensor)
        return float(p.start / p.correction)

    def rescale(self, tensor: Tensor) -> Use:
        """What a server's error becomes after the next ``motion``, where errors are kept."""
        return Use(rescale, self._scalars(tensor))

    def observe(self, tensors: Sequence[Tensor], means: Sequence[Array], context: Context) -> None:
        """Take notice of the exact mean gradients, flat, of ``tensors``."""
        with context.kernels.batch():
            for tensor, mean in zip(tensors, means, strict=True):
                context.kernels.move(*self.exact(tensor), tensor.arrays(mean))
        finish_step([self] * len(tensors), tensors, context)

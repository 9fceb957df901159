"""One bit an element: its sign. ``sign(0) = +1``; bit 1 means negative."""

from __future__ import annotations

from horovod_onebit.formulas import Number, minimum, sqrt, u32, where

BITS = 1
PLUS, MINUS = u32(0), u32(1)


def scale(mean: Number, square: Number, guard: Number) -> Number:
    """The root mean square, which keeps the norm, bounded by ``guard`` times the mean magnitude.

    Below twice the mean magnitude is exactly the condition that the codec is a contraction.
    """
    return minimum(sqrt(square), guard * mean)


def code(c: Number, s: Number) -> Number:
    return where(c < 0, MINUS, PLUS)


def value(code: Number, s: Number) -> Number:
    return where(code != 0, -s, s)

"""Two bits an element, four levels: ``s``, ``s / 3``, ``-s / 3`` and ``-s``. Plane 0 is the sign, plane 1 the size.

Each element gets the nearest level, so that its error is at most that of the sign with the scale ``s / 3``: this is a
contraction where that is. ``s`` is 2.2 root mean squares of the block, and at most ``3 guard`` times its mean
magnitude.
"""

from __future__ import annotations

from horovod_onebit.formulas import Number, absolute, f32, minimum, sqrt, u32, where

BITS = 2
NONE, SIGN, LARGE = u32(0), u32(1), u32(2)
THIRD, THREE_HALVES = f32(1 / 3), f32(1.5)


def scale(mean: Number, square: Number, guard: Number) -> Number:
    return minimum(2.2 * sqrt(square), 3 * guard * mean)


def code(c: Number, s: Number) -> Number:
    return where(c < 0, SIGN, NONE) | where(absolute(c) * THREE_HALVES > s, LARGE, NONE)


def value(code: Number, s: Number) -> Number:
    magnitude = where(code & LARGE != 0, s, s * THIRD)
    return where(code & SIGN != 0, -magnitude, magnitude)

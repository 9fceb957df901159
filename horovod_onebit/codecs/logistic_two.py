"""Two bits an element: zero, and the two levels that with it lose least of a logistic distribution, ``-1.26 s`` and
``1.26 s`` (Max 1960; Lloyd 1982). Plane 0 is the sign, plane 1 says that it is not zero. ``s`` is the root mean square
of the block.
"""

from __future__ import annotations

from horovod_onebit.codecs.sign import scale
from horovod_onebit.formulas import ZERO, Number, absolute, f32, u32, where

__all__ = ["BITS", "code", "scale", "value"]

BITS = 2
NONE, SIGN, LARGE = u32(0), u32(1), u32(2)
OUTER, BETWEEN = f32(1.2621), f32(0.6310)


def code(c: Number, s: Number) -> Number:
    return where(c < 0, SIGN, NONE) | where(absolute(c) > BETWEEN * s, LARGE, NONE)


def value(code: Number, s: Number) -> Number:
    magnitude = where(code & LARGE != 0, OUTER, ZERO) * s  # NaN stays NaN
    return where(code & SIGN != 0, -magnitude, magnitude)

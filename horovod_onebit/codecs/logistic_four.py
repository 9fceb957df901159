"""Four bits an element: of fifteen levels, zero among them, those that lose least of a logistic distribution (Max 1960;
Lloyd 1982). Plane 0 is the sign, planes 1 to 3 are the bits of the level's number. ``s`` is the root mean square of the
block.
"""

from __future__ import annotations

from horovod_onebit.codecs.sign import scale
from horovod_onebit.formulas import Number, absolute, f32, u32, where

__all__ = ["BITS", "code", "scale", "value"]

BITS = 4
NONE, SIGN, ONE, TWO, FOUR = u32(0), u32(1), u32(2), u32(4), u32(8)
L0, L1, L2, L3 = f32(0), f32(0.2895), f32(0.5926), f32(0.9259)
L4, L5, L6, L7 = f32(1.3129), f32(1.7941), f32(2.4555), f32(3.5606)
# Between two levels, halfway.
B0, B1, B2, B3 = f32(0.1447), f32(0.4411), f32(0.7593), f32(1.1194)
B4, B5, B6 = f32(1.5535), f32(2.1248), f32(3.0081)


def code(c: Number, s: Number) -> Number:
    a = absolute(c)
    four = where(a > B3 * s, FOUR, NONE)
    two = where(a > where(four != 0, B5, B1) * s, TWO, NONE)
    middle = where(four != 0, where(two != 0, B6, B4), where(two != 0, B2, B0))
    return where(c < 0, SIGN, NONE) | where(a > middle * s, ONE, NONE) | two | four


def value(code: Number, s: Number) -> Number:
    low = where(code & TWO != 0, where(code & ONE != 0, L3, L2), where(code & ONE != 0, L1, L0))
    high = where(code & TWO != 0, where(code & ONE != 0, L7, L6), where(code & ONE != 0, L5, L4))
    magnitude = where(code & FOUR != 0, high, low) * s
    return where(code & SIGN != 0, -magnitude, magnitude)

"""Three bits an element: of seven levels, zero among them, those that lose least of a logistic distribution (Max 1960;
Lloyd 1982), whose tails are between a Gaussian's and Laplace's. Plane 0 is the sign, planes 1 and 2 are the bits of the
level's number. ``s`` is the root mean square of the block.
"""

from __future__ import annotations

from horovod_onebit.codecs.sign import scale
from horovod_onebit.formulas import Number, absolute, f32, u32, where

__all__ = ["BITS", "code", "scale", "value"]

BITS = 3
NONE, SIGN, ONE, TWO = u32(0), u32(1), u32(2), u32(4)
L0, L1, L2, L3 = f32(0), f32(0.5862), f32(1.2971), f32(2.4185)
B0, B1, B2 = f32(0.2931), f32(0.9417), f32(1.8578)  # between two levels, halfway


def code(c: Number, s: Number) -> Number:
    a = absolute(c)
    two = where(a > B1 * s, TWO, NONE)
    return where(c < 0, SIGN, NONE) | where(a > where(two != 0, B2, B0) * s, ONE, NONE) | two


def value(code: Number, s: Number) -> Number:
    low, high = where(code & ONE != 0, L1, L0), where(code & ONE != 0, L3, L2)
    magnitude = where(code & TWO != 0, high, low) * s
    return where(code & SIGN != 0, -magnitude, magnitude)

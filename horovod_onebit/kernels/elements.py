"""What several kernels for CPUs are made of: the denominator, and the mean of all workers' messages."""

from __future__ import annotations

import numpy as np

from horovod_onebit.kernels.compiling import exact
from horovod_onebit.kernels.reference import TINY

f32 = np.float32
u8 = np.uint8
u32 = np.uint32


@exact
def denominator(v, correction, eps, eps_inside):
    if eps_inside:
        return max(np.sqrt(v * correction + eps), TINY)
    return max(np.sqrt(v * correction) + eps, TINY)


@exact
def _signed(bits, shift, s):
    return -s if (bits >> u32(shift)) & u32(1) != u32(0) else s


@exact
def _set_signs(total, a, s):
    """``total = +-s`` by the bits of ``a``; ``total`` covers whole bytes."""
    for k in range(a.size):
        byte = u32(a[k])
        for j in range(8):
            total[8 * k + j] = f32(0) + _signed(byte, j, s)


@exact
def _set_signs_of_two(total, a, s, b, t):
    """The sum of two workers in one pass, which for two workers is all there is."""
    for k in range(a.size):
        byte_a, byte_b = u32(a[k]), u32(b[k])
        for j in range(8):
            total[8 * k + j] = (f32(0) + _signed(byte_a, j, s)) + _signed(byte_b, j, t)


@exact
def _add_signs(total, a, s):
    for k in range(a.size):
        byte = u32(a[k])
        for j in range(8):
            total[8 * k + j] += _signed(byte, j, s)


@exact
def mean_of_block(total, scales, bits, k, lo, hi):
    n = f32(scales.shape[0])
    first, last = lo // 8, (hi + 7) // 8
    if scales.shape[0] == 1:
        _set_signs(total, bits[0, first:last], scales[0, k])
        return
    _set_signs_of_two(total, bits[0, first:last], scales[0, k] / n, bits[1, first:last], scales[1, k] / n)
    for i in range(2, scales.shape[0]):
        _add_signs(total, bits[i, first:last], scales[i, k] / n)

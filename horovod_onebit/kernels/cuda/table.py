"""What a launch is about: a table in device memory, a row for each tensor, of whole numbers and of float32."""

from __future__ import annotations

import struct
from enum import IntEnum

from numba import cuda

from horovod_onebit.kernels.cuda.device import constant_f32, constant_i64, inlined


class Column(IntEnum):
    """A row of the table. FIRST: the row's first thread block; GRADIENT to OUT_WEIGHT are addresses, 0 for none.

    Whole numbers have 64 bits; from MOMENTUM_FACTOR on, numbers are float32.
    """

    FIRST = 0
    SIZE = 1
    BLOCK_SIZE = 2
    GRADIENT = 3
    MOMENTUM = 4
    VARIANCE = 5
    WEIGHT = 6
    ANCHOR = 7
    ERROR = 8
    SCALES = 9
    BITS = 10
    OUT_ERROR = 11
    OUT_SCALES = 12
    OUT_BITS = 13
    OUT_MOMENTUM = 14
    OUT_WEIGHT = 15
    WORKERS = 16
    SCALES_STRIDE = 17
    BITS_STRIDE = 18
    KIND = 19  # of numbers that the gradient is in
    ALIGNED = 20  # all addresses are multiples of 16
    SCALE = 21  # which scale
    UPDATE_SPACE = 22
    SHIFT = 23  # the logarithm of the block size; -1 if that is no power of two
    MOMENTUM_FACTOR = 24
    GRAD_FACTOR = 25
    L2 = 26
    EPS_INSIDE = 27  # of the root; one of the two is 0
    EPS_OUTSIDE = 28
    CORRECTION = 29
    CLIP = 30
    DECAY = 31
    STEP_SIZE = 32
    LOOK_BACK = 33
    SHARE = 34  # 1 / WORKERS, and 1 / BLOCK_SIZE: where a multiplication by it is exact, else 0
    PORTION = 35


_ROW = struct.Struct("<24q12f16x")
pack, ROW_BYTES = _ROW.pack, _ROW.size
WIDTH = ROW_BYTES // 8
EMPTY = (0,) * 24 + (0.0,) * 12
"""A row of no tensor."""

(FIRST, SIZE, BLOCK_SIZE, GRADIENT, MOMENTUM, VARIANCE, WEIGHT, ANCHOR, ERROR, SCALES, BITS, OUT_ERROR, OUT_SCALES,
 OUT_BITS, OUT_MOMENTUM, OUT_WEIGHT, WORKERS, SCALES_STRIDE, BITS_STRIDE, KIND, ALIGNED, SCALE, UPDATE_SPACE, SHIFT,
 MOMENTUM_FACTOR, GRAD_FACTOR, L2, EPS_INSIDE, EPS_OUTSIDE, CORRECTION, CLIP, DECAY, STEP_SIZE, LOOK_BACK, SHARE,
 PORTION) = map(int, Column)  # fmt: skip
FIRST_NUMBER = MOMENTUM_FACTOR
"""Number ``column`` of a row is its float32 number ``FIRST_NUMBER + column``."""


@inlined
def row_of(table, rows):
    """The row of this thread block: the last whose FIRST is not beyond it. A tuple: ``row[SIZE]``, ``row[EPS]``.

    What a program does not look at is not loaded; the rest is once, before anything else.
    """
    low, high = 0, rows - 1
    block = cuda.blockIdx.x
    while low < high:
        middle = (low + high + 1) // 2
        if constant_i64(table, middle * WIDTH) <= block:
            low = middle
        else:
            high = middle - 1
    at = table + 8 * WIDTH * low
    return (
        constant_i64(at, 0), constant_i64(at, 1), constant_i64(at, 2), constant_i64(at, 3),
        constant_i64(at, 4), constant_i64(at, 5), constant_i64(at, 6), constant_i64(at, 7),
        constant_i64(at, 8), constant_i64(at, 9), constant_i64(at, 10), constant_i64(at, 11),
        constant_i64(at, 12), constant_i64(at, 13), constant_i64(at, 14), constant_i64(at, 15),
        constant_i64(at, 16), constant_i64(at, 17), constant_i64(at, 18), constant_i64(at, 19),
        constant_i64(at, 20), constant_i64(at, 21), constant_i64(at, 22), constant_i64(at, 23),
        constant_f32(at, 48), constant_f32(at, 49), constant_f32(at, 50), constant_f32(at, 51),
        constant_f32(at, 52), constant_f32(at, 53), constant_f32(at, 54), constant_f32(at, 55),
        constant_f32(at, 56), constant_f32(at, 57), constant_f32(at, 58), constant_f32(at, 59),
    )  # fmt: skip

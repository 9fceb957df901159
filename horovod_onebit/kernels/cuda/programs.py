"""The kernels: one pass over memory each, over many tensors in one launch.

A launch is described by a table in device memory, a row of 64-bit numbers for each tensor (the columns below).
A thread works on four neighbours. Where a scale is needed, a thread block works on one block of the tensor; its
elements stay in registers between the sum and the signs (blocks of more than four elements a thread are read twice).
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np
from numba import cuda

from horovod_onebit.kernels.cuda.device import (
    FLOAT32,
    block_sums,
    inlined,
    load4,
    load_f32,
    load_i64,
    load_u8,
    mul,
    neighbour,
    store4,
    store_f32,
    store_f64,
    store_u8,
)
from horovod_onebit.kernels.reference import CHUNK, GUARD, TINY

f32, f64, u8 = np.float32, np.float64, np.uint8


class Column(IntEnum):
    """A row of the table. FIRST: the row's first thread block; GRADIENT to OUT_WEIGHT are addresses, 0 for none;
    from MOMENTUM_FACTOR on, float32 in the lower half of a column."""

    FIRST = 0
    SIZE = 1
    BLOCK_SIZE = 2
    GRADIENT = 3
    MOMENTUM = 4
    VARIANCE = 5
    WEIGHT = 6
    ERROR = 7
    SCALES = 8
    BITS = 9
    OUT_ERROR = 10
    OUT_SCALES = 11
    OUT_BITS = 12
    OUT_MOMENTUM = 13
    OUT_WEIGHT = 14
    WORKERS = 15
    SCALES_STRIDE = 16
    BITS_STRIDE = 17
    KIND = 18  # of numbers that the gradient is in
    ALIGNED = 19  # all addresses are multiples of 16
    SCALE = 20  # which scale
    EPS_INSIDE = 21
    UPDATE_SPACE = 22
    MOMENTUM_FACTOR = 23
    GRAD_FACTOR = 24
    L2 = 25
    EPS = 26
    CORRECTION = 27
    CLIP = 28
    DECAY = 29
    STEP_SIZE = 30
    LOOK_BACK = 31


COLUMNS = len(Column)
RMS, MEAN_ABS = 0, 1  # the third is guarded

(FIRST, SIZE, BLOCK_SIZE, GRADIENT, MOMENTUM, VARIANCE, WEIGHT, ERROR, SCALES, BITS, OUT_ERROR, OUT_SCALES, OUT_BITS,
 OUT_MOMENTUM, OUT_WEIGHT, WORKERS, SCALES_STRIDE, BITS_STRIDE, KIND, ALIGNED, SCALE, EPS_INSIDE, UPDATE_SPACE,
 MOMENTUM_FACTOR, GRAD_FACTOR, L2, EPS, CORRECTION, CLIP, DECAY, STEP_SIZE, LOOK_BACK) = map(int, Column)  # fmt: skip


@inlined
def _row(table, rows):
    """The row of this thread block: the last whose FIRST is not beyond it."""
    low, high = 0, rows - 1
    block = cuda.blockIdx.x
    while low < high:
        middle = (low + high + 1) // 2
        if load_i64(table, middle * COLUMNS) <= block:
            low = middle
        else:
            high = middle - 1
    return table + 8 * COLUMNS * low


@inlined
def _number(row, column):
    return load_f32(row, 2 * column, FLOAT32)


@inlined
def _denominator(v, correction, eps, eps_inside):
    if eps_inside != 0:
        return max(f32(math.sqrt(mul(v, correction) + eps)), TINY)
    return max(f32(f32(math.sqrt(mul(v, correction))) + eps), TINY)


@inlined
def _element(row, g, m, v, w):
    """The contribution of one element: see ``reference.contribution``."""
    if load_i64(row, WEIGHT) != 0:
        g = g + mul(_number(row, L2), w)
    u = mul(_number(row, MOMENTUM_FACTOR), m) + mul(_number(row, GRAD_FACTOR), g)
    if load_i64(row, VARIANCE) == 0:
        return u
    clip, moment = _number(row, CLIP), u
    u = moment / _denominator(v, _number(row, CORRECTION), _number(row, EPS), load_i64(row, EPS_INSIDE))
    u = -clip if u < -clip else u
    u = clip if u > clip else u
    return u + mul(moment, f32(0))


@inlined
def _contribution(row, i, end):
    aligned, kind = load_i64(row, ALIGNED), load_i64(row, KIND)
    zeros = f32(0), f32(0), f32(0), f32(0)
    g = load4(load_i64(row, GRADIENT), i, end, aligned, kind)
    m = load4(load_i64(row, MOMENTUM), i, end, aligned, FLOAT32)
    v = w = zeros
    if load_i64(row, VARIANCE) != 0:
        v = load4(load_i64(row, VARIANCE), i, end, aligned, FLOAT32)
    if load_i64(row, WEIGHT) != 0:
        w = load4(load_i64(row, WEIGHT), i, end, aligned, FLOAT32)
    return (
        _element(row, g[0], m[0], v[0], w[0]),
        _element(row, g[1], m[1], v[1], w[1]),
        _element(row, g[2], m[2], v[2], w[2]),
        _element(row, g[3], m[3], v[3], w[3]),
    )


@inlined
def _signed(byte, bit, s):
    return -s if (byte >> bit) & 1 != 0 else s


@inlined
def _mean(row, i, end):
    """The mean of the workers' messages, in rank order: see ``reference.decode_mean``."""
    a = b = c = d = f32(0)
    if i < end:
        workers = load_i64(row, WORKERS)
        scales, bits = load_i64(row, SCALES), load_i64(row, BITS)
        block = i // load_i64(row, BLOCK_SIZE)
        for worker in range(workers):
            s = load_f32(scales + worker * load_i64(row, SCALES_STRIDE), block, FLOAT32) / f32(workers)
            byte = load_u8(bits + worker * load_i64(row, BITS_STRIDE), i // 8)
            bit = i % 8
            a += _signed(byte, bit, s)
            b += _signed(byte, bit + 1, s)
            c += _signed(byte, bit + 2, s)
            d += _signed(byte, bit + 3, s)
    return a, b, c, d


@inlined
def _owed(row, u, i, end):
    """``u`` and the error that is added to it; zeros from ``end`` on."""
    e = load4(load_i64(row, ERROR), i, end, load_i64(row, ALIGNED), FLOAT32)
    zero = f32(0)
    return (
        u[0] + e[0] + zero if i < end else zero,
        u[1] + e[1] + zero if i + 1 < end else zero,
        u[2] + e[2] + zero if i + 2 < end else zero,
        u[3] + e[3] + zero if i + 3 < end else zero,
    )


@inlined
def _to_encode(row, i, end):
    return _owed(row, _contribution(row, i, end), i, end)


@inlined
def _to_recode(row, i, end):
    return _owed(row, _mean(row, i, end), i, end)


@inlined
def _absolute(c):
    a, b, d, e = f64(c[0]), f64(c[1]), f64(c[2]), f64(c[3])
    return abs(a) + abs(b) + abs(d) + abs(e), a * a + b * b + d * d + e * e


@inlined
def _scale(total, squares, count, which):
    mean_abs = total / count
    if which == MEAN_ABS:
        return f32(mean_abs)
    rms = math.sqrt(squares / count)
    return f32(rms if which == RMS else min(rms, GUARD * mean_abs))


@inlined
def _lost(c, s):
    return c + s if c < f32(0) else c - s


@inlined
def _write(row, c, s, i, end):
    """The bits of four elements, and what is lost of them."""
    nibble = (1 if c[0] < 0 else 0) | (2 if c[1] < 0 else 0) | (4 if c[2] < 0 else 0) | (8 if c[3] < 0 else 0)
    other = neighbour(nibble)
    if i % 8 == 0 and i < end:
        store_u8(load_i64(row, OUT_BITS), i // 8, u8(nibble | other << 4))
    if math.isfinite(s):
        lost = _lost(c[0], s), _lost(c[1], s), _lost(c[2], s), _lost(c[3], s)
        store4(load_i64(row, OUT_ERROR), i, end, load_i64(row, ALIGNED), lost)


def _compressor(source: Any, name: str) -> Any:
    """The kernel that compresses what ``source`` gives."""

    def compress(table, rows):
        row = _row(table, rows)
        block, block_size = cuda.blockIdx.x - load_i64(row, FIRST), load_i64(row, BLOCK_SIZE)
        start = block * block_size
        end = min(start + block_size, load_i64(row, SIZE))
        first = start + 4 * cuda.threadIdx.x
        step = 4 * cuda.blockDim.x
        c = source(row, first, end)
        total, squares = _absolute(c)
        for again in range(1, (end - start + step - 1) // step):
            more = _absolute(source(row, first + again * step, end))
            total += more[0]
            squares += more[1]
        total, squares = block_sums(total, squares)
        s = _scale(total, squares, end - start, load_i64(row, SCALE))
        _write(row, c, s, first, end)
        for again in range(1, (end - start + step - 1) // step):
            i = first + again * step
            _write(row, source(row, i, end), s, i, end)
        if cuda.threadIdx.x == 0:
            store_f32(load_i64(row, OUT_SCALES), block, s if math.isfinite(s) else f32(math.nan))

    compress.__name__ = compress.__qualname__ = name
    return compress


encode = _compressor(_to_encode, "encode")
recode = _compressor(_to_recode, "recode")


@inlined
def _element_of_tile(row):
    tile = cuda.blockIdx.x - load_i64(row, FIRST)
    return 4 * (tile * cuda.blockDim.x + cuda.threadIdx.x)


def restore(table, rows):
    """See ``reference.restore``."""
    row = _row(table, rows)
    i, end, aligned = _element_of_tile(row), load_i64(row, SIZE), load_i64(row, ALIGNED)
    if i >= end:
        return
    s = load_f32(load_i64(row, SCALES), i // load_i64(row, BLOCK_SIZE), FLOAT32)
    if math.isnan(s):
        return
    u = _contribution(row, i, end)
    e = load4(load_i64(row, ERROR), i, end, aligned, FLOAT32)
    byte, bit = load_u8(load_i64(row, BITS), i // 8), i % 8
    before = (
        (e[0] + _signed(byte, bit, s)) - u[0],
        (e[1] + _signed(byte, bit + 1, s)) - u[1],
        (e[2] + _signed(byte, bit + 2, s)) - u[2],
        (e[3] + _signed(byte, bit + 3, s)) - u[3],
    )
    store4(load_i64(row, ERROR), i, end, aligned, before)


def decode(table, rows):
    """The mean of the messages, into OUT_WEIGHT."""
    row = _row(table, rows)
    i, end = _element_of_tile(row), load_i64(row, SIZE)
    store4(load_i64(row, OUT_WEIGHT), i, end, load_i64(row, ALIGNED), _mean(row, i, end))


@inlined
def _moved(row, mean, m, v, w):
    """Momentum and weight after the step: see ``reference.apply``."""
    decayed, step = mul(_number(row, DECAY), w), _number(row, STEP_SIZE)
    if load_i64(row, VARIANCE) == 0:
        return mean, decayed + mul(_number(row, LOOK_BACK), m) - mul(step, mean)
    d = _denominator(v, _number(row, CORRECTION), _number(row, EPS), load_i64(row, EPS_INSIDE))
    if load_i64(row, UPDATE_SPACE) != 0:
        return mul(mean, d), decayed - mul(step, mean)
    return mean, decayed - mul(step, mean / d)


def apply(table, rows):
    """See ``reference.apply``."""
    row = _row(table, rows)
    i, end, aligned = _element_of_tile(row), load_i64(row, SIZE), load_i64(row, ALIGNED)
    if i >= end:
        return
    mean = _mean(row, i, end)
    v = m = (f32(0), f32(0), f32(0), f32(0))
    if load_i64(row, VARIANCE) != 0:
        v = load4(load_i64(row, VARIANCE), i, end, aligned, FLOAT32)
    else:
        m = load4(load_i64(row, MOMENTUM), i, end, aligned, FLOAT32)
    w = load4(load_i64(row, WEIGHT), i, end, aligned, FLOAT32)
    a = _moved(row, mean[0], m[0], v[0], w[0])
    b = _moved(row, mean[1], m[1], v[1], w[1])
    c = _moved(row, mean[2], m[2], v[2], w[2])
    d = _moved(row, mean[3], m[3], v[3], w[3])
    store4(load_i64(row, OUT_MOMENTUM), i, end, aligned, (a[0], b[0], c[0], d[0]))
    store4(load_i64(row, OUT_WEIGHT), i, end, aligned, (a[1], b[1], c[1], d[1]))


@inlined
def _layer(row, i, end):
    """Of four elements: the weights, and LAMB's update; see ``reference.squares``."""
    aligned = load_i64(row, ALIGNED)
    m = load4(load_i64(row, MOMENTUM), i, end, aligned, FLOAT32)
    v = load4(load_i64(row, VARIANCE), i, end, aligned, FLOAT32)
    w = load4(load_i64(row, WEIGHT), i, end, aligned, FLOAT32)
    u = (
        _layer_element(row, m[0], v[0], w[0]),
        _layer_element(row, m[1], v[1], w[1]),
        _layer_element(row, m[2], v[2], w[2]),
        _layer_element(row, m[3], v[3], w[3]),
    )
    return w, u


@inlined
def _layer_element(row, m, v, w):
    d = _denominator(v, _number(row, CORRECTION), _number(row, EPS), load_i64(row, EPS_INSIDE))
    return mul(m / d, _number(row, MOMENTUM_FACTOR)) + mul(_number(row, L2), w)


def squares(table, rows):
    """See ``reference.squares``; a thread block takes a chunk."""
    row = _row(table, rows)
    chunk = cuda.blockIdx.x - load_i64(row, FIRST)
    start = chunk * CHUNK
    end = min(start + CHUNK, load_i64(row, SIZE))
    of_weight, of_update = f64(0), f64(0)
    for i in range(start + 4 * cuda.threadIdx.x, end, 4 * cuda.blockDim.x):
        w, u = _layer(row, i, end)
        of_weight += _absolute(w)[1]
        of_update += _absolute(u)[1]
    of_weight, of_update = block_sums(of_weight, of_update)
    if cuda.threadIdx.x == 0:
        store_f64(load_i64(row, OUT_SCALES), 2 * chunk, of_weight)
        store_f64(load_i64(row, OUT_SCALES), 2 * chunk + 1, of_update)


def move(table, rows):
    """See ``reference.move``."""
    row = _row(table, rows)
    i, end = _element_of_tile(row), load_i64(row, SIZE)
    if i >= end:
        return
    w, u = _layer(row, i, end)
    decay, step = _number(row, DECAY), _number(row, STEP_SIZE)
    moved = (
        mul(decay, w[0]) - mul(step, u[0]),
        mul(decay, w[1]) - mul(step, u[1]),
        mul(decay, w[2]) - mul(step, u[2]),
        mul(decay, w[3]) - mul(step, u[3]),
    )
    store4(load_i64(row, WEIGHT), i, end, load_i64(row, ALIGNED), moved)


PROGRAMS = {
    "encode": encode,
    "recode": recode,
    "restore": restore,
    "decode": decode,
    "apply": apply,
    "squares": squares,
    "move": move,
}

"""What the programs are made of: four neighbours of a tensor, what a worker contributes, the mean of all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from horovod_onebit.kernels.cuda.device import (
    FLOAT32,
    constant_f32,
    constant_u8,
    inlined,
    load_some,
    load_vector,
    mul,
    signed,
)
from horovod_onebit.kernels.cuda.table import (
    ALIGNED,
    ANCHOR,
    BITS,
    BITS_STRIDE,
    BLOCK_SIZE,
    CLIP,
    CORRECTION,
    DECAY,
    EPS_INSIDE,
    EPS_OUTSIDE,
    ERROR,
    GRAD_FACTOR,
    GRADIENT,
    KIND,
    L2,
    MOMENTUM,
    MOMENTUM_FACTOR,
    SCALES,
    SCALES_STRIDE,
    SHARE,
    SHIFT,
    VARIANCE,
    WEIGHT,
    WORKERS,
)
from horovod_onebit.kernels.reference import TINY

f32, f64 = np.float32, np.float64


@inlined
def has_vectors(row, i, end):
    """Whether elements ``i`` to ``i + 3`` are all there, and where vectors may be."""
    return row[ALIGNED] != 0 and i + 4 <= end


@inlined
def load(address, i, end, vectors):
    """Four elements of a float32 tensor; zeros from ``end`` on, and if there is no such tensor."""
    if address == 0:
        return f32(0), f32(0), f32(0), f32(0)
    if vectors:
        return load_vector(address, i, FLOAT32)
    return load_some(address, i, end, FLOAT32)


@inlined
def load_gradient(row, i, end, vectors):
    """As ``load``, of a gradient of whatever kind of numbers."""
    if vectors:
        return load_vector(row[GRADIENT], i, row[KIND])
    return load_some(row[GRADIENT], i, end, row[KIND])


def of_four(function: Any) -> Any:
    """``function(row, a, b, c, d)`` of four elements, each argument a tuple of four."""

    @inlined
    def four(row, a, b, c, d):
        return (
            function(row, a[0], b[0], c[0], d[0]),
            function(row, a[1], b[1], c[1], d[1]),
            function(row, a[2], b[2], c[2], d[2]),
            function(row, a[3], b[3], c[3], d[3]),
        )

    return four


@inlined
def denominator(row, v):
    """See ``reference.denominator``; NaN stays NaN."""
    d = f32(math.sqrt(mul(v, row[CORRECTION]) + row[EPS_INSIDE])) + row[EPS_OUTSIDE]
    return TINY if d < TINY else d


@inlined
def clipped(row, u):
    clip = row[CLIP]
    u = -clip if u < -clip else u
    return clip if u > clip else u


@inlined
def moment(row, g, m, w):
    """The momentum that this worker alone would have: see ``reference.contribution``; without weights, they are 0."""
    return mul(row[MOMENTUM_FACTOR], m) + mul(row[GRAD_FACTOR], g + mul(row[L2], w))


@inlined
def _contributed(row, g, m, v, w):
    of_all = moment(row, g, m, w)
    return clipped(row, of_all / denominator(row, v)) + mul(of_all, f32(0))


@inlined
def _contributed_moment(row, g, m, v, w):
    return moment(row, g, m, w)


_contributed4, _contributed_moment4 = of_four(_contributed), of_four(_contributed_moment)


@inlined
def contribution(row, i, end, vectors):
    """Of four elements: see ``reference.contribution``."""
    g, m = load_gradient(row, i, end, vectors), load(row[MOMENTUM], i, end, vectors)
    v, w = load(row[VARIANCE], i, end, vectors), load(row[WEIGHT], i, end, vectors)
    return _contributed_moment4(row, g, m, v, w) if row[VARIANCE] == 0 else _contributed4(row, g, m, v, w)


@inlined
def _displaced(row, w, anchor, v, unused):
    return mul(w - mul(row[DECAY], anchor), denominator(row, v))


@inlined
def _displaced_weight(row, w, anchor, v, unused):
    return w - mul(row[DECAY], anchor)


_displaced4, _displaced_weight4 = of_four(_displaced), of_four(_displaced_weight)


@inlined
def displacement(row, i, end, vectors):
    """Of four elements: see ``reference.displacement``."""
    w, anchor = load(row[WEIGHT], i, end, vectors), load(row[ANCHOR], i, end, vectors)
    v = load(row[VARIANCE], i, end, vectors)
    return _displaced_weight4(row, w, anchor, v, v) if row[VARIANCE] == 0 else _displaced4(row, w, anchor, v, v)


@inlined
def block_of(row, i):
    """The number of the block that element ``i`` is in."""
    shift = row[SHIFT]
    return i >> shift if shift >= 0 else i // row[BLOCK_SIZE]


@inlined
def mean(row, i, end, vectors):
    """The mean of the workers' messages, in rank order: see ``reference.decode_mean``."""
    a = b = c = d = f32(0)
    if i < end:
        workers, share = row[WORKERS], row[SHARE]
        scale, bits = row[SCALES] + 4 * block_of(row, i), row[BITS] + (i >> 3)
        first = i & 7
        for _ in range(workers):
            s = constant_f32(scale, 0)
            s = mul(s, share) if share != 0 else s / f32(workers)
            byte = constant_u8(bits, 0)
            a += signed(s, byte, first)
            b += signed(s, byte, first + 1)
            c += signed(s, byte, first + 2)
            d += signed(s, byte, first + 3)
            scale += row[SCALES_STRIDE]
            bits += row[BITS_STRIDE]
    return a, b, c, d


@inlined
def owing(row, u, i, end, vectors):
    """``u`` and the error that is added to it; zeros from ``end`` on."""
    e, zero = load(row[ERROR], i, end, vectors), f32(0)
    if i + 4 <= end:
        return u[0] + e[0] + zero, u[1] + e[1] + zero, u[2] + e[2] + zero, u[3] + e[3] + zero
    return (
        u[0] + e[0] + zero if i < end else zero,
        u[1] + e[1] + zero if i + 1 < end else zero,
        u[2] + e[2] + zero if i + 2 < end else zero,
        zero,
    )


@inlined
def absolute_sums(c):
    """Of four elements: the sums of their absolute values and of their squares, in float64."""
    a, b, d, e = f64(c[0]), f64(c[1]), f64(c[2]), f64(c[3])
    return abs(a) + abs(b) + abs(d) + abs(e), a * a + b * b + d * d + e * e

"""The kernels: one pass over memory each, over many tensors in one launch (see ``table``).

A thread works on four neighbours at a time, and on ``PARTS`` such groups, so that what a thread does once is shared by
many elements. Where a scale is needed, a thread block works on one block of the tensor; its elements stay in registers
between the sum and the signs (blocks of more elements than that are read twice).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from horovod_onebit.kernels.cuda.device import (
    FLOAT32,
    block_sums,
    byte_of,
    constant_f32,
    constant_u8,
    inlined,
    mul,
    neighbour,
    nibble,
    signed,
    store4,
    store_f32,
    store_f64,
    store_u8,
)
from horovod_onebit.kernels.cuda.elements import (
    absolute_sums,
    block_of,
    clipped,
    contribution,
    denominator,
    displacement,
    has_vectors,
    load,
    load_gradient,
    mean,
    moment,
    of_four,
    owing,
)
from horovod_onebit.kernels.cuda.table import (
    ANCHOR,
    BITS,
    BLOCK_SIZE,
    DECAY,
    ERROR,
    FIRST,
    GRAD_FACTOR,
    L2,
    LOOK_BACK,
    MOMENTUM,
    MOMENTUM_FACTOR,
    OUT_BITS,
    OUT_ERROR,
    OUT_MOMENTUM,
    OUT_SCALES,
    OUT_WEIGHT,
    PORTION,
    SCALE,
    SCALES,
    SIZE,
    STEP_SIZE,
    UPDATE_SPACE,
    VARIANCE,
    WEIGHT,
    row_of,
)
from horovod_onebit.kernels.reference import CHUNK, GUARD

__all__ = ["FLOAT32", "PARTS", "PROGRAMS"]

f32, f64 = np.float32, np.float64
RMS = 0  # the other is guarded
PARTS = 4  # ``_compressor`` has them written out


@inlined
def _scale(row, total, squares, count):
    portion = f64(row[PORTION])
    if portion != 0 and count == row[BLOCK_SIZE]:  # a multiplication is exact, and much shorter
        mean_abs, mean_square = total * portion, squares * portion
    else:
        mean_abs, mean_square = total / f64(count), squares / f64(count)
    rms = math.sqrt(mean_square)
    return f32(rms if row[SCALE] == RMS else min(rms, GUARD * mean_abs))


@inlined
def _lost(c, s):
    return c - (-s if c < f32(0) else s)


@inlined
def _write(row, c, s, i, end):
    """The bits of four elements, and what is lost of them."""
    own = nibble(c)
    other = neighbour(own)
    if i & 7 == 0 and i < end:
        store_u8(row[OUT_BITS], i >> 3, byte_of(own, other))
    if math.isfinite(s):
        lost = _lost(c[0], s), _lost(c[1], s), _lost(c[2], s), _lost(c[3], s)
        store4(row[OUT_ERROR], i, end, has_vectors(row, i, end), lost)


def _compressor(source: Any, name: str) -> Any:
    """The kernel that compresses what ``source`` gives."""

    @inlined
    def owed(row, i, end):
        if i >= end:
            return f32(0), f32(0), f32(0), f32(0)
        vectors = has_vectors(row, i, end)
        return owing(row, source(row, i, end, vectors), i, end, vectors)

    def compress(table, rows):
        row = row_of(table, rows)
        block, block_size = cuda.blockIdx.x - row[FIRST], row[BLOCK_SIZE]
        start = block * block_size
        end = min(start + block_size, row[SIZE])
        own, step = 4 * cuda.threadIdx.x, 4 * cuda.blockDim.x
        i = start + own
        a, b = owed(row, i, end), owed(row, i + step, end)
        c, d = owed(row, i + 2 * step, end), owed(row, i + 3 * step, end)
        total, squares = absolute_sums(a)
        for part in (b, c, d):
            sums = absolute_sums(part)
            total += sums[0]
            squares += sums[1]
        base = start + PARTS * step
        while base < end:
            sums = absolute_sums(owed(row, base + own, end))
            total += sums[0]
            squares += sums[1]
            base += step
        total, squares = block_sums(total, squares)
        s = _scale(row, total, squares, end - start)
        _write(row, a, s, i, end)
        _write(row, b, s, i + step, end)
        _write(row, c, s, i + 2 * step, end)
        _write(row, d, s, i + 3 * step, end)
        base = start + PARTS * step
        while base < end:
            _write(row, owed(row, base + own, end), s, base + own, end)
            base += step
        if cuda.threadIdx.x == 0:
            store_f32(row[OUT_SCALES], block, s if math.isfinite(s) else f32(math.nan))

    compress.__name__ = compress.__qualname__ = name
    return compress


def _restorer(source: Any, name: str) -> Any:
    """The kernel that takes back what that of ``_compressor(source)`` did: see ``reference.restore``."""

    @inlined
    def restore4(row, i, end, vectors):
        s = constant_f32(row[SCALES], block_of(row, i))
        if math.isnan(s):
            return
        u, e = source(row, i, end, vectors), load(row[ERROR], i, end, vectors)
        byte, bit = constant_u8(row[BITS], i >> 3), i & 7
        before = (
            (e[0] + signed(s, byte, bit)) - u[0],
            (e[1] + signed(s, byte, bit + 1)) - u[1],
            (e[2] + signed(s, byte, bit + 2)) - u[2],
            (e[3] + signed(s, byte, bit + 3)) - u[3],
        )
        store4(row[ERROR], i, end, vectors, before)

    return _by_parts(restore4, name)


def _by_parts(work: Any, name: str) -> Any:
    """The kernel that does ``work(row, i, end, vectors)`` on all groups of four, whatever their order."""

    def tile(table, rows):
        row = row_of(table, rows)
        end, step = row[SIZE], 4 * cuda.blockDim.x
        i = (cuda.blockIdx.x - row[FIRST]) * (PARTS * step) + 4 * cuda.threadIdx.x
        for _ in range(PARTS):
            if i < end:
                work(row, i, end, has_vectors(row, i, end))
            i += step

    tile.__name__ = tile.__qualname__ = name
    return tile


@inlined
def _decode(row, i, end, vectors):
    """The mean of the messages, into OUT_WEIGHT."""
    store4(row[OUT_WEIGHT], i, end, vectors, mean(row, i, end, vectors))


@inlined
def _store_both(row, i, end, vectors, moved):
    """Momentum and weight of four elements, which are the pairs in ``moved``."""
    a, b, c, d = moved
    store4(row[OUT_MOMENTUM], i, end, vectors, (a[0], b[0], c[0], d[0]))
    store4(row[OUT_WEIGHT], i, end, vectors, (a[1], b[1], c[1], d[1]))


@inlined
def _moved_in_update_space(row, x, m, v, w):
    return mul(x, denominator(row, v)), mul(row[DECAY], w) - mul(row[STEP_SIZE], x)


@inlined
def _moved_in_momentum_space(row, x, m, v, w):
    return x, mul(row[DECAY], w) - mul(row[STEP_SIZE], x / denominator(row, v))


@inlined
def _moved_plainly(row, x, m, v, w):
    return x, mul(row[DECAY], w) + mul(row[LOOK_BACK], m) - mul(row[STEP_SIZE], x)


_in_update_space, _in_momentum_space = of_four(_moved_in_update_space), of_four(_moved_in_momentum_space)
_plainly = of_four(_moved_plainly)


@inlined
def _apply(row, i, end, vectors):
    """See ``reference.apply``."""
    v, w = load(row[VARIANCE], i, end, vectors), load(row[WEIGHT], i, end, vectors)
    x = mean(row, i, end, vectors)
    if row[VARIANCE] == 0:
        _store_both(row, i, end, vectors, _plainly(row, x, load(row[MOMENTUM], i, end, vectors), v, w))
    elif row[UPDATE_SPACE] != 0:
        _store_both(row, i, end, vectors, _in_update_space(row, x, x, v, w))
    else:
        _store_both(row, i, end, vectors, _in_momentum_space(row, x, x, v, w))


@inlined
def _moved_by_gradient(row, x, m, v, w):
    d = denominator(row, v)
    g = mul(x, d) if row[UPDATE_SPACE] != 0 else x
    after = mul(row[MOMENTUM_FACTOR], m) + mul(row[GRAD_FACTOR], g)
    return after, mul(row[DECAY], w) - mul(row[STEP_SIZE], after / d)


@inlined
def _moved_locally(row, g, m, v, w):
    after = moment(row, g, m, w)
    update = clipped(row, after / denominator(row, v))
    return after, mul(row[DECAY], w) - mul(row[STEP_SIZE], update)


@inlined
def _taken_over(row, x, m, v, anchor):
    d, rates = denominator(row, v), row[STEP_SIZE]
    moved = x if row[UPDATE_SPACE] != 0 else x / d
    after = mul(moved, d) / -rates if rates > f32(0) else m
    return after, mul(row[DECAY], anchor) + moved


_by_gradient, _locally, _over = of_four(_moved_by_gradient), of_four(_moved_locally), of_four(_taken_over)


@inlined
def _apply_gradient(row, i, end, vectors):
    """See ``reference.apply_gradient``."""
    m, v = load(row[MOMENTUM], i, end, vectors), load(row[VARIANCE], i, end, vectors)
    w, x = load(row[WEIGHT], i, end, vectors), mean(row, i, end, vectors)
    _store_both(row, i, end, vectors, _by_gradient(row, x, m, v, w))


@inlined
def _local_step(row, i, end, vectors):
    """See ``reference.local_step``."""
    g, m = load_gradient(row, i, end, vectors), load(row[MOMENTUM], i, end, vectors)
    v, w = load(row[VARIANCE], i, end, vectors), load(row[WEIGHT], i, end, vectors)
    _store_both(row, i, end, vectors, _locally(row, g, m, v, w))


@inlined
def _take_over(row, i, end, vectors):
    """See ``reference.take_over``."""
    m, v = load(row[MOMENTUM], i, end, vectors), load(row[VARIANCE], i, end, vectors)
    anchor, x = load(row[ANCHOR], i, end, vectors), mean(row, i, end, vectors)
    _store_both(row, i, end, vectors, _over(row, x, m, v, anchor))


@inlined
def _layer_element(row, m, v, w, unused):
    return mul(m / denominator(row, v), row[MOMENTUM_FACTOR]) + mul(row[L2], w)


@inlined
def _layer_moved(row, u, w, unused, as_well):
    return mul(row[DECAY], w) - mul(row[STEP_SIZE], u)


_layer_update, _move_by = of_four(_layer_element), of_four(_layer_moved)


@inlined
def _layer(row, i, end, vectors):
    """Of four elements: the weights, and LAMB's update; see ``reference.squares``."""
    m, v = load(row[MOMENTUM], i, end, vectors), load(row[VARIANCE], i, end, vectors)
    w = load(row[WEIGHT], i, end, vectors)
    return w, _layer_update(row, m, v, w, w)


def squares(table, rows):
    """See ``reference.squares``; a thread block takes a chunk."""
    row = row_of(table, rows)
    chunk = cuda.blockIdx.x - row[FIRST]
    start = chunk * CHUNK
    end = min(start + CHUNK, row[SIZE])
    of_weight, of_update = f64(0), f64(0)
    for i in range(start + 4 * cuda.threadIdx.x, end, 4 * cuda.blockDim.x):
        w, u = _layer(row, i, end, has_vectors(row, i, end))
        of_weight += absolute_sums(w)[1]
        of_update += absolute_sums(u)[1]
    of_weight, of_update = block_sums(of_weight, of_update)
    if cuda.threadIdx.x == 0:
        store_f64(row[OUT_SCALES], 2 * chunk, of_weight)
        store_f64(row[OUT_SCALES], 2 * chunk + 1, of_update)


@inlined
def _move(row, i, end, vectors):
    """See ``reference.move``."""
    w, u = _layer(row, i, end, vectors)
    store4(row[WEIGHT], i, end, vectors, _move_by(row, u, w, w, w))


PROGRAMS = {
    "encode": _compressor(contribution, "encode"),
    "encode_moved": _compressor(displacement, "encode_moved"),
    "recode": _compressor(mean, "recode"),
    "restore": _restorer(contribution, "restore"),
    "restore_moved": _restorer(displacement, "restore_moved"),
    "decode": _by_parts(_decode, "decode"),
    "apply": _by_parts(_apply, "apply"),
    "apply_gradient": _by_parts(_apply_gradient, "apply_gradient"),
    "local_step": _by_parts(_local_step, "local_step"),
    "take_over": _by_parts(_take_over, "take_over"),
    "squares": squares,
    "move": _by_parts(_move, "move"),
}

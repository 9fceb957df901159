"""The loops for GPUs: one pass over device memory each, over many tensors in one launch.

A launch is about a table in device memory, a row for each tensor. A thread works on four neighbours at a time, and on
``PARTS`` such groups, so that what a thread does once is shared by many elements. Where a scale is needed, a thread
block works on one block of the tensor; its elements stay in registers between the sum and the codes (blocks of more
elements than that are read twice).

``program`` binds the formulas of rules and codecs to the loops.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from horovod_onebit.codecs import Codec
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.formulas import OF_ONE, Formula, Multiplications, alive, bound, forgetting, label, resting
from horovod_onebit.kernels.cuda.device import (
    FLOAT32,
    SIMULATED,
    block_sums,
    block_sums_of_three,
    byte_of,
    constant_f32,
    constant_i64,
    constant_u8,
    inlined,
    load_some,
    load_vector,
    mul,
    neighbour,
    store4,
    store_f32,
    store_f64,
    store_u8,
)
from horovod_onebit.kernels.reference import CHUNK
from horovod_onebit.kernels.toolchain import cuda

f32, f64, u8, i32, u32 = np.float32, np.float64, np.uint8, np.int32, np.uint32
PARTS = 4  # ``_compressor`` has them written out


class Column(IntEnum):
    """A row of the table. FIRST is the row's first thread block; GRADIENT to OUT are addresses, 0 for none.

    ROWS is where the first worker's records are, and OUT where this worker's are to be, or what a loop writes instead.
    Whole numbers have 64 bits; from SHARE on, numbers are float32.
    """

    FIRST = 0
    SIZE = 1
    BLOCK_SIZE = 2
    SHIFT = 3  # the logarithm of the block size; -1 if that is no power of two
    WORKERS = 4
    STRIDE = 5  # bytes from a worker's message to the next one's
    RECORD = 6  # bytes of a record in ROWS
    OUT_RECORD = 7  # the same in OUT
    KIND = 8  # of numbers that the gradient is in
    ALIGNED = 9  # all addresses of tensors are multiples of 16
    GRADIENT = 10
    MOMENTUM = 11
    VARIANCE = 12
    WEIGHT = 13
    ANCHOR = 14
    RESIDUAL = 15
    NEW_RESIDUAL = 16
    ROWS = 17
    OUT = 18
    PADDING = 19  # rows are multiples of 16 bytes
    SHARE = 20  # 1 / WORKERS, and 1 / BLOCK_SIZE: where a multiplication by it is exact, else 0
    PORTION = 21
    GUARD = 22
    SCALARS = 23  # the formula's, as many as there are


_ROW = struct.Struct("<20q16f")
pack, ROW_BYTES = _ROW.pack, _ROW.size
WIDTH = ROW_BYTES // 8
EMPTY = (0,) * 20 + (0.0,) * 16
"""A row of no tensor."""
MOST_SCALARS = len(EMPTY) - Column.SCALARS

(FIRST, SIZE, BLOCK_SIZE, SHIFT, WORKERS, STRIDE, RECORD, OUT_RECORD, KIND, ALIGNED, GRADIENT, MOMENTUM, VARIANCE,
 WEIGHT, ANCHOR, RESIDUAL, NEW_RESIDUAL, ROWS, OUT, _, SHARE, PORTION, GUARD, SCALARS) = map(int, Column)  # fmt: skip


@inlined
def _row_of(table, rows):
    """The row of this thread block: the last whose FIRST is not beyond it. A tuple: ``row[SIZE]``, ``row[GUARD]``.

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
        constant_i64(at, 0), constant_i64(at, 1), constant_i64(at, 2), constant_i64(at, 3), constant_i64(at, 4),
        constant_i64(at, 5), constant_i64(at, 6), constant_i64(at, 7), constant_i64(at, 8), constant_i64(at, 9),
        constant_i64(at, 10), constant_i64(at, 11), constant_i64(at, 12), constant_i64(at, 13), constant_i64(at, 14),
        constant_i64(at, 15), constant_i64(at, 16), constant_i64(at, 17), constant_i64(at, 18), constant_i64(at, 19),
        constant_f32(at, 40), constant_f32(at, 41), constant_f32(at, 42), constant_f32(at, 43), constant_f32(at, 44),
        constant_f32(at, 45), constant_f32(at, 46), constant_f32(at, 47), constant_f32(at, 48), constant_f32(at, 49),
        constant_f32(at, 50), constant_f32(at, 51), constant_f32(at, 52), constant_f32(at, 53), constant_f32(at, 54),
        constant_f32(at, 55),
    )  # fmt: skip


NAMES = {"absolute": abs, "mul": mul, "sqrt": np.sqrt if SIMULATED else math.sqrt}
NAMES |= {name: inlined(function) for name, function in OF_ONE.items()}


@cache
def _formula(function: Formula, *, fused: bool = False) -> Any:
    """``fused`` lets the compiler fuse multiplications: in float64, where nothing is compared bit by bit."""
    return bound(function, NAMES, inlined, None if fused else Multiplications())


_alive = _formula(alive)


@inlined
def _has_vectors(row, i, end):
    """Whether elements ``i`` to ``i + 3`` are all there, and where vectors may be."""
    return row[ALIGNED] != 0 and i + 4 <= end


@inlined
def _load(address, i, end, vectors):
    """Four elements of a float32 tensor; zeros from ``end`` on, and if there is no such tensor."""
    if address == 0:
        return f32(0), f32(0), f32(0), f32(0)
    if vectors:
        return load_vector(address, i, FLOAT32)
    return load_some(address, i, end, FLOAT32)


@inlined
def _load_gradient(row, i, end, vectors):
    """As ``_load``, of a gradient of whatever kind of numbers."""
    if row[GRADIENT] == 0:
        return f32(0), f32(0), f32(0), f32(0)
    if vectors:
        return load_vector(row[GRADIENT], i, row[KIND])
    return load_some(row[GRADIENT], i, end, row[KIND])


@inlined
def _put4(address, i, end, vectors, a, b, c, d):
    """Four elements where they belong; None stays as it is."""
    if a is not None:
        store4(address, i, end, vectors, (a, b, c, d))


@inlined
def _block_of(row, i):
    """The number of the block that element ``i`` is in."""
    shift = row[SHIFT]
    return i >> shift if shift >= 0 else i // row[BLOCK_SIZE]


@inlined
def _width(row, start):
    """Bytes of a bit plane of the block that begins at ``start``."""
    return (min(row[BLOCK_SIZE], row[SIZE] - start) + 7) >> 3


def _reader(function: Formula, kind: type) -> Any:
    """What a formula gives for four neighbours, whose gradients are given or loaded."""
    formula, count = _formula(function), len(kind._fields)  # type: ignore[attr-defined]
    if count > MOST_SCALARS:
        raise ConfigurationError(f"{label(function)} has {count} scalars; the CUDA kernels know {MOST_SCALARS}")
    stop = SCALARS + count

    @inlined
    def of(row, g, i, end, vectors):
        p = kind(*row[SCALARS:stop])
        m, v = _load(row[MOMENTUM], i, end, vectors), _load(row[VARIANCE], i, end, vectors)
        w, a = _load(row[WEIGHT], i, end, vectors), _load(row[ANCHOR], i, end, vectors)
        return (
            formula(p, g[0], m[0], v[0], w[0], a[0]),
            formula(p, g[1], m[1], v[1], w[1], a[1]),
            formula(p, g[2], m[2], v[2], w[2], a[2]),
            formula(p, g[3], m[3], v[3], w[3], a[3]),
        )

    return of


def _loaded(function: Formula, kind: type) -> Any:
    """The same, of a gradient in memory."""
    of = _reader(function, kind)

    @inlined
    def source(row, i, end, vectors):
        return of(row, _load_gradient(row, i, end, vectors), i, end, vectors)

    return source


@cache
def _decoder(codec: Codec) -> Any:
    """What one record stands for, in four neighbours: ``number`` is that of the first in its block."""
    value, bits = _formula(codec.value), codec.bits

    @inlined
    def values(codes, width, number, s):
        """``codes`` is the address of the first plane."""
        a = b = c = d = u32(0)
        for plane in range(bits):
            byte = u32(constant_u8(codes + plane * width, number >> 3)) >> u32(number & 7)
            a |= (byte & u32(1)) << u32(plane)
            b |= ((byte >> u32(1)) & u32(1)) << u32(plane)
            c |= ((byte >> u32(2)) & u32(1)) << u32(plane)
            d |= ((byte >> u32(3)) & u32(1)) << u32(plane)
        return value(a, s), value(b, s), value(c, s), value(d, s)

    return values


@cache
def _averager(codec: Codec) -> Any:
    """The mean of the workers' messages, in rank order: see ``reference.decode_mean``."""
    values = _decoder(codec)

    @inlined
    def mean(row, i, end, vectors):
        a = b = c = d = f32(0)
        if i < end:
            workers, share, block = row[WORKERS], row[SHARE], _block_of(row, i)
            start = block * row[BLOCK_SIZE]
            width, record = _width(row, start), row[ROWS] + block * row[RECORD]
            for _ in range(workers):
                s = constant_f32(record, 0)
                s = mul(s, share) if share != 0 else s / f32(workers)
                x = values(record + 4, width, i - start, s)
                a += x[0]
                b += x[1]
                c += x[2]
                d += x[3]
                record += row[STRIDE]
        return a, b, c, d

    return mean


@inlined
def _residual(row, i, end, vectors):
    return _load(row[RESIDUAL], i, end, vectors)


@inlined
def _residual_of_resting(row, i, end, vectors):
    """Zeros of elements that move."""
    zeros = f32(0), f32(0), f32(0), f32(0)
    if not _some_rest(row, i, end, vectors):
        return zeros
    return _kept_of(row, zeros, _load(row[RESIDUAL], i, end, vectors), i, end, vectors)


@inlined
def _with_residual(u, e, i, end):
    """``u`` and the residual ``e`` that is added to it; zeros from ``end`` on."""
    zero = f32(0)
    if i + 4 <= end:
        return u[0] + e[0] + zero, u[1] + e[1] + zero, u[2] + e[2] + zero, u[3] + e[3] + zero
    return (
        u[0] + e[0] + zero if i < end else zero,
        u[1] + e[1] + zero if i + 1 < end else zero,
        u[2] + e[2] + zero if i + 2 < end else zero,
        zero,
    )


@inlined
def _absolute_sums(c):
    """Of four elements: the sums of their absolute values and of their squares, in float64."""
    a, b, d, e = f64(c[0]), f64(c[1]), f64(c[2]), f64(c[3])
    return abs(a) + abs(b) + abs(d) + abs(e), a * a + b * b + d * d + e * e


def _scaler(codec: Codec, *, rests: bool) -> Any:
    """The scale of a block, of this thread's sums and, if elements may rest, of how many of its elements move."""
    scale = _formula(codec.scale, fused=True)

    @inlined
    def scaled(row, total, squares, count, size):
        if rests:
            total, squares, moving = block_sums_of_three(total, squares, f64(count))
            number = max(moving, f64(1))
        else:
            total, squares = block_sums(total, squares)
            number = f64(size)
        portion = f64(row[PORTION])
        if portion != 0 and number == f64(row[BLOCK_SIZE]):  # a multiplication is exact, and much shorter
            return f32(scale(total * portion, squares * portion, f64(row[GUARD])))
        return f32(scale(total / number, squares / number, f64(row[GUARD])))

    return scaled


@inlined
def _sent_of(row, c, i, end, vectors):
    """What is compressed of ``c``, zeros of elements that rest (NaN stays NaN), and how many do not."""
    v, one, zero = _load(row[VARIANCE], i, end, vectors), f32(1), f32(0)
    p, q = one if _alive(v[0]) else zero, one if _alive(v[1]) else zero
    r, s = one if _alive(v[2]) else zero, one if _alive(v[3]) else zero
    sent = mul(c[0], p) + zero, mul(c[1], q) + zero, mul(c[2], r) + zero, mul(c[3], s) + zero
    return sent[0], sent[1], sent[2], sent[3], (p + q) + (r + s)


@inlined
def _some_rest(row, i, end, vectors):
    v = _load(row[VARIANCE], i, end, vectors)
    return not (_alive(v[0]) and _alive(v[1]) and _alive(v[2]) and _alive(v[3]))


@inlined
def _kept_of(row, lost, rest, i, end, vectors):
    """``lost`` of elements that move, ``rest`` of those that rest."""
    v = _load(row[VARIANCE], i, end, vectors)
    return (
        lost[0] if _alive(v[0]) else rest[0],
        lost[1] if _alive(v[1]) else rest[1],
        lost[2] if _alive(v[2]) else rest[2],
        lost[3] if _alive(v[3]) else rest[3],
    )


def _writer(codec: Codec, rest: Any, *, forgets: bool = False) -> Any:
    """The codes of four elements, and what is lost of them; of those that rest, ``rest`` gives what is kept. With
    ``forgets``, nothing is kept of others."""
    code, value, bits = _formula(codec.code), _formula(codec.value), codec.bits

    @inlined
    def write(row, c, s, record, width, start, i, end):
        finite = math.isfinite(s)
        one, two, three, four = code(c[0], s), code(c[1], s), code(c[2], s), code(c[3], s)
        for plane in range(bits):
            shift, bit = u32(plane), u32(1)
            own = (one >> shift) & bit | ((two >> shift) & bit) << bit
            own |= ((three >> shift) & bit) << u32(2) | ((four >> shift) & bit) << u32(3)
            nibble = i32(own) if finite else i32(0)
            other = neighbour(nibble)
            if i & 7 == 0 and i < end:
                store_u8(record + 4 + plane * width, (i - start) >> 3, byte_of(nibble, other))
        if not finite:
            return
        vectors = _has_vectors(row, i, end)
        rests = rest is not None and i < end and _some_rest(row, i, end, vectors)
        if forgets:
            if rests:
                kept = _kept_of(row, _load(row[RESIDUAL], i, end, vectors), rest(row, i, end), i, end, vectors)
                store4(row[NEW_RESIDUAL], i, end, vectors, kept)
        else:
            lost = c[0] - value(one, s), c[1] - value(two, s), c[2] - value(three, s), c[3] - value(four, s)
            if rests:
                lost = _kept_of(row, lost, rest(row, i, end), i, end, vectors)
            store4(row[NEW_RESIDUAL], i, end, vectors, lost)

    return write


def _compressor(source: Any, codec: Codec, *, rests: bool = False, forgets: bool = False) -> Any:
    """The loop that compresses what ``source`` gives; ``rests``: elements may rest; ``forgets``: the residual is
    theirs alone."""
    waiting = _residual_of_resting if forgets else _residual

    @inlined
    def whole(row, i, end):
        if i >= end:
            return f32(0), f32(0), f32(0), f32(0), f32(0)
        vectors = _has_vectors(row, i, end)
        c = _with_residual(source(row, i, end, vectors), waiting(row, i, end, vectors), i, end)
        return c[0], c[1], c[2], c[3], f32(0)

    @inlined
    def moving(row, i, end):
        if i >= end:
            return f32(0), f32(0), f32(0), f32(0), f32(0)
        return _sent_of(row, whole(row, i, end), i, end, _has_vectors(row, i, end))

    value = moving if rests else whole
    scaled, bits = _scaler(codec, rests=rests), codec.bits
    write = _writer(codec, whole if rests else None, forgets=forgets)

    def loop(table, rows):
        row = _row_of(table, rows)
        block, block_size = cuda.blockIdx.x - row[FIRST], row[BLOCK_SIZE]
        start = block * block_size
        end = min(start + block_size, row[SIZE])
        own, step = 4 * cuda.threadIdx.x, 4 * cuda.blockDim.x
        i = start + own
        a, b = value(row, i, end), value(row, i + step, end)
        c, d = value(row, i + 2 * step, end), value(row, i + 3 * step, end)
        total, squares = _absolute_sums(a)
        for part in (b, c, d):
            sums = _absolute_sums(part)
            total += sums[0]
            squares += sums[1]
        count = (a[4] + b[4]) + (c[4] + d[4])
        base = start + PARTS * step
        while base < end:
            part = value(row, base + own, end)
            sums = _absolute_sums(part)
            total += sums[0]
            squares += sums[1]
            count += part[4]
            base += step
        s = scaled(row, total, squares, count, end - start)
        record, width = row[OUT] + block * row[OUT_RECORD], _width(row, start)
        write(row, a, s, record, width, start, i, end)
        write(row, b, s, record, width, start, i + step, end)
        write(row, c, s, record, width, start, i + 2 * step, end)
        write(row, d, s, record, width, start, i + 3 * step, end)
        base = start + PARTS * step
        while base < end:
            write(row, value(row, base + own, end), s, record, width, start, base + own, end)
            base += step
        if cuda.threadIdx.x == 0:
            store_f32(record, 0, s if math.isfinite(s) else f32(math.nan))
            for k in range(bits * width, (bits * width + 3) // 4 * 4):
                store_u8(record + 4, k, u8(0))

    return loop


def _restorer(source: Any, codec: Codec, *, rests: bool = False, forgets: bool = False) -> Any:
    """The loop that takes back what that of ``_compressor(source)`` did: see ``reference.restore``."""
    values = _decoder(codec)

    @inlined
    def work(row, i, end, vectors):
        block = _block_of(row, i)
        start, record = block * row[BLOCK_SIZE], row[ROWS] + block * row[RECORD]
        s = constant_f32(record, 0)
        if math.isnan(s):
            return
        u, e = source(row, i, end, vectors), _load(row[RESIDUAL], i, end, vectors)
        x = values(record + 4, _width(row, start), i - start, s)
        if rests:
            x = _kept_of(row, x, (f32(0), f32(0), f32(0), f32(0)), i, end, vectors)
        before = (e[0] + x[0]) - u[0], (e[1] + x[1]) - u[1], (e[2] + x[2]) - u[2], (e[3] + x[3]) - u[3]
        if forgets:
            before = _kept_of(row, e, before, i, end, vectors)
        store4(row[RESIDUAL], i, end, vectors, before)

    return _by_parts(work)


def _by_parts(work: Any) -> Any:
    """The loop that does ``work(row, i, end, vectors)`` on all groups of four, whatever their order."""

    def loop(table, rows):
        row = _row_of(table, rows)
        end, step = row[SIZE], 4 * cuda.blockDim.x
        i = (cuda.blockIdx.x - row[FIRST]) * (PARTS * step) + 4 * cuda.threadIdx.x
        for _ in range(PARTS):
            if i < end:
                work(row, i, end, _has_vectors(row, i, end))
            i += step

    return loop


@inlined
def _put_moved(row, i, end, vectors, moved):
    a, b, c, d = moved
    _put4(row[MOMENTUM], i, end, vectors, a[0], b[0], c[0], d[0])
    _put4(row[VARIANCE], i, end, vectors, a[1], b[1], c[1], d[1])
    _put4(row[WEIGHT], i, end, vectors, a[2], b[2], c[2], d[2])


def _mover(source: Any) -> Any:
    @inlined
    def work(row, i, end, vectors):
        _put_moved(row, i, end, vectors, source(row, i, end, vectors))

    return _by_parts(work)


def _applier(of: Any, codec: Codec) -> Any:
    mean = _averager(codec)

    @inlined
    def work(row, i, end, vectors):
        _put_moved(row, i, end, vectors, of(row, mean(row, i, end, vectors), i, end, vectors))

    return _by_parts(work)


@inlined
def _row_mean(row, i, end, vectors):
    total = _load(row[ROWS], i, end, vectors)
    for worker in range(1, row[WORKERS]):
        x = _load(row[ROWS] + worker * row[STRIDE], i, end, vectors)
        total = total[0] + x[0], total[1] + x[1], total[2] + x[2], total[3] + x[3]
    n = f32(row[WORKERS])
    store4(row[OUT], i, end, vectors, (total[0] / n, total[1] / n, total[2] / n, total[3] / n))


def _summer(source: Any) -> Any:
    """See ``reference.sums``; a thread block takes a chunk."""

    def loop(table, rows):
        row = _row_of(table, rows)
        chunk = cuda.blockIdx.x - row[FIRST]
        start = chunk * CHUNK
        end = min(start + CHUNK, row[SIZE])
        first, second = f64(0), f64(0)
        for i in range(start + 4 * cuda.threadIdx.x, end, 4 * cuda.blockDim.x):
            a, b, c, d = source(row, i, end, _has_vectors(row, i, end))
            # Beyond the end a formula may give more than 0.
            zero = f32(0)
            second_ = b if i + 1 < end else (zero, zero)
            third, fourth = c if i + 2 < end else (zero, zero), d if i + 3 < end else (zero, zero)
            first += _absolute_sums((a[0], second_[0], third[0], fourth[0]))[1]
            second += _absolute_sums((a[1], second_[1], third[1], fourth[1]))[1]
        first, second = block_sums(first, second)
        if cuda.threadIdx.x == 0:
            store_f64(row[OUT], 2 * chunk, first)
            store_f64(row[OUT], 2 * chunk + 1, second)

    return loop


def _pick(table, rows):
    """Numbers at the places, in words, that the int64 at WEIGHT say, from ROWS to OUT."""
    row = _row_of(table, rows)
    i = (cuda.blockIdx.x - row[FIRST]) * cuda.blockDim.x + cuda.threadIdx.x
    if i < row[SIZE]:
        store_f32(row[OUT], i, constant_f32(row[ROWS], constant_i64(row[WEIGHT], i)))


@dataclass(frozen=True)
class Program:
    """A loop and what it is bound to."""

    loop: str
    formula: Formula | None = None
    scalars: type | None = None
    codec: Codec | None = None

    @property
    def name(self) -> str:
        found = [self.loop, *([] if self.codec is None else [self.codec.name])]
        return "_".join(found if self.formula is None else [*found, label(self.formula)])

    def function(self) -> Callable[[int, int], None]:
        """What is to be compiled; its arguments are a table's address and the number of its rows."""
        return _function(self)


@cache
def _function(program: Program) -> Any:
    formula: Any = program.formula
    kind: Any = program.scalars
    codec: Any = program.codec
    kept = {"rests": resting(formula), "forgets": forgetting(formula)}
    loops: dict[str, Callable[[], Any]] = {
        "encode": lambda: _compressor(_loaded(formula, kind), codec, **kept),
        "restore": lambda: _restorer(_loaded(formula, kind), codec, **kept),
        "apply": lambda: _applier(_reader(formula, kind), codec),
        "move": lambda: _mover(_loaded(formula, kind)),
        "sums": lambda: _summer(_loaded(formula, kind)),
        "mean": lambda: _by_parts(_row_mean),
        "pick": lambda: _pick,
    }
    loop = loops[program.loop]()
    loop.__name__ = loop.__qualname__ = program.name
    return loop

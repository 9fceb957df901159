"""The loops for CPUs: Numba, one pass over memory, threads that hold no lock.

Same functions, arguments and results as ``reference``: codes exactly, floats to rounding of a float64 sum. Each block
of a tensor is worked on while it is in the first-level cache, so memory is read and written once. Large tensors are
split between threads by blocks; the result does not depend on how many there are. The threads are a plain pool's:
Numba's own may not be entered from two Python threads at a time, and one of their layers does not survive a fork.

The loops are templates: ``_loop`` binds their formulas and compiles one of each kind that is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from horovod_onebit.checks import whole
from horovod_onebit.codecs import Codec
from horovod_onebit.formulas import OF_ONE, Formula, alive, bound, forgetting, label, named, resting
from horovod_onebit.kernels.compiling import exact, reordered
from horovod_onebit.kernels.reference import (
    CHUNK,
    Array,
    Arrays,
    Bytes,
    Coding,
    batch,
    copy,
    host,
    mean,
    num_blocks,
    widen,
    write,
    zeros,
)

__all__ = [
    "apply",
    "batch",
    "copy",
    "encode",
    "host",
    "mean",
    "move",
    "recode",
    "restore",
    "set_num_threads",
    "sums",
    "widen",
    "write",
    "zeros",
]

f32, f64, u8, u32, u64 = np.float32, np.float64, np.uint8, np.uint32, np.uint64
EACH, GATHER = u64(0x0101010101010101), u64(0x0102040810204080)
PIECE = 1024  # elements that stay in the first-level cache, where no block says how many
MIN_ELEMENTS_PER_THREAD = 1 << 15

# What the templates call, and ``_loop`` binds.
formula: Any = None
scale: Any = None
code: Any = None
value: Any = None
fill: Any = None
fill_two: Any = None
step: Any = None
code_at: Any = None
write_record: Any = None
compress: Any = None
set_values: Any = None
set_values_of_two: Any = None
add_values: Any = None
mean_of_block: Any = None
BITS: Any = None


NAMES = {"absolute": np.abs, "sqrt": np.sqrt} | {name: exact(function) for name, function in OF_ONE.items()}
_alive = bound(alive, NAMES, exact)


def _part(array, lo, hi):
    return None if array is None else array[lo:hi]


@overload(_part)
def _part_of_type(array, lo, hi):
    """One function for each type: of ``_part`` itself Numba makes an optional array, which no loop over it survives
    as SIMD."""
    if isinstance(array, types.NoneType):
        return lambda array, lo, hi: None
    return lambda array, lo, hi: array[lo:hi]


def _take(array, before, lo, hi):
    pass


@overload(_take)
def _take_of_type(array, before, lo, hi):
    """``array[lo:hi]`` becomes what ``before`` has there, if there is one."""
    if isinstance(before, types.NoneType) or isinstance(array, types.NoneType):
        return lambda array, before, lo, hi: None

    def take(array, before, lo, hi):
        array[lo:hi] = before[lo:hi]

    return take


@exact
def _at(array, i):
    return f32(0) if array is None else array[i]


@exact
def _put(array, i, number):
    if number is not None:
        array[i] = number


@reordered
def _absolute_sums(c):
    total = 0.0
    squares = 0.0
    for i in range(c.size):
        x = f64(c[i])
        total += abs(x)
        squares += x * x
    return total, squares


@reordered
def _square_sum(x):
    total = 0.0
    for i in range(x.size):
        total += f64(x[i]) * f64(x[i])
    return total


def _fill(out, residual, p, g, m, v, w, a):
    """``out = formula(...) + residual``; without a residual, the formula alone."""
    for i in range(out.size):
        u = formula(p, _at(g, i), _at(m, i), _at(v, i), _at(w, i), _at(a, i))
        out[i] = u if residual is None else u + residual[i] + f32(0)


@exact
def _pack(codes, plane, out):
    """Bit ``plane`` of each of ``codes``, uint8, eight to a byte. A product of a word of eight bytes that are 0 or 1
    and of ``GATHER`` has them as the bits of its highest byte."""
    eights = codes.view(u64)
    for k in range(out.size):
        out[k] = u8((((eights[k] >> plane) & EACH) * GATHER) >> u64(56))


def _write_record(c, s, record):
    """The codes of one block, a bit plane after the other."""
    width = (c.size + 7) // 8
    codes = np.empty(8 * min(width, PIECE // 8), u8)
    for lo in range(0, c.size, PIECE):
        part = c[lo : lo + PIECE]
        for i in range(part.size):
            codes[i] = u8(code(part[i], s))
        codes[part.size :] = u8(0)
        for plane in range(BITS):
            start = 4 + plane * width + lo // 8
            _pack(codes, u64(plane), record[start : start + (part.size + 7) // 8])


def _compress(c, moving, residual, words, word, record, guard):
    """One block, its scale, that of so many elements that are ``moving``, as ``words[word]``; whether it is finite.
    Without a residual, nothing is kept."""
    total, squares = _absolute_sums(c)
    count = max(moving, 1)
    s = f32(scale(total / count, squares / count, guard))
    finite = np.isfinite(s)
    words[word] = s if finite else f32(np.nan)
    if finite:
        write_record(c, s, record)
        if residual is not None:
            for i in range(c.size):
                residual[i] = c[i] - value(code(c[i], s), s)
    else:
        record[4:] = u8(0)
    return finite


@exact
def _moving(moves, size):
    """How many of ``size`` elements do not rest, by the second moments ``moves``."""
    if moves is None:
        return size
    moving = u32(0)
    for i in range(moves.size):
        moving += u32(1) if _alive(moves[i]) else u32(0)
    return int(moving)


@exact
def _sent_of(c, moves, sent):
    """What is compressed of ``c``, in the memory of ``sent``: zeros of elements that rest."""
    if moves is None:
        return c
    for i in range(c.size):
        sent[i] = c[i] * (f32(1) if _alive(moves[i]) else f32(0)) + f32(0)  # NaN stays NaN
    return sent


@exact
def _of_moving(x, moves, i):
    if moves is None:
        return x
    return x if _alive(moves[i]) else f32(0)


@exact
def _add_waiting(c, residual, moves):
    """Add ``residual`` of elements that rest."""
    if moves is not None:
        for i in range(c.size):
            c[i] += f32(0) if _alive(moves[i]) else residual[i]


@exact
def _waiting_before(e, x, moves, i):
    """The residual ``e`` of an element that rests, before ``x`` was added to it; of others, ``e``."""
    if moves is None:
        return e
    return e if _alive(moves[i]) else e - x


@exact
def _keep(residual, c, moves):
    """Of elements that rest, ``residual`` becomes ``c``."""
    if moves is not None:
        for i in range(c.size):
            residual[i] = residual[i] if _alive(moves[i]) else c[i]


def _encode(p, g, m, v, w, a, moves, residual, kept, row, words, at, record, guard, block_size, first, last):
    """``kept`` is ``residual``, or None if nothing of elements that move is kept there."""
    c, sent = np.empty(min(block_size, residual.size), f32), np.empty(min(block_size, residual.size), f32)
    for k in range(first, last):
        lo = k * block_size
        hi = min(lo + block_size, residual.size)
        x, e, all_kept = c[: hi - lo], residual[lo:hi], _part(kept, lo, hi)
        fill(x, all_kept, p, _part(g, lo, hi), _part(m, lo, hi), _part(v, lo, hi), _part(w, lo, hi), _part(a, lo, hi))
        start = at + k * record
        here, word, out = _part(moves, lo, hi), start // 4, row[start : start + record]
        moving = _moving(here, hi - lo)
        if moving < hi - lo:
            if kept is None:
                _add_waiting(x, e, here)
            if compress(_sent_of(x, here, sent[: hi - lo]), moving, all_kept, words, word, out, guard):
                _keep(e, x, here)
        else:
            compress(x, moving, all_kept, words, word, out, guard)


def _code_at(record, width, k, j):
    """The code of element ``8 * k + j``."""
    found = u32(0)
    for plane in range(BITS):
        found |= ((u32(record[4 + plane * width + k]) >> u32(j)) & u32(1)) << u32(plane)
    return found


def _set_values(total, record, s):
    """``total``, which covers whole bytes, becomes what ``record`` stands for with the scale ``s``."""
    width = total.size // 8
    for k in range(width):
        for j in range(8):
            total[8 * k + j] = f32(0) + value(code_at(record, width, k, j), s)


def _set_values_of_two(total, one, s, two, t):
    """The sum of two workers in one pass, which for two workers is all there is. Not of more than two bits: of so long
    a loop, LLVM makes no SIMD."""
    width = total.size // 8
    for k in range(width):
        for j in range(8):
            first = f32(0) + value(code_at(one, width, k, j), s)
            total[8 * k + j] = first + value(code_at(two, width, k, j), t)


def _add_values(total, record, s):
    width = total.size // 8
    for k in range(width):
        for j in range(8):
            total[8 * k + j] += value(code_at(record, width, k, j), s)


def _mean_of_block(total, rows, words, start, end):
    """``total``, which covers whole bytes, becomes the mean of what the records at ``start`` of all rows stand for."""
    n, word = f32(rows.shape[0]), start // 4
    done = 1
    if BITS > 2 or rows.shape[0] == 1:
        set_values(total, rows[0, start:end], words[0, word] / n)
    else:
        set_values_of_two(total, rows[0, start:end], words[0, word] / n, rows[1, start:end], words[1, word] / n)
        done = 2
    for i in range(done, rows.shape[0]):
        add_values(total, rows[i, start:end], words[i, word] / n)


def _recode(
    residual, new_residual, moves, rows, words, at, record, row, own, out, again, guard, block_size, first, last
):
    total = np.empty(8 * ((min(block_size, residual.size) + 7) // 8), f32)
    for k in range(first, last):
        lo = k * block_size
        hi = min(lo + block_size, residual.size)
        mean_of_block(total[: 8 * ((hi - lo + 7) // 8)], rows, words, at + k * record, at + (k + 1) * record)
        c = total[: hi - lo]
        for i in range(c.size):
            c[i] = c[i] + residual[lo + i] + f32(0)
        here, start = _part(moves, lo, hi), out + k * again
        moving = _moving(here, hi - lo)
        _sent_of(c, here, c)
        if compress(c, moving, new_residual[lo:hi], own, start // 4, row[start : start + again], guard):
            _keep(new_residual[lo:hi], c, here)


def _restore(p, g, m, v, w, a, moves, residual, kept, row, words, at, record, block_size, first, last):
    u = np.empty(min(block_size, residual.size), f32)
    for k in range(first, last):
        lo = k * block_size
        hi = min(lo + block_size, residual.size)
        sent, width = row[at + k * record : at + (k + 1) * record], (hi - lo + 7) // 8
        s = words[(at + k * record) // 4]
        if np.isnan(s):
            continue
        x, e = u[: hi - lo], residual[lo:hi]
        fill(x, None, p, _part(g, lo, hi), _part(m, lo, hi), _part(v, lo, hi), _part(w, lo, hi), _part(a, lo, hi))
        here = _part(moves, lo, hi)
        for i in range(x.size):
            if kept is None:
                e[i] = _waiting_before(e[i], x[i], here, i)
            else:
                e[i] = (e[i] + _of_moving(value(code_at(sent, width, i // 8, i % 8), s), here, i)) - x[i]


def _step(p, g, m, v, w, a):
    """The formula of each element of one block, and its numbers where they belong.

    They are written to the arrays that were read: of others LLVM would have to know that they do not overlap.
    """
    for i in range(w.size):
        moved = formula(p, _at(g, i), _at(m, i), _at(v, i), w[i], _at(a, i))
        _put(m, i, moved[0])
        _put(v, i, moved[1])
        _put(w, i, moved[2])


def _apply(p, m, v, w, a, old_m, old_w, rows, words, at, record, block_size, first, last):
    total = np.empty(8 * ((min(block_size, w.size) + 7) // 8), f32)
    for k in range(first, last):
        lo = k * block_size
        hi = min(lo + block_size, w.size)
        mean_of_block(total[: 8 * ((hi - lo + 7) // 8)], rows, words, at + k * record, at + (k + 1) * record)
        _take(m, old_m, lo, hi)  # while it is in the first-level cache
        _take(w, old_w, lo, hi)
        step(p, total[: hi - lo], _part(m, lo, hi), _part(v, lo, hi), w[lo:hi], _part(a, lo, hi))


def _move(p, g, m, v, w, a, first, last):
    lo, hi = first * PIECE, min(last * PIECE, w.size)
    step(p, _part(g, lo, hi), _part(m, lo, hi), _part(v, lo, hi), w[lo:hi], _part(a, lo, hi))


def _fill_two(one, two, p, g, m, v, w, a):
    for i in range(w.size):
        one[i], two[i] = formula(p, _at(g, i), _at(m, i), _at(v, i), w[i], _at(a, i))


def _sums(p, g, m, v, w, a, out, first, last):
    one, two = np.empty(PIECE, f32), np.empty(PIECE, f32)
    for k in range(first, last):
        out[k, 0] = out[k, 1] = 0.0
        end = min((k + 1) * CHUNK, w.size)
        for lo in range(k * CHUNK, end, PIECE):
            hi = min(lo + PIECE, end)
            x, y = one[: hi - lo], two[: hi - lo]
            fill_two(x, y, p, _part(g, lo, hi), _part(m, lo, hi), _part(v, lo, hi), w[lo:hi], _part(a, lo, hi))
            out[k, 0] += _square_sum(x)
            out[k, 1] += _square_sum(y)


def _loop(template: Any, name: str, **names: Any) -> Any:
    """``template`` with ``names`` bound, compiled; ``name`` tells it from others of the template."""
    return exact(named(template.__code__, globals() | names, f"{template.__name__}_{name}"))


@cache
def _formula(function: Formula) -> Any:
    return bound(function, NAMES, exact)


@cache
def _of_codec(codec: Codec) -> dict[str, Any]:
    """What loops need of a codec."""
    names = {"scale": _formula(codec.scale), "code": _formula(codec.code), "value": _formula(codec.value)}
    names |= {"BITS": codec.bits}
    for template in (_write_record, _compress, _code_at, _set_values, _set_values_of_two, _add_values, _mean_of_block):
        names[template.__name__[1:]] = _loop(template, codec.name, **names)
    return names


INNER = {_encode: _fill, _restore: _fill, _sums: _fill_two, _apply: _step, _move: _step}
"""Which loop over a block each template calls with its formula."""


@cache
def _inner(template: Any, function: Formula) -> Any:
    """One of ``INNER`` of a formula, which several loops call."""
    return _loop(template, label(function), formula=_formula(function))


@cache
def _compiled(template: Any, codec: Codec | None = None, function: Formula | None = None) -> Any:
    """The loop of a formula and a codec."""
    names: dict[str, Any] = {} if codec is None else dict(_of_codec(codec))
    if function is not None:
        inner = INNER[template]
        names[inner.__name__[1:]] = _inner(inner, function)
    kinds = [] if codec is None else [codec.name]
    return _loop(template, "_".join(kinds if function is None else [*kinds, label(function)]), **names)


class _Pool:
    """Made when first needed, once per process (a forked child makes its own)."""

    def __init__(self) -> None:
        self.count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.executor: ThreadPoolExecutor | None = None
        self.pid = -1

    def get(self) -> ThreadPoolExecutor:
        if self.executor is None or self.pid != os.getpid():
            self.executor = ThreadPoolExecutor(self.count, thread_name_prefix="horovod_onebit")
            self.pid = os.getpid()
        return self.executor


_pool = _Pool()


def set_num_threads(count: int) -> None:
    """Let at most ``count`` threads work on one tensor. Results do not depend on it."""
    whole("count", count)
    _pool.count, _pool.executor = count, None


def _over_blocks(size: int, block_size: int, work: Callable[[int, int], None]) -> None:
    """``work(first, last)`` over all blocks of ``size`` elements, split between threads where that pays."""
    blocks = num_blocks(size, block_size)
    parts = min(_pool.count, blocks, size // MIN_ELEMENTS_PER_THREAD)
    if parts <= 1:
        work(0, blocks)
        return
    edges = [blocks * i // parts for i in range(parts + 1)]
    rest = [_begun(work, lo, hi) for lo, hi in pairwise(edges[1:])]
    work(edges[0], edges[1])
    for wait in rest:
        wait()


def _begun(work: Callable[[int, int], None], first: int, last: int) -> Callable[[], None]:
    """``work`` in another thread; what is returned waits for its end, or does the work when the interpreter ends."""
    try:
        return _pool.get().submit(work, first, last).result
    except RuntimeError as error:
        if "shutdown" not in str(error):  # no thread can be started, and the work is queued
            raise
        return partial(work, first, last)


def encode(formula: Formula, p: Any, arrays: Arrays, residual: Array, row: Bytes, at: int, coding: Coding) -> None:
    """See ``reference.encode``."""
    loop, record = _compiled(_encode, coding.codec, formula), coding.record
    words, moves = row.view(f32), arrays.variance if resting(formula) else None
    kept = None if forgetting(formula) else residual

    def work(first: int, last: int) -> None:
        loop(p, *arrays, moves, residual, kept, row, words, at, record, coding.guard, coding.block_size, first, last)

    _over_blocks(residual.size, coding.block_size, work)


def restore(formula: Formula, p: Any, arrays: Arrays, residual: Array, row: Bytes, at: int, coding: Coding) -> None:
    """See ``reference.restore``."""
    loop, record = _compiled(_restore, coding.codec, formula), coding.record
    words, moves = row.view(f32), arrays.variance if resting(formula) else None
    kept = None if forgetting(formula) else residual

    def work(first: int, last: int) -> None:
        loop(p, *arrays, moves, residual, kept, row, words, at, record, coding.block_size, first, last)

    _over_blocks(residual.size, coding.block_size, work)


def recode(
    rows: Bytes, at: int, coding: Coding, residual: Array, new_residual: Array, row: Bytes, out: int, again: Coding,
    variance: Array | None = None,
) -> None:  # fmt: skip
    """See ``reference.recode``."""
    loop = _recoder(coding.codec, again.codec)
    words, own = rows.view(f32), row.view(f32)

    def work(first: int, last: int) -> None:
        numbers = row, own, out, again.record, again.guard, coding.block_size, first, last
        loop(residual, new_residual, variance, rows, words, at, coding.record, *numbers)

    _over_blocks(residual.size, coding.block_size, work)


@cache
def _recoder(codec: Codec, again: Codec) -> Any:
    names = {"mean_of_block": _of_codec(codec)["mean_of_block"], "compress": _of_codec(again)["compress"]}
    return _loop(_recode, f"{codec.name}_{again.name}", **names)


def apply(
    formula: Formula, p: Any, arrays: Arrays, rows: Bytes, at: int, coding: Coding, before: Arrays | None = None
) -> None:
    """See ``reference.apply``."""
    old = (None, None) if before is None else (before.momentum, before.weight)
    loop, record = _compiled(_apply, coding.codec, formula), coding.record
    words = rows.view(f32)

    def work(first: int, last: int) -> None:
        loop(p, *arrays[1:], *old, rows, words, at, record, coding.block_size, first, last)

    _over_blocks(arrays.weight.size, coding.block_size, work)


def move(formula: Formula, p: Any, arrays: Arrays) -> None:
    """See ``reference.move``."""
    loop = _compiled(_move, None, formula)

    def work(first: int, last: int) -> None:
        loop(p, *arrays, first, last)

    _over_blocks(arrays.weight.size, PIECE, work)


def sums(formula: Formula, p: Any, arrays: Arrays, out: NDArray[np.float64]) -> None:
    """See ``reference.sums``."""
    loop = _compiled(_sums, None, formula)

    def work(first: int, last: int) -> None:
        loop(p, *arrays, out, first, last)

    _over_blocks(arrays.weight.size, CHUNK, work)

"""The loops in NumPy: the specification that every faster backend is tested against.

Rules and codecs bring formulas of one element (``horovod_onebit.formulas``); the loops run them over flat float32
arrays of one length ``d`` (one tensor, or a piece of one that starts on a block boundary). A *block* is ``block_size``
neighbours that share one scale and travel as one record (``horovod_onebit.codecs``); the last one may be shorter.

``arrays`` are always the same five, gradient, momentum, second moment, weight and anchor, None for those that there are
not; formulas take them after their scalars ``p``. ``rows`` are the messages of k workers, (k, bytes) uint8, and ``at``
is where in each row the records of these arrays begin.

Elementwise arithmetic is float32, operation by operation; sums are float64, so that no finite input overflows or
vanishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.codecs import Codec
from horovod_onebit.formulas import Formula, alive, forgetting, resting

LARGE = 65_536
"""Elements of arrays whose memory ``zeros`` has from the operating system."""
Array = NDArray[np.floating]  # float32 in use; float64 here serves tests of the identities
Bytes = NDArray[np.uint8]

CHUNK = 16_384
"""Elements whose squares ``sums`` adds up apart, so that sums do not depend on the number of threads."""


class Arrays(NamedTuple):
    """What formulas may look at, each (d,) or None."""

    gradient: Any = None
    momentum: Any = None
    variance: Any = None
    weight: Any = None
    anchor: Any = None


@dataclass(frozen=True)
class Coding:
    """How blocks become records."""

    codec: Codec
    block_size: int
    guard: float

    @cached_property
    def record(self) -> int:
        """Bytes of the record of a whole block."""
        return self.codec.record_size(self.block_size)


batch = nullcontext
"""Calls within do not depend on each other, and their results are there at its end: for those who launch."""


def host(array: Array) -> Array:
    """``array`` in host memory, for reading: itself, or a copy of what is on a device."""
    return array


def write(array: Array, values: Array | float) -> None:
    """Put ``values``, which are in host memory, into ``array``, which may be on a device."""
    array[:] = values


def copy(source: Array, target: Array) -> None:
    """Put ``source`` into ``target``, which is in the same memory."""
    target[:] = source


def zeros(size: int) -> Array:
    """So many float32 zeros, in the memory that the kernels work in. Large arrays come from the operating system: they
    take memory only where something is written, and give it back at once. (Where NumPy's allocator reuses memory, it
    writes zeros there.)"""
    if size < LARGE:
        return np.zeros(size, np.float32)
    return np.frombuffer(mmap(-1, 4 * size, MAP_PRIVATE | MAP_ANONYMOUS), np.float32)


def widen(source: Any, target: Array) -> None:
    """Put ``source``, a gradient of any dtype, into ``target``, which is in the same memory."""
    target[:] = source


def mean(rows: Array, out: Array) -> None:
    """Put the mean of the rows of so many float32 that ``rows``, flat, has one after the other into ``out``; summed in
    their order."""
    out[:] = rows.reshape(-1, len(out)).mean(axis=0)


def num_blocks(size: int, block_size: int) -> int:
    """How many blocks ``size`` elements are."""
    return -(-size // block_size)


def _numbers(arrays: Any) -> list[Any]:
    return [np.float32(0) if array is None else array for array in arrays]


def _blocks(size: int, coding: Coding, at: int = 0) -> Iterator[tuple[slice, slice, int]]:
    """All whole blocks, and what is left: the elements, the bytes of their records, and the blocks' length."""
    whole = size // coding.block_size * coding.block_size
    for start, stop in ((0, whole), (whole, size)):
        if start < stop:
            length = min(coding.block_size, stop - start)
            end = at + (stop - start) // length * coding.codec.record_size(length)
            yield slice(start, stop), slice(at, end), length
            at = end


def _write(c: Array, records: Bytes, coding: Coding, moves: NDArray[np.bool_] | None) -> NDArray[np.float32]:
    """The records of blocks ``c`` (k, length); returns their scales (k, 1), which are finite where all of ``c`` is.

    Scales are those of the elements that ``moves`` (k, length) says move; ``c`` is zero in the others.
    """
    wide, length = c.astype(np.float64), c.shape[1]
    count: Any = length if moves is None else np.maximum(moves.sum(axis=1), 1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, square = np.abs(wide).sum(axis=1) / count, (wide * wide).sum(axis=1) / count
        s = coding.codec.scale(mean, square, coding.guard).astype(np.float32)[:, None]
        codes, width = coding.codec.code(c, s), -(-length // 8)
    bad = ~np.isfinite(s[:, 0])
    records[:] = 0
    records[:, :4] = np.where(bad[:, None], np.float32(np.nan), s).view(np.uint8)
    for plane in range(coding.codec.bits):
        bits = np.packbits((codes >> np.uint32(plane)) & np.uint32(1), axis=1, bitorder="little")
        bits[bad] = 0
        records[:, 4 + plane * width : 4 + (plane + 1) * width] = bits
    return s


def _values(records: Bytes, length: int, codec: Codec, workers: int = 1) -> Array:
    """What records of blocks of ``length`` stand for, (k, length), their scales divided by ``workers``."""
    s, width = np.ascontiguousarray(records[:, :4]).view(np.float32) / np.float32(workers), -(-length // 8)
    codes = np.zeros((len(records), length), np.uint32)
    for plane in range(codec.bits):
        packed = records[:, 4 + plane * width : 4 + (plane + 1) * width]
        bits = np.unpackbits(packed, axis=1, count=length, bitorder="little")
        codes |= bits.astype(np.uint32) << np.uint32(plane)
    return np.asarray(codec.value(codes, s))


def contribution(formula: Formula, p: Any, arrays: Arrays) -> Array:
    """What this worker would send if nothing were compressed and there were no residual.

    Formulas keep NaN and Inf of what they are given, so that a clip cannot hide them.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(formula(p, *_numbers(arrays)))


def encode(formula: Formula, p: Any, arrays: Arrays, residual: Array, row: Bytes, at: int, coding: Coding) -> None:
    """Compress ``c = formula(p, *arrays) + residual`` to records in ``row``, and keep in ``residual`` what was lost.

    A block that holds anything not finite gets the scale NaN and its residual stays as it was. Elements that rest
    (``formulas.rests``) are compressed as zeros, have no part in the scale, and ``c`` is kept of them. If ``formula``
    ``forgets``, the residual is theirs alone.
    """
    moves, kept = _moves(formula, arrays), residual
    if moves is not None and forgetting(formula):
        kept = np.where(moves, np.float32(0), residual)
    with np.errstate(invalid="ignore", over="ignore"):
        c = contribution(formula, p, arrays) + kept + np.float32(0)
        sent = c if moves is None else c * moves + np.float32(0)  # NaN stays NaN
    rest = None if moves is None else (moves, c)
    _compress(sent, residual, row, at, coding, rest, forget=forgetting(formula))


def _moves(formula: Formula, arrays: Arrays) -> NDArray[np.bool_] | None:
    """Which elements do not rest; None if none may."""
    return np.asarray(alive(arrays.variance)) if resting(formula) else None


def _compress(
    c: Array, residual: Array, row: Bytes, at: int, coding: Coding,
    rest: tuple[NDArray[np.bool_], Array] | None = None, *, forget: bool = False,
) -> None:  # fmt: skip
    """``rest``: which elements move, and what is kept of the others. ``forget``: of those that move, nothing is."""
    for elements, span, length in _blocks(c.size, coding, at):
        blocks, kept = c[elements].reshape(-1, length), residual[elements].reshape(-1, length)
        moves: Any = None
        if rest is not None:
            moves, whole = (array[elements].reshape(-1, length) for array in rest)
        s = _write(blocks, row[span].reshape(len(blocks), -1), coding, moves)
        good = np.isfinite(s[:, 0])
        lost = kept if forget else blocks - coding.codec.value(coding.codec.code(blocks, s), s)
        if moves is not None:
            lost = np.where(moves, lost, whole)
        kept[good] = lost[good]


def restore(formula: Formula, p: Any, arrays: Arrays, residual: Array, row: Bytes, at: int, coding: Coding) -> None:
    """Undo ``encode`` of the same arguments, for a step that the workers agreed to skip.

    ``residual`` comes back to rounding (a unit in the last place of ``c``); blocks that ``encode`` left alone are left
    alone here too.
    """
    u, moves = contribution(formula, p, arrays), _moves(formula, arrays)
    for elements, span, length in _blocks(residual.size, coding, at):
        kept = residual[elements].reshape(-1, length)
        with np.errstate(invalid="ignore", over="ignore"):
            sent = _values(row[span].reshape(len(kept), -1), length, coding.codec)
            touched = ~np.isnan(sent[:, 0])
            if moves is not None:
                sent = np.where(moves[elements].reshape(-1, length), sent, np.float32(0))
            before = (kept + sent) - u[elements].reshape(-1, length)
            if moves is not None and forgetting(formula):
                before = np.where(moves[elements].reshape(-1, length), kept, before)
        kept[touched] = before[touched]


def decode_mean(rows: Bytes, at: int, size: int, coding: Coding) -> Array:
    """The mean of the workers' messages, (size,).

    Each scale is divided by their number first; the sum then runs over the workers in rank order, so that every
    replica rounds alike.
    """
    total: Array = np.zeros(size, np.float32)
    for row in rows:
        for elements, span, length in _blocks(size, coding, at):
            records = row[span].reshape(-1, coding.codec.record_size(length))
            total[elements] += _values(records, length, coding.codec, len(rows)).reshape(-1)
    return total


def recode(
    rows: Bytes, at: int, coding: Coding, residual: Array, new_residual: Array, row: Bytes, out: int, again: Coding,
    variance: Array | None = None,
) -> None:  # fmt: skip
    """A server's work: compress ``mean of the workers + residual`` and leave what was lost in ``new_residual``.

    Reads records of the kind ``coding`` and writes, at ``out`` of ``row``, records of the kind ``again``, whose blocks
    are the same. Of elements that rest by their ``variance``, what workers have sent means nothing: they are compressed
    as zeros, and nothing is kept of them. Everything is in host memory.
    """
    c = decode_mean(rows, at, residual.size, coding) + residual + np.float32(0)
    if variance is None:
        _compress(c, new_residual, row, out, again)
        return
    moves = np.asarray(alive(variance))
    with np.errstate(invalid="ignore"):
        sent = c * moves + np.float32(0)
    _compress(sent, new_residual, row, out, again, (moves, np.zeros_like(c)))


def apply(
    formula: Formula, p: Any, arrays: Arrays, rows: Bytes, at: int, coding: Coding, before: Arrays | None = None
) -> None:
    """Decode the workers' mean and move by it: ``move(formula, p, arrays)`` with the mean as the gradient.

    With ``before``, its momentum and weight are what is moved, and ``arrays`` has where they go; they may be the same.
    """
    assert arrays.weight is not None
    if before is not None:
        for source, target in ((before.momentum, arrays.momentum), (before.weight, arrays.weight)):
            copy(source, target)
    move(formula, p, arrays._replace(gradient=decode_mean(rows, at, arrays.weight.size, coding)))


def move(formula: Formula, p: Any, arrays: Arrays) -> None:
    """Put momentum, second moment and weight that ``formula(p, *arrays)`` gives in place; None stays as it is."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        moved = formula(p, *_numbers(arrays))
    for array, values in zip(arrays[1:4], moved, strict=True):
        if values is not None:
            array[:] = values


def sums(formula: Formula, p: Any, arrays: Arrays, out: NDArray[np.float64]) -> None:
    """Sums of squares of the two numbers that ``formula(p, *arrays)`` gives, chunk by chunk: (ceil(d / CHUNK), 2)."""
    with np.errstate(invalid="ignore", over="ignore"):
        pair = formula(p, *_numbers(arrays))
    for k in range(len(out)):
        for j, x in enumerate(pair):
            out[k, j] = np.square(x[k * CHUNK : (k + 1) * CHUNK], dtype=np.float64).sum()

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
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.codecs import Codec
from horovod_onebit.formulas import Formula

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


class Coding(NamedTuple):
    """How blocks become records."""

    codec: Codec
    block_size: int
    guard: float


@contextmanager
def batch() -> Iterator[None]:
    """Calls within do not depend on each other, and their results are there at its end: for those who launch."""
    yield


def twin(size: int, scales: int) -> Any:
    """A message of ``size`` bytes for tensors on a device, which arrives some time after it was encoded.

    Its attributes are those of ``cuda.Twin``; None where tensors lie in host memory.
    """
    return None


def host(array: Array) -> Array:
    """``array`` in host memory, for reading: itself, or a copy of what lies on a device."""
    return array


def write(array: Array, values: Array | float) -> None:
    """Put ``values``, which lie in host memory, into ``array``, which may lie on a device."""
    array[:] = values


def copy(source: Array, target: Array) -> None:
    """Put ``source`` into ``target``, which lies in the same memory."""
    target[:] = source


def num_blocks(size: int, block_size: int) -> int:
    """How many blocks ``size`` elements are."""
    return -(-size // block_size)


def _numbers(arrays: Any) -> list[Any]:
    return [np.float32(0) if array is None else array for array in arrays]


def _blocks(size: int, coding: Coding, at: int = 0) -> Iterator[tuple[slice, slice]]:
    """Each block's elements, and its record's bytes."""
    for start in range(0, size, coding.block_size):
        stop = min(start + coding.block_size, size)
        end = at + coding.codec.record_size(stop - start)
        yield slice(start, stop), slice(at, end)
        at = end


def _write(c: Array, record: Bytes, coding: Coding) -> np.float32:
    """The record of one block; returns its scale, which is finite if all of ``c`` is."""
    wide = c.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        s = np.float32(coding.codec.scale(np.abs(wide).sum() / c.size, (wide * wide).sum() / c.size, coding.guard))
    if not np.isfinite(s):
        record[:4].view(np.float32)[0], record[4:] = np.nan, 0
        return s
    record[:4].view(np.float32)[0] = s
    codes, width = coding.codec.code(c, s), -(-c.size // 8)
    record[4:] = 0
    for plane in range(coding.codec.bits):
        bits = np.packbits((codes >> np.uint32(plane)) & np.uint32(1), bitorder="little")
        record[4 + plane * width : 4 + (plane + 1) * width] = bits
    return s


def values_of(record: Bytes, size: int, codec: Codec, workers: int = 1) -> Array:
    """What the record of ``size`` elements stands for, its scale divided by ``workers``."""
    s, width = record[:4].copy().view(np.float32)[0] / np.float32(workers), -(-size // 8)
    codes = np.zeros(size, np.uint32)
    for plane in range(codec.bits):
        bits = np.unpackbits(record[4 + plane * width : 4 + (plane + 1) * width], count=size, bitorder="little")
        codes |= bits.astype(np.uint32) << np.uint32(plane)
    return np.asarray(codec.value(codes, s))


def contribution(formula: Formula, p: Any, arrays: Arrays) -> Array:
    """What this worker would send if nothing were compressed and nothing were owed.

    Formulas keep NaN and Inf of what they are given, so that a clip cannot hide them.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(formula(p, *_numbers(arrays)))


def encode(formula: Formula, p: Any, arrays: Arrays, residual: Array, row: Bytes, at: int, coding: Coding) -> bool:
    """Compress ``c = formula(p, *arrays) + residual`` to records in ``row``, and keep in ``residual`` what was lost.

    A block that holds anything not finite gets the scale NaN and its residual stays as it was. Returns whether every
    block was finite.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        c = contribution(formula, p, arrays) + residual + np.float32(0)
    return _compress(c, residual, row, at, coding)


def _compress(c: Array, residual: Array, row: Bytes, at: int, coding: Coding) -> bool:
    finite = True
    for block, record in _blocks(c.size, coding, at):
        s = _write(c[block], row[record], coding)
        if np.isfinite(s):
            residual[block] = c[block] - coding.codec.value(coding.codec.code(c[block], s), s)
        finite &= bool(np.isfinite(s))
    return finite


def restore(formula: Formula, p: Any, arrays: Arrays, residual: Array, row: Bytes, at: int, coding: Coding) -> None:
    """Undo ``encode`` of the same arguments, for a step that the workers agreed to skip.

    ``residual`` comes back to rounding (a unit in the last place of ``c``); blocks that ``encode`` left alone are left
    alone here too.
    """
    u = contribution(formula, p, arrays)
    for block, record in _blocks(residual.size, coding, at):
        sent = values_of(row[record], residual[block].size, coding.codec)
        if not np.isnan(sent).any():
            residual[block] = (residual[block] + sent) - u[block]


def decode_mean(rows: Bytes, at: int, size: int, coding: Coding) -> Array:
    """The mean of the workers' messages, (size,).

    Each scale is divided by their number first; the sum then runs over the workers in rank order, so that every
    replica rounds alike.
    """
    total: Array = np.zeros(size, np.float32)
    for row in rows:
        for block, record in _blocks(size, coding, at):
            total[block] += values_of(row[record], total[block].size, coding.codec, len(rows))
    return total


def recode(
    rows: Bytes, at: int, coding: Coding, residual: Array, new_residual: Array, row: Bytes, out: int, again: Coding
) -> None:
    """A server's work: compress ``mean of the workers + residual`` and leave what was lost in ``new_residual``.

    Reads records of the kind ``coding`` and writes, at ``out`` of ``row``, records of the kind ``again``, whose blocks
    are the same.
    """
    c = decode_mean(rows, at, residual.size, coding) + residual + np.float32(0)
    _compress(c, new_residual, row, out, again)


def apply(formula: Formula, p: Any, arrays: Arrays, rows: Bytes, at: int, coding: Coding) -> None:
    """Decode the workers' mean and move by it: ``move(formula, p, arrays)`` with the mean as the gradient."""
    assert arrays.weight is not None
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

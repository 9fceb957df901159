"""The checksum of messages: what a worker sealed is what the others open, or they are told.

Each 32-bit word is mixed with its position by a function that is invertible, and the results are added up modulo
2**32:

    x = word + position * STEP;  x ^= x >> 16;  x *= FIRST;  x ^= x >> 15;  x *= SECOND;  x ^= x >> 16
    checksum = sum of x

Damage within one aligned word (any single bit) always changes the sum. Damage to several words, which includes words
that are swapped or moved, is missed about once in 2**29 times, where it is most regular: the same bit in two words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.kernels.compiling import exact

u32 = np.uint32
STEP, FIRST, SECOND = u32(0x9E3779B1), u32(0x7FEB352D), u32(0x846CA68B)
FEW, SHORT = 16, 512  # rows, bytes


def reference(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """See ``checksums``; in NumPy."""
    words = np.ascontiguousarray(rows).view(u32)
    with np.errstate(over="ignore"):
        x = words + np.arange(words.shape[1], dtype=u32) * STEP
        x = (x ^ (x >> u32(16))) * FIRST
        x = (x ^ (x >> u32(15))) * SECOND
        x ^= x >> u32(16)
        return np.asarray(x.sum(axis=1, dtype=u32))


@exact
def _checksum(words):
    total = at = u32(0)
    for i in range(words.size):
        x = u32(words[i] + at)
        at = u32(at + STEP)
        x = u32((x ^ (x >> u32(16))) * FIRST)
        x = u32((x ^ (x >> u32(15))) * SECOND)
        total = u32(total + (x ^ (x >> u32(16))))
    return total


def checksums(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The checksum of each of ``rows``, (n, a multiple of 4) uint8 whose rows are contiguous."""
    if len(rows) > FEW and rows.size < SHORT * len(rows):  # a call for each row would take longer than the work
        return reference(rows)
    return np.array([_checksum(row) for row in rows.view(u32)], u32)

"""One message per bucket: header, scales, sign bits, padded to 16 bytes. Little-endian.

offset 0    header, 32 bytes (HEADER)
offset 32   scales, float32, one a block
then        sign bits, uint8, each piece starting on a whole byte
then        zeros up to a multiple of 16 bytes (unaligned gathers are slow on NCCL, horovod#3727)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.errors import JOINED, WireError
from horovod_onebit.layout import Bucket

MAGIC = 0x5449_4231  # "1BIT"
VERSION = 1
FINITE = 1
ALIGNMENT = 16

HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("step", "<u8"),
        ("layout", "<u8"),
        ("bucket", "<u4"),
        ("blocks", "<u4"),
    ]
)
assert HEADER.itemsize == 32


def message_size(bucket: Bucket) -> int:
    """Bytes of the message that carries ``bucket``."""
    size = HEADER.itemsize + 4 * bucket.blocks + bucket.bytes
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Stamp:
    """What all messages of one step have in common: the count of exchanges, and the digest of the layout."""

    step: int
    layout: int


class Message:
    """A buffer for one bucket's message, written in place by the kernels and reused every step.

    ``buffer`` is memory to use instead of its own: (at least ``message_size(bucket)``,) uint8.
    """

    def __init__(self, bucket: Bucket, buffer: NDArray[np.uint8] | None = None) -> None:
        self.bucket = bucket
        self.buffer = np.zeros(message_size(bucket), np.uint8) if buffer is None else buffer
        self.scales, self.bits = _body(self.buffer, bucket)
        self.finite = True

    def seal(self, stamp: Stamp, *, finite: bool) -> NDArray[np.uint8]:
        """Write the header; the message is then ready to be sent."""
        header = self.buffer[: HEADER.itemsize].view(HEADER)
        flags = FINITE if finite else 0
        header[0] = (MAGIC, VERSION, flags, stamp.step, stamp.layout, self.bucket.index, self.bucket.blocks)
        self.finite = finite
        return self.buffer


@dataclass(frozen=True)
class Gathered:
    """k messages of one bucket: ``scales`` (k, blocks), ``bits`` (k, bytes), ``finite`` (n,), for each worker.

    k is n, or 1 where the exchange has taken the mean already.
    """

    scales: NDArray[np.float32]
    bits: NDArray[np.uint8]
    finite: NDArray[np.bool_]


def read(
    gathered: NDArray[np.uint8], bucket: Bucket, stamp: Stamp, *, workers: int, size: int | None = None
) -> Gathered:
    """Check what arrived, (workers * size,) uint8, against what this step expects, and open it.

    ``size`` is the length of one message, ``message_size(bucket)`` unless padded to more. Raises ``WireError`` that
    names the worker and the field; nothing is decoded then. A scale that is negative or not finite in a message that
    claims to be finite is refused as well.
    """
    size = message_size(bucket) if size is None else size
    step = stamp.step
    if gathered.dtype != np.uint8 or gathered.shape != (workers * size,):
        raise WireError(
            f"bucket {bucket.index}: {gathered.shape} {gathered.dtype} arrived, expected ({workers} * {size},) uint8: "
            "the workers do not have the same model, recipe or version"
        )
    rows = np.ascontiguousarray(gathered).reshape(workers, size)
    headers = rows[:, : HEADER.itemsize].copy().view(HEADER)[:, 0]
    joined = np.flatnonzero(headers["magic"] == 0)  # Horovod lets zeros stand for a worker that has left
    if joined.size:
        raise WireError(JOINED.format(joined.tolist()))
    expected = {"magic": MAGIC, "version": VERSION, "step": step, "layout": stamp.layout}
    expected |= {"bucket": bucket.index, "blocks": bucket.blocks}
    for field, value in expected.items():
        wrong = np.flatnonzero(headers[field] != value)
        if wrong.size:
            raise WireError(
                f"bucket {bucket.index}, step {step}: the message of worker {wrong[0]} has {field} "
                f"{headers[field][wrong[0]]}, expected {value} (workers that differ: {wrong.tolist()})"
            )
    finite = (headers["flags"] & FINITE).astype(bool)
    scales, bits = _body(rows, bucket)
    bad = finite & ~(np.isfinite(scales) & (scales >= 0)).all(axis=1)
    if bad.any():
        raise WireError(
            f"bucket {bucket.index}, step {step}: the message of worker {np.flatnonzero(bad)[0]} is corrupt: it says "
            "that it is finite and has a scale that is not a finite number >= 0"
        )
    return Gathered(scales, bits, finite)


def _body(buffer: NDArray[np.uint8], bucket: Bucket) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Views of the scales and the bits, along the last axis of ``buffer``."""
    start = HEADER.itemsize
    middle = start + 4 * bucket.blocks
    return buffer[..., start:middle].view(np.float32), buffer[..., middle : middle + bucket.bytes]

"""One message per bucket: header, scales, sign bits, padded to 16 bytes. Little-endian.

offset 0    header, 32 bytes (HEADER)
offset 32   scales, float32, one a block
then        sign bits, uint8, each piece starting on a whole byte
then        zeros up to a multiple of 16 bytes (unaligned gathers are slow on NCCL, horovod#3727)

The header's checksum covers its flags and all that follows the header; of messages that stay on a GPU, whose bits
never reach the host, flags and scales. All other fields of the header are compared with what they must be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.errors import JOINED, WireError
from horovod_onebit.kernels.checksum import checksums
from horovod_onebit.layout import Bucket, Share

MAGIC = 0x5449_4231  # "1BIT"
VERSION = 2
FINITE = 1
ALIGNMENT = 16
STEPS = 2**32  # the header counts steps modulo so many

HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("step", "<u4"),
        ("checksum", "<u4"),
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
    """What all messages of one step have in common: the count of exchanges, the digest of the layout, and the largest
    scale that any of them can have (see ``Rule.largest_scale``)."""

    step: int
    layout: int
    largest_scale: float = math.inf


class Message:
    """A buffer for one bucket's message, written in place by the kernels and reused every step.

    ``buffer`` is memory to use instead of its own: (at least ``message_size(bucket)``,) uint8. With a ``twin`` (see
    ``kernels.reference.twin``) the kernels write there, and the message arrives later; ``stays`` says that it leaves
    from where the kernels write it, so that no more of it arrives here than the scales.

    Attributes:
        scales, bits: views of the buffer.
        out_scales, out_bits: where the kernels write.
        elsewhere: whether that is outside of host memory.
        arriving: whether ``arrive`` is still to be called.
    """

    def __init__(
        self, bucket: Bucket, buffer: NDArray[np.uint8] | None = None, twin: Any = None, *, stays: bool = False
    ) -> None:
        self.bucket = bucket
        self._twin = twin
        self.elsewhere = twin is not None
        self._stays = stays and self.elsewhere
        if buffer is None:
            buffer = np.zeros(message_size(bucket), np.uint8) if twin is None else twin.host
        self.buffer: NDArray[np.uint8] = buffer
        self.scales, self.bits = self.out_scales, self.out_bits = _body(self.buffer, bucket)
        if twin is not None:
            self.out_scales = twin.part(HEADER.itemsize, bucket.blocks, "float32")
            self.out_bits = twin.part(_middle(bucket), bucket.bytes, "uint8")
        self.finite, self.arriving = True, False

    def written(self, stamp: Stamp) -> None:
        """The kernels were told to write all of it: seal it, or start to fetch it."""
        if not self.elsewhere:
            self._seal_checked(stamp)
        else:
            self._twin.fetch(_middle(self.bucket) if self._stays else self.buffer.size)
            self.arriving = True

    def arrived(self) -> bool:
        """Whether ``arrive`` would not block."""
        return not self.arriving or self._twin.arrived()

    def arrive(self, stamp: Stamp) -> None:
        """Wait until it is here, and seal it."""
        self._twin.wait()
        self.arriving = False
        self._seal_checked(stamp)
        if self._stays:
            self._twin.send(HEADER.itemsize)

    @property
    def outgoing(self) -> Any:
        """What is to be gathered: ``buffer``, or the bytes where the kernels wrote them."""
        return self._twin if self._stays else self.buffer

    def _seal_checked(self, stamp: Stamp) -> None:
        self.seal(stamp, finite=bool(np.isfinite(self.scales).all()))

    def seal(self, stamp: Stamp, *, finite: bool) -> NDArray[np.uint8]:
        """Write the header; the message is then ready to be sent."""
        sent = self.buffer[: _middle(self.bucket)] if self._stays else self.buffer
        seal_rows(sent[None], self.bucket.blocks, self.bucket.index, stamp, finite)
        self.finite = finite
        return self.buffer


def messages(buckets: Sequence[Bucket], elsewhere: Sequence[bool], kernels: ModuleType, *, stay: bool) -> list[Message]:
    """A message for each bucket; of ``kernels``'s making for those whose tensors lie outside of host memory."""
    twins = [kernels.twin(message_size(b)) if away else None for b, away in zip(buckets, elsewhere, strict=True)]
    return [Message(bucket, twin=twin, stays=stay) for bucket, twin in zip(buckets, twins, strict=True)]


def seal_rows(
    rows: NDArray[np.uint8],
    blocks: NDArray[np.integer] | int,
    index: int,
    stamp: Stamp,
    finite: NDArray[np.bool_] | bool,
) -> None:
    """Write the headers of messages of one bucket, (messages, bytes) uint8, with ``blocks`` scales each."""
    headers = rows[:, : HEADER.itemsize].view(HEADER)[:, 0]
    headers["magic"], headers["version"], headers["flags"] = MAGIC, VERSION, np.where(finite, FINITE, 0)
    headers["step"], headers["layout"] = stamp.step % STEPS, stamp.layout
    headers["bucket"], headers["blocks"] = index, blocks
    headers["checksum"] = checksums(rows[:, HEADER.itemsize :]) + headers["flags"]


def pack(messages: Gathered, bucket: Bucket, stamp: Stamp, *, size: int) -> NDArray[np.uint8]:
    """What ``read`` opened as messages again, (messages * size,) uint8, one after the other."""
    k = len(messages.scales)
    rows = np.zeros((k, size), np.uint8)
    scales, bits = _body(rows, bucket)
    scales[:], bits[:] = messages.scales, messages.bits
    finite = messages.finite if len(messages.finite) == k else np.full(k, messages.finite.all())
    seal_rows(rows, bucket.blocks, bucket.index, stamp, finite)
    return rows.reshape(-1)


class Remote(Protocol):
    """Messages that arrived outside of host memory, one after the other.

    Attributes:
        size: bytes in all.
    """

    size: int

    def heads(self, rows: int, width: int) -> NDArray[np.uint8]:
        """Of each of ``rows`` messages the first ``width`` bytes, in host memory: (rows, width)."""
        ...

    def bytes(self, rows: int, start: int) -> Any:
        """Of each of ``rows`` messages what begins at byte ``start``, where it lies, for the kernels: rows of uint8."""
        ...


@dataclass(frozen=True)
class Gathered:
    """k messages of one bucket: ``scales`` (k, blocks), ``bits`` (k, bytes), ``finite`` (n,), for each worker.

    k is n, or 1 where the exchange has taken the mean already.
    """

    scales: NDArray[np.float32]
    bits: NDArray[np.uint8]
    finite: NDArray[np.bool_]


def read(
    gathered: NDArray[np.uint8] | Remote, bucket: Bucket, stamp: Stamp, *, workers: int, size: int | None = None
) -> Gathered:
    """Check what arrived, (workers * size,) uint8, against what this step expects, and open it.

    ``size`` is the length of one message, ``message_size(bucket)`` unless padded to more. Raises ``WireError`` that
    names the worker and the field; nothing is decoded then. Damaged messages are refused, and so are scales that are
    negative, not finite or above ``stamp.largest_scale`` in a message that claims to be finite.
    """
    size, senders = message_size(bucket) if size is None else size, np.arange(workers)
    blocks = np.full(workers, bucket.blocks)
    if isinstance(gathered, np.ndarray):
        rows, finite = _open(gathered, bucket.index, blocks, stamp, size, senders)
        scales, bits = _body(rows, bucket)
    else:
        heads, finite = _open_remote(gathered, bucket, blocks, stamp, size, senders)
        scales = np.ascontiguousarray(heads[:, HEADER.itemsize :]).view(np.float32)
        bits = gathered.bytes(workers, _middle(bucket))
    bad = finite & _corrupt(scales, stamp)
    if bad.any():
        raise _corruption(bucket.index, stamp, np.flatnonzero(bad)[0])
    return Gathered(scales, bits, finite)


def read_shares(
    gathered: NDArray[np.uint8], bucket: Bucket, shares: Sequence[Share], stamp: Stamp, *, hosts: int, size: int
) -> Gathered:
    """Check and put together the shares of a bucket: (shares * hosts * size,) uint8, for each share one a host.

    ``finite`` is that of each share of each host, (hosts * shares,). Raises as ``read``.
    """
    count = len(shares)
    senders = np.arange(hosts * count).reshape(hosts, count).T.reshape(-1)
    blocks = np.repeat([share.bucket.blocks for share in shares], hosts)
    rows, finite = _open(gathered, bucket.index, blocks, stamp, size, senders)
    rows, finite = rows.reshape(count, hosts, size), finite.reshape(count, hosts)
    scales = np.empty((hosts, bucket.blocks), np.float32)
    bits = np.empty((hosts, bucket.bytes), np.uint8)
    for row, share in zip(rows, shares, strict=True):
        scales[:, share.blocks], bits[:, share.bytes] = _body(row, share.bucket)
    if _corrupt(scales, stamp).any():
        for j, share in enumerate(shares):
            bad = finite[j] & _corrupt(scales[:, share.blocks], stamp)
            if bad.any():
                raise _corruption(bucket.index, stamp, senders[j * hosts + np.flatnonzero(bad)[0]])
    return Gathered(scales, bits, finite.T.reshape(-1))


def _open(
    gathered: NDArray[np.uint8],
    index: int,
    blocks: NDArray[np.integer],
    stamp: Stamp,
    size: int,
    senders: NDArray[np.integer],
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """The messages as rows, and which are finite; their headers are as expected."""
    if gathered.dtype != np.uint8 or gathered.shape != (len(blocks) * size,):
        raise WireError(
            f"bucket {index}: {gathered.shape} {gathered.dtype} arrived, expected ({len(blocks)} * {size},) uint8: "
            "the workers do not have the same model, recipe or version"
        )
    rows = np.ascontiguousarray(gathered).reshape(len(blocks), size)
    return rows, _check_headers(rows, index, blocks, stamp, senders)


def _open_remote(
    gathered: Remote,
    bucket: Bucket,
    blocks: NDArray[np.integer],
    stamp: Stamp,
    size: int,
    senders: NDArray[np.integer],
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Headers and scales of the messages, which alone come to the host's memory, and which are finite."""
    if gathered.size != len(blocks) * size:
        raise WireError(
            f"bucket {bucket.index}: {gathered.size} bytes arrived, expected {len(blocks)} * {size}: "
            "the workers do not have the same model, recipe or version"
        )
    heads = gathered.heads(len(blocks), _middle(bucket))
    return heads, _check_headers(heads, bucket.index, blocks, stamp, senders)


def _check_headers(
    rows: NDArray[np.uint8],
    index: int,
    blocks: NDArray[np.integer],
    stamp: Stamp,
    senders: NDArray[np.integer],
) -> NDArray[np.bool_]:
    """Which messages are finite; their headers, which ``rows`` begin with, are as expected, and nothing is damaged."""
    headers = rows[:, : HEADER.itemsize].copy().view(HEADER)[:, 0]
    joined = senders[headers["magic"] == 0]  # Horovod lets zeros stand for a worker that has left
    if joined.size:
        raise WireError(JOINED.format(joined.tolist()))
    expected = {"magic": MAGIC, "version": VERSION, "step": stamp.step % STEPS}
    expected |= {"layout": stamp.layout, "bucket": index}
    for field, values in (expected | {"blocks": blocks}).items():
        wrong = headers[field] != values
        if wrong.any():
            first = np.flatnonzero(wrong)[0]
            raise WireError(
                f"bucket {index}, step {stamp.step}: the message of worker {senders[first]} has {field} "
                f"{headers[field][first]}, expected {np.broadcast_to(values, len(blocks))[first]} "
                f"(workers that differ: {senders[wrong].tolist()})"
            )
    damaged = senders[headers["checksum"] != checksums(rows[:, HEADER.itemsize :]) + headers["flags"]]
    if damaged.size:
        raise WireError(
            f"bucket {index}, step {stamp.step}: the message of worker {sorted(set(damaged.tolist()))} is damaged: its "
            "checksum is not that of what arrived. The memory or the network of one of the hosts alters data"
        )
    return np.asarray((headers["flags"] & FINITE).astype(bool))


def _corrupt(scales: NDArray[np.float32], stamp: Stamp) -> NDArray[np.bool_]:
    """Of each row, whether it has a scale that is none."""
    largest = np.float32(min(stamp.largest_scale, float(np.finfo(np.float32).max)))
    return np.asarray((~((scales >= 0) & (scales <= largest))).any(axis=1))


def _corruption(index: int, stamp: Stamp, worker: np.integer) -> WireError:
    return WireError(
        f"bucket {index}, step {stamp.step}: the message of worker {worker} is corrupt: it says that it is finite and "
        f"has a scale that is not a number between 0 and {stamp.largest_scale:.3g}, the most that the recipe allows"
    )


def _middle(bucket: Bucket) -> int:
    """Where the scales end and the bits begin."""
    return HEADER.itemsize + 4 * bucket.blocks


def _body(buffer: NDArray[np.uint8], bucket: Bucket) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Views of the scales and the bits, along the last axis of ``buffer``."""
    start, middle = HEADER.itemsize, _middle(bucket)
    return buffer[..., start:middle].view(np.float32), buffer[..., middle : middle + bucket.bytes]

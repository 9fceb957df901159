"""One message per bucket: header and records, padded to 16 bytes. Little-endian.

offset 0    header, 32 bytes (HEADER)
offset 32   a record for each block: its scale and its codes (see ``horovod_onebit.codecs``)
then        zeros up to a multiple of 16 bytes (unaligned gathers are slow on NCCL, horovod#3727)

The header's checksum covers its flags and all that follows the header; of messages that stay on a GPU, whose codes
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

from horovod_onebit.errors import JOINED, WireError, workers
from horovod_onebit.kernels.checksum import checksums
from horovod_onebit.layout import Bucket, shares

MAGIC = 0x5449_4231  # "1BIT"
VERSION = 3
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
RECORDS = HEADER.itemsize
"""Where the records begin."""
assert RECORDS == 32


def message_size(bucket: Bucket) -> int:
    """Bytes of the message that carries ``bucket``."""
    size = RECORDS + bucket.bytes
    return -(-size // ALIGNMENT) * ALIGNMENT


class Cut:
    """A bucket cut into shares, one for each of ``workers``.

    Attributes:
        shares: what ``layout.shares`` gives.
        filled: those that have blocks, with their numbers; of many workers and a small bucket, few have any.
        blocks: of each share, (workers,).
        size: bytes of a share's message, the same for all.
    """

    def __init__(self, bucket: Bucket, workers: int) -> None:
        self.bucket, self.shares = bucket, shares(bucket, workers)
        self.filled = [(number, share) for number, share in enumerate(self.shares) if share.bucket.blocks]
        self.blocks = np.array([share.bucket.blocks for share in self.shares])
        self.size = max(message_size(share.bucket) for share in self.shares)


@dataclass(frozen=True)
class Stamp:
    """What all messages of one step have in common: the count of exchanges, the digest of the layout, and the largest
    scale that any of them can have (see ``Rule.largest_scale``)."""

    step: int
    layout: int
    largest_scale: float = math.inf


class Message:
    """A buffer for one bucket's message, written in place by the kernels and reused every step.

    With a ``mirror`` (see ``kernels.cuda.HostMirror``) the kernels write on the device, and the message arrives later;
    ``stays`` says that it leaves from where the kernels write it, so that no more of it arrives here than the scales.

    Attributes:
        buffer: (message_size(bucket),) uint8 in host memory, whatever has arrived of it.
        row: where the kernels write records, from byte ``RECORDS`` on.
        on_device: whether that is outside of host memory.
        arriving: whether ``arrive`` is still to be called.
        finite: whether all of it is, once it is sealed.
    """

    def __init__(
        self, bucket: Bucket, buffer: NDArray[np.uint8] | None = None, mirror: Any = None, *, stays: bool = False
    ) -> None:
        self.bucket = bucket
        self._mirror = mirror
        self.on_device = mirror is not None
        self._stays = stays and self.on_device
        if buffer is None:
            buffer = np.zeros(message_size(bucket), np.uint8) if mirror is None else mirror.host
        self.buffer: NDArray[np.uint8] = buffer
        self.row = buffer if mirror is None else mirror.row
        self.finite, self.arriving = True, False

    def written(self, stamp: Stamp) -> None:
        """The kernels were told to write all of it: seal it, or start to fetch it."""
        if not self.on_device:
            self.seal(stamp)
        else:
            self._mirror.fetch(RECORDS, self.bucket, scales=self._stays)
            self.arriving = True

    def arrived(self) -> bool:
        """Whether ``arrive`` would not block."""
        return not self.arriving or self._mirror.arrived()

    def arrive(self, stamp: Stamp) -> None:
        """Wait until it is here, and seal it."""
        self._mirror.wait()
        self.arriving = False
        self.seal(stamp)
        if self._stays:
            self._mirror.send(RECORDS)

    @property
    def outgoing(self) -> Any:
        """What is to be gathered: ``buffer``, or the bytes where the kernels wrote them."""
        return self._mirror.row if self._stays else self.buffer

    def seal(self, stamp: Stamp, *, finite: bool | None = None) -> NDArray[np.uint8]:
        """Write the header; the message is then ready to be sent. ``finite`` is found out unless it is given."""
        scales = self._mirror.scales if self._stays else scales_of(self.buffer[None], self.bucket)[0]
        self.finite = bool(np.isfinite(scales).all()) if finite is None else finite
        covered = scales.view(np.uint8)[None] if self._stays else None
        seal_rows(self.buffer[None], self.bucket.blocks, self.bucket.index, stamp, self.finite, covered)
        return self.buffer


def messages(buckets: Sequence[Bucket], on_device: Sequence[bool], kernels: ModuleType, *, stay: bool) -> list[Message]:
    """A message for each bucket; of ``kernels``'s making for those whose tensors are on a device."""
    found = []
    for bucket, there in zip(buckets, on_device, strict=True):
        mirror = kernels.host_mirror(message_size(bucket), bucket.blocks) if there else None
        found.append(Message(bucket, mirror=mirror, stays=stay))
    return found


def seal_rows(
    rows: NDArray[np.uint8],
    blocks: NDArray[np.integer] | int,
    index: int,
    stamp: Stamp,
    finite: NDArray[np.bool_] | bool,
    covered: NDArray[np.uint8] | None = None,
) -> None:
    """Write the headers of messages of one bucket, (messages, bytes) uint8, with ``blocks`` blocks each.

    ``covered`` is what of each message the checksum covers, all after the header unless it is given.
    """
    headers = rows[:, :RECORDS].view(HEADER)[:, 0]
    headers["magic"], headers["version"], headers["flags"] = MAGIC, VERSION, np.where(finite, FINITE, 0)
    headers["step"], headers["layout"] = stamp.step % STEPS, stamp.layout
    headers["bucket"], headers["blocks"] = index, blocks
    headers["checksum"] = checksums(rows[:, RECORDS:] if covered is None else covered) + headers["flags"]


def pack(messages: Gathered, stamp: Stamp, *, size: int) -> NDArray[np.uint8]:
    """What ``read`` opened as messages again, (messages * size,) uint8, one after the other."""
    bucket, k = messages.bucket, len(messages.rows)
    rows = np.zeros((k, size), np.uint8)
    end = RECORDS + bucket.bytes
    rows[:, RECORDS:end] = messages.rows[:, RECORDS:end]
    finite = messages.finite if len(messages.finite) == k else np.full(k, messages.finite.all())
    seal_rows(rows, bucket.blocks, bucket.index, stamp, finite)
    return rows.reshape(-1)


class Remote(Protocol):
    """Messages that arrived on a device, one after the other.

    Attributes:
        size: bytes in all.
    """

    size: int

    def words(self, rows: int, bucket: Bucket) -> NDArray[np.int32]:
        """Of each of ``rows`` messages of ``bucket``, the words that ``checked_words`` names, in host memory."""
        ...

    def rows(self, rows: int) -> Any:
        """The messages, where they are stored, for the kernels."""
        ...


def checked_words(bucket: Bucket) -> NDArray[np.intp]:
    """Which words of 4 bytes of a message of ``bucket`` are looked at on the host: the header, then the scales."""
    header = RECORDS // 4
    return np.concatenate([np.arange(header), header + bucket.scales])


@dataclass(frozen=True)
class Gathered:
    """k messages: ``rows`` (k, bytes) uint8, records of ``bucket`` from byte ``RECORDS`` on; ``finite`` (n,), for each
    worker.

    k is n, or 1 where the exchange has taken the mean already. Bytes outside the records are ignored. ``innovation``:
    the records are of the mean less what the rules predict of it.
    """

    bucket: Bucket
    rows: Any
    finite: NDArray[np.bool_]
    innovation: bool = False


def read(
    gathered: NDArray[np.uint8] | Remote, bucket: Bucket, stamp: Stamp, *, workers: int, size: int | None = None
) -> Gathered:
    """Check what arrived, (workers * size,) uint8, against what this step expects, and open it.

    ``size`` is the length of one message, ``message_size(bucket)`` unless padded to more. Raises ``WireError`` that
    names the worker and the field; nothing is decoded then. Damaged messages are refused, and so are scales that are
    negative, not finite or above ``stamp.largest_scale`` in a message that claims to be finite.
    """
    size, senders = message_size(bucket) if size is None else size, np.arange(workers)
    blocks, rows = np.full(workers, bucket.blocks), gathered
    if isinstance(gathered, np.ndarray):
        rows, finite = _open(gathered, bucket.index, blocks, stamp, size, senders)
        scales = scales_of(rows, bucket)
    else:
        scales, finite = _open_remote(gathered, bucket, blocks, stamp, size, senders)
        rows = gathered.rows(workers)
    bad = finite & _corrupt(scales, stamp)
    if bad.any():
        raise _corruption(bucket.index, stamp, np.flatnonzero(bad)[0])
    return Gathered(bucket, rows, finite)


def read_shares(gathered: NDArray[np.uint8], cut: Cut, stamp: Stamp, *, hosts: int) -> Gathered:
    """Check and put together the shares of a bucket: (shares * hosts * size,) uint8, for each share one a host.

    ``finite`` is that of each share of each host, (hosts * shares,). Raises as ``read``.
    """
    bucket, count = cut.bucket, len(cut.shares)
    senders = np.arange(hosts * count).reshape(hosts, count).T.reshape(-1)
    rows, finite = _open(gathered, bucket.index, np.repeat(cut.blocks, hosts), stamp, cut.size, senders)
    rows, finite = rows.reshape(count, hosts, cut.size), finite.reshape(count, hosts)
    whole = np.zeros((hosts, RECORDS + bucket.bytes), np.uint8)
    for number, share in cut.filled:
        whole[:, RECORDS:][:, share.bytes] = rows[number, :, RECORDS : RECORDS + share.bucket.bytes]
    scales = scales_of(whole, bucket)
    if _corrupt(scales, stamp).any():
        for j, share in enumerate(cut.shares):
            bad = finite[j] & _corrupt(scales[:, share.blocks], stamp)
            if bad.any():
                raise _corruption(bucket.index, stamp, senders[j * hosts + np.flatnonzero(bad)[0]])
    return Gathered(bucket, whole, finite.T.reshape(-1))


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
    return rows, _check_headers(rows, rows[:, RECORDS:], index, blocks, stamp, senders)


def _open_remote(
    gathered: Remote,
    bucket: Bucket,
    blocks: NDArray[np.integer],
    stamp: Stamp,
    size: int,
    senders: NDArray[np.integer],
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The scales of the messages, which alone come to the host's memory besides headers, and which are finite."""
    if gathered.size != len(blocks) * size:
        raise WireError(
            f"bucket {bucket.index}: {gathered.size} bytes arrived, expected {len(blocks)} * {size}: "
            "the workers do not have the same model, recipe or version"
        )
    words = gathered.words(len(blocks), bucket)
    heads = words[:, : RECORDS // 4].view(np.uint8)
    scales = np.ascontiguousarray(words[:, RECORDS // 4 :]).view(np.float32)
    return scales, _check_headers(heads, scales.view(np.uint8), bucket.index, blocks, stamp, senders)


def _check_headers(
    rows: NDArray[np.uint8],
    covered: NDArray[np.uint8],
    index: int,
    blocks: NDArray[np.integer],
    stamp: Stamp,
    senders: NDArray[np.integer],
) -> NDArray[np.bool_]:
    """Which messages are finite; their headers, which ``rows`` begin with, are as expected, and nothing is damaged.

    ``covered`` is what of each message the checksum covers.
    """
    headers = rows[:, :RECORDS].copy().view(HEADER)[:, 0]
    joined = senders[headers["magic"] == 0]  # Horovod lets zeros stand for a worker that has left
    if joined.size:
        raise WireError(JOINED.format(workers(joined.tolist())))
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
    damaged = senders[headers["checksum"] != checksums(covered) + headers["flags"]]
    if damaged.size:
        raise WireError(
            f"bucket {index}, step {stamp.step}: the message of {workers(sorted(set(damaged.tolist())))} is damaged: "
            "its checksum is not that of what arrived. The memory or the network of one of the hosts alters data"
        )
    return np.asarray((headers["flags"] & FINITE).astype(bool))


def _corrupt(scales: NDArray[np.float32], stamp: Stamp) -> NDArray[np.bool_]:
    """Which rows contain an invalid scale."""
    largest = np.float32(min(stamp.largest_scale, float(np.finfo(np.float32).max)))
    return np.asarray((~((scales >= 0) & (scales <= largest))).any(axis=1))


def _corruption(index: int, stamp: Stamp, worker: np.integer) -> WireError:
    return WireError(
        f"bucket {index}, step {stamp.step}: the message of worker {worker} is corrupt: it says that it is finite and "
        f"has a scale that is not a number between 0 and {stamp.largest_scale:.3g}, the most that the recipe allows"
    )


def scales_of(rows: NDArray[np.uint8], bucket: Bucket) -> NDArray[np.float32]:
    """The scales of messages of ``bucket``, (k, bytes) uint8: (k, blocks), copied."""
    words = rows[:, RECORDS : RECORDS + bucket.bytes].view(np.float32)
    return np.ascontiguousarray(words[:, bucket.scales])

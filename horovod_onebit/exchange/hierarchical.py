"""Hierarchical exchange: exact within a host, where links are fast; one bit between hosts.

With L workers on each of H hosts, worker j of a host takes care of share j of every bucket:

    reduce-scatter      within the host: the sum of its workers' gradients, a share for each, as float32
    encode              the share's mean gradient: one compression for each host, and not for each worker
    allgather           between the hosts: the messages for share j, among the workers j
    allgather           within the host: all messages for all shares, which every worker decodes

A host receives (H - 1) messages, whatever L is. The residual of a share is its worker's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_onebit import wire
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.exchange import Collectives, Encode, Encoded, Gradient, Handle
from horovod_onebit.kernels.reference import Array
from horovod_onebit.layout import Bucket, Layout, Piece, Share, shares
from horovod_onebit.rules import Context


@dataclass
class _Shared:
    """What this worker keeps for one bucket."""

    shares: tuple[Share, ...]
    own: wire.Message
    part: int  # elements of a share, the same for all
    offsets: dict[tuple[int, int], int]  # where a piece of the own share begins


class Hierarchical:
    def __init__(self, context: Context, collectives: Collectives) -> None:
        self.context = context
        hosts = collectives.hosts()
        if hosts is None:
            raise ConfigurationError(
                "exchange='hierarchical' needs several hosts with the same number of workers, at least two, all of the "
                "world, and in the PyTorch face hvd.init(process_sets='dynamic')"
            )
        self.local, self.cross = hosts
        self.shared: list[_Shared] = []
        self.compressors = self.cross.size

    def served(self) -> dict[str, Bucket]:
        return {}

    def prepare(self, layout: Layout) -> None:
        self.shared = [self._share(bucket) for bucket in layout.buckets]

    def _share(self, bucket: Bucket) -> _Shared:
        cut = shares(bucket, self.local.size)
        size = max(wire.message_size(share.bucket) for share in cut)
        own = cut[self.local.rank].bucket
        offsets, start = {}, 0
        for piece in own.pieces:
            offsets[piece.tensor, piece.start] = start
            start += piece.stop - piece.start
        message = wire.Message(own, np.zeros(size, np.uint8))
        return _Shared(cut, message, max(share.bucket.size for share in cut), offsets)

    def start(
        self, message: wire.Message, gradient: Gradient, encode: Encode, stamp: wire.Stamp, name: str
    ) -> _Pending:
        shared = self.shared[message.bucket.index]
        parts = np.zeros((self.local.size, shared.part), np.float32)
        for part, share in zip(parts, shared.shares, strict=True):
            start = 0
            for piece in share.bucket.pieces:
                stop = start + piece.stop - piece.start
                part[start:stop] = self.context.kernels.host(gradient(piece))
                start = stop
        handle = self.local.reduce_scatter(parts.reshape(-1), f"{name}.reduce")
        return _Pending(self, shared, message.bucket, encode, stamp, name, handle)

    def settle(self, taken: bool) -> None:
        pass

    def bytes_sent(self, bucket: Bucket) -> int:
        """Between hosts only."""
        return (self.cross.size - 1) * self.shared[bucket.index].own.buffer.size


class _Pending:
    stages = 2
    arriving = False

    def __init__(
        self,
        exchange: Hierarchical,
        shared: _Shared,
        bucket: Bucket,
        encode: Encode,
        stamp: wire.Stamp,
        name: str,
        handle: Handle,
    ) -> None:
        self.exchange, self.shared, self.bucket = exchange, shared, bucket
        self.encode, self.stamp, self.name = encode, stamp, name
        self.handle = handle
        self.encoded: Encoded | None = None

    def ready(self) -> bool:
        return self.handle.ready()

    def advance(self) -> None:
        arrived = self.handle.wait()
        if self.encoded is not None:
            self.handle = self.exchange.local.allgather(arrived, f"{self.name}.share")
            return
        mean = arrived / np.float32(self.exchange.local.size)
        offsets = self.shared.offsets

        def gradient(piece: Piece) -> Array:
            start = offsets[piece.tensor, piece.start]
            return mean[start : start + piece.stop - piece.start]

        self.encode(self.shared.own, gradient)
        self.encoded = Encoded(self.shared.own, gradient)
        self.handle = self.exchange.cross.allgather(self.shared.own.buffer, f"{self.name}.gather")

    def wait(self) -> wire.Gathered:
        """Put the hosts' messages for all shares together."""
        hosts, size = self.exchange.cross.size, self.shared.own.buffer.size
        return wire.read_shares(self.handle.wait(), self.bucket, self.shared.shares, self.stamp, hosts=hosts, size=size)

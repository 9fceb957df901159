"""Hierarchical exchange: exact within a host, where links are fast; one bit between hosts, by any other exchange.

With L workers on each of H hosts, worker j of a host takes care of share j of every bucket:

    reduce-scatter      within the host: the sum of its workers' gradients, a share for each, as float32
    encode              the share's mean gradient: one compression for each host, and not for each worker
    another exchange    between the hosts: the messages for share j, among the workers j
    allgather           within the host: what arrived for all shares, which every worker decodes

With the direct exchange a host receives (H - 1) messages, whatever L is. The residual of a share is its worker's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from horovod_onebit import exchange, wire
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.exchange import Collectives, Encode, Gradient, Travel
from horovod_onebit.feedback import ErrorFeedback
from horovod_onebit.kernels.reference import Array
from horovod_onebit.layout import Bucket, Piece, Share, shares
from horovod_onebit.rules import Context


@dataclass
class _Shared:
    """What this worker keeps for one bucket."""

    shares: tuple[Share, ...]
    own: wire.Message
    part: int  # elements of a share, the same for all
    offsets: dict[tuple[int, int], int]  # where a piece of the own share begins
    back: wire.Cut | None = None  # what the hosts' messages are shares of


class Exchange(exchange.Exchange):
    between = "direct"

    def __init__(
        self,
        context: Context,
        collectives: Collectives,
        feedback: ErrorFeedback,
        buckets: Sequence[Bucket],
        digest: int,
    ) -> None:
        hosts = collectives.hosts()
        if hosts is None:
            raise ConfigurationError(
                "exchange='hierarchical' needs several hosts with the same number of workers, at least two, all of the "
                "world, and in the PyTorch face hvd.init(process_sets='dynamic')"
            )
        self._local, cross = hosts
        self._shared = {bucket.index: self._share(bucket) for bucket in buckets}
        own = [shared.own.bucket for shared in self._shared.values()]
        self._between = exchange.kind(self.between)(context, cross, feedback, own, digest)
        super().__init__(context, collectives, feedback, buckets, digest)
        self.stages = 2 + self._between.stages
        self.compressors = self._between.compressors

    @property
    def context(self) -> Context:
        return self._between.context

    @context.setter
    def context(self, context: Context) -> None:
        self._between.context = context

    def _share(self, bucket: Bucket) -> _Shared:
        cut = shares(bucket, self._local.size)
        own = cut[self._local.rank].bucket
        offsets, start = {}, 0
        for piece in own.pieces:
            offsets[piece.tensor, piece.start] = start
            start += piece.stop - piece.start
        return _Shared(cut, wire.Message(own), max(share.bucket.size for share in cut), offsets)

    def travel(self, message: wire.Message, gradient: Gradient, encode: Encode, stamp: wire.Stamp, name: str) -> Travel:
        shared, local = self._shared[message.bucket.index], self._local
        summed = yield local.reduce_scatter(self._parts(shared, gradient), f"{name}.reduce")
        mean = summed / np.float32(local.size)

        def share_gradient(piece: Piece) -> Array:
            start = shared.offsets[piece.tensor, piece.start]
            return mean[start : start + piece.stop - piece.start]

        arrived = yield from self._between.travel(shared.own, share_gradient, encode, stamp, f"{name}.between")
        # Whatever the other exchange has made of it: one message a host, or their mean, of another codec perhaps.
        if shared.back is None:
            shared.back = wire.Cut(message.bucket.coded(arrived.bucket.codec), local.size)
        packed = wire.pack(arrived, stamp, size=shared.back.size)
        gathered = yield local.allgather(packed, f"{name}.share")
        return wire.read_shares(gathered, shared.back, stamp, hosts=len(arrived.rows))

    def _parts(self, shared: _Shared, gradient: Gradient) -> Array:
        """The gradients, share by share."""
        parts = np.zeros((self._local.size, shared.part), np.float32)
        for part, share in zip(parts, shared.shares, strict=True):
            start = 0
            for piece in share.bucket.pieces:
                stop = start + piece.stop - piece.start
                part[start:stop] = self.context.kernels.host(gradient(piece))
                start = stop
        return parts.reshape(-1)

    def settle(self, taken: bool) -> None:
        self._between.settle(taken)

    def served(self) -> Mapping[str, Bucket]:
        return self._between.served()

    def bytes_sent(self, bucket: Bucket) -> int:
        """Between hosts only."""
        return self._between.bytes_sent(self._shared[bucket.index].own.bucket)

"""Two-stage exchange: the server of Algorithm 1 (lines 10 to 15), with each worker serving a share of every bucket.

On worker j, for its share of a bucket (the numbers are the lines of Algorithm 1):

    alltoall        each worker sends every server its share of the message
    11  y        = sum_i C_i / n + error_j         the server's own residual
    12  C_j      = scale * sign(y)
    13  error_j <- y - C_j                         against the scaled sign
    allgather       the servers' messages together are the message of the mean
    15  mean     = C

A worker sends and receives 2 (n - 1) / n messages, whatever n is. Shares are cut at blocks, so that both stages
have the same scales and the result is laid out like a worker's own message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from horovod_onebit import wire
from horovod_onebit.exchange import Collectives, Encode, Encoded, Gradient, Handle
from horovod_onebit.feedback import SERVER_PREFIX, ErrorFeedback
from horovod_onebit.kernels.reference import Array
from horovod_onebit.layout import Bucket, Layout, Share, shares
from horovod_onebit.rules import Context


@dataclass
class _Served:
    """What this worker keeps for one bucket."""

    name: str  # of the residual
    shares: tuple[Share, ...]
    blocks: np.ndarray  # of each share
    size: int  # bytes of one part, the same for all
    parts: list[wire.Message]  # to each server, in one buffer
    outgoing: np.ndarray
    own: wire.Message  # from this server
    error: Array
    next_error: Array


class TwoStage:
    def __init__(self, context: Context, collectives: Collectives, feedback: ErrorFeedback) -> None:
        self.context = context
        self.collectives = collectives
        self.feedback = feedback
        self._served: list[_Served] = []
        self.compressors = collectives.size

    def served(self) -> dict[str, Bucket]:
        return {served.name: served.own.bucket for served in self._served}

    def prepare(self, layout: Layout) -> None:
        """Cut every bucket into shares. The server's residual survives as long as the layout does."""
        self._served = [self._serve(bucket, layout.digest) for bucket in layout.buckets]

    def _serve(self, bucket: Bucket, digest: int) -> _Served:
        n, rank = self.collectives.size, self.collectives.rank
        cut = shares(bucket, n)
        size = max(wire.message_size(share.bucket) for share in cut)
        outgoing = np.zeros(n * size, np.uint8)
        parts = [wire.Message(share.bucket, outgoing[j * size : (j + 1) * size]) for j, share in enumerate(cut)]
        own = wire.Message(cut[rank].bucket, np.zeros(size, np.uint8))
        name = f"{SERVER_PREFIX}{digest:016x}.{bucket.index}"
        error = self.feedback.residual(name, cut[rank].bucket.size)
        blocks = np.array([share.bucket.blocks for share in cut])
        return _Served(name, cut, blocks, size, parts, outgoing, own, error, np.zeros_like(error))

    def start(
        self, message: wire.Message, gradient: Gradient, encode: Encode, stamp: wire.Stamp, name: str
    ) -> _Pending:
        encode(message, gradient)
        return _Pending(self, self._served[message.bucket.index], Encoded(message, gradient), stamp, name)

    def settle(self, taken: bool) -> None:
        if taken:
            for served in self._served:
                served.error[:] = served.next_error

    def bytes_sent(self, bucket: Bucket) -> int:
        return 2 * (self.collectives.size - 1) * self._served[bucket.index].size


class _Pending:
    def __init__(self, exchange: TwoStage, served: _Served, encoded: Encoded, stamp: wire.Stamp, name: str) -> None:
        self.exchange, self.served, self.encoded = exchange, served, encoded
        self.stamp, self.name = stamp, name
        self.finite = np.ones(0, bool)
        self.stages = 1 + encoded.message.arriving
        self.handle: Handle | None = None if encoded.message.arriving else self._scatter()

    @property
    def arriving(self) -> bool:
        return self.encoded.message.arriving

    def ready(self) -> bool:
        return self.encoded.message.arrived() if self.handle is None else self.handle.ready()

    def advance(self) -> None:
        if self.handle is None:
            self.encoded.message.arrive(self.stamp)
            self.handle = self._scatter()
        else:
            self.handle = self._serve(self.handle)

    def _scatter(self) -> Handle:
        """Send every server its share of the message."""
        served, message = self.served, self.encoded.message
        for share, part in zip(served.shares, served.parts, strict=True):
            part.scales[:] = message.scales[share.blocks]
            part.bits[:] = message.bits[share.bytes]
        rows = served.outgoing.reshape(-1, served.size)
        wire.seal_rows(rows, served.blocks, message.bucket.index, self.stamp, message.finite)
        return self.exchange.collectives.alltoall(served.outgoing, f"{self.name}.scatter")

    def _serve(self, scattered: Handle) -> Handle:
        """Decode the mean of this worker's share, compress it again, send it to all."""
        served, collectives = self.served, self.exchange.collectives
        n, share = collectives.size, served.own.bucket
        messages = wire.read(scattered.wait(), share, self.stamp, workers=n, size=served.size)
        self.finite = messages.finite
        if messages.finite.all():
            self._recode(messages)
        served.own.seal(self.stamp, finite=bool(messages.finite.all()))
        return collectives.allgather(served.own.buffer, f"{self.name}.gather")

    def _recode(self, messages: wire.Gathered) -> None:
        served, context = self.served, self.exchange.context
        start = 0
        for piece in served.own.bucket.pieces:
            stop = start + piece.stop - piece.start
            context.kernels.recode(
                messages.scales[:, piece.blocks],
                messages.bits[:, piece.bytes],
                served.error[start:stop],
                served.next_error[start:stop],
                served.own.scales[piece.blocks],
                served.own.bits[piece.bytes],
                context.recipe.scale,
                piece.block_size,
            )
            start = stop

    def wait(self) -> wire.Gathered:
        """Put the servers' messages together to one that covers the whole bucket."""
        served, bucket = self.served, self.encoded.message.bucket
        assert self.handle is not None
        found = wire.read_shares(self.handle.wait(), bucket, served.shares, self.stamp, hosts=1, size=served.size)
        return replace(found, finite=self.finite)

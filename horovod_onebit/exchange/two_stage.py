"""Two-stage exchange: the server of Algorithm 1 (lines 10 to 15), with each worker serving a share of every bucket.

On worker j, for its share of a bucket (the numbers are the lines of Algorithm 1):

    alltoall        each worker sends every server its share of the message
    11  y        = sum_i C_i / n + error_j         the server's own residual
    12  C_j      = scale * sign(y), or two bits    ``Recipe.server_codec``
    13  error_j <- y - C_j                         against the scaled sign
    allgather       the servers' messages together are the message of the mean
    15  mean     = C

With two bits, a server takes from y what all workers know of the mean beforehand, beta1 m in the space that is
compressed, and they add it again. What is left is smaller, and so is what compression loses of it (predictive coding;
study 4).

A worker sends and receives (n - 1) / n of a message of each kind, whatever n is. Shares are cut at blocks, so that both
stages have the same scales and the result is laid out like a worker's own message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from horovod_onebit import codecs, exchange, wire
from horovod_onebit.exchange import Collectives, Outgoing, Predict, Travel, encoded
from horovod_onebit.feedback import SERVER_PREFIX, ErrorFeedback, held_back
from horovod_onebit.kernels import reference
from horovod_onebit.kernels.reference import Array
from horovod_onebit.layout import Bucket
from horovod_onebit.rules import Context
from horovod_onebit.wire import RECORDS


@dataclass
class _Served:
    """What this worker keeps for one bucket."""

    name: str  # of the residual
    cut: wire.Cut  # of what the workers send
    again: wire.Cut  # of what the servers send
    outgoing: NDArray[np.uint8]  # a share to each server
    own: wire.Message  # from this server
    error: Array
    next_error: Array


class Exchange(exchange.Exchange):
    stages = 1

    def __init__(
        self,
        context: Context,
        collectives: Collectives,
        feedback: ErrorFeedback,
        buckets: Sequence[Bucket],
        digest: int,
    ) -> None:
        """Cut every bucket into shares. The server's residual survives as long as the layout does."""
        super().__init__(context, collectives, feedback, buckets, digest)
        self._codec = codecs.find(context.recipe.server_codec)
        self._served = {bucket.index: self._serve(bucket, digest, feedback) for bucket in buckets}

    def _serve(self, bucket: Bucket, digest: int, feedback: ErrorFeedback) -> _Served:
        n, rank = self.collectives.size, self.collectives.rank
        cut = wire.Cut(bucket, n)
        again = wire.Cut(bucket.coded(self._codec), n)
        own = wire.Message(again.shares[rank].bucket, np.zeros(again.size, np.uint8))
        name = f"{SERVER_PREFIX}{digest:016x}.{bucket.index}"
        error = feedback.residual(name, own.bucket.size)
        return _Served(name, cut, again, np.zeros(n * cut.size, np.uint8), own, error, np.zeros_like(error))

    def served(self) -> Mapping[str, Bucket]:
        return {served.name: served.own.bucket for served in self._served.values()}

    def travel(self, outgoing: Outgoing) -> Travel:
        message, stamp, name = outgoing.message, outgoing.stamp, outgoing.name
        served, n = self._served[message.bucket.index], self.collectives.size
        # With one bit as published: what is lost of the innovation would be larger than it.
        predict = outgoing.predict if self._codec.bits > 1 else None
        cut = served.cut
        yield from encoded(outgoing)
        # To every server its share of the message.
        rows = served.outgoing.reshape(-1, cut.size)
        for number, share in cut.filled:
            records = message.buffer[RECORDS + share.bytes.start : RECORDS + share.bytes.stop]
            rows[number, RECORDS : RECORDS + len(records)] = records
        wire.seal_rows(rows, cut.blocks, message.bucket.index, stamp, message.finite)
        scattered = yield self.collectives.alltoall(served.outgoing, f"{name}.scatter")
        # The mean of this worker's share, compressed again, to all.
        share = cut.shares[self.collectives.rank]
        received = wire.read(scattered, share.bucket, stamp, workers=n, size=cut.size)
        finite = bool(received.finite.all())
        if finite:
            self._recode(served, received, predict, outgoing)
        served.own.seal(stamp, finite=None if finite else False)  # it may overflow here, too
        gathered = yield self.collectives.allgather(served.own.buffer, f"{name}.gather")
        # The servers' messages are one that covers the whole bucket.
        whole = wire.read_shares(gathered, served.again, stamp, hosts=1)
        everywhere = received.finite & bool(whole.finite.all())
        return replace(whole, finite=everywhere, innovation=predict is not None)

    def _recode(self, served: _Served, received: wire.Gathered, predict: Predict | None, outgoing: Outgoing) -> None:
        start, context = 0, self.context
        for piece, again in zip(received.bucket.pieces, served.own.bucket.pieces, strict=True):
            stop = start + piece.stop - piece.start
            error = served.next_error[start:stop]
            error[:] = served.error[start:stop]
            share = outgoing.shares.get(piece.tensor, 1.0)
            with held_back(error, share, reference) if share < 1 else nullcontext():
                if predict is not None:
                    predict(piece, error)
                context.kernels.recode(
                    received.rows,
                    RECORDS + piece.bytes.start,
                    context.coding(piece.block_size),
                    error,
                    error,
                    served.own.buffer,
                    RECORDS + again.bytes.start,
                    context.coding(piece.block_size, served.own.bucket.codec),
                    outgoing.variance(piece),
                )
            start = stop

    def commit(self) -> None:
        for served in self._served.values():
            served.error[:] = served.next_error

    def bytes_sent(self, bucket: Bucket) -> int:
        served = self._served[bucket.index]
        return (self.collectives.size - 1) * (served.cut.size + served.again.size)

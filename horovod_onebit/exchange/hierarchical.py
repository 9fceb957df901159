"""Hierarchical exchange: exact within a host, where links are fast; one bit between hosts, by any other exchange.

With L workers on each of H hosts, worker j of a host takes care of share j of every bucket:

    alltoall            within the host: each worker gets all gradients of its share, as float32, and adds them up;
                        from GPU to GPU where Horovod has NCCL
    encode              the share's mean gradient: one compression for each host, and not for each worker
    another exchange    between the hosts: the messages for share j, among the workers j
    allgather           within the host: what arrived for all shares, which every worker decodes

A host receives what one worker would in a world of H workers, whatever L is. The residual of a share is its worker's.
The other exchange is direct for few hosts and two-stage for many (``costs.between_hosts``).

An alltoall and not a reduce-scatter: over Gloo that takes four to seven times as long (``python -m benchmarks.local``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from horovod_onebit import costs, exchange, wire
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.exchange import Collectives, Gradient, Outgoing, Travel
from horovod_onebit.feedback import ErrorFeedback
from horovod_onebit.kernels.reference import Array
from horovod_onebit.layout import Bucket, Piece, Share, shares
from horovod_onebit.rules import Context
from horovod_onebit.tasks import Task


@dataclass
class _Shared:
    """What this worker keeps for one bucket."""

    shares: tuple[Share, ...]
    own: wire.Message
    part: int  # elements of a share, the same for all
    offsets: dict[tuple[int, int], int]  # where a piece of the own share begins
    back: wire.Cut | None = None  # what the hosts' messages are shares of
    parts: Any = None  # on a GPU: the gradients, share by share


class Exchange(exchange.Exchange):
    of_all = False
    between: str | None = None
    """The exchange between hosts; None chooses."""

    def __init__(
        self,
        context: Context,
        collectives: Collectives,
        feedback: ErrorFeedback,
        buckets: Sequence[Bucket],
        digest: int,
        groups: tuple[Collectives, Collectives],
    ) -> None:
        self._local, cross = groups
        self._shared = {bucket.index: self._share(bucket) for bucket in buckets}
        elements = sum(bucket.size for bucket in buckets)
        between = self.between or costs.between_hosts(elements, context.recipe, cross.size)
        self._between = exchange.find(between)(context, cross, feedback, self.encodes(), digest)
        super().__init__(context, collectives, feedback, buckets, digest)
        self.stages = 2 + self._between.stages
        self.compressors = self._between.compressors

    @classmethod
    def create(cls, context: Context, collectives: Collectives, *rest: Any) -> Task[Any]:
        groups = yield from _groups(collectives)
        made: Any = cls
        return made(context, collectives, *rest, groups)

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

    def travel(self, outgoing: Outgoing) -> Travel:
        message, stamp, name = outgoing.message, outgoing.stamp, outgoing.name
        shared, local = self._shared[message.bucket.index], self._local
        on_device = message.on_device and local.takes_device_memory
        parts = self._parts(shared, outgoing.gradient, on_device=on_device)
        arrived = yield local.alltoall(parts, f"{name}.reduce")
        mean = self._mean(shared, arrived, on_device=on_device)
        del arrived, parts

        def share_gradient(piece: Piece) -> Array:
            start = shared.offsets[piece.tensor, piece.start]
            return mean[start : start + piece.stop - piece.start]

        if shared.own.on_device != message.on_device:
            kernels = self.context.kernels
            (shared.own,) = wire.messages([shared.own.bucket], [message.on_device], kernels, stay=False)
        between = replace(outgoing, message=shared.own, gradient=share_gradient, name=f"{name}.between")
        messages = yield from self._between.travel(between)
        # Whatever the other exchange has made of it: one message a host, or their mean, of another codec perhaps.
        if shared.back is None:
            shared.back = wire.Cut(message.bucket.coded(messages.bucket.codec), local.size)
        packed = wire.pack(messages, stamp, size=shared.back.size)
        gathered = yield local.allgather(packed, f"{name}.share")
        whole = wire.read_shares(gathered, shared.back, stamp, hosts=len(messages.rows))
        return replace(whole, innovation=messages.innovation)

    def _parts(self, shared: _Shared, gradient: Gradient, *, on_device: bool) -> Any:
        """The gradients as float32, share by share, in host memory or in that of a GPU."""
        kernels, size = self.context.kernels, self._local.size * shared.part
        if on_device and shared.parts is None:
            shared.parts = kernels.zeros(size)
        # An exchange that was cancelled may still read what is overwritten here: nobody reads what comes of it.
        parts = shared.parts if on_device else np.zeros(size, np.float32)
        with kernels.batch():
            for number, share in enumerate(shared.shares):
                start = number * shared.part
                for piece in share.bucket.pieces:
                    stop = start + piece.stop - piece.start
                    if on_device:
                        kernels.widen(gradient(piece), parts[start:stop])
                    else:
                        parts[start:stop] = kernels.host(gradient(piece))
                    start = stop
        return parts

    def _mean(self, shared: _Shared, arrived: Any, *, on_device: bool) -> Any:
        """The mean of what the host's workers sent of this one's share."""
        if not on_device:
            return arrived.view(np.float32).reshape(self._local.size, -1).mean(axis=0)
        mean = shared.parts[: shared.part]  # which have been sent
        self.context.kernels.mean(arrived, mean)
        return mean

    def commit(self) -> None:
        self._between.commit()

    def encodes(self) -> Sequence[Bucket]:
        return [shared.own.bucket for shared in self._shared.values()]

    def served(self) -> Mapping[str, Bucket]:
        return self._between.served()

    def bytes_sent(self, bucket: Bucket) -> int:
        """Between hosts only."""
        return self._between.bytes_sent(self._shared[bucket.index].own.bucket)


def _groups(collectives: Collectives) -> Task[tuple[Collectives, Collectives]]:
    """The workers of this host, and those of the same place on all hosts. Collective."""
    places, _ = yield from exchange.ranks_by_host(collectives)
    if len(places) < 2 or len(places[0]) < 2:
        where = f"{len(places)} host{'s' if len(places) > 1 else ''}" if places else "hosts that differ"
        raise ConfigurationError(
            "exchange='hierarchical' needs several hosts with the same number of workers, at least two; there are "
            f"{collectives.size} workers on {where}: use exchange='auto'"
        )
    if (groups := collectives.hosts(places)) is None:
        raise ConfigurationError(
            "exchange='hierarchical' needs process sets for the workers of each host: call "
            "hvd.init(process_sets='dynamic') (not under Horovod elastic, whose jobs would end with any worker that "
            "dies), give the optimizer no process_set, or use exchange='auto'"
        )
    return groups

"""Direct exchange: one allgather; every worker decodes the messages of all.

One compression and no server, so nothing but a worker's own residual is owed. A worker sends and receives
(n - 1) messages: best for few workers, level with a float32 ring allreduce at n = 64 (MATH: constants).
"""

from __future__ import annotations

from horovod_onebit import wire
from horovod_onebit.exchange import Collectives, Encode, Encoded, Gradient, Handle
from horovod_onebit.layout import Bucket, Layout
from horovod_onebit.rules import Context


class _Pending:
    def __init__(self, collectives: Collectives, encoded: Encoded, stamp: wire.Stamp, name: str) -> None:
        self.collectives, self.encoded, self.stamp, self.name = collectives, encoded, stamp, name
        self.stages = int(encoded.message.arriving)
        self.handle: Handle | None = None if self.stages else self._send()

    @property
    def arriving(self) -> bool:
        return self.encoded.message.arriving

    def _send(self) -> Handle:
        return self.collectives.allgather(self.encoded.message.outgoing, self.name)

    def ready(self) -> bool:
        return self.encoded.message.arrived()

    def advance(self) -> None:
        self.encoded.message.arrive(self.stamp)
        self.handle = self._send()

    def wait(self) -> wire.Gathered:
        assert self.handle is not None
        bucket, workers = self.encoded.message.bucket, self.collectives.size
        return wire.read(self.handle.wait(), bucket, self.stamp, workers=workers)


class Direct:
    def __init__(self, context: Context, collectives: Collectives) -> None:
        self.context = context
        self.collectives = collectives
        self.compressors = collectives.size

    def served(self) -> dict[str, Bucket]:
        return {}

    def prepare(self, layout: Layout) -> None:
        pass

    def start(
        self, message: wire.Message, gradient: Gradient, encode: Encode, stamp: wire.Stamp, name: str
    ) -> _Pending:
        encode(message, gradient)
        return _Pending(self.collectives, Encoded(message, gradient), stamp, name)

    def settle(self, taken: bool) -> None:
        pass

    def bytes_sent(self, bucket: Bucket) -> int:
        return (self.collectives.size - 1) * wire.message_size(bucket)

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
    stages = 0

    def __init__(self, handle: Handle, encoded: Encoded, stamp: wire.Stamp, workers: int) -> None:
        self.handle, self.encoded, self.stamp, self.workers = handle, encoded, stamp, workers

    def ready(self) -> bool:
        return True

    def advance(self) -> None:
        pass

    def wait(self) -> wire.Gathered:
        return wire.read(self.handle.wait(), self.encoded.message.bucket, self.stamp, workers=self.workers)


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
        handle = self.collectives.allgather(message.buffer, name)
        return _Pending(handle, Encoded(message, gradient), stamp, self.collectives.size)

    def settle(self, taken: bool) -> None:
        pass

    def bytes_sent(self, bucket: Bucket) -> int:
        return (self.collectives.size - 1) * wire.message_size(bucket)

"""Direct exchange: one allgather; every worker decodes the messages of all.

One compression and no server, so there are no residuals but each worker's own. A worker sends and receives
(n - 1) messages: best for few workers, level with a float32 ring allreduce at n = 64 (MATH: constants).
"""

from __future__ import annotations

from horovod_onebit import exchange, wire
from horovod_onebit.exchange import Encode, Gradient, Predict, Travel, encoded
from horovod_onebit.layout import Bucket


class Exchange(exchange.Exchange):
    from_device = True

    def travel(
        self,
        message: wire.Message,
        gradient: Gradient,
        encode: Encode,
        stamp: wire.Stamp,
        name: str,
        predict: Predict | None = None,
    ) -> Travel:
        yield from encoded(message, gradient, encode, stamp)
        gathered = yield self.collectives.allgather(message.outgoing, name)
        return wire.read(gathered, message.bucket, stamp, workers=self.collectives.size)

    def bytes_sent(self, bucket: Bucket) -> int:
        return (self.collectives.size - 1) * wire.message_size(bucket)

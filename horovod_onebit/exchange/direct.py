"""Direct exchange: one allgather; every worker decodes the messages of all.

One compression and no server, so there are no residuals but each worker's own. A worker sends and receives
(n - 1) messages, a bit an element each: best for few workers, and as much as a float32 ring allreduce, which
receives 64 (n - 1) / n bits, at n = 64.
"""

from __future__ import annotations

from horovod_onebit import exchange, wire
from horovod_onebit.exchange import Outgoing, Travel, encoded
from horovod_onebit.layout import Bucket


class Exchange(exchange.Exchange):
    from_device = True

    def travel(self, outgoing: Outgoing) -> Travel:
        yield from encoded(outgoing)
        message = outgoing.message
        gathered = yield self.collectives.allgather(message.outgoing, outgoing.name)
        return wire.read(gathered, message.bucket, outgoing.stamp, workers=self.compressors)

    def bytes_sent(self, bucket: Bucket) -> int:
        return (self.compressors - 1) * wire.message_size(bucket)

"""Are all workers' weights and optimizer state the same, bit by bit?"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.exchange import Collectives
from horovod_onebit.handshake import REPLICAS, compare
from horovod_onebit.tasks import Task


def checksum(array: NDArray) -> int:
    """CRC-32 of the bytes of ``array``, as an unsigned number."""
    return zlib.crc32(np.ascontiguousarray(array).data)


def due(every: int | None, steps: int, apart: int) -> bool:
    """Whether workers that have the same weights after ``steps`` compare them: one of the last ``apart`` steps, after
    which they had not, was a multiple of ``every``."""
    return bool(every and steps > 0 and steps % every < apart)


def check(checksums: Mapping[str, int], collectives: Collectives, name: str) -> Task[None]:
    """Compare ``checksums``, by name, with those of worker 0. Collective.

    The names must be the same on all workers, in the same order. Raises ``DesyncError`` on every worker, which names
    what differs and on which workers.
    """
    text = str(list(checksums.values()))
    yield from compare(collectives, name, {"replicas": REPLICAS}, {"replicas": checksums}, replicas=text)

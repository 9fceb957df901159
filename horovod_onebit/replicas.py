"""Are all workers' weights and optimizer state the same, bit by bit?"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.errors import DesyncError
from horovod_onebit.exchange import Collectives
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
    own = np.array(list(checksums.values()), np.uint32)
    gathered = yield collectives.allgather(own.view(np.uint8), name)
    if gathered.nbytes != collectives.size * own.nbytes:
        raise DesyncError("the workers do not have the same parameters and optimizer state")
    rows = np.ascontiguousarray(gathered).view(np.uint32).reshape(collectives.size, -1)
    differ = rows != rows[0]
    if differ.any():
        names = list(checksums)
        where = [f"{names[i]} on worker {np.flatnonzero(differ[:, i]).tolist()}" for i in np.flatnonzero(differ.any(0))]
        more = f" and {len(where) - 5} more" if len(where) > 5 else ""
        raise DesyncError(
            f"replicas have drifted apart from worker 0: {'; '.join(where[:5])}{more}. Broadcast the weights and the "
            "optimizer state, and look for what one worker does alone (a seed, a branch, an edit of the weights)"
        )

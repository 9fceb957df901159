"""What becomes of the error feedback when workers or their exchange change: the sum of all residuals is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_onebit.exchange import Exchange
from horovod_onebit.feedback import SERVER_PREFIX
from horovod_onebit.kernels.reference import Array
from horovod_onebit.layout import Bucket, TensorSpec

Place = tuple[str, int, int]
Residuals = dict[str, Any]
"""Those of one worker: ``feedback``, by name, and the fields of its ``Weighing``."""


class Weighing(NamedTuple):
    """What a worker's residuals mean to the weights.

    Attributes:
        divisor: how many workers' (or hosts') residuals are averaged.
        served: for each residual of a server, which parts of which tensors it belongs to: name, start, stop.
        encodes: the parts that this worker encodes; None if all.
    """

    divisor: int
    served: dict[str, list[Place]]
    encodes: list[Place] | None = None

    @classmethod
    def of(cls, exchange: Exchange, tensors: Sequence[TensorSpec]) -> Weighing:
        """What residuals mean to ``exchange``, whose buckets are of ``tensors``."""

        def places(buckets: Sequence[Bucket]) -> list[Place]:
            return [(tensors[p.tensor].name, p.start, p.stop) for bucket in buckets for p in bucket.pieces]

        own = exchange.encodes()
        served = {key: places([bucket]) for key, bucket in exchange.served().items()}
        return cls(exchange.compressors, served, None if own is None else places(own))

    @classmethod
    def saved(cls, one: Residuals) -> Weighing | None:
        """That of what a file has, whose tuples have become lists, perhaps; None if it has the total."""
        if one["divisor"] is None:
            return None
        served = {key: [tuple(place) for place in places] for key, places in one["served"].items()}
        own = one.get("encodes")  # earlier versions did not write them
        return cls(one["divisor"], served, None if own is None else [tuple(place) for place in own])


def total_residuals(saved: Sequence[Residuals]) -> dict[str, Array]:
    """The mean of the workers' residuals, with those of servers, by tensor: what each worker of a new world gets."""
    total: dict[str, Array] = {}
    for one in saved:
        for name, residual in one["feedback"].items():
            if not name.startswith(SERVER_PREFIX):
                total[name] = total.get(name, np.zeros_like(residual)) + residual / np.float32(one["divisor"])
    for one in saved:
        for key, places in one["served"].items():
            start = 0
            for name, lo, hi in places:
                if name in total:  # it may have been removed since
                    total[name][lo:hi] += one["feedback"][key][start : start + hi - lo]
                start += hi - lo
    return total

"""What becomes of the error feedback when workers or their exchange change: the sum of all residuals is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_onebit.exchange import Exchange
from horovod_onebit.feedback import SERVER_PREFIX
from horovod_onebit.kernels.reference import Array
from horovod_onebit.layout import Bucket, TensorSpec

Place = tuple[str, int, int]
Residuals = dict[str, Any]
"""Those of one worker: ``feedback``, by name, and the fields of its ``ResidualLayout``. Checkpoints and elastic have
besides ``gradients``, what was learned of gradients in few bits: ``coded.Learned``."""


class ResidualLayout(NamedTuple):
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
    def of(cls, exchange: Exchange, tensors: Sequence[TensorSpec]) -> ResidualLayout:
        """What residuals mean to ``exchange``, whose buckets are of ``tensors``."""

        def places(buckets: Sequence[Bucket]) -> list[Place]:
            return [(tensors[p.tensor].name, p.start, p.stop) for bucket in buckets for p in bucket.pieces]

        own = exchange.encodes()
        served = {key: places([bucket]) for key, bucket in exchange.served().items()}
        return cls(exchange.compressors, served, None if own is None else places(own))

    @classmethod
    def saved(cls, one: Residuals) -> ResidualLayout | None:
        """That of ``one``; None if each residual is the total of all."""
        return None if one["divisor"] is None else cls(one["divisor"], one["served"], one["encodes"])


def total_residuals(saved: Iterable[Residuals]) -> dict[str, Array]:
    """The mean of the workers' residuals, with those of servers, by tensor: what each worker of a new world gets.

    Each of ``saved`` is let go before the next one is asked for, which may read it from a file.
    """
    total: dict[str, Array] = {}
    early: list[tuple[Place, Array]] = []
    for one in saved:
        _add(one, total, early)
        del one
    for (name, lo, hi), part in early:
        if name in total:  # it may have been removed since
            total[name][lo:hi] += part
    return total


def _add(one: Residuals, total: dict[str, Array], early: list[tuple[Place, Array]]) -> None:
    """Add a worker's residuals to ``total``; ``early`` are those of its server for tensors that come later."""
    for name, residual in one["feedback"].items():
        if not name.startswith(SERVER_PREFIX):
            share = residual / np.float32(one["divisor"])
            if name in total:
                total[name] += share
            else:
                total[name] = share
    for key, places in one["served"].items():
        start = 0
        for name, lo, hi in places:
            part = one["feedback"][key][start : start + hi - lo]
            if name in total:
                total[name][lo:hi] += part
            else:
                early.append(((name, lo, hi), part.copy()))
            start += hi - lo

"""What happens to the error feedback when the workers change: what all of them together owe to the weights is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_onebit.engine import Engine
from horovod_onebit.feedback import SERVER_PREFIX
from horovod_onebit.kernels.reference import Array

Owed = dict[str, Any]
"""What one worker owes: ``feedback``, its residuals by name; ``divisor``, how many workers' are averaged; ``served``,
for each residual of a server, which parts of which tensors it belongs to."""


def owed_by(engine: Engine) -> Owed:
    """What this worker owes now. The arrays are copies."""
    served = {}
    if engine.layout is not None:
        names = [tensor.name for tensor in engine.layout.tensors]
        for key, bucket in engine.exchange.served().items():
            served[key] = [(names[piece.tensor], piece.start, piece.stop) for piece in bucket.pieces]
    return {"feedback": engine.feedback.state_dict(), "served": served, "divisor": engine.exchange.compressors}


def owed(saved: Sequence[Owed]) -> dict[str, Array]:
    """What workers together owe to the weights, by tensor: if each new worker owes that much, so does their mean."""
    total: dict[str, Array] = {}
    for one in saved:
        for name, residual in one["feedback"].items():
            if not name.startswith(SERVER_PREFIX):
                total[name] = total.get(name, np.zeros_like(residual)) + residual / np.float32(one["divisor"])
    for one in saved:
        for key, places in one["served"].items():
            start = 0
            for name, lo, hi in places:
                total[name][lo:hi] += one["feedback"][key][start : start + hi - lo]
                start += hi - lo
    return total


def workers_changed(engine: Engine) -> bool:
    """Whether Horovod was started anew with another number of workers, and the engine was not told."""
    return engine.context.workers != engine.collectives.size


def leave(engine: Engine, left: Owed | None) -> Owed:
    """Horovod was started anew, with other workers: forget what is under way; returns what is owed. Local.

    ``left`` is what an earlier call returned and nobody has shared out yet: then that is what counts.
    """
    if left is None:
        left = owed_by(engine)
        for name in left["feedback"]:
            if name.startswith(SERVER_PREFIX):
                engine.feedback.discard(name)
    engine.forget_world()
    return left


def share_out(engine: Engine, left: Owed, sizes: Mapping[str, int]) -> None:
    """Let every worker owe what all of them owed together: the tensors of ``sizes``, alike on all. Collective.

    A new worker has left nothing. What a worker that died owed is lost: an n-th of what n workers did.
    """
    total = owed([left])
    handles = {}
    for name, size in sizes.items():
        mine = total.get(name, np.zeros(size, np.float32))
        handles[name] = engine.collectives.allreduce(mine, f"{engine.name}.owed.{name}")
    for name, handle in handles.items():
        engine.feedback.put(name, handle.wait())

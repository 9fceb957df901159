"""What happens to the error feedback when the workers change: what all of them together owe to the weights is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch

from horovod_onebit.feedback import SERVER_PREFIX

if TYPE_CHECKING:
    from horovod_onebit.torch.compressor import Compressor


def owed_by(compressor: Compressor) -> dict[str, Any]:
    """This worker's residuals, and what they mean: how many of them are averaged, where servers' parts belong."""
    engine, layout = compressor.engine, compressor.engine.layout
    served = {}
    if layout is not None:
        for key, bucket in engine.exchange.served().items():
            served[key] = [(layout.tensors[p.tensor].name, p.start, p.stop) for p in bucket.pieces]
    feedback = {name: torch.from_numpy(value) for name, value in engine.feedback.state_dict().items()}
    return {"feedback": feedback, "served": served, "divisor": engine.exchange.compressors}


def owed(saved: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What workers together owe to the weights, by parameter: if each new worker owes that much, so does the mean."""
    total: dict[str, torch.Tensor] = {}
    for one in saved:
        for name, residual in one["feedback"].items():
            if not name.startswith(SERVER_PREFIX):
                total[name] = total.get(name, torch.zeros_like(residual)) + residual / one["divisor"]
    for one in saved:
        for key, places in one["served"].items():
            start = 0
            for name, lo, hi in places:
                total[name][lo:hi] += one["feedback"][key][start : start + hi - lo]
                start += hi - lo
    return total


def leave(compressor: Compressor) -> None:
    """Horovod was started anew, with other workers: forget what is under way, remember what is owed. Local."""
    if compressor.left is None:
        compressor.left = owed_by(compressor)
        for key in compressor.left["feedback"]:
            if key.startswith(SERVER_PREFIX):
                compressor.engine.feedback.discard(key)
    compressor.synchronizer.reset()
    compressor.agreement.reset()
    compressor.overlap.reset()
    compressor.engine.forget_world()
    compressor.changed()


def settle(compressor: Compressor) -> None:
    """Share out what those who ``leave`` owed, if all of the new world's workers are of them. Collective then."""
    if compressor.left is not None:
        share_out(compressor, compressor.left)


def share_out(compressor: Compressor, left: dict[str, Any] | None) -> None:
    """Let every worker owe what all of them owed together; None for a new one. Collective.

    What a worker that died owed is lost: an n-th of what n workers owed.
    """
    total = owed([left]) if left is not None else {}
    feedback = compressor.engine.feedback
    handles = []
    for p in compressor.bindings:
        name = compressor.names[p]
        mine = total.get(name, torch.zeros(p.numel()))
        handles.append((name, hvd.allreduce_async(mine, name=f"onebit.owed.{name}", op=hvd.Sum)))
    for name, handle in handles:
        result = hvd.synchronize(handle).numpy()
        feedback.residual(name, len(result))[:] = result
    compressor.left = None

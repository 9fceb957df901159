"""Checkpoints of a ``NumpyOptimizer`` over any ``Collectives``: the weights and what its rule keeps once, the error
feedback of every worker.

The files are those of ``horovod_onebit.checkpoints``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from horovod_onebit import checkpoints
from horovod_onebit.errors import CheckpointArgumentError
from horovod_onebit.handshake import CHECKPOINT, gather, meet
from horovod_onebit.kernels.reference import Array
from horovod_onebit.optimizer import NumpyOptimizer, check_weights
from horovod_onebit.tasks import Task, run
from horovod_onebit.world import Residuals

SAME = "model"
NAME = "onebit.checkpoint"


def save_checkpoint(folder: str | os.PathLike[str], optimizer: NumpyOptimizer, *, extra: Any = None) -> None:
    """Save ``optimizer`` and its weights to ``folder``, which all workers see. Collective; call it between steps.

    After local steps, the workers are brought together before, as by ``flush()``. ``extra`` is what worker 0 wants
    back: numbers, texts, bytes, paths, NumPy arrays and scalars, and dicts, lists and tuples of these. The last
    checkpoint and the one before it are kept. One job at a time saves to a folder.

    Raises ``CheckpointError`` on all workers, which names the worker and the reason, if one of them cannot write; if
    ``extra`` has something else; if another job saves there; if the workers have taken different numbers of steps;
    or if worker 0 does not see all workers' files. The checkpoints before are then still there, and nothing of this
    one. Raises ``CheckpointArgumentError``, on this worker alone, if ``optimizer`` is something else.
    """
    face = _Numpy(optimizer)
    face.meet()
    checkpoints.save(face, folder, extra)


def load_checkpoint(folder: str | os.PathLike[str], optimizer: NumpyOptimizer, *, previous: bool = False) -> Any:
    """Load the last complete checkpoint of ``folder`` into ``optimizer`` and its weights; returns ``extra``.
    Collective; call it between steps.

    ``optimizer`` is built as the one that was saved: hyperparameters, the learning rate of now among them, are not in
    the file. With as many workers as saved it, the run continues bit for bit; with another number, the residuals of all
    workers are redistributed, and where gradients travel in few bits, ten steps are exact. ``previous`` loads
    the checkpoint before the last one.

    Raises ``CheckpointError`` on all workers if a file is missing, damaged or of something else, or does not fit the
    weights and the optimizer of some worker (names, shapes, the rule, the schedule), and if the exchange of a
    ``Local(delay=...)`` is under way. Nothing was changed then. Raises ``CheckpointArgumentError``, on this worker
    alone, if ``optimizer`` is something else.
    """
    face = _Numpy(optimizer)
    face.meet()
    return checkpoints.load(face, folder, previous=previous)


def load_weights(folder: str | os.PathLike[str], weights: Mapping[str, Array], *, previous: bool = False) -> None:
    """Put the weights of the last complete checkpoint of ``folder`` into ``weights``; nothing else is loaded. Local.

    ``weights`` are names and C-contiguous float32 arrays as those that were saved. ``previous`` loads the checkpoint
    before the last one.

    Raises ``CheckpointArgumentError`` if an argument is of a wrong kind, and ``CheckpointError`` if a file is missing,
    damaged or of something else, or does not fit (names, shapes). The weights are unchanged then.
    """

    def take_over(found: dict[str, Any]) -> None:
        checkpoints.check_same(SAME, checkpoints.described(found["model"]), checkpoints.described(weights))
        _put(weights, found["model"])

    checks = partial(check_weights, weights)
    checkpoints.load_alone(folder, ["model"], checks, take_over, _Numpy, previous=previous)


class _Numpy(checkpoints.Face):
    def __init__(self, optimizer: NumpyOptimizer) -> None:
        if not isinstance(optimizer, NumpyOptimizer):
            raise CheckpointArgumentError(f"optimizer is {type(optimizer).__name__}: expected a NumpyOptimizer")
        self.optimizer, self.collectives = optimizer, optimizer.engine.collectives
        self.rank, self.workers = self.collectives.rank, self.collectives.size
        self.kind = optimizer.kind

    def meet(self) -> None:
        """Raise ``DesyncError`` on all workers unless all save or load. Collective."""
        run(meet(self.collectives, f"{self.optimizer.engine.name}.agreement", CHECKPOINT))

    def gather(self, value: Any) -> list[Any]:
        return list(map(pickle.loads, run(gather(pickle.dumps(value), self.collectives, NAME))))

    def flush(self) -> None:
        self.optimizer.flush()

    def steps(self) -> int:
        return self.optimizer.steps

    def owner(self) -> tuple[object, str]:
        return self.optimizer, str(checkpoints.described(self.optimizer.weights))

    def _progress(self) -> dict[str, Any]:
        return {"counts": self.optimizer.counts(), "arrays": self.optimizer.arrays()}

    def own(self) -> Residuals:
        # Of local steps, each worker keeps moments of its own.
        own = None if self.optimizer.driver.rounds is None else self._progress()
        return {**self.optimizer.residuals(), "state": own}

    def shared(self) -> dict[str, Any]:
        return {"model": self.optimizer.weights, "optimizer": self._progress()}

    def about(self, shared: Mapping[str, Any]) -> Any:
        progress = shared["optimizer"]
        return {
            "model": checkpoints.described(shared["model"]),
            "counts": progress["counts"],
            "arrays": checkpoints.described(progress["arrays"]),
        }

    def check(self, about: Any, own: Residuals) -> None:
        checkpoints.check_same(SAME, about["model"], checkpoints.described(self.optimizer.weights))
        self.optimizer.check_progress(about["counts"], about["arrays"])
        if own["state"] is not None:
            self.optimizer.check_progress(own["state"]["counts"], checkpoints.described(own["state"]["arrays"]))
        self.optimizer.check_residuals(own)

    def take_over(self, shared: Mapping[str, Any] | None, about: Any) -> None:
        if shared is not None:
            _put(self.optimizer.weights, shared["model"])
            _put(self.optimizer.arrays(), shared["optimizer"]["arrays"])

    def spread(self, about: Any, own: Residuals) -> None:
        optimizer = self.optimizer
        run(self._broadcast([*optimizer.weights.values(), *optimizer.arrays().values()]))
        state = own["state"] or {"counts": about["counts"], "arrays": {}}
        optimizer.take_progress(state["counts"], state["arrays"])
        optimizer.load_residuals(own)

    def _broadcast(self, arrays: Iterable[Array]) -> Task[None]:
        """Give all workers the float32 ``arrays`` of worker 0, bit by bit. Collective."""
        for array in arrays:
            bits = array.reshape(-1).view(np.int32)
            bits[:] = yield self.collectives.allreduce(np.zeros_like(bits) if self.rank else bits, NAME)


def _put(arrays: Mapping[str, Array], values: Mapping[str, Array]) -> None:
    for name, array in arrays.items():
        array[...] = values[name]

"""Checkpoints that lose nothing: weights and optimizer state once, the error feedback of every worker.

The files are those of ``horovod_onebit.checkpoints``, and ``torch.load(..., weights_only=True)`` reads all of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import horovod.torch as hvd
import torch

from horovod_onebit import checkpoints, checks
from horovod_onebit.checkpoints import FORMAT
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.torch.compressor import Compressor
from horovod_onebit.torch.functions import broadcast_optimizer_state
from horovod_onebit.torch.optimizer import check_ours
from horovod_onebit.world import Owed, owed, owed_by

logger = logging.getLogger("horovod_onebit")
T = TypeVar("T")


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    extra: dict[str, Any] | None = None,
) -> None:
    """Save to ``folder``, which all workers see. Collective; call it between steps.

    ``extra`` is anything of tensors, numbers, texts and plain containers that worker 0 wants back: an epoch, the state
    of a scheduler. The checkpoint before is removed when this one is complete. Raises ``CheckpointError`` on all
    workers if one of them cannot write; the checkpoint before is then still there.
    """
    compressor = _compressor(optimizer)
    optimizer.flush()  # type: ignore[attr-defined]
    place, rank, workers = checks.folder(folder), hvd.rank(), hvd.size()
    key = hvd.broadcast_object(os.urandom(8).hex(), root_rank=0, name="onebit.checkpoint")

    def write() -> None:
        place.mkdir(parents=True, exist_ok=True)
        own = {"format": FORMAT, "key": key, "worker": rank, **_saved(compressor)}
        _write(own, _worker_file(place, key, rank))
        if rank == 0:
            shared = {"format": FORMAT, "key": key, "model": model.state_dict(), "extra": extra or {}}
            _write(shared | {"optimizer": optimizer.state_dict()}, place / f"{key}.shared.pt")

    def finish() -> None:
        if rank == 0:
            checkpoints.complete(place, key, workers, compressor.steps, ("pt",))

    _all(write, "save")
    _all(finish, "save")


def load_checkpoint(
    folder: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Load the last complete checkpoint of ``folder`` on all workers; returns ``extra``. Collective.

    With as many workers as saved it, the run goes on bit for bit. With another number, what all errors together still
    owe to the weights is shared out anew. Raises ``CheckpointError`` on all workers if a file is missing, truncated or
    of something else.
    """
    _compressor(optimizer)
    place = checks.folder(folder)
    latest = _all(lambda: checkpoints.latest(place), "load")
    key, workers = latest["key"], latest["workers"]
    same = workers == hvd.size()

    def read() -> tuple[dict[str, Any] | None, dict[str, torch.Tensor]]:
        shared = _read(place / f"{key}.shared.pt", key) if hvd.rank() == 0 else None
        if same:
            return shared, _read(_worker_file(place, key, hvd.rank()), key)["feedback"]
        everybody = owed([_arrays(_read(_worker_file(place, key, rank), key)) for rank in range(workers)])
        return shared, {name: torch.from_numpy(value) for name, value in everybody.items()}

    shared, feedback = _all(read, "load")

    def take_over() -> None:
        if shared is not None:
            model.load_state_dict(shared["model"])
            optimizer.load_state_dict(shared["optimizer"])

    _all(take_over, "load")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    broadcast_optimizer_state(optimizer, root_rank=0)
    _all(lambda: optimizer.load_feedback_state_dict(feedback), "load")  # type: ignore[attr-defined]
    if not same and hvd.rank() == 0:
        logger.warning(checkpoints.OTHER_WORKERS, workers, hvd.size())
    return hvd.broadcast_object(None if shared is None else shared["extra"], root_rank=0, name="onebit.extra")


def _saved(compressor: Compressor) -> dict[str, Any]:
    """What this worker owes, in types that ``torch.load(weights_only=True)`` reads."""
    own = owed_by(compressor.engine)
    return own | {"feedback": {name: torch.from_numpy(value) for name, value in own["feedback"].items()}}


def _arrays(saved: dict[str, Any]) -> Owed:
    return saved | {"feedback": {name: value.numpy() for name, value in saved["feedback"].items()}}


def _compressor(optimizer: Any) -> Compressor:
    compressor = check_ours(optimizer)._compressor
    if compressor.process_set.process_set_id != 0:
        raise ConfigurationError("checkpoints are of the whole world, and this optimizer's process_set is a part of it")
    return compressor


def _all(action: Callable[[], T], what: str) -> T:
    return checkpoints.on_all(action, what, lambda text: hvd.allgather_object(text, name="onebit.checkpoint.errors"))


def _worker_file(place: Path, key: str, rank: int) -> Path:
    return checkpoints.worker_file(place, key, rank, "pt")


def _write(value: dict[str, Any], path: Path) -> None:
    checkpoints.replace(path, lambda temporary: torch.save(value, temporary))


def _read(path: Path, key: str) -> dict[str, Any]:
    value = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("key") != key:
        raise ValueError(f"{path} does not belong to this checkpoint")
    return value

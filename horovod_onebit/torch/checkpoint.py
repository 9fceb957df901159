"""Checkpoints that lose nothing: weights and optimizer state once, the error feedback of every worker.

A folder holds, for the last complete checkpoint,

    latest.json                       which one is complete: written last, in one go
    KEY.shared.pt                     model, optimizer, and what else the caller keeps; by worker 0
    KEY.worker-0003.pt                the error feedback of one worker

A run that dies while it saves leaves the one before. All files are read by ``torch.load(..., weights_only=True)``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import horovod.torch as hvd
import torch

from horovod_onebit.errors import CheckpointError, ConfigurationError
from horovod_onebit.torch.compressor import Compressor
from horovod_onebit.torch.functions import broadcast_optimizer_state
from horovod_onebit.torch.optimizer import _DistributedOptimizer
from horovod_onebit.world import Owed, owed, owed_by

logger = logging.getLogger("horovod_onebit")
T = TypeVar("T")
FORMAT = 1


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
    place, rank, workers = Path(folder), hvd.rank(), hvd.size()
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
            text = json.dumps({"format": FORMAT, "key": key, "workers": workers, "step": compressor.steps})
            _replace(place / "latest.json", lambda path: path.write_text(text))
            for old in place.glob("*.pt"):
                if not old.name.startswith(key):
                    old.unlink()

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
    place = Path(folder)
    latest = _all(lambda: _latest(place), "load")
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
        logger.warning(
            "the checkpoint is of %d workers and there are %d: what their errors owe together is shared out anew",
            workers,
            hvd.size(),
        )
    return hvd.broadcast_object(None if shared is None else shared["extra"], root_rank=0, name="onebit.extra")


def _saved(compressor: Compressor) -> dict[str, Any]:
    """What this worker owes, in types that ``torch.load(weights_only=True)`` reads."""
    own = owed_by(compressor.engine)
    return own | {"feedback": {name: torch.from_numpy(value) for name, value in own["feedback"].items()}}


def _arrays(saved: dict[str, Any]) -> Owed:
    return saved | {"feedback": {name: value.numpy() for name, value in saved["feedback"].items()}}


def _compressor(optimizer: Any) -> Compressor:
    if not isinstance(optimizer, _DistributedOptimizer):
        raise ConfigurationError(
            f"optimizer is {type(optimizer).__name__}; expected what horovod_onebit.torch.DistributedOptimizer returned"
        )
    if optimizer._compressor.process_set.process_set_id != 0:
        raise ConfigurationError("checkpoints are of the whole world, and this optimizer's process_set is a part of it")
    return optimizer._compressor


def _all(action: Callable[[], T], what: str) -> T:
    """Do ``action`` on every worker; if it fails on one, raise on all. Collective."""
    result, error = None, ""
    try:
        result = action()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    errors = hvd.allgather_object(error, name="onebit.checkpoint.errors")
    failed = [f"worker {rank}: {text}" for rank, text in enumerate(errors) if text]
    if failed:
        raise CheckpointError(f"cannot {what} the checkpoint; {'; '.join(failed[:3])}")
    return result  # type: ignore[return-value]


def _worker_file(place: Path, key: str, rank: int) -> Path:
    return place / f"{key}.worker-{rank:04d}.pt"


def _write(value: dict[str, Any], path: Path) -> None:
    _replace(path, lambda temporary: torch.save(value, temporary))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Put a file in its place in one go, on the disk before it is there."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def _latest(place: Path) -> dict[str, Any]:
    path = place / "latest.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: there is no complete checkpoint")
    latest = json.loads(path.read_text())
    if not isinstance(latest, dict) or latest.get("format") != FORMAT:
        raise ValueError(f"{path} is not of this library, or of another version of it")
    return latest


def _read(path: Path, key: str) -> dict[str, Any]:
    value = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("key") != key:
        raise ValueError(f"{path} does not belong to this checkpoint")
    return value

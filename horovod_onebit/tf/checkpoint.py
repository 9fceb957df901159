"""Checkpoints that lose nothing, in Keras: the model and its optimizer once, the error feedback of every worker.

The files are those of ``horovod_onebit.checkpoints``: ``KEY.shared.keras`` is read by ``keras.saving.load_model`` too,
``KEY.worker-0003.npz`` by ``numpy.load``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import keras
import numpy as np
from horovod.tensorflow.functions import allgather_object, broadcast_object

from horovod_onebit import checkpoints, checks
from horovod_onebit.checkpoints import FORMAT
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels.reference import Array
from horovod_onebit.tf.functions import broadcast_variables
from horovod_onebit.tf.optimizer import check_ours
from horovod_onebit.world import Owed, owed, owed_by

logger = logging.getLogger("horovod_onebit")
T = TypeVar("T")


def save_checkpoint(folder: str | os.PathLike[str], model: keras.Model, *, extra: Any = None) -> None:
    """Save ``model``, compiled with a ``DistributedOptimizer``, to ``folder``, which all workers see. Collective.

    Call it between batches. ``extra`` is anything that JSON can hold. The checkpoint before is removed when this one
    is complete. Raises ``CheckpointError`` on all workers if one of them cannot write; the one before is then there.
    """
    engine = _optimizer(model)._compressor.engine
    place, rank = checks.folder(folder), hvd.rank()
    key = broadcast_object(os.urandom(8).hex(), root_rank=0, name="onebit.checkpoint")

    def write() -> None:
        place.mkdir(parents=True, exist_ok=True)
        own = owed_by(engine)
        counts = {"exchanges": engine.exchanges, "skipped": engine.skipped, "extra": extra if rank == 0 else None}
        about = {"format": FORMAT, "key": key, "served": own["served"], "divisor": own["divisor"], **counts}
        arrays = {"about": np.array(json.dumps(about)), **{f"error.{k}": v for k, v in own["feedback"].items()}}
        path = checkpoints.worker_file(place, key, rank, "npz")
        checkpoints.replace(path, lambda temporary: np.savez(temporary, **arrays))
        if rank == 0:
            checkpoints.replace(place / f"{key}.shared.keras", model.save)

    def finish() -> None:
        if rank == 0:
            step = int(_optimizer(model).iterations)
            checkpoints.complete(place, key, hvd.size(), step, ("npz", "keras"))

    _all(write, "save")
    _all(finish, "save")


def load_checkpoint(folder: str | os.PathLike[str], model: keras.Model) -> Any:
    """Load the last complete checkpoint of ``folder`` into ``model`` on all workers; returns ``extra``. Collective.

    ``model`` is built and compiled as the one that was saved. With as many workers as saved it, the run goes on as if
    it had not been interrupted; with another number, what all errors together owe to the weights is shared out anew.
    Raises ``CheckpointError`` on all workers if a file is missing, damaged or of something else.
    """
    optimizer = _optimizer(model)
    place = checks.folder(folder)
    latest = _all(lambda: checkpoints.latest(place), "load")
    key, workers = latest["key"], latest["workers"]
    same = workers == hvd.size()

    def read() -> tuple[Any, dict[str, Any], dict[str, Array]]:
        shared = keras.saving.load_model(place / f"{key}.shared.keras") if hvd.rank() == 0 else None
        first = _read(place, key, 0)
        if same:
            return shared, first, _read(place, key, hvd.rank())["feedback"]
        return shared, first, owed([_read(place, key, rank) for rank in range(workers)])

    shared, first, feedback = _all(read, "load")

    def take_over() -> None:
        if shared is not None:
            for to, of in ((model, shared), (optimizer, shared.optimizer)):
                for variable, value in zip(to.variables, of.variables, strict=True):
                    variable.assign(value)

    _all(take_over, "load")
    broadcast_variables([*model.variables, *optimizer.variables])
    engine = optimizer._compressor.engine
    _all(lambda: optimizer.load_feedback_state_dict(feedback), "load")
    engine.exchanges, engine.skipped = first["exchanges"], first["skipped"]
    if not same and hvd.rank() == 0:
        logger.warning(checkpoints.OTHER_WORKERS, workers, hvd.size())
    return first["extra"]


def _read(place: Path, key: str, rank: int) -> Owed:
    path = checkpoints.worker_file(place, key, rank, "npz")
    with np.load(path, allow_pickle=False) as file:
        about = json.loads(str(file["about"]))
        if about.get("format") != FORMAT or about.get("key") != key:
            raise ValueError(f"{path} does not belong to this checkpoint")
        feedback = {name.removeprefix("error."): file[name] for name in file.files if name != "about"}
    return about | {"feedback": feedback}


def _optimizer(model: keras.Model) -> Any:
    optimizer: Any = getattr(model, "optimizer", None)
    check_ours(optimizer)
    if not model.built:
        raise ConfigurationError("the model is not built: model.build(shape)")
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    if optimizer._wrapping.process_set.process_set_id != 0:
        raise ConfigurationError("checkpoints are of the whole world, and this optimizer's process_set is a part of it")
    return optimizer


def _all(action: Callable[[], T], what: str) -> T:
    return checkpoints.on_all(action, what, lambda text: allgather_object(text, name="onebit.checkpoint.errors"))

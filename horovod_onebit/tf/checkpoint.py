"""Checkpoints that lose nothing, in Keras: the model and its optimizer once, the error feedback of every worker.

The files are those of ``horovod_onebit.checkpoints``. ``KEY.worker-0003.npz`` is read by ``numpy.load`` too, and
``KEY.shared.keras`` by ``keras.saving.load_model``, if the model is one that Keras can build from its configuration.
Here nothing is built: the values are put into the model that the caller has built and compiled, so that custom losses,
layers and ``Lambda`` are no matter.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
from horovod.tensorflow.functions import allgather_object

from horovod_onebit import checkpoints
from horovod_onebit.checkpoints import FORMAT, Shared
from horovod_onebit.checkpoints.extra import Packer, unpack
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.tf.compressor import Compressor
from horovod_onebit.tf.functions import broadcast_variables, shared
from horovod_onebit.tf.meeting import announce
from horovod_onebit.tf.optimizer import check_ours
from horovod_onebit.world import Residuals, Weighing

logger = logging.getLogger("horovod_onebit")
CALL = "a checkpoint, saved or loaded"
NOT_BUILT = "the model is not built: model.build(shape)"
OF_OPTIMIZER = "optimizer/"
OF_GRADIENTS = {"units": "unit.", "feedback": "unit_error."}
"""What the names of arrays begin with that were learned of gradients in few bits, or are lost of them."""
NOT_LOADED = ".*(Skipping variable loading|could not be loaded|Skipping nested container)"
"""What Keras warns of when it leaves variables of the model or its optimizer as they are."""


def save_checkpoint(folder: str | os.PathLike[str], model: keras.Model, *, extra: Any = None) -> None:
    """Save ``model``, compiled with a ``DistributedOptimizer``, to ``folder``, which all workers see. Collective.

    Call it between batches. ``extra`` is what worker 0 wants back: numbers, texts, bytes, paths, NumPy arrays and
    scalars, and dicts, lists and tuples of these. The last checkpoint and the one before it are kept. One job at a
    time saves to a folder.

    Raises ``CheckpointError`` on all workers, which names the worker and the reason, if one of them cannot write; if
    ``extra`` has something else; if another job saves there; or if worker 0 does not see all workers' files. The
    checkpoints before are then still there, and nothing of this one.
    """
    face = _Keras(model)
    announce(CALL)
    checkpoints.save(face, folder, extra)


def load_checkpoint(folder: str | os.PathLike[str], model: keras.Model, *, previous: bool = False) -> Any:
    """Load the last complete checkpoint of ``folder`` into ``model`` on all workers; returns ``extra``. Collective.

    ``model`` is built and compiled as the one that was saved. With as many workers as saved it, the run continues as if
    it had not been interrupted; with another number, the residuals of all workers are redistributed.
    ``previous`` loads the checkpoint before the last one.

    Raises ``CheckpointError`` on all workers if a file is missing, damaged or of something else, or does not fit the
    model and the optimizer of some worker (names, shapes, dtypes). Nothing was changed then.
    """
    face = _Keras(model)
    announce(CALL)
    return checkpoints.load(face, folder, previous=previous)


def load_weights(folder: str | os.PathLike[str], model: keras.Model, *, previous: bool = False) -> None:
    """Put the weights of the last complete checkpoint of ``folder`` into ``model``; nothing else is loaded.

    Local: for inference in one process, which needs neither ``hvd.init()`` nor an optimizer; or for a new run from
    these weights, with other settings, on all workers before the broadcasts. ``model`` is built as the one saved.
    ``previous`` loads the checkpoint before the last one.

    Raises ``CheckpointArgumentError`` if an argument is of a wrong kind or the model is not built, and
    ``CheckpointError`` if a file is missing, damaged or of something else, or does not fit the model (names, shapes,
    dtypes). The model's variables are unchanged then.
    """

    def check_model() -> None:
        if not isinstance(model, keras.Model):
            raise ConfigurationError(f"model is {type(model).__name__}: expected a keras.Model")
        if not model.built:
            raise ConfigurationError(NOT_BUILT)

    def read(path: Path, first: Callable[[], Path], key: str) -> None:
        about = _about(first(), key)
        if "variables" not in about:
            raise ValueError("it was saved by a version that kept no names: load_checkpoint() reads it")
        own, saved = _described(model), about["variables"]
        others = [row for row in saved[len(own) :] if not row[0].startswith(OF_OPTIMIZER)]
        _compare([*saved[: len(own)], *others], own)
        with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(path) as archive:
            # Keras reads a file of this name alone without the optimizers.
            weights = archive.extract("model.weights.h5", temporary)
            before = [np.array(v) for v in model.variables]
            try:
                _read_into(model, weights, objects_to_skip=_optimizers(model))
            except Exception:
                _assign(model, model.variables, before)
                raise

    checkpoints.load_alone(folder, _Keras.suffixes, check_model, read, previous=previous)


class _Keras(checkpoints.Face):
    suffixes = ("npz", "keras")

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer: Any = getattr(model, "optimizer", None)
        self.rank, self.workers = hvd.rank(), hvd.size()
        wrapping = getattr(self.optimizer, "_wrapping", None)
        if wrapping is not None and wrapping.process_set.process_set_id != 0:
            # The workers outside of the process set do not call this: nothing may be waited for.
            raise ConfigurationError(
                "checkpoints are of the whole world, and this optimizer's process_set is a part of it"
            )

    @property
    def _compressor(self) -> Compressor:
        return self.optimizer._compressor

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables]

    def gather(self, value: Any) -> list[Any]:
        return allgather_object(value, name="onebit.checkpoint")

    def check_arguments(self) -> None:
        check_ours(self.optimizer)
        self.kind = self._compressor.kind
        if not self.model.built:
            raise ConfigurationError(NOT_BUILT)
        if not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)

    def check_saving(self, extra: Any) -> None:
        if self.rank == 0:
            json.dumps(Packer(_never, len, (dict, list), text_keys=True).pack(extra, "extra"))

    def flush(self) -> None:
        self.optimizer.flush()

    def steps(self) -> int:
        return int(self.optimizer.iterations)

    def owner(self) -> tuple[object, str]:
        return self.optimizer, str(_described(self.model, self.optimizer))

    # -- files ----------------------------------------------------------------------------------------------------

    def write_own(self, path: Path, key: str, extra: Any) -> None:
        engine = self._compressor.engine
        self._compressor.settle()
        with self._compressor.here():
            own = engine.residuals()
        coded = self._compressor.coded
        gradients = coded.state() if coded is not None else None
        blobs: list[np.ndarray] = []

        def put(data: np.ndarray) -> int:
            blobs.append(data)
            return len(blobs) - 1

        packer = Packer(_never, put, (dict, list), text_keys=True)
        about = {
            "format": FORMAT,
            "key": key,
            "residuals": self.kind,
            "served": own["served"],
            "divisor": own["divisor"],
            "encodes": own["encodes"],
            **self._compressor.counts(),
            "extra": packer.pack(extra, "extra"),
            "variables": _described(self.model, self.optimizer),
            "gradients": gradients and {key: one for key, one in gradients.items() if key not in OF_GRADIENTS},
        }
        arrays = {"about": np.array(json.dumps(about)), **{f"error.{k}": v for k, v in own["feedback"].items()}}
        arrays |= {f"extra.{i}": blob for i, blob in enumerate(blobs)}
        if gradients is not None:
            arrays |= {start + name: one for key, start in OF_GRADIENTS.items() for name, one in gradients[key].items()}
        for i, variable in self._own_variables().items():  # NumPy's files have no bfloat16
            arrays[f"own.{i}"] = np.array(variable, np.float32 if variable.dtype == "bfloat16" else None)
        np.savez(path, **arrays)

    def write_shared(self, path: Path, key: str, extra: Any) -> None:
        try:
            self.model.save(path)
        except OSError:
            raise
        except Exception as error:  # of the configuration, which is for load_model alone
            logger.info("keras.saving.load_model will not read the checkpoint: %s", error)
            path.unlink(missing_ok=True)
            weights = path.with_name(f"{path.stem}.weights.h5")
            try:
                self.model.save_weights(weights)
                with zipfile.ZipFile(path, "w") as archive:
                    archive.write(weights, "model.weights.h5")
            finally:
                weights.unlink(missing_ok=True)

    def read_own(self, path: Path, key: str) -> Residuals:
        about = _about(path, key)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files if name != "about"}
        about["extra"] = unpack(about["extra"], lambda i: arrays[f"extra.{i}"])
        about["own"] = {int(name[4:]): value for name, value in arrays.items() if name.startswith("own.")}
        about["feedback"] = _beginning("error.", arrays)
        gradients = about.setdefault("gradients", None)  # earlier versions did not write them
        if gradients is not None:
            gradients |= {key: _beginning(start, arrays) for key, start in OF_GRADIENTS.items()}
        return about

    def merge(self, everybody: Iterable[Residuals]) -> Residuals:
        # Of gradients that wait, the mean over the workers counts; random generators are left as they are.
        sums: dict[int, Any] = {}
        workers = 0

        def added(one: Residuals) -> Residuals:
            nonlocal workers
            own = one.pop("own")
            if not workers:
                waiting = [i for i, value in own.items() if np.issubdtype(value.dtype, np.floating)]
                sums.update({i: np.zeros_like(own[i], np.float32) for i in waiting})
            for i in sums:
                sums[i] += own[i]
            workers += 1
            return one

        merged = super().merge(map(added, everybody))
        return merged | {"own": {i: total / np.float32(workers) for i, total in sums.items()}}

    def read_shared(self, path: Path, first: Path, key: str) -> Shared:
        own = self.read_own(first, key)
        known = _described(self.model, self.optimizer)
        variables = own.get("variables", known)  # versions before did not write them
        _compare(variables, known)
        with self._compressor.still():
            values = _values_of(path, self.model, self._variables())
        for i, value in own["own"].items():
            values[i] = value
        about = {name: own[name] for name in ("exchanges", "skipped")} | {"variables": variables}
        about |= {"warmup": own.get("warmup", {}), "rates": own.get("rates", 0.0)}  # nor these
        return Shared(values, about, own["extra"])

    def _own_variables(self) -> dict[int, Any]:
        """By position, what each worker has of its own: the states of random generators, which Keras's file lacks, and
        gradients that wait for the next step; after local steps all that the wrapped optimizer keeps."""
        of_worker = getattr(check_ours(self.optimizer), "_accumulated", [])
        if self.optimizer._wrapping.local is not None:
            of_worker = self.optimizer.variables
        mine = {id(v) for v in of_worker}
        variables, count = self._variables(), len(self.model.variables)
        return {
            i: v
            for i, v in enumerate(variables)
            if id(v) in mine or (i < count and not keras.backend.is_float_dtype(v.dtype))
        }

    # -- loading --------------------------------------------------------------------------------------------------

    def check(self, about: Any, own: Residuals) -> None:
        _compare(about["variables"], _described(self.model, self.optimizer))
        self._compressor.check_feedback(own["feedback"])
        if self._compressor.coded is not None:
            self._compressor.coded.check(own["gradients"], self._compressor.sizes())

    def take_over(self, shared: Shared | None, about: Any) -> None:
        if shared is not None:
            _assign(self.model, self._variables(), shared.content)

    def spread(self, about: Any, own: Residuals) -> None:
        variables = self._variables()
        broadcast_variables(shared(variables))
        for i, value in own["own"].items():
            variables[i].assign(value)
        _finish(self.model)
        self._compressor.load_feedback(own["feedback"])
        self._compressor.engine.weigh(Weighing.saved(own))
        self._compressor.take_counts(about)
        if self._compressor.coded is not None:
            self._compressor.coded.load(own["gradients"])


def _beginning(start: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The ``arrays`` whose names begin so, by what follows."""
    return {name.removeprefix(start): value for name, value in arrays.items() if name.startswith(start)}


def _never(value: Any) -> bool:
    return False


def _about(path: Path, key: str) -> dict[str, Any]:
    """What a worker's own file has besides arrays."""
    with np.load(path, allow_pickle=False) as file:
        about = json.loads(str(file["about"]))
    if about.get("format") != FORMAT or about.get("key") != key:
        raise ValueError(f"{path} does not belong to this checkpoint")
    return about


def _values_of(path: Path, model: Any, variables: Sequence[Any]) -> list[np.ndarray]:
    """The values that Keras's file has for ``variables`` of ``model``. Keras puts them into the model: they are taken
    out of it again, and the model keeps its own."""
    before = [np.array(v) for v in variables]
    try:
        _read_into(model, path)
        return [np.array(v) for v in variables]
    finally:
        _assign(model, variables, before)


def _read_into(model: Any, path: Path | str, **options: Any) -> None:
    """Put all that Keras's file has into ``model``, or raise."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=NOT_LOADED)
        model.load_weights(path, **options)


def _assign(model: Any, variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    _finish(model)


def _finish(model: Any) -> None:
    """``Normalization`` computes with constants that it makes of its variables."""
    for layer in _layers(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def _optimizers(model: Any) -> list[Any]:
    """Those that the model keeps, under whatever name."""
    kept = [value for layer in _layers(model) for value in vars(layer).values()]
    return [value for value in kept if isinstance(value, keras.optimizers.Optimizer)]


def _layers(model: Any) -> list[Any]:
    """The model, its layers, and theirs."""
    found: list[Any] = [model]
    for layer in found:
        found += [one for one in getattr(layer, "layers", []) if all(one is not known for known in found)]
    return found


def _described(model: Any, optimizer: Any = None) -> list[list[Any]]:
    """Name, shape and dtype of each variable. Layers' numbers are left out of the names: Keras counts the layers that
    this process has made before."""
    rows, seen = [], Counter[str]()

    def add(name: str, variable: Any) -> None:
        seen[name] += 1
        number = f"#{seen[name]}" if seen[name] > 1 else ""
        rows.append([name + number, list(variable.shape), str(variable.dtype)])

    for variable in model.variables:
        add("/".join(re.sub(r"_\d+$", "", part) for part in variable.path.split("/")[-2:]), variable)
    if optimizer is None:
        return rows
    trained = sorted((v.path.replace("/", "_") for v in optimizer._trainable_variables), key=len, reverse=True)
    for variable in optimizer.variables:
        of = next((path for path in trained if variable.name.startswith(path)), "")
        add(f"{OF_OPTIMIZER}{variable.name.removeprefix(of).strip('_')}", variable)
    return rows


def _compare(saved: Sequence[Sequence[Any]], own: Sequence[Sequence[Any]]) -> None:
    """Raise ``ConfigurationError`` unless both describe the same variables."""
    if len(saved) != len(own):
        raise ConfigurationError(f"it is of another model or optimizer: {len(saved)} variables, expected {len(own)}")
    for theirs, mine in zip(saved, own, strict=True):
        if list(theirs) != mine:
            raise ConfigurationError(
                f"it is of another model or optimizer: a variable is {' '.join(map(str, theirs))} there, expected "
                f"{' '.join(map(str, mine))}"
            )

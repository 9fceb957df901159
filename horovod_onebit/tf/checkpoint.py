"""Checkpoints that lose nothing, in Keras: the model and its optimizer once, the error feedback of every worker.

The files are those of ``horovod_onebit.checkpoints``. The values of variables are put into the model that the caller
has built and compiled, so that it does not matter whether Keras can make it from a configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
from horovod.tensorflow.functions import allgather_object

from horovod_onebit import checkpoints
from horovod_onebit.checkpoints.archive import Converter
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.tf.compressor import Compressor
from horovod_onebit.tf.functions import broadcast_variables, follow_variables, replicated
from horovod_onebit.tf.graph import path_of
from horovod_onebit.tf.meeting import announce
from horovod_onebit.tf.optimizer import check_averages, check_one, check_ours, optimizers_of
from horovod_onebit.world import Residuals

CALL = "a checkpoint, saved or loaded"
SAME = "model or optimizer"
NOT_BUILT = "the model is not built: model.build(shape)"
UNNAMED = re.compile(r"variable_\d+$")
"""What Keras calls a variable without a name, from the second one of a process on."""


def save_checkpoint(folder: str | os.PathLike[str], model: keras.Model, *, extra: Any = None) -> None:
    """Save ``model``, compiled with a ``DistributedOptimizer``, to ``folder``, which all workers see. Collective.

    Call it between batches. ``extra`` is what worker 0 wants back: numbers, texts, bytes, paths, NumPy arrays and
    scalars, and dicts, lists and tuples of these. The last checkpoint and the one before it are kept. One job at a
    time saves to a folder.

    Raises ``CheckpointError`` on all workers, which names the worker and the reason, if one of them cannot write; if
    ``extra`` has something else; if another job saves there; if the workers have taken different numbers of steps;
    or if worker 0 does not see all workers' files. The checkpoints before are then still there, and nothing of this
    one.
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

    def take_over(found: dict[str, Any]) -> None:
        variables = _named(model)
        checkpoints.check_same(SAME, checkpoints.described(found["model"]), checkpoints.described(variables))
        before = {name: np.array(v) for name, v in variables.items()}
        try:
            _assign(model, variables, found["model"])
        except Exception:
            for name, value in before.items():
                with suppress(Exception):  # of the one that failed, once more
                    _assign(model, variables, {name: value})
            raise

    checkpoints.load_alone(folder, ["model"], check_model, take_over, _Keras, previous=previous)


class _Variables(Converter):
    def encode(self, value: Any) -> np.ndarray | None:
        return np.asarray(value) if isinstance(value, keras.Variable) else None


class _Keras(checkpoints.Face):
    framework = "Keras"
    converter = _Variables()

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

    def _named(self) -> dict[str, Any]:
        return _named(self.model, self.optimizer)

    def gather(self, value: Any) -> list[Any]:
        return allgather_object(value, name="onebit.checkpoint")

    def check_arguments(self) -> None:
        check_ours(self.optimizer)
        check_one(optimizers_of(self.model))
        self.kind = self._compressor.kind
        if not self.model.built:
            raise ConfigurationError(NOT_BUILT)
        if not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)

    def check_saving(self) -> None:
        check_averages(self.optimizer)

    def flush(self) -> None:
        self.optimizer.flush()

    def steps(self) -> int:
        return int(self.optimizer.iterations)

    def owner(self) -> tuple[object, str]:
        return self.optimizer, str(checkpoints.described(self._named()))

    def own(self) -> Residuals:
        # Of local steps, each worker has skipped steps and lost rounds of its own.
        counts = None if self.optimizer._wrapping.local is None else self._compressor.counts()
        state = {name: np.array(variable) for name, variable in self._own_variables().items()}
        return {**self._compressor.residuals(), "state": state, "counts": counts}

    def shared(self) -> dict[str, Any]:
        named, count = list(self._named().items()), len(self.model.variables)
        model, optimizer = dict(named[:count]), dict(named[count:])
        return {"model": model, "optimizer": optimizer, "counts": self._compressor.counts(), "trained": self._trained()}

    def merge(self, everybody: Iterable[Residuals]) -> Residuals:
        # Of gradients that wait, the mean over the workers counts; random generators are left as they are.
        sums: dict[str, Any] = {}
        workers = 0

        def added(one: Residuals) -> Residuals:
            nonlocal workers
            state = _unnumbered(one.pop("state"))
            for name, value in state.items():
                if value.ndim and keras.backend.is_float_dtype(str(value.dtype)):  # scalars are alike on all
                    sums[name] = sums.get(name, 0) + value.astype(np.float64)  # what all have alike stays as it is
            workers += 1
            return one

        merged = super().merge(map(added, everybody))
        return merged | {"state": {name: (total / workers).astype(np.float32) for name, total in sums.items()}}

    def _own_variables(self) -> dict[str, Any]:
        """By name, what each worker has of its own: the states of random generators, and gradients that wait for the
        next step; after local steps all that the wrapped optimizer keeps."""
        of_worker = getattr(check_ours(self.optimizer), "_accumulated", [])
        if self.optimizer._wrapping.local is not None:
            of_worker = self.optimizer.variables
        mine = {id(v) for v in of_worker}
        mine |= {id(v) for v in self.model.variables} - {id(v) for v in replicated(self.model.variables)}
        return {name: v for name, v in self._named().items() if id(v) in mine}

    def _trained(self) -> list[str]:
        """The names of the variables that the optimizer trains, in its order, by which it keeps its state."""
        names = {id(variable): name for name, variable in _named(self.model).items()}
        return [names.get(id(v), v.name) for v in check_ours(self.optimizer)._trainable_variables]

    # -- loading --------------------------------------------------------------------------------------------------

    def about(self, shared: Mapping[str, Any]) -> Any:
        variables = checkpoints.described(shared["model"] | _unnumbered(shared["optimizer"]))
        return {"variables": variables, "counts": shared["counts"], "trained": shared.get("trained")}

    def check(self, about: Any, own: Residuals) -> None:
        checkpoints.check_same(SAME, about["variables"], checkpoints.described(self._named()))
        own_names = self._trained()
        both = zip(about["trained"] or own_names, own_names, strict=True)  # an earlier version stored none
        for number, (there, here) in enumerate(both, 1):
            if there != here:
                raise ConfigurationError(
                    f"it is of another {SAME}: variable {number} of those that the optimizer trains is {there} there, "
                    f"expected {here}. Make the layers in the order of the run that was saved"
                )
        self._compressor.check_residuals(own)

    def take_over(self, shared: Mapping[str, Any] | None, about: Any) -> None:
        if shared is not None:
            _assign(self.model, self._named(), shared["model"] | _unnumbered(shared["optimizer"]))

    def spread(self, about: Any, own: Residuals) -> None:
        variables = self._named()
        broadcast_variables(variables.values())
        _assign(self.model, variables, _unnumbered(own["state"]))
        self._compressor.take_counts(own.get("counts") or about["counts"])
        self._compressor.load_residuals(own)


def _assign(model: Any, variables: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        variables[name].assign(value)
    follow_variables(model)


def _named(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """The variables by name, first the model's. Layers' numbers are left out of the names: Keras counts the layers that
    this process has made before; and those of variables that the optimizer gives no name, which it counts, too."""
    found: dict[str, Any] = {}
    for variable in model.variables:
        _add(found, "/".join(re.sub(r"_\d+$", "", part) for part in path_of(variable).split("/")[-2:]), variable)
    if optimizer is not None:
        trained = sorted((path_of(v).replace("/", "_") for v in optimizer._trainable_variables), key=len, reverse=True)
        for variable in optimizer.variables:
            of = next((path for path in trained if variable.name.startswith(path)), "")
            name = "variable" if UNNAMED.match(variable.name) else variable.name.removeprefix(of).strip("_")
            _add(found, f"optimizer/{name}", variable)
    return found


def _unnumbered(values: Mapping[str, Any]) -> dict[str, Any]:
    """What was saved of an optimizer's variables, by the names of now: earlier versions kept the numbers of those
    without a name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        unnamed = UNNAMED.match(name.removeprefix("optimizer/"))
        _add(found, "optimizer/variable" if unnamed else name, value)
    return found


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    """Add ``value`` by ``name``, and by a number if others have the same."""
    number, free = 1, name
    while free in found:
        number += 1
        free = f"{name}#{number}"
    found[free] = value

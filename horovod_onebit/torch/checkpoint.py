"""Checkpoints that lose nothing: weights and optimizer state once, the error feedback of every worker.

The files are those of ``horovod_onebit.checkpoints``, and ``torch.load(..., weights_only=True)`` reads all of them;
what it does not know by itself (NumPy's values, paths) is stored in plain types by ``checkpoints.extra``.
"""

from __future__ import annotations

import copy
import io
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from horovod_onebit import checkpoints
from horovod_onebit.checkpoints import FORMAT, Shared
from horovod_onebit.checkpoints.extra import Packer, unpack
from horovod_onebit.coded import Learned
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.torch.agreement import meet
from horovod_onebit.torch.coded import Coded
from horovod_onebit.torch.collectives import outside_inference
from horovod_onebit.torch.functions import _Slot, _take_out, broadcast_optimizer_state, broadcast_tensors
from horovod_onebit.torch.hooks import Where
from horovod_onebit.torch.loading import check_model, check_optimizer, named_as_in
from horovod_onebit.torch.optimizer import _DistributedOptimizer, check_ours
from horovod_onebit.torch.transport import choose
from horovod_onebit.world import Residuals, Weighing


@outside_inference
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    extra: dict[str, Any] | None = None,
) -> None:
    """Save to ``folder``, which all workers see. Collective; call it between steps.

    The last checkpoint and the one before it are kept. One job at a time saves to a folder.

    Args:
        folder: on a file system that all workers share; it is made if it does not exist.
        model: its ``state_dict()`` is saved.
        optimizer: what ``DistributedOptimizer`` returned.
        extra: what worker 0 wants back, such as an epoch or the state of a scheduler: tensors, NumPy arrays and
            scalars, numbers, texts, bytes, paths, and dicts, lists and tuples of these.

    Raises:
        CheckpointError: on all workers, naming the worker and the reason, if one of them cannot write, or calls it
            between ``backward()`` and ``step()``; if ``extra`` has something else; if another job saves there; or if
            worker 0 does not see all workers' files. The earlier checkpoints are unchanged then, and nothing of this
            one is left.
    """
    _meet(optimizer)
    checkpoints.save(_Torch(model, optimizer), folder, extra)


@outside_inference
def load_checkpoint(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    previous: bool = False,
) -> dict[str, Any]:
    """Load the last complete checkpoint of ``folder`` on all workers; returns ``extra``. Collective.

    With as many workers as saved it, the run continues bit for bit. With another number, the residuals of all workers
    are redistributed, and where gradients travel in few bits (``Recipe.warmup``, ``Gradients``), ten steps are exact.

    Args:
        folder: where ``save_checkpoint`` saved.
        model: built like the one that was saved.
        optimizer: what ``DistributedOptimizer`` returned, for an optimizer like the one that was saved.
        previous: load the checkpoint before the last one.

    Raises:
        CheckpointError: on all workers, if a file is missing, damaged or of something else, or does not fit the model
            and the optimizer of some worker (names, shapes, dtypes, parameter groups). Nothing was changed then.
    """
    _meet(optimizer)
    return checkpoints.load(_Torch(model, optimizer), folder, previous=previous)


@outside_inference
def load_weights(folder: str | os.PathLike[str], model: torch.nn.Module, *, previous: bool = False) -> None:
    """Put the weights and buffers of the last complete checkpoint into ``model``; nothing else is loaded.

    Local: for inference in one process, which needs neither ``hvd.init()`` nor an optimizer; or for a new run from
    these weights, with other settings, on all workers before the broadcasts.

    Args:
        folder: where ``save_checkpoint`` saved.
        model: built like the one that was saved, on any device.
        previous: load the checkpoint before the last one.

    Raises:
        CheckpointArgumentError: if an argument is of a wrong kind.
        CheckpointError: if a file is missing, damaged or of something else, or does not fit the model (names, shapes,
            dtypes). The model is unchanged then.
    """

    def read(path: Path, first: Callable[[], Path], key: str) -> None:
        saved = named_as_in(model, unpack(_read(path, key)["model"], torch.Tensor.numpy))
        check_model(model, saved, extra_state=False)
        before = _copy(model.state_dict())
        try:
            model.load_state_dict(saved)
        except Exception:  # of a module's own set_extra_state, say
            with suppress(Exception):
                _give_back(model, before)
            raise

    checkpoints.load_alone(folder, _Torch.suffixes, lambda: _check_kind(model), read, previous=previous)


CALL = "save_checkpoint() or load_checkpoint"


def _meet(optimizer: Any) -> None:
    """Make sure that all workers are here, with whatever arguments."""
    if isinstance(optimizer, _DistributedOptimizer):
        if optimizer._compressor.transport.number == 0:
            optimizer._compressor.agreement.meet(CALL, setup="")
    else:
        meet(CALL, choose(call="save_checkpoint"))


class _Torch(checkpoints.Face):
    suffixes = ("pt", "pt")

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        ours = isinstance(optimizer, _DistributedOptimizer)
        self.transport = optimizer._compressor.transport if ours else choose(call="save_checkpoint")
        self.rank, self.workers = self.transport.world
        if self.transport.number != 0:
            # The workers outside of the process set do not call this: nothing may be waited for.
            raise ConfigurationError(
                "checkpoints are of the whole world, and this optimizer's process_set or process_group is a part of it"
            )

    @property
    def _coded(self) -> Coded | None:
        """Gradients in few bits."""
        return self.optimizer._gradients.coded

    def gather(self, value: Any) -> list[Any]:
        return self.transport.allgather_object(value, "onebit.checkpoint")

    def check_arguments(self) -> None:
        self.kind = check_ours(self.optimizer)._compressor.kind
        _check_kind(self.model)

    def check_saving(self, extra: Any) -> None:
        if self.optimizer._gradients.where is not Where.NOWHERE:
            raise ConfigurationError(
                "save_checkpoint was called between backward() and step(), with gradients that no checkpoint holds: "
                "call it after step()"
            )
        if self.rank == 0:
            PACKER.pack(extra or {}, "extra")

    def flush(self) -> None:
        self.optimizer.flush()

    def steps(self) -> int:
        return self.optimizer._parameters.steps

    def owner(self) -> tuple[object, str]:
        parameters = self.optimizer._parameters
        return self.optimizer, str([(parameters.names.get(p), tuple(p.shape)) for p in parameters.ordered()])

    def write_own(self, path: Path, key: str, extra: Any) -> None:
        compressor = self.optimizer._compressor
        own = compressor.engine.residuals()
        feedback = {name: torch.from_numpy(value) for name, value in own["feedback"].items()}
        state = PACKER.pack(compressor.own_state(), "optimizer")
        gradients = _converted(self._coded.state() if self._coded is not None else None, torch.from_numpy)
        content = {**own, "feedback": feedback, "optimizer": state, "residuals": self.kind, "gradients": gradients}
        _write({"format": FORMAT, "key": key, "worker": self.rank, **content}, path)

    def write_shared(self, path: Path, key: str, extra: Any) -> None:
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        packed = {
            "model": PACKER.pack(model, "model"),
            "extra": PACKER.pack(extra or {}, "extra"),
            "optimizer": PACKER.pack(optimizer, "optimizer"),
        }
        _write({"format": FORMAT, "key": key, **packed}, path)

    def read_own(self, path: Path, key: str) -> Residuals:
        saved = _read(path, key)
        own = unpack(saved.get("optimizer"), torch.Tensor.numpy)  # earlier versions have none
        gradients = _converted(saved.get("gradients"), torch.Tensor.numpy)  # nor these
        feedback = {n: value.numpy() for n, value in saved["feedback"].items()}
        return saved | {"feedback": feedback, "optimizer": own, "gradients": gradients}

    def merge(self, everybody: Iterable[Residuals]) -> Residuals:
        def shared(one: Residuals) -> Residuals:
            return one | {"optimizer": None}  # each worker continues with worker 0's

        return super().merge(map(shared, everybody))

    def read_shared(self, path: Path, first: Path, key: str) -> Shared:
        saved = unpack(_read(path, key), torch.Tensor.numpy)
        content = {"model": named_as_in(self.model, saved["model"]), "optimizer": saved["optimizer"]}
        return Shared(content, _take_out(content, []), saved["extra"])

    def check(self, about: Any, own: Residuals) -> None:
        check_model(self.model, about["model"])
        check_optimizer(self.optimizer._parameters, about["optimizer"])
        parameters = self.optimizer._parameters
        parameters.engine.feedback.check(own["feedback"], parameters.residual_sizes(), "parameters")
        if self._coded is not None:
            self._coded.check(own["gradients"])

    def keep(self) -> Sequence[Callable[[], None]]:
        model, optimizer = self.model, self.optimizer
        before = _copy(model.state_dict() if self.rank == 0 else _others(model.state_dict()))
        if self.rank != 0:

            def give_others_back() -> None:
                optimizer._parameters.loads += 1  # as worker 0's, which loads its state again
                _load_others(model, before)

            return [give_others_back]
        state, residuals = _copy(optimizer.state_dict()), optimizer.feedback_state_dict()
        lineage = optimizer._parameters.lineage

        def give_back() -> None:
            optimizer.load_state_dict(state)
            optimizer.load_feedback_state_dict(residuals)
            optimizer._parameters.lineage = lineage  # which the others compare

        return [lambda: _give_back(model, before), give_back]

    def take_over(self, shared: Shared | None, about: Any) -> None:
        if shared is None:  # what modules keep besides tensors (get_extra_state); tensors are broadcast
            _load_others(self.model, _others(about["model"]))
            return
        self.model.load_state_dict(shared.content["model"])
        self.optimizer.load_state_dict(shared.content["optimizer"])

    def spread(self, about: Any, own: Residuals) -> None:
        tensors = [value for value in self.model.state_dict().values() if isinstance(value, torch.Tensor)]
        broadcast_tensors(tensors, 0, self.transport, "onebit.checkpoint.model")
        broadcast_optimizer_state(self.optimizer, root_rank=0)
        if own["optimizer"] is not None:
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer._load({"state": own["optimizer"], "param_groups": groups}, keep_feedback=True)
        self.optimizer.load_feedback_state_dict(
            {name: torch.from_numpy(value) for name, value in own["feedback"].items()}
        )
        self.optimizer._compressor.weigh(Weighing.saved(own))
        if self._coded is not None:
            self._coded.load(own["gradients"])


def _converted(saved: Learned | None, convert: Callable[[Any], Any]) -> Learned | None:
    """``saved`` with its arrays converted."""
    if saved is None:
        return None
    return saved | {key: {name: convert(one) for name, one in saved[key].items()} for key in ("units", "feedback")}


def _check_kind(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"model is {type(model).__name__}: expected a torch.nn.Module")


def _give_back(model: torch.nn.Module, before: Mapping[str, Any]) -> None:
    """Tensors first: what a module keeps besides them may be refused."""
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and value.shape == getattr(before[name], "shape", None):
            value.copy_(before[name])
    model.load_state_dict(before)


def _others(state: Mapping[str, Any]) -> dict[str, Any]:
    """What modules keep besides tensors."""
    return {name: value for name, value in state.items() if not isinstance(value, (_Slot, torch.Tensor))}


def _load_others(model: torch.nn.Module, others: Mapping[str, Any]) -> None:
    if others:
        model.load_state_dict(others, strict=False)


def _native(value: Any) -> bool:
    """Whether ``torch.load(weights_only=True)`` reads ``value``."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return True
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


PACKER = Packer(_native, torch.from_numpy, (dict, OrderedDict, list, tuple), text_keys=False)


class _File:
    """A file for ``torch.save``, which otherwise says of a full disk only that a write failed."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _write(value: dict[str, Any], path: Path) -> None:
    with path.open("wb") as raw:
        file = _File(raw)
        try:
            torch.save(value, file)  # type: ignore[arg-type]
        except Exception as error:
            raise file.error or error from None


def _read(path: Path, key: str) -> dict[str, Any]:
    value = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("key") != key:
        raise ValueError(f"{path} does not belong to this checkpoint")
    return value


def _copy(value: Any) -> Any:
    """A copy, whose tensors are in the host's memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (dict, OrderedDict):
        copied = copy.copy(value)  # with a state's ``_metadata``
        copied.update((key, _copy(item)) for key, item in value.items())
        return copied
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    return copy.deepcopy(value)

"""Checkpoints that lose nothing: weights and optimizer state once, the error feedback of every worker.

The files are those of ``horovod_onebit.checkpoints``, which stores tensors as arrays.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from horovod_onebit import checkpoints
from horovod_onebit.checkpoints import archive
from horovod_onebit.checkpoints.archive import Converter, Encoded
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.handshake import CHECKPOINT
from horovod_onebit.tasks import run
from horovod_onebit.torch.agreement import meet
from horovod_onebit.torch.collectives import outside_inference
from horovod_onebit.torch.functions import _Slot, _take_out, broadcast_optimizer_state, broadcast_tensors
from horovod_onebit.torch.hooks import Where
from horovod_onebit.torch.loading import check_model, check_optimizer, is_extra, named_as_in
from horovod_onebit.torch.optimizer import _DistributedOptimizer, check_ours, unwrapped
from horovod_onebit.torch.transport import choose
from horovod_onebit.world import Residuals


@outside_inference
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    extra: Any = None,
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
            between ``backward()`` and ``step()``; if ``extra`` has something else; if another job saves there; if
            the workers have taken different numbers of steps; or if worker 0 does not see all workers' files. The
            earlier checkpoints are unchanged then, and nothing of this one is left.
    """
    optimizer = unwrapped(optimizer)
    _meet(optimizer)
    checkpoints.save(_Torch(model, optimizer), folder, {} if extra is None else extra)


@outside_inference
def load_checkpoint(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    previous: bool = False,
) -> Any:
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
    optimizer = unwrapped(optimizer)
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

    def take_over(shared: dict[str, Any]) -> None:
        saved = _model_state(shared, model)
        check_model(model, saved)
        before = _copy(model.state_dict())
        try:
            model.load_state_dict(saved)
        except Exception:  # of a module's own set_extra_state, say
            with suppress(Exception):
                _give_back(model, before)
            raise

    only = ("model", "versions")
    checkpoints.load_alone(folder, only, lambda: _check_kind(model), take_over, _Torch, previous=previous)


def _meet(optimizer: Any) -> None:
    """Make sure that all workers are here, with whatever arguments."""
    if isinstance(optimizer, _DistributedOptimizer):
        if optimizer._compressor.transport.number == 0:
            run(optimizer._compressor.agreement.meet(CHECKPOINT, setup=""))
    else:
        meet(CHECKPOINT, choose(call="save_checkpoint"))


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By their sizes, dtypes to store the bits of those in that NumPy lacks."""


class _Tensors(Converter):
    """Tensors, and what PyTorch's states have besides, as plain values and arrays."""

    def encode(self, value: Any) -> Encoded | None:
        if isinstance(value, (torch.dtype, torch.layout, torch.device)):
            return Encoded(type(value).__name__, str(value).removeprefix("torch."))
        if type(value) is torch.Size:
            return Encoded("Size", list(value))
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_quantized or value.is_nested:
            return None
        if value.is_meta or value.layout not in (torch.strided, torch.sparse_coo):
            return None
        about = {"dtype": str(value.dtype).removeprefix("torch."), "requires_grad": value.requires_grad}
        about["parameter"] = type(value) is torch.nn.Parameter
        if value.layout is torch.sparse_coo:
            parts = value.detach().coalesce()
            arrays = {"indices": _array(parts.indices()), "values": _array(parts.values())}
            return Encoded("sparse", {**about, **arrays, "size": list(parts.shape)})
        place = (value.device, value.data_ptr(), value.stride(), value.shape, value.is_conj(), value.is_neg())
        return Encoded("tensor", about, _array(value.detach()), (*place, *about.values()))

    def called(self, value: Any) -> str:
        about = f" ({value.dtype}, {value.layout}, {value.device})" if isinstance(value, torch.Tensor) else ""
        return super().called(value) + about

    def decode(self, found: Encoded) -> Any:
        kind, value = found.kind, found.value
        if kind in ("tensor", "sparse"):
            if kind == "tensor":
                tensor = _tensor(found.array, value["dtype"])
            else:
                parts = torch.from_numpy(value["indices"]), _tensor(value["values"], value["dtype"])
                tensor = torch.sparse_coo_tensor(*parts, value["size"], is_coalesced=True)
            if value["parameter"]:
                return torch.nn.Parameter(tensor, value["requires_grad"])
            return tensor.requires_grad_(value["requires_grad"])
        if kind == "Size":
            return torch.Size(value)
        if kind == "device":
            return torch.device(value)
        if kind in ("dtype", "layout"):
            return _constant(kind, value)
        return super().decode(found)


def _array(tensor: torch.Tensor) -> Any:
    """The values of ``tensor``, or their bits."""
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.contiguous().view(INTEGERS[tensor.itemsize]).numpy()


def _tensor(array: Any, dtype: str) -> torch.Tensor:
    """The tensor of ``dtype`` with these values or bits, in the same memory."""
    found, expected = torch.from_numpy(array), _constant("dtype", dtype)
    return found if found.dtype == expected else found.view(expected)


def _constant(kind: str, name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, getattr(torch, kind)):
        raise ValueError(f"this PyTorch has no {kind} {name}")
    return found


class _Torch(checkpoints.Face):
    framework = "PyTorch"
    converter = _Tensors()

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

    def gather(self, value: Any) -> list[Any]:
        return self.transport.allgather_object(value, "onebit.checkpoint")

    def check_arguments(self) -> None:
        self.kind = check_ours(self.optimizer)._compressor.kind
        _check_kind(self.model)

    def check_saving(self) -> None:
        if self.optimizer._gradients.where is not Where.NOWHERE:
            raise ConfigurationError(
                "save_checkpoint was called between backward() and step(), with gradients that no checkpoint holds: "
                "call it after step()"
            )
        self.optimizer._parameters.drop_made_state()

    def flush(self) -> None:
        self.optimizer.flush()

    def steps(self) -> int:
        return self.optimizer._parameters.steps

    def owner(self) -> tuple[object, str]:
        parameters = self.optimizer._parameters
        return self.optimizer, str([(parameters.names.get(p), tuple(p.shape)) for p in parameters.ordered()])

    def own(self) -> Residuals:
        compressor = self.optimizer._compressor
        return {**compressor.residuals(), "state": compressor.own_state()}

    def shared(self) -> dict[str, Any]:
        model = self.model.state_dict()
        # The versions of modules, by which they know states of before.
        versions = getattr(model, "_metadata", None)
        return {"model": model, "versions": versions, "optimizer": self.optimizer.state_dict()}

    def about(self, shared: Mapping[str, Any]) -> Any:
        model = _model_state(shared, self.model)
        about: dict[str, Any] = _take_out({"model": model, "optimizer": shared["optimizer"]}, [])
        return {**about, "others": archive.dumps(_others(model), self.converter)}

    def check(self, about: Any, own: Residuals) -> None:
        check_model(self.model, about["model"])
        check_optimizer(self.optimizer._parameters, about["optimizer"], ordered=True)
        self.optimizer._compressor.check_residuals(own)

    def keep(self) -> Sequence[Callable[[], None]]:
        model, optimizer = self.model, self.optimizer
        before = _copy(model.state_dict() if self.rank == 0 else _others(model.state_dict()))
        if self.rank != 0:

            def give_others_back() -> None:
                if (coded := optimizer._compressor.coded) is not None:
                    coded.forget()  # as worker 0's, which loads its state again
                _load_others(model, before)

            return [give_others_back]
        state, residuals = _copy(optimizer.state_dict()), optimizer.feedback_state_dict()
        lineage = optimizer._parameters.lineage

        def give_back() -> None:
            optimizer.load_state_dict(state)
            optimizer.load_feedback_state_dict(residuals)
            optimizer._parameters.lineage = lineage  # which the others compare

        return [lambda: _give_back(model, before), give_back]

    def take_over(self, shared: Mapping[str, Any] | None, about: Any) -> None:
        if shared is None:  # tensors are broadcast
            _load_others(self.model, archive.loads(about["others"], self.converter))
            return
        self.model.load_state_dict(_model_state(shared, self.model))
        self.optimizer.load_state_dict(shared["optimizer"])

    def spread(self, about: Any, own: Residuals) -> None:
        state = self.model.state_dict()
        others = _others(state)
        tensors = [value for name, value in state.items() if name not in others]  # in one order on all workers
        broadcast_tensors(tensors, 0, self.transport, "onebit.checkpoint.model")
        broadcast_optimizer_state(self.optimizer, root_rank=0)
        if own["state"] is not None:
            self.optimizer._load(own["state"], keep_feedback=True)
        self.optimizer._compressor.load_residuals(own)


def _model_state(shared: Mapping[str, Any], model: torch.nn.Module) -> Mapping[str, Any]:
    """The saved state of the model, by the names that it has in ``model``."""
    if shared["versions"] is not None:
        shared["model"]._metadata = shared["versions"]
    return named_as_in(model, shared["model"])


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
    """What modules keep besides parameters and buffers: what ``get_extra_state`` returns may be a tensor of its own."""
    return {n: value for n, value in state.items() if is_extra(n) or not isinstance(value, (_Slot, torch.Tensor))}


def _load_others(model: torch.nn.Module, others: Mapping[str, Any]) -> None:
    if others:
        model.load_state_dict(others, strict=False)


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

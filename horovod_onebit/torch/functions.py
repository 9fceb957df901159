"""Broadcasting optimizer state safely.

Horovod's own ``broadcast_optimizer_state`` works with this project's optimizers too. This one needs less of the
workers: they may have different state, or none; nothing is stepped; error feedback is left alone, unless the root alone
has loaded another state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from horovod_onebit import checks
from horovod_onebit.errors import ConfigurationError, UnsupportedError, workers
from horovod_onebit.handshake import ask
from horovod_onebit.tasks import run
from horovod_onebit.torch.agreement import meet, meeting
from horovod_onebit.torch.arrays import has_bytes
from horovod_onebit.torch.collectives import outside_inference
from horovod_onebit.torch.optimizer import _DistributedOptimizer, unwrapped, wrapper_of
from horovod_onebit.torch.transport import Transport, choose

LARGEST = 2**30
"""Bytes of one broadcast at most: Horovod counts its elements with int32."""


class _Slot:
    """Stands for a tensor in the structure that is sent first."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device.type


@outside_inference
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    process_set: Any = None,
    *,
    process_group: Any = None,
    model: torch.nn.Module | None = None,
) -> None:
    """Give every worker the optimizer state and hyperparameters of ``root_rank``. Collective.

    Works for any ``torch.optim`` optimizer whose state is made of tensors, numbers and plain containers. Takes no
    hidden step. ``root_rank`` is a rank of the whole world; ``process_set`` or ``process_group`` are the workers that
    take part, all by default. ``model`` is accepted, because Horovod's has it, and without effect.

    Raises ``UnsupportedError`` for a state of quantized or sparse tensors; the others get a ``DesyncError``.
    """
    if isinstance(process_set, torch.nn.Module):  # Horovod's third argument
        process_set = None
    optimizer = wrapper_of(unwrapped(optimizer))  # which would not know what a plain one loads
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"optimizer is {type(optimizer).__name__}; expected a torch.optim optimizer")
    ours = optimizer if isinstance(optimizer, _DistributedOptimizer) else None
    own = None if ours is None else ours._compressor.transport
    if own is not None and own.number == 0 and process_set is None and process_group is None:
        transport = own
    else:
        transport = choose(process_set, process_group, call="broadcast_optimizer_state")
    if not transport.included:
        return
    checks.root_rank(root_rank, transport.world[1], transport.ranks or None)
    if ours is not None and transport == own:
        run(ours._compressor.agreement.meet("broadcast_optimizer_state", setup=f"root {root_rank}"))
        ours._compressor.cancel()
    else:
        meet("broadcast_optimizer_state", transport, f"root {root_rank}")
    is_root = transport.world[0] == root_rank
    tensors: list[torch.Tensor] = []
    with meeting("broadcast_optimizer_state", transport):
        if ours is not None:
            ours._parameters.drop_made_state()
        loaded = ours is not None and ours._compressor.just_loaded
        state = optimizer.state_dict() if is_root else {}
        structure = _take_out(state, tensors)
        _check_bytes(tensors)
    structure, loaded = transport.broadcast_object((structure, loaded), root_rank, "onebit.state")
    mine = [len(group["params"]) for group in optimizer.param_groups]
    sent = [len(group["params"]) for group in structure["param_groups"]]
    others = run(ask(transport.collectives(), "onebit.state.groups", other=mine != sent)).where("other")
    if others:
        raise ConfigurationError(
            f"broadcast_optimizer_state: {workers(others)} and the root have other parameter groups; the root's "
            f"numbers of parameters are {sent} (here: {mine}). Build the same optimizer, and add the same groups, on "
            "all workers"
        )
    if not is_root:
        structure = _put_in(structure, tensors)
    broadcast_tensors(tensors, root_rank, transport, "onebit.state")
    if ours is None:
        if not is_root:
            optimizer.load_state_dict(structure)
    elif is_root:  # as the others, which load it
        ours._parameters.lineage = ours._parameters.digest(state)
        if ours._compressor.coded is not None:
            ours._compressor.coded.forget()
    else:
        where = ours._gradients.where
        ours._load(structure, keep_feedback=ours._compressor.residuals_fit(loaded=loaded))
        ours._gradients.where = where  # as on the root, whose gradients may be averaged already


@outside_inference
def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    root_rank: int = 0,
    process_set: Any = None,
    *,
    process_group: Any = None,
) -> None:
    """Give every worker the tensors of ``root_rank``, in place. Collective.

    ``params`` is ``model.state_dict()`` or ``model.named_parameters()``, with the same names, shapes and dtypes on all
    workers. ``root_rank``, ``process_set`` and ``process_group``: as for ``broadcast_optimizer_state``.

    Raises ``ConfigurationError``, on all workers, if these differ between them, or for what is no tensor.
    """
    transport = choose(process_set, process_group, call="broadcast_parameters")
    if not transport.included:
        return
    checks.root_rank(root_rank, transport.world[1], transport.ranks or None)
    with meeting("broadcast_parameters", transport, f"root {root_rank}"):
        items = sorted(params.items() if isinstance(params, Mapping) else params, key=lambda item: item[0])
        own = [(name, *(_about(value))) for name, value in items]
    same = run(ask(transport.collectives(), "onebit.parameters.names", own=repr(own))).same("own")
    everywhere = [own] if same else transport.allgather_object(own, "onebit.parameters.names.all")
    for rank, others in enumerate(everywhere):
        differ = [here for here, there in zip_longest(everywhere[0], others) if here != there]
        if differ:
            raise ConfigurationError(
                f"broadcast_parameters: {differ[0]} of worker 0 is not what worker {rank} has: build the same model on "
                "all workers"
            )
    if wrong := [name for name, value in items if not isinstance(value, torch.Tensor)]:
        raise ConfigurationError(f"broadcast_parameters: {', '.join(wrong)}: expected tensors; leave others out")
    broadcast_tensors([value for _, value in items], root_rank, transport, "onebit.parameters")


def _about(value: Any) -> tuple[str, ...]:
    return (str(tuple(value.shape)), str(value.dtype)) if isinstance(value, torch.Tensor) else (type(value).__name__,)


def broadcast_tensors(tensors: Sequence[torch.Tensor], root_rank: int, transport: Transport, name: str) -> None:
    """Put the values of ``root_rank`` into the ``tensors`` of all workers, which have the same shapes. Collective."""
    under_way = []
    for index, tensor in enumerate(tensors):
        data = _words(tensor)
        handles = [
            transport.broadcast(part, root_rank, f"{name}.{index}.{number}")
            for number, part in enumerate(data.split(LARGEST // data.itemsize))
            if part.numel()
        ]
        under_way.append((tensor, data, handles))
    for tensor, data, handles in under_way:
        for handle in handles:
            handle.wait()
        if data.data_ptr() != tensor.data_ptr() and transport.world[0] != root_rank:
            tensor.detach().copy_(data.view(tensor.dtype).reshape(tensor.shape))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor``, by fours if they divide, where they are if possible: Horovod refuses bool, bfloat16 and
    tensors without dimensions. Which it is follows from shape and dtype, which all workers have in common."""
    # `.data` counts its versions apart: on a GPU, Gloo writes at the root, too, and that is no edit of its state.
    data = tensor.data.contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4:
        return data
    return (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)


def _check_bytes(tensors: Sequence[torch.Tensor]) -> None:
    """Raise ``UnsupportedError`` if some of the ``tensors`` of a state cannot be sent. Local."""
    for value in tensors:
        if not has_bytes(value):
            about = f"{type(value).__name__} ({value.dtype}, {value.layout}, {value.device})"
            raise UnsupportedError(
                f"broadcast_optimizer_state: the state has {about}; expected dense tensors in memory. Load the same "
                "state on all workers instead"
            )


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` with each tensor replaced by a ``_Slot``, and the tensors in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot(value)
    if isinstance(value, dict):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_take_out(item, tensors) for item in value])
    return value


def _put_in(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse of ``_take_out``, with new tensors to receive into."""
    if isinstance(value, _Slot):
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=value.device))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _put_in(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_put_in(item, tensors) for item in value])
    return value

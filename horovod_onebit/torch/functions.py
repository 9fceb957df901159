"""Broadcasting optimizer state safely.

Horovod's own ``broadcast_optimizer_state`` works with this project's optimizers too. This one needs less of the
workers: they may have different state, or none; nothing is stepped; error feedback is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch

from horovod_onebit import checks
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.torch.collectives import outside_inference
from horovod_onebit.torch.optimizer import _DistributedOptimizer

LARGEST = 2**30
"""Bytes of one broadcast at most: Horovod counts its elements with int32."""


class _Slot:
    """Stands for a tensor in the structure that is sent first."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device.type


@outside_inference
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, process_set: Any = None) -> None:
    """Give every worker the optimizer state and hyperparameters of ``root_rank``. Collective.

    Works for any ``torch.optim`` optimizer whose state is made of tensors, numbers and plain containers. Takes no
    hidden step. ``root_rank`` is a rank of the whole world; ``process_set`` are the workers that take part, all by
    default.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"optimizer is {type(optimizer).__name__}; expected a torch.optim optimizer")
    process_set = hvd.global_process_set if process_set is None else process_set
    if not process_set.included():
        return
    checks.root_rank(root_rank, hvd.size(), process_set.ranks)
    if isinstance(optimizer, _DistributedOptimizer) and process_set is optimizer._compressor.process_set:
        optimizer._compressor.agreement.meet("broadcast_optimizer_state", setup="")
        optimizer._compressor.interrupt()
    is_root = hvd.rank() == root_rank
    tensors: list[torch.Tensor] = []
    state = optimizer.state_dict() if is_root else {}
    if is_root and isinstance(optimizer, _DistributedOptimizer):
        optimizer._parameters.lineage = optimizer._parameters.digest(state)  # as the others that load it
    structure = _take_out(state, tensors) if is_root else None
    structure = hvd.broadcast_object(structure, root_rank, name="onebit.state", process_set=process_set)
    own = [len(group["params"]) for group in optimizer.param_groups]
    sent = [len(group["params"]) for group in structure["param_groups"]]
    same = torch.tensor([own == sent], dtype=torch.uint8)
    alike = hvd.allgather(same, name="onebit.state.groups", process_set=process_set)
    if not alike.all():
        others = torch.nonzero(alike == 0).flatten().tolist()
        raise ConfigurationError(
            f"broadcast_optimizer_state: worker {others} has other parameter groups than the root, whose numbers of "
            f"parameters are {sent} (here: {own}). Build the same optimizer, and add the same groups, on all workers"
        )
    if not is_root:
        structure = _put_in(structure, tensors)
    broadcast_tensors(tensors, root_rank, process_set, "onebit.state")
    if not is_root:
        if isinstance(optimizer, _DistributedOptimizer):
            optimizer._load(structure, keep_feedback=True)
        else:
            optimizer.load_state_dict(structure)


def broadcast_tensors(tensors: Sequence[torch.Tensor], root_rank: int, process_set: Any, name: str) -> None:
    """Put the values of ``root_rank`` into the ``tensors`` of all workers, which have the same shapes. Collective."""
    under_way = []
    for index, tensor in enumerate(tensors):
        data = _words(tensor)
        handles = [
            hvd.broadcast_async_(part, root_rank, name=f"{name}.{index}.{number}", process_set=process_set)
            for number, part in enumerate(data.split(LARGEST // data.itemsize))
            if part.numel()
        ]
        under_way.append((tensor, data, handles))
    for tensor, data, handles in under_way:
        for handle in handles:
            hvd.synchronize(handle)
        if data.data_ptr() != tensor.data_ptr() and hvd.rank() != root_rank:
            tensor.detach().copy_(data.view(tensor.dtype).reshape(tensor.shape))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor``, by fours if they divide, where they are if possible: Horovod refuses bool, bfloat16 and
    tensors without dimensions. Which it is follows from shape and dtype, which all workers have in common."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4:
        return data
    return (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)


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

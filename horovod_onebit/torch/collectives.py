"""The core's ``Collectives`` over Horovod's PyTorch operations, for NumPy arrays in host memory.

Where Horovod has NCCL, messages are gathered where the CUDA kernels write them, too, and gradients are exchanged within
a host where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common import process_sets
from numpy.typing import NDArray

from horovod_onebit.face import host_number

P = ParamSpec("P")
T = TypeVar("T")


def outside_inference(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, which may be called within ``torch.inference_mode()``: tensors made there could not be changed."""

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return outside


class Pending:
    """A collective of Horovod's under way; its result is a tensor."""

    def __init__(self, handle: Any, source: Any = None) -> None:
        self.handle = handle
        self.source = source  # Horovod reads it until the collective is done

    def ready(self) -> bool:
        return bool(hvd.poll(self.handle))

    def wait(self) -> Any:
        return hvd.synchronize(self.handle)


class _Handle(Pending):
    def wait(self) -> Any:
        result = hvd.synchronize(self.handle)
        return (result[0] if isinstance(result, tuple) else result).numpy()


class _Arrived:
    """A ``wire.Remote``: what was gathered on a GPU."""

    def __init__(self, gathered: torch.Tensor) -> None:
        self._gathered = gathered
        self.size = gathered.numel()

    def heads(self, rows: int, width: int) -> NDArray[np.uint8]:
        return self._gathered.view(rows, -1)[:, :width].contiguous().cpu().numpy()

    def scales(self, rows: int, start: int, bucket: Any) -> NDArray[np.float32]:
        words = self._gathered.view(rows, -1)[:, start : start + bucket.bytes].contiguous().view(torch.float32)
        return words[:, torch.from_numpy(bucket.scales).to(words.device)].cpu().numpy()

    def rows(self, rows: int) -> Any:
        from horovod_onebit.kernels.cuda import Rows

        return Rows(self._gathered.data_ptr(), rows, self.size // rows, self._gathered)


class _Gathering(_Handle):
    """On a GPU."""

    def wait(self) -> Any:
        return _Arrived(hvd.synchronize(self.handle))


class _Moving(_Handle):
    """On a GPU."""

    def wait(self) -> Any:
        from horovod_onebit.kernels.cuda import Buffer

        moved, _ = hvd.synchronize(self.handle)
        if moved.is_cuda:
            moved.record_stream(torch.cuda.current_stream())
        return Buffer(moved.data_ptr(), moved.numel(), owner=moved)


def _tensor(array: Any) -> torch.Tensor:
    """What shares the memory of ``array``, which is in that of the host or of a GPU."""
    there = hasattr(array, "__cuda_array_interface__")
    return torch.as_tensor(array, device="cuda") if there else torch.from_numpy(np.asarray(array))


class HorovodCollectives:
    """One process's view of a Horovod process set. Create it after ``hvd.init()``."""

    def __init__(self, process_set: Any = hvd.global_process_set) -> None:
        self.process_set = process_set

    @property
    def rank(self) -> int:
        return self.process_set.rank()

    @property
    def size(self) -> int:
        return self.process_set.size()

    @property
    def takes_device_memory(self) -> bool:
        return bool(hvd.nccl_built())

    def allgather(self, array: Any, name: str) -> _Handle:
        handle = hvd.allgather_async(_tensor(array), name=name, process_set=self.process_set)
        return (_Handle if isinstance(array, np.ndarray) else _Gathering)(handle, array)

    def alltoall(self, array: Any, name: str) -> _Handle:
        splits = torch.full((self.size,), len(array) // self.size, dtype=torch.int32)
        handle = hvd.alltoall_async(_tensor(array), splits, name=name, process_set=self.process_set)
        return (_Handle if isinstance(array, np.ndarray) else _Moving)(handle, array)

    def host(self) -> tuple[int, int]:
        return host_number(), int(hvd.local_size())

    def hosts(self, places: Sequence[Sequence[int]]) -> tuple[HorovodCollectives, HorovodCollectives] | None:
        if self.process_set.process_set_id != 0:
            return None
        groups = _host_groups(places)
        return groups and (HorovodCollectives(groups[0]), HorovodCollectives(groups[1]))

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> _Handle:
        tensor = torch.from_numpy(array)
        handle = hvd.allreduce_async(tensor, name=name, op=hvd.Sum, process_set=self.process_set)
        return _Handle(handle, array)


def _host_groups(places: Sequence[Sequence[int]]) -> tuple[Any, Any] | None:
    """The process sets of this worker's host, and of the workers of its place on all hosts; None if Horovod was not
    told that sets may be added. ``places`` are the ranks by host. Collective."""

    def group(ranks: tuple[int, ...]) -> Any:
        registered = process_sets._basics._get_process_set_ids_and_ranks()
        numbers = [number for number, members in registered.items() if tuple(members) == ranks]
        found = hvd.ProcessSet(ranks)
        if not numbers:
            return hvd.add_process_set(found)
        found.process_set_id = numbers[0]
        return found

    try:  # all workers ask for all groups, in the same order
        local = [group(tuple(members)) for members in places]
        cross = [group(tuple(sorted(members))) for members in zip(*places, strict=True)]
    except ValueError:  # only those that were given to hvd.init
        return None
    return next(one for one in local if one.included()), next(one for one in cross if one.included())

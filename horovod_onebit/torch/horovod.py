"""The transport over Horovod, which pairs collectives by name.

Where Horovod has NCCL, messages are gathered where the CUDA kernels write them, too, and gradients are exchanged within
a host where they are.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common import process_sets
from numpy.typing import NDArray

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.face import check_process_set, host_number
from horovod_onebit.torch.collectives import Gathered, moved, reader, tensor_of


def check_memory(tensor: Any) -> None:
    """Raise ``ConfigurationError`` if ``tensor`` is in a GPU's memory and Horovod knows nothing of GPUs: it would take
    the address for one of the host's."""
    if tensor.is_cuda and not (hvd.cuda_built() or hvd.rocm_built()):
        raise ConfigurationError(
            "a tensor is on a GPU, and this Horovod was built without CUDA: build it where a CUDA toolkit is "
            "(docker/install_horovod.py --gpu-operations NCCL), or train with torchrun, which needs no Horovod"
        )


class Pending:
    """A collective under way; ``finish`` makes of the tensor that arrives what ``wait`` gives."""

    def __init__(self, handle: Any, finish: Callable[[Any], Any] = lambda result: result) -> None:
        self.handle = handle  # by which Horovod keeps what it reads, until ``wait``
        self._finish = finish

    def ready(self) -> bool:
        return bool(hvd.poll(self.handle))

    def wait(self) -> Any:
        result = hvd.synchronize(self.handle)
        return self._finish(result[0] if isinstance(result, tuple) else result)


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

    def allgather(self, array: Any, name: str) -> Pending:
        handle = hvd.allgather_async(tensor_of(array), name=name, process_set=self.process_set)
        return Pending(handle, reader(array, Gathered))

    def alltoall(self, array: Any, name: str) -> Pending:
        splits = torch.full((self.size,), len(array) // self.size, dtype=torch.int32)
        handle = hvd.alltoall_async(tensor_of(array), splits, name=name, process_set=self.process_set)
        return Pending(handle, reader(array, moved))

    def host(self) -> tuple[int, int]:
        return host_number(), int(hvd.local_size())

    def hosts(self, places: Sequence[Sequence[int]]) -> tuple[HorovodCollectives, HorovodCollectives] | None:
        # Under Horovod elastic, removing process sets after a worker has died would abort the others.
        if self.process_set.process_set_id != 0 or os.environ.get("HOROVOD_ELASTIC") == "1":
            return None
        groups = _host_groups(places)
        return groups and (HorovodCollectives(groups[0]), HorovodCollectives(groups[1]))

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> Pending:
        tensor = torch.from_numpy(array)
        handle = hvd.allreduce_async(tensor, name=name, op=hvd.Sum, process_set=self.process_set)
        return Pending(handle, torch.Tensor.numpy)


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


@dataclass(frozen=True)
class HorovodTransport:
    """A ``Transport``: the workers of a Horovod process set. Horovod may be shut down, or restarted."""

    process_set: Any
    in_order = False

    @property
    def number(self) -> int:
        number: int = self.process_set.process_set_id
        return number

    @property
    def ranks(self) -> Sequence[int]:
        return self.process_set.ranks or ()

    @property
    def included(self) -> bool:
        return bool(self.process_set.included())

    @property
    def size(self) -> int:
        return int(self.process_set.size())

    @property
    def world(self) -> tuple[int, int]:
        return int(hvd.rank()), int(hvd.size())

    @property
    def ends_together(self) -> bool:
        return bool(hvd.is_initialized())

    def collectives(self) -> HorovodCollectives:
        return HorovodCollectives(self.process_set)

    agreement = collectives

    def lane(self) -> None:
        """None: messages are paired by their names, and may leave at any time."""

    def allreduce(
        self, tensor: torch.Tensor, name: str, *, in_place: bool, lane: None = None, **reduction: Any
    ) -> Pending:
        check_memory(tensor)
        operation = hvd.allreduce_async_ if in_place else hvd.allreduce_async
        return Pending(operation(tensor, name=name, process_set=self.process_set, **reduction))

    def broadcast(self, tensor: torch.Tensor, root_rank: int, name: str) -> Pending:
        check_memory(tensor)
        return Pending(hvd.broadcast_async_(tensor, root_rank, name=name, process_set=self.process_set))

    def broadcast_object(self, value: Any, root_rank: int, name: str) -> Any:
        return hvd.broadcast_object(value, root_rank, name=name, process_set=self.process_set)

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        # Horovod's own knows no process sets.
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = hvd.allgather(torch.tensor([own.numel()]), name=f"{name}.sizes", process_set=self.process_set)
        everybody = hvd.allgather(own, name=f"{name}.values", process_set=self.process_set)
        return [pickle.loads(each.numpy().tobytes()) for each in everybody.split(sizes.tolist())]


def of(process_set: Any, call: str) -> HorovodTransport:
    """That of ``process_set``, by default of all workers, for ``call``."""
    if not hvd.is_initialized():
        raise ConfigurationError(f"call hvd.init() before {call}")
    process_set = hvd.global_process_set if process_set is None else process_set
    check_process_set(process_set, hvd.ProcessSet)
    return HorovodTransport(process_set)

"""The core's ``Collectives`` over Horovod's PyTorch operations, for NumPy arrays in host memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from numpy.typing import NDArray


class _Handle:
    def __init__(self, handle: Any, source: NDArray) -> None:
        self.handle = handle
        self.source = source  # Horovod reads it until the collective is done

    def ready(self) -> bool:
        return bool(hvd.poll(self.handle))

    def wait(self) -> NDArray:
        result = hvd.synchronize(self.handle)
        return (result[0] if isinstance(result, tuple) else result).numpy()


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

    def allgather(self, array: NDArray[np.uint8], name: str) -> _Handle:
        tensor = torch.from_numpy(array)
        return _Handle(hvd.allgather_async(tensor, name=name, process_set=self.process_set), array)

    def alltoall(self, array: NDArray[np.uint8], name: str) -> _Handle:
        splits = torch.full((self.size,), len(array) // self.size, dtype=torch.int32)
        tensor = torch.from_numpy(array)
        return _Handle(hvd.alltoall_async(tensor, splits, name=name, process_set=self.process_set), array)

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> _Handle:
        tensor = torch.from_numpy(array)
        handle = hvd.allreduce_async(tensor, name=name, op=hvd.Sum, process_set=self.process_set)
        return _Handle(handle, array)


_created: Counter[tuple[int, ...]] = Counter()


def next_name(process_set: Any) -> str:
    """Begins the names of this optimizer's collectives: the same on all workers of the set."""
    # Counted by members: Horovod gives the id of a removed set to the next one, which may have other members.
    members = tuple(process_set.ranks or ())
    number = _created[members]
    _created[members] += 1
    return f"onebit.{process_set.process_set_id}.{number}"

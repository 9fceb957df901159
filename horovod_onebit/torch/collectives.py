"""What the transports have in common: arrays of the core as tensors, and tensors as what the core reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_onebit.layout import Bucket
from horovod_onebit.wire import checked_words

P = ParamSpec("P")
T = TypeVar("T")


def outside_inference(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, which may be called within ``torch.inference_mode()``: tensors made there could not be changed."""

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return outside


class Gathered:
    """A ``wire.Remote``: what was gathered on a GPU."""

    def __init__(self, gathered: torch.Tensor) -> None:
        if gathered.is_cuda:  # Horovod has allocated it for another stream
            gathered.record_stream(torch.cuda.current_stream())
        self._gathered = gathered
        self.size = gathered.numel()

    def words(self, rows: int, bucket: Bucket) -> NDArray[np.int32]:
        device = self._gathered.device
        if device not in bucket.device_words:
            bucket.device_words[device] = torch.from_numpy(checked_words(bucket)).to(device)
        found = self._gathered.view(torch.int32).view(rows, -1).index_select(1, bucket.device_words[device])
        return found.cpu().numpy()

    def rows(self, rows: int) -> Any:
        from horovod_onebit.kernels.cuda import Rows

        return Rows(self._gathered.data_ptr(), rows, self.size // rows, self._gathered)


def moved(tensor: torch.Tensor) -> Any:
    """``tensor``, which an alltoall has filled on a GPU, as the kernels read it."""
    from horovod_onebit.kernels.cuda import Buffer

    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())
    return Buffer(tensor.data_ptr(), tensor.numel(), owner=tensor)


def tensor_of(array: Any) -> torch.Tensor:
    """What shares the memory of ``array``, which is in that of the host or of a GPU."""
    there = hasattr(array, "__cuda_array_interface__")
    return torch.as_tensor(array, device="cuda") if there else torch.from_numpy(np.asarray(array))


def reader(array: Any, there: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """What makes of the tensor that has arrived for ``array`` what the core reads: ``there`` if that is on a GPU."""
    return torch.Tensor.numpy if isinstance(array, np.ndarray) else there

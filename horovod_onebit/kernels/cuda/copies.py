"""Whole arrays between the memories of the device and of the host: for checkpoints and reports, not for steps."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from horovod_onebit.kernels.cuda.device import SIMULATED
from horovod_onebit.kernels.cuda.launch import Buffer

STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def fetch(source: Buffer, stream: Any) -> NDArray[np.float32]:
    """A float32 copy of ``source`` in host memory."""
    stored = STORED[source.dtype]
    if SIMULATED:
        values = _here(source, stored).copy()
    else:
        values = _there(source, stored).copy_to_host(stream=stream)
        stream.synchronize()
    if source.dtype == "bfloat16":  # the upper half of a float32
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def send(target: Buffer, values: Any, stream: Any) -> None:
    """Put ``values``, an array or a number, into ``target``, which is float32."""
    assert target.dtype == "float32"
    values = np.ascontiguousarray(np.broadcast_to(np.asarray(values, np.float32), target.size))
    if SIMULATED:
        _here(target, np.float32)[:] = values
    elif target.size:
        _there(target, np.float32).copy_to_device(values, stream=stream)
        stream.synchronize()  # ``values`` may be gone then


def copy(source: Buffer, target: Buffer, stream: Any) -> None:
    """Put ``source`` into ``target``, both float32 on the device."""
    if SIMULATED:
        _here(target, np.float32)[:] = _here(source, np.float32)
    elif target.size:
        _there(target, np.float32).copy_to_device(_there(source, np.float32), stream=stream)


def _here(place: Buffer, stored: Any) -> NDArray[Any]:
    kind = np.dtype(stored)
    return np.frombuffer((ctypes.c_char * (kind.itemsize * place.size)).from_address(place.address), kind)


def _there(place: Buffer, stored: Any) -> Any:
    described = {
        "shape": (place.size,),
        "typestr": np.dtype(stored).str,
        "data": (place.address, False),
        "strides": None,
        "version": 3,
    }
    return cuda.from_cuda_array_interface(described, owner=place, sync=False)

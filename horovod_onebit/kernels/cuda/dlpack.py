"""Where the numbers of a DLPack capsule are (TensorFlow's tensors have no ``__cuda_array_interface__``).

Source: dlpack.h of DLPack 1.0, struct DLManagedTensor.
"""

from __future__ import annotations

import ctypes
from typing import Any

from horovod_onebit.errors import ConfigurationError

CPU, CUDA, CUDA_MANAGED = 1, 2, 13
NAMES = {(2, 32): "float32", (2, 16): "float16", (4, 16): "bfloat16"}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def read(array: Any, *, host: bool) -> tuple[int, int, str, Any]:
    """Address, size, dtype and owner of a flat ``array`` with ``__dlpack__``; ``host`` says that it may lie there.

    Whoever made the array waits until its numbers are there: DLPack's streams are not used.
    """
    if array.__dlpack_device__()[0] not in ((CPU,) if host else (CUDA, CUDA_MANAGED)):
        raise ConfigurationError(f"the CUDA kernels got {type(array).__name__} in host memory; expected a GPU's")
    capsule = array.__dlpack__()  # it keeps the memory alive, unless somebody consumes it
    found = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    shape = tuple(found.shape[: found.ndim])
    dtype = NAMES.get((found.code, found.bits)) if found.lanes == 1 else None
    if found.ndim != 1 or dtype is None or (found.strides and shape[0] > 1 and found.strides[0] != 1):
        raise ConfigurationError(
            f"the CUDA kernels got {dtype or 'numbers of another kind'} of shape {shape}; expected flat and contiguous "
            "float32, float16 or bfloat16"
        )
    return (found.data or 0) + found.byte_offset, shape[0], dtype, capsule

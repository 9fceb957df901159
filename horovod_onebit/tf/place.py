"""Compressed variables in the memory of a GPU: what host functions hand to the CUDA kernels, and get from them.

A host function that TensorFlow runs on a GPU gets tensors as they are, and DLPack tells where: nothing is copied.
Python cannot have TensorFlow's stream, so the kernels run on another: ``to_dlpack`` waits until TensorFlow has computed
what they read, and ``Place.wait`` until they have written what TensorFlow reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from horovod_onebit.checks import one_of
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels import Kernels, backend, has_gpu

logger = logging.getLogger("horovod_onebit")

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Held:
    """A tensor, and what keeps its memory where it is."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.capsule = tf.experimental.dlpack.to_dlpack(tensor)

    @property
    def address(self) -> int:
        """Of the first element: the first field of a DLManagedTensor (dlpack.h)."""
        found = _capsule_pointer(self.capsule, b"dltensor")
        return ctypes.c_void_p.from_address(found).value or 0


class Place:
    """The memory of a GPU, as the core sees it (Numba's simulator takes the host's for that).

    The thread that first asks for its ``fault`` works on that GPU from then on, all others do ``here``.

    Attributes:
        device: its name in TensorFlow.
    """

    def __init__(self, kernels: Any, device: str) -> None:
        self._kernels = kernels
        self.device = device
        self._number = 0 if kernels.SIMULATED else _number(device)

    def fault(self) -> str:
        """Why the kernels are not to be used here; nothing if they work."""
        if self._kernels.SIMULATED:
            return "Numba simulates" if _on_gpu(self.device) else ""
        if self._number < 0:
            return "the GPU is split into several logical devices"
        _select(self._number)
        return str(self._kernels.fault())

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """This thread works on this GPU."""
        if self._kernels.SIMULATED:
            yield
            return
        from numba import cuda

        with cuda.gpus[self._number]:
            yield

    def array(self, tensor: Any) -> Any:
        """What an eager float32 ``tensor`` is to the kernels, flat, once TensorFlow has computed it."""
        held = _Held(tensor)
        return self._kernels.Buffer(held.address, math.prod(tensor.shape), owner=held)

    def zeros(self, size: int) -> Any:
        """So many float32 zeros, in a new tensor."""
        with tf.device(self.device):
            return self.array(tf.zeros([size]))

    def computed(self, work: Callable[[Any], Any], array: Any) -> Any:
        """``work`` of the tensor that ``array`` is, by TensorFlow."""
        with tf.device(self.device):
            return self.array(work(array.owner.tensor))

    def wait(self) -> None:
        """Until the kernels are done."""
        self._kernels.synchronize()


def tensor_of(array: Any) -> Any:
    """The tensor whose memory ``array`` is, of which nothing was cut off."""
    return array.owner.tensor


class Placement:
    """Whether variables are compressed on the GPU where they are, by the argument ``kernels``.

    "auto" does so where the CUDA kernels do what they should; so does "cuda", which ``check`` insists on, and takes
    variables in host memory too if Numba simulates; "cpu" never does it.
    """

    def __init__(self, kernels: str) -> None:
        one_of("kernels", kernels, Kernels)
        self._kernels = kernels
        self._places: dict[str, Place | None] = {}

    def check(self) -> None:
        """Raise ``ConfigurationError`` if the kernels are insisted on and do not work."""
        if self._kernels == "cuda" and (fault := backend("cuda").fault()):
            raise ConfigurationError(f"kernels='cuda': {fault}. Use kernels='cpu'")

    def of(self, variables: Sequence[Any]) -> Place | None:
        """Where all of ``variables`` are compressed; None is the host's memory."""
        devices = {(v.value if isinstance(v, keras.Variable) else v).device for v in variables}
        if self._kernels == "cpu" or len(devices) != 1:
            return None
        device = devices.pop()
        if device not in self._places:
            self._places[device] = self._find(device)
        return self._places[device]

    def _find(self, device: str) -> Place | None:
        simulated = self._kernels == "cuda" and has_gpu() and backend("cuda").SIMULATED
        if not (_on_gpu(device) or simulated):
            return None
        place, fault = None, "pip install 'horovod-onebit[cuda]', or [cuda12] with a driver of CUDA 12"
        if has_gpu():
            place = Place(backend("cuda"), device)
            fault = place.fault()
        if fault:
            logger.warning("variables on %s are compressed in the host's memory, which is slow: %s", device, fault)
            return None
        return place


@cache
def _select(number: int) -> None:
    """Once, since each call puts the GPU on the thread's stack of contexts."""
    from numba import cuda

    cuda.select_device(number)


def _on_gpu(device: str) -> bool:
    return tf.DeviceSpec.from_string(device).device_type == "GPU"


def _number(device: str) -> int:
    """The number that CUDA gives the GPU that TensorFlow calls ``device``; -1 if it is only a part of one."""
    visible = tf.config.get_visible_devices("GPU")
    if len(visible) != len(tf.config.list_logical_devices("GPU")):
        return -1
    name = visible[tf.DeviceSpec.from_string(device).device_index].name  # "/physical_device:GPU:0"
    return int(name.rpartition(":")[2])

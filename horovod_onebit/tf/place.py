"""Compressed variables in the memory of a GPU: what host functions hand to the CUDA kernels, and get from them.

A host function that TensorFlow runs on a GPU gets tensors as they are, and DLPack tells where: nothing is copied.
Python has no access to TensorFlow's stream, so the kernels run on another: ``to_dlpack`` waits until TensorFlow has
computed what they read, and ``Place.wait`` until they have written what TensorFlow reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import keras
import tensorflow as tf

from horovod_onebit.checks import one_of
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels import Kernels, backend, has_gpu, missing

logger = logging.getLogger("horovod_onebit")
T = TypeVar("T")
THREAD = "onebit-kernels"

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Pinned:
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

    Attributes:
        device: its name in TensorFlow.
    """

    def __init__(self, kernels: Any, device: str) -> None:
        self._kernels = kernels
        self.device = device
        self._number = 0 if kernels.SIMULATED else _number(device)
        self._thread = ThreadPoolExecutor(1, THREAD)

    def fault(self) -> str:
        """Why the kernels are not to be used here; nothing if they work."""
        if self._kernels.SIMULATED:
            return "Numba simulates" if _on_gpu(self.device) else ""
        if self._number < 0:
            return "the GPU is split into several logical devices"
        with self.here():
            return str(self._kernels.fault())

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """This thread works on this GPU."""
        if self._kernels.SIMULATED:
            yield
            return
        from horovod_onebit.kernels.toolchain import cuda

        with cuda.gpus[self._number]:
            yield

    def compute(self, work: Callable[[], T]) -> T:
        """``work`` that runs kernels: all on one thread, because what Numba and our launches keep for a thread of
        TensorFlow is lost whenever that leaves Python."""
        if threading.current_thread().name.startswith(THREAD):
            return work()

        def there() -> T:
            with self.here():
                return work()

        return self._thread.submit(there).result()

    def array(self, tensor: Any) -> Any:
        """What an eager float32 ``tensor`` is to the kernels, flat, once TensorFlow has computed it."""
        there, here = (name.rpartition("/")[2] for name in (tensor.device, self.device))
        assert there == here, f"a tensor is on {there}, and the step is taken on {here}"
        held = _Pinned(tensor)
        return self._kernels.Buffer(held.address, math.prod(tensor.shape), owner=held)

    def zeros(self, size: int) -> Any:
        """So many float32 zeros, in a new tensor."""
        with tf.device(self.device):
            return self.array(tf.zeros([size]))

    def lend(self, sizes: Sequence[int]) -> list[Any]:
        """Arrays of so many float32 each, in new tensors: all are asked for before any is waited for."""
        with tf.device(self.device):
            tensors = [tf.zeros([size]) for size in sizes]
            return [self.array(tensor) for tensor in tensors]

    def computed(self, work: Callable[[Any], Any], array: Any) -> Any:
        """``work`` of the tensor that ``array`` is, by TensorFlow."""
        with tf.device(self.device):
            return self.array(work(tensor_of(array)))

    def wait(self) -> None:
        """Until the kernels are done."""
        self._kernels.synchronize()


def tensor_of(array: Any) -> Any:
    """The tensor whose memory ``array`` is, of which nothing was cut off."""
    return array.owner.tensor


class Placement:
    """Whether variables are compressed on the GPU where they are, by the argument ``kernels``.

    "auto" does so where the CUDA kernels do what they should; "cuda" insists on them for what is on a GPU, and takes
    variables in host memory too if Numba simulates; "cpu" never does it.
    """

    def __init__(self, kernels: str) -> None:
        one_of("kernels", kernels, Kernels)
        self._kernels = kernels
        self._places: dict[frozenset[str], Place | None] = {}

    def check(self) -> None:
        """Raise ``ConfigurationError`` if the kernels are insisted on and there are none."""
        if self._kernels == "cuda":
            backend("cuda")

    def of(self, variables: Sequence[Any]) -> Place | None:
        """Where all of ``variables`` are compressed; None is the host's memory. Raises ``ConfigurationError`` if the
        kernels are insisted on and do not work on the GPU that they are on."""
        devices = frozenset((v.value if isinstance(v, keras.Variable) else v).device for v in variables)
        if self._kernels == "cpu" or not devices:
            return None
        if devices not in self._places:
            self._places[devices] = self._find(sorted(devices))
        return self._places[devices]

    def _find(self, devices: Sequence[str]) -> Place | None:
        simulated = self._kernels == "cuda" and has_gpu() and backend("cuda").SIMULATED
        if not (simulated or any(map(_on_gpu, devices))):
            return None
        place, fault = None, "compressed variables are on several devices"
        if len(devices) == 1 and not (fault := missing()):
            place = Place(backend("cuda"), devices[0])
            fault = place.fault()
        if fault and self._kernels == "cuda":
            raise ConfigurationError(f"kernels='cuda': {fault}. Use kernels='cpu'")
        if fault:
            there = ", ".join(devices)
            logger.warning("variables on %s are compressed in the host's memory, which is slow: %s", there, fault)
            return None
        return place


def _on_gpu(device: str) -> bool:
    return tf.DeviceSpec.from_string(device).device_type == "GPU"


def _number(device: str) -> int:
    """The number that CUDA gives the GPU that TensorFlow calls ``device``; -1 if it is only a part of one."""
    visible = tf.config.get_visible_devices("GPU")
    if len(visible) != len(tf.config.list_logical_devices("GPU")):
        return -1
    name = visible[tf.DeviceSpec.from_string(device).device_index].name  # "/physical_device:GPU:0"
    return int(name.rpartition(":")[2])

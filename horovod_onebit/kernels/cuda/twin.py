"""A message that the kernels write on the device, and its twin in host memory: nobody waits for it until it leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from horovod_onebit.kernels.cuda.calls import launcher
from horovod_onebit.kernels.cuda.device import SIMULATED
from horovod_onebit.kernels.cuda.launch import Buffer
from horovod_onebit.kernels.cuda.staging import address_of, copy_to_device, copy_to_host


class Twin:
    """``size`` bytes on the device, ``array``, and ``host``, as many in pinned memory: both (size,) uint8."""

    def __init__(self, size: int) -> None:
        self.host: NDArray[np.uint8] = np.zeros(size, np.uint8) if SIMULATED else cuda.pinned_array(size, np.uint8)
        self.host[:] = 0
        self.array: Any = np.zeros(size, np.uint8) if SIMULATED else cuda.to_device(self.host)
        self._event: Any = None if SIMULATED else cuda.event(timing=False)
        self._asked = self._fetched = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if SIMULATED:
            raise AttributeError("in the simulator, the device's memory is the host's: see __array__")
        return self.array.__cuda_array_interface__

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[np.uint8]:
        assert SIMULATED
        return self.array

    def part(self, start: int, size: int, dtype: str) -> Buffer:
        """``size`` numbers on the device, from byte ``start`` on."""
        return Buffer(address_of(self.array) + start, size, dtype, self)

    def fetch(self, size: int) -> None:
        """Start to copy the first ``size`` bytes to ``host``, after what was launched before."""
        self._asked, self._fetched = 0, size
        if not SIMULATED:
            stream = launcher.current()
            copy_to_host(self.host.ctypes.data, address_of(self.array), size, stream)
            self._event.record(stream)

    def send(self, size: int) -> None:
        """Copy the first ``size`` bytes of ``host`` to the device, before what is launched next."""
        if SIMULATED:
            self.array[:size] = self.host[:size]
        else:
            copy_to_device(address_of(self.array), self.host.ctypes.data, size, launcher.current())

    def arrived(self) -> bool:
        """Whether ``wait`` would not block. The simulator's copies take until they are asked for a second time."""
        self._asked += 1
        return self._asked > 1 if SIMULATED else bool(self._event.query())

    def wait(self) -> None:
        """Block until all is there."""
        if SIMULATED:
            self.host[: self._fetched] = self.array[: self._fetched]
        else:
            self._event.synchronize()

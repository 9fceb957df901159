"""A message in host memory that the kernels write on the device: nobody waits for it until it is to leave."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from horovod_onebit.kernels.cuda.calls import launcher
from horovod_onebit.kernels.cuda.device import SIMULATED
from horovod_onebit.kernels.cuda.launch import Buffer
from horovod_onebit.kernels.cuda.staging import address_of, copy_to_host


class Twin:
    """``size`` bytes on the device, and ``host``, as many in pinned memory, (size,) uint8."""

    def __init__(self, size: int) -> None:
        self.host: NDArray[np.uint8] = np.zeros(size, np.uint8) if SIMULATED else cuda.pinned_array(size, np.uint8)
        self.host[:] = 0
        self._device: Any = np.zeros(size, np.uint8) if SIMULATED else cuda.to_device(self.host)
        self._event: Any = None if SIMULATED else cuda.event(timing=False)
        self._asked = 0

    def part(self, start: int, size: int, dtype: str) -> Buffer:
        """``size`` numbers on the device, from byte ``start`` on."""
        return Buffer(address_of(self._device) + start, size, dtype, self)

    def fetch(self) -> None:
        """Start to copy all to ``host``, after what was launched before."""
        self._asked = 0
        if not SIMULATED:
            stream = launcher.current()
            copy_to_host(self.host.ctypes.data, address_of(self._device), self.host.size, stream)
            self._event.record(stream)

    def arrived(self) -> bool:
        """Whether ``wait`` would not block. The simulator's copies take until they are asked for a second time."""
        self._asked += 1
        return self._asked > 1 if SIMULATED else bool(self._event.query())

    def wait(self) -> None:
        """Block until all is there."""
        if SIMULATED:
            self.host[:] = self._device
        else:
            self._event.synchronize()

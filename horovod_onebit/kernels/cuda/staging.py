"""Bytes that a launch needs from the host's memory, and those that it gives back: together, through pinned memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from horovod_onebit.errors import OnebitError
from horovod_onebit.kernels.cuda.device import SIMULATED

if not SIMULATED:
    from cuda.bindings import driver


def address_of(array: Any) -> int:
    """Where the first byte of one of our own arrays on the device is."""
    return array.ctypes.data if SIMULATED else array.__cuda_array_interface__["data"][0]


def _check(result: tuple[Any, ...]) -> None:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise OnebitError(f"a copy between the host and the GPU failed: {result[0].name}")


def copy_to_device(there: int, here: int, size: int, stream: Any) -> None:
    """Start to copy ``size`` bytes at the address ``here``, in pinned memory, to ``there``, on the device."""
    _check(driver.cuMemcpyHtoDAsync(there, here, size, stream.handle))


def copy_to_host(here: int, there: int, size: int, stream: Any) -> None:
    """Start to copy ``size`` bytes at the address ``there``, on the device, to ``here``, in pinned memory."""
    _check(driver.cuMemcpyDtoHAsync(here, there, size, stream.handle))


class Staging:
    """Bytes on the device and their twin on the host, pinned; they grow as needed. ``address`` is on the device."""

    def __init__(self) -> None:
        self.address = 0
        self._host: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._device: Any = None
        self._host_address = 0
        self._sent: Any = None  # an event: what was sent last has left the host

    def reserve(self, size: int) -> int:
        """The address of ``size`` bytes on the device; waits until the host's may be written to."""
        if self._sent is not None:
            self._sent.synchronize()
        if self._host.size < size:
            size = max(size, 2 * self._host.size)
            self._host = np.zeros(size, np.uint8) if SIMULATED else cuda.pinned_array(size, np.uint8)
            self._device = np.zeros(size, np.uint8) if SIMULATED else cuda.device_array(size, np.uint8)
            self._host_address, self.address = self._host.ctypes.data, address_of(self._device)
        return self.address

    def put(self, offset: int, array: NDArray[Any]) -> None:
        self._host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)

    def get(self, offset: int, array: NDArray[Any]) -> None:
        array.reshape(-1).view(np.uint8)[:] = self._host[offset : offset + array.nbytes]

    def send(self, start: int, stop: int, stream: Any) -> None:
        """Copy these bytes to the device, before what is launched next."""
        if SIMULATED:
            self._device[start:stop] = self._host[start:stop]
            return
        copy_to_device(self.address + start, self._host_address + start, stop - start, stream)
        self._sent = self._sent or cuda.event(timing=False)
        self._sent.record(stream)

    def fetch(self, start: int, stop: int, stream: Any) -> None:
        """Copy these bytes from the device, and wait until they are here."""
        if SIMULATED:
            self._host[start:stop] = self._device[start:stop]
            return
        copy_to_host(self._host_address + start, self.address + start, stop - start, stream)
        stream.synchronize()

"""From calls to launches: arrays on the device, addresses, tables, streams, and what is in host memory."""

from __future__ import annotations

import ctypes
import itertools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from horovod_onebit.errors import ConfigurationError, OnebitError
from horovod_onebit.kernels.cuda.device import BFLOAT16, FLOAT16, FLOAT32
from horovod_onebit.kernels.cuda.loops import FIRST, ROW_BYTES, Program, pack
from horovod_onebit.kernels.toolchain import SIMULATED, cuda

if not SIMULATED:
    from cuda.bindings import driver

TABLES_KEPT = 256
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "uint8": np.uint8}
KINDS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}


@dataclass(frozen=True)
class Buffer:
    """Flat numbers in device memory. Whoever makes it keeps the memory alive (``owner`` may do that).

    Attributes:
        address: of the first, in bytes.
        size: how many there are.
        dtype: "float32", or for gradients also "float16" and "bfloat16"; "uint8" for bits.
    """

    address: int
    size: int
    dtype: str = "float32"
    owner: Any = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> Buffer:
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ConfigurationError(f"a Buffer has no parts with step {step}; expected 1")
        width = np.dtype(STORED[self.dtype]).itemsize
        return Buffer(self.address + width * start, max(stop - start, 0), self.dtype, self.owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if SIMULATED:
            raise AttributeError("in the simulator, the device's memory is the host's: see __array__")
        kind = np.dtype(STORED[self.dtype]).str
        return {"shape": (self.size,), "typestr": kind, "data": (self.address, False), "strides": None, "version": 3}

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        if not SIMULATED:
            raise ConfigurationError("a Buffer is in the memory of a GPU; expected an array in that of the host")
        kind = np.dtype(STORED[self.dtype])
        memory: Any = (ctypes.c_uint8 * (kind.itemsize * self.size)).from_address(self.address)
        memory.owner = self
        return np.ctypeslib.as_array(memory).view(kind)


@dataclass(frozen=True)
class Rows:
    """``count`` messages on the device, ``stride`` bytes apart: what several workers sent."""

    address: int
    count: int
    stride: int
    owner: Any = None

    def __len__(self) -> int:
        return self.count


def buffer(array: Any) -> Buffer:
    """A Buffer of what is one, or is flat and contiguous and has ``__cuda_array_interface__``."""
    if isinstance(array, Buffer):
        return array
    if SIMULATED and isinstance(array, np.ndarray):
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise ConfigurationError(f"the kernels got an array of shape {array.shape}; expected flat and contiguous")
        return Buffer(array.ctypes.data, array.size, array.dtype.name, array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise ConfigurationError(f"the CUDA kernels got {type(array).__name__}; expected an array in device memory")
    shape, kind = interface["shape"], np.dtype(interface["typestr"]).name
    if len(shape) != 1 or interface.get("strides") not in (None, (np.dtype(kind).itemsize,)) or kind not in KINDS:
        raise ConfigurationError(f"the CUDA kernels got {kind} of shape {shape}; expected flat float32 or float16")
    return Buffer(interface["data"][0], shape[0], kind, array)


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


def has_happened(event: Any) -> bool:
    """Whether all that was launched before ``event`` was recorded is done. Numba's own answer to no is an error that it
    catches, and logs."""
    result = driver.cuEventQuery(event.handle)
    if result[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
        return False
    _check(result)
    return True


class Staging:
    """Bytes on the device and their mirror on the host, pinned; they grow as needed. ``address`` is on the device."""

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


Row = list[Any]
"""A row of a launch's table: numbers by ``loops.Column``."""
Places = list[tuple[int, NDArray[Any]]]
"""Contiguous arrays of host memory, by the columns that are to hold their addresses on the device."""


class Call(NamedTuple):
    """``blocks`` thread blocks of ``threads`` of a program, for one tensor.

    ``sent`` is copied to the device before, ``fetched`` from it after.
    """

    program: Program
    blocks: int
    threads: int
    row: Row
    sent: Places
    fetched: Places


class Launcher(threading.local):
    """Collects the calls of one thread and launches them: one table and one launch for all of a kind.

    ``stream`` is asked at each launch for the address of the stream to launch on; 0 is the default one.
    """

    stream: Callable[[], int] = staticmethod(lambda: 0)

    def __init__(self) -> None:
        self._depth = 0
        self._calls: list[Call] = []
        self._stagings = itertools.cycle([Staging() for _ in range(2)])
        self._last_stream: Any = None
        self._tables: OrderedDict[bytes, Any] = OrderedDict()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Calls within, which must not depend on each other, are launched at its end; their results are there then."""
        self._depth += 1
        try:
            yield
        except BaseException:
            self._calls = []
            raise
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._launch_collected()

    def current(self) -> Any:
        """The stream that the next launch is on."""
        return _stream(self.stream())

    def call(self, call: Call) -> None:
        if call.blocks:
            self._calls.append(call)
            if self._depth == 0:
                self._launch_collected()

    def _launch_collected(self) -> None:
        calls, self._calls = self._calls, []
        if calls:
            with _simulator:
                self._launch(calls)

    def _launch(self, calls: list[Call]) -> None:
        """One copy to the device, a launch for every kind of call, one copy back."""
        stream, staging = self._current_alone(), next(self._stagings)
        sent = [(call.row, *place) for call in calls for place in call.sent]
        fetched = [(call.row, *place) for call in calls for place in call.fetched]
        arrays = [array for _, _, array in sent] + [array for _, _, array in fetched]
        offsets = list(itertools.accumulate((-(-array.nbytes // 16) * 16 for array in arrays), initial=0))
        base = staging.reserve(offsets[-1] + ROW_BYTES * len(calls))
        for (row, column, _), offset in zip(itertools.chain(sent, fetched), offsets, strict=False):
            row[column] = base + offset
        for (_, _, array), offset in zip(sent, offsets, strict=False):
            staging.put(offset, array)
        launches, end = self._with_tables(calls, staging, offsets[-1])
        middle = offsets[len(sent)]
        start, stop = 0 if sent else offsets[-1], end if end > offsets[-1] else middle
        if stop > start:
            staging.send(start, stop, stream)
        for program, threads, blocks, table, rows in launches:
            _configured(program, blocks, threads, stream)(table, rows)
        if fetched:
            staging.fetch(middle, offsets[-1], stream)
        for (_, _, array), offset in zip(fetched, offsets[len(sent) :], strict=False):
            staging.get(offset, array)

    def _current_alone(self) -> Any:
        """The current stream; what other streams were given before uses the same memory, and has to be done."""
        stream = self.current()
        if self._last_stream is not None and stream is not self._last_stream:
            self._last_stream.synchronize()
        self._last_stream = stream if not SIMULATED else None
        return stream

    def _with_tables(self, calls: list[Call], staging: Staging, end: int) -> tuple[list[tuple[Any, ...]], int]:
        """Program, threads, blocks, address of the table, and its rows; and where the staged bytes end now."""
        kinds: dict[tuple[Program, int], list[Call]] = {}
        for call in calls:
            kinds.setdefault((call.program, call.threads), []).append(call)
        launches = []
        for (program, threads), some in kinds.items():
            blocks = 0
            for call in some:
                call.row[FIRST] = blocks
                blocks += call.blocks
            packed = b"".join([pack(*call.row) for call in some])
            table = self._kept_table(packed)
            if table is None:
                staging.put(end, np.frombuffer(packed, np.uint8))
                table = staging.address + end
                end += len(packed)
            launches.append((program, threads, blocks, table, len(some)))
        return launches, end

    def _kept_table(self, packed: bytes) -> int | None:
        """The address of a table that is on the device already; those that come a second time are kept there."""
        known = packed in self._tables
        kept = self._tables.pop(packed, None)
        if known and kept is None:
            numbers = np.frombuffer(packed, np.uint8)
            kept = numbers if SIMULATED else cuda.to_device(numbers, stream=self.current())
        self._tables[packed] = kept
        if len(self._tables) > TABLES_KEPT:
            self._tables.popitem(last=False)
        return None if kept is None else address_of(kept)


# Simulated workers are threads, and the simulator runs one kernel at a time.
_simulator: Any = threading.Lock() if SIMULATED else nullcontext()


@cache
def _compiled(program: Program) -> Any:
    return cuda.jit(program.function()) if SIMULATED else cuda.jit((types.int64, types.int64))(program.function())


def _configured(program: Program, blocks: int, threads: int, stream: Any) -> Any:
    with warnings.catch_warnings():
        # Small tensors make small grids. Numba may print the text in bold.
        warnings.filterwarnings("ignore", message=".*Grid size")
        return _compiled(program)[blocks, threads, stream]


if not SIMULATED:  # the simulator's are all one
    _configured = lru_cache(4096)(_configured)


@cache
def _stream(address: int) -> Any:
    if SIMULATED:
        return 0
    return cuda.external_stream(address) if address else cuda.default_stream()


launcher = Launcher()

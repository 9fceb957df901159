"""From calls to launches: addresses, tables, streams, and messages that lie in host memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types
from numpy.typing import NDArray

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels.cuda import dlpack
from horovod_onebit.kernels.cuda.device import BFLOAT16, FLOAT16, FLOAT32, SIMULATED
from horovod_onebit.kernels.cuda.programs import PROGRAMS
from horovod_onebit.kernels.cuda.table import FIRST_NUMBER, WIDTH, Column

MAX_THREADS = 512
TILE_THREADS = 32 if SIMULATED else 256  # the simulator starts a thread for each
TABLES_KEPT = 256
KINDS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}


@dataclass(frozen=True)
class Buffer:
    """Flat numbers in device memory. Whoever makes it keeps the memory alive (``owner`` may do that).

    Attributes:
        address: of the first, in bytes.
        size: how many there are.
        dtype: "float32", "float16" or "bfloat16"; what is not a gradient is float32.
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
        width = 4 if self.dtype == "float32" else 2
        return Buffer(self.address + width * start, max(stop - start, 0), self.dtype, self.owner)


def buffer(array: Any) -> Buffer:
    """``array`` as a Buffer: one already, or flat and contiguous, with ``__cuda_array_interface__`` or ``__dlpack__``."""
    if isinstance(array, Buffer):
        return array
    if SIMULATED and isinstance(array, np.ndarray):
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise ConfigurationError(f"the kernels got an array of shape {array.shape}; expected flat and contiguous")
        return Buffer(array.ctypes.data, array.size, array.dtype.name, array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None and hasattr(array, "__dlpack__"):
        return Buffer(*dlpack.read(array, host=SIMULATED))
    if interface is None:
        raise ConfigurationError(f"the CUDA kernels got {type(array).__name__}; expected an array in device memory")
    shape, kind = interface["shape"], np.dtype(interface["typestr"]).name
    if len(shape) != 1 or interface.get("strides") not in (None, (np.dtype(kind).itemsize,)) or kind not in KINDS:
        raise ConfigurationError(f"the CUDA kernels got {kind} of shape {shape}; expected flat float32 or float16")
    return Buffer(interface["data"][0], shape[0], kind, array)


class _Staging:
    """Bytes on the device and their twin on the host, pinned; they grow as needed."""

    def __init__(self) -> None:
        self.host: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.device: Any = self.host
        self._sent: Any = None  # an event: what was sent last has left the host

    def reserve(self, size: int) -> int:
        """The address of ``size`` bytes on the device; the host's may be written to."""
        if self._sent is not None:
            self._sent.synchronize()
        if self.host.size < size:
            self.host = np.zeros(size, np.uint8) if SIMULATED else cuda.pinned_array(size, np.uint8)
            self.device = np.zeros(size, np.uint8) if SIMULATED else cuda.device_array(size, np.uint8)
        return _address(self.device)

    def send(self, size: int, stream: Any) -> None:
        if SIMULATED:
            self.device[:size] = self.host[:size]
        else:
            self.device[:size].copy_to_device(self.host[:size], stream=stream)
            self._sent = self._sent or cuda.event(timing=False)
            self._sent.record(stream)

    def fetch(self, start: int, stop: int, stream: Any) -> None:
        """Waits until the bytes are there."""
        if SIMULATED:
            self.host[start:stop] = self.device[start:stop]
        else:
            self.device[start:stop].copy_to_host(self.host[start:stop], stream=stream)
            stream.synchronize()


def _address(array: Any) -> int:
    return array.ctypes.data if SIMULATED else array.__cuda_array_interface__["data"][0]


@dataclass(frozen=True)
class Call:
    """``blocks`` thread blocks of ``threads`` of a program, for one tensor.

    ``row`` has values by column; ``sent`` and ``fetched`` are arrays of host memory, contiguous, by the columns of
    their addresses: copied to the device before, and from it after.
    """

    program: str
    blocks: int
    threads: int
    row: dict[Column, int | float]
    sent: dict[Column, NDArray[Any]]
    fetched: dict[Column, NDArray[Any]]


class Launcher(threading.local):
    """Collects the calls of one thread and launches them: one table and one launch for all of a kind.

    ``stream`` is asked at each launch for the address of the stream to launch on; 0 is the default one.
    """

    stream: Callable[[], int] = staticmethod(lambda: 0)

    def __init__(self) -> None:
        self._depth = 0
        self._calls: list[Call] = []
        self._staging = _Staging()
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
            calls, self._calls = self._calls, []
            with _simulator:
                self._launch(calls)

    @property
    def collecting(self) -> bool:
        """Whether a batch is open."""
        return self._depth > 0

    def current(self) -> Any:
        """The stream that the next launch is on."""
        return _stream(self.stream())

    def call(self, call: Call) -> None:
        if call.blocks:
            with self.batch():
                self._calls.append(call)

    def _launch(self, calls: list[Call]) -> None:
        stream = self.current()
        sends = [(call, column, array) for call in calls for column, array in call.sent.items()]
        fetches = [(call, column, array) for call in calls for column, array in call.fetched.items()]
        offsets = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for _, _, array in sends + fetches)])
        base = self._staging.reserve(int(offsets[-1]))
        for (call, column, _), offset in zip(sends + fetches, offsets[:-1], strict=True):
            call.row[column] = base + int(offset)
        for (_, _, array), offset in zip(sends, offsets[:-1], strict=False):
            self._staging.host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        middle = int(offsets[len(sends)])
        if sends:
            self._staging.send(middle, stream)
        for kind in dict.fromkeys((call.program, call.threads) for call in calls):
            self._launch_one(kind, [call for call in calls if (call.program, call.threads) == kind], stream)
        if fetches:
            self._staging.fetch(middle, int(offsets[-1]), stream)
        for (_, _, array), offset in zip(fetches, offsets[len(sends) : -1], strict=True):
            array.reshape(-1).view(np.uint8)[:] = self._staging.host[offset : offset + array.nbytes]

    def _launch_one(self, kind: tuple[str, int], calls: list[Call], stream: Any) -> None:
        table = np.zeros((len(calls), WIDTH), np.int64)
        numbers = table.view(np.float32)[:, FIRST_NUMBER:]
        first = 0
        for i, call in enumerate(calls):
            for column, value in call.row.items():
                (numbers if column >= FIRST_NUMBER else table)[i, column] = value
            table[i, Column.FIRST] = first
            first += call.blocks
        program, threads = kind
        _compiled(program)[first, threads, stream](_address(self._table(table, stream)), len(calls))

    def _table(self, table: NDArray[np.int64], stream: Any) -> Any:
        """On the device; what a step needs is mostly what the last one needed."""
        key = table.tobytes()
        found = self._tables.pop(key, None)
        if found is None:
            found = table if SIMULATED else cuda.to_device(table, stream=stream)
        self._tables[key] = found
        if len(self._tables) > TABLES_KEPT:
            self._tables.popitem(last=False)
        return found


# Simulated workers are threads, and the simulator runs one kernel at a time.
_simulator: Any = threading.Lock() if SIMULATED else nullcontext()


@cache
def _compiled(program: str) -> Any:
    function = PROGRAMS[program]
    return cuda.jit(function) if SIMULATED else cuda.jit((types.int64, types.int64))(function)


@cache
def _stream(address: int) -> Any:
    if SIMULATED:
        return 0
    return cuda.external_stream(address) if address else cuda.default_stream()

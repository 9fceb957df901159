"""The loops for NVIDIA GPUs: Numba CUDA, one pass over device memory.

Same functions, arguments and results as ``reference``: codes exactly, floats to rounding of a float64 sum. Tensors are
in device memory: a ``Buffer``, or anything flat with ``__cuda_array_interface__``; gradients may be float16 or
bfloat16. Messages may be in host memory, from where they are sent: 1/32 of the tensors' bytes cross the bus, through
pinned memory. Calls inside ``with batch():`` are launched together, on the stream that ``use_stream`` names. What is
in host memory altogether is worked on by ``cpu``.

Needs the extra ``[cuda]`` (numba-cuda) and a GPU; with ``NUMBA_ENABLE_CUDASIM=1`` it runs in Numba's simulator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_onebit import codecs
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.formulas import Formula, Number, sqrt
from horovod_onebit.kernels import cpu, reference
from horovod_onebit.kernels.cuda.launch import (
    KINDS,
    Buffer,
    Call,
    Launcher,
    Places,
    Row,
    Rows,
    address_of,
    buffer,
    copy_to_device,
    copy_to_host,
    has_happened,
    launcher,
)
from horovod_onebit.kernels.cuda.loops import EMPTY, PARTS, Column, Program
from horovod_onebit.kernels.reference import CHUNK, Arrays, Coding, num_blocks
from horovod_onebit.kernels.toolchain import SIMULATED, cuda

__all__ = [
    "SIMULATED",
    "Buffer",
    "Rows",
    "apply",
    "batch",
    "copy",
    "encode",
    "fault",
    "host",
    "host_mirror",
    "mean",
    "move",
    "recode",
    "restore",
    "sums",
    "synchronize",
    "use_stream",
    "widen",
    "write",
    "zeros",
]

MAX_THREADS = 512
TILE_THREADS = 32 if SIMULATED else 256  # the simulator starts a thread for each
TENSORS = (Column.GRADIENT, Column.MOMENTUM, Column.VARIANCE, Column.WEIGHT, Column.ANCHOR)

batch = launcher.batch


def use_stream(stream: Callable[[], int]) -> None:
    """Launch on the stream whose address ``stream()`` gives at each launch: the framework's current one."""
    Launcher.stream = staticmethod(stream)


def _on_host(array: Any) -> bool:
    """Whether ``array`` is in host memory, which in the simulator is the device's."""
    return isinstance(array, np.ndarray) and not SIMULATED


def _set_tensors(row: Row, *tensors: tuple[int, Any]) -> Places:
    """Put tensors into the columns given with them; None is left out. Their lengths agree, and but for the gradient
    they are float32. A gradient in host memory (a mean of a host's workers) is to be sent along."""
    size, offsets, sent = -1, 0, []
    for column, array in tensors:
        if array is None:
            continue
        if column == Column.GRADIENT and _on_host(array):
            sent.append((column, np.ascontiguousarray(array, np.float32)))
            length, dtype, address = array.size, "float32", 0
        else:
            found = array if type(array) is Buffer else buffer(array)
            length, dtype, address = found.size, found.dtype, found.address
        if size not in (-1, length):
            raise ConfigurationError(f"the CUDA kernels got tensors of different lengths: {_lengths(tensors)}")
        size, row[column] = length, address
        if dtype == "float32":
            offsets |= address
        elif column == Column.GRADIENT and dtype in KINDS:
            offsets |= 2 * address  # four of them have 8 bytes
            row[Column.KIND] = KINDS[dtype]
        else:
            also = ", float16 or bfloat16" if column == Column.GRADIENT else ""
            name = Column(column).name.lower()
            raise ConfigurationError(f"the CUDA kernels got {name} as {dtype}; expected float32{also}")
    row[Column.SIZE], row[Column.ALIGNED] = size, int(offsets % 16 == 0)
    return sent


def _lengths(tensors: tuple[tuple[int, Any], ...]) -> dict[str, int]:
    found = {Column(column).name.lower(): array for column, array in tensors if array is not None}
    return {name: array.size if isinstance(array, np.ndarray) else buffer(array).size for name, array in found.items()}


def _inverse(n: int) -> float:
    """1 / n where a multiplication by it is as exact as a division by n; else 0."""
    return 1 / n if n & (n - 1) == 0 else 0.0


def _row(coding: Coding | None = None, p: Any = ()) -> Row:
    """A new row that knows how blocks are coded, and a formula's scalars."""
    row: Row = list(EMPTY)
    if coding is not None:
        row[Column.BLOCK_SIZE], row[Column.PORTION] = coding.block_size, _inverse(coding.block_size)
        row[Column.SHIFT] = coding.block_size.bit_length() - 1 if row[Column.PORTION] else -1
        row[Column.RECORD] = row[Column.OUT_RECORD] = coding.record
        row[Column.GUARD] = coding.guard
    row[Column.SCALARS : Column.SCALARS + len(p)] = p
    return row


def _numbered(arrays: Arrays) -> Any:
    return zip(map(int, TENSORS), arrays, strict=True)


def _set_rows(row: Row, rows: Any, at: int, coding: Coding) -> Places:
    """The messages of several workers; what has to be sent to the device."""
    row[Column.WORKERS], row[Column.SHARE] = len(rows), _inverse(len(rows))
    if isinstance(rows, Rows):
        row[Column.ROWS], row[Column.STRIDE] = rows.address + at, rows.stride
        return []
    records = np.ascontiguousarray(rows[:, at : at + coding.codec.size(row[Column.SIZE], coding.block_size)])
    row[Column.STRIDE] = records.strides[0]
    return [(int(Column.ROWS), records)]


def _own_rows(row: Any) -> Any:
    """This worker's own message, as those of several."""
    return Rows(row.address, 1, 0, row) if isinstance(row, Buffer) else row[None]


def _set_out(row: Row, out: Any, at: int, coding: Coding) -> Places:
    """This worker's message; what has to be fetched from the device."""
    if isinstance(out, Buffer):
        row[Column.OUT] = out.address + at
        return []
    return [(int(Column.OUT), out[at : at + coding.codec.size(row[Column.SIZE], coding.block_size)])]


def _by_tile(program: Program, row: Row, sent: Places) -> None:
    """Whatever the blocks are."""
    blocks = -(-row[Column.SIZE] // (4 * TILE_THREADS * PARTS))
    launcher.call(Call(program, blocks, TILE_THREADS, row, sent, []))


def encode(formula: Formula, p: Any, arrays: Arrays, residual: Any, row: Any, at: int, coding: Coding) -> None:
    """See ``reference.encode``."""
    if _on_host(residual):
        return cpu.encode(formula, p, arrays, residual, row, at, coding)
    line = _row(coding, p)
    sent = _set_tensors(line, *_numbered(arrays), (Column.RESIDUAL, residual), (Column.NEW_RESIDUAL, residual))
    program, block_size, size = Program("encode", formula, type(p), coding.codec), coding.block_size, line[Column.SIZE]
    threads = min(-(-min(block_size, size) // (32 * 4 * PARTS)) * 32, MAX_THREADS)
    return launcher.call(
        Call(program, num_blocks(size, block_size), threads, line, sent, _set_out(line, row, at, coding))
    )


def restore(formula: Formula, p: Any, arrays: Arrays, residual: Any, row: Any, at: int, coding: Coding) -> None:
    """See ``reference.restore``."""
    if _on_host(residual):
        return cpu.restore(formula, p, arrays, residual, row, at, coding)
    line = _row(coding, p)
    sent = _set_tensors(line, *_numbered(arrays), (Column.RESIDUAL, residual))
    program = Program("restore", formula, type(p), coding.codec)
    return _by_tile(program, line, sent + _set_rows(line, _own_rows(row), at, coding))


recode = cpu.recode
"""Servers work in host memory, where messages arrive."""


def apply(
    formula: Formula, p: Any, arrays: Arrays, rows: Any, at: int, coding: Coding, before: Arrays | None = None
) -> None:
    """See ``reference.apply``."""
    if _on_host(arrays.weight):
        return cpu.apply(formula, p, arrays, rows, at, coding, before)
    if before is not None:
        copy(before.momentum, arrays.momentum)
        copy(before.weight, arrays.weight)
    line = _row(coding, p)
    _set_tensors(line, *_numbered(arrays._replace(gradient=None)))
    sent = _set_rows(line, rows, at, coding)
    return _by_tile(Program("apply", formula, type(p), coding.codec), line, sent)


def move(formula: Formula, p: Any, arrays: Arrays) -> None:
    """See ``reference.move``."""
    if _on_host(arrays.weight):
        return cpu.move(formula, p, arrays)
    line = _row(p=p)
    return _by_tile(Program("move", formula, type(p)), line, _set_tensors(line, *_numbered(arrays)))


def sums(formula: Formula, p: Any, arrays: Arrays, out: NDArray[np.float64]) -> None:
    """See ``reference.sums``; ``out`` is in host memory, and is complete at the end of a batch."""
    if _on_host(arrays.weight):
        return cpu.sums(formula, p, arrays, out)
    line = _row(p=p)
    sent = _set_tensors(line, *_numbered(arrays))
    blocks = num_blocks(line[Column.SIZE], CHUNK)
    fetched: Places = [(int(Column.OUT), out)]
    launcher.call(Call(Program("sums", formula, type(p)), blocks, TILE_THREADS, line, sent, fetched))
    return None


# Whole arrays between the memories of the device and of the host: for checkpoints and reports, not for steps.


def host(array: Any) -> NDArray[np.float32]:
    """See ``reference.host``; waits for what was launched before."""
    if isinstance(array, np.ndarray):
        return array
    source, stream = buffer(array), launcher.current()
    values = _there(source)
    if SIMULATED:
        values = values.copy()
    else:
        values = values.copy_to_host(stream=stream)
        stream.synchronize()
    if source.dtype == "bfloat16":  # the upper half of a float32
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.asarray(values.astype(np.float32, copy=False))


def write(array: Any, values: Any) -> None:
    """See ``reference.write``; in the order of what was launched before."""
    if isinstance(array, np.ndarray):
        array[:] = values
        return
    target, stream = buffer(array), launcher.current()
    assert target.dtype == "float32"
    values = np.ascontiguousarray(np.broadcast_to(np.asarray(values, np.float32), target.size))
    if SIMULATED:
        _there(target)[:] = values
    elif target.size:
        _there(target).copy_to_device(values, stream=stream)
        stream.synchronize()  # ``values`` may be gone then


def copy(source: Any, target: Any) -> None:
    """See ``reference.copy``; in the order of what was launched before."""
    if isinstance(target, np.ndarray):
        target[:] = source
    elif SIMULATED:
        _there(buffer(target))[:] = _there(buffer(source))
    elif buffer(target).size:
        _there(buffer(target)).copy_to_device(_there(buffer(source)), stream=launcher.current())


def synchronize() -> None:
    """Wait for all that was launched on this thread's stream."""
    if not SIMULATED:
        launcher.current().synchronize()


def zeros(size: int) -> Buffer:
    """See ``reference.zeros``."""
    array = np.empty(size, np.float32) if SIMULATED else cuda.device_array(size, np.float32)
    found = Buffer(address_of(array), size, owner=array)
    write(found, 0)
    return found


def _widened(_p: _Scalars, g: Number, _m: Number, _v: Number, _w: Number, _a: Number) -> Any:
    return None, None, g


def widen(source: Any, target: Any) -> None:
    """See ``reference.widen``."""
    move(_widened, _Scalars(0, 0, 0), Arrays(source, weight=target))


def mean(rows: Any, out: Any) -> None:
    """See ``reference.mean``."""
    source, target, line = buffer(rows), buffer(out), _row()
    line[Column.SIZE], line[Column.OUT], line[Column.ROWS] = target.size, target.address, source.address
    line[Column.STRIDE], line[Column.WORKERS] = 4 * target.size, source.size // max(target.size, 1)
    line[Column.ALIGNED] = int((source.address | target.address | 4 * target.size) % 16 == 0)
    _by_tile(Program("mean"), line, [])


def _there(place: Buffer) -> Any:
    """The numbers of ``place`` as an array of the device, bfloat16 as bits."""
    if SIMULATED:
        return np.asarray(place)
    return cuda.from_cuda_array_interface(place.__cuda_array_interface__, owner=place, sync=False)


class HostMirror:
    """A message that the kernels write on the device, and its mirror in host memory: nobody waits for that until it
    leaves.

    Attributes:
        row: on the device, (size,) uint8, for ``encode``.
        host: as many bytes in pinned memory.
        scales: of ``fetch``, (blocks,) float32 in host memory.
    """

    def __init__(self, size: int, blocks: int) -> None:
        self.host: NDArray[np.uint8] = _pinned(size, np.uint8)
        self.array: Any = np.zeros(size, np.uint8) if SIMULATED else cuda.to_device(self.host)
        self.row = Buffer(address_of(self.array), size, "uint8", self.array)
        self.scales: NDArray[np.float32] = _pinned(blocks, np.float32)
        self._picked: Any = None  # where the scales are on the device, and the scales side by side
        self._event: Any = None if SIMULATED else cuda.event(timing=False)
        self._asked = 0
        self._copied: Callable[[], None] = lambda: None

    def fetch(self, start: int, bucket: Any, *, scales: bool) -> None:
        """Start to copy all of it to ``host``, after what was launched before; or only its ``scales``.

        ``bucket`` (a ``layout.Bucket``) tells where these are, from byte ``start`` on.
        """
        self._asked = 0
        if scales:
            source = self._pick(start, bucket)
            self._copy(self.scales.view(np.uint8), source)
        else:
            self._copy(self.host, self.row)

    def _pick(self, start: int, bucket: Any) -> Buffer:
        if self._picked is None:
            places, numbers = bucket.scales.astype(np.int64), np.zeros(len(self.scales), np.float32)
            self._picked = places, numbers
            if not SIMULATED:  # which are copied later, perhaps
                stream, self._uploaded = launcher.current(), self._picked
                self._picked = cuda.to_device(places, stream=stream), cuda.to_device(numbers, stream=stream)
        places, numbers = self._picked
        row: Row = list(EMPTY)
        row[Column.SIZE], row[Column.WEIGHT] = len(self.scales), address_of(places)
        row[Column.ROWS], row[Column.OUT] = self.row.address + start, address_of(numbers)
        launcher.call(Call(Program("pick"), -(-len(self.scales) // TILE_THREADS), TILE_THREADS, row, [], []))
        return Buffer(address_of(numbers), 4 * len(self.scales), "uint8", numbers)

    def _copy(self, target: NDArray[np.uint8], source: Buffer) -> None:
        if SIMULATED:
            there = np.asarray(source)
            self._copied = lambda: target.__setitem__(slice(None), there)
        else:
            stream = launcher.current()
            copy_to_host(target.ctypes.data, source.address, source.size, stream)
            self._event.record(stream)

    def send(self, size: int) -> None:
        """Copy the first ``size`` bytes of ``host`` to the device, before what is launched next."""
        if SIMULATED:
            self.array[:size] = self.host[:size]
        else:
            copy_to_device(self.row.address, self.host.ctypes.data, size, launcher.current())

    def arrived(self) -> bool:
        """Whether ``wait`` would not block. The simulator's copies take until they are asked for a second time."""
        self._asked += 1
        return self._asked > 1 if SIMULATED else has_happened(self._event)

    def wait(self) -> None:
        """Block until all is there."""
        if SIMULATED:
            self._copied()
        else:
            self._event.synchronize()


def _pinned(size: int, kind: Any) -> Any:
    """Zeros in host memory that the device copies to."""
    if SIMULATED or not size:
        return np.zeros(size, kind)
    array = cuda.pinned_array(size, kind)
    array[:] = 0
    return array


def host_mirror(size: int, blocks: int) -> HostMirror:
    """A message of ``size`` bytes for tensors on the device, which arrives some time after it was encoded."""
    return HostMirror(size, blocks)


@cache
def fault() -> str:
    """Why the kernels are not to be used on this machine; nothing if they work. Compiles two of them, in seconds.

    Found out before anything is trusted to them.
    """
    if SIMULATED:
        return ""
    try:
        same = _same()
    except Exception as error:  # of the compiler, the linker, the driver: an older one than the toolkit, say
        return f"the CUDA kernels failed on this GPU: {type(error).__name__}: {error}"
    return "" if same else "the CUDA kernels do not compute on this GPU what they should"


class _Scalars(NamedTuple):
    keep: Number
    take: Number
    eps: Number


def _contributed(p: _Scalars, g: Number, m: Number, v: Number, w: Number, _a: Number) -> Number:
    return (p.keep * m + p.take * (g + p.take * w)) / (sqrt(v) + p.eps)


def _moved(p: _Scalars, x: Number, _m: Number, v: Number, w: Number, _a: Number) -> Any:
    return x * (sqrt(v) + p.eps), None, p.keep * w - p.take * x


def _same() -> bool:
    """Whether one step gives what the reference gives."""
    kernels = sys.modules[__name__]
    coding, size, rng = Coding(codecs.find("sign"), 1024, codecs.GUARD), 3001, np.random.default_rng(0)
    p = _Scalars(np.float32(0.9), np.float32(0.1), np.float32(1e-8))
    tensors = rng.standard_normal((5, size)).astype(np.float32)
    tensors[2] **= 2
    rows = rng.integers(0, 256, (2, coding.codec.size(size, 1024)), np.uint8)
    scales = slice(None, None, coding.codec.record_size(1024) // 4)
    rows.view(np.float32)[:, scales] = 1.5
    results: list[list[Any]] = []
    for backend, put, get in ((reference, np.copy, np.asarray), (kernels, cuda.to_device, _from_device)):
        g, m, v, w, e = map(put, tensors)
        row = np.zeros(rows.shape[1], np.uint8)
        backend.encode(_contributed, p, Arrays(g, m, v, w), e, row, 0, coding)
        found = row.view(np.float32)[scales].copy()
        row.view(np.float32)[scales] = 0
        backend.apply(_moved, p, Arrays(None, m, v, w), rows, 0, coding)
        results.append([row, get(m), get(w), found, get(e)])
    ours, theirs = results
    exact = all(np.array_equal(a, b) for a, b in zip(ours[:3], theirs[:3], strict=True))
    return exact and all(np.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(ours[3:], theirs[3:], strict=True))


def _from_device(array: Any) -> Any:
    return array.copy_to_host()

"""From the kernels' arguments to the rows of a launch's table."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels import cpu
from horovod_onebit.kernels.cuda import table as t
from horovod_onebit.kernels.cuda.device import SIMULATED
from horovod_onebit.kernels.cuda.launch import (
    KINDS,
    MAX_THREADS,
    TILE_THREADS,
    WIDTHS,
    Buffer,
    Call,
    Launcher,
    Places,
    Row,
    Rows,
    buffer,
)
from horovod_onebit.kernels.cuda.programs import PARTS
from horovod_onebit.kernels.reference import CHUNK, Spec, num_blocks

launcher = Launcher()


def on_host(array: Any) -> bool:
    """Whether ``array`` lies in host memory, which in the simulator is the device's."""
    return isinstance(array, np.ndarray) and not SIMULATED


def set_tensors(row: Row, *tensors: tuple[int, Any]) -> None:
    """Put tensors into the columns given with them; None is left out. Their lengths agree, and but for the gradient
    they are float32."""
    size, offsets = -1, 0
    for column, array in tensors:
        if array is None:
            continue
        found = array if type(array) is Buffer else buffer(array)
        if size not in (-1, found.size):
            raise ConfigurationError(f"the CUDA kernels got tensors of different lengths: {_lengths(tensors)}")
        size = found.size
        row[column] = found.address
        if found.dtype == "float32":
            offsets |= found.address
        elif column == t.GRADIENT and found.dtype in KINDS:
            offsets |= 2 * found.address  # four of them have 8 bytes
            row[t.KIND] = KINDS[found.dtype]
        else:
            name = t.Column(column).name.lower()
            also = ", float16 or bfloat16" if column == t.GRADIENT else ""
            raise ConfigurationError(f"the CUDA kernels got {name} as {found.dtype}; expected float32{also}")
    row[t.SIZE], row[t.ALIGNED] = size, int(offsets % 16 == 0)


def _lengths(tensors: tuple[tuple[int, Any], ...]) -> dict[str, int]:
    return {t.Column(column).name.lower(): buffer(array).size for column, array in tensors if array is not None}


def _inverse(n: int) -> float:
    """1 / n where a multiplication by it is as exact as a division by n; else 0."""
    return 1 / n if n & (n - 1) == 0 else 0.0


def row_of_blocks(block_size: int) -> Row:
    """A new row that knows the size of blocks."""
    row: Row = list(t.EMPTY)
    row[t.BLOCK_SIZE], row[t.PORTION] = block_size, _inverse(block_size)
    row[t.SHIFT] = block_size.bit_length() - 1 if row[t.PORTION] else -1
    return row


@lru_cache(1024)
def _of_spec(spec: Spec) -> tuple[Any, ...]:
    row = row_of_blocks(spec.block_size)
    row[t.SCALE] = cpu.SCALE_CODES[spec.scale]
    row[t.MOMENTUM_FACTOR], row[t.GRAD_FACTOR], row[t.L2] = spec.momentum_factor, spec.grad_factor, spec.l2
    row[t.EPS_INSIDE if spec.eps_inside_sqrt else t.EPS_OUTSIDE] = spec.eps
    row[t.CORRECTION], row[t.CLIP] = spec.variance_correction, spec.clip
    return tuple(row)


def row_of_spec(spec: Spec) -> Row:
    """A new row that knows ``spec``."""
    return list(_of_spec(spec))


def set_contribution(row: Row, grad: Any, momentum: Any, variance: Any, weight: Any, error: Any) -> Places:
    """What is compressed; a gradient in host memory (a mean of a host's workers) is sent along."""
    state = (t.MOMENTUM, momentum), (t.VARIANCE, variance), (t.WEIGHT, weight), (t.ERROR, error)
    if not on_host(grad):
        set_tensors(row, (t.GRADIENT, grad), *state)
        return []
    set_tensors(row, *state)
    if grad.dtype != np.float32 or grad.shape != (row[t.SIZE],):
        raise ConfigurationError(f"the gradient is {grad.dtype} of shape {grad.shape}; expected flat float32 as long")
    return [(t.GRADIENT, np.ascontiguousarray(grad))]


def set_messages(row: Row, scales: Any, bits: Any) -> Places:
    """Of several workers, a row for each; what has to be sent to the device."""
    row[t.WORKERS], row[t.SHARE] = len(scales), _inverse(len(scales))
    sent = []
    for address, stride, array in ((t.SCALES, t.SCALES_STRIDE, scales), (t.BITS, t.BITS_STRIDE, bits)):
        if isinstance(array, np.ndarray):
            array = np.ascontiguousarray(array)
            sent.append((address, array))
            row[stride] = array.strides[0]
        elif isinstance(array, Rows):
            row[address], row[stride] = array.address, array.stride
        else:
            interface = array.__cuda_array_interface__
            row[address] = interface["data"][0]
            width = np.dtype(interface["typestr"]).itemsize
            row[stride] = (interface.get("strides") or (width * interface["shape"][-1],))[0]
    return sent


def one_row(array: Any) -> Any:
    """This worker's own scales or bits, as those of several."""
    return Rows(array.address, 1, 0, WIDTHS[array.dtype], array) if isinstance(array, Buffer) else array[None]


def set_outputs(row: Row, scales: Any, bits: Any) -> Places:
    """This worker's message: what has to be fetched from the device."""
    fetched = []
    for column, array in ((t.OUT_SCALES, scales), (t.OUT_BITS, bits)):
        if isinstance(array, np.ndarray):
            fetched.append((column, array))
        elif isinstance(array, Buffer):
            row[column] = array.address
        else:
            row[column] = array.__cuda_array_interface__["data"][0]
    return fetched


def by_block(program: str, row: Row, sent: Places, fetched: Places) -> bool:
    """Compress, a thread block for each block; whether all is finite, which is True as long as it is not known."""
    block_size, size = row[t.BLOCK_SIZE], row[t.SIZE]
    threads = min(-(-min(block_size, size) // (32 * 4 * PARTS)) * 32, MAX_THREADS)
    launcher.call(Call(program, num_blocks(size, block_size), threads, row, sent, fetched))
    if launcher.collecting or not fetched:
        return True
    return bool(np.isfinite(fetched[0][1]).all())


def by_tile(program: str, row: Row, sent: Places) -> None:
    """Whatever the blocks are."""
    blocks = -(-row[t.SIZE] // (4 * TILE_THREADS * PARTS))
    launcher.call(Call(program, blocks, TILE_THREADS, row, sent, []))


def by_chunk(program: str, row: Row, out: NDArray[np.float64]) -> None:
    """A thread block for each chunk; its sums go to ``out``."""
    launcher.call(Call(program, num_blocks(row[t.SIZE], CHUNK), TILE_THREADS, row, [], [(t.OUT_SCALES, out)]))

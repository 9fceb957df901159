"""From the kernels' arguments to the rows of a launch's table."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels import cpu
from horovod_onebit.kernels.cuda.device import SIMULATED
from horovod_onebit.kernels.cuda.launch import KINDS, MAX_THREADS, TILE_THREADS, Call, Launcher, buffer
from horovod_onebit.kernels.cuda.programs import PARTS
from horovod_onebit.kernels.cuda.table import Column
from horovod_onebit.kernels.reference import CHUNK, Spec, num_blocks

Row = dict[Column, int | float]
launcher = Launcher()


def on_host(array: Any) -> bool:
    """Whether ``array`` lies in host memory, which in the simulator is the device's."""
    return isinstance(array, np.ndarray) and not SIMULATED


def tensors_of(**arrays: Any) -> Row:
    """The columns of tensors by name; None is left out. All have one length, and all but gradients are float32."""
    buffers = {Column[name.upper()]: buffer(array) for name, array in arrays.items() if array is not None}
    sizes = {found.size for found in buffers.values()}
    if len(sizes) != 1:
        lengths = {column.name.lower(): found.size for column, found in buffers.items()}
        raise ConfigurationError(f"the CUDA kernels got tensors of different lengths: {lengths}")
    aligned = True
    for column, found in buffers.items():
        gradient = column is Column.GRADIENT
        if found.dtype not in KINDS or (found.dtype != "float32" and not gradient):
            raise ConfigurationError(
                f"the CUDA kernels got {column.name.lower()} as {found.dtype}; expected float32"
                + (", float16 or bfloat16" if gradient else "")
            )
        aligned &= found.address % (16 if found.dtype == "float32" else 8) == 0
    row: Row = {column: found.address for column, found in buffers.items()}
    gradient_kind = KINDS[buffers[Column.GRADIENT].dtype] if Column.GRADIENT in buffers else 0
    return row | {Column.SIZE: sizes.pop(), Column.ALIGNED: int(aligned), Column.KIND: gradient_kind}


def inverse(n: int) -> float:
    """1 / n where a multiplication by it is as exact as a division by n; else 0."""
    return 1 / n if n & (n - 1) == 0 else 0.0


def of_blocks(block_size: int) -> Row:
    portion = inverse(block_size)
    shift = block_size.bit_length() - 1 if portion else -1
    return {Column.BLOCK_SIZE: block_size, Column.SHIFT: shift, Column.PORTION: portion}


def of_spec(spec: Spec) -> Row:
    return of_blocks(spec.block_size) | {
        Column.SCALE: cpu.SCALE_CODES[spec.scale],
        Column.MOMENTUM_FACTOR: spec.momentum_factor,
        Column.GRAD_FACTOR: spec.grad_factor,
        Column.L2: spec.l2,
        Column.EPS_INSIDE if spec.eps_inside_sqrt else Column.EPS_OUTSIDE: spec.eps,
        Column.CORRECTION: spec.variance_correction,
        Column.CLIP: spec.clip,
    }


def of_contribution(
    grad: Any, momentum: Any, variance: Any, weight: Any, error: Any
) -> tuple[Row, dict[Column, NDArray[Any]]]:
    """The columns of what is compressed; a gradient in host memory (a mean of a host's workers) is sent along."""
    state = {"momentum": momentum, "variance": variance, "weight": weight, "error": error}
    if not on_host(grad):
        return tensors_of(gradient=grad, **state), {}
    row = tensors_of(**state)
    if grad.dtype != np.float32 or grad.shape != (row[Column.SIZE],):
        raise ConfigurationError(f"the gradient is {grad.dtype} of shape {grad.shape}; expected flat float32 as long")
    return row | {Column.KIND: KINDS["float32"]}, {Column.GRADIENT: np.ascontiguousarray(grad)}


def of_messages(scales: Any, bits: Any) -> tuple[Row, dict[Column, NDArray[Any]]]:
    """Of several workers, a row for each: what is known of them, and what has to be sent to the device."""
    row: Row = {Column.WORKERS: len(scales), Column.SHARE: inverse(len(scales))}
    sent = {}
    for address, stride, array in (
        (Column.SCALES, Column.SCALES_STRIDE, scales),
        (Column.BITS, Column.BITS_STRIDE, bits),
    ):
        if isinstance(array, np.ndarray):
            sent[address] = array = np.ascontiguousarray(array)
            row[stride] = array.strides[0]
        else:
            interface = array.__cuda_array_interface__
            row[address] = interface["data"][0]
            width = np.dtype(interface["typestr"]).itemsize
            row[stride] = (interface.get("strides") or (width * interface["shape"][-1],))[0]
    return row, sent


def of_outputs(scales: Any, bits: Any) -> tuple[Row, dict[Column, NDArray[Any]]]:
    """Of this worker: where they are on the device, or what has to be fetched from it."""
    arrays = {Column.OUT_SCALES: scales, Column.OUT_BITS: bits}
    fetched = {column: array for column, array in arrays.items() if isinstance(array, np.ndarray)}
    here = {column: array for column, array in arrays.items() if column not in fetched}
    return {column: array.__cuda_array_interface__["data"][0] for column, array in here.items()}, fetched


def by_block(program: str, row: Row, sent: Any, fetched: Any) -> None:
    block_size, size = int(row[Column.BLOCK_SIZE]), int(row[Column.SIZE])
    threads = min(-(-min(block_size, size) // (32 * 4 * PARTS)) * 32, MAX_THREADS)
    launcher.call(Call(program, num_blocks(size, block_size), threads, row, sent, fetched))


def by_tile(program: str, row: Row, sent: Any, fetched: Any) -> None:
    blocks = -(-int(row[Column.SIZE]) // (4 * TILE_THREADS * PARTS))
    launcher.call(Call(program, blocks, TILE_THREADS, row, sent, fetched))


def by_chunk(program: str, row: Row, fetched: Any) -> None:
    launcher.call(Call(program, num_blocks(int(row[Column.SIZE]), CHUNK), TILE_THREADS, row, {}, fetched))

"""The kernels for NVIDIA GPUs: Numba CUDA, one pass over device memory.

Same functions, arguments and results as ``reference``: bits exactly, floats to rounding of a float64 sum. Tensors lie
in device memory (a ``Buffer``, or anything flat with ``__cuda_array_interface__``); gradients may be float16 or
bfloat16. Messages (scales and bits) may lie in host memory, where they travel from: 1/32 of the tensors' bytes cross
the bus, through pinned memory. Calls inside ``with batch():`` are launched together, on the stream that
``use_stream`` names. What lies in host memory altogether is worked on by ``cpu``.

Needs the extra ``[cuda]`` (numba-cuda) and a GPU; with ``NUMBA_ENABLE_CUDASIM=1`` it runs in Numba's simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels import cpu
from horovod_onebit.kernels.cuda import copies
from horovod_onebit.kernels.cuda.device import SIMULATED
from horovod_onebit.kernels.cuda.launch import KINDS, MAX_THREADS, TILE_THREADS, Buffer, Call, Launcher, buffer
from horovod_onebit.kernels.cuda.programs import Column
from horovod_onebit.kernels.reference import CHUNK, Array, Bytes, ScaleName, Spec, num_blocks, num_bytes

__all__ = [
    "SIMULATED",
    "Buffer",
    "Spec",
    "apply",
    "batch",
    "decode_mean",
    "encode",
    "host",
    "move",
    "num_blocks",
    "num_bytes",
    "recode",
    "restore",
    "set_num_threads",
    "squares",
    "use_stream",
    "write",
]

_launcher = Launcher()
batch = _launcher.batch
set_num_threads = cpu.set_num_threads


def use_stream(stream: Callable[[], int]) -> None:
    """Launch on the stream whose address ``stream()`` gives at each launch: the framework's current one."""
    Launcher.stream = staticmethod(stream)


def host(array: Any) -> NDArray[np.float32]:
    """See ``reference.host``; waits for what was launched before."""
    return array if isinstance(array, np.ndarray) else copies.fetch(buffer(array), _launcher.current())


def write(array: Any, values: Any) -> None:
    """See ``reference.write``; in the order of what was launched before."""
    if isinstance(array, np.ndarray):
        array[:] = values
    else:
        copies.send(buffer(array), values, _launcher.current())


def _on_host(array: Any) -> bool:
    return isinstance(array, np.ndarray) and not SIMULATED


def _tensors(**arrays: Any) -> dict[Column, int | float]:
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
    row: dict[Column, int | float] = {column: found.address for column, found in buffers.items()}
    gradient_kind = KINDS[buffers[Column.GRADIENT].dtype] if Column.GRADIENT in buffers else 0
    return row | {Column.SIZE: sizes.pop(), Column.ALIGNED: int(aligned), Column.KIND: gradient_kind}


def _numbers(spec: Spec) -> dict[Column, int | float]:
    return {
        Column.BLOCK_SIZE: spec.block_size,
        Column.SCALE: cpu.SCALE_CODES[spec.scale],
        Column.EPS_INSIDE: int(spec.eps_inside_sqrt),
        Column.MOMENTUM_FACTOR: spec.momentum_factor,
        Column.GRAD_FACTOR: spec.grad_factor,
        Column.L2: spec.l2,
        Column.EPS: spec.eps,
        Column.CORRECTION: spec.variance_correction,
        Column.CLIP: spec.clip,
    }


def _contribution(
    grad: Any, momentum: Any, variance: Any, weight: Any, error: Any
) -> tuple[dict[Column, int | float], dict[Column, NDArray[Any]]]:
    """The columns of what is compressed; a gradient in host memory (a mean of a host's workers) is sent along."""
    row = _tensors(momentum=momentum, variance=variance, weight=weight, error=error)
    if not _on_host(grad):
        return row | _tensors(gradient=grad, error=error), {}
    if grad.dtype != np.float32 or grad.shape != (row[Column.SIZE],):
        raise ConfigurationError(f"the gradient is {grad.dtype} of shape {grad.shape}; expected flat float32 as long")
    return row | {Column.KIND: KINDS["float32"]}, {Column.GRADIENT: np.ascontiguousarray(grad)}


def _messages(scales: Any, bits: Any) -> tuple[dict[Column, int | float], dict[Column, NDArray[Any]]]:
    """Of several workers, a row for each: what is known of them, and what has to be sent to the device."""
    row: dict[Column, int | float] = {Column.WORKERS: len(scales)}
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


def _outputs(scales: Any, bits: Any) -> tuple[dict[Column, int | float], dict[Column, NDArray[Any]]]:
    """Of this worker: where they are on the device, or what has to be fetched from it."""
    arrays = {Column.OUT_SCALES: scales, Column.OUT_BITS: bits}
    fetched = {column: array for column, array in arrays.items() if isinstance(array, np.ndarray)}
    here = {column: array for column, array in arrays.items() if column not in fetched}
    return {column: array.__cuda_array_interface__["data"][0] for column, array in here.items()}, fetched


def _by_block(program: str, row: dict[Column, int | float], sent: Any, fetched: Any) -> None:
    block_size, size = int(row[Column.BLOCK_SIZE]), int(row[Column.SIZE])
    threads = min(-(-min(block_size, size) // 128) * 32, MAX_THREADS)
    _launcher.call(Call(program, num_blocks(size, block_size), threads, row, sent, fetched))


def _by_tile(program: str, row: dict[Column, int | float], sent: Any, fetched: Any) -> None:
    blocks = -(-int(row[Column.SIZE]) // (4 * TILE_THREADS))
    _launcher.call(Call(program, blocks, TILE_THREADS, row, sent, fetched))


def encode(
    grad: Any, momentum: Any, variance: Any, weight: Any, error: Any, scales: Array, bits: Bytes, spec: Spec
) -> bool:
    """See ``reference.encode``.

    Where the scales are not in host memory, or not yet (in a batch), the result is True: they tell, when they are.
    """
    if _on_host(error):
        return cpu.encode(grad, momentum, variance, weight, error, scales, bits, spec)
    row, sent = _contribution(grad, momentum, variance, weight, error)
    there, fetched = _outputs(scales, bits)
    row |= _numbers(spec) | there | {Column.OUT_ERROR: row[Column.ERROR]}
    _by_block("encode", row, sent, fetched)
    if _launcher.collecting or not fetched:
        return True
    return bool(np.isfinite(scales).all())


def restore(
    grad: Any, momentum: Any, variance: Any, weight: Any, error: Any, scales: Array, bits: Bytes, spec: Spec
) -> None:
    """See ``reference.restore``."""
    if _on_host(error):
        return cpu.restore(grad, momentum, variance, weight, error, scales, bits, spec)
    row, gradient = _contribution(grad, momentum, variance, weight, error)
    there, sent = _messages(scales[None], bits[None])
    return _by_tile("restore", row | _numbers(spec) | there, sent | gradient, {})


def decode_mean(scales: Array, bits: Bytes, size: int, block_size: int, out: Any = None) -> Any:
    """See ``reference.decode_mean``; into ``out`` in device memory, if it is given."""
    if out is None:
        return cpu.decode_mean(scales, bits, size, block_size)
    there, sent = _messages(scales, bits)
    row = _tensors(out_weight=out) | {Column.BLOCK_SIZE: block_size} | there
    _by_tile("decode", row, sent, {})
    return out


def recode(
    scales: Array,
    bits: Bytes,
    error: Any,
    new_error: Any,
    scales_out: Array,
    bits_out: Bytes,
    scale: ScaleName,
    block_size: int,
) -> None:
    """See ``reference.recode``."""
    if _on_host(error):
        return cpu.recode(scales, bits, error, new_error, scales_out, bits_out, scale, block_size)
    (there, sent), (out, fetched) = _messages(scales, bits), _outputs(scales_out, bits_out)
    row = _tensors(error=error, out_error=new_error) | there | out
    row |= {Column.BLOCK_SIZE: block_size, Column.SCALE: cpu.SCALE_CODES[scale]}
    return _by_block("recode", row, sent, fetched)


def apply(
    scales: Array,
    bits: Bytes,
    momentum: Any,
    variance: Any,
    weight: Any,
    spec: Spec,
    *,
    update_space: bool,
    step_size: float,
    decay: float = 1.0,
    look_back: float = 0.0,
    new_momentum: Any = None,
    new_weight: Any = None,
) -> None:
    """See ``reference.apply``."""
    steps: dict[str, Any] = {"step_size": step_size, "decay": decay, "look_back": look_back}
    if _on_host(weight):
        places: dict[str, Any] = {"new_momentum": new_momentum, "new_weight": new_weight}
        return cpu.apply(scales, bits, momentum, variance, weight, spec, update_space=update_space, **steps, **places)
    there, sent = _messages(scales, bits)
    row = _tensors(
        momentum=momentum,
        variance=variance,
        weight=weight,
        out_momentum=momentum if new_momentum is None else new_momentum,
        out_weight=weight if new_weight is None else new_weight,
    )
    row |= _numbers(spec) | there | {Column.UPDATE_SPACE: int(update_space)}
    row |= {Column[name.upper()]: value for name, value in steps.items()}
    return _by_tile("apply", row, sent, {})


def squares(momentum: Any, variance: Any, weight: Any, out: NDArray[np.float64], spec: Spec) -> None:
    """See ``reference.squares``; ``out`` lies in host memory, and is there at the end of a batch."""
    if _on_host(weight):
        return cpu.squares(momentum, variance, weight, out, spec)
    row = _tensors(momentum=momentum, variance=variance, weight=weight) | _numbers(spec)
    call = Call("squares", num_blocks(int(row[Column.SIZE]), CHUNK), TILE_THREADS, row, {}, {Column.OUT_SCALES: out})
    return _launcher.call(call)


def move(momentum: Any, variance: Any, weight: Any, spec: Spec, *, step_size: float, decay: float) -> None:
    """See ``reference.move``."""
    if _on_host(weight):
        return cpu.move(momentum, variance, weight, spec, step_size=step_size, decay=decay)
    row = _tensors(momentum=momentum, variance=variance, weight=weight) | _numbers(spec)
    return _by_tile("move", row | {Column.STEP_SIZE: step_size, Column.DECAY: decay}, {}, {})

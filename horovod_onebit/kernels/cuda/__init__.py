"""The kernels for NVIDIA GPUs: Numba CUDA, one pass over device memory.

Same functions, arguments and results as ``reference``: bits exactly, floats to rounding of a float64 sum. Tensors lie
in device memory: a ``Buffer``, or anything flat with ``__cuda_array_interface__``; gradients may be float16 or
bfloat16. Messages (scales and bits) may lie in host memory, where they travel from: 1/32 of the tensors'
bytes cross the bus, through pinned memory. Calls inside ``with batch():`` are launched together, on the stream that
``use_stream`` names. What lies in host memory altogether is worked on by ``cpu``.

Needs the extra ``[cuda]`` (numba-cuda) and a GPU; with ``NUMBA_ENABLE_CUDASIM=1`` it runs in Numba's simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.kernels import cpu
from horovod_onebit.kernels.cuda import copies
from horovod_onebit.kernels.cuda import table as t
from horovod_onebit.kernels.cuda.calls import (
    by_block,
    by_chunk,
    by_tile,
    launcher,
    on_host,
    one_row,
    row_of_blocks,
    row_of_spec,
    set_contribution,
    set_messages,
    set_outputs,
    set_tensors,
)
from horovod_onebit.kernels.cuda.check import fault
from horovod_onebit.kernels.cuda.device import SIMULATED
from horovod_onebit.kernels.cuda.launch import Buffer, Launcher, Row, Rows, buffer
from horovod_onebit.kernels.cuda.twin import Twin
from horovod_onebit.kernels.reference import Array, Bytes, ScaleName, Spec, num_blocks, num_bytes

__all__ = [
    "SIMULATED",
    "Buffer",
    "Rows",
    "Spec",
    "apply",
    "apply_gradient",
    "batch",
    "copy",
    "decode_mean",
    "encode",
    "encode_moved",
    "fault",
    "host",
    "local_step",
    "move",
    "num_blocks",
    "num_bytes",
    "recode",
    "restore",
    "restore_moved",
    "set_num_threads",
    "squares",
    "take_over",
    "twin",
    "use_stream",
    "write",
]

batch = launcher.batch
set_num_threads = cpu.set_num_threads


def use_stream(stream: Callable[[], int]) -> None:
    """Launch on the stream whose address ``stream()`` gives at each launch: the framework's current one."""
    Launcher.stream = staticmethod(stream)


def host(array: Any) -> NDArray[np.float32]:
    """See ``reference.host``; waits for what was launched before."""
    return array if isinstance(array, np.ndarray) else copies.fetch(buffer(array), launcher.current())


def twin(size: int) -> Twin:
    """See ``reference.twin``."""
    return Twin(size)


def write(array: Any, values: Any) -> None:
    """See ``reference.write``; in the order of what was launched before."""
    if isinstance(array, np.ndarray):
        array[:] = values
    else:
        copies.send(buffer(array), values, launcher.current())


def copy(source: Any, target: Any) -> None:
    """See ``reference.copy``; in the order of what was launched before."""
    if isinstance(target, np.ndarray):
        target[:] = source
    else:
        copies.copy(buffer(source), buffer(target), launcher.current())


def encode(
    grad: Any, momentum: Any, variance: Any, weight: Any, error: Any, scales: Array, bits: Bytes, spec: Spec
) -> bool:
    """See ``reference.encode``.

    Where the scales are not in host memory, or not yet (in a batch), the result is True: they tell, when they are.
    """
    if on_host(error):
        return cpu.encode(grad, momentum, variance, weight, error, scales, bits, spec)
    row = row_of_spec(spec)
    sent = set_contribution(row, grad, momentum, variance, weight, error)
    row[t.OUT_ERROR] = row[t.ERROR]
    return by_block("encode", row, sent, set_outputs(row, scales, bits))


def restore(
    grad: Any, momentum: Any, variance: Any, weight: Any, error: Any, scales: Array, bits: Bytes, spec: Spec
) -> None:
    """See ``reference.restore``."""
    if on_host(error):
        return cpu.restore(grad, momentum, variance, weight, error, scales, bits, spec)
    row = row_of_spec(spec)
    sent = set_contribution(row, grad, momentum, variance, weight, error)
    return by_tile("restore", row, sent + set_messages(row, one_row(scales), one_row(bits)))


def decode_mean(scales: Array, bits: Bytes, size: int, block_size: int, out: Any = None) -> Any:
    """See ``reference.decode_mean``; into ``out`` in device memory, if it is given."""
    if out is None:
        return cpu.decode_mean(scales, bits, size, block_size)
    row = row_of_blocks(block_size)
    set_tensors(row, (t.OUT_WEIGHT, out))
    by_tile("decode", row, set_messages(row, scales, bits))
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
    if on_host(error):
        return cpu.recode(scales, bits, error, new_error, scales_out, bits_out, scale, block_size)
    row = row_of_blocks(block_size)
    row[t.SCALE] = cpu.SCALE_CODES[scale]
    set_tensors(row, (t.ERROR, error), (t.OUT_ERROR, new_error))
    by_block("recode", row, set_messages(row, scales, bits), set_outputs(row, scales_out, bits_out))
    return None


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
) -> None:
    """See ``reference.apply``."""
    if on_host(weight):
        steps: dict[str, Any] = {"step_size": step_size, "decay": decay, "look_back": look_back}
        return cpu.apply(scales, bits, momentum, variance, weight, spec, update_space=update_space, **steps)
    row = row_of_spec(spec)
    _set_state(row, momentum, variance, weight, momentum, weight)
    row[t.UPDATE_SPACE], row[t.STEP_SIZE], row[t.DECAY], row[t.LOOK_BACK] = update_space, step_size, decay, look_back
    return by_tile("apply", row, set_messages(row, scales, bits))


def _set_state(
    row: Row, momentum: Any, variance: Any, weight: Any, out_momentum: Any = None, out_weight: Any = None
) -> None:
    """What a step reads and what it writes."""
    outputs = (t.OUT_MOMENTUM, out_momentum), (t.OUT_WEIGHT, out_weight)
    set_tensors(row, (t.MOMENTUM, momentum), (t.VARIANCE, variance), (t.WEIGHT, weight), *outputs)


def squares(momentum: Any, variance: Any, weight: Any, out: NDArray[np.float64], spec: Spec) -> None:
    """See ``reference.squares``; ``out`` lies in host memory, and is there at the end of a batch."""
    if on_host(weight):
        return cpu.squares(momentum, variance, weight, out, spec)
    row = row_of_spec(spec)
    _set_state(row, momentum, variance, weight)
    return by_chunk("squares", row, out)


def move(momentum: Any, variance: Any, weight: Any, spec: Spec, *, step_size: float, decay: float) -> None:
    """See ``reference.move``."""
    if on_host(weight):
        return cpu.move(momentum, variance, weight, spec, step_size=step_size, decay=decay)
    row = row_of_spec(spec)
    _set_state(row, momentum, variance, weight)
    row[t.STEP_SIZE], row[t.DECAY] = step_size, decay
    return by_tile("move", row, [])


def local_step(
    grad: Any, momentum: Any, variance: Any, weight: Any, spec: Spec, *, step_size: float, decay: float
) -> None:
    """See ``reference.local_step``."""
    if on_host(weight):
        return cpu.local_step(grad, momentum, variance, weight, spec, step_size=step_size, decay=decay)
    row = row_of_spec(spec)
    moments = (t.MOMENTUM, momentum), (t.VARIANCE, variance), (t.WEIGHT, weight)
    set_tensors(row, (t.GRADIENT, grad), *moments, (t.OUT_MOMENTUM, momentum), (t.OUT_WEIGHT, weight))
    row[t.STEP_SIZE], row[t.DECAY] = step_size, decay
    return by_tile("local_step", row, [])


def _row_of_displacement(weight: Any, anchor: Any, variance: Any, error: Any, spec: Spec, decay: float) -> Row:
    row = row_of_spec(spec)
    set_tensors(row, (t.WEIGHT, weight), (t.ANCHOR, anchor), (t.VARIANCE, variance), (t.ERROR, error))
    row[t.DECAY] = decay
    return row


def encode_moved(
    weight: Any, anchor: Any, variance: Any, error: Any, scales: Array, bits: Bytes, spec: Spec, *, decay: float
) -> bool:
    """See ``reference.encode_moved``, and for the result ``encode``."""
    if on_host(error):
        return cpu.encode_moved(weight, anchor, variance, error, scales, bits, spec, decay=decay)
    row = _row_of_displacement(weight, anchor, variance, error, spec, decay)
    row[t.OUT_ERROR] = row[t.ERROR]
    return by_block("encode_moved", row, [], set_outputs(row, scales, bits))


def restore_moved(
    weight: Any, anchor: Any, variance: Any, error: Any, scales: Array, bits: Bytes, spec: Spec, *, decay: float
) -> None:
    """See ``reference.restore_moved``."""
    if on_host(error):
        return cpu.restore_moved(weight, anchor, variance, error, scales, bits, spec, decay=decay)
    row = _row_of_displacement(weight, anchor, variance, error, spec, decay)
    return by_tile("restore_moved", row, set_messages(row, one_row(scales), one_row(bits)))


def apply_gradient(
    scales: Array,
    bits: Bytes,
    momentum: Any,
    variance: Any,
    weight: Any,
    spec: Spec,
    *,
    update_space: bool,
    step_size: float,
    decay: float,
) -> None:
    """See ``reference.apply_gradient``."""
    if on_host(weight):
        options: dict[str, Any] = {"update_space": update_space, "step_size": step_size, "decay": decay}
        return cpu.apply_gradient(scales, bits, momentum, variance, weight, spec, **options)
    row = row_of_spec(spec)
    _set_state(row, momentum, variance, weight, momentum, weight)
    row[t.UPDATE_SPACE], row[t.STEP_SIZE], row[t.DECAY] = update_space, step_size, decay
    return by_tile("apply_gradient", row, set_messages(row, scales, bits))


def take_over(
    scales: Array,
    bits: Bytes,
    momentum: Any,
    variance: Any,
    weight: Any,
    anchor: Any,
    spec: Spec,
    *,
    update_space: bool,
    decay: float,
    rates: float,
) -> None:
    """See ``reference.take_over``."""
    if on_host(weight):
        options: dict[str, Any] = {"update_space": update_space, "decay": decay, "rates": rates}
        return cpu.take_over(scales, bits, momentum, variance, weight, anchor, spec, **options)
    row = row_of_spec(spec)
    outputs = (t.OUT_MOMENTUM, momentum), (t.OUT_WEIGHT, weight)
    set_tensors(row, (t.MOMENTUM, momentum), (t.VARIANCE, variance), (t.ANCHOR, anchor), *outputs)
    row[t.UPDATE_SPACE], row[t.STEP_SIZE], row[t.DECAY] = update_space, rates, decay
    return by_tile("take_over", row, set_messages(row, scales, bits))

"""The kernels for NVIDIA GPUs: Numba CUDA, one pass over device memory.

Same functions, arguments and results as ``reference``: bits exactly, floats to rounding of a float64 sum. Tensors lie
in device memory: a ``Buffer``, or anything flat with ``__cuda_array_interface__`` or ``__dlpack__``; gradients may be
float16 or bfloat16. Messages (scales and bits) may lie in host memory, where they travel from: 1/32 of the tensors'
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
from horovod_onebit.kernels.cuda.calls import (
    by_block,
    by_chunk,
    by_tile,
    launcher,
    of_blocks,
    of_contribution,
    of_messages,
    of_outputs,
    of_spec,
    on_host,
    tensors_of,
)
from horovod_onebit.kernels.cuda.device import SIMULATED
from horovod_onebit.kernels.cuda.launch import Buffer, Launcher, buffer
from horovod_onebit.kernels.cuda.table import Column
from horovod_onebit.kernels.reference import Array, Bytes, ScaleName, Spec, num_blocks, num_bytes

__all__ = [
    "SIMULATED",
    "Buffer",
    "Spec",
    "apply",
    "apply_gradient",
    "batch",
    "copy",
    "decode_mean",
    "encode",
    "encode_moved",
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
    row, sent = of_contribution(grad, momentum, variance, weight, error)
    there, fetched = of_outputs(scales, bits)
    row |= of_spec(spec) | there | {Column.OUT_ERROR: row[Column.ERROR]}
    by_block("encode", row, sent, fetched)
    if launcher.collecting or not fetched:
        return True
    return bool(np.isfinite(scales).all())


def restore(
    grad: Any, momentum: Any, variance: Any, weight: Any, error: Any, scales: Array, bits: Bytes, spec: Spec
) -> None:
    """See ``reference.restore``."""
    if on_host(error):
        return cpu.restore(grad, momentum, variance, weight, error, scales, bits, spec)
    row, gradient = of_contribution(grad, momentum, variance, weight, error)
    there, sent = of_messages(scales[None], bits[None])
    return by_tile("restore", row | of_spec(spec) | there, sent | gradient, {})


def decode_mean(scales: Array, bits: Bytes, size: int, block_size: int, out: Any = None) -> Any:
    """See ``reference.decode_mean``; into ``out`` in device memory, if it is given."""
    if out is None:
        return cpu.decode_mean(scales, bits, size, block_size)
    there, sent = of_messages(scales, bits)
    row = tensors_of(out_weight=out) | of_blocks(block_size) | there
    by_tile("decode", row, sent, {})
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
    (there, sent), (out, fetched) = of_messages(scales, bits), of_outputs(scales_out, bits_out)
    row = tensors_of(error=error, out_error=new_error) | there | out
    row |= of_blocks(block_size) | {Column.SCALE: cpu.SCALE_CODES[scale]}
    return by_block("recode", row, sent, fetched)


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
    if on_host(weight):
        places: dict[str, Any] = {"new_momentum": new_momentum, "new_weight": new_weight}
        return cpu.apply(scales, bits, momentum, variance, weight, spec, update_space=update_space, **steps, **places)
    there, sent = of_messages(scales, bits)
    row = tensors_of(
        momentum=momentum,
        variance=variance,
        weight=weight,
        out_momentum=momentum if new_momentum is None else new_momentum,
        out_weight=weight if new_weight is None else new_weight,
    )
    row |= of_spec(spec) | there | {Column.UPDATE_SPACE: int(update_space)}
    row |= {Column[name.upper()]: value for name, value in steps.items()}
    return by_tile("apply", row, sent, {})


def squares(momentum: Any, variance: Any, weight: Any, out: NDArray[np.float64], spec: Spec) -> None:
    """See ``reference.squares``; ``out`` lies in host memory, and is there at the end of a batch."""
    if on_host(weight):
        return cpu.squares(momentum, variance, weight, out, spec)
    row = tensors_of(momentum=momentum, variance=variance, weight=weight) | of_spec(spec)
    return by_chunk("squares", row, {Column.OUT_SCALES: out})


def move(momentum: Any, variance: Any, weight: Any, spec: Spec, *, step_size: float, decay: float) -> None:
    """See ``reference.move``."""
    if on_host(weight):
        return cpu.move(momentum, variance, weight, spec, step_size=step_size, decay=decay)
    row = tensors_of(momentum=momentum, variance=variance, weight=weight) | of_spec(spec)
    return by_tile("move", row | {Column.STEP_SIZE: step_size, Column.DECAY: decay}, {}, {})


def local_step(
    grad: Any, momentum: Any, variance: Any, weight: Any, spec: Spec, *, step_size: float, decay: float
) -> None:
    """See ``reference.local_step``."""
    if on_host(weight):
        return cpu.local_step(grad, momentum, variance, weight, spec, step_size=step_size, decay=decay)
    row = tensors_of(
        gradient=grad, momentum=momentum, variance=variance, weight=weight, out_momentum=momentum, out_weight=weight
    )
    row |= of_spec(spec) | {Column.STEP_SIZE: step_size, Column.DECAY: decay}
    return by_tile("local_step", row, {}, {})


def encode_moved(
    weight: Any, anchor: Any, variance: Any, error: Any, scales: Array, bits: Bytes, spec: Spec, *, decay: float
) -> bool:
    """See ``reference.encode_moved``, and for the result ``encode``."""
    if on_host(error):
        return cpu.encode_moved(weight, anchor, variance, error, scales, bits, spec, decay=decay)
    there, fetched = of_outputs(scales, bits)
    row = tensors_of(weight=weight, anchor=anchor, variance=variance, error=error, out_error=error)
    by_block("encode_moved", row | of_spec(spec) | there | {Column.DECAY: decay}, {}, fetched)
    return True if launcher.collecting or not fetched else bool(np.isfinite(scales).all())


def restore_moved(
    weight: Any, anchor: Any, variance: Any, error: Any, scales: Array, bits: Bytes, spec: Spec, *, decay: float
) -> None:
    """See ``reference.restore_moved``."""
    if on_host(error):
        return cpu.restore_moved(weight, anchor, variance, error, scales, bits, spec, decay=decay)
    there, sent = of_messages(scales[None], bits[None])
    row = tensors_of(weight=weight, anchor=anchor, variance=variance, error=error)
    return by_tile("restore_moved", row | of_spec(spec) | there | {Column.DECAY: decay}, sent, {})


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
    there, sent = of_messages(scales, bits)
    row = tensors_of(
        momentum=momentum, variance=variance, weight=weight, out_momentum=momentum, out_weight=weight
    ) | of_spec(spec)
    row |= there | {Column.UPDATE_SPACE: int(update_space), Column.STEP_SIZE: step_size, Column.DECAY: decay}
    return by_tile("apply_gradient", row, sent, {})


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
    there, sent = of_messages(scales, bits)
    row = tensors_of(momentum=momentum, variance=variance, anchor=anchor, out_momentum=momentum, out_weight=weight)
    row |= of_spec(spec) | there
    row |= {Column.UPDATE_SPACE: int(update_space), Column.STEP_SIZE: rates, Column.DECAY: decay}
    return by_tile("take_over", row, sent, {})

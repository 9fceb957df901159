"""The kernels for CPUs: Numba, one pass over memory, threads that hold no lock.

Same functions, arguments and results as ``reference``: bits exactly, floats to rounding of a float64 sum. Each
block of a tensor is worked on while it lies in the first-level cache, so memory is read and written once.
Large tensors are split between threads by blocks; the result does not depend on how many there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_onebit.kernels.compiling import exact, reordered
from horovod_onebit.kernels.elements import denominator, mean_of_block
from horovod_onebit.kernels.layers import move, squares
from horovod_onebit.kernels.local import apply_gradient, displacement, local_step, take_over
from horovod_onebit.kernels.reference import (
    GUARD,
    Array,
    Bytes,
    ScaleName,
    Spec,
    batch,
    copy,
    host,
    twin,
    write,
)
from horovod_onebit.kernels.threads import over_blocks, set_num_threads

__all__ = [
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
    "recode",
    "restore",
    "restore_moved",
    "set_num_threads",
    "squares",
    "take_over",
    "twin",
    "write",
]

f32 = np.float32
u8 = np.uint8
u32 = np.uint32
SCALE_CODES = {"rms": 0, "guarded": 1}


@reordered
def _sums(c):
    total = 0.0
    squares = 0.0
    for i in range(c.size):
        x = np.float64(c[i])
        total += abs(x)
        squares += x * x
    return total, squares


@exact
def _scale(c, code):
    total, squares = _sums(c)
    mean_abs = total / c.size
    rms = np.sqrt(squares / c.size)
    return f32(rms if code == 0 else min(rms, GUARD * mean_abs))


@exact
def _contribution(out, owed, grad, momentum, variance, weight, scalars):
    """``out = u + owed``, one block; ``owed`` None leaves ``u`` alone."""
    momentum_factor, grad_factor, l2, eps, eps_inside, correction, clip = scalars
    zero = f32(0)
    for i in range(grad.size):
        g = grad[i]
        if weight is not None:
            g = g + l2 * weight[i]
        u = momentum_factor * momentum[i] + grad_factor * g
        if variance is not None:
            m = u
            u = m / denominator(variance[i], correction, eps, eps_inside)
            u = -clip if u < -clip else u
            u = clip if u > clip else u
            u = u + m * zero
        out[i] = u if owed is None else u + owed[i] + zero


@exact
def _pack(c, bits):
    """Sign bits of ``c``, which holds no negative zero and no NaN."""
    word = c.view(u32)
    whole = c.size // 8
    for k in range(whole):
        byte = u32(0)
        for j in range(8):
            byte |= (word[8 * k + j] >> u32(31)) << u32(j)
        bits[k] = u8(byte)
    if whole < bits.size:
        byte = u32(0)
        for j in range(c.size - 8 * whole):
            byte |= (word[8 * whole + j] >> u32(31)) << u32(j)
        bits[whole] = u8(byte)


@exact
def _pack_any(c, bits):
    """As ``_pack``, for blocks that may hold NaN."""
    bits[:] = u8(0)
    for i in range(c.size):
        bits[i // 8] |= u8(c[i] < f32(0)) << u8(i % 8)


@exact
def _keep_lost(c, error, s):
    for i in range(c.size):
        error[i] = c[i] + s if c[i] < f32(0) else c[i] - s


@exact
def _encode(grad, momentum, variance, weight, error, scales, bits, scalars, code, block_size, first, last):
    c = np.empty(min(block_size, grad.size), f32)
    finite = True
    for k in range(first, last):
        lo = k * block_size
        hi = min(lo + block_size, grad.size)
        x = c[: hi - lo]
        v = None if variance is None else variance[lo:hi]
        w = None if weight is None else weight[lo:hi]
        _contribution(x, error[lo:hi], grad[lo:hi], momentum[lo:hi], v, w, scalars)
        s = _scale(x, code)
        out = bits[lo // 8 : (hi + 7) // 8]
        if np.isfinite(s):
            scales[k] = s
            _pack(x, out)
            _keep_lost(x, error[lo:hi], s)
        else:
            scales[k] = f32(np.nan)
            _pack_any(x, out)
            finite = False
    return finite


@exact
def _restore(grad, momentum, variance, weight, error, scales, bits, scalars, block_size, first, last):
    u = np.empty(min(block_size, grad.size), f32)
    for k in range(first, last):
        if np.isnan(scales[k]):
            continue
        lo = k * block_size
        hi = min(lo + block_size, grad.size)
        v = None if variance is None else variance[lo:hi]
        w = None if weight is None else weight[lo:hi]
        _contribution(u[: hi - lo], None, grad[lo:hi], momentum[lo:hi], v, w, scalars)
        s = scales[k]
        for i in range(lo, hi):
            sent = -s if (bits[i // 8] >> u8(i % 8)) & u8(1) else s
            error[i] = (error[i] + sent) - u[i - lo]


@exact
def _decode_mean(out, scales, bits, block_size, first, last):
    total = np.empty(8 * ((min(block_size, out.size) + 7) // 8), f32)
    for k in range(first, last):
        lo = k * block_size
        hi = min(lo + block_size, out.size)
        mean_of_block(total, scales, bits, k, lo, hi)
        out[lo:hi] = total[: hi - lo]


@exact
def _recode(scales, bits, error, new_error, scales_out, bits_out, code, block_size, first, last):
    total = np.empty(8 * ((min(block_size, error.size) + 7) // 8), f32)
    for k in range(first, last):
        lo = k * block_size
        hi = min(lo + block_size, error.size)
        mean_of_block(total, scales, bits, k, lo, hi)
        c = total[: hi - lo]
        for i in range(c.size):
            c[i] = c[i] + error[lo + i] + f32(0)
        s = _scale(c, code)
        scales_out[k] = s
        _pack(c, bits_out[lo // 8 : (hi + 7) // 8])
        _keep_lost(c, new_error[lo:hi], s)


@exact
def _step_update_space(mean, momentum, variance, weight, correction, eps, eps_inside, decay, step_size):
    for i in range(weight.size):
        momentum[i] = mean[i] * denominator(variance[i], correction, eps, eps_inside)
        weight[i] = decay * weight[i] - step_size * mean[i]


@exact
def _step_momentum_space(mean, momentum, variance, weight, correction, eps, eps_inside, decay, step_size):
    for i in range(weight.size):
        momentum[i] = mean[i]
        update = mean[i] / denominator(variance[i], correction, eps, eps_inside)
        weight[i] = decay * weight[i] - step_size * update


@exact
def _step_plain(mean, momentum, weight, decay, step_size, look_back):
    for i in range(weight.size):
        weight[i] = decay * weight[i] + look_back * momentum[i] - step_size * mean[i]
        momentum[i] = mean[i]


@exact
def _apply(scales, bits, momentum, variance, weight, scalars, update_space, block_size, first, last):
    correction, eps, eps_inside, decay, step_size, look_back = scalars
    total = np.empty(8 * ((min(block_size, weight.size) + 7) // 8), f32)
    for k in range(first, last):
        lo = k * block_size
        hi = min(lo + block_size, weight.size)
        mean_of_block(total, scales, bits, k, lo, hi)
        mean, m, w = total[: hi - lo], momentum[lo:hi], weight[lo:hi]
        if variance is None:
            _step_plain(mean, m, w, decay, step_size, look_back)
        elif update_space:
            _step_update_space(mean, m, variance[lo:hi], w, correction, eps, eps_inside, decay, step_size)
        else:
            _step_momentum_space(mean, m, variance[lo:hi], w, correction, eps, eps_inside, decay, step_size)


def _encode_scalars(spec: Spec) -> tuple[Any, ...]:
    return (
        f32(spec.momentum_factor),
        f32(spec.grad_factor),
        f32(spec.l2),
        f32(spec.eps),
        bool(spec.eps_inside_sqrt),
        f32(spec.variance_correction),
        f32(spec.clip),
    )


def encode(
    grad: Array,
    momentum: Array,
    variance: Array | None,
    weight: Array | None,
    error: Array,
    scales: Array,
    bits: Bytes,
    spec: Spec,
) -> bool:
    """See ``reference.encode``."""
    scalars, code = _encode_scalars(spec), SCALE_CODES[spec.scale]

    def work(first: int, last: int) -> bool:
        return _encode(
            grad, momentum, variance, weight, error, scales, bits, scalars, code, spec.block_size, first, last
        )

    return all(over_blocks(grad.size, spec.block_size, work))


def restore(
    grad: Array,
    momentum: Array,
    variance: Array | None,
    weight: Array | None,
    error: Array,
    scales: Array,
    bits: Bytes,
    spec: Spec,
) -> None:
    """See ``reference.restore``."""
    scalars = _encode_scalars(spec)

    def work(first: int, last: int) -> None:
        _restore(grad, momentum, variance, weight, error, scales, bits, scalars, spec.block_size, first, last)

    over_blocks(grad.size, spec.block_size, work)


def encode_moved(
    weight: Array,
    anchor: Array,
    variance: Array | None,
    error: Array,
    scales: Array,
    bits: Bytes,
    spec: Spec,
    *,
    decay: float,
) -> bool:
    """See ``reference.encode_moved``; in two passes: it is rare."""
    moved = displacement(weight, anchor, variance, spec, decay)
    return encode(moved, moved, None, None, error, scales, bits, _alone(spec))


def restore_moved(
    weight: Array,
    anchor: Array,
    variance: Array | None,
    error: Array,
    scales: Array,
    bits: Bytes,
    spec: Spec,
    *,
    decay: float,
) -> None:
    """See ``reference.restore_moved``."""
    moved = displacement(weight, anchor, variance, spec, decay)
    restore(moved, moved, None, None, error, scales, bits, _alone(spec))


def _alone(spec: Spec) -> Spec:
    """``spec`` for what is encoded as it is."""
    return spec._replace(momentum_factor=0.0, grad_factor=1.0)


def decode_mean(scales: Array, bits: Bytes, size: int, block_size: int) -> Array:
    """See ``reference.decode_mean``."""
    scales, bits = np.ascontiguousarray(scales), np.ascontiguousarray(bits)
    out = np.empty(size, f32)

    def work(first: int, last: int) -> None:
        _decode_mean(out, scales, bits, block_size, first, last)

    over_blocks(size, block_size, work)
    return out


def recode(
    scales: Array,
    bits: Bytes,
    error: Array,
    new_error: Array,
    scales_out: Array,
    bits_out: Bytes,
    scale: ScaleName,
    block_size: int,
) -> None:
    """See ``reference.recode``."""
    scales, bits, code = np.ascontiguousarray(scales), np.ascontiguousarray(bits), SCALE_CODES[scale]

    def work(first: int, last: int) -> None:
        _recode(scales, bits, error, new_error, scales_out, bits_out, code, block_size, first, last)

    over_blocks(error.size, block_size, work)


def apply(
    scales: Array,
    bits: Bytes,
    momentum: Array,
    variance: Array | None,
    weight: Array,
    spec: Spec,
    *,
    update_space: bool,
    step_size: float,
    decay: float = 1.0,
    look_back: float = 0.0,
) -> None:
    """See ``reference.apply``."""
    # Rows of the wire are strided; a copy of the bits costs little, and loops over contiguous rows become SIMD.
    scales, bits = np.ascontiguousarray(scales), np.ascontiguousarray(bits)
    scalars = (
        f32(spec.variance_correction),
        f32(spec.eps),
        bool(spec.eps_inside_sqrt),
        f32(decay),
        f32(step_size),
        f32(look_back),
    )

    def work(first: int, last: int) -> None:
        _apply(scales, bits, momentum, variance, weight, scalars, update_space, spec.block_size, first, last)

    over_blocks(weight.size, spec.block_size, work)

"""0/1 Adam's own kernels for CPUs: local steps, what they have moved, and the steps by what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_onebit.kernels.compiling import exact
from horovod_onebit.kernels.elements import denominator, mean_of_block
from horovod_onebit.kernels.reference import Array, Bytes, Spec
from horovod_onebit.kernels.threads import over_blocks

f32 = np.float32
PIECE = 4096  # elements of an elementwise kernel's share of work


@exact
def _local_step(grad, momentum, variance, weight, scalars, factors, clip, step_size, decay, first, last):
    correction, eps, eps_inside = scalars
    momentum_factor, grad_factor, l2 = factors
    for i in range(first * PIECE, min(last * PIECE, weight.size)):
        m = momentum_factor * momentum[i] + grad_factor * (grad[i] + l2 * weight[i])
        u = m / denominator(variance[i], correction, eps, eps_inside)
        u = -clip if u < -clip else u
        u = clip if u > clip else u
        momentum[i] = m
        weight[i] = decay * weight[i] - step_size * u


@exact
def _displace(out, weight, anchor, variance, scalars, decay, first, last):
    correction, eps, eps_inside = scalars
    for i in range(first * PIECE, min(last * PIECE, weight.size)):
        moved = weight[i] - decay * anchor[i]
        out[i] = moved if variance is None else moved * denominator(variance[i], correction, eps, eps_inside)


@exact
def _apply_gradient(
    scales, bits, momentum, variance, weight, scalars, factors, update_space, step_size, decay, block_size, first, last
):
    correction, eps, eps_inside = scalars
    momentum_factor, grad_factor = factors
    mean = np.empty(8 * ((min(block_size, weight.size) + 7) // 8), f32)
    for k in range(first, last):
        lo = k * block_size
        hi = min(lo + block_size, weight.size)
        mean_of_block(mean, scales, bits, k, lo, hi)
        m, v, w = momentum[lo:hi], variance[lo:hi], weight[lo:hi]
        for i in range(hi - lo):
            d = denominator(v[i], correction, eps, eps_inside)
            m[i] = momentum_factor * m[i] + grad_factor * (mean[i] * d if update_space else mean[i])
            w[i] = decay * w[i] - step_size * (m[i] / d)


@exact
def _take_over(
    scales, bits, momentum, variance, weight, anchor, scalars, update_space, decay, rates, block_size, first, last
):
    correction, eps, eps_inside = scalars
    mean = np.empty(8 * ((min(block_size, weight.size) + 7) // 8), f32)
    for k in range(first, last):
        lo = k * block_size
        hi = min(lo + block_size, weight.size)
        mean_of_block(mean, scales, bits, k, lo, hi)
        m, v, w, a = momentum[lo:hi], variance[lo:hi], weight[lo:hi], anchor[lo:hi]
        for i in range(hi - lo):
            d = denominator(v[i], correction, eps, eps_inside)
            moved = mean[i] if update_space else mean[i] / d
            w[i] = decay * a[i] + moved
            if rates > f32(0):
                m[i] = moved * d / -rates


def _of_denominator(spec: Spec) -> tuple[Any, ...]:
    return f32(spec.variance_correction), f32(spec.eps), bool(spec.eps_inside_sqrt)


def local_step(
    grad: Array, momentum: Array, variance: Array, weight: Array, spec: Spec, *, step_size: float, decay: float
) -> None:
    """See ``reference.local_step``."""
    scalars, clip = _of_denominator(spec), f32(spec.clip)
    factors = f32(spec.momentum_factor), f32(spec.grad_factor), f32(spec.l2)

    def work(first: int, last: int) -> None:
        _local_step(grad, momentum, variance, weight, scalars, factors, clip, f32(step_size), f32(decay), first, last)

    over_blocks(weight.size, PIECE, work)


def displacement(weight: Array, anchor: Array, variance: Array | None, spec: Spec, decay: float) -> Array:
    """See ``reference.displacement``."""
    scalars, out = _of_denominator(spec), np.empty_like(weight)

    def work(first: int, last: int) -> None:
        _displace(out, weight, anchor, variance, scalars, f32(decay), first, last)

    over_blocks(weight.size, PIECE, work)
    return out


def apply_gradient(
    scales: Array,
    bits: Bytes,
    momentum: Array,
    variance: Array,
    weight: Array,
    spec: Spec,
    *,
    update_space: bool,
    step_size: float,
    decay: float,
) -> None:
    """See ``reference.apply_gradient``."""
    scales, bits = np.ascontiguousarray(scales), np.ascontiguousarray(bits)
    scalars, factors = _of_denominator(spec), (f32(spec.momentum_factor), f32(spec.grad_factor))
    numbers = update_space, f32(step_size), f32(decay), spec.block_size

    def work(first: int, last: int) -> None:
        _apply_gradient(scales, bits, momentum, variance, weight, scalars, factors, *numbers, first, last)

    over_blocks(weight.size, spec.block_size, work)


def take_over(
    scales: Array,
    bits: Bytes,
    momentum: Array,
    variance: Array,
    weight: Array,
    anchor: Array,
    spec: Spec,
    *,
    update_space: bool,
    decay: float,
    rates: float,
) -> None:
    """See ``reference.take_over``."""
    scales, bits, scalars = np.ascontiguousarray(scales), np.ascontiguousarray(bits), _of_denominator(spec)
    numbers = update_space, f32(decay), f32(rates), spec.block_size

    def work(first: int, last: int) -> None:
        _take_over(scales, bits, momentum, variance, weight, anchor, scalars, *numbers, first, last)

    over_blocks(weight.size, spec.block_size, work)

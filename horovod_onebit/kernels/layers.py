"""LAMB's own kernels for CPUs: how long a layer and its update are, and the step with what follows from that."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.kernels.compiling import exact, reordered
from horovod_onebit.kernels.elements import denominator
from horovod_onebit.kernels.reference import CHUNK, Array, Spec
from horovod_onebit.kernels.threads import over_blocks

f32 = np.float32
PIECE = 1024  # elements that stay in the first-level cache


@reordered
def _square_sum(x):
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@exact
def _update(out, momentum, variance, weight, scalars):
    eps, eps_inside, correction, momentum_factor, l2 = scalars
    for i in range(out.size):
        out[i] = momentum[i] / denominator(variance[i], correction, eps, eps_inside) * momentum_factor + l2 * weight[i]


@exact
def _squares(momentum, variance, weight, scalars, out, first, last):
    u = np.empty(PIECE, f32)
    for k in range(first, last):
        out[k, 0] = out[k, 1] = 0.0
        end = min((k + 1) * CHUNK, weight.size)
        for lo in range(k * CHUNK, end, PIECE):
            hi = min(lo + PIECE, end)
            w, x = weight[lo:hi], u[: hi - lo]
            _update(x, momentum[lo:hi], variance[lo:hi], w, scalars)
            out[k, 0] += _square_sum(w)
            out[k, 1] += _square_sum(x)


@exact
def _move(momentum, variance, weight, scalars, step_size, decay, first, last):
    u = np.empty(PIECE, f32)
    for lo in range(first * CHUNK, min(last * CHUNK, weight.size), PIECE):
        hi = min(lo + PIECE, weight.size)
        w, x = weight[lo:hi], u[: hi - lo]
        _update(x, momentum[lo:hi], variance[lo:hi], w, scalars)
        for i in range(w.size):
            w[i] = decay * w[i] - step_size * x[i]


def _scalars(spec: Spec) -> tuple[Any, ...]:
    correction = f32(spec.variance_correction)
    return f32(spec.eps), bool(spec.eps_inside_sqrt), correction, f32(spec.momentum_factor), f32(spec.l2)


def squares(momentum: Array, variance: Array, weight: Array, out: NDArray[np.float64], spec: Spec) -> None:
    """See ``reference.squares``."""
    scalars = _scalars(spec)

    def work(first: int, last: int) -> None:
        _squares(momentum, variance, weight, scalars, out, first, last)

    over_blocks(weight.size, CHUNK, work)


def move(momentum: Array, variance: Array, weight: Array, spec: Spec, *, step_size: float, decay: float) -> None:
    """See ``reference.move``."""
    scalars = _scalars(spec)

    def work(first: int, last: int) -> None:
        _move(momentum, variance, weight, scalars, f32(step_size), f32(decay), first, last)

    over_blocks(weight.size, CHUNK, work)

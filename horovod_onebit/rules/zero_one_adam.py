"""0/1 Adam (Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam").

Algorithm 1 of that paper, with its lines; g_i is worker i's gradient, D = sqrt(v) + eps. A ``schedule.Stepwise`` says
what each step sends: ``ZeroOne`` for the paper's own, with its T_v and T_u.

    MEAN, k in T_v         v <- beta2 v + (1 - beta2) mean(g)^2, and Adam's step with mean(g)             lines 3, 10-13
    GRADIENT               g^ = 1bit(g), an exchange with error feedback; m <- beta1 m + (1 - beta1) g^;
                           w <- w - lr m / D
    NOTHING, alone         m_i <- beta1 m_i + (1 - beta1) g_i;  w_i <- w_i - lr m_i / D                 lines 4-6
    DISPLACEMENT, k in T_u the same, and then with all that was moved since the last one, A_i = w_i - w:
                           A = 1bit(A_i);  w <- w + A;  m <- -A D / (sum of lr)                           lines 7-9

Ours differs in these points. In update space, what is compressed is g / D or A_i, clipped as in 1-bit Adam, where the
paper has g and A_i D; residuals stay as they are where a MEAN step changes D. The weights at the last exchange are
kept, and not only the sum of moves, so that all workers come back to the same bits. Decoupled weight decay goes
straight to w: it is not part of A.

Where learning rates fall, errors of earlier moves are larger than these are, and not all of them travel (line 7): they
would make m too large (``feedback``). Without any learning rate since the last exchange, m is 0.

A schedule of one's own may also send the CONTRIBUTION: that step is 1-bit Adam's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.formulas import (
    ZERO,
    Formula,
    Number,
    alive,
    clipped,
    denominator,
    f32,
    moving,
    multiplier,
    rests,
    where,
)
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rules import Context, Tensor, Use
from horovod_onebit.rules.adam import Adam, Scalars, momentum_l2, momentum_of_moving
from horovod_onebit.rules.local import COUNT, DECAY, RATES, count, no_steps
from horovod_onebit.schedule import Sends


def local(p: Scalars, g: Number, m: Number, v: Number, w: Number, a: Number) -> Any:  # lines 4 to 6
    new_m = momentum_l2(p, g, m, v, w, a)
    return new_m, None, p.decay * w - p.step * clipped(p, new_m / denominator(p, v))


def local_of_moving(p: Scalars, g: Number, m: Number, v: Number, w: Number, a: Number) -> Any:
    _, _, moved = local(p, g, m, v, w, a)
    return momentum_of_moving(p, g, m, v, w, a), None, where(alive(v), moved, p.decay * w)


def move_by_scaled_gradient(p: Scalars, x: Number, m: Number, v: Number, w: Number, _a: Number) -> Any:
    d = multiplier(p, v)
    new_m = p.beta1 * m + p.grad * (moving(x, v) * d)
    return new_m, None, p.decay * w - p.step * (new_m / d)


def move_by_gradient(p: Scalars, x: Number, m: Number, v: Number, w: Number, _a: Number) -> Any:
    new_m = p.beta1 * m + p.grad * x
    return new_m, None, p.decay * w - p.step * (new_m / denominator(p, v))


class Sync(NamedTuple):
    """``decay`` is that of all local steps together, ``rates`` the sum of their step sizes. If that is 0, the momentum
    stays where ``common`` is 1, and becomes 0 where it is 0."""

    correction: Number
    eps_inside: Number
    eps: Number
    decay: Number
    rates: Number
    common: Number


def common(tensor: Tensor) -> float:
    """``Sync.common``: the momentum is each worker's own once it has taken a step."""
    return 0.0 if tensor.layer is not None and tensor.layer[COUNT] else 1.0


@rests
def displacement(p: Sync, _g: Number, m: Number, v: Number, w: Number, a: Number) -> Number:
    moved = w - p.decay * a
    return where(alive(v), moved, m + moved * ZERO)  # NaN stays NaN


def scaled_displacement(p: Sync, _g: Number, _m: Number, v: Number, w: Number, a: Number) -> Number:
    return (w - p.decay * a) * multiplier(p, v)


def _taken_over(p: Sync, moved: Number, m: Number, d: Number, a: Number) -> Any:  # lines 7 to 9
    return where(p.rates > ZERO, moved * d / -p.rates, where(p.common > ZERO, m, ZERO)), None, p.decay * a + moved


def take_over(p: Sync, x: Number, m: Number, v: Number, w: Number, a: Number) -> Any:
    return take_over_exact(p, moving(x, v), m, v, w, a)


def take_over_exact(p: Sync, x: Number, m: Number, v: Number, _w: Number, a: Number) -> Any:
    return _taken_over(p, x, m, multiplier(p, v), a)


def take_over_scaled(p: Sync, x: Number, m: Number, v: Number, _w: Number, a: Number) -> Any:
    d = multiplier(p, v)
    return _taken_over(p, x / d, m, d, a)


@dataclass(frozen=True)
class ZeroOneAdam(Adam):
    """Adam's hyperparameters, and what this step sends. ``Tensor.anchor`` holds the weights that all had when
    the first step alone since the last exchange began."""

    sends: Sends = Sends.GRADIENT
    name: str = "zero_one_adam"
    encodes_gradients: ClassVar[bool] = False

    def init(self, tensor: Tensor) -> None:
        tensor.layer = no_steps()
        tensor.anchor = np.zeros_like(tensor.weight)

    def _sync(self, tensor: Tensor, context: Context) -> Sync:
        assert tensor.layer is not None
        p = self.scalars(tensor, context)
        own = tensor.layer[DECAY], tensor.layer[RATES], f32(common(tensor))
        return Sync(p.correction, p.eps_inside, p.eps, *own)

    @property
    def paced(self) -> bool:
        return self.sends is Sends.DISPLACEMENT

    def local_rates(self, tensor: Tensor) -> float:
        return float(tensor.layer[RATES]) if self.paced and tensor.layer is not None else 0.0

    def contribution(self, tensor: Tensor, context: Context) -> Use:
        update_space = context.recipe.space == "update"
        if self.sends is Sends.DISPLACEMENT:
            return Use(displacement if update_space else scaled_displacement, self._sync(tensor, context))
        if self.sends is Sends.CONTRIBUTION:
            return super().contribution(tensor, context)
        # Of one gradient 1 - beta1 goes into the momentum, so that its bound is that much wider.
        formula, p = super().contribution(tensor, context)
        clip = f32(context.clip / (1 - self.beta1))
        return Use(formula, p._replace(beta1=ZERO, grad=f32(self.grad_scale), clip=clip))

    def bound(self, tensor: Tensor, context: Context) -> float:
        if self.sends is Sends.DISPLACEMENT:
            return np.inf
        return super().bound(tensor, context) / (1.0 if self.sends is Sends.CONTRIBUTION else 1 - self.beta1)

    def motion(self, tensor: Tensor, context: Context) -> Use:
        update_space = context.recipe.space == "update"
        if self.sends is Sends.DISPLACEMENT:
            return Use(take_over if update_space else take_over_scaled, self._sync(tensor, context))
        if self.sends is Sends.CONTRIBUTION:
            return super().motion(tensor, context)
        p = self.scalars(tensor, context, grad=1 - self.beta1)  # the mean is of scaled gradients
        return Use(move_by_scaled_gradient if update_space else move_by_gradient, p)

    def prediction(self, context: Context) -> Formula | None:
        return super().prediction(context) if self.sends is Sends.CONTRIBUTION else None  # or it is of gradients

    def local_step(self, tensor: Tensor, grad: Array, context: Context) -> None:
        """A step of this worker alone."""
        assert tensor.layer is not None
        layer, kernels, update_space = tensor.layer, context.kernels, context.recipe.space == "update"
        if layer[COUNT] == 0:
            kernels.copy(tensor.weight, tensor.anchor)
            layer[:] = no_steps()
        p = self.scalars(tensor, context)
        kernels.move(local_of_moving if update_space else local, p, tensor.arrays(grad))
        count(tensor, p.step, p.decay)

    def moved_alone(self, tensor: Tensor, context: Context) -> Array | None:
        if tensor.layer is None or tensor.anchor is None or tensor.layer[COUNT] == 0:
            return None
        host = context.kernels.host
        return np.asarray(host(tensor.weight) - tensor.layer[DECAY] * host(tensor.anchor))

    def settle(self, tensor: Tensor, mean: Array, context: Context) -> None:
        assert tensor.layer is not None
        context.kernels.move(take_over_exact, self._sync(tensor, context), tensor.arrays(mean))
        tensor.layer[COUNT] = 0

    def finish(self, tensor: Tensor, sums: NDArray[np.float64] | None, context: Context) -> None:
        if self.sends is Sends.DISPLACEMENT and tensor.layer is not None:
            tensor.layer[COUNT] = 0


def of(rule: Adam, sends: Sends) -> ZeroOneAdam:
    """``rule`` as a step that ``sends`` this."""
    values = {f.name: getattr(rule, f.name) for f in dataclasses.fields(Adam) if f.name != "name"}
    return ZeroOneAdam(**values, sends=sends)

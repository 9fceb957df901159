"""1-bit Adam (Tang et al. 2021; Algorithm 1 of Tarasov and Ershov 2022) and AdamW.

Warm-up is Adam itself (line 2). From then on, on worker i (the numbers are the lines of Algorithm 1):

    7    m_i   = beta1 m + (1 - beta1) g_i
         u_i   = m_i                            momentum space
               = clip(m_i / D, -k, k)           update space: D = sqrt(v) + eps, frozen
    8    C_i   = scale * sign(u_i + error_i)
    9    error_i <- u_i + error_i - C_i         against the *scaled* sign: the printed line does not telescope
    11   mean  = sum_i C_i / n                  every worker decodes all messages (direct exchange)
    15   m     <- mean                          momentum space
               <- mean * D                      update space: the momentum stays global, the same on all workers
    16   w     <- w - lr / (1 - beta1^t) * m / D

The bias of v is corrected once and for all by the number of steps it has seen when it is frozen. The bias of m is
corrected by the step count as in Adam, so that without compression the method is Adam with a frozen v. Decoupled
weight decay goes straight to w; L2 decay goes into g_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from horovod_onebit.checks import number
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.formulas import (
    ZERO,
    Formula,
    Number,
    alive,
    clipped,
    denominator,
    moving,
    multiplier,
    rests,
    sqrt,
    where,
)
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rules import Context, Rule, Tensor, Use, Wraps, scalars


class Scalars(NamedTuple):
    """Of a compressed step. ``correction`` is that of the second moment's bias; of the two epsilons one is 0."""

    beta1: Number
    grad: Number
    l2: Number
    correction: Number
    eps_inside: Number
    eps: Number
    clip: Number
    decay: Number
    step: Number


def momentum(p: Scalars, g: Number, m: Number, _v: Number, _w: Number, _a: Number) -> Number:  # line 7
    return p.beta1 * m + p.grad * g


def momentum_l2(p: Scalars, g: Number, m: Number, _v: Number, w: Number, _a: Number) -> Number:
    return p.beta1 * m + p.grad * (g + p.l2 * w)


def _update(p: Scalars, m: Number, v: Number) -> Number:
    return clipped(p, m / denominator(p, v)) + m * ZERO  # NaN stays NaN, Inf becomes NaN


@rests
def update(p: Scalars, g: Number, m: Number, v: Number, w: Number, a: Number) -> Number:
    return _update(p, momentum(p, g, m, v, w, a), v)


def momentum_of_moving(p: Scalars, g: Number, m: Number, v: Number, w: Number, _a: Number) -> Number:
    """Without the decay of elements that rest, which would be wanted for it."""
    return p.beta1 * m + p.grad * (g + where(alive(v), p.l2 * w, ZERO))


@rests
def update_l2(p: Scalars, g: Number, m: Number, v: Number, w: Number, a: Number) -> Number:
    return _update(p, momentum_of_moving(p, g, m, v, w, a), v)


def move_by_update(p: Scalars, x: Number, _m: Number, v: Number, w: Number, _a: Number) -> Any:  # lines 15, 16
    x = moving(x, v)
    return x * multiplier(p, v), None, p.decay * w - p.step * x


def move_by_momentum(p: Scalars, x: Number, _m: Number, v: Number, w: Number, _a: Number) -> Any:
    return x, None, p.decay * w - p.step * (x / denominator(p, v))


def kept_update(p: Scalars, _g: Number, m: Number, v: Number, _w: Number, _a: Number) -> Number:
    return _update(p, p.beta1 * m, v)


def kept_momentum(p: Scalars, _g: Number, m: Number, _v: Number, _w: Number, _a: Number) -> Number:
    return p.beta1 * m


class Exact(NamedTuple):
    """Of an exact step: ``keep2`` is beta2, ``take1`` and ``take2`` are what beta1 and beta2 leave."""

    grad: Number
    l2: Number
    take1: Number
    keep2: Number
    take2: Number
    root: Number  # of the second moment's correction
    eps: Number
    decay: Number
    step: Number


def moments(p: Exact, g: Number, m: Number, v: Number, w: Number, _a: Number) -> Any:
    gradient = p.grad * g + p.l2 * w
    return m + p.take1 * (gradient - m), p.keep2 * v + p.take2 * gradient * gradient


def exact(p: Exact, g: Number, m: Number, v: Number, w: Number, a: Number) -> Any:
    new_m, new_v = moments(p, g, m, v, w, a)
    return new_m, new_v, p.decay * w - p.step * (new_m / (sqrt(new_v) / p.root + p.eps))


def plain_factor(beta2: float, taken: int, seen: int, before: float | None = None) -> float:
    """What v, of which ``seen`` steps are known, is multiplied by for a plain optimizer that counts ``taken`` steps.
    ``before``: beta2 in those steps, if it was another."""
    before = beta2 if before is None else before
    return 1.0 if (taken, beta2) == (seen, before) else (1 - beta2**taken) / (1 - before**seen)


@dataclass(frozen=True)
class Adam(Rule):
    """Hyperparameters of one step, as of ``torch.optim.AdamW`` (Kingma and Ba 2015; Loshchilov and Hutter 2019), whose
    ``betas`` are ``beta1`` and ``beta2`` here. ``weight_decay`` is 0 by default; ``decoupled=False`` adds it to the
    gradient, as ``torch.optim.Adam`` does. Raises ``ConfigurationError`` for a value out of range.

    ``grad_scale`` multiplies the gradient before anything else: -1 to maximize, n for a sum over n workers.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    grad_scale: float = 1.0
    name: str = "adam"
    has_variance: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field, low, high in (("beta1", 0, 1), ("beta2", 0, 1), ("lr", 0, np.inf), ("eps", 0, np.inf)):
            if not low <= number(field, getattr(self, field)) < high:
                raise ConfigurationError(f"{field}={getattr(self, field)!r}: expected {low} <= {field} < {high}")

    @property
    def l2(self) -> float:
        """Of the weight decay what goes into the gradient, before that is scaled."""
        return 0.0 if self.decoupled else self.weight_decay / self.grad_scale

    @property
    def decay(self) -> float:
        """What decoupled weight decay leaves of a weight."""
        return 1 - self.lr * self.weight_decay if self.decoupled else 1.0

    def decayed(self, grad: Array, weight: Array) -> Array:
        """``grad`` with what L2 decay of ``weight`` adds to it."""
        return grad + np.float32(self.l2) * weight if self.l2 else grad

    def beta2_of(self, tensor: Tensor) -> float:
        """See ``Tensor.beta2``."""
        return self.beta2 if tensor.beta2 is None else tensor.beta2

    def correction(self, tensor: Tensor) -> float:
        """Of the second moment's bias, by what ``tensor`` has taken and seen alone: see ``scalars``."""
        return 1 / (1 - self.beta2_of(tensor) ** max(tensor.variance_steps, 1))

    def step_size(self, tensor: Tensor) -> float:
        """The learning rate, the momentum's bias corrected, of step ``tensor.step + 1``; as ``correction``."""
        return self.lr / (1 - self.beta1 ** (tensor.step + 1))

    def epsilons(self, context: Context) -> dict[str, float]:
        """Epsilon as scalars: inside of the root or outside."""
        inside = context.recipe.eps_inside_sqrt
        return {"eps_inside": self.eps if inside else 0.0, "eps": 0.0 if inside else self.eps}

    def scalars(self, tensor: Tensor, context: Context, **changes: float) -> Scalars:
        """Those of a compressed step, but for ``changes``; made once for all tensors that have taken the same steps."""
        key = id(self), tensor.step, tensor.variance_steps, tensor.beta2, *changes.items()
        if (found := context.scalars.get(key)) is not None:
            return found[1]
        values = {
            "beta1": self.beta1,
            "grad": (1 - self.beta1) * self.grad_scale,
            "l2": self.l2,
            "correction": self.correction(tensor),
            **self.epsilons(context),
            "clip": context.clip,
            "decay": self.decay,
            "step": self.step_size(tensor),
        }
        return context.remember(key, self, scalars(Scalars, **(values | changes)))

    def in_space(self, update: Formula, momentum: Formula, tensor: Tensor, context: Context) -> Use:
        """The formula of the two that is for the recipe's space."""
        return Use(update if context.recipe.space == "update" else momentum, self.scalars(tensor, context))

    def contribution(self, tensor: Tensor, context: Context) -> Use:
        p = self.scalars(tensor, context)
        if context.recipe.space == "update":
            return Use(update_l2 if self.l2 else update, p)
        return Use(momentum_l2 if self.l2 else momentum, p)

    def bound(self, tensor: Tensor, context: Context) -> float:
        return context.clip if context.recipe.space == "update" else np.inf

    def direction(self, tensor: Tensor, context: Context) -> Array:
        m = super().direction(tensor, context)
        if context.recipe.space == "momentum":
            return m
        return np.asarray(m / denominator(self.scalars(tensor, context), context.kernels.host(tensor.variance)))

    def motion(self, tensor: Tensor, context: Context) -> Use:
        return self.in_space(move_by_update, move_by_momentum, tensor, context)

    def prediction(self, context: Context) -> Formula | None:
        return kept_update if context.recipe.space == "update" else kept_momentum

    def exact(self, tensor: Tensor) -> Use:
        """Adam (Kingma and Ba 2015), or AdamW with ``decoupled`` decay."""
        beta2 = self.beta2_of(tensor)
        values = {
            "grad": self.grad_scale,
            "l2": 0.0 if self.decoupled else self.weight_decay,
            "take1": 1 - self.beta1,
            "keep2": beta2,
            "take2": 1 - beta2,
            "root": np.sqrt(1 - beta2**tensor.variance_steps),
            "eps": self.eps,
            "decay": self.decay,
            "step": self.lr / (1 - self.beta1**tensor.step),
        }
        return Use(exact, scalars(Exact, **values))


TORCH = Wraps(
    "torch.optim.Adam",
    Adam,
    momentum="exp_avg",
    variance="exp_avg_sq",
    options={
        "lr": "lr",
        "beta1": "betas.0",
        "beta2": "betas.1",
        "eps": "eps",
        "weight_decay": "weight_decay",
        "decoupled": "decoupled_weight_decay",
    },
    requires={"amsgrad": False, "capturable": False, "differentiable": False},
    also=("AdamW",),
)
KERAS = Wraps(
    "keras.optimizers.Adam",
    Adam,
    momentum="_momentums",
    variance="_velocities",
    options={"beta1": "beta_1", "beta2": "beta_2", "eps": "epsilon"},
    fixed={"decoupled": True},
    requires={"amsgrad": False},
    also=("AdamW",),
)

"""1-bit Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2).

    c_i  = beta1 m + (1 - beta1) g_i;  C_i = 1bit(c_i + error_i)      what a worker contributes to the direction
    x    = sum_i C_i / n
    w    <- (1 - lr decay) w - lr sign(x)
    m    <- beta2 m + (1 - beta2) g,   g = (x - beta1 m) / (1 - beta1)

Lion looks at the sign of the mean only, so that there is nothing to divide by and nothing to freeze: warm-up may be
short. ``g`` is the mean gradient as the messages tell it; with the usual betas the momentum takes a tenth of x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from horovod_onebit.checks import number
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.formulas import Formula, Number, sign
from horovod_onebit.rules import Context, Rule, Tensor, Use, Wraps, scalars


class Scalars(NamedTuple):
    """``keep`` and ``take`` are what the new momentum has of the old one and of the gradient, or of the mean."""

    beta1: Number
    grad: Number
    keep: Number
    take: Number
    decay: Number
    step: Number


def contribute(p: Scalars, g: Number, m: Number, _v: Number, _w: Number, _a: Number) -> Number:
    return p.beta1 * m + p.grad * g


def move(p: Scalars, x: Number, m: Number, _v: Number, w: Number, _a: Number) -> Any:
    return p.keep * m + p.take * x, None, p.decay * w - p.step * sign(x)


def kept(p: Scalars, _g: Number, m: Number, _v: Number, _w: Number, _a: Number) -> Number:
    return p.beta1 * m


def exact(p: Scalars, g: Number, m: Number, v: Number, w: Number, a: Number) -> Any:
    direction = contribute(p, g, m, v, w, a)
    return p.keep * m + p.take * g, None, p.decay * w - p.step * sign(direction)


@dataclass(frozen=True)
class Lion(Rule):
    """Hyperparameters of one step; weight decay is decoupled."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    grad_scale: float = 1.0
    name: str = "lion"

    def __post_init__(self) -> None:
        for field, high in (("beta1", 1), ("beta2", 1), ("lr", np.inf)):
            if not 0 <= number(field, getattr(self, field)) < high:
                raise ConfigurationError(f"{field}={getattr(self, field)!r}: expected 0 <= {field} < {high}")

    def _scalars(self, keep: float, take: float) -> Scalars:
        values = {"grad": (1 - self.beta1) * self.grad_scale, "decay": 1 - self.lr * self.weight_decay, "step": self.lr}
        return scalars(Scalars, beta1=self.beta1, keep=keep, take=take, **values)

    def contribution(self, tensor: Tensor, context: Context) -> Use:
        return Use(contribute, self._scalars(0.0, 0.0))

    def motion(self, tensor: Tensor, context: Context) -> Use:
        share = (1 - self.beta2) / (1 - self.beta1)
        return Use(move, self._scalars(self.beta2 - share * self.beta1, share))

    def prediction(self, context: Context) -> Formula:
        return kept

    def exact(self, tensor: Tensor) -> Use:
        return Use(exact, self._scalars(self.beta2, (1 - self.beta2) * self.grad_scale))


TORCH = Wraps(
    "Lion",  # PyTorch has none: lion-pytorch's, timm's, pytorch_optimizer's
    Lion,
    momentum="exp_avg",
    options={"lr": "lr", "beta1": "betas.0", "beta2": "betas.1", "weight_decay": "weight_decay"},
    requires={
        "cautious_factor": 1.0,
        "weight_decouple": True,
        "decoupled_wd": False,
        "capturable": False,
        "differentiable": False,
    },
)
KERAS = Wraps(
    "keras.optimizers.Lion",
    Lion,
    momentum="_momentums",
    options={"beta1": "beta_1", "beta2": "beta_2"},
)

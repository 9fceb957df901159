"""1-bit SGD with momentum and error feedback (Seide et al. 2014; Karimireddy et al. 2019, EF-signSGD).

On worker i:

    c_i   = momentum * m + (1 - dampening) * g_i + error_i
    C_i   = scale * sign(c_i);      error_i <- c_i - C_i
    m     <- sum_i C_i / n                                    the same on all workers
    w     <- w - lr * m,  or with Nesterov  w - lr * (g + momentum * m),  g = m - momentum * m_before

Keras's momentum is a velocity, which has the learning rates of its steps, and residuals are then of velocities, too:

    c_i   = momentum * v - lr * g_i + error_i;   v <- sum_i C_i / n;   w <- w + v,  or  w + momentum * v - lr * g

There is no preconditioner, so the recipe's space, clip and epsilon do not matter here; scales per block do, since
the magnitudes of gradients differ between layers. Weight decay is L2, into g_i, or decoupled, straight to w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from horovod_onebit.checks import number
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.formulas import Formula, Number
from horovod_onebit.rules import Context, Rule, Tensor, Use, Wraps, scalars


class Scalars(NamedTuple):
    """``look_back`` is what Nesterov's momentum adds of the momentum before: w - lr (x + momentum (x - before))."""

    momentum: Number
    grad: Number
    l2: Number
    decay: Number
    look_back: Number
    step: Number


def contribute(p: Scalars, g: Number, m: Number, _v: Number, _w: Number, _a: Number) -> Number:
    return p.momentum * m + p.grad * g


def contribute_l2(p: Scalars, g: Number, m: Number, _v: Number, w: Number, _a: Number) -> Number:
    return p.momentum * m + p.grad * (g + p.l2 * w)


def move(p: Scalars, x: Number, m: Number, _v: Number, w: Number, _a: Number) -> Any:
    return x, None, p.decay * w + p.look_back * m - p.step * x


def kept(p: Scalars, _g: Number, m: Number, _v: Number, _w: Number, _a: Number) -> Number:
    return p.momentum * m


class Exact(NamedTuple):
    """``ahead_g`` and ``ahead_m`` are what the update has of the gradient and of the new momentum."""

    grad: Number
    l2: Number
    momentum: Number
    take: Number
    ahead_g: Number
    ahead_m: Number
    decay: Number
    step: Number


def exact(p: Exact, g: Number, m: Number, _v: Number, w: Number, _a: Number) -> Any:
    gradient = p.grad * g + p.l2 * w
    new_m = p.momentum * m + p.take * gradient
    return new_m, None, p.decay * w - p.step * (p.ahead_g * gradient + p.ahead_m * new_m)


def exact_without_momentum(p: Exact, g: Number, _m: Number, _v: Number, w: Number, _a: Number) -> Any:
    return None, None, p.decay * w - p.step * (p.grad * g + p.l2 * w)


@dataclass(frozen=True)
class SGD(Rule):
    """Hyperparameters of one step; names and meanings are those of ``torch.optim.SGD``.

    ``decoupled`` takes weight decay out of the gradient, as Keras has it: ``w <- (1 - lr * weight_decay) * w - ...``.
    ``velocity``: the momentum is Keras's, so that a change of the learning rate changes what is added to it from then
    on, and not what it has.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    decoupled: bool = False
    velocity: bool = False
    grad_scale: float = 1.0
    name: str = "sgd"

    def __post_init__(self) -> None:
        for field in ("lr", "momentum"):
            if not 0 <= number(field, getattr(self, field)) < np.inf:
                raise ConfigurationError(f"{field}={getattr(self, field)!r}: expected 0 <= {field} < inf")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ConfigurationError("nesterov=True needs momentum > 0 and dampening = 0, as in torch.optim.SGD")

    @property
    def decay(self) -> float:
        """What decoupled weight decay leaves of a weight."""
        return 1 - self.lr * self.weight_decay if self.decoupled else 1.0

    @property
    def rates(self) -> tuple[float, float]:
        """What a gradient is multiplied by when it goes into the momentum, and what that is when it is taken from the
        weights."""
        return (-self.lr, -1.0) if self.velocity else (1.0, self.lr)

    def scalars(self) -> Scalars:
        ahead = self.momentum if self.nesterov else 0.0
        into, out = self.rates
        values = {
            "momentum": self.momentum,
            # Without momentum, PyTorch's dampening has no effect.
            "grad": into * (1 - self.dampening if self.momentum else 1.0) * self.grad_scale,
            "l2": 0.0 if self.decoupled else self.weight_decay / self.grad_scale,
            "decay": self.decay,
            "look_back": out * ahead,
            "step": out * (1 + ahead),
        }
        return scalars(Scalars, **values)

    def contribution(self, tensor: Tensor, context: Context) -> Use:
        p = self.scalars()
        return Use(contribute_l2 if p.l2 else contribute, p)

    def motion(self, tensor: Tensor, context: Context) -> Use:
        return Use(move, self.scalars())

    def prediction(self, context: Context) -> Formula | None:
        return kept if self.momentum else None

    def exact(self, tensor: Tensor) -> Use:
        """SGD as ``torch.optim.SGD`` has it: the first step's momentum is the gradient itself."""
        into, out = self.rates if self.momentum else (1.0, self.lr)
        values = {
            "grad": self.grad_scale,
            "l2": 0.0 if self.decoupled else self.weight_decay,
            "momentum": self.momentum,
            "take": into * (1.0 if tensor.step == 1 else 1 - self.dampening),
            "ahead_g": into * self.nesterov,
            "ahead_m": self.momentum if self.nesterov else 1.0,
            "decay": self.decay,
            "step": out,
        }
        return Use(exact if self.momentum else exact_without_momentum, scalars(Exact, **values))


TORCH = Wraps(
    "torch.optim.SGD",
    SGD,
    momentum="momentum_buffer",
    options={name: name for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov")},
    requires={"differentiable": False},
)
KERAS = Wraps(
    "keras.optimizers.SGD",
    SGD,
    momentum="momentums",
    options={"momentum": "momentum", "nesterov": "nesterov"},
    fixed={"decoupled": True, "velocity": True},
)

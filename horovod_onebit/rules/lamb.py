"""1-bit LAMB (You et al. 2020; Li et al. 2021; Algorithm 2 of Tarasov and Ershov 2022).

LAMB is Adam whose update is scaled, layer by layer, to the length of the layer's weights:

    u = m / D + decay * w         c = clip(|w| / |u|, min_coeff, max_coeff),  1 if either is 0       w <- w - lr c u

and in warm-up the mean of the coefficients is kept: c_avg <- coeff_beta c_avg + (1 - coeff_beta) c (Algorithm 2,
line 6; its bias towards the initial 0 is corrected here).
Afterwards, with the momentum that all workers have in common once it is exchanged as in 1-bit Adam, c is computed as
in warm-up, from weights and momentum, which are the same on all workers, but not below c_avg: elements that v does not
know yet get a full step each time, and must not slow the others down. (Algorithm 2, lines 17 to 21, stretches c_avg
instead by how the second moment would have changed, which needs a second second-moment.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.formulas import Number, denominator, moving, multiplier, sqrt
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rules import Context, Tensor, Use, Wraps, scalars, sums
from horovod_onebit.rules.adam import Adam, Exact, Scalars, moments

COEFFICIENT = 0
"""Where ``Tensor.layer`` holds c_avg: it is all that is there."""


def take_over_update(p: Scalars, x: Number, _m: Number, v: Number, _w: Number, _a: Number) -> Any:
    return moving(x, v) * multiplier(p, v), None, None


def take_over_momentum(_p: Scalars, x: Number, _m: Number, _v: Number, _w: Number, _a: Number) -> Any:
    return x, None, None


class Step(NamedTuple):
    """Of a step of the whole layer. ``first`` is the momentum's correction, ``inside`` the decay inside of the update,
    ``step`` includes the layer's coefficient."""

    first: Number
    inside: Number
    correction: Number
    eps_inside: Number
    eps: Number
    decay: Number
    step: Number


def update(p: Step, _g: Number, m: Number, v: Number, w: Number, _a: Number) -> Number:
    return m / denominator(p, v) * p.first + p.inside * w


def lengths(p: Step, g: Number, m: Number, v: Number, w: Number, a: Number) -> Any:
    return p.decay * w, update(p, g, m, v, w, a)


def move(p: Step, g: Number, m: Number, v: Number, w: Number, a: Number) -> Any:
    return None, None, p.decay * w - p.step * update(p, g, m, v, w, a)


class ExactStep(NamedTuple):
    """Of an exact step of the whole layer: corrections divide."""

    first: Number
    root: Number
    eps: Number
    inside: Number
    decay: Number
    step: Number


def exact_moments(p: Exact, g: Number, m: Number, v: Number, w: Number, a: Number) -> Any:
    new_m, new_v = moments(p, g, m, v, w, a)
    return new_m, new_v, None


def exact_update(p: ExactStep, _g: Number, m: Number, v: Number, w: Number, _a: Number) -> Number:
    return (m / p.first) / (sqrt(v) / p.root + p.eps) + p.inside * w


def exact_lengths(p: ExactStep, g: Number, m: Number, v: Number, w: Number, a: Number) -> Any:
    return p.decay * w, exact_update(p, g, m, v, w, a)


def exact_move(p: ExactStep, g: Number, m: Number, v: Number, w: Number, a: Number) -> Any:
    return None, None, p.decay * w - p.step * exact_update(p, g, m, v, w, a)


@dataclass(frozen=True)
class LAMB(Adam):
    """Hyperparameters of one step. Those beyond Adam's have DeepSpeed's names.

    ``bias_correction`` False leaves both moments uncorrected, as DeepSpeed does. ``decoupled`` takes the decay out of
    the update, as Keras has it: ``w <- (1 - lr weight_decay) w - lr c m / D``.
    """

    eps: float = 1e-6
    decoupled: bool = False
    bias_correction: bool = True
    min_coeff: float = 0.01
    max_coeff: float = 10.0
    coeff_beta: float = 0.9
    name: str = "lamb"

    @property
    def l2(self) -> float:
        return 0.0  # the decay is in the update, if it is not outside

    @property
    def inside(self) -> float:
        return 0.0 if self.decoupled else self.weight_decay

    def correction(self, tensor: Tensor) -> float:
        return super().correction(tensor) if self.bias_correction else 1.0

    def init(self, tensor: Tensor) -> None:
        tensor.layer = np.zeros(1, np.float32)

    def begin(self, tensor: Tensor, context: Context) -> None:
        assert tensor.layer is not None
        if tensor.layer[COEFFICIENT] == 0:  # an exact part that keeps no mean: the coefficient of now
            found = self._exact_coefficient(tensor, context, decay=1.0)
            tensor.layer[COEFFICIENT] = found * self._seen(tensor)

    def motion(self, tensor: Tensor, context: Context) -> Use:
        """Take over the momentum; the weights wait for ``finish``, which needs the whole layer."""
        return self.in_space(take_over_update, take_over_momentum, tensor, context)

    def _step(self, tensor: Tensor, context: Context, coefficient: float = 0.0) -> Step:
        values = {
            "first": 1 / (1 - self.beta1 ** (tensor.step + 1)) if self.bias_correction else 1.0,
            "inside": self.inside,
            "correction": self.correction(tensor),
            **self.epsilons(context),
            "decay": self.decay,
            "step": self.lr * coefficient,
        }
        return scalars(Step, **values)

    def lengths(self, tensor: Tensor, context: Context) -> Use:
        return Use(lengths, self._step(tensor, context))

    def finish(self, tensor: Tensor, sums: NDArray[np.float64] | None, context: Context) -> None:
        """Move the weights of the whole layer."""
        assert tensor.layer is not None
        assert sums is not None
        average = float(tensor.layer[COEFFICIENT]) / self._seen(tensor)
        coefficient = max(self.coefficient(*map(_length, sums)), average)
        context.kernels.move(move, self._step(tensor, context, coefficient), tensor.arrays())

    def _seen(self, tensor: Tensor) -> float:
        """What the mean of the coefficients is still short of, since it began at 0."""
        return 1 - self.coeff_beta ** max(tensor.variance_steps, 1)

    def coefficient(self, w: float, u: float) -> float:
        """LAMB's trust ratio of one layer, from the norms of its weights and of its update."""
        return min(max(w / u, self.min_coeff), self.max_coeff) if w > 0 and u > 0 else 1.0

    def _exact_step(self, tensor: Tensor, decay: float, coefficient: float = 0.0) -> ExactStep:
        """Of the step number ``tensor.step``."""
        corrected = self.bias_correction
        values = {
            "first": 1 - self.beta1**tensor.step if corrected else 1.0,
            "root": np.sqrt(1 - self.beta2_of(tensor) ** tensor.variance_steps) if corrected else 1.0,
            "eps": self.eps,
            "inside": self.inside,
            "decay": decay,
            "step": self.lr * coefficient,
        }
        return scalars(ExactStep, **values)

    def _exact_coefficient(self, tensor: Tensor, context: Context, decay: float) -> float:
        (found,) = sums([Use(exact_lengths, self._exact_step(tensor, decay))], [tensor.arrays()], context)
        assert found is not None
        return self.coefficient(*map(_length, found))

    def exact_step(self, tensor: Tensor, grad: Array, context: Context) -> None:
        """LAMB (You et al. 2020, Algorithm 2)."""
        assert tensor.layer is not None
        tensor.step += 1
        tensor.variance_steps += 1
        _, p = self.exact(tensor)
        context.kernels.move(exact_moments, p._replace(l2=np.float32(0)), tensor.arrays(grad))
        coefficient = self._exact_coefficient(tensor, context, self.decay)
        average = float(tensor.layer[COEFFICIENT])
        tensor.layer[COEFFICIENT] = self.coeff_beta * average + (1 - self.coeff_beta) * coefficient
        context.kernels.move(exact_move, self._exact_step(tensor, self.decay, coefficient), tensor.arrays())


def _length(squares: float) -> float:
    """The root of a sum of squares, to 20 bits: machines whose sums round differently must still agree."""
    mantissa, exponent = np.frexp(np.sqrt(squares))
    return float(np.ldexp(np.round(mantissa * 2**20), exponent - 20))


OPTIONS = ("lr", "eps", "weight_decay", "bias_correction", "min_coeff", "max_coeff", "coeff_beta")
TORCH = Wraps(
    "horovod_onebit.torch.LAMB",
    LAMB,
    momentum="exp_avg",
    variance="exp_avg_sq",
    options={name: name for name in OPTIONS} | {"beta1": "betas.0", "beta2": "betas.1"},
)
KERAS = Wraps(
    "keras.optimizers.Lamb",
    LAMB,
    momentum="_momentums",
    variance="_velocities",
    options={"beta1": "beta_1", "beta2": "beta_2", "eps": "epsilon"},
    # Keras bounds the coefficients by nothing, and leaves weight decay out of them.
    fixed={"decoupled": True, "min_coeff": 0.0, "max_coeff": math.inf},
)

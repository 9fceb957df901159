"""1-bit LAMB (You et al. 2020; Li et al. 2021; Algorithm 2 of Tarasov and Ershov 2022).

LAMB is Adam whose update is scaled, layer by layer, to the length of the layer's weights:

    u = m / D + decay * w         c = clip(|w| / |u|, min_coeff, max_coeff),  1 if either is 0       w <- w - lr c u

and in warm-up the mean of the coefficients is kept: c_avg <- coeff_beta c_avg + (1 - coeff_beta) c (Algorithm 2,
line 6; its bias towards the initial 0 is corrected here).
Afterwards c is computed as in warm-up, from w and from the momentum, which is the same on all workers once it is
exchanged as in 1-bit Adam, but it is not below c_avg: elements that v does not know yet get a full step each time, and
must not slow the others down. (Algorithm 2, lines 17 to 21, has c_avg instead, times a factor that follows a second
moment which is still updated.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_onebit.kernels.reference import CHUNK, Array, Bytes, Spec, num_blocks
from horovod_onebit.rules import Context, Tensor
from horovod_onebit.rules.adam import Adam

COEFFICIENT = 0
"""Where ``Tensor.layer`` holds c_avg: it is all that is there."""


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

    def init(self, tensor: Tensor) -> None:
        tensor.layer = np.zeros(1, np.float32)

    def begin(self, tensor: Tensor, context: Context) -> None:
        assert tensor.layer is not None
        host = context.kernels.host
        if tensor.layer[COEFFICIENT] == 0:  # an exact part that keeps no mean: the coefficient of now
            assert tensor.variance is not None
            moments = host(tensor.momentum), host(tensor.variance)
            update = self._corrected(*moments, tensor.step, tensor.variance_steps)
            tensor.layer[COEFFICIENT] = self.coefficient(_norm(host(tensor.weight)), _norm(update)) * self._seen(tensor)

    def coding(self, tensor: Tensor, block_size: int, context: Context) -> tuple[Array | None, Array | None, Spec]:
        variance, _, spec = super().coding(tensor, block_size, context)
        spec = spec._replace(l2=0.0)  # the decay is in the update, if it is not outside
        return variance, None, spec if self.bias_correction else spec._replace(variance_correction=1.0)

    def apply(self, tensor: Tensor, scales: Array, bits: Bytes, block_size: int, context: Context) -> None:
        """Take over the momentum; the weights wait for ``finish``, which needs the whole layer."""
        _, _, spec = self.coding(tensor, block_size, context)
        moments, space = (tensor.momentum, tensor.variance), context.recipe.space == "update"
        context.kernels.apply(scales, bits, *moments, tensor.weight, spec, update_space=space, step_size=0.0)

    def _update(self, tensor: Tensor, context: Context) -> Spec:
        """What ``kernels.squares`` and ``move`` are told of the update: its correction, the decay inside of it."""
        _, _, spec = self.coding(tensor, 8, context)
        correction = 1 / (1 - self.beta1 ** (tensor.step + 1)) if self.bias_correction else 1.0
        return spec._replace(momentum_factor=correction, l2=0.0 if self.decoupled else self.weight_decay)

    def measure(self, tensor: Tensor, context: Context) -> None:
        """How long the weights and the update are."""
        sums = np.empty((num_blocks(tensor.weight.size, CHUNK), 2))
        tensor.sums = [sums]
        spec = self._update(tensor, context)
        context.kernels.squares(tensor.momentum, tensor.variance, tensor.weight, sums, spec)

    def finish(self, tensor: Tensor, context: Context) -> None:
        """Move the weights of the whole layer."""
        assert tensor.layer is not None
        weight, update = (_rounded(float(total)) for total in tensor.sums[0].sum(axis=0))
        average = float(tensor.layer[COEFFICIENT]) / self._seen(tensor)
        coefficient = max(self.coefficient(weight, update), average)
        context.kernels.move(
            tensor.momentum,
            tensor.variance,
            tensor.weight,
            self._update(tensor, context),
            step_size=self.lr * coefficient,
            decay=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
        )

    def _seen(self, tensor: Tensor) -> float:
        """What the mean of the coefficients is still short of, since it began at 0."""
        return 1 - self.coeff_beta ** max(tensor.variance_steps, 1)

    def _corrected(self, m: Array, v: Array, step: int, variance_steps: int) -> Array:
        f32 = np.float32
        first = 1 - self.beta1**step if self.bias_correction else 1.0
        second = 1 - self.beta2**variance_steps if self.bias_correction else 1.0
        return (m / f32(first)) / (np.sqrt(v) / f32(np.sqrt(second)) + f32(self.eps))

    def coefficient(self, w: float, u: float) -> float:
        """LAMB's trust ratio of one layer, from the norms of its weights and of its update."""
        return min(max(w / u, self.min_coeff), self.max_coeff) if w > 0 and u > 0 else 1.0

    def exact_step(self, tensor: Tensor, grad: Array) -> None:
        """LAMB (You et al. 2020, Algorithm 2)."""
        assert tensor.variance is not None
        assert tensor.layer is not None
        f32 = np.float32
        tensor.step += 1
        tensor.variance_steps += 1
        g = f32(self.grad_scale) * grad
        m, v = tensor.momentum, tensor.variance
        m += f32(1 - self.beta1) * (g - m)
        v *= f32(self.beta2)
        v += f32(1 - self.beta2) * g * g
        update = self._corrected(m, v, tensor.step, tensor.variance_steps)
        if self.decoupled:
            tensor.weight *= f32(1 - self.lr * self.weight_decay)
        else:
            update += f32(self.weight_decay) * tensor.weight
        coefficient = self.coefficient(_norm(tensor.weight), _norm(update))
        average = float(tensor.layer[COEFFICIENT])
        tensor.layer[COEFFICIENT] = self.coeff_beta * average + (1 - self.coeff_beta) * coefficient
        tensor.weight -= f32(self.lr * coefficient) * update


def _norm(x: Array) -> float:
    """The Euclidean norm, as ``_rounded`` has it."""
    return _rounded(float(np.square(x, dtype=np.float64).sum()))


def _rounded(squares: float) -> float:
    """The root of a sum of squares, to 20 bits: machines whose sums round differently must still agree."""
    mantissa, exponent = np.frexp(np.sqrt(squares))
    return float(np.ldexp(np.round(mantissa * 2**20), exponent - 20))

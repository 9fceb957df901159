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

import numpy as np

from horovod_onebit.checks import number
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels.reference import Array, Bytes, Spec
from horovod_onebit.rules import Context, Rule, Tensor


@dataclass(frozen=True)
class Adam(Rule):
    """Hyperparameters of one step; names and meanings are those of ``torch.optim.Adam`` and ``AdamW``.

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

    def __post_init__(self) -> None:
        for field, low, high in (("beta1", 0, 1), ("beta2", 0, 1), ("lr", 0, np.inf), ("eps", 0, np.inf)):
            if not low <= number(field, getattr(self, field)) < high:
                raise ConfigurationError(f"{field}={getattr(self, field)!r}: expected {low} <= {field} < {high}")

    def coding(self, tensor: Tensor, block_size: int, context: Context) -> tuple[Array | None, Array | None, Spec]:
        l2 = 0.0 if self.decoupled else self.weight_decay / self.grad_scale
        recipe = context.recipe
        spec = Spec(
            momentum_factor=self.beta1,
            grad_factor=(1 - self.beta1) * self.grad_scale,
            l2=l2,
            eps=self.eps,
            eps_inside_sqrt=recipe.eps_inside_sqrt,
            variance_correction=1 / (1 - self.beta2 ** max(tensor.variance_steps, 1)),
            clip=recipe.clip_for(context.workers),
            scale=recipe.scale,
            block_size=block_size,
        )
        variance = tensor.variance if recipe.space == "update" else None
        return variance, tensor.weight if l2 else None, spec

    def apply(self, tensor: Tensor, scales: Array, bits: Bytes, block_size: int, context: Context) -> None:
        _, _, spec = self.coding(tensor, block_size, context)
        context.kernels.apply(
            scales,
            bits,
            tensor.momentum,
            tensor.variance,
            tensor.weight,
            spec,
            update_space=context.recipe.space == "update",
            step_size=self.lr / (1 - self.beta1 ** (tensor.step + 1)),
            decay=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
        )

    def exact_step(self, tensor: Tensor, grad: Array) -> None:
        """Adam (Kingma and Ba 2015), or AdamW with ``decoupled`` decay."""
        assert tensor.variance is not None
        f32 = np.float32
        tensor.step += 1
        tensor.variance_steps += 1
        g = f32(self.grad_scale) * grad
        if self.decoupled:
            tensor.weight *= f32(1 - self.lr * self.weight_decay)
        elif self.weight_decay:
            g = g + f32(self.weight_decay) * tensor.weight
        m, v = tensor.momentum, tensor.variance
        m += f32(1 - self.beta1) * (g - m)
        v *= f32(self.beta2)
        v += f32(1 - self.beta2) * g * g
        d = np.sqrt(v) / f32(np.sqrt(1 - self.beta2**tensor.variance_steps)) + f32(self.eps)
        tensor.weight -= f32(self.lr / (1 - self.beta1**tensor.step)) * (m / d)

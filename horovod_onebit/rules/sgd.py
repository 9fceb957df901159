"""1-bit SGD with momentum and error feedback (Seide et al. 2014; Karimireddy et al. 2019, EF-signSGD).

On worker i:

    c_i   = momentum * m + (1 - dampening) * g_i + error_i
    C_i   = scale * sign(c_i);      error_i <- c_i - C_i
    m     <- sum_i C_i / n                                    the same on all workers
    w     <- w - lr * m,  or with Nesterov  w - lr * (g + momentum * m),  g = m - momentum * m_before

There is no preconditioner, so the recipe's space, clip and epsilon do not matter here; scales per block do, since
the magnitudes of gradients differ between layers. Weight decay is L2, into g_i, or decoupled, straight to w.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_onebit.checks import number
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels.reference import Array, Bytes, Spec
from horovod_onebit.rules import Context, Rule, Tensor


@dataclass(frozen=True)
class SGD(Rule):
    """Hyperparameters of one step; names and meanings are those of ``torch.optim.SGD``.

    ``decoupled`` takes weight decay out of the gradient, as Keras has it: ``w <- (1 - lr * weight_decay) * w - ...``.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    decoupled: bool = False
    grad_scale: float = 1.0
    name: str = "sgd"

    def __post_init__(self) -> None:
        for field in ("lr", "momentum"):
            if not 0 <= number(field, getattr(self, field)) < np.inf:
                raise ConfigurationError(f"{field}={getattr(self, field)!r}: expected 0 <= {field} < inf")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ConfigurationError("nesterov=True needs momentum > 0 and dampening = 0, as in torch.optim.SGD")

    def coding(self, tensor: Tensor, block_size: int, context: Context) -> tuple[Array | None, Array | None, Spec]:
        l2 = 0.0 if self.decoupled else self.weight_decay / self.grad_scale
        spec = Spec(
            momentum_factor=self.momentum,
            grad_factor=(1 - self.dampening) * self.grad_scale,
            l2=l2,
            eps=0.0,
            eps_inside_sqrt=False,
            variance_correction=1.0,
            clip=np.inf,
            scale=context.recipe.scale,
            block_size=block_size,
        )
        return None, tensor.weight if l2 else None, spec

    def apply(self, tensor: Tensor, scales: Array, bits: Bytes, block_size: int, context: Context) -> None:
        _, _, spec = self.coding(tensor, block_size, context)
        ahead = self.momentum if self.nesterov else 0.0
        context.kernels.apply(
            scales,
            bits,
            tensor.momentum,
            None,
            tensor.weight,
            spec,
            update_space=False,
            step_size=self.lr * (1 + ahead),
            look_back=self.lr * ahead,
            decay=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
        )

    def exact_step(self, tensor: Tensor, grad: Array) -> None:
        """SGD as ``torch.optim.SGD`` has it: the first step's momentum is the gradient itself."""
        f32 = np.float32
        tensor.step += 1
        g = f32(self.grad_scale) * grad
        if self.decoupled:
            tensor.weight *= f32(1 - self.lr * self.weight_decay)
        elif self.weight_decay:
            g = g + f32(self.weight_decay) * tensor.weight
        if self.momentum == 0:
            tensor.weight -= f32(self.lr) * g
            return
        damped = g if tensor.step == 1 else f32(1 - self.dampening) * g
        tensor.momentum *= f32(self.momentum)
        tensor.momentum += damped
        update = g + f32(self.momentum) * tensor.momentum if self.nesterov else tensor.momentum
        tensor.weight -= f32(self.lr) * update

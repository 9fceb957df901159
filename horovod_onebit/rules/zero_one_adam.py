"""0/1 Adam (Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam").

Algorithm 1 of that paper, with its lines; g_i is worker i's gradient, D = sqrt(v) + eps. Which step is of which kind
says ``schedule.ZeroOne``: T_v and T_u there.

    EXACT, k in T_v        v <- beta2 v + (1 - beta2) mean(g)^2, and Adam's step with mean(g)             lines 3, 10-13
    GRADIENT               g^ = 1bit(g), an exchange with error feedback; m <- beta1 m + (1 - beta1) g^;
                           w <- w - lr m / D
    LOCAL, after the freeze  m_i <- beta1 m_i + (1 - beta1) g_i;  w_i <- w_i - lr m_i / D                 lines 4-6
    SYNC, k in T_u         the same, and then with all that was moved since the last one, A_i = w_i - w:
                           A = 1bit(A_i);  w <- w + A;  m <- -A D / (sum of lr)                           lines 7-9

Ours differs in three points. In update space, what is compressed is g / D or A_i, clipped as in 1-bit Adam, where the
paper has g and A_i D. The weights at the last SYNC are kept, and not only the sum of moves, so that all workers come
back to the same bits. Decoupled weight decay goes straight to w: it is not part of A.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_onebit.kernels.reference import Array, Bytes, Spec, denominator
from horovod_onebit.rules import Context, Tensor
from horovod_onebit.rules.adam import Adam
from horovod_onebit.schedule import Kind

RATES, DECAY, COUNT = range(3)
"""What ``Tensor.layer`` holds since the last SYNC: sum of the step sizes, product of the decays, number of steps."""

f32 = np.float32


@dataclass(frozen=True)
class ZeroOneAdam(Adam):
    """Adam's hyperparameters, and the kind of this step. ``Tensor.fresh`` holds the weights at the last SYNC."""

    kind: Kind = Kind.GRADIENT
    name: str = "zero_one_adam"
    encodes_gradients: ClassVar[bool] = False

    def init(self, tensor: Tensor) -> None:
        tensor.layer = np.array([0, 1, 0], f32)
        tensor.fresh = np.zeros_like(tensor.weight)

    def coding(self, tensor: Tensor, block_size: int, context: Context) -> tuple[Array | None, Array | None, Spec]:
        variance, weight, spec = super().coding(tensor, block_size, context)
        if self.kind is Kind.SYNC:
            return variance, None, spec._replace(momentum_factor=0.0, grad_factor=1.0, l2=0.0, clip=np.inf)
        # Of one gradient 1 - beta1 goes into the momentum, so that its bound is that much wider.
        clip = spec.clip / (1 - self.beta1)
        return variance, weight, spec._replace(momentum_factor=0.0, grad_factor=self.grad_scale, clip=clip)

    def encode(
        self, tensor: Tensor, grad: Array, scales: Array, bits: Bytes, block_size: int, context: Context
    ) -> bool:
        if self.kind is not Kind.SYNC:
            return super().encode(tensor, grad, scales, bits, block_size, context)
        *moved, spec, decay = self._moved(tensor, block_size, context)
        return context.kernels.encode_moved(*moved, tensor.residual, scales, bits, spec, decay=decay)

    def restore(
        self, tensor: Tensor, grad: Array, scales: Array, bits: Bytes, block_size: int, context: Context
    ) -> None:
        if self.kind is not Kind.SYNC:
            super().restore(tensor, grad, scales, bits, block_size, context)
            return
        *moved, spec, decay = self._moved(tensor, block_size, context)
        context.kernels.restore_moved(*moved, tensor.residual, scales, bits, spec, decay=decay)

    def _moved(
        self, tensor: Tensor, block_size: int, context: Context
    ) -> tuple[Array, Array, Array | None, Spec, float]:
        """What is compressed at a SYNC: of the weights, from the weights of the last one, times D in momentum space."""
        assert tensor.fresh is not None
        assert tensor.layer is not None
        _, _, spec = self.coding(tensor, block_size, context)
        variance = tensor.variance if context.recipe.space == "momentum" else None
        return tensor.weight, tensor.fresh, variance, spec, float(tensor.layer[DECAY])

    def local_step(self, tensor: Tensor, grad: Array, context: Context) -> None:
        """A step of this worker alone."""
        assert tensor.fresh is not None
        assert tensor.layer is not None
        layer, kernels = tensor.layer, context.kernels
        if layer[COUNT] == 0:
            kernels.copy(tensor.weight, tensor.fresh)
            layer[:] = 0, 1, 0
        _, _, spec = Adam.coding(self, tensor, 8, context)
        rate, decay = self._rate(tensor), self._decay()
        kernels.local_step(
            grad, tensor.momentum, tensor.variance, tensor.weight, spec, step_size=float(rate), decay=decay
        )
        layer[RATES] += rate
        layer[DECAY] *= f32(decay)
        layer[COUNT] += 1

    def apply(self, tensor: Tensor, scales: Array, bits: Bytes, block_size: int, context: Context) -> None:
        _, _, spec = Adam.coding(self, tensor, block_size, context)
        moments = tensor.momentum, tensor.variance, tensor.weight
        update_space = context.recipe.space == "update"
        if self.kind is Kind.SYNC:
            assert tensor.layer is not None
            decay, rates = float(tensor.layer[DECAY]), float(tensor.layer[RATES])
            options = {"update_space": update_space, "decay": decay, "rates": rates}
            context.kernels.take_over(scales, bits, *moments, tensor.fresh, spec, **options)
            return
        spec = spec._replace(grad_factor=1 - self.beta1)  # the mean is of scaled gradients
        step_size = float(self._rate(tensor))
        context.kernels.apply_gradient(
            scales, bits, *moments, spec, update_space=update_space, step_size=step_size, decay=self._decay()
        )

    def pending(self, tensor: Tensor, context: Context) -> Array | None:
        if tensor.layer is None or tensor.fresh is None or tensor.layer[COUNT] == 0:
            return None
        host = context.kernels.host
        return np.asarray(host(tensor.weight) - tensor.layer[DECAY] * host(tensor.fresh))

    def settle(self, tensor: Tensor, mean: Array, context: Context) -> None:
        assert tensor.layer is not None
        host, write = context.kernels.host, context.kernels.write
        write(tensor.weight, tensor.layer[DECAY] * host(tensor.fresh) + mean)
        if tensor.layer[RATES] > 0:
            _, _, spec = Adam.coding(self, tensor, 8, context)
            write(tensor.momentum, mean * denominator(host(tensor.variance), spec) / -tensor.layer[RATES])
        tensor.layer[COUNT] = 0

    def finish(self, tensor: Tensor, context: Context) -> None:
        if self.kind is Kind.SYNC and tensor.layer is not None:
            tensor.layer[COUNT] = 0

    def _rate(self, tensor: Tensor) -> np.float32:
        return f32(self.lr / (1 - self.beta1 ** (tensor.step + 1)))

    def _decay(self) -> float:
        return 1 - self.lr * self.weight_decay if self.decoupled else 1.0


def of(rule: Adam, kind: Kind) -> ZeroOneAdam:
    """``rule`` as a step of 0/1 Adam."""
    values = {f.name: getattr(rule, f.name) for f in dataclasses.fields(Adam) if f.name != "name"}
    return ZeroOneAdam(**values, kind=kind)

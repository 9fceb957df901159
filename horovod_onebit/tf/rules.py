"""From a Keras optimizer to the core's rules and state, and what is refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from horovod_onebit.errors import UnsupportedError
from horovod_onebit.rules import Rule
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.sgd import SGD


class Adapter:
    """How one family of Keras optimizers keeps its state, and which rule takes its steps."""

    kind: Any

    def check(self, optimizer: Any) -> None:
        """Refuse what the rule cannot do."""

    def momentum(self, optimizer: Any, index: int) -> Any:
        """The Keras variable that holds the momentum of variable number ``index``, or None."""
        raise NotImplementedError

    def variance(self, optimizer: Any, index: int) -> Any:
        """The Keras variable that holds the second moment, or None."""
        return None

    def first_momentum(self, value: np.ndarray, learning_rate: float) -> np.ndarray:
        """The rule's momentum from what the exact steps left, when compression starts."""
        return value

    def rule(self, optimizer: Any, learning_rate: float, weight_decay: float, exact_steps: int, scale: float) -> Rule:
        """The rule with the hyperparameters of this step; ``scale`` multiplies the gradient."""
        raise NotImplementedError


class AdamAdapter(Adapter):
    """Adam and AdamW. Keras adds epsilon to the root of the *uncorrected* second moment: it is scaled to match."""

    kind = keras.optimizers.Adam

    def check(self, optimizer: Any) -> None:
        if optimizer.amsgrad:
            raise UnsupportedError(f"{type(optimizer).__name__}(amsgrad=True) has no 1-bit form: leave amsgrad out")

    def momentum(self, optimizer: Any, index: int) -> Any:
        return optimizer._momentums[index]

    def variance(self, optimizer: Any, index: int) -> Any:
        return optimizer._velocities[index]

    def rule(self, optimizer: Any, learning_rate: float, weight_decay: float, exact_steps: int, scale: float) -> Adam:
        correction = 1 / (1 - optimizer.beta_2 ** max(exact_steps, 1))
        return Adam(
            lr=learning_rate,
            beta1=optimizer.beta_1,
            beta2=optimizer.beta_2,
            eps=optimizer.epsilon * correction**0.5,
            weight_decay=weight_decay,
            decoupled=True,
            grad_scale=scale,
        )


class SGDAdapter(Adapter):
    """SGD. Keras keeps ``m = momentum * m - lr * g``; from the first compressed step on, the variable holds the
    rule's momentum instead, a mean gradient without learning rate or sign."""

    kind = keras.optimizers.SGD

    def momentum(self, optimizer: Any, index: int) -> Any:
        return optimizer.momentums[index] if optimizer.momentum else None

    def first_momentum(self, value: np.ndarray, learning_rate: float) -> np.ndarray:
        return value / np.float32(-learning_rate) if learning_rate else np.zeros_like(value)

    def rule(self, optimizer: Any, learning_rate: float, weight_decay: float, exact_steps: int, scale: float) -> SGD:
        return SGD(
            lr=learning_rate,
            momentum=float(optimizer.momentum),
            nesterov=bool(optimizer.nesterov and optimizer.momentum),
            weight_decay=weight_decay,
            decoupled=True,
            grad_scale=scale,
        )


ADAPTERS: tuple[type[Adapter], ...] = (AdamAdapter, SGDAdapter)


def adapter_for(kind: Any) -> Adapter:
    """The adapter of an optimizer class, or ``UnsupportedError`` that lists those that have one."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith("tf_keras") or "keras.optimizers.legacy" in name:
        raise UnsupportedError(f"{name} is a Keras 2 optimizer: use Keras 3's, e.g. keras.optimizers.AdamW")
    for adapter in ADAPTERS:
        if issubclass(kind, adapter.kind) and kind.update_step is adapter.kind.update_step:
            return adapter()
    raise UnsupportedError(
        f"{name} has no 1-bit form. Optimizers that have one: keras.optimizers.Adam, AdamW, SGD (a subclass must not "
        "override update_step)"
    )

"""From a Keras optimizer to the core's rules and state, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.kernels import reference
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Context, Rule, Tensor
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.lamb import COEFFICIENT, LAMB
from horovod_onebit.rules.sgd import SGD


class Adapter:
    """How one family of Keras optimizers keeps its state, and which rule takes its steps."""

    kind: Any

    def check(self, optimizer: Any) -> None:
        """Refuse what the rule cannot do."""

    def init(self, tensor: Tensor) -> None:
        """Give ``tensor`` what the rule keeps besides the moments."""

    def build(self, optimizer: Any) -> None:
        """Add the variables that the rule needs and the wrapped optimizer has not; called once it is built."""

    def keep(
        self, optimizer: Any, tensors: Sequence[Tensor], indices: Sequence[int], rules: Sequence[Rule], *, first: bool
    ) -> None:
        """Before a compressed step: bring what ``build`` added to ``tensors``, in the ``first`` one from them."""

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

    kind: Any = keras.optimizers.Adam

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


class LambAdapter(AdamAdapter):
    """Lamb. Keras bounds the coefficients by nothing, and leaves weight decay out of them."""

    kind: Any = keras.optimizers.Lamb

    def check(self, optimizer: Any) -> None:
        """It has no ``amsgrad``."""

    def init(self, tensor: Tensor) -> None:
        LAMB(lr=0.0).init(tensor)

    def build(self, optimizer: Any) -> None:
        shape = (len(optimizer._trainable_variables),)
        optimizer._coefficients = optimizer.add_variable(shape=shape, dtype="float32", name="onebit_coefficients")

    def keep(
        self, optimizer: Any, tensors: Sequence[Tensor], indices: Sequence[int], rules: Sequence[Rule], *, first: bool
    ) -> None:
        known = np.array(optimizer._coefficients.value.numpy())
        for i, tensor, rule in zip(indices, tensors, rules, strict=True):
            assert tensor.layer is not None
            tensor.layer[COEFFICIENT] = 0 if first else known[i]
            if first:
                rule.begin(tensor, ON_HOST)
                known[i] = tensor.layer[COEFFICIENT]
        if first:
            optimizer._coefficients.assign(known)

    def rule(self, optimizer: Any, learning_rate: float, weight_decay: float, exact_steps: int, scale: float) -> LAMB:
        return LAMB(
            lr=learning_rate,
            beta1=optimizer.beta_1,
            beta2=optimizer.beta_2,
            eps=optimizer.epsilon,
            weight_decay=weight_decay,
            decoupled=True,
            grad_scale=scale,
            min_coeff=0.0,
            max_coeff=math.inf,
        )


ON_HOST = Context(reference, Recipe(), 1)
"""For ``Rule.begin``, which looks at nothing but where the arrays are."""

ADAPTERS: tuple[type[Adapter], ...] = (AdamAdapter, SGDAdapter, LambAdapter)


def adapter_for(optimizer: Any) -> Adapter:
    """The adapter of an optimizer, or ``UnsupportedError`` that lists those that have one."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith("tf_keras") or "keras.optimizers.legacy" in name:
        raise UnsupportedError(f"{name} is a Keras 2 optimizer: use Keras 3's, e.g. keras.optimizers.AdamW")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"optimizer={optimizer!r}: expected an optimizer itself, such as keras.optimizers.Adam(1e-3); not its "
            "name, its class or its configuration"
        )
    for adapter in ADAPTERS:
        if isinstance(optimizer, adapter.kind) and kind.update_step is adapter.kind.update_step:
            return adapter()
    raise UnsupportedError(
        f"{name} has no 1-bit form. Optimizers that have one: keras.optimizers.Adam, AdamW, SGD, Lamb (a subclass "
        "must not override update_step)"
    )

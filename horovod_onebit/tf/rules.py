"""From a Keras optimizer to the core's rules and state, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

import keras
import numpy as np

from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.rules import Rule, Tensor, Wraps, listed, wrapped
from horovod_onebit.rules.lamb import COEFFICIENT
from horovod_onebit.rules.local import Delta
from horovod_onebit.schedule import Stepwise


class Options:
    """The hyperparameters ``names`` of ``optimizer`` as they are now. A graph has those that it was traced with, as
    Keras's own steps in it have. All other attributes are the optimizer's."""

    def __init__(self, optimizer: Any, names: Iterable[str]) -> None:
        self._optimizer = optimizer
        self.known = {name: getattr(optimizer, name, None) for name in names}

    def replaced(self, **values: Any) -> Options:
        """The same with other ``values``."""
        other = Options(self._optimizer, ())
        other.known = self.known | values
        return other

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__.get("known", {})
        return known[name] if name in known else getattr(self._optimizer, name)


class Adapter:
    """How one family of Keras optimizers keeps its state, and which rule takes its steps."""

    def __init__(self, wraps: Wraps) -> None:
        self.wraps = wraps

    def check(self, optimizer: Any) -> None:
        """Refuse what the rule cannot do."""
        self.wraps.check(type(optimizer).__name__, lambda name, default: getattr(optimizer, name, default))

    def init(self, tensor: Tensor) -> None:
        """Give ``tensor`` what the rule keeps besides the moments."""
        self.wraps.rule(lr=0.0).init(tensor)  # type: ignore[call-arg]

    def build(self, optimizer: Any) -> None:
        """Add the variables that the rule needs and the wrapped optimizer has not; called once it is built."""

    def keep(
        self,
        optimizer: Any,
        tensors: Sequence[Tensor],
        indices: Sequence[int],
        rules: Sequence[Rule],
        first: Sequence[bool],
    ) -> None:
        """Before a compressed step: bring what ``build`` added to ``tensors``; from those whose ``first`` it is."""

    def momentum(self, optimizer: Any, index: int) -> Any:
        """The Keras variable that holds the momentum of variable number ``index``, or None."""
        return getattr(optimizer, self.wraps.momentum)[index]

    def variance(self, optimizer: Any, index: int) -> Any:
        """The Keras variable that holds the second moment, or None."""
        return None if self.wraps.variance is None else getattr(optimizer, self.wraps.variance)[index]

    @property
    def divides(self) -> bool:
        """Whether the optimizer divides by a second moment of each element."""
        return self.wraps.rule.has_variance

    @property
    def moments(self) -> Adapter | None:
        """What knows where the second moments are; None if there are none."""
        return self if self.divides else None

    @property
    def velocities(self) -> bool:
        """Whether momenta, and residuals, have the learning rates of their steps."""
        return bool(self.wraps.fixed.get("velocity", False))

    def options(self, optimizer: Any, seen: int) -> dict[str, Any]:
        """The rule's fields, besides those that differ between steps and variables. ``optimizer``: or its
        ``Options``."""
        return {name: getattr(optimizer, option) for name, option in self.wraps.options.items()}

    def rule(self, optimizer: Any, learning_rate: float, weight_decay: float, seen: int, scale: float) -> Rule:
        """The rule with the hyperparameters of this step. ``seen``: how many steps the second moment has seen;
        ``scale`` multiplies the gradient."""
        values = self.options(optimizer, seen) | dict(self.wraps.fixed)
        return self.wraps.rule(  # type: ignore[call-arg]
            lr=learning_rate, weight_decay=weight_decay, grad_scale=scale, **values
        )


class AdamAdapter(Adapter):
    """Adam and AdamW. Keras adds epsilon to the root of the *uncorrected* second moment: it is scaled to match."""

    def options(self, optimizer: Any, seen: int) -> dict[str, Any]:
        values = super().options(optimizer, seen)
        correction = 1 / (1 - optimizer.beta_2 ** max(seen, 1))
        return values | {"eps": values["eps"] * correction**0.5}


class SGDAdapter(Adapter):
    """SGD, whose momentum is ``momentum * m - lr * g``."""

    def momentum(self, optimizer: Any, index: int) -> Any:
        return super().momentum(optimizer, index) if optimizer.momentum else None

    def options(self, optimizer: Any, seen: int) -> dict[str, Any]:
        momentum = float(optimizer.momentum)
        return {"momentum": momentum, "nesterov": bool(optimizer.nesterov and momentum)}


class LambAdapter(Adapter):
    """Lamb; the mean of its coefficients becomes a variable."""

    def build(self, optimizer: Any) -> None:
        shape = (len(optimizer._trainable_variables),)
        optimizer._coefficients = optimizer.add_variable(shape=shape, dtype="float32", name="onebit_coefficients")

    def keep(
        self,
        optimizer: Any,
        tensors: Sequence[Tensor],
        indices: Sequence[int],
        rules: Sequence[Rule],
        first: Sequence[bool],
    ) -> None:
        known = np.array(optimizer._coefficients.value.numpy())
        for i, tensor, rule, begins in zip(indices, tensors, rules, first, strict=True):
            assert tensor.layer is not None
            tensor.layer[COEFFICIENT] = 0 if begins else known[i]
            if begins:
                rule.begin(tensor, optimizer._compressor.engine.context)
                known[i] = tensor.layer[COEFFICIENT]
        if any(first):
            optimizer._coefficients.assign(known)


class AnyAdapter(Adapter):
    """Any optimizer, which takes its own steps. One that has a 1-bit form has the same variables as with that, and
    takes over what compressed steps left."""

    def __init__(self, optimizer: Any, wraps: Wraps | None = None) -> None:
        check_kind(optimizer)
        self._known: Adapter | None = None
        with suppress(UnsupportedError):
            self._known = adapter_for(optimizer, own=("update_step",)) if wraps is None else None
        super().__init__(wraps or (Wraps("any", Delta, momentum="") if self._known is None else self._known.wraps))

    def check(self, optimizer: Any) -> None:
        """Its own step can do whatever it does."""

    def build(self, optimizer: Any) -> None:
        if self._known is not None:
            self._known.build(optimizer)

    def momentum(self, optimizer: Any, index: int) -> Any:
        return None if self._known is None else self._known.momentum(optimizer, index)

    def rule(self, optimizer: Any, learning_rate: float, weight_decay: float, seen: int, scale: float) -> Rule:
        return Delta(lr=learning_rate)  # for the agreement


class ZeroOneAdapter(AdamAdapter):
    """Adam as 0/1 Adam. What that keeps besides becomes variables: the compressed variables' weights at the last
    exchange, what was counted since (see ``rules.zero_one_adam``), and the number of compressed steps tried, by which
    the schedule goes."""

    def build(self, optimizer: Any) -> None:
        variables, compressed = optimizer._trainable_variables, optimizer._compressor.is_compressed
        optimizer._anchors = [
            optimizer.add_variable_from_reference(v, name="onebit_anchor") if compressed(v) else None for v in variables
        ]
        optimizer._counted = optimizer.add_variable((len(variables), 3), dtype="float32", name="onebit_counted")
        optimizer._tried = optimizer.add_variable((), dtype="int64", name="onebit_tried")


ADAPTERS = {
    "keras.optimizers.Adam": AdamAdapter,
    "keras.optimizers.SGD": SGDAdapter,
    "keras.optimizers.Lamb": LambAdapter,
}
"""For those whose state or options are not just what the rule has."""


OWN = ("update_step", "apply", "_backend_update_step", "_clip_gradients", "_apply_weight_decay")
"""What a subclass must not override, as compressed steps do not call it."""


def kinds() -> list[Any]:
    """All classes of Keras that have a rule, subclasses included."""
    return [resolve_name(f"{wraps.module}.{name}") for wraps in wrapped("keras") for name in wraps.names]


def adapter_for(optimizer: Any, schedule: Stepwise | None = None, own: Sequence[str] = OWN) -> Adapter:
    """The adapter of an optimizer, or ``UnsupportedError`` that lists those that have one. ``own``: the methods that a
    subclass must not override."""
    name, kind = check_kind(optimizer), type(optimizer)
    for wraps in wrapped("keras"):
        wrapped_kind = resolve_name(wraps.optimizer)
        if isinstance(optimizer, wrapped_kind) and all(getattr(kind, m) is getattr(wrapped_kind, m) for m in own):
            adapter = ADAPTERS.get(wraps.optimizer, Adapter)(wraps)
            if schedule is None:
                return adapter
            if type(adapter) is AdamAdapter:
                return ZeroOneAdapter(wraps)
            raise UnsupportedError(f"schedule={schedule!r} is for Adam and AdamW, and the optimizer is {kind.__name__}")
    raise UnsupportedError(
        f"{name} has no 1-bit form. Optimizers that have one: {listed('keras')} (a subclass must not override "
        f"{', '.join(OWN)}). With recipe='exact', schedule=horovod_onebit.tf.Gradients() or "
        "schedule=horovod_onebit.tf.Local(...), any optimizer works"
    )


def check_kind(optimizer: Any) -> str:
    """The name of the class of ``optimizer``, if it is one of Keras 3."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith("tf_keras") or "keras.optimizers.legacy" in name:
        raise UnsupportedError(f"{name} is a Keras 2 optimizer: use Keras 3's, e.g. keras.optimizers.AdamW")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"optimizer={optimizer!r}: expected an optimizer itself, such as keras.optimizers.Adam(1e-3); not its "
            "name, its class or its configuration"
        )
    return name

"""``schedule=Local(...)`` for Keras 3: any optimizer takes its own steps, and what rounds of them move is exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_onebit.errors import ConfigurationError, NonFiniteError
from horovod_onebit.rounds import Rounds
from horovod_onebit.rules import Rule, Tensor, Wraps
from horovod_onebit.rules.local import Delta
from horovod_onebit.tf.collectives import view
from horovod_onebit.tf.compressor import Compressor
from horovod_onebit.tf.graph import adopt, cond, host_call, host_value, host_values, in_order, in_rounds
from horovod_onebit.tf.rules import Adapter
from horovod_onebit.tf.wrapping import Wrapping


class LocalAdapter(Adapter):
    """Any optimizer: of its state, nothing is touched. The momentum of rounds becomes variables beside it."""

    def __init__(self) -> None:
        super().__init__(Wraps("Local", Delta, momentum=""))

    def build(self, optimizer: Any) -> None:
        if not optimizer._wrapping.local.momentum:
            return
        optimizer._round_momenta = [
            optimizer.add_variable(v.shape, dtype="float32", name=f"{_path(v)}_onebit_momentum")
            for v in optimizer._trainable_variables
        ]

    def momentum(self, optimizer: Any, index: int) -> Any:
        return optimizer._round_momenta[index] if optimizer._wrapping.local.momentum else None

    def rule(self, optimizer: Any, learning_rate: float, weight_decay: float, exact_steps: int, scale: float) -> Rule:
        return Delta(lr=learning_rate)  # for the agreement


class LocalSteps(Compressor):
    """The rounds of one Keras ``DistributedOptimizer``. The weights at the beginning of a round are kept here, in the
    host's memory; at the first step, and after a checkpoint was loaded, they are taken again."""

    def __init__(self, optimizer: Any, adapter: Adapter, wrapping: Wrapping, name: str) -> None:
        super().__init__(optimizer, adapter, wrapping, name)
        assert wrapping.local is not None
        self.rounds = Rounds(self.engine, wrapping.local)
        self.lost = False  # the last round
        self._error: NonFiniteError | None = None  # to be raised when the weights are back

    @property
    def together(self) -> bool:
        return not self.rounds.under_way or self.engine.layout is None

    def begun(self, indices: tuple[int, ...]) -> bool:
        """Whether the variables ``indices`` are in a round, and nobody has set them since the last exchange."""
        if indices != self.indices or self.engine.layout is None:
            return False
        if self.rounds.under_way:
            return True
        both = zip(self.bound(), self.tensors, strict=True)
        return all(np.array_equal(_host(v), _rounded(t.anchor, v)) for v, t in both)

    def begin(self, indices: tuple[int, ...], values: Sequence[Any]) -> None:
        """Begin a round with the ``values`` of the variables ``indices``. Runs in ``coroutine``; collective."""
        if indices != self.indices and self.rounds.under_way:
            raise ConfigurationError(
                "what is trained has changed in the middle of a round of local steps: call optimizer.flush() before "
                "the change, on all workers"
            )
        variables = [self.optimizer._trainable_variables[i] for i in indices]
        self.indices, self.tensors = (), []
        for i, variable, value in zip(indices, variables, values, strict=True):
            name = self.name_of(i, variable)
            residual = self.engine.feedback.residual(name, math.prod(variable.shape))
            weight = self._memory.copy(view(value))
            tensor = Tensor(name, weight, np.zeros_like(weight), None, residual)
            self.rounds.rule.init(tensor)
            self.tensors.append(tensor)
        both = list(zip(variables, self.tensors, strict=True))
        large = [tensor for variable, tensor in both if self.is_compressed(variable)]
        self.rounds.begin(large, [tensor for variable, tensor in both if not self.is_compressed(variable)])
        self.indices = indices

    def stepped(self, steps: Any) -> bool:
        """A step was taken or skipped, by this worker alone; whether the round ends."""
        ends = self.rounds.stepped(int(steps))
        if not ends:
            self.engine.end_step()
        return ends

    def _pull(self, values: Sequence[Any]) -> None:
        for i, tensor, value in zip(self.indices, self.tensors, values, strict=True):
            tensor.weight = self._memory.copy(view(value))
            if (momentum := self.adapter.momentum(self.optimizer, i)) is not None:
                tensor.momentum[:] = _host(momentum)  # where the rounds look

    def _push_momenta(self) -> None:
        for i, tensor in zip(self.indices, self.tensors, strict=True):
            if (momentum := self.adapter.momentum(self.optimizer, i)) is not None:
                momentum.assign(tf.reshape(adopt(self._memory.copy(tensor.momentum)), momentum.shape))

    def exchange(self, *values: Any) -> None:
        """End the round, in which the variables got these ``values``. Runs in ``coroutine``; collective."""
        self._pull(values)
        self.lost = True
        try:
            self.lost = not self.rounds.exchange()
            self._push_momenta()
        except NonFiniteError as error:
            self._error = error
        except BaseException:
            self.engine.restore_all()
            raise
        finally:
            self.engine.end_step()

    def say(self) -> None:
        """Raise what ``exchange`` has found, now that all weights are alike."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def bound(self) -> list[Any]:
        """The variables that are in the round."""
        return [self.optimizer._trainable_variables[i] for i in self.indices]

    def flush(self) -> None:
        """End the round now: all workers have the same weights then. Collective; eager."""
        self.settle()
        if self.rounds.under_way and self.engine.layout is not None:
            _exchange(self.optimizer, self.indices, self.bound())

    def fold(self) -> None:
        """Before the workers change: go back to the round's beginning; residuals are what was moved since. Local."""
        if self.rounds.under_way and self.engine.layout is not None:
            self._pull(_flat(self.bound()))
            self.rounds.fold()
            _put(self.bound(), [tf.constant(tensor.weight) for tensor in self.tensors])


def take_step(optimizer: Any, pairs: Sequence[tuple[Any, Any]], own_step: Callable[[], None]) -> None:
    """One step of this worker alone, ``own_step``, unless gradients are not finite; then, if the round ends, the
    exchange. In a graph, or eagerly."""
    steps: LocalSteps = optimizer._compressor
    variables = [v for _, v in pairs]
    indices = tuple(optimizer._get_variable_index(v) for v in variables)

    def begin() -> None:
        def work(*values: Any) -> None:
            steps.begin(indices, values)

        cond(_agreed(optimizer, indices), lambda: _run(steps, work, variables))

    def skip() -> None:
        host_call(steps.rounds.skip)
        optimizer._iterations.assign_add(1)  # or learning rates that follow it would part

    with in_order():
        cond(host_value(lambda: steps.begun(indices), [], tf.bool), lambda: None, begin)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g, _ in pairs])
        cond(finite, own_step, skip)
        optimizer._compressed_steps.assign_add(1)
        count = tf.convert_to_tensor(optimizer._compressed_steps.value)
        ends = host_value(steps.stepped, [count], tf.bool)
        cond(ends, lambda: _exchange(optimizer, indices, variables))


def _agreed(optimizer: Any, indices: tuple[int, ...]) -> Any:
    count = tf.convert_to_tensor(optimizer._compressed_steps.value)
    return optimizer._agreement.reach(indices, [tf.convert_to_tensor(optimizer.learning_rate), *[count] * 3])


def _run(steps: LocalSteps, work: Callable[..., Any], variables: Sequence[Any]) -> Any:
    """``work`` with the flat values of ``variables``; a tensor that is there when it is done."""
    return in_rounds(steps.coroutine, steps.collectives, work, _flat(variables))


def _flat(variables: Sequence[Any]) -> list[Any]:
    return [tf.reshape(tf.cast(tf.convert_to_tensor(v), tf.float32), [-1]) for v in variables]


def _exchange(optimizer: Any, indices: tuple[int, ...], variables: Sequence[Any]) -> None:
    steps: LocalSteps = optimizer._compressor

    def exchange() -> None:
        done = _run(steps, steps.exchange, variables)
        new = host_values(lambda _: [adopt(t.weight) for t in steps.tensors], [done], [tf.float32] * len(variables))
        _put(variables, new)
        lost = host_value(lambda: steps.lost, [], tf.bool)
        cond(lost, lambda: _heal(optimizer), optimizer._average_weights)
        if optimizer.recipe.on_nonfinite == "raise":
            host_call(steps.say)

    cond(_agreed(optimizer, indices), exchange)


def _heal(optimizer: Any) -> None:
    """After a lost round: what the wrapped optimizer keeps must not carry NaN into the next one."""
    for variable in optimizer.variables:
        if keras.backend.is_float_dtype(variable.dtype):
            value = tf.convert_to_tensor(variable.value)
            variable.assign(tf.where(tf.math.is_finite(value), value, tf.zeros_like(value)))


def _host(variable: Any) -> np.ndarray:
    return np.asarray(variable).reshape(-1)


def _rounded(array: Any, variable: Any) -> np.ndarray:
    """``array`` as ``variable`` keeps it."""
    return np.asarray(tf.cast(array, variable.dtype))


def _path(variable: Any) -> str:
    """What Keras begins the names of an optimizer's variables with."""
    return str(getattr(variable, "path", variable.name)).replace("/", "_").replace(":", "_")


def _put(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(tf.reshape(value, variable.shape), variable.dtype))

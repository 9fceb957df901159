"""``schedule=Local(...)`` for Keras 3: any optimizer takes its own steps, and what rounds of them move is exchanged.

Adam's second moment is frozen after some steps (``rules.frozen``). The wrapped optimizer then takes its steps with
``update`` in place of its own formula, in the graph, where its variables are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_onebit.driver import Defaults, Driver, Frozen, Moment
from horovod_onebit.errors import ConfigurationError, DesyncError, NonFiniteError, UnsupportedError
from horovod_onebit.formulas import bound
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rounds import Rounds
from horovod_onebit.rules import Tensor, Wraps
from horovod_onebit.rules.adam import Scalars
from horovod_onebit.rules.frozen import FrozenAdam, clip_of
from horovod_onebit.rules.local import Delta
from horovod_onebit.rules.zero_one_adam import local
from horovod_onebit.schedule import Local
from horovod_onebit.tasks import Task
from horovod_onebit.tf.collectives import view
from horovod_onebit.tf.compressor import Compressor
from horovod_onebit.tf.graph import (
    adopt,
    cond,
    flat_view,
    host_call,
    host_value,
    host_values,
    in_order,
    in_rounds,
    path_of,
)
from horovod_onebit.tf.meeting import announce
from horovod_onebit.tf.rules import AdamAdapter, Adapter, AnyAdapter, adapter_for
from horovod_onebit.tf.wrapping import Wrapping
from horovod_onebit.warmup import NEVER, AfterRise

STEP = bound(
    local,
    {
        "maximum": tf.maximum,
        "minimum": tf.minimum,
        "sqrt": tf.sqrt,
        "where": tf.where,
        "absolute": tf.abs,
        "sign": tf.sign,
    },
    lambda formula: formula,
)
"""A local step of 0/1 Adam as operations of a graph."""


class LocalAdapter(AnyAdapter):
    """Of the optimizer's state, nothing is touched. The momentum of rounds becomes variables beside it.

    Attributes:
        adam: how ``optimizer`` keeps its moments, if it is Adam or AdamW and the ``schedule`` freezes its second ones.
            A variable then says by how many steps their bias is corrected; 0 if they are not frozen yet.
    """

    def __init__(self, schedule: Local, optimizer: Any) -> None:
        super().__init__(optimizer, Wraps("Local", Delta, momentum=""))
        self.adam = _adam(optimizer) if schedule.shares_moments else None

    def frozen(self, optimizer: Any) -> int:
        """By how many steps the bias of the second moments is corrected, if they are frozen; else 0. Eager."""
        return 0 if self.adam is None else int(optimizer._frozen.value)

    def build(self, optimizer: Any) -> None:
        if self.adam is not None:
            optimizer._frozen = optimizer.add_variable((), dtype="int64", name="onebit_frozen")
        if not optimizer._wrapping.local.momentum:
            return
        optimizer._round_momenta = [
            optimizer.add_variable(v.shape, dtype="float32", name=f"{_path(v)}_onebit_momentum")
            for v in optimizer._trainable_variables
        ]

    @property
    def moments(self) -> Adapter | None:
        return self.adam


def _adam(optimizer: Any) -> AdamAdapter | None:
    try:
        adapter = adapter_for(optimizer, own=("update_step",))
        adapter.check(optimizer)
    except UnsupportedError:
        return None
    return adapter if type(adapter) is AdamAdapter else None


class LocalSteps(Defaults, Compressor):
    """The rounds of one Keras ``DistributedOptimizer``. The weights at the beginning of a round are kept here, in the
    host's memory; at the first step, and after a checkpoint was loaded, they are taken again."""

    adapter: LocalAdapter
    in_host_memory = True

    def __init__(self, optimizer: Any, adapter: Adapter, wrapping: Wrapping, name: str) -> None:
        super().__init__(optimizer, adapter, wrapping, name)
        self.rounds: Rounds = self.driver.rounds
        self.second: tuple[int, list[Any]] = 0, []  # see ``freeze``
        self.edits: list[int] = []  # variables whose frozen moments somebody has set
        self.lost = False  # the last round
        self.learning_rate = 0.0  # of the last step
        self._values: Sequence[Any] = ()  # of the variables, in what the graph has called
        self._members: tuple[int, ...] = ()  # those of the round that begins
        self._gradients: Sequence[Any] = ()  # the last ones, and the second moments, when these are frozen
        self._variances: Sequence[Any] = ()
        self._number = 0  # of the step after which they are
        self._error: NonFiniteError | None = None  # to be raised when the weights are back

    def _make_driver(self, wrapping: Wrapping) -> Driver:
        warmup = wrapping.warmup if self.adapter.adam is not None else AfterRise(NEVER)
        return Driver(self.engine, self, warmup, wrapping.after_warmup)

    @property
    def pending(self) -> bool:
        return self.rounds.under_way and self.engine.layout is not None

    def begun(self, indices: tuple[int, ...]) -> bool:
        """Whether the variables ``indices`` are in a round, and nobody has set them since the last exchange."""
        if indices != self.indices or self.engine.layout is None:
            return False
        if self.rounds.under_way:
            return True
        both = zip(self.bound(), self.tensors, strict=True)
        return all(np.array_equal(_host(v), _rounded(t.anchor, v)) for v, t in both)

    def begin(self, indices: tuple[int, ...], values: Sequence[Any]) -> Task[None]:
        """Begin a round with the ``values`` of the variables ``indices``. Collective."""
        if indices != self.indices and self.rounds.under_way:
            raise ConfigurationError(
                "what is trained has changed in the middle of a round of local steps: call optimizer.flush() before "
                "the change, on all workers"
            )
        if self.edits:
            self.begin_again(self.edits)
        if self.adapter.frozen(self.optimizer):
            self.rounds.freezing.resume(self.steps)
        self._members, self._values = indices, values
        try:
            yield from self.driver.begin_round()
        except DesyncError as error:
            raise DesyncError(
                f"{error}. To begin with those of worker 0: callbacks.BroadcastGlobalVariablesCallback(0) in fit, "
                "broadcast_variables(model.variables) in a loop of your own, before the first step"
            ) from None
        finally:
            self._values = ()

    def stepped(self, steps: Any, learning_rate: Any, number: Any) -> bool:
        """A step was taken or skipped, by this worker alone, at ``learning_rate`` and number ``number`` of the
        optimizer; whether the round ends."""
        self.moments.count(int(number), int(steps), warm=not self.adapter.frozen(self.optimizer))
        self.learning_rate = float(learning_rate)
        for tensor in self.tensors:
            tensor.step = int(number) - 1
        ends = self.driver.stepped(self.frozen_rules())
        if not ends:
            self.engine.end_step()
        return ends

    # -- what the driver asks of a face: see ``driver.Alone``; the graph has asked whether the workers agree ----------

    def waits(self) -> bool:
        """See ``driver.Alone``: some variable is trained since shortly before."""
        seen = np.array(self.optimizer._seen.value).tolist()
        return any(self.rounds.schedule.is_young(seen[i]) for i in self.indices)

    @property
    def steps(self) -> int:
        return int(self.optimizer._compressed_steps.value)

    @property
    def own(self) -> int:
        """How many of the last gradients that second moments have seen were this worker's own. Eager."""
        if self.adapter.adam is None or self.adapter.frozen(self.optimizer):
            return 0
        return self.steps - self.rounds.freezing.since

    def inherit(self, last: Compressor) -> None:
        """The plain optimizer was wrapped before, with ``last``, whose state it has. Local."""
        if isinstance(last, LocalSteps):
            self.rounds.freezing.since = self.steps - last.own

    def follow(self) -> Task[bool]:
        yield from ()
        return False

    def agree(self, call: str, what: Mapping[str, object]) -> Task[None]:
        yield from ()

    def bind(self) -> tuple[list[Tensor], list[Tensor]]:
        variables = [self.optimizer._trainable_variables[i] for i in self._members]
        self.indices, self.tensors = (), []
        frozen, adam = self.adapter.frozen(self.optimizer), self.adapter.adam
        for i, variable, value in zip(self._members, variables, self._values, strict=True):
            name = self.name_of(i, variable)
            residual = self.engine.feedback.residual(name, math.prod(variable.shape))
            weight = self._memory.copy(view(value))
            tensor = Tensor(name, weight, np.zeros_like(weight), None, residual)
            if frozen and adam is not None:
                moments = adam.momentum(self.optimizer, i), adam.variance(self.optimizer, i)
                tensor.momentum, tensor.variance = (self._memory.copy(_host(one)) for one in moments)
                tensor.variance_steps = frozen
                FrozenAdam().init(tensor)
            else:
                self.rounds.rule.init(tensor)
            self.tensors.append(tensor)
        both = list(zip(variables, self.tensors, strict=True))
        large = [tensor for variable, tensor in both if self.is_compressed(variable)]
        return large, [tensor for variable, tensor in both if not self.is_compressed(variable)]

    def began(self) -> Task[None]:
        self.indices = self._members
        yield from ()

    def unbind(self) -> None:
        self.indices = ()

    def learning_rates(self) -> Mapping[str, float]:
        return dict.fromkeys([t.name for t in self.tensors], self.learning_rate)

    def frozen_rules(self) -> Frozen:
        frozen, adam = self.adapter.frozen(self.optimizer), self.adapter.adam
        if not frozen or adam is None:
            return {}
        options = self.moments.overrule(self.options)
        decays = (0.0, options.weight_decay or 0.0)
        plain: list[Any] = [adam.rule(options, self.learning_rate, decay, frozen, 1.0) for decay in decays]
        rules = [FrozenAdam(adam=one) for one in plain]
        variables = [self.optimizer._trainable_variables[i] for i in self._members]
        both = zip(variables, self.tensors, strict=True)
        return {tensor.name: rules[self.decays(variable)] for variable, tensor in both}

    def pull(self) -> Task[None]:
        self._pull(self._values)
        yield from ()

    def push(self, *, together: bool, usable: bool) -> None:
        self.lost = not usable
        if self.lost:
            self._restore_frozen()
        self._push_momenta()

    def second_moments(self) -> list[Moment]:
        own = self.own
        beta2, seen, found = self.options.beta_2, np.array(self.optimizer._seen.value), list[Moment]()
        for i, variance, gradient in zip(self.indices, self._variances, self._gradients, strict=True):
            of = len(found), view(variance), view(gradient)
            found.append(Moment(*of, beta2, seen=int(seen[i]), own=own, count=self._number))
        return found

    def freeze(self, of: int, second: Array) -> None:
        _, values = self.second
        values[of] = self._memory.copy(second)
        self.second = self._number, values

    # -- what the graph calls -------------------------------------------------------------------------------------

    def _pull(self, values: Sequence[Any]) -> None:
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.weight = self._memory.copy(view(value))
        for tensor, momentum in self._momenta():
            tensor.momentum[:] = _host(momentum)  # where the rounds look

    def _push_momenta(self) -> None:
        for tensor, momentum in self._momenta():
            momentum.assign(tf.reshape(adopt(self._memory.copy(tensor.momentum)), momentum.shape))

    def _momenta(self) -> list[tuple[Tensor, Any]]:
        """Each tensor, and the variable that holds its momentum; none if rounds look at no momenta."""
        optimizer, adam = self.optimizer, self.adapter.adam
        both = zip(self.indices, self.tensors, strict=True)
        if adam is not None and self.adapter.frozen(optimizer):
            return [(tensor, adam.momentum(optimizer, i)) for i, tensor in both]
        return [(tensor, optimizer._round_momenta[i]) for i, tensor in both] if self.rounds.schedule.momentum else []

    def move_anchors(self, values: Mapping[int, Any]) -> None:
        """By number of the tensor, what all workers have in common now is these ``values``. Local."""
        write = self.engine.context.kernels.write
        for i, value in values.items():
            for array in (self.tensors[i].anchor, self.tensors[i].weight):
                write(array, flat_view(value))

    def exchange(self, *values: Any) -> Task[None]:
        """End the round, in which the variables got these ``values``. Collective."""
        self.lost = True
        if self.edits:  # the steps since were taken with other moments than those that all have in common
            self._give_up()
            return
        self._values = values
        try:
            yield from self.driver.end_round("step")
        except NonFiniteError as error:
            self._error = error
        finally:
            self._values = ()
            if not self.rounds.freezes:
                self.engine.end_step()

    def about_to(self, *, begins: bool) -> dict[str, object]:
        """Look for edits, and say what workers must have alike where a round begins, or ends. Eager."""
        self.edits = self._find_edits()
        return self.driver.round_facts(begins=begins) | {
            "whether somebody has set frozen second moments": bool(self.edits),
            "the step at which second moments were frozen": self.adapter.frozen(self.optimizer) or "none yet",
        }

    def _find_edits(self) -> list[int]:
        optimizer, indices = self.optimizer, self.indices
        if self.adapter.adam is None or not self.adapter.frozen(optimizer):
            return []
        if self.moments.moved is not None:
            return list(indices)
        seen, marks = np.array(optimizer._seen.value), np.array(optimizer._marks.value)
        values = [flat_view(self.moments.variance(i)) for i in indices]
        edited = self.moments.edited(indices, values, seen, marks)
        return [i for i in edited if not self._is_damaged(i)]

    def _is_damaged(self, index: int) -> bool:
        """Whether a frozen second moment has become NaN or Inf and can be restored, when the round is lost."""
        known = self.moments.held(index) is not None
        return known and not np.isfinite(flat_view(self.moments.variance(index))).all()

    def _restore_frozen(self) -> None:
        """A round was lost: frozen second moments that are damaged are again what they were."""
        for i in self.indices if self.adapter.frozen(self.optimizer) else ():
            if self._is_damaged(i):
                variance = self.moments.variance(i)
                variance.assign(tf.reshape(tf.cast(np.array(self.moments.held(i)), variance.dtype), variance.shape))

    def _give_up(self) -> None:
        """Go back to the round's beginning, where the workers are together, and begin again."""
        self.moments.say(self.edits)
        for tensor in self.tensors:
            self.engine.context.kernels.copy(tensor.anchor, tensor.weight)
        self.rounds.length, self.rounds.freezes = 0, False
        edited, self.edits = self.edits, []
        for i in edited:
            if not np.asarray(self.moments.variance(i)).any():
                assert self.adapter.adam is not None
                momentum = self.adapter.adam.momentum(self.optimizer, i)  # of the steps that are given up
                momentum.assign(tf.zeros_like(momentum.value))
        self.begin_again(edited)
        self.engine.end_step()

    def warm_up_again(self) -> None:
        optimizer = self.optimizer
        if self.adapter.frozen(optimizer):
            self.rounds.freezing.thaw(self.steps)
        else:
            self.rounds.freezing.restart(self.steps)
        optimizer._begun.assign(int(optimizer.iterations) - int(optimizer._compressed_steps.value))
        optimizer._warmup_steps.assign(0)  # a state that was loaded may have others
        if self.adapter.adam is not None:
            optimizer._frozen.assign(0)

    def begin_again(self, edited: Sequence[int] = ()) -> None:
        super().begin_again(edited)
        self.edits = []

    def forget_trained(self) -> None:
        if not self.rounds.under_way:  # or it ends by the same rules on all workers
            super().forget_trained()

    def average_moments(
        self, number: int, variances: Sequence[Any], grads: Sequence[Any], *, usable: bool
    ) -> Task[None]:
        """Freeze the second moments, after step number ``number`` of the optimizer: ``second`` is then that number and
        these moments, and the next step begins a round. It is 0 and what they were, if those of some worker are not
        ``usable``. Collective."""
        indices, self._number, self._variances, self._gradients = self.indices, number, variances, grads
        self.second = 0, [self._memory.copy(view(one)) for one in variances]
        try:
            yield from self.driver.freeze(usable=usable and not self.lost)
        finally:
            self._variances, self._gradients = (), ()
        if self.second[0]:
            self._freeze_counts(number, indices)
        self.engine.end_step()

    def _freeze_counts(self, number: int, indices: Sequence[int]) -> None:
        """Second moments are ``second`` from now on, and are corrected by ``number`` steps."""
        optimizer, members = self.optimizer, list(indices)
        seen, marks = np.array(optimizer._seen.value), dict[int, int]()
        seen[members] = number
        kept = [_rounded(one, self.moments.variance(i)) for i, one in zip(members, self.second[1], strict=True)]
        for i, one in zip(members, kept, strict=True):
            marks[i] = self.moments.mark(one.astype(np.float32))
            self.moments.hold(i, one.astype(np.float32).reshape(-1))
        optimizer._seen.assign(seen)
        self.moments.freeze(marks)

    def raise_lost(self) -> None:
        """Raise what ``exchange`` has found, now that all weights are alike."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def bound(self) -> list[Any]:
        """The variables that are in the round."""
        return [self.optimizer._trainable_variables[i] for i in self.indices]

    def forget(self) -> None:
        super().forget()
        self._begin_round_next()

    def take_counts(self, counts: Mapping[str, Any]) -> None:
        super().take_counts(counts)
        self._begin_round_next()

    def _begin_round_next(self) -> None:
        """The next step begins a round: what was under way is of another state."""
        self.rounds.length, self.rounds.freezes, self.edits = 0, False, []
        self.unbind()

    def sizes_now(self) -> dict[str, int]:
        return self.sizes()  # small variables have residuals, too

    @property
    def of_round(self) -> str:
        return f"{self.rounds.length} steps of this round"

    def flush(self) -> None:
        """End the round now: all workers have the same weights then. Collective; eager."""
        self.settle()
        if self.engine.layout is None:
            return
        announce("flush", self.process_set, f"{self.engine.name}, {self.of_round}")
        if self.pending:
            _exchange(self.optimizer, self.indices, self.bound())

    def fold(self) -> None:
        """Before the workers change: go back to the round's beginning; residuals are what was moved since. Local."""
        if self.pending:
            self._pull(_flat(self.bound()))
            self.rounds.fold()
            _put(self.bound(), [tf.constant(tensor.weight) for tensor in self.tensors])


def take_step(optimizer: Any, pairs: Sequence[tuple[Any, Any]], own_step: Callable[[], None]) -> None:
    """One step of this worker alone, ``own_step``, unless gradients are not finite; then, if the round ends, the
    exchange. In a graph, or eagerly."""
    steps: LocalSteps = optimizer._compressor
    variables = [v for _, v in pairs]
    indices = tuple(optimizer._get_variable_index(v) for v in variables)
    options = steps.options_now()

    def begun() -> bool:
        steps.options = options
        return steps.begun(indices)

    def begin() -> None:
        def work(*values: Any) -> Task[None]:
            return steps.begin(indices, values)

        cond(_agreed(optimizer, indices, begins=True), lambda: _run(steps, work, variables))

    def skip() -> None:
        host_call(steps.rounds.skip)
        optimizer._iterations.assign_add(1)  # or learning rates that follow it would part

    def end() -> None:
        _exchange(optimizer, indices, variables)
        if steps.adapter.adam is not None:
            freezes = host_value(lambda: steps.rounds.freezes, [], tf.bool)
            cond(freezes, lambda: _freeze(optimizer, indices, number, [g for g, _ in pairs], finite))

    with in_order():
        cond(host_value(begun, [], tf.bool), lambda: None, begin)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g, _ in pairs])
        rate, number = (
            tf.convert_to_tensor(optimizer.learning_rate),
            tf.convert_to_tensor(optimizer._iterations.value) + 1,
        )
        taken = cond(finite, lambda: _step(optimizer, variables, own_step), skip)
        optimizer._compressed_steps.assign_add(1)
        count = tf.convert_to_tensor(optimizer._compressed_steps.value)
        with tf.control_dependencies(filter(None, [taken])):  # or the exchange, in its branch, might begin before
            ends = host_value(steps.stepped, [count, rate, number], tf.bool)
        cond(ends, end)


def _step(optimizer: Any, variables: Sequence[Any], own_step: Callable[[], None]) -> None:
    """The wrapped optimizer's step, by ``update`` once its second moments are frozen."""
    steps: LocalSteps = optimizer._compressor

    def frozen_step() -> None:
        steps.takes_frozen = True
        try:
            own_step()
        finally:
            steps.takes_frozen = False

    def warm_step() -> None:
        own_step()
        optimizer._count_seen(variables)
        steps.moments.look(variables, tf.convert_to_tensor(optimizer._iterations.value), last=False)

    if steps.adapter.adam is None:
        own_step()
    else:
        cond(tf.convert_to_tensor(optimizer._frozen.value) > 0, frozen_step, warm_step, whole=True)


def update(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
    """Adam's ``update_step`` with a second moment that is frozen: all that Keras does besides stays."""
    steps: LocalSteps = optimizer._compressor
    adam, index, f32 = steps.adapter.adam, optimizer._get_variable_index(variable), tf.float32
    assert adam is not None
    momentum, variance = adam.momentum(optimizer, index), adam.variance(optimizer, index)
    frozen, number = (tf.cast(v.value, f32) for v in (optimizer._frozen, optimizer._iterations))
    beta2 = tf.cast(optimizer._frozen_beta2.value, f32)
    correction = 1 / (1 - tf.pow(tf.where(beta2 > 0, beta2, optimizer.beta_2), frozen))  # none is known of older files
    inside, context = steps.engine.recipe.eps_inside_sqrt, steps.engine.context
    eps = optimizer.epsilon * tf.sqrt(correction)
    p = Scalars(
        beta1=optimizer.beta_1, grad=1 - optimizer.beta_1, l2=0.0, correction=correction,
        eps_inside=eps if inside else 0.0, eps=0.0 if inside else eps, clip=clip_of(context),
        decay=1.0, step=tf.cast(learning_rate, f32) / (1 - tf.pow(optimizer.beta_1, number + 1)),
    )  # fmt: skip
    values = [tf.cast(tf.convert_to_tensor(v), f32) for v in (gradient, momentum, variance, variable)]
    new_momentum, _, new = STEP(p, *values, values[-1])
    momentum.assign(tf.cast(new_momentum, momentum.dtype))
    variable.assign(tf.cast(new, variable.dtype))


def _freeze(optimizer: Any, indices: tuple[int, ...], number: Any, grads: Sequence[Any], usable: Any) -> None:
    steps: LocalSteps = optimizer._compressor
    assert steps.adapter.adam is not None
    variances = [steps.adapter.adam.variance(optimizer, i) for i in indices]

    def work(number: Any, usable: Any, *values: Any) -> Task[None]:
        return steps.average_moments(int(number), values[: len(indices)], values[len(indices) :], usable=bool(usable))

    inputs = [number, usable, *_flat(variances), *_flat(grads)]
    done = in_rounds(steps.errand, steps.collectives, work, inputs)
    new = host_values(lambda _: [adopt(one) for one in steps.second[1]], [done], [tf.float32] * len(indices))
    _put(variances, new)
    optimizer._frozen.assign(host_value(lambda _: np.int64(steps.second[0]), [done], tf.int64))


def _agreed(optimizer: Any, indices: tuple[int, ...], *, begins: bool) -> Any:
    count = tf.convert_to_tensor(optimizer._compressed_steps.value)  # which changes after this, in a graph, too
    now = {"rate": tf.convert_to_tensor(optimizer.learning_rate), "local": count}
    return optimizer._agreement.reach(indices, now, partial(optimizer._compressor.about_to, begins=begins))


def _run(steps: LocalSteps, work: Callable[..., Any], variables: Sequence[Any]) -> Any:
    """``work`` with the flat values of ``variables``; a tensor that is there when it is done."""
    return in_rounds(steps.errand, steps.collectives, work, _flat(variables))


def _flat(variables: Sequence[Any]) -> list[Any]:
    return [tf.reshape(tf.cast(tf.convert_to_tensor(v), tf.float32), [-1]) for v in variables]


def _exchange(optimizer: Any, indices: tuple[int, ...], variables: Sequence[Any]) -> None:
    steps: LocalSteps = optimizer._compressor

    def exchange() -> None:
        done = _run(steps, steps.exchange, variables)
        new = host_values(lambda _: [adopt(t.weight) for t in steps.tensors], [done], [tf.float32] * len(variables))
        _put(variables, _constrained(steps, variables, new))
        lost = host_value(lambda: steps.lost, [], tf.bool)
        cond(lost, lambda: _heal(optimizer), optimizer._average_weights)
        if optimizer.recipe.on_nonfinite == "raise":
            host_call(steps.raise_lost)

    cond(_agreed(optimizer, indices, begins=False), exchange)


def _constrained(steps: LocalSteps, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """``values``, which an exchange gave, as the variables' constraints have them; alike on all workers."""
    pairs = enumerate(zip(variables, values, strict=True))
    found = {i: v.constraint(tf.reshape(new, v.shape)) for i, (v, new) in pairs if v.constraint is not None}
    if found:
        host_call(lambda *new: steps.move_anchors(dict(zip(found, new, strict=True))), *found.values())
    return [found.get(i, new) for i, new in enumerate(values)]


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
    return path_of(variable).replace("/", "_").replace(":", "_")


def _put(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(tf.reshape(value, variable.shape), variable.dtype))

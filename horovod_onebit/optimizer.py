"""The whole algorithm over NumPy arrays and any ``Collectives``: no framework and no Horovod.

The simulation and plain MPI programs use it; the faces do the same with their framework's own optimizer as the
exact part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from horovod_onebit import run_state
from horovod_onebit.averages import all_finite, start_mean
from horovod_onebit.checkpoints import check_same, described
from horovod_onebit.checks import mapping, matching
from horovod_onebit.coded import CodedMean, codes
from horovod_onebit.driver import Defaults, Driver, Frozen, Moment
from horovod_onebit.engine import Engine, Plan
from horovod_onebit.errors import ConfigurationError, DesyncError, error_text
from horovod_onebit.exchange import Collectives
from horovod_onebit.face import chosen
from horovod_onebit.feedback import check_kind, kind
from horovod_onebit.handshake import Verdict, compared, meet
from horovod_onebit.kernels.reference import Array
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Rule, Tensor, zero_one_adam
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.frozen import FrozenAdam
from horovod_onebit.rules.local import COUNT
from horovod_onebit.run_state import RunState
from horovod_onebit.schedule import Gradients, Schedule, Sends, Stepwise, text_of
from horovod_onebit.tasks import Task, run
from horovod_onebit.warmup import NEVER, AfterRise, Phase, unbiased


def check_weights(weights: Mapping[str, Array]) -> None:
    """Raise ``ConfigurationError`` unless they are named arrays that can be updated in place."""
    if not mapping("weights", weights, "names to arrays"):
        raise ConfigurationError("weights is empty: expected at least one named array")
    for name, array in weights.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"weights has the name {name!r}: expected a text")
        if not isinstance(array, np.ndarray):
            raise ConfigurationError(f"weights[{name!r}] is {type(array).__name__}: expected a NumPy array")
        if array.dtype != np.float32 or not array.flags.c_contiguous or not array.flags.writeable:
            raise ConfigurationError(
                f"weights[{name!r}]: expected a writable C-contiguous float32 array, got {array.dtype}"
            )


class NumpyOptimizer(Defaults, RunState):
    """1-bit training of ``weights``, float32 arrays of any shape that are updated in place.

    Args:
        weights: name -> C-contiguous float32 array, the same on every worker at the start.
        rule: one of ``horovod_onebit.rules``, such as ``rules.adam.Adam``; assign ``optimizer.rule`` to change the
            learning rate.
        warmup_steps: steps before compression starts, which are the rule's exact ones of the mean gradient, as
            ``Recipe.warmup`` says; a share of ``total_steps`` below 1; or ``"auto"``, which is the default without a
            ``schedule``, and is not to be given with one.
        total_steps: optimizer steps of the whole run, where ``warmup_steps`` is a share of them.
        recipe: a preset's name, a ``Recipe``, or ``"exact"``, which never compresses.
        collectives: how this worker talks to the others.
        schedule: ``ZeroOne`` makes the rule, an ``Adam``, 0/1 Adam, and another ``Stepwise`` says what its steps are;
            with ``Local`` each worker takes the steps of any rule alone, and the changes of the weights are exchanged;
            with ``Gradients``, all steps are exact ones of the mean gradient, which travels in few bits.
        exact: names, or patterns as ``"*.embedding"``, of arrays that are never compressed: with rules that have no
            second moment, those with elements whose gradient is always zero, which must not move.
        kernels: ``"cpu"``, ``"reference"`` or, in Numba's simulator, ``"cuda"``.

    Attributes:
        steps: steps taken; local ones that this worker has skipped, too.

    A step raises ``DesyncError`` on all workers, and changes nothing, if the rule's hyperparameters or the number of
    steps taken are not the same on all, or if one was given wrong gradients; that one raises what is wrong. The first
    step compares these arguments, too, ``kernels`` apart, and the names and shapes of ``weights``. With ``Local``,
    workers meet where rounds begin and end: wrong gradients are raised where they are given alone, and where a round
    is refused, its last step has been taken. The values of weights are not compared.
    """

    def __init__(
        self,
        weights: Mapping[str, Array],
        rule: Rule,
        *,
        collectives: Collectives,
        warmup_steps: int | float | str | None = None,
        total_steps: int | None = None,
        recipe: str | Recipe = "robust",
        schedule: Schedule | None = None,
        kernels: str = "cpu",
        exact: Iterable[str] | None = None,
    ) -> None:
        if not isinstance(rule, Rule):
            raise ConfigurationError(f"rule={rule!r}: expected one of horovod_onebit.rules, such as adam.Adam(1e-3)")
        check_weights(weights)
        recipe, schedule, warmup = chosen(recipe, schedule, warmup_steps, total_steps)
        if isinstance(warmup, AfterRise) and type(rule) is not Adam:
            warmup = AfterRise(NEVER)
        self.rule, self._algorithm = rule, type(rule)
        self._met = False
        self._arguments = {"warmup_steps": warmup_steps or "auto", "total_steps": total_steps}
        self.engine = Engine(recipe, collectives, kernels=kernels)
        self._stepwise = isinstance(schedule, Stepwise)
        self._schedule, after = schedule, None if isinstance(schedule, Gradients) else schedule
        self.kind = kind(recipe.space, divides=rule.has_variance, schedule=after)
        self.steps, self._compresses, self._bound = 0, False, False
        self.driver = Driver(self.engine, self, warmup, after)
        self.weights = dict(weights)
        self._tensors = [self._tensor(name, array) for name, array in weights.items()]
        smallest = self.engine.recipe.min_compressed_size
        never = matching("exact", exact, weights)
        large = {t.name for t in self._tensors if t.weight.size >= smallest} - never
        self._large = [t for t in self._tensors if t.name in large]
        self._small = [t for t in self._tensors if t.name not in large]
        if codes(recipe, warmup) and self._large:
            self.coded = CodedMean(self.engine, divides=rule.has_variance, kernels=kernels)
        rounds = self.driver.rounds
        has_momentum = rounds is not None and rounds.rule.momentum
        self._round_momenta = {t.name: np.zeros_like(t.weight) for t in self._tensors} if has_momentum else {}

    def _tensor(self, name: str, array: Array) -> Tensor:
        size = array.size
        residual = self.engine.feedback.residual(name, size)
        tensor = Tensor(name, array.reshape(-1), np.zeros(size, np.float32), np.zeros(size, np.float32), residual)
        self._rule(Sends.MEAN).init(tensor)
        return tensor

    @property
    def phase(self) -> Phase:
        """The phase of the next step; rounds of local steps have no warm-up."""
        return Phase.COMPRESSED if self.driver.rounds is not None else self.driver.warmup.phase(self.steps)

    @property
    def frozen(self) -> bool:
        """Whether local steps have made the second moments those of all workers, and frozen them."""
        return self.driver.rounds is not None and self._beta2 is not None

    def step(self, grads: Mapping[str, Array]) -> bool:
        """Take one step with this worker's gradients (shapes as the weights'); collective.

        Returns False if all workers skipped it because one had NaN or Inf; with local steps, if this worker alone
        skipped it, or if the round that ended with it was lost.
        """
        alone = self.driver.rounds is not None
        together = not (alone and self._met)
        try:
            if type(self.rule) is not self._algorithm:
                expected = f"another {self._algorithm.__name__}, which may have other hyperparameters"
                raise ConfigurationError(f"optimizer.rule is {self.rule!r}: expected {expected}")
            self._grads = self._flat(grads)
        except Exception as error:
            if together:
                with suppress(DesyncError):  # tells the others
                    run(self._meet("step", error_text(error)))
            raise
        if together:
            run(self._meet("step"))
        return run(self.driver.local_step(self._step_alone) if alone else self.driver.step())

    def _meet(self, call: str, error: str = "", **facts: Mapping[str, object]) -> Task[None]:
        """Raise ``DesyncError`` on all workers unless all make this ``call`` alike, and none has found an ``error``; at
        first they compare what they were given, too. Collective."""
        engine, rule, taken = self.engine, self.rule, {"the number of steps taken": self.steps}
        if self._met:
            facts["steps"] = {**facts.get("steps", {}), **taken}
            setup = error or ", ".join(self.weights)[:80]
        else:
            facts["progress"], setup = taken, error
            large = {tensor.name for tensor in self._large}
            given = {"schedule": self._schedule, "algorithm": self._algorithm.__name__}
            facts["arguments"] = {**engine.arguments(), **self._arguments, **given}
            facts["trained"] = {
                f"array {number}": f"{name!r}, shape {array.shape}, {'' if name in large else 'not '}compressed"
                for number, (name, array) in enumerate(self.weights.items())
            }
        if not error:
            of_rule = [field.name for field in fields(rule)] if is_dataclass(rule) else ["lr"]
            facts["hyperparameters"] = {f"the rule's {name}": compared(getattr(rule, name)) for name in of_rule}
        yield from meet(engine.collectives, f"{engine.name}.agreement", call, setup, **facts)
        self._met = True

    def flush(self) -> None:
        """After local steps (``Local``, 0/1 Adam), bring all workers to the same weights. Collective."""
        if self.driver.rounds is None and not self._stepwise:
            return
        run(self._meet("flush"))
        if self.pending:
            run(self.driver.flush())

    def _flat(self, grads: Mapping[str, Array]) -> dict[str, Array]:
        expected = sorted(self.weights)
        if sorted(mapping("grads", grads, "names to arrays")) != expected:
            raise ConfigurationError(f"grads are of {sorted(grads)}: expected one for each of {expected}")
        for name, weight in self.weights.items():
            if np.shape(grads[name]) != weight.shape:
                raise ConfigurationError(f"grads[{name!r}] has shape {np.shape(grads[name])}: expected {weight.shape}")
        return {t.name: np.ascontiguousarray(grads[t.name], np.float32).reshape(-1) for t in self._tensors}

    # -- what is saved ------------------------------------------------------------------------------------------------

    what = "arrays"

    def sizes(self) -> dict[str, int]:
        return {tensor.name: tensor.weight.size for tensor in self._tensors}

    @property
    def pending(self) -> bool:
        if self.driver.rounds is not None:
            return self._bound and bool(self.driver.rounds.under_way)
        return self._stepwise and any(t.layer is not None and t.layer[COUNT] for t in self._large)

    def state(self) -> dict[str, Any]:
        """All that this worker has to know to continue bit for bit, but the weights and hyperparameters, the learning
        rate of now among them: counters for JSON, and copies of named arrays. Each worker has its own, and saves it
        beside the weights. Local.

        Raises ``ConfigurationError`` between the exchanges of ``Local`` and ``ZeroOne``: call ``flush()`` before.
        """
        if self.pending:
            raise ConfigurationError(
                "state() was called after local steps, when the weights of the workers differ: call flush() on all "
                "workers before"
            )
        arrays = {name: array.copy() for name, array in self.arrays().items()}
        about = {"kind": self.kind, "workers": self.engine.collectives.size}
        return {**about, "counts": self.counts(), "arrays": arrays, **self.residuals()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state()`` of the same worker gave, with the weights of then. Local; on all workers
        alike, between steps.

        Raises ``ConfigurationError`` if it is of other arrays, of another rule, schedule, space of the recipe or number
        of workers, or if the exchange of a ``Local(delay=...)`` is under way; nothing was changed then.
        """
        expected = {"kind", "workers", "counts", "arrays", "feedback", "divisor", "served", "encodes", "gradients"}
        if mapping("state", state, "names to what state() gave").keys() != expected:
            raise ConfigurationError(f"state has {sorted(state)}: expected what state() gave, {sorted(expected)}")
        check_kind(state["kind"], self.kind, "this state was", "begin a new run from the weights")
        if state["workers"] != (workers := self.engine.collectives.size):
            raise ConfigurationError(
                f"this state is that of one of {state['workers']} workers, and there are {workers}: use "
                "save_checkpoint and load_checkpoint, which redistribute residuals"
            )
        self.check_progress(state["counts"], described(state["arrays"]))
        self.check_residuals(dict(state))
        self.take_progress(state["counts"], state["arrays"])
        self.load_residuals(dict(state))

    def counts(self) -> dict[str, Any]:
        """How far this worker is, for JSON. Local."""
        return {
            **run_state.counts(self.engine, self.driver.warmup),
            "rule": self.rule.name,
            "schedule": str(self._schedule and text_of(self._schedule)),
            "steps": self.steps,
            "compresses": self._compresses,
            "beta2": self._beta2,
            "taken": {tensor.name: [tensor.step, tensor.variance_steps] for tensor in self._tensors},
        }

    def arrays(self) -> dict[str, Array]:
        """What the rule and rounds keep, by name: flat float32 arrays, which steps write to. Local."""
        found = {f"round/{name}": momentum for name, momentum in self._round_momenta.items()}
        freezes = self.driver.rounds is not None and self.driver.rounds.freezing.happens
        for tensor in self._tensors:
            assert tensor.variance is not None
            found |= {f"momentum/{tensor.name}": tensor.momentum, f"variance/{tensor.name}": tensor.variance}
            if tensor.layer is not None and not freezes:  # or it is a round's
                found[f"layer/{tensor.name}"] = tensor.layer
        return found

    def check_progress(self, counts: Mapping[str, Any], arrays: Mapping[str, str]) -> None:
        """Raise ``ConfigurationError`` unless ``counts``, and arrays as ``arrays`` describes them, can be taken over
        now. Local."""
        if self._bound and self.driver.rounds.hidden:
            raise ConfigurationError("the exchange of a round is under way: call flush() on all workers before")
        own, saved = (
            {**dict.fromkeys(one, ""), **{f"the {what}": str(one.get(what)) for what in ("rule", "schedule")}}
            for one in (self.counts(), counts)
        )
        check_same("optimizer", {**saved, **arrays}, {**own, **described(self.arrays())})
        warmup, steps = copy(self.driver.warmup), counts["steps"]
        warmup.load_state_dict(counts["warmup"])
        if self.driver.rounds is None and counts["compresses"] and warmup.phase(steps) is Phase.WARMUP:
            raise ConfigurationError(
                f"this state is of a run that compresses, after {steps} steps, and this optimizer's warm-up "
                f"({self._arguments['warmup_steps']!r}) is not over then: give warmup_steps={steps}, or fewer"
            )

    def take_progress(self, counts: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Continue from these ``counts`` and ``arrays``; others stay as they are. Local; on all workers alike."""
        self.engine.cancel(restore=False)
        own = self.arrays()
        for name, values in arrays.items():
            own[name][:] = values
        run_state.take_counts(self.engine, self.driver.warmup, counts)
        self.steps = counts["steps"]
        for tensor in self._tensors:
            tensor.step, tensor.variance_steps = counts["taken"][tensor.name]
        self._bound, self._compresses = False, counts["compresses"]
        for tensor in self._large if self.driver.rounds is None else self._tensors:
            tensor.beta2 = counts["beta2"]

    @property
    def _beta2(self) -> float | None:
        """By which second moments were frozen; None if none is."""
        return next((tensor.beta2 for tensor in self._tensors if tensor.beta2 is not None), None)

    # -- what the driver asks of a face: see ``driver.Together`` ------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        return float(self.rule.lr)

    def agreed(self) -> Task[Verdict]:
        if not (self._stepwise and self.phase is Phase.COMPRESSED):
            return Verdict()
        # A step that cannot be taken back.
        answers = yield from self.driver.ask_before_step(bad=not all_finite(self._grads.values()))
        return Verdict(finite=not answers.any("bad"))

    def average(self, verdict: Verdict) -> Task[bool]:
        if self.coded is None:
            return (yield from self._start_mean(self._tensors))
        large = {tensor.name: self._grads[tensor.name] for tensor in self._large}
        found = yield from self.coded.average(large, [self._grads[tensor.name] for tensor in self._small])
        if found is None:
            return False
        self._means = [(tensor, found[0][tensor.name]) for tensor in self._large]
        self._means += zip(self._small, found[1], strict=True)
        return True

    def skip(self) -> None:
        self.engine.say_skipped("the mean gradient")

    def prepare(self, sends: Sends) -> Task[Plan]:
        rules = [self._rule(sends)] * len(self._large)
        yield from self.engine.prepare(self._large, rules)
        return self.engine.plan(sends, rules)

    def _rule(self, sends: Sends) -> Rule:
        if not self._stepwise:
            return self.rule
        return zero_one_adam.of(self._adam, sends)

    def start_exact(self) -> Task[bool]:
        return self._start_mean(self._small)

    def _start_mean(self, tensors: Sequence[Tensor]) -> Task[bool]:
        engine, own = self.engine, [self._grads[tensor.name] for tensor in tensors]
        return self._arrived(tensors, start_mean(own, engine.collectives, f"{engine.name}.exact", engine.traffic))

    def _arrived(self, tensors: Sequence[Tensor], arriving: Task[list[Array]]) -> Task[bool]:
        means = yield from arriving
        self._means = [(tensor, mean) for tensor, mean in zip(tensors, means, strict=True)]
        return all_finite(means)

    def own_gradients(self) -> Mapping[int, Array]:
        return {number: self._grads[tensor.name] for number, tensor in enumerate(self._large)}

    def exact_step(self) -> None:
        for tensor, mean in self._means:
            self.rule.exact_step(tensor, mean, self.engine.context)

    def awakened(self, seconds: Mapping[int, Array]) -> None:
        self.engine.take_second_moments(seconds)

    def power(self) -> tuple[float, float] | None:
        if not isinstance(self.rule, Adam):
            return None
        variances = [t.variance for t in self._large if t.variance is not None]
        squares = math.fsum(float(np.square(one, dtype=np.float64).sum()) for one in variances)
        return unbiased(math.sqrt(squares), self.rule.beta2, self.steps), self.rule.beta2

    def start_compression(self) -> None:
        if not self._compresses and self.phase is Phase.COMPRESSED:
            self._compresses = True
            for tensor in self._large:
                tensor.beta2 = self.rule.beta2 if isinstance(self.rule, Adam) else None
                self._rule(Sends.MEAN).begin(tensor, self.engine.context)
            if self.coded is not None:
                self.coded.forget()

    @property
    def _adam(self) -> Adam:
        """The rule, where the schedule or a frozen second moment is Adam's. Raises ``ConfigurationError`` for another
        one."""
        if type(self.rule) is not Adam:
            frozen = "the second moment of Adam is frozen"
            why = f"schedule={self._schedule!r} is for Adam" if self._stepwise else frozen
            raise ConfigurationError(f"{why}, and the rule is {self.rule.name}")
        return self.rule

    # -- and ``driver.Alone`` -----------------------------------------------------------------------------------------

    def waits(self) -> bool:
        return False

    def follow(self) -> Task[bool]:
        yield from ()
        rounds = self.driver.rounds
        if not self._bound or rounds.under_way:
            return not self._bound
        return any(not np.array_equal(t.weight, t.anchor) for t in rounds.tensors)  # somebody has set weights

    def agree(self, call: str, what: Mapping[str, object]) -> Task[None]:
        yield from self._meet(call, steps=what)

    def bind(self) -> tuple[list[Tensor], list[Tensor]]:
        self._bound = True
        if not self.frozen:  # rounds have momenta of their own
            momenta = self._round_momenta or {t.name: np.zeros_like(t.weight) for t in self._tensors}
            bare = {t.name: Tensor(t.name, t.weight, momenta[t.name], None, t.residual) for t in self._tensors}
            found = [bare[t.name] for t in self._large], [bare[t.name] for t in self._small]
            for tensor in bare.values():
                self.driver.rounds.rule.init(tensor)
            return found
        for tensor in self._tensors:
            self._frozen.init(tensor)
            tensor.step = self.steps
        return self._large, self._small

    @property
    def _frozen(self) -> FrozenAdam:
        return FrozenAdam(delay=self.driver.rounds.schedule.delay, adam=self._adam)

    def unbind(self) -> None:
        self._bound = False

    def learning_rates(self) -> Mapping[str, float]:
        return dict.fromkeys([t.name for t in self._tensors], self.learning_rate)

    def frozen_rules(self) -> Frozen:
        return dict.fromkeys([t.name for t in self._tensors], self._frozen) if self.frozen else {}

    def _step_alone(self, rules: Frozen) -> bool:
        if not all_finite(self._grads.values()):
            return False
        for tensor in self._tensors:
            step = rules[tensor.name].local_step if rules else self.rule.exact_step
            step(tensor, self._grads[tensor.name], self.engine.context)
        return True

    def push(self, *, together: bool, usable: bool) -> None:
        for array in self.arrays().values() if not usable else ():  # or the next round would be lost, too
            np.nan_to_num(array, copy=False, posinf=0.0, neginf=0.0)

    def second_moments(self) -> list[Moment]:
        rule, found = self._adam, list[Moment]()
        for tensor in self._tensors:
            assert tensor.variance is not None
            last, seen = rule.decayed(self._grads[tensor.name], tensor.weight), tensor.variance_steps
            found.append(Moment(tensor, tensor.variance, last, rule.beta2, seen, seen, self.steps))
        return found

    def freeze(self, of: Tensor, second: Array) -> None:
        of.variance, of.variance_steps = second, self.steps
        of.beta2 = self._adam.beta2

"""The step driver: what a run does, step by step. A face has the arrays and the wrapped optimizer's own steps.

A schedule says what each step is (``Step``): whether the workers move together, by their mean gradient, or each one
alone, and what travels. All that waits for other workers is a task. So far the NumPy face is driven by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from horovod_onebit import warmup as warmups
from horovod_onebit.averages import all_finite, second_moments, start_mean
from horovod_onebit.engine import Engine
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rounds import Rounds
from horovod_onebit.rules import Rule, Tensor
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.frozen import FrozenAdam
from horovod_onebit.schedule import Kind, Local, ZeroOne, kind_of
from horovod_onebit.tasks import Task
from horovod_onebit.warmup import Phase, Warmup

Arrays = Mapping[str, Array]
"""Flat float32 arrays by tensor."""


class Face(Protocol):
    """What a framework gives the driver."""

    def tensors(self, *, moments: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Those that are compressed and those that are not, as they are now; with the wrapped optimizer's ``moments``,
        or without any."""
        ...

    def rule_of(self, tensor: Tensor, kind: Kind) -> Rule:
        """The rule of a step of ``kind``, with the hyperparameters of now."""
        ...

    def exact_step(self, grads: Arrays) -> None:
        """The wrapped optimizer's own step, of the tensors that ``grads`` are given for, and of no others."""
        ...

    def second_moments(self) -> list[tuple[Tensor, Array]]:
        """Adam's tensors, and their second moments with the bias corrected, flat float32."""
        ...

    def freeze(self, tensor: Tensor, second: Array) -> None:
        """Keep ``second``, whose bias is corrected, as the second moment."""
        ...

    def moved(self, tensors: Sequence[Tensor], kind: Kind) -> None:
        """The core has taken a step of these: the framework's counters and copies follow."""
        ...


@dataclass(frozen=True)
class Step:
    """What a step is. ``alone``: by this worker's own gradient; else ``kind`` is what large tensors send, or None in
    the warm-up, where all tensors travel exactly."""

    alone: bool = False
    kind: Kind | None = None


class Driver:
    """One worker's run.

    Attributes:
        steps: steps taken; of local steps, those that this worker has skipped, too.
        frozen: whether the second moments are those that all workers have in common, for good.
        rounds: of local steps; None without them.
    """

    def __init__(self, engine: Engine, face: Face, warmup: Warmup, schedule: ZeroOne | Local | None) -> None:
        self.engine, self.face, self.warmup, self.schedule = engine, face, warmup, schedule
        self.steps = 0
        self.frozen = False
        self.rounds: Rounds | None = None
        if isinstance(schedule, Local):
            self.rounds = Rounds(engine, schedule, warmup if isinstance(warmup, warmups.AfterRise) else None)

    @property
    def phase(self) -> Phase:
        """That of the next step; local steps have no warm-up."""
        return Phase.COMPRESSED if self.rounds is not None else self.warmup.phase(self.steps)

    def next(self) -> Step:
        """What the next step is; the same on all workers."""
        if self.rounds is not None:
            return Step(alone=True)
        if self.phase is Phase.WARMUP:
            return Step()
        zero_one = self.schedule if isinstance(self.schedule, ZeroOne) else None
        return Step(kind=kind_of(zero_one, self.engine.exchanges + 1))

    def step(self, grads: Arrays, learning_rate: float) -> Task[bool]:
        """Take a step with this worker's ``grads``; whether it was taken. Collective."""
        try:
            step = self.next()
            if step.alone:
                return (yield from self._alone(grads, learning_rate))
            return (yield from self._together(step, grads, learning_rate))
        finally:
            self.engine.end_step()

    def _together(self, step: Step, grads: Arrays, learning_rate: float) -> Task[bool]:
        engine, (large, small) = self.engine, self.face.tensors(moments=True)
        exact, plan, by_number = [*large, *small] if step.kind is None else small, None, dict[int, Array]()
        if step.kind is not None:
            if isinstance(self.schedule, ZeroOne) and self.schedule.starts_local(engine.exchanges + 1):
                engine.feedback.reset()
            plan = engine.plan(step.kind, [self.face.rule_of(t, step.kind) for t in large])
            by_number = {i: grads[t.name] for i, t in enumerate(large)}
            yield from engine.prepare(large, plan.rules)
            engine.send_rest(by_number, plan)
        finite = (yield from self._all_finite(grads)) if isinstance(self.schedule, ZeroOne) and plan else True
        means = yield from start_mean(
            [grads[t.name] for t in exact], engine.collectives, f"{engine.name}.exact", engine.traffic
        )
        finite = finite and all_finite(means)
        if plan is not None and not (yield from engine.receive(by_number, plan, finite=finite)):
            return False
        if plan is None and not finite:
            engine.say_skipped("the mean gradient")
            return False
        if plan is not None:
            self.face.moved(large, plan.kind)
        self.face.exact_step({t.name: mean for t, mean in zip(exact, means, strict=True)})
        self.steps += 1
        if plan is None:
            self._observe(learning_rate)
        return True

    def _all_finite(self, grads: Arrays) -> Task[bool]:
        """On all workers: before a step that cannot be taken back."""
        bad = np.array([not all_finite(grads.values())], np.int32)
        return not (yield self.engine.collectives.allreduce(bad, f"{self.engine.name}.finite")).any()

    def _observe(self, learning_rate: float) -> None:
        large, _ = self.face.tensors(moments=True)
        if self.warmup.wants(self.steps):
            found = [t.variance for t in large if t.variance is not None]
            beta2 = getattr(self.face.rule_of(large[0], Kind.EXACT), "beta2", 0.0) if large else 0.0
            squares = sum(float(np.square(v, dtype=np.float64).sum()) for v in found)
            norm = warmups.unbiased(math.sqrt(squares), beta2, self.steps) if beta2 else None
            self.warmup.observe(self.steps, norm, learning_rate, beta2)
        if self.warmup.phase(self.steps) is Phase.COMPRESSED:
            for tensor in large:
                self.face.rule_of(tensor, Kind.EXACT).begin(tensor, self.engine.context)

    def _alone(self, grads: Arrays, learning_rate: float) -> Task[bool]:
        rounds = self.rounds
        assert rounds is not None
        if not rounds.tensors:
            yield from self._begin_round(rounds)
        taken, own = all_finite(grads.values()), rounds.tensors if self.frozen else []
        rules = {t.name: self._frozen(t) for t in own}
        if not taken:
            rounds.skip()
        elif self.frozen:
            for tensor in own:
                rules[tensor.name].local_step(tensor, grads[tensor.name], self.engine.context)
            self.face.moved(own, Kind.LOCAL)
        else:
            self.face.exact_step(grads)
        for tensor in own:
            rules[tensor.name].count_step(tensor)
        self.steps += 1
        if rounds.stepped(self.steps, learning_rate):
            taken = (yield from rounds.exchange()) and taken
            if rounds.freezes:
                yield from self._freeze(rounds, grads, usable=taken)
            return taken
        return (yield from rounds.take_over()) and taken if rounds.due else taken

    def _frozen(self, tensor: Tensor) -> FrozenAdam:
        adam = self.face.rule_of(tensor, Kind.LOCAL)
        assert isinstance(adam, Adam)
        return FrozenAdam(adam=adam)

    def _begin_round(self, rounds: Rounds) -> Task[None]:
        large, small = self.face.tensors(moments=self.frozen)
        rules = [self._frozen(t) if self.frozen else rounds.rule for t in (*large, *small)]
        for rule, tensor in zip(rules, (*large, *small), strict=True):
            rule.init(tensor)
            if self.frozen:
                tensor.step = self.steps
        yield from rounds.begin(large, small, rules=rules)

    def _freeze(self, rounds: Rounds, grads: Arrays, *, usable: bool) -> Task[None]:
        """Adam's second moments become those of all workers, and stay so, if those of all are ``usable``."""
        engine, moments = self.engine, self.face.second_moments()
        own, last = [v for _, v in moments], [grads[t.name] for t, _ in moments]
        found = yield from second_moments(
            own, last, [1.0] * len(own), engine.recipe.block_size_for, engine.collectives, f"{engine.name}.second",
            engine.traffic, usable=usable,
        )  # fmt: skip
        if found is not None:
            for (tensor, _), second in zip(moments, found, strict=True):
                tensor.variance_steps = self.steps
                self.face.freeze(tensor, second)
            self.frozen = True
            yield from self._begin_round(rounds)

    def flush(self) -> Task[None]:
        """Bring all workers to the same weights."""
        if self.rounds is not None:
            if self.rounds.under_way:
                yield from self.rounds.exchange(flush=True)
        else:
            yield from self.engine.flush([self.face.rule_of(t, Kind.SYNC) for t in self.engine.tensors])

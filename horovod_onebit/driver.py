"""The step driver: what a run does, step by step. A face has the arrays and the wrapped optimizer's own steps.

A schedule says what each step is (``Step``): whether the workers move together, by their mean gradient, or each one
alone, and what travels. All that waits for other workers is a task. The NumPy face is driven by it, and PyTorch's local
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from horovod_onebit import warmup as warmups
from horovod_onebit.averages import all_finite, second_moments, start_mean
from horovod_onebit.engine import Engine
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rounds import Rounds
from horovod_onebit.rules import Rule, Tensor
from horovod_onebit.rules.frozen import FrozenAdam
from horovod_onebit.schedule import Kind, Local, ZeroOne, kind_of
from horovod_onebit.tasks import Task
from horovod_onebit.warmup import Phase, Warmup

Arrays = Mapping[str, Array]
"""Flat float32 arrays by tensor."""
Frozen = Mapping[str, FrozenAdam]
"""By name, the rules of the tensors whose second moment is frozen."""


class Together(Protocol):
    """What a framework gives the driver for steps that all workers take together.

    Attributes:
        steps: steps taken, which the driver counts; of local ones, those that this worker has skipped, too.
    """

    steps: int

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Those that are compressed and those that are not, as they are now."""
        ...

    def rule_of(self, tensor: Tensor, kind: Kind) -> Rule:
        """The rule of a step of ``kind``, with the hyperparameters of now."""
        ...

    def exact_step(self, grads: Arrays) -> None:
        """The wrapped optimizer's own step, of the tensors that ``grads`` are given for, and of no others."""
        ...

    def moved(self, tensors: Sequence[Tensor], kind: Kind) -> None:
        """The core has taken a step of these: the framework's counters and copies follow."""
        ...


@dataclass(frozen=True)
class Moment:
    """Adam's second moment of this worker, which is to be frozen.

    Attributes:
        of: what the face calls the tensor.
        value: with the bias corrected, flat float32.
        gradient: the last one, flat float32.
        own: see ``averages.second_moments``.
    """

    of: Any
    value: Array
    gradient: Array
    own: float


class Alone(Protocol):
    """What a framework gives the driver for steps that each worker takes alone.

    Attributes:
        steps: as in ``Together``.
        learning_rate: of the next step, the largest one.
        young: whether some second moment has seen too little to be frozen.
    """

    steps: int

    @property
    def learning_rate(self) -> float: ...

    @property
    def young(self) -> bool: ...

    def follow(self) -> Task[bool]:
        """Take notice of what has changed since the last step; whether a round has to begin. Collective if one ends."""
        ...

    def agree(self, call: str, what: Mapping[str, object]) -> Task[None]:
        """Raise on all workers, unless all are about to do the same: ``call``, and ``what`` in words. Collective."""
        ...

    def bind(self) -> tuple[list[Tensor], list[Tensor]]:
        """A round begins: the tensors that are compressed and those that are not, where they are now."""
        ...

    def bound(self) -> None:
        """It has begun. Collective."""
        ...

    def unbind(self) -> None:
        """The next step begins a round."""
        ...

    def details(self) -> list[str] | None:
        """See ``Engine.prepare``."""
        ...

    def frozen_rules(self) -> Frozen:
        """Of the tensors of this round, with the hyperparameters of now."""
        ...

    def pull(self) -> Task[None]:
        """Put the weights of now where the round's tensors are. Local."""
        ...

    def push(self, *, together: bool, usable: bool) -> None:
        """Take the weights back from there; ``together``: they are the same on all workers now. Unless the round was
        ``usable``, NaN may be in what the wrapped optimizer keeps. Local."""
        ...

    def ended(self) -> None:
        """A round has ended. Collective."""
        ...

    def second_moments(self, steps: int) -> list[Moment]:
        """Those that are not frozen; they have seen ``steps`` of this worker's own gradients at most."""
        ...

    def freeze(self, of: Any, second: Array) -> None:
        """Keep ``second``, whose bias is corrected, as the second moment."""
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
        face: ``Together`` and ``Alone``, or what of them the ``schedule`` needs.
        frozen: whether second moments are those that all workers have in common, for good.
        rounds: of local steps; None without them.
    """

    def __init__(
        self, engine: Engine, face: Together | Alone, warmup: Warmup, schedule: ZeroOne | Local | None
    ) -> None:
        self.engine, self.warmup, self.schedule = engine, warmup, schedule
        self.face: Any = face
        self.frozen = False
        self.rounds: Any = None
        if isinstance(schedule, Local):
            self.rounds = Rounds(engine, schedule, warmup if isinstance(warmup, warmups.AfterRise) else None)

    @property
    def phase(self) -> Phase:
        """That of the next step; local steps have no warm-up."""
        return Phase.COMPRESSED if self.rounds is not None else self.warmup.phase(self.face.steps)

    def next(self) -> Step:
        """What the next step is; the same on all workers."""
        if self.rounds is not None:
            return Step(alone=True)
        if self.phase is Phase.WARMUP:
            return Step()
        zero_one = self.schedule if isinstance(self.schedule, ZeroOne) else None
        return Step(kind=kind_of(zero_one, self.engine.exchanges + 1))

    def step(self, grads: Arrays) -> Task[bool]:
        """Take a step with this worker's ``grads``; whether it was taken. Collective."""
        try:
            step = self.next()
            if step.kind is None:
                return (yield from self._exact(grads))
            return (yield from self._compressed(step.kind, grads))
        finally:
            self.engine.end_step()

    # -- together -------------------------------------------------------------------------------------------------

    def _exact(self, grads: Arrays) -> Task[bool]:
        engine, face, names = self.engine, self.face, list(grads)
        means = yield from start_mean(
            [grads[name] for name in names], engine.collectives, f"{engine.name}.exact", engine.traffic
        )
        if not all_finite(means):
            engine.say_skipped("the mean gradient")
            return False
        face.exact_step(dict(zip(names, means, strict=True)))
        face.steps += 1
        self._observe()
        return True

    def _compressed(self, kind: Kind, grads: Arrays) -> Task[bool]:
        engine, face, (large, small) = self.engine, self.face, self.face.tensors()
        if isinstance(self.schedule, ZeroOne) and self.schedule.starts_local(engine.exchanges + 1):
            engine.feedback.reset()
        plan = engine.plan(kind, [face.rule_of(t, kind) for t in large])
        by_number = {i: grads[t.name] for i, t in enumerate(large)}
        yield from engine.prepare(large, plan.rules)
        engine.send_rest(by_number, plan)
        finite = (yield from self._all_finite(grads)) if isinstance(self.schedule, ZeroOne) else True
        means = yield from start_mean(
            [grads[t.name] for t in small], engine.collectives, f"{engine.name}.exact", engine.traffic
        )
        if not (yield from engine.receive(by_number, plan, finite=finite and all_finite(means))):
            return False
        face.moved(large, kind)
        face.exact_step({t.name: mean for t, mean in zip(small, means, strict=True)})
        face.steps += 1
        return True

    def _all_finite(self, grads: Arrays) -> Task[bool]:
        """On all workers: before a step that cannot be taken back."""
        return not (yield from self._any(not all_finite(grads.values()), "finite"))

    def _any(self, own: bool, what: str) -> Task[bool]:
        """Whether it is so on some worker. Collective."""
        total = yield self.engine.collectives.allreduce(np.array([own], np.int32), f"{self.engine.name}.{what}")
        return bool(total.any())

    def _observe(self) -> None:
        """Show the run to the warm-up, after an exact step; it may have been the last one."""
        (large, _), steps, warmup = self.face.tensors(), self.face.steps, self.warmup
        if warmup.wants(steps):
            found = [t.variance for t in large if t.variance is not None]
            beta2 = getattr(self.face.rule_of(large[0], Kind.EXACT), "beta2", 0.0) if large else 0.0
            squares = sum(float(np.square(v, dtype=np.float64).sum()) for v in found)
            norm = warmups.unbiased(math.sqrt(squares), beta2, steps) if beta2 else None
            warmup.observe(steps, norm, self.face.learning_rate, beta2)
        if warmup.phase(steps) is Phase.COMPRESSED:
            for tensor in large:
                self.face.rule_of(tensor, Kind.EXACT).begin(tensor, self.engine.context)

    # -- alone ----------------------------------------------------------------------------------------------------

    def local_step(self, take: Callable[[Frozen], bool]) -> Task[bool]:
        """A step of this worker alone, and the exchange if a round ends with it.

        ``take`` takes the step, of the tensors in the mapping that it is given by their rules, of others by the wrapped
        optimizer's own; it returns False if it has passed over the step, because gradients are not finite. Returns
        whether the step was taken, and the round not lost. Collective if a round begins or ends.
        """
        face, rounds = self.face, self.rounds
        try:
            if (yield from face.follow()):
                yield from self.begin_round()
            frozen = face.frozen_rules()
            taken = take(frozen)
            if not taken:
                rounds.skip()
            for tensor in rounds.tensors:
                if tensor.name in frozen:
                    frozen[tensor.name].count_step(tensor)
            face.steps += 1
            if rounds.stepped(face.steps, face.learning_rate):
                taken = (yield from self.end_round("step")) and taken
                if rounds.freezes:
                    yield from self.freeze(usable=taken)
            elif rounds.due:
                taken = (yield from self._exchange("step", rounds.take_over)) and taken
            return taken
        finally:
            self.engine.end_step()

    def begin_round(self) -> Task[None]:
        """From the weights of now, which are the same on all workers. Collective."""
        face, rounds = self.face, self.rounds
        yield from face.agree("step", {"local steps taken": face.steps, WHAT: "a round begins"})
        large, small = face.bind()
        frozen = face.frozen_rules()
        rules = [frozen.get(tensor.name, rounds.rule) for tensor in (*large, *small)]
        try:
            yield from rounds.begin(large, small, face.details(), rules)
        except BaseException:
            face.unbind()
            raise
        face.bound()

    def end_round(self, call: str, *, flush: bool = False) -> Task[bool]:
        """Whether the round was not lost; see ``Rounds.exchange``. Collective."""
        taken = yield from self._exchange(call, lambda: self.rounds.exchange(flush=flush))
        self.face.ended()
        return taken

    def _exchange(self, call: str, exchange: Callable[[], Task[bool]]) -> Task[bool]:
        face, rounds, usable = self.face, self.rounds, False
        ends = "a round ends, and second moments are frozen" if rounds.freezes else "a round ends"
        said = {"local steps taken": face.steps, "steps of this round": rounds.length, WHAT: ends}
        try:
            yield from face.agree(call, said)
        except Exception:
            rounds.cancel()
            raise
        yield from face.pull()
        try:
            usable = yield from exchange()
        finally:
            face.push(together=not rounds.under_way, usable=usable)
        return usable

    def freeze(self, *, usable: bool) -> Task[None]:
        """Adam's second moments become those of all workers, and stay so, if those of all are ``usable``. The next step
        then begins a round. Collective."""
        engine, face, rounds = self.engine, self.face, self.rounds
        if (yield from self._any(face.young, "young")):
            rounds.wait(face.steps)
            return
        moments: list[Moment] = face.second_moments(rounds.own_steps(face.steps))
        values, gradients, own = ([getattr(m, what) for m in moments] for what in ("value", "gradient", "own"))
        found = yield from second_moments(
            values, gradients, own, engine.recipe.block_size_for, engine.collectives, f"{engine.name}.second",
            engine.traffic, usable=usable,
        )  # fmt: skip
        if found is None:
            rounds.put_off()
            return
        for moment, second in zip(moments, found, strict=True):
            face.freeze(moment.of, second)
        self.frozen = True
        face.unbind()

    def flush(self) -> Task[None]:
        """Bring all workers to the same weights. Collective."""
        if self.rounds is None:
            yield from self.engine.flush([self.face.rule_of(t, Kind.SYNC) for t in self.engine.tensors])
        elif self.rounds.under_way:
            yield from self.end_round("flush", flush=True)


WHAT = "what happens after them"
"""The steps that a worker has taken."""

"""The step driver: what a run does, step by step. A face has the arrays and the wrapped optimizer's own steps.

The workers take a step together (``step``), by their mean gradient, or each one alone (``local_step``). All that waits
for other workers is a task. In Keras a graph orders what the framework does, and calls the parts of these steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from horovod_onebit.averages import all_finite, own_share, second_moments
from horovod_onebit.engine import Engine, Plan
from horovod_onebit.errors import workers
from horovod_onebit.handshake import STEP, Answers, Verdict, ask
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rounds import Rounds
from horovod_onebit.rules import Tensor
from horovod_onebit.rules.frozen import FrozenAdam
from horovod_onebit.rules.local import count
from horovod_onebit.schedule import Local, Sends, Stepwise, changes_unit, step_of
from horovod_onebit.tasks import Task
from horovod_onebit.warmup import AfterRise, Phase, Warmup

Frozen = Mapping[str, FrozenAdam]
"""By name, the rules of the tensors whose second moment is frozen."""


class Prepares(Protocol):
    """What a framework gives the driver where a graph orders the rest of a compressed step."""

    def prepare(self, sends: Sends) -> Task[Plan]:
        """Prepare the engine for a step that ``sends`` this, of what is compressed now and with the hyperparameters of
        now. Collective if anything has changed."""
        ...


class Compresses(Prepares, Protocol):
    """What a framework gives the driver for compressed steps."""

    def start_exact(self) -> Task[bool]:
        """Start to average the gradients of what is not compressed; the task waits, and says whether they are finite.
        Collective."""
        ...

    def own_gradients(self) -> Mapping[int, Array]:
        """Flat float32, of what is compressed, by number; and the weights are where the engine works on them."""
        ...

    def agreed(self) -> Task[Verdict]:
        """Compare what the workers are about to do: what all know of it, or an error on all. Collective."""
        ...

    def moved(self, sends: Sends) -> None:
        """The core has taken a step that ``sends`` this, of what is compressed: the framework's tensors follow it.
        Local."""
        ...

    def exact_step(self) -> None:
        """The wrapped optimizer's own step, of what was averaged, and of nothing else. Local."""
        ...

    def awakened(self, seconds: Mapping[int, Array]) -> None:
        """Some elements have received their first second moment: adopt ``seconds`` (flat float32 in host memory, by
        tensor number). See ``Engine.first_gradients``. Local."""
        ...


class Together(Compresses, Protocol):
    """What a framework gives the driver for steps that all workers take together.

    Attributes:
        steps: steps taken, which the driver counts; of local ones, those that this worker has skipped, too.
        phase: that of the next step.
    """

    steps: int

    @property
    def phase(self) -> Phase: ...

    @property
    def learning_rate(self) -> float:
        """The one of now; where groups have their own, their mean."""
        ...

    def announce(self) -> Task[None]:
        """Look at what there is to do and start the agreement. Collective if parameters have to be brought together
        first."""
        ...

    def average(self, verdict: Verdict) -> Task[bool]:
        """In the warm-up, make all gradients the workers' mean; whether they are finite. Collective."""
        ...

    def skip(self) -> None:
        """All pass over an exact step, whose gradients were not finite. Local."""
        ...

    def power(self) -> tuple[float, float] | None:
        """Of the second moments that will be frozen: their Euclidean norm, with each one's bias corrected, and their
        beta2; None if the optimizer has none. Local."""
        ...

    def start_compression(self) -> None:
        """A step was taken: compress whatever has had its warm-up. Local."""
        ...

    def over(self, *, taken: bool) -> Task[None]:
        """A step is over. Collective."""
        ...


@dataclass(frozen=True)
class Moment:
    """Adam's second moment of this worker, which is to be frozen.

    Attributes:
        of: what the face calls the tensor.
        variance: as the optimizer keeps it, flat float32.
        gradient: the last one, with what weight decay adds to it, which is no noise; flat float32.
        beta2: of the moving average.
        seen, own: gradients that it has seen, and how many of the last of them were this worker's own.
        count: steps by which the optimizer will correct the bias of what it is given back.
    """

    of: Any
    variance: Array
    gradient: Array
    beta2: float
    seen: int
    own: int
    count: int


class Alone(Protocol):
    """What a framework gives the driver for steps that each worker takes alone.

    Attributes:
        steps: as in ``Together``.
        learning_rate: of the step that is taken; where groups have their own, their mean.
    """

    @property
    def steps(self) -> int: ...

    @property
    def learning_rate(self) -> float: ...

    def waits(self) -> bool:
        """Whether second moments are not frozen yet, because some have seen too little. Local."""
        ...

    def follow(self) -> Task[bool]:
        """Take notice of what has changed since the last step; whether a round has to begin. Collective if one ends."""
        ...

    def agree(self, call: str, what: Mapping[str, object]) -> Task[None]:
        """Raise on all workers, unless all are about to do the same: ``call``, and ``what`` in words. Collective."""
        ...

    def bind(self) -> tuple[list[Tensor], list[Tensor]]:
        """A round begins: the tensors that are compressed and those that are not, where they are now. Local."""
        ...

    def began(self) -> Task[None]:
        """It has begun. Collective."""
        ...

    def unbind(self) -> None:
        """The next step begins a round."""
        ...

    def details(self) -> list[str] | None:
        """By tensor, text that must agree between workers; None if there is none. See ``Engine.prepare``."""
        ...

    def learning_rates(self) -> Mapping[str, float]:
        """Of the step that is taken, by name of the round's tensors; asked while moments will be frozen."""
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

    def ended(self) -> Task[None]:
        """A round has ended. Collective."""
        ...

    def second_moments(self) -> list[Moment]:
        """Those that are not frozen."""
        ...

    def freeze(self, of: Any, second: Array) -> None:
        """Keep ``second`` as the second moment, biased as one of ``Moment.count`` steps."""
        ...


class Defaults:
    """What a face does where it has nothing to do; its first base class."""

    def announce(self) -> Task[None]:
        yield from ()

    def moved(self, sends: Sends) -> None:
        """The tensors are the framework's own."""

    def over(self, *, taken: bool) -> Task[None]:
        yield from ()

    def began(self) -> Task[None]:
        yield from ()

    def details(self) -> list[str] | None:
        return None

    def pull(self) -> Task[None]:
        yield from ()

    def ended(self) -> Task[None]:
        yield from ()


class Driver:
    """One worker's run.

    Attributes:
        face: ``Together``, ``Alone`` or both, as the ``schedule`` needs them. Where a graph orders steps that workers
            take together, ``Compresses`` (``Stepwise``) or ``Prepares``.
        warmup: with local steps an ``AfterRise``, which says when second moments are frozen, if they ever are.
        rounds: of local steps; None without them.
    """

    def __init__(
        self, engine: Engine, face: Together | Alone, warmup: Warmup, schedule: Stepwise | Local | None
    ) -> None:
        self.engine, self.warmup = engine, warmup
        self.stepwise = None if isinstance(schedule, Local) else schedule
        self.face: Any = face
        self.rounds: Any = None
        self._has_warned = False
        if isinstance(schedule, Local):
            assert isinstance(warmup, AfterRise)
            self.rounds = Rounds(engine, schedule, warmup)

    @property
    def sends(self) -> Sends:
        """What the next compressed step sends, the same on all workers."""
        return step_of(self.stepwise, self.engine.exchanges + 1)

    # -- together -------------------------------------------------------------------------------------------------

    def step(self) -> Task[bool]:
        """A step of all workers together; whether it was taken, or passed over by all. Collective."""
        face, warmup = self.face, self.warmup
        try:
            yield from face.announce()
            exact = face.phase is Phase.WARMUP
            taken = yield from (self._exact() if exact else self.compressed())
            if taken:
                face.steps += 1
                if exact and warmup.wants(face.steps):
                    self._observe(face.power())
                face.start_compression()
            yield from face.over(taken=taken)
            return taken
        finally:
            self.engine.end_step()

    def _observe(self, power: tuple[float, float] | None) -> None:
        """Show the run to the automatic warm-up."""
        norm, beta2 = power or (None, 0.0)
        self.warmup.observe(self.face.steps, norm, self.face.learning_rate, beta2)

    def _exact(self) -> Task[bool]:
        face = self.face
        verdict = yield from face.agreed()
        if not (yield from face.average(verdict)):
            face.skip()
            return False
        face.exact_step()
        return True

    def begin(self) -> Task[Plan]:
        """A compressed step begins: everything that is known before its gradients are. Collective if anything has
        changed."""
        sends = self.sends
        if changes_unit(self.stepwise, self.engine.exchanges + 1):
            self.engine.feedback.reset()
        plan: Plan = yield from self.face.prepare(sends)
        return plan

    def ask_before_step(self, **said: bool) -> Task[Answers]:
        """Before a step that cannot be taken back: what all workers say of it, which send the same in it, or an error
        on all. Collective."""
        name, sends = f"{self.engine.name}.finite", str(self.sends)
        answers = yield from ask(self.engine.collectives, name, sends=sends, **said)
        answers.compare(STEP)
        return answers

    def compressed(self) -> Task[bool]:
        """A compressed step; whether it was taken. Collective."""
        engine, face = self.engine, self.face
        plan = yield from self.begin()
        averaged, gradients = face.start_exact(), face.own_gradients()
        try:
            engine.send_rest(gradients, plan)
            verdict = yield from face.agreed()
            moves = yield from engine.look(plan.rules)
            engine.release()
            finite = (yield from averaged) and verdict.finite
            taken = yield from engine.receive(gradients, plan, finite=finite, certain=verdict.certain)
        except BaseException:  # or the next step would send what is left of this one
            # Others may have taken the step, if `receive` has failed: their step counts differ in the next agreement.
            engine.cancel()
            raise
        if not taken:
            return False
        face.moved(plan.sends)
        face.exact_step()
        if moves or engine.first_gradients:
            face.awakened(engine.awaken(moves, plan.rules))
        return True

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
            face.steps += 1
            if self.stepped(frozen):
                taken = (yield from self.end_round("step", flush=rounds.freezes)) and taken
                if rounds.freezes:
                    yield from self.freeze(usable=taken)
            elif rounds.due:
                taken = (yield from self._exchange("step", rounds.take_over)) and taken
            return taken
        finally:
            self.engine.end_step()

    def stepped(self, frozen: Frozen) -> bool:
        """This worker has taken a step alone, or has passed over it; whether the round ends with it. Local."""
        tensors = self.rounds.tensors
        asks = self.rounds.freezing.happens and any(tensor.name not in frozen for tensor in tensors)
        own = self.face.learning_rates() if asks else {}
        self.rounds.follow(frozen)
        for tensor in tensors:
            if tensor.name in frozen:
                frozen[tensor.name].count_step(tensor)
            elif tensor.name in own:
                count(tensor, own[tensor.name], 1.0)
        ends: bool = self.rounds.stepped(self.face.steps, self.face.learning_rate)
        return ends

    def begin_round(self) -> Task[None]:
        """From the weights of now, which are the same on all workers. Collective."""
        face, rounds = self.face, self.rounds
        yield from face.agree("step", self.round_facts(begins=True))
        try:
            large, small = face.bind()
            frozen = face.frozen_rules()
            rules = [frozen.get(tensor.name, rounds.rule) for tensor in (*large, *small)]
            yield from rounds.begin(large, small, face.details(), rules)
        except BaseException:
            face.unbind()
            raise
        yield from face.began()

    def end_round(self, call: str, *, flush: bool = False) -> Task[bool]:
        """Whether the round was not lost; see ``Rounds.exchange``. Collective."""
        taken = yield from self._exchange(call, lambda: self.rounds.exchange(flush=flush))
        yield from self.face.ended()
        return taken

    def _exchange(self, call: str, exchange: Callable[[], Task[bool]]) -> Task[bool]:
        face, rounds, usable = self.face, self.rounds, False
        yield from face.pull()
        try:
            yield from face.agree(call, self.round_facts(begins=False))
        except Exception:
            rounds.cancel()
            raise
        try:
            usable = yield from exchange()
        except BaseException:
            self.engine.cancel()  # what was sent of an exchange that has not started as a whole
            raise
        finally:
            face.push(together=not rounds.under_way, usable=usable)
        return usable

    def round_facts(self, *, begins: bool) -> dict[str, object]:
        """What must be the same on all workers where a round begins, or ends. Local."""
        rounds, freezing = self.rounds, self.rounds.freezing
        what = "a round begins"
        if not begins:
            what = "a round ends, and second moments are frozen" if rounds.freezes else "a round ends"
        found: dict[str, object] = {} if begins else {"steps of this round": rounds.length}
        found |= {"local steps taken": self.face.steps, "what happens after these local steps": what}
        if freezing.happens and math.isfinite(freezing.peak):  # there was a step
            found["the learning rate's last rise"] = f"to {freezing.peak:g}, counted from step {freezing.peak_step}"
        return found

    def freeze(self, *, usable: bool) -> Task[None]:
        """Adam's second moments become those of all workers, and stay so, if those of all are ``usable``. The next step
        then begins a round. Collective."""
        engine, face, rounds = self.engine, self.face, self.rounds
        if (yield from ask(engine.collectives, f"{engine.name}.waits", waits=face.waits())).any("waits"):
            rounds.freezing.restart(face.steps)
            return
        moments: list[Moment] = face.second_moments()
        values = [m.variance / np.float32(1 - m.beta2 ** max(m.seen, 1)) for m in moments]
        gradients, own = [m.gradient for m in moments], [own_share(m.beta2, m.own, m.seen) for m in moments]
        infinite, name = not (all_finite(values) and all_finite(gradients)), f"{engine.name}.second"
        said = {"unusable": not usable, "infinite": usable and infinite}
        answers = yield from ask(engine.collectives, f"{name}.usable", **said)
        if answers.any("unusable") or answers.any("infinite"):
            rounds.freezing.put_off()
            if (found := answers.where("infinite")) and not self._has_warned:
                self._has_warned = True
                text = "Adam's second moments are not frozen yet: there are NaN or Inf in those of %s"
                engine.say(logging.WARNING, f"{text}. Until they are, each step ends a round", workers(found))
            return
        common = yield from second_moments(
            values, gradients, own, engine.recipe.block_size_for, engine.collectives, name, engine.traffic
        )
        for m, second in zip(moments, common, strict=True):
            face.freeze(m.of, second * np.float32(1 - m.beta2**m.count))
        face.unbind()

    def flush(self) -> Task[None]:
        """Bring all workers to the same weights, after steps that they have taken alone. Collective."""
        if self.rounds is None:
            plan = yield from self.face.prepare(Sends.DISPLACEMENT)
            yield from self.engine.flush(plan.rules)
        elif self.rounds.under_way:
            yield from self.end_round("flush", flush=True)

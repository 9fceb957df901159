"""Local steps: the exchange at the end of a round, of what each worker's own optimizer has moved.

Between two exchanges workers' weights differ; after each, all have the same, bit by bit. With a delay, an exchange goes
on while the next round's steps are taken: what is the same is then the anchor, from which each worker has moved on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from horovod_onebit import replicas
from horovod_onebit.averages import all_finite, start_mean
from horovod_onebit.engine import Engine, Plan
from horovod_onebit.errors import DesyncError, NonFiniteError, workers
from horovod_onebit.handshake import ask
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rules import Rule, Tensor, finish_step
from horovod_onebit.rules.frozen import FrozenAdam
from horovod_onebit.rules.local import Delta, forget_steps
from horovod_onebit.schedule import Local, Sends
from horovod_onebit.stats import allreduce_bytes
from horovod_onebit.tasks import Task
from horovod_onebit.warmup import NEVER, AfterRise

logger = logging.getLogger("horovod_onebit")


@dataclass(frozen=True)
class _UnderWay:
    """An exchange that was started and has not arrived.

    Attributes:
        weights: by number of the large tensor, the weights that were sent; they stay as they are until it has arrived.
        means: waits for the means of the small tensors.
        skipped: the workers that have skipped a step of the round, where that is an error.
    """

    plan: Plan
    weights: Mapping[int, Array]
    means: Task[list[Array]]
    skipped: Sequence[int]


class Rounds:
    """The rounds of one worker.

    ``begin`` says which tensors there are; then, after each step that the worker has taken alone, ``stepped``, and
    ``exchange`` where it says that the round ends, or at any time; ``take_over`` where an exchange is ``due``. What is
    collective is a task.

    Attributes:
        large, small: the tensors, whose ``weight`` is this worker's own; small ones are averaged exactly. Their
            ``anchor`` is what all workers have in common: all exchanges that have arrived.
        length: steps of this round so far.
        freezing: when the optimizer's second moments are to be frozen.
        freezes: whether the optimizer's second moments are to be frozen now that the round has ended.
    """

    def __init__(self, engine: Engine, schedule: Local, freezing: AfterRise) -> None:
        self.engine = engine
        self.schedule = schedule
        self.freezing = freezing
        self.freezes = False
        self.rule = Delta(schedule.momentum, delay=schedule.delay)
        engine.subject = "weights after local steps"
        self.large: list[Tensor] = []
        self.small: list[Tensor] = []
        self.length = 0
        self._elements = 0  # of all tensors
        self._common: list[Tensor] = []  # of the small tensors; of the large ones, the engine has them
        self._rules: list[Rule] = []  # by tensor, first of the large ones
        self._first = False  # whether moments will be frozen, and are not
        self._under_way: _UnderWay | None = None
        self._skipped = False  # a step of this round
        self._details: Sequence[str] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.large, *self.small]

    def begin(
        self,
        large: Sequence[Tensor],
        small: Sequence[Tensor],
        details: Sequence[str] | None,
        rules: Sequence[Rule],
    ) -> Task[None]:
        """Begin a round with the weights that these tensors have now. Collective.

        ``rules`` are those that end the round, by tensor. Raises ``DesyncError`` on all workers if they do not have the
        same weights. For ``details`` see ``Engine.prepare``.
        """
        self._rules = list(rules)
        frozen = any(isinstance(rule, FrozenAdam) for rule in self._rules)
        self._first = self.freezing.happens and (not frozen or self.freezing.steps == NEVER)
        self.large, self.small, self.length, self._skipped = [], [], 0, False  # until all is well
        self._elements, self._under_way, self._details = 0, None, details
        for tensor in (*large, *small):
            self.engine.context.kernels.copy(tensor.weight, tensor.anchor)
            forget_steps(tensor)
        try:
            yield from self._check_replicas([*large, *small], f"{self.engine.name}.begin")
        except DesyncError as error:
            text = "Local steps begin with the same weights on all workers; call flush() before you load or broadcast"
            raise DesyncError(f"{error}. {text} an optimizer's state in the middle of a round") from None
        yield from self.replace(large, small)

    def follow(self, rules: Mapping[str, Rule]) -> None:
        """A step was taken by these ``rules``, by name of the tensors whose second moment is frozen: the round ends by
        them, too, whose hyperparameters may have been changed since it began. Local."""
        if rules:
            self._rules = [rules.get(t.name, rule) for t, rule in zip(self.tensors, self._rules, strict=True)]

    def replace(self, large: Sequence[Tensor], small: Sequence[Tensor]) -> Task[None]:
        """The same tensors in another memory. Local; collective when a round begins."""
        common = [_common(tensor) for tensor in large]
        yield from self.engine.prepare(common, self._rules[: len(common)], self._details)
        self.large, self.small = list(large), list(small)
        self._elements = sum(tensor.weight.size for tensor in self.tensors)
        self._common = [_common(tensor) for tensor in small]

    @property
    def under_way(self) -> bool:
        """Whether workers have taken steps that were not exchanged, or an exchange has not arrived yet."""
        return bool(self.large or self.small) and (self.length > 0 or self.hidden)

    @property
    def hidden(self) -> bool:
        """Whether an exchange is under way. Weights then differ, and anchors are the same."""
        return self._under_way is not None

    @property
    def due(self) -> bool:
        """Whether the exchange that is under way is to be taken over now."""
        return self.hidden and self.length >= self.schedule.delay

    def check_replicas(self) -> Task[None]:
        """Raise ``DesyncError`` on all workers if what they have in common is not the same. Collective."""
        return self._check_replicas(self.tensors, f"{self.engine.name}.replicas")

    def _check_replicas(self, tensors: Sequence[Tensor], name: str) -> Task[None]:
        host = self.engine.context.kernels.host
        found = {tensor.name: replicas.checksum(host(tensor.anchor)) for tensor in tensors}
        return replicas.check(found, self.engine.collectives, name)

    def stepped(self, step: int, learning_rate: float) -> bool:
        """This worker has taken step number ``step`` (from 1) alone; whether the round ends with it."""
        self.length += 1
        due = self.freezing.reached(step, learning_rate)
        self.freezes = due and self._first
        if self.freezes or self.schedule.ends_round(step, first=self._first):
            return True
        if self.hidden:
            self.engine.progress()
        self.engine.traffic.add(0, allreduce_bytes(4 * self._elements, self.engine.collectives.size))
        return False

    def skip(self) -> None:
        """This worker has passed over a step, alone: its gradients were not finite. Local."""
        self._skipped = True
        level = self.engine.count_skipped()
        text = "NaN or Inf in the gradients of worker %d: it skips a step (%d so far)"
        logger.log(level, text, self.engine.collectives.rank, self.engine.skipped)

    def exchange(self, *, flush: bool = False) -> Task[bool]:
        """End the round. Collective. All workers have the same weights afterwards; or, if the schedule has a delay and
        without ``flush``, the same anchors: the exchange before this one was then taken over, and this one is under
        way.

        Returns False if a round was lost, because weights of some worker were NaN or Inf: all workers are then back
        where they last had the same, and what the others have moved travels with the next one. Raises
        ``NonFiniteError`` instead if the recipe says so, and where a worker has skipped a step, too.
        """
        length, self.length = self.length, 0
        hidden = self.schedule.delay > 0 and not flush
        taken = yield from self._arrive(stepped=length > 0)
        if length or not taken:
            try:
                yield from self._start(hidden=hidden)
            except BaseException:
                self.length = max(length, 1)  # the next exchange brings what was moved
                raise
        return (hidden or (yield from self._arrive())) and taken

    def take_over(self) -> Task[bool]:
        """Wait for the exchange that is under way, and take it over in the middle of a round. Collective; what is
        returned and what is raised are as with ``exchange``."""
        return (yield from self._arrive(stepped=True))

    def cancel(self, *, by_all: bool = False) -> None:
        """The workers do not agree: forget the exchange that is under way, all together (``by_all``) or this one alone.
        What it was to bring goes with the next one. Local."""
        self.engine.cancel(by_all=by_all)
        if (sent := self._under_way) is not None:
            self._under_way, self.length = None, max(self.length, 1)
            self._skipped |= self.engine.collectives.rank in sent.skipped

    def _start(self, *, hidden: bool) -> Task[None]:
        """Send what this worker has moved. Collective."""
        engine = self.engine
        skipped = yield from self._who_skipped()
        weights = {i: tensor.weight for i, tensor in enumerate(self.large)}
        if hidden:
            for tensor in self.tensors:
                engine.context.kernels.copy(tensor.weight, tensor.sent)
            weights = {i: _sent(tensor) for i, tensor in enumerate(self.large)}
        plan = engine.plan(Sends.CONTRIBUTION, self._rules[: len(self.large)])
        moved = self._moved(self.small, self._shares())
        means = start_mean(moved, engine.collectives, f"{engine.name}.small", engine.traffic)
        engine.send_rest(weights, plan)
        engine.release()
        self._under_way = _UnderWay(plan, weights, means, skipped)

    def _arrive(self, *, stepped: bool = False) -> Task[bool]:
        """Wait for the exchange that is under way, if there is one, and take it over; ``stepped`` since it was sent.
        Collective; returns and raises as ``exchange``."""
        engine, sent = self.engine, self._under_way
        if sent is None:
            return True
        try:
            means = yield from sent.means
            finite = not sent.skipped and all_finite(means)
            taken = yield from engine.receive(sent.weights, sent.plan, finite=finite)
        except NonFiniteError as error:
            self.fold()
            where = f"the gradients of {workers(sent.skipped)}" if sent.skipped else "the weights of some worker"
            raise NonFiniteError(
                f"NaN or Inf in {where} in this round; all workers are back at its beginning. Use on_nonfinite='skip' "
                "to pass over such steps"
            ) from error
        except BaseException:
            self.fold()
            raise
        if not taken:
            self.fold()
            return False
        self._under_way = None
        rules = self._rules[len(self.large) :]
        for rule, tensor, mean, share in zip(rules, self._common, means, self._shares(), strict=True):
            engine.context.kernels.move(*rule.motion(tensor, engine.context), tensor.arrays(mean))
            left = np.float32(1 - share) * engine.context.kernels.host(tensor.residual) if share < 1 else 0.0
            engine.context.kernels.write(tensor.residual, left)
        engine.lose(rules, self._common)
        finish_step(rules, self._common, engine.context)
        with engine.context.kernels.batch():
            for tensor in self.tensors:
                self._follow(tensor, stepped=stepped)
        return True

    def _follow(self, tensor: Tensor, *, stepped: bool) -> None:
        """The anchor has moved: so does the weight, by as much more than it had when it was sent."""
        kernels = self.engine.context.kernels
        if stepped:
            kernels.move(*self.rule.catch_up(), tensor.arrays(tensor.sent))
        else:
            kernels.copy(tensor.anchor, tensor.weight)

    def _shares(self) -> list[float]:
        """How much of each small tensor's residuals is sent: what it has moved, of rounds that were lost."""
        rules = self._rules[len(self.large) :]
        return [self.engine.share(rule, tensor) for rule, tensor in zip(rules, self._common, strict=True)]

    def _who_skipped(self) -> Task[list[int]]:
        """The workers that have skipped a step, where that is an error. Collective then."""
        skipped, self._skipped = self._skipped, False
        if self.engine.recipe.on_nonfinite != "raise":
            return []
        engine = self.engine
        return (yield from ask(engine.collectives, f"{engine.name}.skipped", skipped=skipped)).where("skipped")

    def _moved(self, tensors: Sequence[Tensor], shares: Sequence[float]) -> list[Array]:
        """What this worker has moved since the anchor, and ``shares`` of its residuals, in host memory."""
        host, found = self.engine.context.kernels.host, list[Array]()
        with np.errstate(invalid="ignore", over="ignore"):
            for tensor, share in zip(tensors, shares, strict=True):
                found.append(host(tensor.anchor) - host(tensor.weight) + np.float32(share) * host(tensor.residual))
        return found

    def fold(self) -> None:
        """Go back to the anchor: the beginning of the round, or of the one under way. Local.

        What this worker has moved since becomes residuals, if it is finite. Where a host compresses as one, it is lost:
        the host's other workers know nothing of it.
        """
        if self._under_way is not None:
            self.engine.cancel()
            self._under_way = None
        host, write = self.engine.context.kernels.host, self.engine.context.kernels.write
        moved = self._moved(self.tensors, [1.0] * len(self.tensors))
        alone = self.engine.residual_layout is None or self.engine.residual_layout.encodes is None
        keeps = alone and all_finite(moved)
        for rule, tensor, residual in zip(self._rules, self.tensors, moved, strict=True):
            if keeps:
                write(tensor.residual, residual)
                rates = self.engine.feedback.rates
                rates[tensor.name] = rates.get(tensor.name, 0.0) + rule.local_rates(tensor)
            write(tensor.weight, host(tensor.anchor))
            forget_steps(tensor)


def _common(tensor: Tensor) -> Tensor:
    """``tensor`` with the anchor for its weight: what an exchange moves."""
    assert tensor.anchor is not None
    return replace(tensor, weight=tensor.anchor)


def _sent(tensor: Tensor) -> Array:
    assert tensor.sent is not None
    return tensor.sent

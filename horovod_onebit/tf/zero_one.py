"""``schedule=ZeroOne(...)``, or another ``Stepwise``, for Keras 3: workers' weights may differ between exchanges.

What 0/1 Adam keeps besides moments is in variables of the optimizer (``rules.ZeroOneAdapter``), so that saved models go
on from the middle of an interval. Nothing in a graph reads or writes them: the host functions do, which run in order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from horovod_onebit.averages import all_finite
from horovod_onebit.errors import ConfigurationError, workers
from horovod_onebit.handshake import Verdict
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rules import Rule, Tensor, zero_one_adam
from horovod_onebit.rules.local import COUNT
from horovod_onebit.schedule import Sends
from horovod_onebit.tasks import Task, run
from horovod_onebit.tf.compressor import Compressor, Now, Progress, Values, changed_alone
from horovod_onebit.tf.graph import assign, flat_view, path_of
from horovod_onebit.tf.meeting import announce
from horovod_onebit.tf.rules import Adapter
from horovod_onebit.tf.wrapping import Wrapping


@dataclass(frozen=True)
class _Step(Now):
    """A whole step.

    Attributes:
        grads: the compressed variables', flat, clipped by their values.
        edited: the variables whose moments somebody has changed since the last step.
        finite: whether the exact variables' averages are.
    """

    grads: Sequence[Array]
    edited: Sequence[int]
    finite: bool


class _GivenUp(Exception):
    """All workers give up the step: its moments were set since the last one."""


class ZeroOneSteps(Compressor):
    """The steps of one Keras ``DistributedOptimizer`` by 0/1 Adam, after its warm-up."""

    in_one_piece = True  # some steps send nothing, others exact gradients
    in_host_memory = True  # where what it keeps besides the moments is

    def __init__(self, optimizer: Any, adapter: Adapter, wrapping: Wrapping, name: str) -> None:
        super().__init__(optimizer, adapter, wrapping, name)
        self._done: tuple[bool, Sequence[float]] = False, ()  # the last step: whether it was taken, its factors

    def begin_step(
        self, indices: tuple[int, ...], values: Values, progress: Progress, sizes: Sequence[int],
        grads: Sequence[Array], squares: Array, *, finite: bool,
    ) -> Task[None]:  # fmt: skip
        """Take the whole step."""
        engine, optimizer, taken = self.engine, self.optimizer, False
        engine.exchanges = int(optimizer._tried.value)
        try:
            self._check_departed(indices)
            self.count_averages(sum(sizes))
            factors = yield from self._clip_factors(squares, len(indices) + len(sizes))
            edited = self._edited(indices, values, progress)
            own = [self.clipped(grad) for grad in grads]
            self._now = _Step(indices, values, progress, factors, own, edited, finite)
            with suppress(_GivenUp):
                taken = yield from self.driver.compressed()
            self._done = taken, factors
        finally:
            self._now = None
            optimizer._tried.assign(engine.exchanges)
            engine.end_step()
        if edited:
            self.moments.say(edited)
            self.begin_again(edited)

    def _check_departed(self, indices: Sequence[int]) -> None:
        """Raise if a step of the variables ``indices`` lacks one that local steps have moved, which the next exchange
        would not bring together; alike on all workers."""
        lacking = [i for i in self.departed if i not in indices]
        if lacking:
            name = path_of(self.optimizer._trainable_variables[lacking[0]])
            raise ConfigurationError(
                f"the step lacks {name!r}, which local steps have moved since the last exchange: call "
                "optimizer.flush() on all workers before what is trained changes in the middle of an interval (or "
                "now, and continue)"
            )

    # -- what the driver asks of a face: see ``driver.Compresses`` ----------------------------------------------------

    @property
    def _step(self) -> _Step:
        assert isinstance(self._now, _Step)
        return self._now

    def start_exact(self) -> Task[bool]:
        yield from ()
        return self._step.finite  # the graph has averaged them

    def own_gradients(self) -> Mapping[int, Array]:
        return dict(enumerate(self._step.grads))

    def agreed(self) -> Task[Verdict]:
        """The graph has asked whether the workers mean the same. Asks whether all workers' gradients are finite, too,
        and on which of them moments were edited: a local step sends nothing else that would tell, and cannot be taken
        back."""
        step, engine, size = self._step, self.engine, self.collectives.size
        bad = not all_finite(step.grads)
        start, decoded = time.perf_counter(), engine.times.decode
        # A whole round, messages and all.
        answers = yield from self.driver.ask_before_step(bad=bad, edited=bool(step.edited))
        engine.waited(start, decoded)
        on = answers.where("edited")
        if not on:
            return Verdict(finite=not answers.any("bad"))
        engine.exchanges += 1
        if len(on) < size:
            raise changed_alone(workers(on), "the others")
        if self.departed:
            raise ConfigurationError(
                "the optimizer's state was changed after local steps, when workers' weights differ: call "
                "optimizer.flush() on all workers before the change (or now, and continue)"
            )
        raise _GivenUp

    def moved(self, sends: Sends) -> None:
        self._keep(sends)
        self._mark(self._step.indices, self._step.progress)

    def exact_step(self) -> None:
        """The graph takes it."""

    def warm_up_again(self) -> None:
        super().warm_up_again()
        optimizer = self.optimizer
        optimizer._tried.assign(0)
        optimizer._counted.assign(np.zeros(optimizer._counted.shape, np.float32))

    def _mark(self, indices: tuple[int, ...], progress: Progress) -> None:
        """A step was taken: its second moments are those that the next one expects."""
        marks, changed = dict[int, int](), np.array_equal(np.array(self.optimizer._seen.value), progress.seen)
        for i, tensor in zip(indices, self.tensors, strict=True):
            if not progress.marks[i] or not changed:
                marks[i] = self.moments.mark(tensor.variance)
                self.moments.hold(i, tensor.variance)
        self.moments.freeze(marks)

    def conclude(self, *, finite: bool) -> tuple[bool, Array, list[Tensor]]:
        taken, factors = self._done
        return taken, np.array(factors[len(self.indices) :], np.float32), self.tensors

    def _rules(self, now: Now, sends: Sends) -> list[Rule]:
        if sends is Sends.MEAN:  # Keras's epsilon goes by the second moment as it will be
            now = replace(now, progress=replace(now.progress, seen=now.progress.counted + 1))
        rules = super()._rules(now, sends)
        made = {id(rule): zero_one_adam.of(rule, sends) for rule in rules}  # type: ignore[arg-type]
        return [made[id(rule)] for rule in rules]

    def _load(self, values: Values, rules: Sequence[Any], progress: Progress) -> None:
        super()._load(values, rules, progress)
        counted = np.array(self.optimizer._counted.value)
        for i, tensor, rule in zip(self.indices, self.tensors, rules, strict=True):
            tensor.layer = counted[i]
            tensor.weight, tensor.momentum = self._memory.copy(tensor.weight), self._memory.copy(tensor.momentum)
            if _departs(counted[i], rule.sends):
                tensor.anchor = self._memory.copy(tensor.weight)
            else:
                tensor.anchor = flat_view(self.optimizer._anchors[i])
            if rule.sends is Sends.MEAN:
                assert tensor.variance is not None
                tensor.variance = self._memory.copy(tensor.variance)

    def _keep(self, sends: Sends) -> None:
        """A step that ``sends`` this was taken: keep what is neither weight nor momentum."""
        optimizer = self.optimizer
        counted = np.array(optimizer._counted.value)
        for i, tensor in zip(self.indices, self.tensors, strict=True):
            if _departs(counted[i], sends):
                assign(optimizer._anchors[i], tensor.anchor)
            if sends is Sends.MEAN:
                assign(self.adapter.variance(optimizer, i), tensor.variance)
            counted[i] = tensor.layer
        optimizer._counted.assign(counted)
        if sends is Sends.MEAN:
            seen = np.array(optimizer._seen.value)
            members = list(self.indices)
            seen[members] = np.abs(seen[members]) + 1
            optimizer._seen.assign(seen)

    @property
    def departed(self) -> tuple[int, ...]:
        """The numbers of the variables that local steps have moved since the last exchange: alike on all workers."""
        if not self.optimizer.built:
            return ()
        return tuple(np.flatnonzero(np.array(self.optimizer._counted.value)[:, COUNT]).tolist())

    @property
    def pending(self) -> bool:
        return bool(self.departed)

    def flush(self) -> None:
        """Bring all workers to the same weights, exactly, if the last step was a local one. Collective then; eager."""
        self.settle()
        indices = self.departed  # alike on all: the workers meet in each step
        if indices:
            announce("flush", self.process_set, f"{self.engine.name} {int(self.optimizer._tried.value)} {indices}")
            run(self._flush(indices))

    def _flush(self, indices: tuple[int, ...]) -> Task[None]:
        engine, optimizer, adapter = self.engine, self.optimizer, self.adapter
        variables = [optimizer._trainable_variables[i] for i in indices]
        momenta = [adapter.momentum(optimizer, i) for i in indices]
        variances = [flat_view(adapter.variance(optimizer, i)) for i in indices]
        seen, marks = np.array(optimizer._seen.value), np.array(optimizer._marks.value)
        progress = Progress(float(optimizer.learning_rate), int(optimizer._iterations.value), seen, marks)
        values = Values([flat_view(v) for v in variables], [flat_view(m) for m in momenta], variances)
        engine.exchanges = int(optimizer._tried.value)
        self._now = Now(indices, values, progress, [1.0] * len(indices))
        try:
            yield from self.driver.flush()
        finally:
            self._now = None
        self._keep(Sends.DISPLACEMENT)
        for variable, momentum, tensor in zip(variables, momenta, self.tensors, strict=True):
            assign(variable, tensor.weight)
            assign(momentum, tensor.momentum)


def _departs(counted: Array, sends: Sends) -> bool:
    """Whether a step that ``sends`` this is the first one alone since the last exchange."""
    return sends.alone and bool(counted[COUNT] == 0)

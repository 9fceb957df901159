"""The workers' mean gradient in few bits (``rules.gradient``), in place of an exact mean: an engine of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from horovod_onebit import codecs, exchange
from horovod_onebit.averages import all_finite, start_half_mean, start_mean
from horovod_onebit.engine import Engine, Plan, part_of
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.exchange import Lane
from horovod_onebit.feedback import ErrorFeedback
from horovod_onebit.kernels import reference
from horovod_onebit.kernels.reference import Array, Arrays
from horovod_onebit.layout import Bucket
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Tensor, Use
from horovod_onebit.rules.gradient import Gradient
from horovod_onebit.schedule import Sends
from horovod_onebit.tasks import Task
from horovod_onebit.warmup import EXACT_FIRST, FixedWarmup, Warmup
from horovod_onebit.world import ResidualLayout

CODECS = {"two_bit": "logistic_two", "three_bit": "logistic_three", "four_bit": "logistic_four"}
"""By the recipe's ``warmup``."""
SERVER = "logistic_four"
"""What servers of a two-stage exchange send: it must not be coarser than what they get."""
BLOCK = 256
"""Elements that share a scale, at most. Rows of an embedding and layers' inputs differ in how large their gradients are
beside their units, and what is far from its block's root mean square arrives too small or in pieces."""


def codes(recipe: Recipe, warmup: Warmup) -> bool:
    """Whether gradients of the warm-up are averaged in few bits: not in one of ``EXACT_FIRST`` steps at most."""
    return recipe.warmup != "exact" and not (isinstance(warmup, FixedWarmup) and warmup.steps <= EXACT_FIRST)


def own_recipe(recipe: Recipe) -> Recipe:
    """That of the gradients, in a run of ``recipe``. Levels are meant for the root mean square; with it, what a block
    loses is less than all of it, so that errors shrink."""
    if recipe.warmup not in CODECS:
        raise ConfigurationError(f"warmup={recipe.warmup!r}: expected one of {', '.join(map(repr, CODECS))}")
    block = min(recipe.block_size or BLOCK, BLOCK)
    codec = CODECS[recipe.warmup]
    return replace(recipe, space="update", scale="rms", block_size=block, codec=codec, server_codec=SERVER)


Learned = dict[str, Any]
"""What is saved of the gradients of one worker: their ``units``, flat float32 by name; what each has ``seen``, which is
the number of averages, and ``start`` of this step and the next (``rules.gradient``); and ``Residuals``."""


def _starts(tensor: Tensor) -> Array:
    assert tensor.layer is not None
    return tensor.layer


class _Engine(Engine):
    def say_skipped(self, where: str) -> None:
        """The step is the caller's, who says so."""

    def clear(self) -> None:
        """Keep nothing, neither memory nor servers' errors. Local."""
        self.cancel(restore=False)
        self.discard_servers()
        self.tensors, self._messages = [], []
        self.layout = self.residual_layout = None
        self.exchange = exchange.find("direct")(self.context, self.collectives, self.feedback, [], 0)


class CodedMean:
    """Means of gradients; see ``rules.gradient`` for their ``Tensor``.

    Attributes:
        engine: has the residuals, which are in units of D. Its traffic and times are those of the run.
    """

    def __init__(
        self, run: Engine, *, divides: bool = False, kernels: str = "cpu", lane: Lane | None = None, half: bool = False
    ) -> None:
        """The optimizer ``divides`` by a second moment of each element; see ``rules.gradient``. With ``half``, exact
        means travel as float16."""
        recipe, name = own_recipe(run.recipe), f"{run.name}.coded"
        what = f"mean gradients in {codecs.find(recipe.codec).bits} bits an element"
        self.engine = _Engine(recipe, run.collectives, kernels=kernels, name=name, lane=lane, what=what)
        self.engine.traffic, self.engine.times = run.traffic, run.times
        self._rule = Gradient(divides)
        self._start_mean = start_half_mean if half else start_mean
        self._tensors: dict[str, Tensor] = {}

    def tensor(self, name: str, size: int, zeros: Callable[[int], Any] | None = None) -> Tensor:
        """That of the gradient ``name``, which has so many elements; nothing is known of it at first.

        ``zeros`` makes so many float32 zeros in the memory of a GPU, where its arrays are to be; they move if they are
        in the other place.
        """
        found = self._tensors.get(name)
        if found is not None and found.weight.size != size:  # the parameter has another shape now
            self.forget([name])
            found = None
        if found is None or isinstance(found.weight, np.ndarray) != (zeros is None):
            if zeros is not None:
                self.engine.use_kernels("cuda")
            make = zeros or reference.zeros
            residual = self.engine.feedback.residual(name, size, zeros)
            moved = self._tensors[name] = Tensor(name, make(size), residual, make(size), residual)
            self._rule.init(moved)
            if found is not None:
                self.engine.context.kernels.write(moved.variance, self.engine.context.kernels.host(found.variance))
                moved.layer, moved.step, moved.variance_steps = found.layer, found.step, found.variance_steps
        return self._tensors[name]

    def observe(self, tensors: Sequence[Tensor], means: Sequence[Array]) -> None:
        """Take notice of the exact ``means`` of gradients, flat float32, none of zeros alone: nothing can be learned of
        those. Local; on all workers alike."""
        self._rule.observe(tensors, means, self.engine.context)

    @property
    def fresh(self) -> bool:
        """Whether nothing is known of any gradient."""
        return not self._tensors

    def ready(self, names: Iterable[str]) -> list[Tensor]:
        """Of the gradients ``names``, in their order, those whose next average is in few bits. Local."""
        known = [self._tensors[name] for name in names if name in self._tensors]
        return [tensor for tensor in known if tensor.variance_steps >= EXACT_FIRST]

    @property
    def elements(self) -> int:
        """Those of the gradients whose next mean is in few bits."""
        return sum(tensor.weight.size for tensor in self.ready(self._tensors))

    def average(
        self, grads: Mapping[str, Array], others: Sequence[Array] = ()
    ) -> Task[tuple[dict[str, Array], list[Array]] | None]:
        """The workers' means of ``grads``, flat float32, by name, and of ``others``. Collective.

        The means of ``others`` are exact, or in float16 with ``half``, and so are those of gradients of which too
        little is known yet. The next call overwrites the arrays of the rest. None on all workers, and nothing has
        changed, if something of some worker is not finite.
        """
        units = {name: self.tensor(name, grad.size) for name, grad in grads.items()}
        ready = self.ready(units)
        learning = [name for name, unit in units.items() if unit.variance_steps < EXACT_FIRST]
        own, means = [*(grads[name] for name in learning), *others], list[Array]()
        beside = self._exact(own, means)
        if ready:
            finite = yield from self.mean(ready, [grads[tensor.name] for tensor in ready], beside)
        else:
            finite = yield from beside
        if not finite:
            return None
        found = dict(zip(learning, means, strict=False))
        told = {name: mean for name, mean in found.items() if mean.any()}
        self.observe([units[name] for name in told], list(told.values()))
        return found | {tensor.name: tensor.weight for tensor in ready}, means[len(learning) :]

    def _exact(self, own: Sequence[Array], means: list[Array]) -> Task[bool]:
        """Start the exact means of ``own``; the task puts them into ``means``, and says whether they are finite."""
        engine = self.engine
        arriving = self._start_mean(own, engine.collectives, f"{engine.name}.exact", engine.traffic)

        def arrived() -> Task[bool]:
            means[:] = yield from arriving
            return all_finite(means)

        return arrived()

    def mean(
        self, tensors: Sequence[Tensor], grads: Sequence[Array], beside: Task[bool], *, certain: bool = False
    ) -> Task[bool]:
        """Put the workers' means of ``grads``, flat float32, into the weights of ``tensors``, which are the same on all
        workers. False on all, and nothing has changed, if those of some worker are not finite, or if what is averaged
        ``beside`` them is not. ``certain``: those of all are (``Engine.receive``). Collective."""
        engine, rules, numbered = self.engine, [self._rule] * len(tensors), dict(enumerate(grads))
        engine.exchanges = max(tensor.variance_steps for tensor in tensors)  # on new workers, too
        yield from engine.prepare(tensors, rules)
        plan = engine.plan(Sends.CONTRIBUTION, rules)
        engine.renew_lane()  # the workers have agreed before
        served = engine.exchange.served()
        keeps = served and not self._rule.divides  # of what servers lose
        rescales = {tensor.name: self._rule.rescale(tensor) for tensor in tensors} if keeps else {}
        try:
            engine.send_rest(numbered, plan)
            moves = yield from engine.look(rules)
            engine.release()
            finite = yield from beside
            taken = yield from engine.receive(numbered, plan, finite=finite, certain=certain)
        except BaseException:  # the caller may close this task, too
            engine.cancel()
            raise
        if not taken:
            return False
        if keeps:
            self._rescale(served, rescales, tensors)
        else:
            engine.feedback.reset(served)
        engine.take_second_moments(engine.awaken(moves, rules))
        return True

    def _rescale(self, served: Mapping[str, Bucket], rescales: Mapping[str, Use], tensors: Sequence[Tensor]) -> None:
        """After a step: the errors of what is ``served``, which are in host memory, are in units of the new D."""
        kernels, feedback = self.engine.context.kernels, self.engine.feedback
        for name, bucket in served.items():
            error, at = feedback.residual(name, bucket.size), 0
            for piece in bucket.pieces:
                part, end = part_of(tensors, piece), at + piece.stop - piece.start
                arrays = Arrays(None, error[at:end], kernels.host(part.variance), kernels.host(part.weight), None)
                kernels.move(*rescales[part.name], arrays)
                at = end

    def begin(self, tensors: Sequence[Tensor]) -> Plan | None:
        """What ``engine.send`` may send of the next ``mean`` of ``tensors`` before that is called; None if they are not
        those of the last one. Local."""
        engine = self.engine
        same = list(map(id, engine.tensors)) == list(map(id, tensors)) and engine.layout is not None
        if not same or engine.workers_changed:
            return None
        engine.exchanges = max(tensor.variance_steps for tensor in tensors)
        return engine.plan(Sends.CONTRIBUTION, [self._rule] * len(tensors))

    def recall(self, grads: Sequence[Array]) -> Task[None]:
        """Take back what some workers have sent before ``mean``, of the tensors of the last one, whose gradients are
        ``grads``; nothing if there was none. Collective."""
        if (plan := self.begin(self.engine.tensors)) is not None:
            yield from self.engine.recall(dict(enumerate(grads)), plan)

    def state(self) -> Learned | None:
        """What was learned, which is the same on all workers, and this worker's residuals, to be saved; None if nothing
        is known. The arrays are copies. Local."""
        if self.fresh:
            return None
        host = self.engine.context.kernels.host
        units = {name: np.array(host(tensor.variance)) for name, tensor in self._tensors.items()}
        seen = {name: [t.variance_steps, *map(float, _starts(t))] for name, t in self._tensors.items()}
        sent = {} if self.engine.residual_layout is not None else {"divisor": None}
        return {"units": units, "seen": seen, **self.engine.residuals(), **sent}

    def load(self, saved: Learned | None) -> None:
        """Continue from what ``state`` of the same worker gave. Local; on all workers alike."""
        self.forget()
        if saved is None:
            return
        for name, values in saved["units"].items():
            tensor = self.tensor(name, values.size)
            self.engine.context.kernels.write(tensor.variance, values)
            steps, *starts = saved["seen"][name]
            tensor.step = tensor.variance_steps = int(steps)
            _starts(tensor)[:] = starts
        for name, values in saved["feedback"].items():
            self.engine.feedback.put(name, values)
        self.engine.residuals_replaced(ResidualLayout.saved(saved))

    def check(self, saved: Learned | None, sizes: Mapping[str, int]) -> None:
        """Raise ``ConfigurationError`` unless ``load`` can take over ``saved``. ``sizes``: of all gradients that there
        may be, the number of elements. Local."""
        if saved is None:
            return
        for what in ("units", "feedback"):
            ErrorFeedback().check(saved[what], sizes, "gradients in few bits, of tensors")
        if saved["units"].keys() != saved["seen"].keys() or any(len(seen) != 3 for seen in saved["seen"].values()):
            raise ConfigurationError("what was learned of gradients in few bits is not complete: the file is damaged")

    def forget_world(self) -> None:
        """There are other workers now, some of which know nothing: all begin anew. Local."""
        self.forget()
        self.engine.forget_world()

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Of ``names``, or of all, nothing is known any more. Local; on all workers alike."""
        for name in list(self._tensors) if names is None else names:
            if self._tensors.pop(name, None) is not None:
                self.engine.feedback.discard(name)
        if not self._tensors:
            self.engine.clear()

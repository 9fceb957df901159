"""The compressed step of the Keras face: one run of the engine, whatever the number of variables.

Variables are *exact* while they are small (or not float32): in every step their gradients are averaged in one allreduce
and the wrapped optimizer updates them, in the graph. All others are *compressed*: after the warm-up the engine updates
them here.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from horovod_onebit import run_state
from horovod_onebit.ahead import Lent, compile_steps
from horovod_onebit.averages import mean_norms
from horovod_onebit.checks import matching
from horovod_onebit.coded import CodedMean, codes, own_recipe
from horovod_onebit.driver import Driver, Prepares, Together
from horovod_onebit.engine import Engine, Plan
from horovod_onebit.errors import ConfigurationError, DesyncError, workers
from horovod_onebit.feedback import kind
from horovod_onebit.handshake import Verdict
from horovod_onebit.kernels import reference
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rest import Moves
from horovod_onebit.rules import Rule, Tensor
from horovod_onebit.rules.gradient import Gradient
from horovod_onebit.run_state import RunState
from horovod_onebit.schedule import Sends
from horovod_onebit.stats import Stats, allreduce_bytes
from horovod_onebit.tasks import Task
from horovod_onebit.tf.collectives import Errand, HorovodCollectives, plain
from horovod_onebit.tf.graph import HostFunctions, path_of
from horovod_onebit.tf.moments import Moments
from horovod_onebit.tf.place import Place, Placement
from horovod_onebit.tf.rules import Adapter, Options
from horovod_onebit.tf.wrapping import Wrapping
from horovod_onebit.warmup import FOREVER, AutoWarmup, FixedWarmup, Phase, unbiased
from horovod_onebit.world import Residuals

T = TypeVar("T")
NOT_OPTIONS = {"name", "learning_rate"}
"""Of an optimizer's configuration: what Keras makes up, and what has a value of its own in each step."""


@dataclass(frozen=True)
class Progress:
    """How far the run is when a step begins."""

    learning_rate: float
    steps: int
    seen: NDArray[np.int64]  # by variable of the optimizer, how many gradients its second moment has seen
    marks: NDArray[np.int64]  # by variable, 0 if it has taken no compressed step

    @property
    def counted(self) -> NDArray[np.int64]:
        """``seen`` as compressed steps count: gradients of zeros, too, which ``Moments`` counts as negative."""
        return np.abs(self.seen)


@dataclass(frozen=True)
class Values:
    """What a compressed step reads of variables, in their order: flat float32 arrays, or None where there is none.

    They share memory with TensorFlow's tensors, which are values that others may hold: they are never written to.
    """

    weights: Sequence[Array]
    momenta: Sequence[Array | None]
    variances: Sequence[Array | None]


@dataclass(frozen=True)
class Now:
    """The compressed step in progress. ``factors`` clips the gradients: first those of the variables ``indices``, then
    those of the exact ones."""

    indices: tuple[int, ...]
    values: Values
    progress: Progress
    factors: Sequence[float]


@dataclass(kw_only=True)
class Leaving:
    """A step that was begun, and whose messages leave by sections: one in which gradients are averaged in few bits.

    Attributes:
        places: by number of the engine's tensor, which of the step's variables it is of.
        contributed: what is encoded of a gradient.
        grads: the gradients that are there, flat, by number of the engine's tensor.
        sent: when the last message left, and how much time decoding had taken by then, in seconds.
    """

    engine: Engine
    plan: Plan
    places: Sequence[int]
    contributed: Callable[[Array], Array] = lambda grad: grad
    grads: dict[int, Array] = field(default_factory=dict)
    sent: tuple[float, float] = (0.0, 0.0)

    def arrive(self, buckets: Sequence[int]) -> Task[None]:
        """Take in the messages of ``buckets``, which were sent."""
        return self.engine.travel(buckets)


@dataclass(kw_only=True)
class UnderWay(Leaving):
    """A compressed step that was begun.

    Attributes:
        factors: by which each gradient is clipped, first those of the compressed variables.
        moved: the compressed variables after the step, as far as messages have arrived.
        edited: the variables whose moments somebody has changed since the last step: no worker takes this one.
        begun: by number of the variable, the marks of those whose first compressed step it is; see ``Moments``.
        moves: elements that move from the next step on, if this one is taken; see ``rest``.
    """

    factors: Sequence[float]
    moved: list[Tensor]
    edited: Sequence[int] = ()
    begun: Mapping[int, int] = field(default_factory=dict)
    moves: Moves = field(default_factory=dict)

    def arrive(self, buckets: Sequence[int]) -> Task[None]:
        return self.engine.step_into(buckets, self.moved)


class Compressor(RunState):
    """Belongs to one Keras ``DistributedOptimizer``.

    Attributes:
        in_one_piece: whether a step is taken where it begins, of all gradients, and not by sections.
        in_host_memory: whether steps are taken there, wherever the variables are.
        takes_frozen: whether the steps that are traced now are local ones after the freeze of second moments.
        options: of the optimizer, in the last step, or as they are now if there was none; see ``options_now``.
        place: where the last step was taken, if that is not the host's memory.
        apart: steps since the workers last had the same weights.
        late: the numbers of variables whose first gradient has come after compression started.
        loaded: whether this worker has loaded a state since the last step, and no residuals with it.
    """

    in_one_piece = False
    in_host_memory = False
    takes_frozen = False
    apart = 0
    loaded = False
    place: Place | None = None
    what = "variables"

    def __init__(self, optimizer: Any, adapter: Adapter, wrapping: Wrapping, name: str) -> None:
        self.optimizer = optimizer
        self.adapter = adapter
        self.process_set = wrapping.process_set
        self.sum_gradients = wrapping.sums
        half = wrapping.compression is hvd.Compression.fp16
        self._bytes = 2 if half else 4
        self.collectives = HorovodCollectives(self.process_set, name)
        self.placement = Placement(wrapping.kernels)
        self.engine = Engine(wrapping.recipe, self.collectives, name=name)
        divides = adapter.divides
        self.kind = kind(
            wrapping.recipe.space, divides=divides, schedule=wrapping.after_warmup, velocities=adapter.velocities
        )
        self.errand = Errand(self.collectives, self.compute)
        self.host_functions = HostFunctions()
        coded = codes(wrapping.recipe, wrapping.warmup)
        self.coded = CodedMean(self.engine, divides=divides, half=half) if coded else None
        self.tensors: list[Tensor] = []
        self.indices: tuple[int, ...] = ()
        self.under_way: Leaving | None = None
        self.before_step: Callable[[], None] | None = None  # what begins a step, once the model is built
        self.driver = self._make_driver(wrapping)
        self.moments = Moments(self)
        self._options: Options | None = None
        self._option_names: list[str] | None = None
        self.late: set[int] = set()
        self.exact: set[int] | None = None  # the numbers of variables that are never compressed, once they are known
        self.shapes: list[list[int]] | None = None  # of all variables, when these numbers were found
        self._averages: dict[Any, Any] = {}
        self._memory = Pool()
        self._gpu: Place | None = None  # of the last step that was taken on one: residuals may still be there
        self._now: Now | None = None

    def _make_driver(self, wrapping: Wrapping) -> Driver:
        face: Prepares = self
        return Driver(self.engine, cast(Together, face), wrapping.warmup, wrapping.after_warmup)

    def settle(self) -> None:
        """End a step that was interrupted between its host functions: a worker was lost, say. Local."""
        self.errand.close()
        if self.under_way is not None:
            self._end()

    def place_of(self, variables: Sequence[Any]) -> Place | None:
        """Where steps of ``variables``, those that are compressed, are taken; None is the host's memory."""
        return None if self.in_host_memory else self.placement.of(variables)

    def go_to(self, place: Place | None) -> None:
        """A step begins at ``place``: what is left of one before is taken back where that was."""
        if self.under_way is not None:
            self._end()
        if place is not None and self.place is None:
            self.engine.use_kernels("cuda")
        self.place = place
        self._gpu = place or self._gpu

    def here(self) -> contextlib.AbstractContextManager[None]:
        """For what may be in the memory of a GPU, on whatever thread."""
        return contextlib.nullcontext() if self._gpu is None else self._gpu.here()

    def compute(self, work: Callable[[], T]) -> T:
        """``work`` of a step, which may run the kernels: on the thread of their place."""
        return work() if self._gpu is None else self._gpu.compute(work)

    def options_now(self) -> Options:
        """The wrapped optimizer's hyperparameters, but for the learning rate, as they are now. Steps of a graph are
        taken with those of its tracing."""
        if self._option_names is None:
            with tf.init_scope():
                self._option_names = sorted(self.optimizer.option_names() - NOT_OPTIONS)
        return Options(self.optimizer, self._option_names)

    @property
    def options(self) -> Options:
        return self.options_now() if self._options is None else self._options

    @options.setter
    def options(self, options: Options) -> None:
        self._options = options

    @property
    def clips_norms(self) -> bool:
        """Whether a step begins when all gradients are there: they are clipped by their norms."""
        return bool(self.optimizer.clipnorm or self.optimizer.global_clipnorm)

    @property
    def workers(self) -> int:
        """That train together; 0 on a worker that does not."""
        return self.process_set.size() if self.process_set.included() else 0

    def flush(self) -> None:
        """All workers have the same weights after each step."""

    def inherit(self, last: Compressor) -> None:
        """Of an optimizer that was wrapped before, all that steps go by is in variables."""

    @property
    def of_round(self) -> str:
        """What must be the same on all workers where a round of local steps may end; nothing without such."""
        return ""

    def fold(self) -> None:
        """Before the workers change: nothing that was moved since the last exchange is a residual."""

    def exclude(self, patterns: Sequence[str]) -> None:
        """Keep the variables whose path or name matches one of ``patterns`` exact for ever.

        An optimizer that was loaded knows them already, unless its variables have other shapes now: Keras gives the
        variables of a loaded model other paths.
        """
        variables = self.optimizer._trainable_variables
        shapes = [list(v.shape) for v in variables]
        if self.exact is None or self.shapes not in (None, shapes):
            names = [(path_of(v), v.name) for v in variables]
            other = self.exact is not None  # fewer are trained now, perhaps
            found = matching("exact", patterns, [name for both in names for name in both], all_match=not other)
            self.exact = {i for i, both in enumerate(names) if not found.isdisjoint(both)}
            if other and not self.exact:
                text = "exact=%s matches none of the variables that are trained now, which are not those of before"
                self.engine.say(logging.WARNING, text, list(patterns))
        self.shapes = shapes

    def is_compressed(self, variable: Any) -> bool:
        """Whether ``variable`` travels as one bit after warm-up."""
        return self.optimizer._wrapping.compresses and self.compressible(variable)

    def compressible(self, variable: Any) -> bool:
        """Whether ``variable`` would, if the warm-up ended."""
        size = math.prod(variable.shape)
        if variable.dtype != "float32" or size < self.engine.recipe.min_compressed_size:
            return False
        return not self.exact or self.optimizer._get_variable_index(variable) not in self.exact

    def travels_in_bits(self, variable: Any) -> bool:
        """Whether gradients of ``variable`` are averaged by the core, in the warm-up or after it."""
        return self.compressible(variable) if self.coded is not None else self.is_compressed(variable)

    def compile_ahead(self) -> None:
        """What steps will run in the host's memory, or the first compressed one would wait for it. Local."""
        optimizer, recipe = self.optimizer, self.engine.recipe
        large = [v for v in optimizer._trainable_variables if self.travels_in_bits(v)]
        if self.workers < 2 or not large or optimizer._wrapping.after_warmup is not None:
            return
        if self.coded is not None:
            rule = Gradient(self.adapter.divides)
            compile_steps(own_recipe(recipe), [rule], self.workers, divides=True, lent="gradients")
        if optimizer._wrapping.compresses and self.place_of(large) is None:
            decays = {optimizer.weight_decay if self.decays(v) else 0.0 for v in large}
            rules = [self.adapter.rule(optimizer, 1.0, decay, 1, 1.0) for decay in sorted(decays)]
            own = self.adapter.momentum(optimizer, 0) is None  # ours alone: the optimizer has none
            lent: Lent = "all but momenta" if own else "all"
            compile_steps(recipe, rules, self.workers, divides=self.adapter.divides, lent=lent)

    def decays(self, variable: Any) -> bool:
        """Whether the wrapped optimizer decays ``variable``; asked as Keras asks, which remembers the answer."""
        inside = variable.value if isinstance(variable, keras.Variable) else variable
        return bool(self.options.weight_decay) and self.optimizer._use_weight_decay(inside)

    def name_of(self, index: int, variable: Any) -> str:
        """Not its path: Keras numbers layers by how many there were before in this process."""
        return f"{index}.{variable.name}"

    def observe(self, warmup: AutoWarmup, steps: Any, learning_rate: Any, seen: Any, norms: Any) -> int:
        """Show the run to the automatic warm-up; the number of exact steps that it wants now. ``norms`` are those of
        the second moments that have ``seen`` so much; empty if there are none."""
        beta2, step = getattr(self.options, "beta_2", 0.0), int(steps)
        if warmup.wants(step):
            pairs = zip(np.array(norms), np.array(seen), strict=True)
            corrected = [unbiased(float(norm), beta2, int(count)) for norm, count in pairs]
            warmup.observe(step, math.hypot(*corrected) if corrected else None, float(learning_rate), beta2)
        return warmup.steps

    def warm_up_again(self) -> None:
        """The warm-up begins: no exact step was taken yet, and nothing is owed. Local; on all workers alike."""
        optimizer, warmup = self.optimizer, self.optimizer._wrapping.warmup
        warmup.load_state_dict({})
        self.unlearn()
        with self.here():
            self.engine.feedback.reset()
        optimizer._begun.assign(int(optimizer.iterations))
        optimizer._exact_steps.assign(0)
        optimizer._compressed_steps.assign(0)
        optimizer._warmup_steps.assign(warmup.steps)

    def begin_again(self, edited: Sequence[int] = ()) -> None:
        """The state is that of a plain optimizer from now on, and the warm-up begins. The moments of the variables
        ``edited`` were set by somebody. Local; on all workers alike."""
        # Where ``iterations`` was set, all are corrected by the old count, and none was edited by itself.
        self.moments.make_plain(edited if self.moments.moved is None else ())
        self.warm_up_again()
        self.forget_trained()

    def follow_broadcast(self) -> None:
        """All workers get the state of one of them, which may have loaded it alone. Local; on all workers alike."""
        self.late.clear()
        self.forget_trained()

    def take_plain(self) -> None:
        """A plain optimizer's state was assigned: the warm-up begins. Local; on all workers alike."""
        self.late.clear()
        self._forget_residuals()
        self.moments.take_plain()
        self.warm_up_again()
        self.forget_trained()

    def forget_trained(self) -> None:
        """The next step looks anew at what is compressed."""
        self.indices = ()

    def forget(self) -> None:
        """The optimizer's state was replaced as a whole; residuals are of the old one. Local."""
        self.late.clear()
        self._forget_residuals()
        self.moments.forget()
        self.unlearn()
        self._follow_recipe()

    def _forget_residuals(self) -> None:
        self.loaded = True
        self.settle()
        with self.here():
            self.engine.feedback.reset()

    def unlearn(self) -> None:
        """What was learned of the gradients of the warm-up is of another state, or the warm-up is over, and its memory
        is wanted no more. Local; on all workers alike."""
        if self.coded is not None and not self.coded.fresh:
            self.coded.forget()

    def heard(self, verdict: Verdict) -> None:
        """The workers have agreed about the next step. If one has learned nothing yet, all begin anew: it may have
        loaded a state, and have sent it to the others, whose residuals are then of a run that was left."""
        if verdict.fresh:
            self.unlearn()
        if verdict.loaded:
            with self.collectives.lock:
                self._forget_residuals()
        self.loaded = False

    def check_recipe(self, exact: int, wanted: int, compressed: int) -> None:
        """Raise ``ConfigurationError`` where ``_follow_recipe`` was passed over: TensorFlow has assigned the variables.

        These say that ``exact`` exact steps of ``wanted`` and then ``compressed`` ones were taken, which all workers
        have agreed on. Zeros are of somebody who has reset the optimizer: one that never compresses begins again.
        """
        wrapping = self.optimizer._wrapping
        if not (wrapping.compresses or exact or wanted or compressed):
            with self.collectives.lock:
                self.begin_again()
            return
        other = exact < wanted != wrapping.warmup.steps and isinstance(wrapping.warmup, FixedWarmup)
        if (wanted == FOREVER) == wrapping.compresses or other:
            raise ConfigurationError(
                "the optimizer's variables are of a run with another warmup_steps, or of one with recipe='exact' where "
                "this one compresses, or the other way round. tf.train.Checkpoint restores variables and nothing else: "
                "build the optimizer as it was, or use save_checkpoint, and load_checkpoint or load_weights"
            )

    def _follow_recipe(self) -> None:
        """The state may be of a run with other arguments. A warm-up that is not over is as long as this run says. Of
        ``recipe="exact"``, where this run compresses, or the other way round: begin the warm-up, with moments in plain
        form, which those of variables that are not compressed any more get, too. Raises ``ConfigurationError`` if
        second moments are frozen that the optimizer's own steps need in plain form."""
        optimizer, compresses = self.optimizer, self.optimizer._wrapping.compresses
        if not optimizer.built:
            return
        wanted = int(optimizer._warmup_steps.value)
        if (wanted == FOREVER) != compresses:
            if int(optimizer._exact_steps.value) < wanted:
                optimizer._warmup_steps.assign(optimizer._wrapping.warmup.steps)
            if optimizer._wrapping.local is None:
                self.moments.release()
            elif self.adapter.moments is None and (np.array(optimizer._marks.value) > 0).any():
                raise ConfigurationError(
                    "the optimizer's state is of a run that compresses, whose second moments are frozen, and with "
                    f"{optimizer._wrapping.local} the optimizer's own steps would be too long: wrap what "
                    "plain_optimizer(optimizer) gives in the run that was saved, or load the weights alone"
                )
            return
        self.begin_again()

    def average(self, pairs: Sequence[tuple[Any, Any]], wrapping: Wrapping) -> tuple[list[Any], Any]:
        """The averages of gradients by Horovod's own operations, and whether they are finite, on all workers alike.

        Small gradients of one dtype travel as one: each operation makes the graph slower to trace, and to run. They are
        in a graph of their own, so that the names are the same if a worker runs eagerly.
        """
        if not pairs:
            return [], tf.constant(True)
        indices = tuple(self.optimizer._get_variable_index(v) for _, v in pairs)
        inputs = [_shaped(tf.convert_to_tensor(grad), v.shape) for grad, v in pairs]
        key = indices, tuple(tensor.dtype for tensor in inputs)
        if key not in self._averages:
            prefix = plain(self.engine.name)

            def work(*grads: Any) -> tuple[list[Any], Any]:
                means: list[Any] = [None] * len(indices)
                averages = []
                for name, members in self._together(indices):
                    variables = [self.optimizer._trainable_variables[indices[i]] for i in members]
                    tensor = packed([grads[i] for i in members], variables)
                    averages.append(_average(tensor, f"{prefix}.{name}", wrapping))
                    for i, mean in zip(members, unpacked(averages[-1], variables), strict=True):
                        means[i] = mean
                return means, tf.reduce_all([tf.reduce_all(tf.math.is_finite(average)) for average in averages])

            with tf.init_scope():
                specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
                self._averages[key] = tf.function(work, autograph=False).get_concrete_function(*specs)
        return self._averages[key](*inputs)

    def begin_average(self, indices: tuple[int, ...]) -> None:
        """``average_in_bits`` of these gradients follows, on all workers, which have agreed: what is in few bits may
        leave before, unless it is of other variables than the last time. Local."""
        assert self.coded is not None
        at = {name: place for place, name in enumerate(self._names(indices))}
        with self.collectives.lock:
            self.errand.close()  # an average that was interrupted takes back its own messages, before new ones leave
            self.go_to(None)
            ready = self.coded.ready(at)
            if (plan := self.coded.begin(ready)) is not None:
                places = [at[tensor.name] for tensor in ready]
                self.under_way = Leaving(engine=self.coded.engine, plan=plan, places=places)

    def average_in_bits(self, indices: tuple[int, ...], grads: Sequence[Array], means: list[Array]) -> Task[None]:
        """Put the averages of gradients of the variables ``indices``, flat, into ``means``, in memory that nobody will
        write to again; nothing if something is not finite on some worker. Collective."""
        assert self.coded is not None
        step, self.under_way = self.under_way, None
        if step is not None:
            self.engine.waited(*step.sent)
        names = self._names(indices)
        found = yield from self.coded.average(dict(zip(names, grads, strict=True)))
        if found is not None:
            factor = np.float32(self.engine.collectives.size if self.sum_gradients else 1)
            for name in names:
                means.append(self._memory.lend(found[0][name].size))
                np.multiply(found[0][name], factor, out=means[-1])

    def _names(self, indices: Sequence[int]) -> list[str]:
        return [self.name_of(i, self.optimizer._trainable_variables[i]) for i in indices]

    def _together(self, indices: tuple[int, ...]) -> list[tuple[str, list[int]]]:
        """The positions of the gradients that an allreduce of the warm-up has, and its name."""
        alone, small = [], dict[str, list[int]]()
        for position, index in enumerate(indices):
            variable = self.optimizer._trainable_variables[index]
            if math.prod(variable.shape) < self.engine.recipe.min_compressed_size:
                small.setdefault(keras.backend.standardize_dtype(variable.dtype), []).append(position)
            else:
                alone.append((str(index), [position]))
        return alone + [(f"small.{dtype}", positions) for dtype, positions in sorted(small.items())]

    def skip(self) -> None:
        """All workers skip a step of the warm-up, or raise."""
        self.engine.say_skipped("the mean gradient")

    def count_averages(self, elements: int) -> None:
        """Account for averages of so many elements."""
        workers = self.engine.collectives.size
        self.engine.traffic.add(
            allreduce_bytes(self._bytes * elements, workers), allreduce_bytes(4 * elements, workers)
        )

    def count_warmup(self, elements: int) -> None:
        """Account for one exact step over so many elements."""
        self.count_averages(elements)
        self.engine.end_step()

    def _bind(self, indices: tuple[int, ...]) -> None:
        """Name the variables that are compressed; again only when the set of them changes."""
        if indices == self.indices:
            return
        self.indices, self.tensors = indices, []
        empty, zeros = np.empty(0, np.float32), None if self.place is None else self.place.zeros
        for i in indices:
            variable = self.optimizer._trainable_variables[i]
            name = self.name_of(i, variable)
            residual = self.engine.feedback.residual(name, math.prod(variable.shape), zeros)
            tensor = Tensor(name, empty, empty, None, residual)
            self.adapter.init(tensor)
            self.tensors.append(tensor)

    def _load(self, values: Values, rules: Sequence[Rule], progress: Progress) -> None:
        """Point the tensors at the values."""
        first, counted = [not progress.marks[i] for i in self.indices], progress.counted
        for i, tensor in enumerate(self.tensors):
            momentum, tensor.weight, tensor.variance = values.momenta[i], values.weights[i], values.variances[i]
            if momentum is None:  # SGD without momentum: nobody looks at it again
                there = tensor.momentum.size == tensor.weight.size
                momentum = tensor.momentum if there else self._zeros(tensor.weight.size)
            tensor.momentum = momentum
            tensor.step, tensor.variance_steps = progress.steps, int(counted[self.indices[i]])
        self.adapter.keep(self.optimizer, self.tensors, self.indices, rules, first)

    def _zeros(self, size: int) -> Array:
        return (reference if self.place is None else self.place).zeros(size)

    def _lend(self, sizes: Sequence[int]) -> list[Array]:
        """Memory that TensorFlow can adopt."""
        return [self._memory.lend(size) for size in sizes] if self.place is None else self.place.lend(sizes)

    def prepare(self, sends: Sends) -> Task[Plan]:
        """See ``driver.Prepares``."""
        now = self._now
        assert now is not None
        self._bind(now.indices)
        rules = self._rules(now, sends)
        self._load(now.values, rules, now.progress)
        yield from self.engine.prepare(self.tensors, rules)
        return self.engine.plan(sends, rules)

    def begin_step(
        self, indices: tuple[int, ...], values: Values, progress: Progress, sizes: Sequence[int],
        grads: Sequence[Array], squares: Array, *, finite: bool,
    ) -> Task[None]:  # fmt: skip
        """Begin a compressed step of the variables ``indices``, and of exact ones of ``sizes``.

        ``grads``: the compressed variables' gradients, flat, if it is taken ``in_one_piece``, else none. ``squares``:
        the squared norms of all gradients, if it ``clips_norms``, else none. ``finite``: whether the exact ones'
        averages are, as far as that is known.
        """
        if not self.engine.exchanges:  # the run goes on from a file of Keras's, perhaps
            self.engine.exchanges = int(self.optimizer._compressed_steps.value)
        self.count_averages(sum(sizes))
        factors = yield from self._clip_factors(squares, len(indices) + len(sizes))
        self.moments.check_form()
        edited = self._edited(indices, values, progress)
        self._now = Now(indices, values, progress, factors)
        try:
            plan = yield from self.driver.begin()
        finally:
            self._now = None
        moves = yield from self.engine.look(plan.rules, refuses=bool(edited))
        has_momentum = [momentum is not None for momentum in values.momenta]
        weights = self._lend([tensor.weight.size for tensor in self.tensors])
        momenta = iter(self._lend([t.weight.size for t, has in zip(self.tensors, has_momentum, strict=True) if has]))
        moved = [
            replace(tensor, weight=weight, momentum=next(momenta) if has else tensor.momentum)
            for tensor, weight, has in zip(self.tensors, weights, has_momentum, strict=True)
        ]
        begun = {}
        for i, variance in zip(indices, values.variances, strict=True):
            if not progress.marks[i]:
                begun[i] = self.moments.mark(variance)
                self.moments.hold(i, variance)
        self.under_way = UnderWay(
            engine=self.engine, plan=replace(plan, looked=True), places=range(len(indices)),
            contributed=self.contributed, factors=factors, moved=moved, edited=edited, begun=begun, moves=moves,
        )  # fmt: skip

    def awakened(self, seconds: Mapping[int, Array]) -> None:
        """See ``driver.Compresses``."""
        late = self._late() if not self.pending else []  # or weights differ, as they may with 0/1 Adam
        if late:
            seen = np.array(self.optimizer._seen.value)
            seen[[self.indices[number] for number in late]] = 0
            self.optimizer._seen.assign(seen)
        before, marks = np.array(self.optimizer._marks.value), dict[int, int]()
        for number, second in seconds.items():
            if number in late:
                continue
            index, tensor = self.indices[number], self.engine.tensors[number]
            variable = self.adapter.variance(self.optimizer, index)
            variable.assign(np.reshape(second, variable.shape))
            tensor.variance = self.compute(partial(self._copied, second))
            if before[index]:
                marks[index] = self.moments.mark(second)
                self.moments.hold(index, tensor.variance)
        self.moments.freeze(marks)

    def _late(self) -> list[int]:
        """The numbers of the tensors that have got their first gradient, whose second moment has seen nothing, as the
        next step will find: the warm-up begins again. Once for each: they may have one from time to time."""
        late = [number for number in self.engine.first_gradients if self.indices[number] not in self.late]
        self.late.update(self.indices[number] for number in late)
        return late

    def _copied(self, array: Array) -> Array:
        """``array``, in the memory that the kernels work in."""
        copy = self._zeros(array.size)
        self.engine.context.kernels.write(copy, array)
        return copy

    def _edited(self, indices: tuple[int, ...], values: Values, progress: Progress) -> list[int]:
        """The variables whose moments somebody has changed, so that this step cannot be taken."""
        if self.moments.moved is not None:  # another count of steps corrects both moments
            return list(indices)
        return self.moments.edited(indices, values.variances, progress.seen, progress.marks)

    @property
    def _refuses(self) -> bool:
        """Whether this worker cannot take the step that is under way, so that none may."""
        step = self.under_way
        return isinstance(step, UnderWay) and bool(step.edited)

    def contributed(self, grad: Array) -> Array:
        """What is encoded of a gradient; NaN if this worker cannot take the step, which all workers then skip."""
        if not self._refuses:
            return self.clipped(grad)
        if self.place is None:
            return np.full_like(grad, np.nan)
        return self.place.computed(lambda g: tf.fill(tf.shape(g), np.float32(np.nan)), grad)

    def clipped(self, grad: Array) -> Array:
        """A gradient that ``clipvalue`` has seen: Keras clips after it has divided by ``loss_scale_factor``."""
        if self.options.clipvalue is None:
            return grad
        limit = self.options.clipvalue / self._factor
        if self.place is None:
            return np.clip(grad, -limit, limit)
        # tf.clip_by_value may make a number of NaN.
        return self.place.computed(lambda g: tf.where(tf.abs(g) > limit, limit * tf.sign(g), g), grad)

    def conclude(self, *, finite: bool) -> tuple[bool, Array, list[Tensor]]:
        """End the step that was begun, when everything has arrived: whether it is taken, the factors by which the exact
        gradients are clipped, and the variables after it, in arrays that nobody will write to again.

        ``finite``: whether the averages of the exact gradients are.
        """
        step = self.under_way
        assert isinstance(step, UnderWay)
        self.engine.waited(*step.sent)
        try:
            if self._refuses:
                taken = self.compute(self._refuse)
            else:
                taken = self.compute(lambda: self.engine.conclude(step.plan, step.moved, finite=finite))
        finally:
            self._end()
        self.tensors = list(self.engine.tensors)
        if taken and step.begun:
            self.moments.freeze(step.begun)
        if taken and step.moves:
            self.awakened(self.compute(lambda: self.engine.awaken(step.moves, step.plan.rules)))
        if step.edited:
            self.moments.say(step.edited)
            self.begin_again(step.edited)
        return taken, np.array(step.factors[len(self.indices) :], np.float32), step.moved

    def _refuse(self) -> bool:
        """End a step that this worker could not take."""
        others = sorted(set(range(self.engine.collectives.size)) - set(self.engine.refusing))
        self.engine.refuse()
        if others and self.engine.recipe.on_nonfinite == "raise":  # they raise, too
            raise changed_alone("this worker", workers(others))
        return False

    def _end(self) -> None:
        """Take back what is left of a step, and close its accounts."""
        step, self.under_way = self.under_way, None
        assert step is not None
        self.compute(partial(self._take_back, step.engine))
        del step  # with the memory that kernels have read until now
        self.engine.end_step()

    def _take_back(self, engine: Engine) -> None:
        engine.rollback()
        if self.place is not None:
            self.place.wait()

    def _rules(self, now: Now, sends: Sends) -> list[Rule]:
        """That of each variable, one for all that have the same: their scalars are made once."""
        variables, progress, counted = self.optimizer._trainable_variables, now.progress, now.progress.counted
        options = self.moments.overrule(self.options)
        found: list[Rule] = []
        made: dict[tuple[float, int, float], Rule] = {}
        for index, factor in zip(now.indices, now.factors, strict=False):
            decay = options.weight_decay if self.decays(variables[index]) else 0.0
            key = decay or 0.0, int(counted[index]), factor
            if key not in made:
                scale = factor * self._factor
                made[key] = self.adapter.rule(options, progress.learning_rate, decay, key[1], scale)
            found.append(made[key])
        return found

    @property
    def _factor(self) -> float:
        """By which a worker's gradient is multiplied, so that the mean over the workers is what the wrapped optimizer
        takes: a sum in place of a mean, without its loss scale."""
        workers = self.engine.collectives.size if self.sum_gradients else 1
        return workers / (self.options.loss_scale_factor or 1.0)

    def _clip_factors(self, squares: Array, count: int) -> Task[Sequence[float]]:
        """By which each of ``count`` gradients is clipped, the same on all workers: by the root mean square, over the
        workers, of the norms of their own gradients, whose ``squares`` are given."""
        options = self.options
        limit = options.clipnorm or options.global_clipnorm
        if not limit:
            return [1.0] * count
        squares = squares.astype(np.float64) * self._factor**2
        if options.global_clipnorm:
            squares = squares.sum(keepdims=True)
        norms = yield from mean_norms(squares.astype(np.float32), self.engine.collectives, f"{self.engine.name}.norms")
        scales = np.minimum(1.0, limit / np.maximum(norms, 1e-30))
        return [float(s) for s in np.broadcast_to(scales, count)]

    def stats(self, norms: bool) -> Stats:
        optimizer = self.optimizer
        variables = optimizer._trainable_variables
        compressed = [v for v in variables if self.is_compressed(v)] if optimizer.phase is Phase.COMPRESSED else []
        with self.here():
            return self.engine.stats(
                phase=optimizer.phase.value,
                step=int(optimizer.iterations),
                parameters=sum(math.prod(v.shape) for v in variables),
                compressed=sum(math.prod(v.shape) for v in compressed),
                coded=0 if self.coded is None else self.coded.elements,
                norms=norms,
            )

    def counts(self) -> dict[str, Any]:
        """How far the run is, apart from what Keras's variables tell; for JSON."""
        return run_state.counts(self.engine, self.optimizer._wrapping.warmup) | {"late": sorted(self.late)}

    def take_counts(self, counts: Mapping[str, Any]) -> None:
        """Continue from what ``counts`` gave. Local; on all workers alike."""
        self.moments.forget()
        self.unlearn()
        self.apart = 0
        run_state.take_counts(self.engine, self.optimizer._wrapping.warmup, counts)
        self.late = set(counts["late"])
        self._follow_recipe()

    def check_built(self) -> None:
        """Raise ``ConfigurationError`` if the optimizer does not know its variables yet."""
        if not self.optimizer.built:
            raise ConfigurationError("the optimizer is not built: optimizer.build(model.trainable_variables)")

    def residuals(self) -> Residuals:
        self.settle()
        with self.here():
            return super().residuals()

    def check_residuals(self, saved: Residuals) -> None:
        self.check_built()
        super().check_residuals(saved)

    def load_feedback(self, feedback: Mapping[str, Array]) -> None:
        self.settle()  # or a step that was interrupted would be taken back later, into what is loaded now
        self.check_built()
        self.loaded = False
        with self.here():
            super().load_feedback(feedback if self.optimizer._wrapping.compresses else {})  # none is used

    def sizes(self) -> dict[str, int]:
        variables = enumerate(self.optimizer._trainable_variables)
        return {self.name_of(i, v): math.prod(v.shape) for i, v in variables}

    def sizes_now(self) -> dict[str, int]:
        if self.optimizer.phase is not Phase.COMPRESSED:
            return {}
        variables = enumerate(self.optimizer._trainable_variables)
        return {self.name_of(i, v): math.prod(v.shape) for i, v in variables if self.is_compressed(v)}


def changed_alone(on: str, others: str) -> DesyncError:
    """To be raised where the optimizer's state was changed ``on`` some workers and not on the ``others``."""
    return DesyncError(
        f"the optimizer's state was changed on {on} and not on {others}: make the same changes on all workers"
    )


def _aligned(size: int) -> Array:
    """Memory for ``size`` float32 that TensorFlow can adopt: it wants tensors to start at multiples of 64 bytes."""
    memory = np.empty(4 * size + 64, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64
    return memory[start : start + 4 * size].view(np.float32)


class Pool:
    """Memory for what steps give TensorFlow to adopt, lent again once nobody holds it: fresh memory costs page faults
    in every step."""

    def __init__(self) -> None:
        self._free: dict[int, list[Array]] = {}

    def lend(self, size: int) -> Array:
        """An array of ``size`` float32, which is free again when it and all views of it are gone."""
        free = self._free.setdefault(size, [])
        return np.asarray(_Loan(free.pop() if free else _aligned(size), free))

    def copy(self, array: Array) -> Array:
        """A copy of ``array``, float32, in such memory."""
        copy = self.lend(array.size)
        copy[:] = array
        return copy


class _Loan:
    """What a lent array is a view of."""

    def __init__(self, array: Array, free: list[Array]) -> None:
        self.__array_interface__ = array.__array_interface__
        self._array, self._free = array, free

    def __del__(self) -> None:
        self._free.append(self._array)


def packed(grads: Sequence[Any], variables: Sequence[Any]) -> Any:
    """The gradients of ``variables``, of one dtype, one after the other in one tensor; a single one keeps its shape."""
    cast = [tf.cast(_shaped(grad, v.shape), v.dtype) for grad, v in zip(grads, variables, strict=True)]
    return cast[0] if len(cast) == 1 else tf.concat([g if len(g.shape) == 1 else tf.reshape(g, [-1]) for g in cast], 0)


def _shaped(tensor: Any, shape: Any) -> Any:
    return tensor if tensor.shape == shape else tf.ensure_shape(tensor, shape)


def unpacked(tensor: Any, variables: Sequence[Any]) -> list[Any]:
    """What has become of each of the gradients of ``variables`` that were ``packed`` together."""
    parts = tf.split(tensor, [math.prod(v.shape) for v in variables]) if len(variables) > 1 else [tensor]
    both = zip(parts, variables, strict=True)
    return [part if len(v.shape) == 1 else tf.reshape(part, v.shape) for part, v in both]


def _average(grad: Any, name: str, wrapping: Wrapping) -> Any:
    # Horovod reduces no bfloat16.
    sent = tf.cast(grad, tf.float32) if grad.dtype == tf.bfloat16 else grad
    mean = hvd.allreduce(
        sent, name=name, compression=wrapping.compression, ignore_name_scope=True, process_set=wrapping.process_set,
        **wrapping.reduction,
    )  # fmt: skip
    return tf.cast(mean, grad.dtype)

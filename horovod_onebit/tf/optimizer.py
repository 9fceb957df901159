"""``DistributedOptimizer`` for Keras 3: the wrapped optimizer's own steps in the warm-up, then one bit an element."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from horovod_onebit import feedback
from horovod_onebit.checks import mapping, positive
from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.face import chosen, next_name
from horovod_onebit.recipe import Recipe
from horovod_onebit.schedule import Gradients, Local, Schedule, Stepwise
from horovod_onebit.stats import Stats
from horovod_onebit.tf.agreement import ACCUMULATED, Agreement
from horovod_onebit.tf.compressor import Compressor
from horovod_onebit.tf.graph import (
    MULTI,
    callback_lists,
    check_callers,
    cond,
    either,
    host_call,
    host_value,
    in_order,
    keras_callers,
    outside,
    path_of,
    run_independently,
    with_a_batch,
)
from horovod_onebit.tf.lineage import check_last, take_over
from horovod_onebit.tf.local import LocalAdapter, LocalSteps, take_step, update
from horovod_onebit.tf.loss_scale import (
    LossScaleOptimizer,
    around,
    check_variables,
    is_unbuilt,
    of_this_version,
    refuse_copy,
)
from horovod_onebit.tf.meeting import announce, told
from horovod_onebit.tf.place import Placement
from horovod_onebit.tf.rules import Adapter, AnyAdapter, adapter_for, kinds
from horovod_onebit.tf.step import averaged, compressed
from horovod_onebit.tf.wrapping import Wrapping
from horovod_onebit.tf.zero_one import ZeroOneSteps
from horovod_onebit.warmup import AutoWarmup, Phase

PACKAGE = "horovod_onebit"  # and the key of what belongs to it in a configuration
EXACT = "exact_variables"
STOPPED = (
    ", after a callback has stopped training (what decides by metrics, such as EarlyStopping, must come after "
    "MetricAverageCallback, and all workers must stop together)"
)
SWAPPED = (
    "SwapEMAWeights puts moving averages into the model after local steps that were not exchanged yet, and they would "
    "be exchanged in place of the weights: put FlushCallback before SwapEMAWeights in the callbacks of fit"
)
AVERAGES_SAVED = (
    "SwapEMAWeights has put moving averages into the model, and what is saved would have them in place of the "
    "weights: put what saves before SwapEMAWeights in the callbacks of fit"
)
NOT_WRAPPED = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer, *MULTI)


_Wrapped: Any = object  # whatever the wrapped optimizer's class has, these have, too


class _DistributedOptimizer(_Wrapped):
    """Mixed into the wrapped Keras optimizer's class."""

    # What this class adds: Keras variables, so that they are saved.
    _begun: Any  # how many steps the optimizer counted when the warm-up began
    _exact_steps: Any
    _compressed_steps: Any
    _warmup_steps: Any
    _passes: Any
    _averaged: Any
    _wrapping: Wrapping
    _checked: bool  # whether a step was taken or traced, whose callers were checked
    _compiled: bool  # whether the kernels of the host were
    _warned: bool
    _compressor: Compressor
    _agreement: Agreement

    @tf.autograph.experimental.do_not_convert  # host functions too would be traced, and fail
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """One step: Keras calls it from ``fit`` and from ``apply_gradients``. Collective.

        Raises on all workers ``DesyncError`` if they disagree, ``NonFiniteError`` if the recipe says so; and
        ``ConfigurationError`` or ``UnsupportedError`` for gradients that do not fit. Where TensorFlow runs the step in
        a graph, as in ``fit``, it makes of them a ``tf.errors.OpError`` with their text.
        """
        with told(self._wrapping.process_set):
            pairs = self._checked_pairs(grads, trainable_variables)
        with self._compressor.host_functions.keep(), with_a_batch():
            if not tf.executing_eagerly():
                # Within nested functions operations wait for their arguments alone, and a gradient may need no batch.
                pairs = [(tf.identity(g), v) for g, v in pairs]
            self.prepare_step()
            if not self._wrapping.process_set.included():
                super().apply([g for g, _ in pairs], [v for _, v in pairs])
            elif (passes := self._wrapping.backward_passes_per_step) > 1:
                self._accumulate(pairs, passes)
            else:
                self._step(pairs)

    def _checked_pairs(self, grads: Any, trainable_variables: Any) -> list[tuple[Any, Any]]:
        """The gradients that there are, dense, and their variables."""
        check_last(self)
        if not tf.executing_eagerly() or not self._checked:
            check_callers()
            self._checked = True
        check_variables(self, trainable_variables)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        keys = [self._var_key(v) for v in variables]
        if len(set(keys)) < len(keys):
            twice = next(v for v, key in zip(variables, keys, strict=True) if keys.count(key) > 1)
            raise ConfigurationError(
                f"{path_of(twice)!r} is given twice in one step, and would be moved twice: expected each variable "
                "once. Of parts that share layers, as in variables = a.trainable_variables + b.trainable_variables, "
                "take each one once, list({id(v): v for v in variables}.values()), before tape.gradient"
            )
        if not self.built:
            with outside(), keras.name_scope(self.name, caller=self):
                self.build(variables)
        both = zip(variables, keys, strict=True)
        unknown = [v for v, key in both if key not in self._trainable_variables_indices]
        if unknown:
            raise ConfigurationError(
                f"{path_of(unknown[0])!r} is unknown to this optimizer, which was built for "
                "other variables, those of another model perhaps, and has their state: make a new optimizer for a new "
                "model, such as type(plain).from_config(plain.get_config())"
            )
        grads = list(grads)
        if len(grads) != len(variables):
            raise ConfigurationError(f"{len(grads)} gradients for {len(variables)} variables: expected as many")
        pairs = [(self._dense(g, v), v) for g, v in zip(grads, variables, strict=True) if g is not None]
        if self._wrapping.process_set.included():
            if not self._compiled:
                self._compiled = True
                self._compressor.compile_ahead()
            self._check_gradients([v for g, v in zip(grads, variables, strict=True) if g is None], pairs)
            # It raises here, where the others are told.
            self._compressor.place_of([v for _, v in pairs if self._compressor.is_compressed(v)])
        return pairs

    def prepare_step(self) -> None:
        """Do what a callback left for the beginning of a step, such as the first broadcast; called in every step."""
        if self._compressor.before_step is not None:
            self._compressor.before_step()

    def _check_gradients(self, without: list[Any], pairs: list[Any]) -> None:
        if not pairs:
            raise ConfigurationError("no variable has a gradient: is the loss connected to the model's weights?")
        for grad, v in pairs:
            if not tf.TensorShape(grad.shape).is_compatible_with(v.shape):
                raise ConfigurationError(f"the gradient of {v.name!r} has shape {grad.shape}: expected {v.shape}")
        if without and not self._warned:
            self._warned = True
            names = ", ".join(path_of(v) for v in without)
            text = "no gradient for %s: not trained. Are they connected to the loss?"
            self._compressor.engine.say(logging.WARNING, text, names)

    def _dense(self, grad: Any, variable: Any) -> Any:
        if not isinstance(grad, tf.IndexedSlices):
            return grad
        if not self._wrapping.sparse_as_dense:
            raise UnsupportedError(
                f"variable {variable.name!r} has a sparse gradient (tf.IndexedSlices): pass sparse_as_dense=True to "
                "DistributedOptimizer"
            )
        return tf.convert_to_tensor(grad)

    def _accumulate(self, pairs: list[tuple[Any, Any]], passes: int) -> None:
        """Add gradients up; take a step at every ``passes``-th call."""
        sums = [self._accumulated[self._get_variable_index(v)] for _, v in pairs]
        for (grad, _), total in zip(pairs, sums, strict=True):
            total.assign_add(tf.cast(grad, total.dtype))
        self._passes.assign_add(1)

        def step() -> None:
            scale = passes if self._wrapping.average_aggregated_gradients else 1
            found = [(total.value / scale, v) for total, (_, v) in zip(sums, pairs, strict=True)]
            for total in sums:  # before the step, which may raise: its gradients would be in the next one
                total.assign(tf.zeros_like(total.value))
            self._step(found)

        cond(self._passes.value % passes == 0, step)

    def _step(self, pairs: list[tuple[Any, Any]]) -> None:
        if self._wrapping.local is not None:
            grads, variables = zip(*pairs, strict=True)

            def own_step() -> None:
                with self._without("use_ema"):
                    super(_DistributedOptimizer, self).apply(grads, variables)

            take_step(self, pairs, own_step)
            return
        trained = [self._get_variable_index(v) for _, v in pairs]
        counters = {
            "steps": self._iterations,
            "exact": self._exact_steps,
            "wanted": self._warmup_steps,
            "compressed": self._compressed_steps,
        }
        if self._wrapping.backward_passes_per_step > 1:
            counters["passes"] = self._passes
        large = [(tf.cast(g, tf.float32), v) for g, v in pairs if self._compressor.travels_in_bits(v)]
        small = [(g, v) for g, v in pairs if not self._compressor.travels_in_bits(v)]
        with in_order():
            now = {name: tf.convert_to_tensor(counter.value) for name, counter in counters.items()}
            now["rate"] = tf.convert_to_tensor(self.learning_rate)
            # What follows depends on the answer: no other collective may be started before it.
            agreed = self._agreement.reach(trained, now)
            with tf.control_dependencies([agreed]):
                means, finite = self._compressor.average(small, self._wrapping)
            if means:
                run_independently(means[0])
            rest = [v for _, v in small]
            exact = rest if self._compressor.coded is not None else [v for _, v in pairs]
            elements = sum(math.prod(v.shape) for v in exact)
            if self._wrapping.compresses:
                taken, factors = either(
                    tf.logical_and(now["exact"] < now["wanted"], agreed),
                    lambda: self._warmup_step(large, means, finite, elements),
                    lambda: self._compressed_step(large, small, finite),
                )
            else:  # the optimizer's own step, of all variables together
                others, also = self._average(large)
                means, rest = means + others, rest + [v for _, v in large]
                taken, factors = self._warmup_step([], means, tf.reduce_all([finite, agreed, also]), elements)
            cond(taken, lambda: self._finish(means, factors, rest, [v for _, v in large]), whole=True)

    def _average(self, large: list[tuple[Any, Any]]) -> tuple[list[Any], Any]:
        """The averages of the gradients ``large`` in the warm-up, and whether they are finite, on all workers alike."""
        coded = self._compressor.coded is not None and large
        return averaged(self._compressor, large) if coded else self._compressor.average(large, self._wrapping)

    def _warmup_step(
        self, large: list[tuple[Any, Any]], small: list[Any], finite: Any, elements: int
    ) -> tuple[Any, Any]:
        """A step of ``large`` by their average gradients, beside the averages ``small``, if they are ``finite``;
        returns what ``_compressed_step`` does. ``elements`` are averaged exactly in it."""
        w, variables = self._wrapping, [v for _, v in large]
        means, also = self._average(large)
        finite = tf.logical_and(finite, also)
        host_call(lambda: self._compressor.count_warmup(elements))
        factors = self._clip_factors([*means, *small])
        scaled = self._scaled(means, factors)

        def take() -> None:
            if scaled:
                with self._without("clipnorm", "global_clipnorm"):
                    grads = self._clip_gradients(scaled)
                self._apply_weight_decay(variables)
                self._backend_update_step(grads, variables, self.learning_rate)
                self._count_seen(variables)
            self._exact_steps.assign_add(1)
            steps = tf.convert_to_tensor(self._exact_steps.value)
            self._compressor.moments.look(
                variables, steps, last=steps >= tf.convert_to_tensor(self._warmup_steps.value)
            )
            if isinstance(w.warmup, AutoWarmup):
                self._observe(w.warmup)
            if self._compressor.coded is not None and w.compresses:
                over = steps >= tf.convert_to_tensor(self._warmup_steps.value)
                cond(over, lambda: host_call(self._compressor.unlearn))

        cond(finite, take, lambda: host_call(self._compressor.skip), whole=True)
        return finite, factors[len(means) :]

    def _count_seen(self, variables: list[Any]) -> None:
        """The second moments of ``variables`` have seen one gradient more, which may be of zeros."""
        if self._compressor.adapter.moments is None or not variables:
            return
        numbers = [self._get_variable_index(v) for v in variables]
        members = np.zeros(len(self._trainable_variables), np.int64)
        members[numbers] = 1
        seen = tf.convert_to_tensor(self._seen.value)

        def look() -> None:
            met = [tf.constant(False)] * len(members)
            for i in numbers:
                variance = tf.convert_to_tensor(self._compressor.moments.variance(i))
                met[i] = tf.reduce_any(tf.not_equal(variance, tf.zeros([], variance.dtype)))
            first = tf.where(tf.stack(met), tf.ones_like(seen), seen - 1)
            self._seen.assign(tf.where(members > 0, tf.where(seen > 0, seen + 1, first), seen))

        all_met = tf.reduce_all(tf.gather(seen, numbers) > 0)
        cond(all_met, lambda: self._seen.assign_add(members), look, whole=True)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if self._compressor.takes_frozen:
            update(self, gradient, variable, learning_rate)
        else:
            super().update_step(gradient, variable, learning_rate)

    def _observe(self, warmup: AutoWarmup) -> None:
        """Show the run to the automatic warm-up, which may set the number of exact steps."""
        compressor, steps = self._compressor, tf.convert_to_tensor(self._exact_steps.value)
        numbers = [i for i, v in enumerate(self._trainable_variables) if compressor.is_compressed(v)]
        variances = [compressor.moments.variance(i) for i in numbers]
        if any(one is None for one in variances):  # Keras compares variables by their values
            numbers, variances = [], []

        def look() -> None:
            norms = _norms([tf.convert_to_tensor(v) for v in variances])
            seen = tf.gather(tf.convert_to_tensor(self._seen.value), np.array(numbers, np.int64))
            inputs = [steps, tf.convert_to_tensor(self.learning_rate), seen, norms]
            self._warmup_steps.assign(host_value(lambda *values: compressor.observe(warmup, *values), inputs, tf.int64))

        cond(steps % warmup.every == 0, look)

    def _clip_factors(self, means: list[Any]) -> Any:
        """By which averages are clipped by their norms, a tensor; of no elements if they are not."""
        limit = self.clipnorm or self.global_clipnorm
        if not limit:
            return tf.ones([0])
        norms = _norms(means) / (self.loss_scale_factor or 1.0)
        if self.global_clipnorm:
            norms = tf.fill([len(means)], tf.norm(norms))
        return tf.cast(limit / tf.maximum(norms, limit), tf.float32)

    def _scaled(self, means: list[Any], factors: Any) -> list[Any]:
        """Averages, clipped by the first of ``factors``, without the loss scale."""
        if self.clipnorm or self.global_clipnorm:
            means = [mean * tf.cast(factors[i], mean.dtype) for i, mean in enumerate(means)]
        by = self.loss_scale_factor
        return [mean / by for mean in means] if by else means

    def _compressed_step(self, large: list[tuple[Any, Any]], small: list[tuple[Any, Any]], finite: Any) -> Any:
        """A step of ``large`` by the engine, if the averages of ``small`` are ``finite`` and all else is; whether it is
        taken, and the factors by which these are clipped by their norms."""
        taken, factors, new = compressed(self._compressor, large, small, finite)

        def keep() -> None:
            for variable, value in new:
                variable.assign(value)
            self._compressed_steps.assign_add(1)

        cond(taken, keep, whole=True)
        return taken, factors

    def _finish(self, means: list[Any], factors: Any, variables: list[Any], large: list[Any]) -> None:
        """The update of the exact ``variables`` and what follows every step, by the wrapped optimizer itself; for those
        in ``large`` that are compressed, too."""
        means = self._scaled(means, factors)
        with self._without("clipnorm", "global_clipnorm", "loss_scale_factor", *self._averages_itself):
            if variables:
                super().apply(means, variables)
                self._count_seen(variables)
            else:
                self._backend_apply_gradients([], [])  # what follows every step: the moving average
                self._iterations.assign_add(1)
        for v in large:
            if self._compressor.is_compressed(v) and v.constraint is not None:
                v.assign(v.constraint(v))
        if self._averages_itself:
            cond(host_value(lambda: not self._compressor.pending, [], tf.bool), self._average_weights)

    @contextlib.contextmanager
    def _without(self, *options: str) -> Iterator[None]:
        """The wrapped optimizer as if it had not these ``options``."""
        saved = {name: getattr(self, name) for name in options}
        try:
            for name in options:
                setattr(self, name, None)
            yield
        finally:
            for name, value in saved.items():
                setattr(self, name, value)

    @property
    def _averages_itself(self) -> tuple[str, ...]:
        """The option ``use_ema`` where workers' weights differ between exchanges: the average is then of those that
        all have in common."""
        return ("use_ema",) if self.use_ema and self._wrapping.after_warmup is not None else ()

    def _average_weights(self) -> None:
        """With ``use_ema`` and a schedule: take these weights, which all workers have, into the moving average. Those
        of the steps since the last time count as these."""
        if not self._averages_itself:
            return
        now, last = tf.convert_to_tensor(self._iterations.value), tf.convert_to_tensor(self._averaged.value)
        steps = tf.cast(now - tf.cast(last, now.dtype), tf.float32)
        goes_on = tf.logical_and(last > 0, steps >= 0)  # or the steps were set back, and it begins
        keep = tf.where(goes_on, tf.pow(tf.constant(self.ema_momentum, tf.float32), tf.maximum(steps, 0.0)), 0.0)
        pairs = zip(self._trainable_variables, self._model_variables_moving_average, strict=True)
        for variable, average in ((v, a) for v, a in pairs if a is not None):
            share = tf.cast(keep, average.dtype)
            value = share * tf.convert_to_tensor(average) + (1 - share) * tf.convert_to_tensor(variable)
            average.assign(value)
            if every := self.ema_overwrite_frequency:
                due = now // every > tf.cast(last, now.dtype) // every
                variable.assign(tf.where(due, value, tf.convert_to_tensor(variable)))
        self._averaged.assign(tf.cast(now, tf.int64))

    @tf.autograph.experimental.do_not_convert  # it computes with numbers, which would be tensors
    def build(self, variables: list[Any]) -> None:
        """Create the wrapped optimizer's variables, and what this project needs besides."""
        if self.built:
            return
        _refuse_float8(variables)
        before = dict(self.__dict__)
        with outside():  # MultiOptimizer, say, builds in the graph of its first step
            super().build(variables)
            self._lineage.built = {k for k, v in self.__dict__.items() if k not in before or before[k] is not v}
            self._add_variables()

    def _add_variables(self) -> None:
        """Create what this project needs besides the wrapped optimizer's variables, which are there."""
        plain = {id(v) for v in self.plain_variables}
        self._compressor.exclude(self._wrapping.exact)
        self._compressor.moments.build()
        self._compressor.adapter.build(self)
        if self._wrapping.backward_passes_per_step > 1:
            reference = self._trainable_variables
            self._accumulated = self.add_optimizer_variables(reference, ACCUMULATED)
        self._compressor.moments.build_last()
        self._ours |= {id(v) for v in self._variables} - plain

    def finalize_variable_values(self, var_list: Any) -> None:
        """Of Keras, which calls it when ``fit`` ends: there the workers meet, since one that has stopped alone would
        leave the others waiting in their next step. Collective, with a schedule and ``use_ema`` elsewhere, too."""
        process_set = self._wrapping.process_set
        model = next((caller for name, caller in keras_callers() if name == "fit"), None)
        if model is not None and process_set.included():
            with told(process_set):
                self._check_trained()
            remark = STOPPED if model.stop_training else ""
            announce("the end of fit", process_set, self._compressor.of_round, remark=remark)
            self._agreement.fit_ended = True
        if model is not None or self._averages_itself:  # callbacks, or Keras's average, may replace the weights
            self.flush()
        if model is not None:
            flush_all(model, but=self)
        if not self.built:  # the model's other optimizers took all steps
            return
        if process_set.included():
            self._average_weights()
        # Keras gives the whole model's, and goes by their order.
        super().finalize_variable_values(self._trainable_variables)

    def _check_trained(self) -> None:
        """Raise ``ConfigurationError`` if ``fit`` has taken steps of the plain optimizer: Keras keeps the function that
        it has traced when ``model.optimizer`` is set."""
        steps = int(self.iterations) - int(self._begun)
        if not self._checked and steps > int(self._exact_steps) + int(self._compressed_steps):
            raise ConfigurationError(
                "no step of this DistributedOptimizer was taken: fit has trained with the plain optimizer in it, each "
                "worker alone, because Keras keeps the step that it traced before model.optimizer was set. Call "
                "model.compile(optimizer=...) with the DistributedOptimizer, and begin again from the same weights on "
                "all workers"
            )

    @property
    def plain_variables(self) -> list[Any]:
        """The variables that the wrapped optimizer has by itself, in its order."""
        return [v for v in self._variables if id(v) not in self._ours]

    @property
    def variables(self) -> list[Any]:
        """The wrapped optimizer's variables, then those that this class adds, whether it was built before or not."""
        return [*self.plain_variables, *(v for v in self._variables if id(v) in self._ours)]

    def set_weights(self, weights: Any) -> None:
        """Assign what ``variables`` of such an optimizer were, or those of a plain one: then the warm-up begins
        again. Local."""
        values, own = [np.asarray(weight) for weight in weights], self.variables
        plain = self.plain_variables
        if not self.built or len(values) not in (len(own), len(plain)):
            raise ConfigurationError(
                f"set_weights got {len(values)} values: expected those of a built optimizer's variables, {len(own)}, "
                f"or of a plain one's, {len(plain)}"
            )
        targets = own if len(values) == len(own) else plain
        for variable, value in zip(targets, values, strict=True):
            if tuple(variable.shape) != value.shape:
                raise ConfigurationError(
                    f"set_weights: {variable.path!r} has shape {tuple(variable.shape)} and its value {value.shape}"
                )
        if targets is plain:
            self._take_plain(values)
            return
        for variable, value in zip(targets, values, strict=True):
            variable.assign(value)
        self._compressor.forget()

    def load_own_variables(self, store: Any) -> None:
        """For Keras's files: those of such an optimizer, or of a plain one; then the warm-up begins again. Local."""
        if is_unbuilt(self):
            return
        if len(store.keys()) == len(self.plain_variables):
            self._take_plain([np.asarray(store[str(i)]) for i in range(len(self.plain_variables))])
            return
        super().load_own_variables(of_this_version(store, self.variables))
        self._compressor.forget()

    def _take_plain(self, values: list[np.ndarray]) -> None:
        for variable, value in zip(self.plain_variables, values, strict=True):
            variable.assign(value)
        if self._averages_itself:
            self._averaged.assign(int(self.iterations))
        self._compressor.take_plain()

    # -- this project's interface ---------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The phase of the next step."""
        warm = int(self._exact_steps.value.numpy()) < int(self._warmup_steps.value.numpy())
        return Phase.WARMUP if warm else Phase.COMPRESSED

    @property
    def recipe(self) -> Recipe:
        """How gradients become bits."""
        return self._wrapping.recipe

    def flush(self) -> None:
        """After local steps (``Local``, 0/1 Adam), bring all workers to the same weights, to be saved say. Collective.

        Costs one exchange (an exact one for 0/1 Adam) if the last step was a local one, at most a small message
        otherwise. Raises ``DesyncError`` on all workers if they have not taken as many steps of a round, and
        ``ConfigurationError`` if weights differ and ``SwapEMAWeights`` has put moving averages in their place.
        """
        if self._wrapping.process_set.included():
            if self.use_ema and self._compressor.pending:
                with told(self._wrapping.process_set):
                    check_swapped(SWAPPED)
            self._compressor.flush()

    def stats(self, *, norms: bool = True) -> Stats:
        """What the run has cost so far; ``norms`` False leaves out those that need a pass over memory. Local."""
        return self._compressor.stats(norms)

    def feedback_state_dict(self) -> dict[str, np.ndarray]:
        """This worker's error feedback by variable (flat float32). Save one for each worker. An empty array among them
        has a name that tells what they are of."""
        compressor = self._compressor
        compressor.settle()
        with compressor.here():
            residuals = compressor.engine.feedback.state_dict()
        return residuals | {feedback.mark(compressor.kind, compressor.workers): np.empty(0, np.float32)}

    def load_feedback_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what ``feedback_state_dict`` of the same worker gave; after a state was loaded, which resets them.

        Raises ``ConfigurationError`` if they are of another kind of run, model or number of workers.
        """
        compressor = self._compressor
        own = feedback.unmarked(mapping("state", state, "names to arrays"), compressor.kind, compressor.workers)
        compressor.load_feedback(own)

    def __reduce__(self) -> Any:
        """For ``copy`` and ``pickle``."""
        refuse_copy(self)
        return _copied, (self.plain_class(), self.get_config())

    def wrapped_config(self) -> dict[str, Any]:
        """The wrapped optimizer's configuration."""
        return super().get_config()

    def option_names(self) -> set[str]:
        """Of what is in ``wrapped_config``."""
        return set(self.config_at_any_rate())

    def config_at_any_rate(self) -> dict[str, Any]:
        """``wrapped_config`` with some number for the learning rate. Nothing is asked of that: a schedule needs no
        configuration, unless the whole model is saved."""
        bare = object.__new__(self.plain_class())
        vars(bare).update(vars(self), _learning_rate=0.0)
        config: dict[str, Any] = bare.get_config()
        return config

    def get_config(self) -> dict[str, Any]:
        """The wrapped optimizer's configuration, and how it was wrapped (but for the process set)."""
        compressor, exact = self._compressor, None
        if compressor.exact is not None and self._wrapping.exact:
            exact = {"numbers": sorted(compressor.exact), "shapes": compressor.shapes}
        return self.wrapped_config() | {PACKAGE: self._wrapping.to_config() | {EXACT: exact}}

    @classmethod
    def plain_class(cls) -> Any:
        """The wrapped optimizer's class."""
        return next(kind for kind in cls.__mro__ if not issubclass(kind, _DistributedOptimizer))

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Build the wrapped optimizer and wrap it again; needs ``hvd.init()``."""
        config = dict(config)
        own = dict(config.pop(PACKAGE))
        exact = own.pop(EXACT, None)
        optimizer = _distributed(cls.plain_class().from_config(config), Wrapping.of_config(own), loaded=True)
        if exact:
            known = exact if isinstance(exact, Mapping) else {"numbers": exact, "shapes": None}  # of an earlier version
            optimizer._compressor.exact, optimizer._compressor.shapes = set(known["numbers"]), known["shapes"]
        return optimizer


def check_ours(optimizer: Any) -> Any:
    """``optimizer``, or the one inside its loss scaling, if ``DistributedOptimizer`` returned it; else
    ``ConfigurationError``."""
    if isinstance(optimizer, MULTI):
        raise ConfigurationError(
            "the optimizer is a MultiOptimizer, whose optimizers take steps and keep state by themselves: call this "
            "with each of model.optimizer.optimizers. A checkpoint, and a callback that compares or flushes, expects "
            "a model with one DistributedOptimizer"
        )
    inner = optimizer.inner_optimizer if getattr(optimizer, "distributed", False) else optimizer
    if not isinstance(inner, _DistributedOptimizer):
        raise ConfigurationError(
            f"the optimizer is {type(optimizer).__name__}; expected what "
            "horovod_onebit.tf.DistributedOptimizer returned: model.compile(optimizer=...)"
        )
    return inner


def optimizers_of(layer: Any) -> dict[str, Any]:
    """The optimizers that ``DistributedOptimizer`` returned and that ``layer`` holds in attributes, or in lists, tuples
    and dicts that are attributes, by where they are; without their loss scaling, each one once. The first is the one
    that a model was compiled with."""
    found: dict[str, Any] = {}
    for where, one in _held_by(layer):
        inner = one.inner_optimizer if issubclass(_type_of(one), LossScaleOptimizer) else one
        # One whose plain optimizer was wrapped again has no state any more.
        newest = issubclass(_type_of(inner), _DistributedOptimizer) and inner._lineage.last is inner
        if newest and all(inner is not known for known in found.values()):
            found[where] = inner
    return found


def _held_by(layer: Any) -> Iterator[tuple[str, Any]]:
    """What ``layer`` holds in attributes, or in lists, tuples and dicts that are attributes, and where; first the
    optimizer that a model was compiled with."""
    attributes = {name: value for name, value in vars(layer).items() if not name.startswith("_self_")}  # TensorFlow's
    for name, value in ({"optimizer": attributes.get("optimizer")} | attributes).items():
        if issubclass(_type_of(value), dict):
            yield from ((f"{name}[{key!r}]", one) for key, one in value.items())
        elif issubclass(_type_of(value), (list, tuple)):
            yield from ((f"{name}[{i}]", one) for i, one in enumerate(value))
        else:
            yield name, value


def plain_optimizers(model: Any) -> list[tuple[str, Any]]:
    """The optimizers of Keras that may train ``model``, or a part of it, on each worker alone, and where they are.

    Those that ``model`` or a layer in it holds in attributes, but for what layers were compiled with; the one that
    ``model`` was compiled with, where it holds none of ours; and in place of a ``MultiOptimizer`` those that it has,
    once it is built.
    """
    held = [pair for layer in model._flatten_layers() for pair in _held_by(layer) if pair[0] != "optimizer"]
    if not held_optimizers(model) or _leaves("optimizer", model.optimizer):
        held.insert(0, ("optimizer", model.optimizer))
    found: list[tuple[str, Any]] = []
    for where, value in held:
        for place, one in _leaves(where, value) or [(where, value)]:
            if _is_plain(one) and all(one is not known for _, known in found):
                found.append((place, one))
    return found


def _leaves(where: str, value: Any) -> list[tuple[str, Any]]:
    """What a ``MultiOptimizer`` has, as far as it is built; nothing of others."""
    if keras.optimizers.Optimizer not in _type_of(value).__mro__:
        return []
    inner = vars(value).get("inner_optimizer", value)
    optimizers = inner.optimizers if isinstance(inner, MULTI) else []
    return [(f"{where}.optimizers[{i}]", one) for i, one in enumerate(optimizers) if one.built]


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is an optimizer of Keras that neither this library nor Horovod has wrapped."""
    kinds = _type_of(value).__mro__
    if keras.optimizers.Optimizer not in kinds or any(kind.__module__.startswith("horovod") for kind in kinds):
        return False
    inner, lineage = vars(value).get("inner_optimizer"), vars(value).get("_lineage")
    wrapped = lineage is not None and lineage.last is not None
    return not (wrapped or isinstance(value, MULTI)) and (inner is None or _is_plain(inner))


def _type_of(value: Any) -> type:
    """The class of ``value``; that of a proxy, whose object may be gone."""
    try:
        kind: type = value.__class__
    except Exception:
        return object
    return kind


def check_one(found: Mapping[str, Any]) -> None:
    """Raise ``ConfigurationError`` if the optimizers that were ``found``, by where, are more than one."""
    if len(found) > 1:
        raise ConfigurationError(
            f"the model has {len(found)} of DistributedOptimizer's optimizers, {', '.join(found)}; expected one, since "
            "the state of the others would be lost. For save_checkpoint and load_checkpoint give each a model of its "
            "own (generator.compile(optimizer=g_opt)), keep it in no attribute of this one, and save each model in a "
            "folder of its own; elastic's KerasState takes one optimizer alone. Load a pretrained part without its "
            "optimizer: keras.models.load_model(path, compile=False)"
        )


def held_optimizers(model: Any) -> list[Any]:
    """Those that ``DistributedOptimizer`` returned and that ``model`` or a layer in it holds, each one once: see
    ``optimizers_of``."""
    found = [optimizer for layer in model._flatten_layers() for optimizer in optimizers_of(layer).values()]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def flush_all(model: Any, but: Any = None) -> None:
    """``flush`` of each of ``held_optimizers``, ``but`` one that was flushed. Collective."""
    for optimizer in held_optimizers(model):
        if optimizer is not but:
            optimizer.flush()


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    warmup_steps: int | float | str | None = None,
    total_steps: int | None = None,
    schedule: Schedule | None = None,
    recipe: str | Recipe = "robust",
    exact: Iterable[str] | None = None,
    kernels: str = "auto",
    check_replicas_every: int | None = None,
) -> Any:
    """A Keras optimizer whose gradients travel as one bit per parameter once warm-up is over.

    The arguments of ``horovod.tensorflow.keras.DistributedOptimizer`` keep their names and meanings;
    ``device_dense``, ``device_sparse``, ``num_groups``, ``groups`` and ``scale_local_gradients`` tune operations that
    this one does not have, and are refused unless they are the defaults.

    Args:
        optimizer: ``keras.optimizers.Adam``, ``AdamW``, ``SGD``, ``Lion`` or ``Lamb``, or a ``LossScaleOptimizer``
            around one; any with ``schedule=Gradients()``, ``schedule=Local(...)`` or ``recipe="exact"``. The result is
            an instance of its class.
        compression: ``hvd.Compression.none`` or ``fp16``, of exact steps and small tensors.
        sparse_as_dense: turn sparse gradients into dense ones; without it they are refused.
        gradient_predivide_factor: divides gradients before the sum of an exact mean, which is multiplied by it; the
            mean stays the same. Needs ``hvd.Average``.
        op: ``hvd.Average`` or ``hvd.Sum``.
        backward_passes_per_step: calls of ``apply`` whose gradients are added up before one exchange; their sum is
            divided by their number if ``average_aggregated_gradients``.
        process_set: the workers that train together; all by default.
        warmup_steps: steps before compression starts, which are the optimizer's own with the mean gradient, as
            ``Recipe.warmup`` says; a share of ``total_steps`` below 1; or ``"auto"``, the default, which starts
            compression when the learning rate no longer rises and the second moment is stable, but at most 210 steps
            after that rise. (A model that was saved by Keras before that looks at both afresh
            once it is loaded; ``save_checkpoint`` saves what was seen.)
        total_steps: optimizer steps of the whole run, where ``warmup_steps`` is a share of them.
        schedule: ``horovod_onebit.tf.ZeroOne(...)`` makes Adam 0/1 Adam; a ``Stepwise`` of your own says what Adam's
            steps send. With ``horovod_onebit.tf.Gradients()``, ``optimizer`` may be any; its steps are its own, with
            mean gradients that travel in three bits an element. With ``horovod_onebit.tf.Local(...)``, too; each worker
            takes its steps alone, and what all have moved is exchanged after some. None has ``warmup_steps``.
        recipe: ``"robust"``, ``"paper"``, ``"fixed"``, or a ``horovod_onebit.Recipe``. ``"exact"`` never compresses:
            each step is the optimizer's own with the mean gradient, float32 or as ``compression`` says, and what this
            one checks is checked; ``warmup_steps`` then has no effect.
        exact: variables that are never compressed, by path or name, or by patterns of them such as ``"*embedding*"``.
            One that matches nothing is a ``ConfigurationError`` when the optimizer is built.
        kernels: ``"auto"`` compresses variables on a GPU there, by the CUDA kernels, where these work and all
            compressed variables are on one GPU; ``"cuda"`` raises an error where they do not work; ``"cpu"``
            compresses in the host's memory, as any does with a ``schedule``, and for gradients in few bits.
        check_replicas_every: the weights of all workers are compared before the second step and after a ``fit``, and
            with the optimizer's state when compression starts: differences raise ``DesyncError`` on all workers, which
            names them. A number compares both after every so many steps, too, or after the next exchange where they
            differ between exchanges; False compares nothing. With ``Local``, the weights are compared in the first
            round and after whatever else sets them, and numbers are refused.

    ``name`` begins the names of the collectives; optimizers of one name are told apart by the order they are built in.

    ``clipnorm`` and ``global_clipnorm`` act on the averaged gradient in warm-up; afterwards on the root mean square,
    over the workers, of the norms of their own gradients, so that the factor is the same on all of them.

    Raises:
        UnsupportedError: an optimizer or an option that has no 1-bit form.
        ConfigurationError: an invalid argument.
    """
    arguments = {key: value for key, value in locals().items() if key != "optimizer"}
    if not hvd.is_initialized():
        raise ConfigurationError("call hvd.init() before DistributedOptimizer")
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedError(f"Keras runs on {keras.backend.backend()!r}: set KERAS_BACKEND=tensorflow")
    if isinstance(optimizer, _DistributedOptimizer):
        raise ConfigurationError("this optimizer is a DistributedOptimizer already: wrap the plain one")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if type(optimizer) not in (keras.optimizers.LossScaleOptimizer, LossScaleOptimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__} overrides methods of keras.optimizers.LossScaleOptimizer, which this "
                "library has to override itself: wrap a plain LossScaleOptimizer"
            )
        return around(optimizer, DistributedOptimizer(optimizer.inner_optimizer, **arguments))
    if device_dense or device_sparse or num_groups or groups is not None or not scale_local_gradients:
        raise UnsupportedError(
            "device_dense, device_sparse, num_groups, groups and scale_local_gradients are not offered: leave them out"
        )
    chosen_recipe, chosen_schedule, warmup = chosen(recipe, schedule, warmup_steps, total_steps)
    wrapping = Wrapping(
        warmup=warmup, recipe=chosen_recipe, op=op,
        compression=compression, sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor,
        backward_passes_per_step=backward_passes_per_step, average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set, exact=() if exact is None else exact, name=name,
        schedule=chosen_schedule, kernels=kernels, check_replicas_every=check_replicas_every,
    )  # fmt: skip
    Placement(kernels).check()
    return _distributed(optimizer, wrapping)


def _distributed(optimizer: Any, wrapping: Wrapping, *, loaded: bool = False) -> Any:
    """``optimizer`` as an instance of its class's distributed subclass."""
    schedule, kind = wrapping.schedule, type(optimizer)
    if isinstance(optimizer, MULTI):
        raise UnsupportedError(
            "a MultiOptimizer takes no step of its own: wrap each optimizer that is in it, "
            "keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(default_optimizer="
            "onebit.DistributedOptimizer(...), {pattern: onebit.DistributedOptimizer(...)}))"
        )
    if isinstance(schedule, Local) and isinstance(optimizer, keras.optimizers.Ftrl):
        raise UnsupportedError(
            "Ftrl computes weights from its own state, so that those of all workers would be forgotten in the step "
            "after a round: use schedule=horovod_onebit.tf.Gradients()"
        )
    if isinstance(schedule, Local) and schedule.delay:
        raise UnsupportedError(
            f"Local(delay={schedule.delay}): a graph of TensorFlow ends when all its operations have, and no message "
            "can be under way between two steps: leave delay out"
        )
    adapter = _adapter_of(optimizer, schedule)
    adapter.check(optimizer)
    _refuse_strategies(optimizer)
    _refuse_float8(optimizer._trainable_variables if optimizer.built else ())
    if optimizer.gradient_accumulation_steps:
        raise UnsupportedError("gradient_accumulation_steps: use DistributedOptimizer(backward_passes_per_step=...)")
    for option in ("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor"):
        if getattr(optimizer, option) is not None:
            positive(option, getattr(optimizer, option))
    wrapped: Any = object.__new__(_class_of(kind))
    take_over(optimizer, wrapped)
    wrapped._wrapping = wrapping
    wrapped._checked = wrapped._compiled = wrapped._warned = False
    wrapped._ours = frozenset()
    process_set = wrapping.process_set
    name = next_name(process_set.process_set_id, process_set.ranks or (), wrapping.name or kind.__name__, loaded=loaded)
    steps = ZeroOneSteps if isinstance(schedule, Stepwise) else LocalSteps if wrapping.local else Compressor
    wrapped._compressor = steps(wrapped, adapter, wrapping, name)
    wrapped._agreement = Agreement(wrapped._compressor)
    counters = ["_begun", "_exact_steps", "_compressed_steps", "_warmup_steps"]
    if wrapping.backward_passes_per_step > 1:
        counters.append("_passes")
    if wrapped._averages_itself:
        counters.append("_averaged")
    for counter in counters:
        setattr(wrapped, counter, wrapped.add_variable(shape=(), dtype="int64", name=f"onebit{counter}"))
    if wrapped._averages_itself:
        wrapped._averaged.assign(int(optimizer.iterations))
    wrapped._begun.assign(int(optimizer.iterations))
    wrapped._warmup_steps.assign(0 if wrapping.local else wrapping.warmup.steps)
    wrapped._ours |= {id(getattr(wrapped, counter)) for counter in counters}
    if wrapped.built:
        wrapped._add_variables()
        if (last := wrapped._lineage.last) is not None:
            wrapped._compressor.inherit(last._compressor)
    wrapped._lineage.last = wrapped
    return wrapped


def _adapter_of(optimizer: Any, schedule: Schedule | None) -> Adapter:
    if isinstance(schedule, Local):
        return LocalAdapter(schedule, optimizer)
    return AnyAdapter(optimizer) if isinstance(schedule, Gradients) else adapter_for(optimizer, schedule)


def check_averages(optimizer: Any) -> None:
    """Raise ``ConfigurationError`` if the weights are to be saved, and moving averages are in their place."""
    if check_ours(optimizer).use_ema:
        check_swapped(AVERAGES_SAVED)


def check_swapped(text: str) -> None:
    """Raise ``ConfigurationError`` with ``text`` if ``SwapEMAWeights`` has put moving averages into the model."""
    running = (one for callbacks in callback_lists() for one in callbacks)
    if any(isinstance(one, keras.callbacks.SwapEMAWeights) and one._ema_weights_in_model for one in running):
        raise ConfigurationError(text)


def _refuse_strategies(optimizer: Any) -> None:
    strategy = tf.distribute.get_strategy()
    within = tf.distribute.has_strategy() and not isinstance(strategy, tf.distribute.OneDeviceStrategy)
    if within or isinstance(optimizer._iterations.value, tf.distribute.DistributedValues):
        raise UnsupportedError(
            "tf.distribute: this optimizer is made or wrapped within the scope of a strategy that has replicas of its "
            "own. Leave the strategy out: workers are processes, one process for each GPU, started by horovodrun"
        )


def _refuse_float8(variables: Iterable[Any]) -> None:
    for v in variables:
        if getattr(v, "overwrite_with_gradient", False):
            raise UnsupportedError(
                f"{path_of(v)!r}, of a float8 layer, takes its gradient for its value, of which workers have no mean: "
                "leave quantize('float8') out"
            )


def _norms(tensors: list[Any]) -> Any:
    """The norm of each, float64: in float32 the order of the additions would show, which the number of threads decides,
    and large and small ones would leave its range. Rounded to float32, the order hardly ever shows."""
    return tf.stack([tf.norm(tf.cast(one, tf.float64)) for one in tensors]) if tensors else tf.zeros([0], tf.float64)


KNOWN: tuple[type, ...] = tuple(
    kind
    for kind in (*kinds(), *vars(keras.optimizers).values())
    if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer) and kind not in NOT_WRAPPED
)
"""Classes whose distributed ones are registered at once, as models are loaded by the names of classes: those that have
a rule, wherever they come from, and all of Keras's, which ``Local`` wraps."""
_classes: dict[type, type] = {}


def _class_of(kind: type) -> type:
    """The distributed subclass of an optimizer class, registered so that saved models can name it."""
    if kind not in _classes:
        cls = type(kind.__name__, (_DistributedOptimizer, kind), {"__module__": __name__, "__doc__": kind.__doc__})
        name = kind.__name__
        if kind not in KNOWN and any(name == known.__name__ for known in KNOWN):
            name = f"{kind.__module__}.{name}"
        _classes[kind] = keras.saving.register_keras_serializable(PACKAGE, name)(cls)
    return _classes[kind]


def _copied(kind: type, config: dict[str, Any]) -> Any:
    return _class_of(kind).from_config(config)  # type: ignore[attr-defined]


for _kind in KNOWN:
    _class_of(_kind)

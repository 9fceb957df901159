"""``LossScaleOptimizer`` whose workers decide together whether a step is taken."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.tf.graph import host_call, in_order, outside, with_a_batch
from horovod_onebit.tf.lineage import give, lineage_of
from horovod_onebit.tf.meeting import agree, told


def of_this_version(store: Any, variables: Sequence[Any]) -> Any:
    """What Keras's file has ``store``d of these ``variables``: with the last one, zero, which version 0.1 had not."""
    count = len(variables) - 1
    if len(store.keys()) != count or not count:
        return store
    last = np.asarray(store[str(count - 1)])
    if (last.shape, str(last.dtype)) != (tuple(variables[-2].shape), variables[-2].dtype):
        return store  # of another kind of run, which Keras says
    return {str(i): store[str(i)] for i in range(count)} | {str(count): np.zeros(())}


def is_unbuilt(optimizer: Any) -> bool:
    """Whether ``optimizer`` is not built, so that nothing can be loaded into it: a warning says so, as Keras's does."""
    if not optimizer.built:
        warnings.warn(
            f"Skipping variable loading for optimizer {optimizer.name!r}, because it is not built: call "
            "optimizer.build(model.trainable_variables) before its state is loaded",
            stacklevel=3,
        )
    return not optimizer.built


def check_variables(optimizer: Any, variables: Any) -> None:
    """Raise ``ConfigurationError`` if a step of ``optimizer``, which is not built, is given no ``variables``."""
    if variables is None and not optimizer.built:
        raise ConfigurationError(
            "apply(grads) before the optimizer was built, so that it knows no variables: pass them, "
            "apply(grads, model.trainable_variables), or call optimizer.build(model.trainable_variables) first"
        )


@keras.saving.register_keras_serializable("horovod_onebit")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """What ``DistributedOptimizer(keras.optimizers.LossScaleOptimizer(...))`` gives.

    Keras's own looks at this worker's gradients alone: with Inf on one worker that one would halve its scale and skip,
    and the others would wait for it. Here Inf on any worker is Inf on all; but with ``schedule=Local(...)`` each worker
    has its own scale, and skips steps alone.
    """

    distributed = True

    def scale_loss(self, loss: Any) -> Any:
        """``loss`` times the scale of now, also in a graph that is traced before the optimizer is built: as variables
        are made outside of it, TensorFlow does not trace it again, and Keras would leave the first scale in it."""
        scale = self.dynamic_scale if self.built else self._made_early()["dynamic_scale"]
        return keras.ops.multiply(loss, scale)

    def _made_early(self) -> dict[str, Any]:
        early: dict[str, Any] = self.__dict__.setdefault("_early", {})  # which TensorFlow is not to track
        if not early:
            made = ("step_counter", "int", 0), ("dynamic_scale", "float32", self.initial_scale)
            with outside(), keras.name_scope(self.name, caller=self):
                for name, dtype, value in made:
                    start = keras.initializers.Constant(value)
                    early[name] = super().add_variable(shape=(), dtype=dtype, initializer=start, name=name)
        return early

    def add_variable(self, *args: Any, **options: Any) -> Any:
        """As Keras's; its ``build`` gets the variables that were made before it."""
        early = self.__dict__.get("_early", {})
        return early.pop(options["name"]) if options.get("name") in early else super().add_variable(*args, **options)

    def load_own_variables(self, store: Any) -> None:
        if is_unbuilt(self):
            return
        if len(store.keys()) == len(self._variables) + len(self.inner_optimizer.plain_variables):
            for i, variable in enumerate(self._variables):  # of a plain one; Keras loads the inner one's by itself, too
                variable.assign(store[str(i)])
            return
        super().load_own_variables(of_this_version(store, self.variables))

    @tf.autograph.experimental.do_not_convert  # host functions too would be traced, and fail
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """One step: Keras calls it from ``fit`` and from ``apply_gradients``. Collective."""
        with told(self._wrapping.process_set):
            check_variables(self, trainable_variables)
        if not self.built:
            with outside(), keras.name_scope(self.name, caller=self):
                self.build(trainable_variables)
        with self._compressor.host_functions.keep(), with_a_batch():
            self.inner_optimizer.prepare_step()
            if self._wrapping.local is not None:
                self._apply_alone(list(grads), trainable_variables)
            else:
                super().apply(grads, trainable_variables)

    def _apply_alone(self, grads: list[Any], trainable_variables: Any) -> None:
        """A local step, which counts even if it is skipped: all workers exchange after as many."""
        finite, scale = self.check_finite(grads), tf.convert_to_tensor(self.dynamic_scale)
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        unscaled = [
            g if g is None or self._overwrite_variable_with_gradient(v) else keras.ops.divide(g, scale)
            for g, v in zip(grads, variables, strict=True)
        ]
        self.inner_optimizer.apply(unscaled, trainable_variables)
        count = tf.convert_to_tensor(self.step_counter) + 1
        grown = tf.logical_and(finite, count >= self.dynamic_growth_steps)
        self.dynamic_scale.assign(scale * tf.where(grown, 2.0, tf.where(finite, 1.0, 0.5)))
        self.step_counter.assign(tf.where(tf.logical_and(finite, tf.logical_not(grown)), count, tf.zeros_like(count)))

    def check_finite(self, grads: Any) -> Any:
        """Whether the gradients are finite: those of all workers, collective; with local steps those of this one."""
        finite = super().check_finite(grads)
        inner = self.inner_optimizer
        if inner._wrapping.local is not None or not inner._wrapping.process_set.included():
            return finite
        compressor, engine = inner._compressor, inner._compressor.engine

        def count(everywhere: Any) -> None:
            engine.skipped += not bool(everywhere)

        with in_order():
            everywhere = agree(finite, compressor.collectives, "loss scaling", engine.name)
            host_call(count, everywhere)
        return everywhere

    def __reduce__(self) -> Any:
        """For ``copy`` and ``pickle``."""
        refuse_copy(self)
        return type(self).from_config, (self.get_config(),)

    # The inner optimizer's.
    _compressor = property(attrgetter("inner_optimizer._compressor"))
    _wrapping = property(attrgetter("inner_optimizer._wrapping"))
    phase = property(attrgetter("inner_optimizer.phase"))
    recipe = property(attrgetter("inner_optimizer.recipe"))
    flush = property(attrgetter("inner_optimizer.flush"))
    stats = property(attrgetter("inner_optimizer.stats"))
    feedback_state_dict = property(attrgetter("inner_optimizer.feedback_state_dict"))
    load_feedback_state_dict = property(attrgetter("inner_optimizer.load_feedback_state_dict"))


def refuse_copy(optimizer: Any) -> None:
    """Raise ``UnsupportedError`` if ``optimizer`` has state: Keras copies none, which would go unnoticed."""
    if optimizer.built:
        raise UnsupportedError(
            "this optimizer is built, and Keras copies optimizers without their state: copy, pickle or save the model "
            "that it is compiled into"
        )


def around(optimizer: Any, inner: Any) -> LossScaleOptimizer:
    """``optimizer``, a Keras ``LossScaleOptimizer``, around the distributed ``inner``; with its scale, or that of what
    it was wrapped as before."""
    wrapped: Any = object.__new__(LossScaleOptimizer)
    lineage, options = lineage_of(optimizer), {"initial_scale", "dynamic_growth_steps"}
    last, source, attributes = lineage.last, optimizer, {name: optimizer.__dict__[name] for name in options}
    if last is not None:
        attributes |= lineage.kept(optimizer, options)
        source = last if last.built and inner.built else optimizer
    lineage.given = dict(optimizer.__dict__)
    give(wrapped, source.__dict__ | attributes, list(source._variables), source)
    wrapped.inner_optimizer = inner
    lineage.last = wrapped
    return wrapped

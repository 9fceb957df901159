"""What the step needs to run alike in a TensorFlow graph and eagerly."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_onebit.errors import UnsupportedError
from horovod_onebit.tf.loss_scale import LossScaleOptimizer


def cond(condition: Any, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """``tf.cond`` for branches that return nothing; a plain ``if`` outside of graphs."""
    if tf.executing_eagerly():
        (then if condition else otherwise)()
        return

    def branch(work: Callable[[], None]) -> Callable[[], Any]:
        def run() -> Any:
            work()
            return tf.constant(0)

        return run

    tf.cond(condition, branch(then), branch(otherwise))


def adopt(array: np.ndarray) -> Any:
    """A tensor that shares the memory of ``array``, which must not be written to any more."""
    shareable = array.size and array.flags.writeable  # what TensorFlow gave is not, after a step that was skipped
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__()) if shareable else tf.constant(array)


def host_call(work: Callable[[], None]) -> None:
    """Run ``work`` whenever the step runs, and not only when it is traced."""
    if tf.executing_eagerly():
        work()
    else:
        with tf.device("/CPU:0"):
            tf.py_function(work, [], [])


def host_value(work: Callable[..., Any], inputs: list[Any], dtype: Any) -> Any:
    """The scalar that ``work`` returns for the values of ``inputs`` whenever the step runs."""
    if tf.executing_eagerly():
        return work(*inputs)
    with tf.device("/CPU:0"):
        value = tf.py_function(work, inputs, dtype)
    value.set_shape([])
    return value


def check_callers() -> None:
    """Refuse callers that cannot work, found on the stack: while the step is traced, or at the first eager one."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.Model) and getattr(caller, "jit_compile", False) is True:
            raise UnsupportedError(
                "this model is compiled with jit_compile=True, and XLA can neither gather nor call the host: "
                "model.compile(..., jit_compile=False)"
            )
        scaling = isinstance(caller, keras.optimizers.LossScaleOptimizer)
        if scaling and not isinstance(caller, LossScaleOptimizer):
            raise UnsupportedError(
                "Keras's LossScaleOptimizer (which compile() adds under the mixed_float16 policy) lets each worker "
                "decide alone whether it takes a step, and the others would wait for ever: wrap it, "
                "onebit.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), ...)"
            )
        frame = frame.f_back  # type: ignore[assignment]

"""Broadcasting of Keras variables."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from horovod_onebit import checks
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.tf import moments
from horovod_onebit.tf.agreement import ACCUMULATED
from horovod_onebit.tf.graph import in_order
from horovod_onebit.tf.meeting import announce, told


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: Any = hvd.global_process_set,
    *,
    model: Any = None,
) -> None:
    """Give every worker the values of ``root_rank``: Keras variables or ``tf.Variable``, in the same order. Collective.

    For custom loops, once after the model and the optimizer are built: ``model.variables`` and
    ``optimizer.variables``. It may be called inside of ``tf.function``. ``process_set`` are the workers that take part.
    States of random generators stay each worker's own, as in the callback: workers drop different units.
    Raises ``DesyncError`` on all workers if they do not call it together, with as many variables of the same shapes
    and types; ``ConfigurationError`` for what is no variable, and for a ``root_rank`` that is not in the process set.

    ``model`` is needed if it has ``Normalization`` layers, which compute with constants that they make of their
    variables: they make them anew. Not within ``tf.function``; functions of one's own are to be traced afterwards.
    """
    with told(process_set):
        if model is not None and not (isinstance(model, keras.Model) and tf.executing_eagerly()):
            raise ConfigurationError(
                f"model={type(model).__name__}: expected a Keras model, and a call outside of tf.function"
            )
        checks.root_rank(root_rank, hvd.size(), process_set.ranks)
        listed = list(variables) if isinstance(variables, Iterable) else [variables]
        strange = [type(v).__name__ for v in listed if not isinstance(v, (keras.Variable, tf.Variable))]
        if strange:
            raise ConfigurationError(f"variables has {strange[0]}: expected variables, such as model.variables")
    if not process_set.included():
        return
    moments.broadcast(listed)
    targets = [variable.value if hasattr(variable, "path") else variable for variable in replicated(listed)]
    kinds = [(tuple(target.shape), target.dtype.name) for target in targets]
    with in_order():
        agreed = announce(f"broadcast from worker {root_rank}", process_set, str(kinds))
        with tf.control_dependencies([agreed]):
            values = [_sendable(tf.convert_to_tensor(target)) for target in targets]

            def work(*values: Any) -> list[Any]:
                return [
                    hvd.broadcast(
                        value,
                        root_rank,
                        name=f"onebit.broadcast.{index}",
                        ignore_name_scope=True,
                        process_set=process_set,
                    )
                    for index, value in enumerate(values)
                ]

            # In a graph of its own: eager operations of Horovod have no names.
            specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
            received = tf.function(work, autograph=False).get_concrete_function(*specs)(*values)
        for target, value in zip(targets, received, strict=True):
            target.assign(_received(value, target.dtype))
    if model is not None:
        follow_variables(model)


def replicated(variables: Iterable[Any]) -> list[Any]:
    """Those of ``variables`` that all workers are to have alike: neither the states of random generators, by which
    workers drop other units, nor gradients that wait for the last backward pass of a step."""
    common = [v for v in variables if ACCUMULATED not in v.name]
    return [v for v in common if "seed" not in v.name or keras.backend.is_float_dtype(v.dtype)]


_constants: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""By model, the constants of its layers when ``follow_variables`` was called last."""


def follow_variables(model: Any) -> None:
    """The variables of ``model`` were assigned: layers that compute with constants that they make of theirs do it
    anew, and so do the graphs of ``fit`` and others that were traced with other constants. Local; not in a graph."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Normalization)]
    found = [layer for layer in layers if layer.input_mean is None]  # or it has no variables
    for layer in found:
        layer.finalize_state()
    # Not those of just before: adapt() makes constants, and leaves the graphs as they are.
    before, now = _constants.get(model), [np.array([layer.mean, layer.variance]) for layer in found if layer.built]
    _constants[model] = now
    if before is not None and len(before) == len(now) and all(map(np.array_equal, before, now)):
        return
    for name in ("train", "test", "predict") if found else ():
        if getattr(model, f"{name}_function", None) is not None:
            getattr(model, f"make_{name}_function")(force=True)


OF_HOROVOD = (tf.float16, tf.float32, tf.float64, tf.int8, tf.int32, tf.int64, tf.uint8)
"""What is broadcast as it is; everything else as bytes."""


def _sendable(value: Any) -> Any:
    if value.dtype == tf.bool:
        return tf.cast(value, tf.uint8)
    return value if value.dtype in OF_HOROVOD else tf.bitcast(value, tf.uint8)


def _received(value: Any, dtype: Any) -> Any:
    if dtype == tf.bool:
        return tf.cast(value, tf.bool)
    return value if dtype in OF_HOROVOD else tf.bitcast(value, dtype)

"""Broadcasting of Keras variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_onebit import checks
from horovod_onebit.errors import ConfigurationError


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: Any = hvd.global_process_set
) -> None:
    """Give every worker the values of ``root_rank``: Keras variables or ``tf.Variable``, in the same order. Collective.

    For custom loops, once after the model and the optimizer are built: ``model.variables`` and
    ``optimizer.variables``.
    """
    checks.root_rank(root_rank, hvd.size())
    listed = list(variables) if isinstance(variables, Iterable) else [variables]
    strange = [type(v).__name__ for v in listed if not isinstance(v, (keras.Variable, tf.Variable))]
    if strange:
        raise ConfigurationError(f"variables has {strange[0]}: expected variables, such as model.variables")
    if not process_set.included():
        return
    for index, variable in enumerate(listed):
        target = variable.value if hasattr(variable, "path") else variable
        value = tf.convert_to_tensor(target)
        kind = tf.uint8 if value.dtype in (tf.bool, tf.bfloat16) else value.dtype
        data = tf.cast(value, tf.uint8) if value.dtype == tf.bool else value
        if value.dtype == tf.bfloat16:
            data = tf.bitcast(value, tf.uint8)
        name = f"onebit.broadcast.{index}"
        received = hvd.broadcast(data, root_rank, name=name, process_set=process_set)
        if value.dtype == tf.bfloat16:
            received = tf.bitcast(received, tf.bfloat16)
        target.assign(tf.cast(received, value.dtype) if kind is tf.uint8 and value.dtype == tf.bool else received)

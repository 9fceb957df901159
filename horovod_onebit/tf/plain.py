"""From a ``DistributedOptimizer`` back to an optimizer of Keras alone."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.tf.optimizer import check_ours


def plain_optimizer(optimizer: Any) -> Any:
    """A plain Keras optimizer with the configuration and the state of ``optimizer``, to continue without this library.

    ``optimizer`` is what ``DistributedOptimizer`` returned, and is built. The result is built for the same variables.
    Its moments are copies, in the form that Keras's optimizer needs: after compression has started, second moments are
    scaled by what its bias correction goes by, ``iterations``. It may be wrapped again, with other arguments. With a
    ``LossScaleOptimizer`` the result is one, too.

    Local. With ``Local`` and 0/1 Adam, call ``optimizer.flush()`` on all workers before.

    Raises ``ConfigurationError`` if the optimizer is not built, or if workers have taken local steps since the last
    exchange.
    """
    inner = check_ours(optimizer)
    inner._compressor.check_built()
    if inner._compressor.pending:
        raise ConfigurationError(
            "the workers have taken local steps that they have not exchanged yet: call optimizer.flush() on all "
            "workers before plain_optimizer(optimizer)"
        )
    inner._compressor.settle()
    inner._compressor.options = inner._compressor.options_now()  # which the plain optimizer has
    if isinstance(inner._learning_rate, keras.Variable):
        found = inner.plain_class().from_config(inner.wrapped_config())
    else:  # a schedule, or another function
        found = inner.plain_class().from_config(inner.config_at_any_rate())
        found.learning_rate = inner._learning_rate
    found.__dict__.update({k: v for k, v in inner.__dict__.items() if k.startswith("_exclude_from_weight_decay")})
    found.build(list(inner._trainable_variables))
    values = {id(variable): value for variable, value in inner._compressor.moments.in_plain_form()}
    for target, variable in zip(found.variables, inner.plain_variables, strict=True):
        target.assign(values.get(id(variable), tf.convert_to_tensor(variable)))
    if inner is optimizer:
        return found
    outer = keras.optimizers.LossScaleOptimizer(
        found,
        initial_scale=optimizer.initial_scale,
        dynamic_growth_steps=optimizer.dynamic_growth_steps,
        name=optimizer.name,
    )
    outer.build(list(inner._trainable_variables))
    outer.step_counter.assign(optimizer.step_counter)
    outer.dynamic_scale.assign(optimizer.dynamic_scale)
    return outer

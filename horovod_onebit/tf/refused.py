"""What Horovod offers for Keras and this library does not: under Keras 3, Horovod's own would not synchronise."""

from __future__ import annotations

from typing import Any, NoReturn

from horovod_onebit.errors import UnsupportedError


def load_model(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises ``UnsupportedError``."""
    raise UnsupportedError(
        "horovod's load_model: under Keras 3 it loads a plain optimizer, which does not synchronise. Use "
        "keras.models.load_model; if the model was saved with a plain optimizer, "
        "model.compile(optimizer=DistributedOptimizer(model.optimizer), ...) afterwards"
    )


def PartialDistributedOptimizer(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises ``UnsupportedError``."""
    raise UnsupportedError(
        "horovod's PartialDistributedOptimizer: under Keras 3 it does not synchronise, and this library keeps no "
        "layers local. Use DistributedOptimizer for all of them"
    )

"""Horovod with one bit per parameter, under the optimizer that you already use.

This package imports neither framework; ``horovod_onebit.torch`` and ``horovod_onebit.tf`` are the faces.
"""

from horovod_onebit._version import __version__
from horovod_onebit.errors import (
    CheckpointArgumentError,
    CheckpointError,
    ConfigurationError,
    DesyncError,
    NonFiniteError,
    OnebitError,
    TransportError,
    UnsupportedError,
    WireError,
)
from horovod_onebit.recipe import PRESETS, Recipe
from horovod_onebit.schedule import Gradients, Local, ZeroOne

__all__ = [
    "PRESETS",
    "CheckpointArgumentError",
    "CheckpointError",
    "ConfigurationError",
    "DesyncError",
    "Gradients",
    "Local",
    "NonFiniteError",
    "OnebitError",
    "Recipe",
    "TransportError",
    "UnsupportedError",
    "WireError",
    "ZeroOne",
    "__version__",
]

"""The only place where numbers are crunched: pure functions over flat float32 arrays.

``reference`` (NumPy) is the specification, ``cpu`` (Numba) is what runs; both modules have the same functions with
the same arguments, so a module is a backend.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from horovod_onebit.errors import ConfigurationError

BACKENDS = ("cpu", "reference")


def backend(name: str = "cpu") -> ModuleType:
    """The kernels called ``name``: one of ``BACKENDS``."""
    if name not in BACKENDS:
        raise ConfigurationError(f"kernels={name!r} is unknown; expected one of {', '.join(BACKENDS)}")
    return importlib.import_module(f"horovod_onebit.kernels.{name}")

"""The only place where numbers are crunched: pure functions over flat float32 arrays.

``reference`` (NumPy) is the specification, ``cpu`` (Numba) is what runs, ``cuda`` (Numba CUDA) is for arrays in the
memory of a GPU; the modules have the same functions with the same arguments, so a module is a backend.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Literal

from horovod_onebit.errors import ConfigurationError

BACKENDS = ("cpu", "cuda", "reference")

Kernels = Literal["auto", "cpu", "cuda"]
"""The argument ``kernels`` of the faces: what works on tensors that are on a GPU."""


def backend(name: str = "cpu") -> ModuleType:
    """The kernels called ``name``: one of ``BACKENDS``."""
    if name not in BACKENDS:
        raise ConfigurationError(f"kernels={name!r} is unknown; expected one of {', '.join(BACKENDS)}")
    if name == "cuda" and not has_gpu():
        raise ConfigurationError(
            "kernels='cuda' needs an NVIDIA GPU and numba-cuda (pip install 'horovod-onebit[cuda]'), or "
            "NUMBA_ENABLE_CUDASIM=1 in the environment, for Numba's slow simulator"
        )
    return importlib.import_module(f"horovod_onebit.kernels.{name}")


def has_gpu() -> bool:
    """Whether the CUDA kernels can run here, on a GPU or in the simulator."""
    if importlib.util.find_spec("numba_cuda") is None:
        return False
    from horovod_onebit.kernels.toolchain import SIMULATED, cuda

    return bool(SIMULATED or cuda.is_available())

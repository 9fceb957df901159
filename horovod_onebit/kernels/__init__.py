"""The loops over elements: functions of flat float32 arrays, which write in place.

``reference`` (NumPy) is the specification, ``cpu`` (Numba) is what runs, ``cuda`` (Numba CUDA) is for arrays in the
memory of a GPU. A module is a backend: each has at least the functions of the table in docs/architecture.md, with the
same arguments. What else a module has is its own: ``cuda.host_mirror``, ``cuda.fault``, ``cpu.set_num_threads``.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Literal

from horovod_onebit.errors import ConfigurationError

BACKENDS = ("cpu", "cuda", "reference")

INSTALL = "in a clone of horovod-onebit, pip install '.[cuda]', or '.[cuda12]' with a driver of CUDA 12"
Kernels = Literal["auto", "cpu", "cuda"]
"""The argument ``kernels`` of the faces: what works on tensors that are on a GPU."""


def backend(name: str = "cpu") -> ModuleType:
    """The kernels called ``name``: one of ``BACKENDS``."""
    if name not in BACKENDS:
        raise ConfigurationError(f"kernels={name!r} is unknown; expected one of {', '.join(BACKENDS)}")
    if name == "cuda" and (why := missing()):
        raise ConfigurationError(
            f"kernels='cuda' needs an NVIDIA GPU and numba-cuda ({why}), or NUMBA_ENABLE_CUDASIM=1 in the environment, "
            "for Numba's slow simulator"
        )
    return importlib.import_module(f"horovod_onebit.kernels.{name}")


def has_gpu() -> bool:
    """Whether the CUDA kernels can run here, on a GPU or in the simulator."""
    return not missing()


@cache
def missing() -> str:
    """What the CUDA kernels lack here; nothing if they can run, on a GPU or in the simulator."""
    if importlib.util.find_spec("numba_cuda") is None:
        return INSTALL
    try:
        from horovod_onebit.kernels.toolchain import SIMULATED, cuda

        found = SIMULATED or cuda.is_available()
    except Exception as error:  # of a library of CUDA, say, that is not installed: of several kinds
        return f"numba-cuda does not work here, {type(error).__name__}: {error}. {INSTALL}"
    return "" if found else "numba-cuda sees no GPU here: look at nvidia-smi and CUDA_VISIBLE_DEVICES"

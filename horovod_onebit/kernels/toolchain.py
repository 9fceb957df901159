"""What compiles and launches the CUDA kernels: numba-cuda, which no other module imports.

Under ``NUMBA_ENABLE_CUDASIM=1`` it is Numba's simulator, which has no intrinsics.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from numba import config, cuda

SIMULATED = bool(config.ENABLE_CUDASIM)
intrinsic: Any = None if SIMULATED else import_module("numba.cuda.extending").intrinsic

__all__ = ["SIMULATED", "cuda", "intrinsic"]

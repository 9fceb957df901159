"""Whether the kernels do on this GPU what the reference does, found out before anything is trusted to them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from horovod_onebit.kernels import reference
from horovod_onebit.kernels.cuda.device import SIMULATED
from horovod_onebit.kernels.reference import Spec, num_blocks, num_bytes

SIZE, WORKERS = 3001, 2
SPEC = Spec(0.9, 0.1, 0.01, 1e-8, False, 1.25, clip=3.0, scale="guarded", block_size=1024)


@cache
def fault() -> str:
    """Why the kernels are not to be used on this machine; nothing if they work. Compiles two of them, in seconds."""
    if SIMULATED:
        return ""
    try:
        same = _same()
    except Exception as error:  # of the compiler, the linker, the driver: an older one than the toolkit, say
        return f"the CUDA kernels failed on this GPU: {type(error).__name__}: {error}"
    return "" if same else "the CUDA kernels do not compute on this GPU what they should"


def _same() -> bool:
    from horovod_onebit.kernels import cuda as kernels

    rng = np.random.default_rng(0)
    tensors = rng.standard_normal((5, SIZE)).astype(np.float32)
    tensors[2] **= 2
    scales = rng.random((WORKERS, num_blocks(SIZE, SPEC.block_size)), np.float32)
    bits = rng.integers(0, 256, (WORKERS, num_bytes(SIZE)), np.uint8)
    results = []
    for backend, put, get in ((reference, np.copy, np.asarray), (kernels, cuda.to_device, _from_device)):
        g, m, v, w, e = map(put, tensors)
        out = np.zeros(scales.shape[1], np.float32), np.zeros(bits.shape[1], np.uint8)
        backend.encode(g, m, v, w, e, *out, SPEC)
        backend.apply(scales, bits, m, v, w, SPEC, update_space=True, step_size=0.01)
        results.append((out[1], get(m), get(w), out[0], get(e)))
    ours, theirs = results
    exact = all(np.array_equal(a, b) for a, b in zip(ours[:3], theirs[:3], strict=True))
    return exact and all(np.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(ours[3:], theirs[3:], strict=True))


def _from_device(array: Any) -> Any:
    return array.copy_to_host()

"""What the GPU kernels are made of: memory by address, arithmetic that rounds once per operation, sums over a warp.

Addresses are whole numbers, so that a launch has few arguments and one table can describe many tensors. Under
``NUMBA_ENABLE_CUDASIM=1`` every function here has a plain twin, and addresses are those of NumPy's arrays; nothing
else of the kernels differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, cuda

f32 = np.float32
f64 = np.float64
WARP = 32
SLOTS = 2 * WARP
SIMULATED = bool(config.ENABLE_CUDASIM)
FLOAT32, FLOAT16, BFLOAT16 = range(3)
"""Kinds of numbers that gradients may be."""

inlined: Callable[..., Any] = cuda.jit(device=True) if SIMULATED else cuda.jit(device=True, forceinline=True)

if SIMULATED:
    from horovod_onebit.kernels.cuda.simulated import (
        load_f32,
        load_i64,
        load_u8,
        load_vector,
        mul,
        neighbour,
        store_f32,
        store_f64,
        store_u8,
        store_vector,
        warp_sum,
    )
else:
    from horovod_onebit.kernels.cuda.memory import (
        load_f32,
        load_i64,
        load_u8,
        load_vector,
        store_f32,
        store_f64,
        store_u8,
        store_vector,
    )

    @inlined
    def mul(a, b):
        """``a * b``, never fused with an addition: the reference rounds both."""
        return cuda.libdevice.fmul_rn(a, b)

    @inlined
    def neighbour(value):
        """``value`` of the other lane of a pair."""
        return cuda.shfl_xor_sync(0xFFFFFFFF, value, 1)

    @inlined
    def warp_sum(value):
        """The sum over the warp, in every lane alike."""
        for step in (16, 8, 4, 2, 1):
            value += cuda.shfl_xor_sync(0xFFFFFFFF, value, step)
        return value


@inlined
def block_sums(a, b):
    """The sums of two float64 over the thread block, in every thread; once a kernel."""
    shared = cuda.shared.array(SLOTS, f64)
    a, b = warp_sum(a), warp_sum(b)
    warp = cuda.threadIdx.x // WARP
    if cuda.threadIdx.x % WARP == 0:
        shared[warp] = a
        shared[WARP + warp] = b
    cuda.syncthreads()  # all warps' sums are there
    total, squares = f64(0), f64(0)
    for i in range(cuda.blockDim.x // WARP):
        total += shared[i]
        squares += shared[WARP + i]
    return total, squares


@inlined
def load4(address, i, end, aligned, kind):
    """Elements ``i`` to ``i + 3``, as float32; zeros from ``end`` on."""
    if aligned != 0 and i + 4 <= end:
        return load_vector(address, i, kind)
    zero = f32(0)
    a = load_f32(address, i, kind) if i < end else zero
    b = load_f32(address, i + 1, kind) if i + 1 < end else zero
    c = load_f32(address, i + 2, kind) if i + 2 < end else zero
    d = load_f32(address, i + 3, kind) if i + 3 < end else zero
    return a, b, c, d


@inlined
def store4(address, i, end, aligned, values):
    """The reverse of ``load4`` for float32."""
    if aligned != 0 and i + 4 <= end:
        store_vector(address, i, values)
        return
    if i < end:
        store_f32(address, i, values[0])
    if i + 1 < end:
        store_f32(address, i + 1, values[1])
    if i + 2 < end:
        store_f32(address, i + 2, values[2])
    if i + 3 < end:
        store_f32(address, i + 3, values[3])


__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "SIMULATED",
    "WARP",
    "block_sums",
    "inlined",
    "load4",
    "load_f32",
    "load_i64",
    "load_u8",
    "mul",
    "neighbour",
    "store4",
    "store_f32",
    "store_f64",
    "store_u8",
]

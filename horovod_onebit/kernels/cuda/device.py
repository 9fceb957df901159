"""What the GPU kernels are made of: memory by address, arithmetic that rounds once per operation, sums over a warp.

Addresses are whole numbers, so that a launch has few arguments and one table can describe many tensors. Under
``NUMBA_ENABLE_CUDASIM=1`` every function here has a plain counterpart, and addresses are those of NumPy's arrays;
nothing else of the kernels differs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from horovod_onebit.kernels.toolchain import SIMULATED, cuda

f32 = np.float32
f64 = np.float64
SLOTS = 96  # three for each warp of the largest thread block
FLOAT32, FLOAT16, BFLOAT16 = range(3)
"""Kinds of numbers that gradients may be."""

inlined: Callable[..., Any] = cuda.jit(device=True) if SIMULATED else cuda.jit(device=True, forceinline=True)

if SIMULATED:

    def constant_i64(address, i):
        return ctypes.c_int64.from_address(address + 8 * int(i)).value

    def constant_f32(address, i):
        return load_f32(address, i, FLOAT32)

    def constant_u8(address, i):
        return ctypes.c_uint8.from_address(address + int(i)).value

    def store_u8(address, i, value):
        ctypes.c_uint8.from_address(address + int(i)).value = int(value)

    def load_f32(address, i, kind):
        if kind == FLOAT32:
            return f32(ctypes.c_float.from_address(address + 4 * int(i)).value)
        bits = np.uint16(ctypes.c_uint16.from_address(address + 2 * int(i)).value)
        if kind == FLOAT16:
            return f32(bits.view(np.float16))
        return (np.uint32(bits) << np.uint32(16)).view(f32)

    def store_f32(address, i, value):
        ctypes.c_float.from_address(address + 4 * int(i)).value = value

    def store_f64(address, i, value):
        ctypes.c_double.from_address(address + 8 * int(i)).value = value

    def load_vector(address, i, kind):
        assert (address + (4 if kind == FLOAT32 else 2) * int(i)) % (16 if kind == FLOAT32 else 8) == 0
        return tuple(load_f32(address, i + j, kind) for j in range(4))

    def store_vector(address, i, values):
        assert (address + 4 * int(i)) % 16 == 0
        for j in range(4):
            store_f32(address, i + j, values[j])

    def mul(a, b):
        return a * b

    @cuda.jit(device=True)
    def neighbour(value):
        shared = cuda.shared.array(1024, np.int64)
        thread = cuda.threadIdx.x
        shared[thread] = value
        cuda.syncthreads()
        other = shared[thread ^ 1]
        cuda.syncthreads()  # all have read before the next is written
        return int(other)

    @cuda.jit(device=True)
    def warp_sums(a, b):
        shared = cuda.shared.array((2, 1024), np.float64)
        thread = cuda.threadIdx.x
        shared[0, thread], shared[1, thread] = a, b
        cuda.syncthreads()
        first, second = thread - thread % 32, thread % 32 // 16
        total = shared[second, first : first + 32].sum()
        cuda.syncthreads()
        return total

    def byte_of(low, high):
        return np.uint8(low | high << 4)

else:
    from horovod_onebit.kernels.cuda.memory import (
        byte_of,
        constant_f32,
        constant_i64,
        constant_u8,
        load_f32,
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
    def warp_sums(a, b):
        """The sums over the warp: of ``a`` in the lower half of its lanes, of ``b`` in the upper one.

        The halves first tell each other what they do not continue with, so that only one number travels.
        """
        upper = (cuda.threadIdx.x & 16) != 0
        own, other = (b, a) if upper else (a, b)
        own += cuda.shfl_xor_sync(0xFFFFFFFF, other, 16)
        for step in (8, 4, 2, 1):
            own += cuda.shfl_xor_sync(0xFFFFFFFF, own, step)
        return own


@inlined
def block_sums(a, b):
    """The sums of two float64 over the thread block, in every thread; once a kernel."""
    first, second, _ = block_sums_of_three(a, b, None)
    return first, second


@inlined
def block_sums_of_three(a, b, c):
    """As ``block_sums``; ``c`` may be None, and its sum is 0 then."""
    shared = cuda.shared.array(SLOTS, f64)
    half, warps = cuda.threadIdx.x >> 4, cuda.blockDim.x >> 5
    own = warp_sums(a, b)
    if cuda.threadIdx.x & 15 == 0:
        shared[half] = own
    if c is not None:
        own = warp_sums(c, f64(0))
        if cuda.threadIdx.x & 31 == 0:
            shared[2 * warps + (half >> 1)] = own
    cuda.syncthreads()  # all warps' sums are there
    total, squares, third = f64(0), f64(0), f64(0)
    for i in range(warps):
        total += shared[2 * i]
        squares += shared[2 * i + 1]
        if c is not None:
            third += shared[2 * warps + i]
    return total, squares, third


@inlined
def load_some(address, i, end, kind):
    """Elements ``i`` to ``i + 3``, as float32; zeros from ``end`` on."""
    zero = f32(0)
    a = load_f32(address, i, kind) if i < end else zero
    b = load_f32(address, i + 1, kind) if i + 1 < end else zero
    c = load_f32(address, i + 2, kind) if i + 2 < end else zero
    d = load_f32(address, i + 3, kind) if i + 3 < end else zero
    return a, b, c, d


@inlined
def store4(address, i, end, whole, values):
    """Elements ``i`` to ``i + 3``, but for those from ``end`` on; ``whole`` says that a vector may be stored."""
    if whole:
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
    "block_sums",
    "block_sums_of_three",
    "byte_of",
    "constant_f32",
    "constant_i64",
    "constant_u8",
    "inlined",
    "load_some",
    "load_vector",
    "mul",
    "neighbour",
    "store4",
    "store_f32",
    "store_f64",
    "store_u8",
]

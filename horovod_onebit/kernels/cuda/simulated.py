"""Twins of the device's own operations for Numba's simulator, whose threads are Python's and know no warps."""

from __future__ import annotations

import ctypes

import numpy as np
from numba import cuda

f32 = np.float32
FLOAT32, FLOAT16 = 0, 1


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


def nibble(values):
    return sum(1 << i for i in range(4) if values[i] < 0)


def byte_of(low, high):
    return np.uint8(low | high << 4)


def signed(s, byte, bit):
    return -s if (byte >> bit) & 1 else s

"""Threads for the CPU kernels: they work on ranges of blocks, and hold no lock while they do.

A plain pool rather than Numba's own threads: those may not be entered from two Python threads at a time, and one of
their layers does not survive a fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from horovod_onebit.checks import whole
from horovod_onebit.kernels.reference import num_blocks

MIN_ELEMENTS_PER_THREAD = 1 << 15


class _Pool:
    """Made when first needed, once per process (a forked child makes its own)."""

    def __init__(self) -> None:
        self.count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.executor: ThreadPoolExecutor | None = None
        self.pid = -1

    def get(self) -> ThreadPoolExecutor:
        if self.executor is None or self.pid != os.getpid():
            self.executor = ThreadPoolExecutor(self.count, thread_name_prefix="horovod_onebit")
            self.pid = os.getpid()
        return self.executor


_pool = _Pool()


def set_num_threads(count: int) -> None:
    """Let at most ``count`` threads work on one tensor. Results do not depend on it."""
    whole("count", count)
    _pool.count, _pool.executor = count, None


def over_blocks(size: int, block_size: int, work: Callable[[int, int], Any]) -> list[Any]:
    """``work(first, last)`` over all blocks of ``size`` elements, split between threads where that pays."""
    blocks = num_blocks(size, block_size)
    parts = min(_pool.count, blocks, size // MIN_ELEMENTS_PER_THREAD)
    if parts <= 1:
        return [work(0, blocks)]
    edges = [blocks * i // parts for i in range(parts + 1)]
    rest = [_pool.get().submit(work, lo, hi) for lo, hi in pairwise(edges[1:])]
    return [work(edges[0], edges[1]), *(future.result() for future in rest)]

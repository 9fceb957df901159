"""Simulations of a study side by side, one on each core."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def _take_core(cores: SimpleQueue[int]) -> None:
    """The threads of a simulation wait for each other's lock; on one core that costs a third of it."""
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {mine[cores.get() % len(mine)]})
    sys.setswitchinterval(0.1)


def results(work: Callable[[T], R], todo: Iterable[T], processes: int = 2) -> dict[T, R]:
    """What ``work`` gives for each of ``todo``."""
    items = list(todo)
    cores: SimpleQueue[int] = SimpleQueue()
    for i in range(processes):
        cores.put(i)
    with ProcessPoolExecutor(processes, initializer=_take_core, initargs=(cores,)) as pool:
        return dict(zip(items, pool.map(work, items), strict=True))

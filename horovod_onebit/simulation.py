"""n workers in one process, for research, tests and plots: the real engine, with threads for workers.

    def worker(collectives):
        optimizer = NumpyOptimizer(weights, Adam(lr=1e-3), collectives=collectives, warmup_steps=20)
        ...
        return weights

    results = simulation.run(worker, workers=4)

Results do not depend on how the threads are scheduled: every collective waits for all, and sums in rank order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.errors import ConfigurationError, DesyncError

T = TypeVar("T")


class _World:
    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.lock = threading.Condition()
        self.posted: dict[tuple[str, int], list[NDArray | None]] = {}
        self.taken: dict[tuple[str, int], int] = {}
        self.failed = False

    def post(self, key: tuple[str, int], rank: int, array: NDArray) -> None:
        with self.lock:
            self.posted.setdefault(key, [None] * self.size)[rank] = array.copy()
            self.lock.notify_all()

    def collect(self, key: tuple[str, int]) -> list[NDArray]:
        with self.lock:
            ready = self.lock.wait_for(lambda: self.failed or self._complete(key), self.timeout)
            if self.failed or not ready:
                missing = [i for i, a in enumerate(self.posted[key]) if a is None]
                raise DesyncError(f"collective {key[0]!r}: workers {missing} never called it (or failed before)")
            arrays = [a for a in self.posted[key] if a is not None]
            self.taken[key] = self.taken.get(key, 0) + 1
            if self.taken[key] == self.size:
                del self.posted[key], self.taken[key]
            return arrays

    def _complete(self, key: tuple[str, int]) -> bool:
        return all(array is not None for array in self.posted[key])

    def is_complete(self, key: tuple[str, int]) -> bool:
        with self.lock:
            return self._complete(key)

    def fail(self) -> None:
        with self.lock:
            self.failed = True
            self.lock.notify_all()


class _Waiting:
    def __init__(self, world: _World, key: tuple[str, int], combine: Callable[[list[NDArray]], NDArray]) -> None:
        self.world, self.key, self.combine = world, key, combine

    def ready(self) -> bool:
        return self.world.is_complete(self.key)

    def wait(self) -> NDArray:
        return self.combine(self.world.collect(self.key))


class SimulatedCollectives:
    """One simulated worker's collectives."""

    def __init__(
        self, world: _World, rank: int, hosts: tuple[SimulatedCollectives, SimulatedCollectives] | None = None
    ) -> None:
        self._world = world
        self._rank = rank
        self._hosts = hosts
        self._calls: dict[str, int] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._world.size

    def fail(self) -> None:
        """Stop all who wait, here and on the hosts."""
        self._world.fail()
        for one in self._hosts or ():
            one.fail()

    def _start(self, name: str, array: NDArray, combine: Callable[[list[NDArray]], NDArray]) -> _Waiting:
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        self._world.post((name, call), self._rank, array)
        return _Waiting(self._world, (name, call), combine)

    def allgather(self, array: NDArray[np.uint8], name: str) -> _Waiting:
        return self._start(name, array, np.concatenate)

    def alltoall(self, array: NDArray[np.uint8], name: str) -> _Waiting:
        def own_parts(arrays: list[NDArray]) -> NDArray:
            size = len(array) // self.size
            return np.concatenate([a[self.rank * size : (self.rank + 1) * size] for a in arrays])

        return self._start(name, array, own_parts)

    def reduce_scatter(self, array: NDArray[np.float32], name: str) -> _Waiting:
        def own_part(arrays: list[NDArray]) -> NDArray:
            size = len(array) // self.size
            part = slice(self.rank * size, (self.rank + 1) * size)
            return np.sum([a[part] for a in arrays], axis=0)

        return self._start(name, array, own_part)

    def hosts(self) -> tuple[SimulatedCollectives, SimulatedCollectives] | None:
        return self._hosts

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> _Waiting:
        def total(arrays: list[NDArray]) -> NDArray:
            result = arrays[0].copy()
            for other in arrays[1:]:
                result += other
            return result

        return self._start(name, array, total)


def _make(world: _World, workers: int, workers_per_host: int, timeout: float) -> list[SimulatedCollectives]:
    """All workers' collectives; with those within and between hosts where there are several of both."""
    hosts = workers // workers_per_host
    if hosts == 1 or workers_per_host == 1:
        return [SimulatedCollectives(world, rank) for rank in range(workers)]
    local = [_World(workers_per_host, timeout) for _ in range(hosts)]
    cross = [_World(hosts, timeout) for _ in range(workers_per_host)]
    made = []
    for rank in range(workers):
        host, place = divmod(rank, workers_per_host)
        own = SimulatedCollectives(local[host], place), SimulatedCollectives(cross[place], host)
        made.append(SimulatedCollectives(world, rank, own))
    return made


def run(
    worker: Callable[[SimulatedCollectives], T], workers: int, *, workers_per_host: int = 1, timeout: float = 60.0
) -> list[T]:
    """Call ``worker(collectives)`` once for each of ``workers`` simulated workers; their results in rank order.

    If any of them raises, the others are stopped at their next collective and the first error (by rank, but a
    worker's own before those of workers that were only stopped) is raised here. ``timeout`` is the longest wait for
    one collective, in seconds. The workers are on hosts of ``workers_per_host``.
    """
    if workers < 1 or workers_per_host < 1 or workers % workers_per_host:
        raise ConfigurationError(
            f"workers={workers}, workers_per_host={workers_per_host}: expected at least 1, and whole hosts"
        )
    world = _World(workers, timeout)
    everybody = _make(world, workers, workers_per_host, timeout)
    results: list[Any] = [None] * workers
    errors: list[BaseException | None] = [None] * workers

    def body(rank: int) -> None:
        try:
            results[rank] = worker(everybody[rank])
        except BaseException as error:
            errors[rank] = error
            for one in everybody:
                one.fail()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [error for error in errors if error is not None]
    own = [error for error in raised if not isinstance(error, DesyncError)]
    if raised:
        raise (own or raised)[0]
    return results

"""n workers in one process, for research, tests and plots: the real engine, with threads for workers.

    def worker(collectives):
        weights = {"w": np.zeros(1000, np.float32)}  # here: each worker has arrays of its own
        optimizer = NumpyOptimizer(weights, Adam(lr=1e-3), collectives=collectives, warmup_steps=20)
        ...
        return weights

    results = simulation.run(worker, workers=4)

Results do not depend on how the threads are scheduled: every collective waits for all, and sums in rank order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.checks import whole
from horovod_onebit.errors import ConfigurationError, DesyncError, workers

T = TypeVar("T")

PATIENCE = 0.1
"""Seconds that a worker waits for its turn."""


class _StoppedError(DesyncError):
    """A worker waited for others that failed, or never came."""


class _Turns:
    """Lets one worker run until it waits for the others: threads that compete for the interpreter spend half of their
    time on switching. A worker whose turn does not come runs all the same, since the one whose turn it is may be busy
    for long, or wait for it in a way that is not known here."""

    def __init__(self) -> None:
        self._lock, self._mine = threading.Lock(), threading.local()

    def __enter__(self) -> None:
        self._mine.taken = self._lock.acquire(timeout=PATIENCE)

    def __exit__(self, *raised: object) -> None:
        if self._mine.taken:
            self._lock.release()

    def wait(self, event: threading.Event, timeout: float) -> None:
        """Wait for ``event``, and meanwhile let others run."""
        self.__exit__()
        event.wait(timeout)
        self.__enter__()


class _Call:
    """One collective: what each worker gave, and what all of them get."""

    def __init__(self, size: int) -> None:
        self.posted: list[NDArray | None] = [None] * size
        self.missing = self.left = size
        self.complete = threading.Event()
        self.lock = threading.Lock()
        self.common: NDArray | None = None

    def arrays(self) -> list[NDArray]:
        return [array for array in self.posted if array is not None]

    def shared(self, combine: Callable[[list[NDArray]], NDArray]) -> NDArray:
        """What is the same for all, made once."""
        with self.lock:
            if self.common is None:
                self.common = combine(self.arrays())
            return self.common


class _World:
    def __init__(self, size: int, timeout: float, turns: _Turns) -> None:
        self.size = size
        self.timeout = timeout
        self.turns = turns
        self.lock = threading.Lock()
        self.calls: dict[tuple[str, int], _Call] = {}
        self.failed = False

    def post(self, key: tuple[str, int], rank: int, array: NDArray) -> _Call:
        with self.lock:
            call = self.calls.setdefault(key, _Call(self.size))
            call.posted[rank] = array.copy()
            call.missing -= 1
            if self.failed or not call.missing:
                call.complete.set()
            return call

    def collect(self, key: tuple[str, int], call: _Call) -> _Call:
        if not call.complete.is_set():
            self.turns.wait(call.complete, self.timeout)
        with self.lock:
            if call.missing:
                missing = [i for i, a in enumerate(call.posted) if a is None]
                raise _StoppedError(f"collective {key[0]!r}: {workers(missing)} never called it (or failed before)")
            call.left -= 1
            if not call.left:
                del self.calls[key]
        return call

    def fail(self) -> None:
        with self.lock:
            self.failed = True
            for call in self.calls.values():
                call.complete.set()


class _Waiting:
    def __init__(self, world: _World, key: tuple[str, int], call: _Call, combine: Callable[[_Call], NDArray]) -> None:
        self.world, self.key, self.call, self.combine = world, key, call, combine

    def ready(self) -> bool:
        return self.call.complete.is_set()

    def wait(self) -> NDArray:
        return self.combine(self.world.collect(self.key, self.call))


class SimulatedCollectives:
    """One simulated worker's collectives."""

    takes_device_memory = False

    def __init__(
        self,
        world: _World,
        rank: int,
        host: tuple[int, int] = (0, 1),
        hosts: tuple[SimulatedCollectives, SimulatedCollectives] | None = None,
    ) -> None:
        self._world = world
        self.rank, self.size = rank, world.size
        self._host = host
        self._hosts = hosts
        self._calls: dict[str, int] = {}

    def fail(self) -> None:
        """Stop all who wait, here and on the hosts."""
        self._world.fail()
        for one in self._hosts or ():
            one.fail()

    def _start(self, name: str, array: NDArray, combine: Callable[[_Call], NDArray]) -> _Waiting:
        count = self._calls.get(name, 0)
        self._calls[name] = count + 1
        key = name, count
        return _Waiting(self._world, key, self._world.post(key, self.rank, array), combine)

    def allgather(self, array: NDArray[np.uint8], name: str) -> _Waiting:
        return self._start(name, array, lambda call: call.shared(np.concatenate))

    def alltoall(self, array: NDArray, name: str) -> _Waiting:
        size = len(array) // self.size
        part = slice(self.rank * size, (self.rank + 1) * size)
        return self._start(name, array, lambda call: np.concatenate([a[part] for a in call.arrays()]))

    def host(self) -> tuple[int, int]:
        return self._host

    def hosts(self, places: Sequence[Sequence[int]]) -> tuple[SimulatedCollectives, SimulatedCollectives] | None:
        return self._hosts

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> _Waiting:
        return self._start(name, array, lambda call: call.shared(_total).copy())


def _total(arrays: list[NDArray]) -> NDArray:
    result = arrays[0].copy()
    for other in arrays[1:]:
        result += other
    return result


def _make(world: _World, workers: int, workers_per_host: int) -> list[SimulatedCollectives]:
    """All workers' collectives; with those within and between hosts where there are several of both."""
    hosts = workers // workers_per_host
    if hosts == 1 or workers_per_host == 1:
        return [SimulatedCollectives(world, i, (i // workers_per_host, workers_per_host)) for i in range(workers)]
    shared = world.timeout, world.turns
    local = [_World(workers_per_host, *shared) for _ in range(hosts)]
    cross = [_World(hosts, *shared) for _ in range(workers_per_host)]
    made = []
    for rank in range(workers):
        host, place = divmod(rank, workers_per_host)
        own = SimulatedCollectives(local[host], place), SimulatedCollectives(cross[place], host)
        made.append(SimulatedCollectives(world, rank, (host, workers_per_host), own))
    return made


def run(
    worker: Callable[[SimulatedCollectives], T], workers: int, *, workers_per_host: int = 1, timeout: float = 60.0
) -> list[T]:
    """Call ``worker(collectives)`` once for each of ``workers`` simulated workers; their results in rank order.

    If any of them raises, the others are stopped at their next collective and the first error (by rank, but a
    worker's own before those of workers that were only stopped) is raised here. ``timeout`` is the longest wait for
    one collective, in seconds. The workers are on hosts of ``workers_per_host``.
    """
    if whole("workers", workers) % whole("workers_per_host", workers_per_host):
        raise ConfigurationError(f"{workers} workers do not fill hosts of {workers_per_host}: expected a multiple")
    turns = _Turns()
    everybody = _make(_World(workers, timeout, turns), workers, workers_per_host)
    results: list[Any] = [None] * workers
    errors: list[BaseException | None] = [None] * workers

    def body(rank: int) -> None:
        try:
            with turns:
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
    own = [error for error in raised if not isinstance(error, _StoppedError)]
    if raised:
        raise (own or raised)[0]
    return results

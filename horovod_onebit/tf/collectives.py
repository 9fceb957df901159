"""The core's ``Collectives`` over Horovod's TensorFlow operations, for NumPy arrays in host memory.

They run eagerly, inside the one host call of a step. TensorFlow runs an eager operation to its end, so each collective
has a thread of a small pool, and the step goes on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray


def view(tensor: Any) -> NDArray:
    """An eager tensor in host memory as a NumPy array that shares its memory; not to be written to."""
    return np.asarray(memoryview(tensor)) if tensor.shape.rank else np.asarray(tensor)


THREADS = 8
"""Collectives under way at once. All workers submit in the same order, so that those that wait for a thread cannot keep
each other waiting."""

_waiting: SimpleQueue[tuple[Future, Callable[[], NDArray]]] = SimpleQueue()
_threads: list[threading.Thread] = []


def _work() -> None:
    while True:
        future, run = _waiting.get()
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)


def _submit(run: Callable[[], NDArray]) -> Future:
    if not _threads:
        # Daemons: a program that ends by an error must not wait for a collective that will never be done.
        _threads.extend(threading.Thread(target=_work, name="onebit-collective", daemon=True) for _ in range(THREADS))
        for thread in _threads:
            thread.start()
    future: Future = Future()
    _waiting.put((future, run))
    return future


class _Handle:
    def __init__(self, run: Callable[[], NDArray]) -> None:
        self.future = _submit(run)

    def ready(self) -> bool:
        return False  # or the order of what follows would depend on when messages come

    def wait(self) -> NDArray:
        return self.future.result()


class HorovodCollectives:
    """One process's view of a Horovod process set. Create it after ``hvd.init()``."""

    gathers_elsewhere = False

    def __init__(self, process_set: Any = hvd.global_process_set) -> None:
        self.process_set = process_set
        self._functions: dict[tuple[str, str], Any] = {}

    @property
    def rank(self) -> int:
        return self.process_set.rank()

    @property
    def size(self) -> int:
        return self.process_set.size()

    def _start(self, kind: str, name: str, array: NDArray, operation: Callable[[Any], Any]) -> _Handle:
        """Run ``operation`` in a graph of its own: eager operations of Horovod have no names that tell them apart, so
        that two of a kind under way at once are refused, or taken for each other."""
        found = self._functions.get((kind, name))
        if found is None:
            function = tf.function(operation, autograph=False)
            found = function.get_concrete_function(tf.TensorSpec([None], array.dtype))
            self._functions[kind, name] = found

        def run() -> NDArray:
            with tf.device("/CPU:0"):
                return view(found(tf.convert_to_tensor(array)))

        return _Handle(run)

    def allgather(self, array: NDArray[np.uint8], name: str) -> _Handle:
        def operation(tensor: Any) -> Any:
            return hvd.allgather(tensor, name=name, process_set=self.process_set)

        return self._start("allgather", name, array, operation)

    def alltoall(self, array: NDArray[np.uint8], name: str) -> _Handle:
        def operation(tensor: Any) -> Any:
            # Not a constant: with Horovod elastic the number of workers changes.
            workers = hvd.size_op(process_set_id=self.process_set.process_set_id)
            splits = tf.fill([workers], tf.size(tensor) // workers)
            return hvd.alltoall(tensor, splits=splits, name=name, process_set=self.process_set)[0]

        return self._start("alltoall", name, array, operation)

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> _Handle:
        def operation(tensor: Any) -> Any:
            return hvd.allreduce(tensor, name=name, op=hvd.Sum, process_set=self.process_set)

        return self._start(f"allreduce of {array.dtype}", name, array, operation)

    def reduce_scatter(self, array: NDArray[np.float32], name: str) -> _Handle:
        def operation(tensor: Any) -> Any:
            return hvd.reducescatter(tensor, name=name, op=hvd.Sum, process_set=self.process_set)

        return self._start("reduce_scatter", name, array, operation)

    def hosts(self) -> None:
        return None

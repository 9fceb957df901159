"""The core's ``Collectives`` over Horovod's TensorFlow operations, for NumPy arrays in host memory.

What is started waits until somebody waits for it; then all that was started leaves together, as one round of at most
one operation of each kind: in the graph that a task is part of (``Errand``), or here, if the task is ``run``. Either
way its operations have the same names, whatever name scopes they are in.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from horovod_onebit.errors import DesyncError
from horovod_onebit.face import host_number
from horovod_onebit.recipe import GATHER_LIMIT
from horovod_onebit.tasks import Task

ROUND_LIMIT = 256 * 2**20
"""Bytes of a kind that leave together, at most; a single array may have more."""


def view(tensor: Any) -> NDArray:
    """An eager tensor in host memory as a NumPy array that shares its memory; not to be written to."""
    return np.asarray(memoryview(tensor)) if tensor.shape.rank else np.asarray(tensor)


def plain(name: str) -> str:
    """``name`` as TensorFlow allows operations to be called; a slash would begin a name scope."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", name)


@dataclass(frozen=True)
class Round:
    """What this worker sends in one round: flat arrays, empty where there is nothing of a kind.

    Which kinds there are is the same on all workers.
    """

    sums: NDArray[np.float32]
    gathered: NDArray[np.uint8]
    scattered: NDArray[np.uint8]
    splits: NDArray[np.int32]  # bytes of ``scattered`` for each worker

    DTYPES = (tf.float32, tf.uint8, tf.uint8, tf.int32)

    def arrays(self) -> list[NDArray]:
        return [self.sums, self.gathered, self.scattered, self.splits]


NOTHING = [np.empty(0, dtype.as_numpy_dtype) for dtype in Round.DTYPES]


class Handle:
    """A collective that was started; ``array`` is what it sends, ``result`` what came of it."""

    def __init__(self, collectives: HorovodCollectives, kind: str, array: NDArray) -> None:
        self.collectives, self.kind, self.array = collectives, kind, array
        self.result: NDArray | None = None

    def ready(self) -> bool:
        return self.result is not None  # its round has been delivered

    def wait(self) -> NDArray:
        while self.result is None:
            self.collectives.complete()
        return self.result


class Errand:
    """Runs a task in host functions, which must not block.

    ``start`` and ``resume`` return the next round to send, or None when the task is done; ``resume`` takes the results
    of the last round. What a task has started is sent round by round, that of one group together. ``on`` calls a
    function on the kernels' thread.
    """

    def __init__(self, collectives: HorovodCollectives, on: Callable[[Callable[[], Any]], Any]) -> None:
        self._collectives, self._on = collectives, on
        self._task: Task[Any] | None = None
        self._waiting: Handle | None = None
        self._pending: list[Handle] = []
        self._leaving: dict[str, list[Handle]] = {}

    def start(self, task: Task[Any]) -> Round | None:
        """Carry ``task`` out up to the first round; one that was not finished is closed."""
        self.close()
        self._task = task
        return self._proceed(partial(task.send, None))

    def resume(self, received: Sequence[NDArray]) -> Round | None:
        task, handle, leaving, self._leaving = self._task, self._waiting, self._leaving, {}
        assert task is not None, "nothing to resume"
        assert handle is not None
        try:
            deliver(leaving, received)
        except DesyncError as error:
            return self._proceed(partial(task.throw, error))
        return self._leave() if handle.result is None else self._proceed(partial(task.send, handle.result))

    def close(self) -> None:
        """The task will not be resumed: it can clean up."""
        task = self._forget()
        if task is not None:
            self._on(task.close)

    def _forget(self) -> Task[Any] | None:
        task, self._task, self._waiting, self._pending, self._leaving = self._task, None, None, [], {}
        self._collectives.forget()
        return task

    def _proceed(self, step: Callable[[], Any]) -> Round | None:
        task = self._task
        assert task is not None
        while True:
            try:
                handle = self._waiting = self._on(step)
            except BaseException as end:
                self._forget()
                if isinstance(end, StopIteration):
                    return None
                raise
            self._pending += self._collectives.take()
            if handle.result is None:
                return self._leave()
            step = partial(task.send, handle.result)

    def _leave(self) -> Round | None:
        """The next round."""
        group = self._pending[0].collectives
        own = [handle for handle in self._pending if handle.collectives is group]
        self._leaving, left = group.fit(own)
        self._pending = left + [handle for handle in self._pending if handle.collectives is not group]
        return group.fuse(self._leaving)


class HorovodCollectives:
    """One process's view of a Horovod process set. Create it after ``hvd.init()``.

    ``name`` begins the names of its operations. They are not told apart any further: all workers must start the same.

    Attributes:
        groups: itself; after ``hosts`` was asked, its host's workers, and those of its place on all hosts, as well.
        lock: to be held by host functions, which TensorFlow may run at the same time.
    """

    takes_device_memory = False

    def __init__(self, process_set: Any = hvd.global_process_set, name: str = "onebit") -> None:
        self.process_set = process_set
        self.name = name
        self.groups = [self]
        self._hosts: object = None  # of which workers the other groups are
        self.lock = threading.Lock()
        self._started: list[Handle] = []
        self._functions: dict[str, Any] = {}

    @property
    def rank(self) -> int:
        return self.process_set.rank()

    @property
    def size(self) -> int:
        return self.process_set.size()

    def allgather(self, array: NDArray[np.uint8], name: str) -> Handle:
        return self._start("gather", array)

    def alltoall(self, array: NDArray[np.uint8] | NDArray[np.float32], name: str) -> Handle:
        return self._start("scatter", array.view(np.uint8))

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> Handle:
        if array.dtype == np.float32:
            return self._start("sum", array)
        handle = Handle(self, "sum", array)  # at once and alone: nobody asks for it within a graph
        handle.result = view(self.sum_integers(name)(tf.constant(array)))
        return handle

    def host(self) -> tuple[int, int]:
        return host_number(), int(hvd.local_size())

    def hosts(self, places: Sequence[Sequence[int]]) -> tuple[HorovodCollectives, HorovodCollectives]:
        key = self.rank, [list(ranks) for ranks in places]
        if key != self._hosts:  # or the groups that another exchange has would be forgotten
            host = next(ranks for ranks in places if self.rank in ranks)
            place = host.index(self.rank)
            self.groups[1:] = Group(self, host), Group(self, sorted(ranks[place] for ranks in places))
            self._hosts = key
        return self.groups[1], self.groups[2]

    def _start(self, kind: str, array: NDArray) -> Handle:
        handle = Handle(self, kind, array)
        self._started.append(handle)
        return handle

    def forget(self) -> None:
        """What was started and not waited for will never leave."""
        for group in self.groups:
            group._started.clear()

    def take(self) -> list[Handle]:
        """What was started and has not left, of all groups: the caller sees to it from here on."""
        taken = [handle for group in self.groups for handle in group._started]
        self.forget()
        return taken

    def complete(self) -> None:
        """Let a round leave and come back; what was started last may not be in it yet."""
        kinds, self._started = self.fit(self._started)
        sent = self.fuse(kinds)
        deliver(kinds, [view(t) for t in self.perform()(*map(tf.constant, sent.arrays()))])

    def fit(self, handles: Sequence[Handle]) -> tuple[dict[str, list[Handle]], list[Handle]]:
        """Of ``handles``, in order, what leaves now, by kind, as far as one operation can carry it; what is left."""
        limit = min(ROUND_LIMIT, GATHER_LIMIT // self.size)
        kinds: dict[str, list[Handle]] = {"sum": [], "gather": [], "scatter": []}
        sizes = dict.fromkeys(kinds, 0)
        left: list[Handle] = []
        for handle in handles:
            sizes[handle.kind] += handle.array.nbytes
            fits = sizes[handle.kind] <= limit or not kinds[handle.kind]
            (kinds[handle.kind] if fits else left).append(handle)
        return kinds, left

    def fuse(self, kinds: dict[str, list[Handle]]) -> Round:
        """One round of what leaves."""
        sums, gathered, scattered = NOTHING[:3]
        if kinds["sum"]:
            sums = _join([handle.array for handle in kinds["sum"]])
        if kinds["gather"]:
            gathered = _join([handle.array for handle in kinds["gather"]])
        if kinds["scatter"]:
            scattered = _join([handle.array.reshape(self.size, -1) for handle in kinds["scatter"]]).reshape(-1)
        return Round(sums, gathered, scattered, self._splits(len(scattered)))

    def _splits(self, length: int) -> NDArray[np.int32]:
        """How many of ``length`` bytes go to each worker."""
        return np.full(self.size, length // self.size, np.int32)

    # -- Horovod's operations, for graphs and eager code --------------------------------------------------------------

    def sum_integers(self, name: str) -> Any:
        """A function of a graph, or of an eager tensor: the sum over the workers of (k,) int32."""

        def operation(tensor: Any) -> Any:
            return _sum(tensor, name, self.process_set)

        return self._function(f"integers {name}", operation, [tf.int32])

    def perform(self, label: str = "") -> Any:
        """A function of a round's arrays as tensors: what comes of them, in the order sums, gathered, scattered.

        Rounds that may be under way at the same time have different ``label``.
        """
        name, process_set = plain(f"{self.name}.{label}" if label else self.name), self.process_set

        def gather(tensor: Any) -> Any:
            return hvd.allgather(tensor, name=f"{name}.gather", ignore_name_scope=True, process_set=process_set)

        def scatter(tensor: Any, splits: Any) -> Any:
            arguments: dict[str, Any] = {"ignore_name_scope": True, "process_set": process_set}
            return hvd.alltoall(tensor, splits=splits, name=f"{name}.scatter", **arguments)[0]

        def operation(sums: Any, gathered: Any, scattered: Any, splits: Any) -> list[Any]:
            return [
                _if_any(sums, lambda: _sum(sums, f"{name}.sum", process_set)),
                _if_any(gathered, lambda: gather(gathered)),
                _if_any(scattered, lambda: scatter(scattered, splits)),
            ]

        return self._function(f"round {name}", operation, Round.DTYPES)

    def _function(self, key: str, operation: Any, dtypes: Sequence[Any]) -> Any:
        """``operation`` as a graph of its own, which makes its names what they are: eager operations of Horovod have
        none that tell them apart, and in a larger graph the second one of a name would get another."""
        found = self._functions.get(key)
        if found is None:

            def on_host(*tensors: Any) -> Any:
                with tf.device("/CPU:0"):
                    return operation(*tensors)

            with tf.init_scope():
                function = tf.function(on_host, autograph=False)
                found = function.get_concrete_function(*(tf.TensorSpec([None], dtype) for dtype in dtypes))
            self._functions[key] = found
        return found


class Group(HorovodCollectives):
    """Some of the workers of ``whole``: the members have ``ranks`` there, in order.

    What they send each other is an alltoall of all workers, with nothing for the others. Process sets would not do:
    a graph must know them when it is traced, on each worker at another time, and only a step tells whether they are
    wanted.
    """

    def __init__(self, whole: HorovodCollectives, ranks: Sequence[int]) -> None:
        super().__init__(whole.process_set, whole.name)
        self._whole, self._ranks = whole, list(ranks)

    @property
    def rank(self) -> int:
        return self._ranks.index(self._whole.rank)

    @property
    def size(self) -> int:
        return len(self._ranks)

    def allgather(self, array: NDArray[np.uint8], name: str) -> Handle:
        return self.alltoall(np.tile(array, self.size), name)

    def perform(self, label: str = "") -> Any:
        return self._whole.perform(label)

    def _splits(self, length: int) -> NDArray[np.int32]:
        splits = np.zeros(self._whole.size, np.int32)
        splits[self._ranks] = length // self.size
        return splits


def deliver(kinds: dict[str, list[Handle]], received: Sequence[NDArray]) -> None:
    """Give what came of a round to the handles that it was made of. Nobody may write to it: kernels are compiled for
    such memory, whether a message came alone, in that of a tensor, or with others."""
    for handles, result in zip(kinds.values(), received, strict=True):
        if len(handles) == 1:
            handles[0].result = result  # a gather's may be of any size: its caller looks
        elif handles:
            _cut(handles, result)
        for handle in handles:
            assert handle.result is not None
            handle.result.flags.writeable = False


def _cut(handles: Sequence[Handle], result: NDArray) -> None:
    size = handles[0].collectives.size
    rows = 1 if handles[0].kind == "sum" else size
    lengths = [handle.array.size // (size if handle.kind == "scatter" else 1) for handle in handles]
    if result.size != rows * sum(lengths):
        raise DesyncError("the workers sent messages of different sizes: they do not train the same")
    parts = np.split(result.reshape(rows, -1), np.cumsum(lengths)[:-1], axis=1)
    for handle, part in zip(handles, parts, strict=True):
        handle.result = np.ascontiguousarray(part).reshape(-1)


def _join(arrays: list[NDArray]) -> NDArray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)


def _sum(tensor: Any, name: str, process_set: Any) -> Any:
    return hvd.allreduce(tensor, name=plain(name), op=hvd.Sum, process_set=process_set, ignore_name_scope=True)


def _if_any(tensor: Any, operation: Any) -> Any:
    return tf.cond(tf.size(tensor) > 0, operation, lambda: tf.identity(tensor))

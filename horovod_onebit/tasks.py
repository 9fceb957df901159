"""What waits for other workers is a task: a generator that yields each collective it waits for and is sent its result.

A task does not know how its worker waits. ``run`` blocks; the Keras face resumes the task from host functions, and lets
Horovod's operations in the graph carry what it has started (``tf.graph.in_rounds``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

from horovod_onebit.stats import mark

T = TypeVar("T")


class Handle(Protocol):
    """A collective under way."""

    def ready(self) -> bool:
        """Whether ``wait`` would not block; False if that is not known."""
        ...

    def wait(self) -> Any:
        """Block until it is done, and return its result, an array. Called once."""
        ...


class Held(Handle, Protocol):
    """A collective that does not begin until ``start`` or ``wait`` is called: a transport that pairs collectives by
    order must not begin one that other workers may not begin."""

    def start(self) -> None:
        """Let it leave now, if it has not. All workers start those that they hold in the same order."""
        ...


def start(handle: Handle) -> None:
    """Let ``handle`` leave, if it is ``Held``: the workers have agreed, and all of them start it."""
    begin = getattr(handle, "start", None)
    if begin is not None:
        begin()


Task = Generator[Handle, Any, T]


def run(task: Task[T]) -> T:
    """Carry ``task`` out, and wait wherever it waits."""
    proceed: Callable[[Any], Handle] = task.send
    value: Any = None
    while True:
        try:
            handle = proceed(value)
        except StopIteration as end:
            found: T = end.value
            return found
        finally:
            value = None  # an error would keep this frame, and this frame the error
        try:
            with mark("exchange"):
                proceed, value = task.send, handle.wait()
        except BaseException as error:
            proceed, value = task.throw, error

"""How messages travel. The core knows collectives by this protocol only; each face implements it."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.feedback import ErrorFeedback
from horovod_onebit.layout import Bucket, Layout
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Context
from horovod_onebit.wire import Gathered, Message, Stamp

Bytes = NDArray[np.uint8]


class Handle(Protocol):
    """A collective under way."""

    def ready(self) -> bool:
        """Whether ``wait`` would not block; False if that is not known."""
        ...

    def wait(self) -> NDArray:
        """Block until it is done, and return its result. Called once."""
        ...


class Collectives(Protocol):
    """What a world of workers offers. Every call is collective and named: all workers call it with the same name.

    The names keep two collectives from being paired when workers submit them in different order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, array: Bytes, name: str) -> Handle:
        """Start gathering (k,) uint8 of every worker; ``wait`` gives (size * k,) in rank order."""
        ...

    def alltoall(self, array: Bytes, name: str) -> Handle:
        """Start sending part j of (size * k,) uint8 to worker j; ``wait`` gives (size * k,), part i from worker i."""
        ...

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> Handle:
        """Start summing (k,) float32 or int32 over the workers; ``wait`` gives the sum (k,), the same bits on each."""
        ...


class Pending(Protocol):
    """A bucket's message under way."""

    def ready(self) -> bool:
        """Whether ``advance`` would not block; False if that is not known."""
        ...

    def advance(self) -> None:
        """Do what this worker owes the others before anybody can ``wait``; called once."""
        ...

    def wait(self) -> Gathered:
        """Block until the bucket is here; messages are checked."""
        ...


class Exchange(Protocol):
    """A way for messages to reach everybody."""

    def prepare(self, layout: Layout) -> None:
        """Get ready for the buckets of ``layout``."""
        ...

    def start(self, message: Message, stamp: Stamp, name: str) -> Pending:
        """Send a sealed message on its way."""
        ...

    def settle(self, taken: bool) -> None:
        """The step is over: keep what the exchange changed of its own state, or take it back."""
        ...

    def bytes_sent(self, bucket: Bucket) -> int:
        """Bytes that one worker sends for ``bucket``; it receives as many."""
        ...


SMALL_EXCESS = 128 * 2**10
"""Bytes that a direct exchange may send more than a two-stage one, which waits for two collectives: about a
millisecond at 1 Gbit/s."""


def choose(recipe: Recipe, elements: int, workers: int) -> Recipe:
    """``recipe`` with the exchange that ``"auto"`` means for ``elements`` compressed parameters."""
    if recipe.exchange != "auto":
        return recipe
    excess = (workers - 1) * (1 - 2 / workers) * elements / 8
    return replace(recipe, exchange="direct" if workers <= 3 or excess <= SMALL_EXCESS else "two_stage")


def make(kind: str, context: Context, collectives: Collectives, feedback: ErrorFeedback) -> Exchange:
    """The exchange named ``kind``."""
    from horovod_onebit.exchange.direct import Direct
    from horovod_onebit.exchange.two_stage import TwoStage

    if kind == "two_stage":
        return TwoStage(context, collectives, feedback)
    return Direct(collectives)

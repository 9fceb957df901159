"""How messages travel. The core knows collectives by this protocol only; each face implements it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Handle(Protocol):
    """A collective under way."""

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

    def allreduce(self, array: NDArray[np.float32], name: str) -> Handle:
        """Start summing (k,) float32 over the workers; ``wait`` gives the sum (k,), the same bits on each."""
        ...


class Pending(Protocol):
    """A bucket's message under way."""

    def wait(self) -> Bytes:
        """All workers' messages, (size * message_size,) uint8, in rank order."""
        ...


class Exchange(Protocol):
    """A way for messages to reach everybody."""

    def start(self, message: Bytes, name: str) -> Pending: ...

    def bytes_sent(self, message_size: int) -> int:
        """Bytes that one worker sends for a message of ``message_size`` bytes; it receives as many."""
        ...

"""How messages travel. The core knows collectives by this protocol only; each face implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.errors import UnsupportedError
from horovod_onebit.feedback import ErrorFeedback
from horovod_onebit.kernels.reference import Array
from horovod_onebit.layout import Bucket, Layout, Piece
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Context, Rule
from horovod_onebit.wire import Gathered, Message, Stamp

Bytes = NDArray[np.uint8]


class Handle(Protocol):
    """A collective under way."""

    def ready(self) -> bool:
        """Whether ``wait`` would not block; False if that is not known."""
        ...

    def wait(self) -> Any:
        """Block until it is done, and return its result, an array. Called once."""
        ...


class Collectives(Protocol):
    """What a world of workers offers. Every call is collective and named: all workers call it with the same name.

    The names keep two collectives from being paired when workers submit them in different order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def gathers_elsewhere(self) -> bool:
        """Whether ``allgather`` takes bytes that lie in a GPU's memory, too; ``wait`` then gives a ``wire.Remote``."""
        ...

    def allgather(self, array: Any, name: str) -> Handle:
        """Start gathering (k,) uint8 of every worker; ``wait`` gives (size * k,) in rank order."""
        ...

    def alltoall(self, array: Bytes, name: str) -> Handle:
        """Start sending part j of (size * k,) uint8 to worker j; ``wait`` gives (size * k,), part i from worker i."""
        ...

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> Handle:
        """Start summing (k,) float32 or int32 over the workers; ``wait`` gives the sum (k,), the same bits on each."""
        ...

    def reduce_scatter(self, array: Array, name: str) -> Handle:
        """Start summing (size * k,) float32 over the workers; ``wait`` gives worker i part i of the sum, (k,)."""
        ...

    def hosts(self) -> tuple[Collectives, Collectives] | None:
        """The workers of this host, and those that have this one's place on every host; None where ``hierarchical``
        makes no sense: one host, one worker a host, hosts that differ. Collective."""
        ...


Gradient = Callable[[Piece], Array]
"""The gradient of a piece, flat float32."""

Encode = Callable[[Message, Gradient], None]
"""Compress the gradients of a message's pieces into it, and seal it."""


@dataclass(frozen=True)
class Encoded:
    """What an exchange has compressed, and from what: all that is needed to take it back."""

    message: Message
    gradient: Gradient


class Pending(Protocol):
    """A bucket's message under way.

    Attributes:
        stages: how often ``advance`` is called before ``wait``.
        arriving: whether ``advance`` only waits for what this worker itself has encoded.
        encoded: what was compressed; None as long as nothing is.
    """

    @property
    def stages(self) -> int: ...

    @property
    def arriving(self) -> bool: ...

    @property
    def encoded(self) -> Encoded | None: ...

    def ready(self) -> bool:
        """Whether ``advance`` would not block; False if that is not known."""
        ...

    def advance(self) -> None:
        """Do the next of what this worker owes the others before anybody can ``wait``."""
        ...

    def wait(self) -> Gathered:
        """Block until the bucket is here; messages are checked."""
        ...


class Exchange(Protocol):
    """A way for messages to reach everybody.

    Attributes:
        context: the engine's, with the kernels that it uses now.
        compressors: how many workers' (or hosts') compressed contributions a mean is of.
    """

    context: Context
    compressors: int

    def served(self) -> Mapping[str, Bucket]:
        """The residuals that this worker keeps as a server, by name, and what parts of the tensors they belong to."""
        ...

    def prepare(self, layout: Layout) -> None:
        """Get ready for the buckets of ``layout``."""
        ...

    def start(self, message: Message, gradient: Gradient, encode: Encode, stamp: Stamp, name: str) -> Pending:
        """Send the bucket of ``message`` on its way: ``encode`` its gradients, now or when they are summed."""
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


def choose(recipe: Recipe, elements: int, collectives: Collectives, rules: Sequence[Rule]) -> Recipe:
    """``recipe`` with the exchange that ``"auto"`` means for ``elements`` compressed parameters. Collective."""
    linear = all(rule.encodes_gradients for rule in rules)
    if recipe.exchange == "hierarchical" and not linear:
        raise UnsupportedError("0/1 Adam's workers differ within a host too: use exchange='direct' or 'two_stage'")
    if recipe.exchange != "auto":
        return recipe
    workers, hosts = collectives.size, collectives.hosts() if linear else None
    # A host receives H - 1 messages, and (L + 1) (H - 1) / H of them in two stages.
    if hosts is not None and hosts[1].size <= hosts[0].size + 1:
        return replace(recipe, exchange="hierarchical")
    excess = (workers - 1) * (1 - 2 / workers) * elements / 8
    return replace(recipe, exchange="direct" if workers <= 3 or excess <= SMALL_EXCESS else "two_stage")


def make(kind: str, context: Context, collectives: Collectives, feedback: ErrorFeedback) -> Exchange:
    """The exchange named ``kind``."""
    from horovod_onebit.exchange.direct import Direct
    from horovod_onebit.exchange.hierarchical import Hierarchical
    from horovod_onebit.exchange.two_stage import TwoStage

    if kind == "hierarchical":
        return Hierarchical(context, collectives)
    if kind == "two_stage":
        return TwoStage(context, collectives, feedback)
    return Direct(context, collectives)

"""How messages travel. The core knows collectives by this protocol only; each face implements it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_onebit import costs
from horovod_onebit.errors import UnsupportedError
from horovod_onebit.feedback import ErrorFeedback
from horovod_onebit.handshake import ask
from horovod_onebit.kernels.reference import Array
from horovod_onebit.layout import Bucket, Piece
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Context, Rule
from horovod_onebit.tasks import Handle, Task
from horovod_onebit.wire import Gathered, Message, Stamp


class Collectives(Protocol):
    """What a world of workers offers. What has a name is collective: all workers call it with the same one.

    The names keep two collectives from being paired when workers submit them in different order. Keras's have none
    within a graph, which orders them.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def takes_device_memory(self) -> bool:
        """Whether what is in a GPU's memory may travel from there: bytes by ``allgather``, whose ``wait`` then gives a
        ``wire.Remote``, and float32 by ``alltoall``, whose ``wait`` gives an array there."""
        ...

    def allgather(self, array: Any, name: str) -> Handle:
        """Start gathering (k,) uint8 of every worker; ``wait`` gives (size * k,) in rank order."""
        ...

    def alltoall(self, array: Any, name: str) -> Handle:
        """Start sending part j of (size * k,) uint8 or float32 to worker j; ``wait`` gives (size * k,), part i from
        worker i."""
        ...

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> Handle:
        """Start summing (k,) float32 or int32 over the workers; ``wait`` gives the sum (k,), the same bits on each."""
        ...

    def host(self) -> tuple[int, int]:
        """A number that the workers of this host have in common, and no others; and how many they are."""
        ...

    def hosts(self, places: Sequence[Sequence[int]]) -> tuple[Collectives, Collectives] | None:
        """The workers of this host, and those that have this one's place on every host; None if there can be no such
        groups. ``places`` are the ranks by host, of several hosts with as many workers each. Collective."""
        ...


class Lane(Collectives, Protocol):
    """Collectives that are paired by their order, and carry one optimizer's messages alone. Where every worker starts
    them in the same order, they may leave before the workers have agreed on the step."""

    generation: str | None
    """That for which it was renewed last; see ``engine.Generation``."""

    def renew(self, generation: str) -> None:
        """Discard what is under way, of which workers may have started different numbers, and begin afresh; does
        nothing if this was done for ``generation`` already. Collective if it does something; to be called before the
        first message, too."""
        ...


Gradient = Callable[[Piece], Array]
"""The gradient of a piece, flat float32."""

Encode = Callable[[Message, Gradient], None]
"""Compress the gradients of a message's pieces into it, and seal it; or start to fetch it from a GPU."""

Predict = Callable[[Piece, Array], None]
"""Take from values of a piece, flat float32 in host memory, what all workers know of their mean beforehand."""

Travel = Task[Gathered]
"""A bucket on its way; returns what arrived."""


@dataclass(frozen=True)
class Outgoing:
    """A bucket that is to travel.

    Attributes:
        message: where its gradients are compressed.
        gradient: gives them.
        encode: compresses them.
        stamp: of the step.
        name: begins the names of its collectives.
        predict: takes from values of their mean what all workers know of it beforehand.
        variance: gives the second moment of a piece in which elements rest (``formulas.rests``), in host memory; None
            where none may.
        shares: by number of the tensor, how much of a server's residual travels; all, where it is not in it.
    """

    message: Message
    gradient: Gradient
    encode: Encode
    stamp: Stamp
    name: str
    predict: Predict
    variance: Callable[[Piece], Array | None]
    shares: Mapping[int, float] = field(default_factory=dict)


class Arrival:
    """A message on its way from a GPU to the host: waited for as a collective is, by this worker alone."""

    def __init__(self, message: Message, stamp: Stamp) -> None:
        self._message, self._stamp = message, stamp

    def ready(self) -> bool:
        return self._message.arrived()

    def wait(self) -> None:
        self._message.arrive(self._stamp)


class Exchange:
    """A way for messages to reach everybody. A file of this folder holds one, named ``Exchange``.

    Attributes:
        stages: how many results each bucket's ``travel`` has to be sent before the last one. Other workers wait for
            what it does then, so that all buckets go through a stage before any goes through the next.
        compressors: how many workers' (or hosts') compressed contributions a mean is of.
        from_device: whether messages in a GPU's memory may leave from there.
        of_all: whether all its collectives are of all workers.
    """

    stages = 0
    from_device = False
    of_all = True

    def __init__(
        self,
        context: Context,
        collectives: Collectives,
        feedback: ErrorFeedback,
        buckets: Sequence[Bucket],
        digest: int,
    ) -> None:
        self.context = context
        self.collectives = collectives
        self.compressors = collectives.size

    @classmethod
    def create(cls, context: Context, collectives: Collectives, *rest: Any) -> Task[Exchange]:
        """One for ``buckets``, those of the layout with that ``digest``. May be collective."""
        yield from ()
        return cls(context, collectives, *rest)

    @property
    def name(self) -> str:
        """That of its file."""
        return type(self).__module__.rpartition(".")[2]

    def travel(self, outgoing: Outgoing) -> Travel:
        """Bring a bucket to everybody: ``encode`` its gradients, now or when they are summed. Messages are checked."""
        raise NotImplementedError

    def commit(self) -> None:
        """The step was taken: keep what the exchange has changed of its own state since the last one."""

    def encodes(self) -> Sequence[Bucket] | None:
        """The parts of the buckets that this worker encodes; None if all."""
        return None

    def served(self) -> Mapping[str, Bucket]:
        """The residuals that this worker keeps as a server, by name, and what parts of the tensors they belong to."""
        return {}

    def bytes_sent(self, bucket: Bucket) -> int:
        """Bytes that one worker sends for ``bucket``; it receives as many."""
        raise NotImplementedError


def encoded(outgoing: Outgoing) -> Generator[Arrival, None, None]:
    """``encode``, and wait until the message is here."""
    outgoing.encode(outgoing.message, outgoing.gradient)
    if outgoing.message.arriving:
        yield Arrival(outgoing.message, outgoing.stamp)


def choose(
    recipe: Recipe, elements: int, collectives: Collectives, rules: Sequence[Rule], *, on_device: bool = False
) -> Task[Recipe]:
    """``recipe`` with the exchange that ``"auto"`` means for ``elements`` compressed parameters, and a size of buckets.
    Collective.

    ``on_device`` says that gradients are in the memory of GPUs.
    """
    linear = all(rule.encodes_gradients for rule in rules)
    if recipe.exchange == "hierarchical" and not linear:
        raise UnsupportedError("0/1 Adam's workers differ within a host too: use exchange='direct' or 'two_stage'")
    places, device = yield from ranks_by_host(collectives, on_device=on_device)
    recipe = replace(recipe, bucket_size=recipe.bucket(on_gpus=device is not costs.CPU))
    if recipe.exchange != "auto":
        return recipe
    per_host = len(places[0]) if places else 1
    known = dict(costs.ways(elements, recipe, collectives.size, per_host, device))
    if not linear:
        known.pop("hierarchical", None)
    found = costs.cheapest(known, recipe.link, device)
    if found == "hierarchical" and collectives.hosts(places) is None:
        del known["hierarchical"]
        found = costs.cheapest(known, recipe.link, device)
    return replace(recipe, exchange=found)


def ranks_by_host(collectives: Collectives, *, on_device: bool = False) -> Task[tuple[list[list[int]], costs.Device]]:
    """The ranks of each host, nothing if hosts have different numbers of workers; and what all workers compute on, if
    this one's gradients are ``on_device`` or not. Collective."""
    kinds = (costs.CPU, costs.GPU_BY_HOST, costs.GPU)
    kind = 0 if not on_device else 2 if collectives.takes_device_memory else 1
    number, count = collectives.host()
    answers = (yield from ask(collectives, "onebit.hosts", host=number, count=count, kind=kind)).fields
    numbers, sizes, device = answers["host"].tolist(), set(answers["count"].tolist()), kinds[answers["kind"].min()]
    places = [[rank for rank, host in enumerate(numbers) if host == one] for one in dict.fromkeys(numbers)]
    return places if {len(ranks) for ranks in places} == sizes and len(sizes) == 1 else [], device


def find(name: str) -> type[Exchange]:
    """The exchange of the file ``name``."""
    found: type[Exchange] = import_module(f"{__name__}.{name}").Exchange
    return found

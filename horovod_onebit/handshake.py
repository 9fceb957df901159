"""What all workers must agree on: a few numbers of each, gathered, and compared by every worker alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit._version import __version__
from horovod_onebit.errors import JOINED, DesyncError, workers
from horovod_onebit.tasks import Task

HANDSHAKE = {
    "facts": "the recipe, the algorithm, or the compressed parameters' names, shapes, dtypes or order",
}
"""What is compared before the first step of a layout, in words."""
CHECKPOINT = "save_checkpoint() or load_checkpoint"
CALLS = (
    "step",
    "synchronize",
    "clip_grad_norm_",
    "check_replicas",
    "flush",
    CHECKPOINT,
    "broadcast_optimizer_state",
    "broadcast_parameters",
)
"""Calls that all workers must make together, in the same order."""

AGREEMENT = {
    "call": "what is to be done together (a step, a check of replicas, a broadcast, ...)",
    "setup": "an argument of DistributedOptimizer (the recipe, the warm-up, groups, ...), what is trained (names, "
    "shapes, dtypes, memory order, frozen or exact parameters, how far the warm-up is, which state was loaded), or how "
    "many DistributedOptimizers were built before",
    "options": "the learning rate, another hyperparameter or argument, a GradScaler's scale, or how many local steps "
    "were taken",
    "step": "the number of compressed steps taken",
    "gradients": "what was done to the averaged gradients before step() (synchronize(), clipping, skip_synchronize())",
}
"""What is compared before a call, in words."""
STEP = {"sends": "what a step sends, by the schedule's own word"}
"""What is compared in a step that cannot be taken back."""
REPLICAS = "a weight, or the optimizer's state"
VERSION = "version"
INSTALL = "Install the same version on all hosts"

ADVICE = {
    "call": "All workers must make the same calls, in the same order",
    "arguments": "Each argument of DistributedOptimizer or NumpyOptimizer must be the same on all workers, and so must "
    "the order in which optimizers are built",
    "trained": "All workers must build the same model, and freeze, add, remove or reset the same parameters before the "
    "same step",
    "progress": "Load the same state on all workers, or broadcast it: horovod_onebit's broadcast_optimizer_state in "
    "PyTorch, BroadcastGlobalVariablesCallback or broadcast_variables in Keras",
    "hyperparameters": "Set this hyperparameter to the same value on all workers before the step",
    "steps": "All workers must take the same steps, at the same learning rates: give them the same number of batches. "
    "After local steps that differed, continue from the last checkpoint",
    "gradients": "synchronize(), clipping and skip_synchronize() must be used alike on all workers",
    "adapted": "What a layer has adapted to (its vocabulary, IDF weights or bin_boundaries) is no variable and is not "
    "broadcast: call adapt() with the same data on all workers, or give all of them worker 0's, by set_vocabulary() or "
    "Discretization(bin_boundaries=...)",
    "replicas": "Broadcast the weights and the optimizer's state before the first step: broadcast_parameters and "
    "broadcast_optimizer_state in PyTorch, BroadcastGlobalVariablesCallback or broadcast_variables in Keras. If they "
    "were broadcast, something changes the weights of one worker alone: nn.Embedding(max_norm=...), a seed, a branch, "
    "an edit of the weights, an optimizer whose step draws random numbers or takes derivatives, hosts whose "
    "processors round differently",
}
"""What to do about facts that differ between workers, by the kind of the fact."""
SHOWN = 3  # facts that an error lists

Facts = Mapping[str, Mapping[str, object]]
"""What a worker has compared, in words: by kind (a key of ``ADVICE``), the name of each fact and its value."""


class Mismatch(DesyncError):
    """The workers differ in something that each can put in words. All raise it, so that they can find out together what
    it is: ``named``."""


class Finite(IntEnum):
    """What a worker says of its own gradients before a step."""

    NO = 0
    YES = 1
    UNKNOWN = 2


FIELDS: Mapping[str, str | int] = {
    "call": "step", "setup": "", "options": "", "step": 0, "gradients": "", "replicas": 0, "finite": Finite.UNKNOWN,
    "early": False, "edited": False, "fresh": False, "loaded": False,
}  # fmt: skip
"""What a worker says before a call, in the order in which it is sent, and what it says if nothing else is given.
``replicas`` is the text of the checksums of weights and state, or 0 where these are not compared."""


@dataclass(frozen=True)
class Verdict:
    """What all workers know after an agreement.

    Attributes:
        finite: no worker has said that its gradients are not.
        certain: all have said that they are.
        early: some worker has sent messages before its step began.
        edited: the workers on which something has changed that was sent already.
        fresh: some worker knows nothing of what gradients of the warm-up are in units of (``rules.gradient``).
        loaded: some worker has loaded a state since the last step, and no residuals with it.
    """

    finite: bool = True
    certain: bool = False
    early: bool = False
    edited: tuple[int, ...] = ()
    fresh: bool = False
    loaded: bool = False


@dataclass(frozen=True)
class Answers:
    """What each worker has said, by field: whole numbers, those of texts being hashes, (workers,) uint64."""

    fields: Mapping[str, NDArray[np.uint64]]

    def where(self, field: str) -> list[int]:
        """The workers that have said anything but 0 or False."""
        return list(np.flatnonzero(self.fields[field]).tolist())

    def any(self, field: str) -> bool:
        return bool(self.fields[field].any())

    def same(self, field: str) -> bool:
        values = self.fields[field]
        return bool((values == values[0]).all())

    def compare(self, meaning: Mapping[str, str]) -> None:
        """Raise ``DesyncError`` if the workers' versions differ, and a ``Mismatch`` if a field of ``meaning`` does: all
        see the same, so that all raise alike."""
        versions = self.fields[VERSION]
        if differ := np.flatnonzero(versions != versions[0]).tolist():
            raise DesyncError(
                f"the version of horovod_onebit differs between workers: {workers(differ)} from worker 0. {INSTALL}"
            )
        _compare(self.fields, meaning)


def _row(**said: str | int) -> NDArray[np.uint64]:
    """What this worker says to all, texts and whole numbers, and its version."""
    return np.array([_number(one) for one in (__version__, *said.values())], np.uint64)


def _answers(rows: NDArray, fields: Sequence[str], size: int) -> Answers:
    """What all workers have said in their rows, of these ``fields``. Raises ``DesyncError`` on every worker if one has
    left."""
    names = (VERSION, *fields)
    if rows.nbytes != size * 8 * len(names):
        raise DesyncError(f"the workers run versions of horovod_onebit that cannot talk to each other. {INSTALL}")
    rows = np.ascontiguousarray(rows).view(np.uint64).reshape(size, -1)
    joined = np.flatnonzero(rows[:, 0] == 0)  # Horovod lets zeros stand for a worker that has left
    if joined.size:
        raise DesyncError(JOINED.format(workers(joined.tolist())))
    return Answers(dict(zip(names, rows.T, strict=True)))


def ask(collectives: Any, name: str, **said: str | int) -> Task[Answers]:
    """Tell all workers what this one says, and hear what they do. Collective; they say the same fields."""
    rows = yield collectives.allgather(_row(**said).view(np.uint8), name)
    return _answers(rows, tuple(said), collectives.size)


def agreement(rank: int, workers: int, **said: str | int) -> NDArray[np.int32]:
    """Returns a row of ``FIELDS`` for each worker, zero except for this worker's own, which has what is ``said``: the
    sum over the workers has all rows."""
    # A sum of rows, all but one of them zeros, is an allgather that Horovod can do when a worker has joined.
    row = _row(**{**FIELDS, **said})
    rows = np.zeros((workers, row.size), np.uint64)
    rows[rank] = row
    return rows.view(np.int32).reshape(-1)


def read_agreement(total: NDArray, size: int) -> Verdict:
    """What the sum says. Raises ``DesyncError`` on every worker if they disagree, where facts can explain it a
    ``Mismatch``."""
    found = _answers(total, tuple(FIELDS), size)
    found.compare({})
    calls = found.fields["call"]
    known = {} if found.same("call") else {_number(call): f"{call}()" for call in CALLS}
    if known.keys() >= set(calls.tolist()):
        made = "; ".join(f"{workers(np.flatnonzero(calls == c).tolist())} {known[int(c)]}" for c in np.unique(calls))
        raise DesyncError(
            f"the workers call different methods of their optimizers: {made}. Each of these calls must be made by all "
            "workers, in the same order (a GradScaler's step calls synchronize())"
        )
    found.compare(AGREEMENT)
    ranks = found.where("replicas")
    _compare({"replicas": found.fields["replicas"][ranks]}, {"replicas": REPLICAS}, ranks=ranks)
    says = found.fields["finite"]
    return Verdict(
        bool((says != Finite.NO).all()),
        bool((says == Finite.YES).all()),
        found.any("early"),
        tuple(found.where("edited")),
        found.any("fresh"),
        found.any("loaded"),
    )


def meet(collectives: Any, name: str, call: str, setup: str = "", **facts: Mapping[str, object]) -> Task[None]:
    """Raise ``DesyncError`` on every worker unless all make this ``call`` now, with the same ``setup`` and ``facts``.
    Collective."""
    record = agreement(collectives.rank, collectives.size, setup=f"{setup} {packed(facts).decode()}", call=call)
    total = yield collectives.allreduce(record, name)
    try:
        read_agreement(total, collectives.size)
    except Mismatch as error:
        raise (yield from named(error, facts_of(call, setup, **facts), collectives, name)) from None


def facts_of(call: str, setup: str = "", **facts: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """The facts of a worker that is about to do ``call``, or that has found an error, ``setup``."""
    return {"call": {"what the workers do": f"{call} ({setup})" if setup else call}, **facts}


def named(found: Mismatch, facts: Facts, collectives: Any, name: str) -> Task[DesyncError]:
    """The error to raise: with what differs between the workers, and the values; with the text of ``found`` if none of
    the facts does. Collective.

    ``facts`` are this worker's, ``name`` that of the agreement which has found that something differs.
    """
    rows = yield from gather(packed(facts, collectives.size), collectives, f"{name}.facts")
    return DesyncError(differences(str(found), rows))


def compared(value: Any) -> Any:
    """A hyperparameter as workers compare it: a float in float32, as steps use it, in its fewest digits. Processors may
    differ in the last digit of the float64 cosine of a schedule."""
    return _in_float32(value) if isinstance(value, float) else value


@lru_cache(1024)
def _in_float32(number: float) -> float:
    with np.errstate(over="ignore"):
        return float(str(np.float32(number)))


def compare(collectives: Any, name: str, meaning: Mapping[str, str], facts: Facts, /, **said: str) -> Task[None]:
    """``ask``, and raise ``DesyncError`` on every worker if a field of ``meaning`` is not the same on all, with what of
    this worker's ``facts`` differs. Collective."""
    answers = yield from ask(collectives, name, **said)
    try:
        answers.compare(meaning)
    except Mismatch as error:
        raise (yield from named(error, facts, collectives, name)) from None


def gather(own: bytes, collectives: Any, name: str) -> Task[list[bytes]]:
    """What each worker gives, of whatever length. Collective."""
    sizes = yield collectives.allgather(np.array([len(own)], np.uint64).view(np.uint8), f"{name}.lengths")
    lengths = np.ascontiguousarray(sizes).view(np.uint64).tolist()
    padded = np.pad(np.frombuffer(own, np.uint8), (0, max(lengths) - len(own)))
    rows = (yield collectives.allgather(padded, name)).reshape(collectives.size, -1)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


MOST_FACTS = 2**18
"""The most facts of one kind that all workers together send in words; each takes about 100 bytes."""


def packed(facts: Facts, workers: int = 1) -> bytes:
    """``facts`` as bytes, without trailing zeros; of each kind the first ones, and a digest of those that are too many
    for so many ``workers`` to send to all."""
    most = max(1, MOST_FACTS // workers)
    said = {kind: [(what, str(value)) for what, value in one.items()] for kind, one in facts.items()}
    for one in said.values():
        if len(rest := one[most:]) > 1:
            others = f"what is not listed, {rest[0][0]} and {len(rest) - 1} more,"
            one[most:] = [(others, f"{_number(repr(rest)):016x}")]
    return json.dumps({kind: dict(one) for kind, one in said.items()}).encode()


def differences(text: str, rows: Sequence[bytes]) -> str:
    """What ``packed`` facts of all workers, padded with zeros, differ in, in words; ``text`` if in nothing."""
    facts = [json.loads(row.rstrip(b"\0")) for row in rows]
    found = list[tuple[str, str]]()
    for kind in ADVICE:
        for what in dict.fromkeys(what for one in facts for what in one.get(kind, ())):
            values = [one.get(kind, {}).get(what, "none") for one in facts]
            if kind == "replicas":  # checksums, of the workers that have sent some
                found += [(kind, text) for text in _drifted(what, values)]
            elif any(value != values[0] for value in values):
                where = {v: [i for i, one in enumerate(values) if one == v] for v in dict.fromkeys(values)}
                each = ", ".join(f"{v} on {workers(ranks)}" for v, ranks in where.items())
                found.append((kind, f"{what} differs between workers: {each}"))
        if found:  # what is of another kind may follow from it
            break
    if not found:
        return text
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{'; '.join(fact for _, fact in found[:SHOWN])}{more}. {ADVICE[found[0][0]]}"


def _drifted(what: str, checksums: Sequence[str]) -> list[str]:
    """Which workers have another ``what`` than the first one that has sent a checksum; nothing if none has."""
    sent = [(rank, value) for rank, value in enumerate(checksums) if value != "none"]
    others = [rank for rank, value in sent if value != sent[0][1]]
    return [f"{what} of {workers(others)} differs from that of worker {sent[0][0]}"] if others else []


def _compare(
    fields: Mapping[str, NDArray[np.uint64]],
    meaning: Mapping[str, str],
    ranks: Sequence[int] | None = None,
) -> None:
    """Compare what workers have said with what the first of them has; ``ranks`` are theirs, if they are not all."""
    for field, text in meaning.items():
        said = fields[field]
        names = range(said.size) if ranks is None else ranks
        if differ := [rank for rank, same in zip(names, said == said[:1], strict=True) if not same]:
            raise Mismatch(
                f"{text} differs between workers: {workers(differ)} from worker {names[0]}. All workers must "
                "build the same model, optimizer and recipe, and load the same state (broadcast it with "
                "horovod_onebit's broadcast_optimizer_state)"
            )


def _number(said: str | int) -> int:
    """Itself, or the hash of a text."""
    if not isinstance(said, str):
        return int(said) % 2**64
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little")

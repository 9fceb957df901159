"""What all workers must agree on: a few numbers of each, gathered, and compared by every worker alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit._version import __version__
from horovod_onebit.errors import JOINED, DesyncError

HANDSHAKE = np.dtype([("version", "<u8"), ("layout", "<u8"), ("rules", "<u8"), ("step", "<u8")])
HANDSHAKE_MEANING = {
    "version": "the version of horovod_onebit",
    "layout": "the recipe, or the compressed parameters' names, shapes, dtypes or order",
    "rules": "the optimizer's algorithm",
    "step": "the number of compressed steps taken",
}
CALLS = (
    "step",
    "synchronize",
    "clip_grad_norm_",
    "check_replicas",
    "flush",
    "save_checkpoint() or load_checkpoint",
    "broadcast_optimizer_state",
)
"""Calls of the PyTorch face that all workers must make together, in the same order."""

AGREEMENT = np.dtype(
    [(name, "<u8") for name in ("version", "call", "setup", "options", "step", "gradients")]
    + [(name, "<u4") for name in ("finite", "early", "edited", "unused")]
)
AGREEMENT_MEANING = {
    "version": "the version of horovod_onebit",
    "call": "what is to be done together (a step, a check of replicas, a broadcast, ...)",
    "setup": "an argument of DistributedOptimizer (the recipe, the warm-up, groups, ...), what is trained (names, "
    "shapes, dtypes, memory order, frozen or exact parameters, how far the warm-up is, which state was loaded), or how "
    "many DistributedOptimizers were built before",
    "options": "the learning rate, another hyperparameter or argument, a GradScaler's scale, or how many local steps "
    "were taken",
    "step": "the number of compressed steps taken",
    "gradients": "what was done to the averaged gradients before step() (synchronize(), clipping, skip_synchronize())",
}


class Finite(IntEnum):
    """What a worker says of its own gradients before a step."""

    NO = 0
    YES = 1
    UNKNOWN = 2


@dataclass(frozen=True)
class Verdict:
    """What all workers know after an agreement.

    Attributes:
        finite: no worker has said that its gradients are not.
        certain: all have said that they are.
        early: some worker has sent messages before its step began.
        edited: the workers on which something has changed that was sent already.
    """

    finite: bool = True
    certain: bool = False
    early: bool = False
    edited: tuple[int, ...] = ()


def handshake(layout: str, rules: str, step: int) -> NDArray[np.uint8]:
    """This worker's record before the first step of ``layout``, to be gathered."""
    record = np.zeros(1, HANDSHAKE)
    record[0] = (_hash(__version__), _hash(layout), _hash(rules), step)
    return record.view(np.uint8)


def check_handshake(gathered: NDArray, workers: int) -> None:
    """Raise ``DesyncError`` on every worker if the records differ."""
    _compare(_records(gathered, HANDSHAKE, workers), HANDSHAKE_MEANING)


def agreement(
    rank: int,
    workers: int,
    *,
    setup: str,
    options: str,
    step: int,
    call: str = "step",
    finite: Finite = Finite.UNKNOWN,
    early: bool = False,
    edited: bool = False,
    gradients: str = "",
) -> NDArray[np.int32]:
    """This worker's record before ``call``, as its row among zeros: to be summed over the workers."""
    # A sum of rows, all but one of them zeros, is an allgather that Horovod can do when a worker has joined.
    records = np.zeros(workers, AGREEMENT)
    record = records[rank : rank + 1]
    texts = {"version": __version__, "call": call, "setup": setup, "options": options, "gradients": gradients}
    for field, text in texts.items():
        record[field] = _hash(text)
    record["step"], record["finite"], record["early"], record["edited"] = step, finite, early, edited
    return records.view(np.int32)


def read_agreement(total: NDArray, workers: int) -> Verdict:
    """What the sum says. Raises ``DesyncError``, on every worker alike, if they disagree."""
    records = _records(total, AGREEMENT, workers)
    _compare(records, {"version": AGREEMENT_MEANING["version"]})
    calls, known = records["call"], {_hash(call): f"{call}()" for call in CALLS}
    if (calls != calls[0]).any() and known.keys() >= set(calls.tolist()):
        made = "; ".join(f"worker {np.flatnonzero(calls == c).tolist()} {known[int(c)]}" for c in np.unique(calls))
        raise DesyncError(
            f"the workers call different methods of their optimizers: {made}. Each of these calls must be made by all "
            "workers, in the same order (a GradScaler's step calls synchronize())"
        )
    _compare(records, AGREEMENT_MEANING)
    says = records["finite"]
    return Verdict(
        bool((says != Finite.NO).all()),
        bool((says == Finite.YES).all()),
        bool(records["early"].any()),
        tuple(np.flatnonzero(records["edited"]).tolist()),
    )


def meet(collectives: Any, name: str, call: str, setup: str) -> None:
    """Raise ``DesyncError`` on every worker unless all make this ``call`` now, with the same ``setup``. Collective."""
    record = agreement(collectives.rank, collectives.size, setup=setup, options="", step=0, call=call)
    read_agreement(collectives.allreduce(record, name).wait(), collectives.size)


def _records(gathered: NDArray, dtype: np.dtype, workers: int) -> NDArray:
    """All workers' records, none of them of a worker that has left."""
    if gathered.nbytes != workers * dtype.itemsize:
        raise DesyncError("the workers run versions of horovod_onebit that cannot talk to each other")
    records = np.ascontiguousarray(gathered).view(dtype)
    joined = np.flatnonzero(records["version"] == 0)  # Horovod lets zeros stand for a worker that has left
    if joined.size:
        raise DesyncError(JOINED.format(joined.tolist()))
    return records


def _compare(records: NDArray, meaning: Mapping[str, str]) -> None:
    """Compare all workers' records with worker 0's: every worker sees the same, so that all raise alike."""
    for field, text in meaning.items():
        differ = np.flatnonzero(records[field] != records[field][0])
        if differ.size:
            raise DesyncError(
                f"{text} differs between workers: worker {differ.tolist()} from worker 0. All workers must build the "
                "same model, optimizer and recipe, and load the same state (broadcast it with horovod_onebit's "
                "broadcast_optimizer_state)"
            )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

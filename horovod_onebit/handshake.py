"""What all workers must agree on: a few numbers of each, gathered, and compared by every worker alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from horovod_onebit._version import __version__
from horovod_onebit.errors import JOINED, ConfigurationError, DesyncError

HANDSHAKE = np.dtype([("version", "<u8"), ("layout", "<u8"), ("rules", "<u8"), ("step", "<u8")])
HANDSHAKE_MEANING = {
    "version": "the version of horovod_onebit",
    "layout": "the recipe, or the compressed parameters' names, shapes, dtypes or order",
    "rules": "the optimizer's algorithm",
    "step": "the number of compressed steps taken",
}
AGREEMENT = np.dtype(
    [(name, "<u8") for name in ("version", "call", "setup", "options", "step")]
    + [(name, "<u4") for name in ("finite", "early", "edited", "unused")]
)
AGREEMENT_MEANING = {
    "version": "the version of horovod_onebit",
    "call": "what is to be done together (a step, a check of replicas, a broadcast, ...)",
    "setup": "the recipe, the warm-up, what is trained (names, shapes, dtypes, memory order, frozen parameters, how "
    "far the warm-up is), or how many DistributedOptimizers were built before",
    "options": "the learning rate or another hyperparameter",
    "step": "the number of compressed steps taken",
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
    """

    finite: bool = True
    certain: bool = False
    early: bool = False


def handshake(layout: int, rules: str, step: int) -> NDArray[np.uint8]:
    """This worker's record before the first step of a layout, to be gathered."""
    record = np.zeros(1, HANDSHAKE)
    record[0] = (_hash(__version__), layout, _hash(rules), step)
    return record.view(np.uint8)


def check_handshake(gathered: NDArray, workers: int) -> None:
    """Raise ``DesyncError`` on every worker if the records differ."""
    _compare(gathered, HANDSHAKE, workers, HANDSHAKE_MEANING)


def agreement(
    rank: int,
    workers: int,
    *,
    call: str = "step",
    setup: str,
    options: str,
    step: int,
    finite: Finite,
    early: bool,
    edited: bool,
) -> NDArray[np.int32]:
    """This worker's record before a step, as its row among zeros: to be summed over the workers."""
    # A sum of rows, all but one of them zeros, is an allgather that Horovod can do when a worker has joined.
    records = np.zeros(workers, AGREEMENT)
    record = records[rank : rank + 1]
    for field, text in (("version", __version__), ("call", call), ("setup", setup), ("options", options)):
        record[field] = _hash(text)
    record["step"], record["finite"], record["early"], record["edited"] = step, finite, early, edited
    return records.view(np.int32)


def read_agreement(total: NDArray, workers: int) -> Verdict:
    """What the sum says. Raises, on every worker alike, if they disagree or if a gradient was changed after it was
    sent."""
    records = _compare(total, AGREEMENT, workers, AGREEMENT_MEANING)
    if records["edited"].any():
        raise ConfigurationError(
            f"worker {np.flatnonzero(records['edited']).tolist()} changed gradients, hyperparameters or what is "
            "trained between backward() and step(), when its messages were on their way already. Build "
            "DistributedOptimizer with overlap=False; or clip by optimizer.clip_grad_norm_(); or call "
            "optimizer.synchronize() before the change. The weights were not changed"
        )
    says = records["finite"]
    return Verdict(bool((says != Finite.NO).all()), bool((says == Finite.YES).all()), bool(records["early"].any()))


def _compare(gathered: NDArray, dtype: np.dtype, workers: int, meaning: Mapping[str, str]) -> NDArray:
    """Compare all workers' records with worker 0's: every worker sees the same, so that all raise alike."""
    if gathered.nbytes != workers * dtype.itemsize:
        raise DesyncError("the workers run versions of horovod_onebit that cannot talk to each other")
    records = np.ascontiguousarray(gathered).view(dtype)
    joined = np.flatnonzero(records["version"] == 0)  # Horovod lets zeros stand for a worker that has left
    if joined.size:
        raise DesyncError(JOINED.format(joined.tolist()))
    for field, text in meaning.items():
        differ = np.flatnonzero(records[field] != records[field][0])
        if differ.size:
            raise DesyncError(
                f"{text} differs between workers: worker {differ.tolist()} from worker 0. All workers must build the "
                "same model, optimizer and recipe, and load the same state (broadcast it with horovod_onebit's "
                "broadcast_optimizer_state)"
            )
    return records


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

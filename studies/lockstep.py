"""Many workers in one thread: the real rules, kernels and exchanges, and one set of weights for all.

Replicas are equal, so that only residuals and messages are kept for each worker, and what all decode is decoded once.
The result is that of ``simulation`` to the bit (`tests/unit/test_studies.py`), without n threads that all decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit import exchange, layout, wire
from horovod_onebit.averages import all_finite
from horovod_onebit.engine import apply, predictor, variance_of
from horovod_onebit.exchange import Gradient
from horovod_onebit.feedback import ErrorFeedback
from horovod_onebit.kernels import backend
from horovod_onebit.kernels.reference import Array
from horovod_onebit.layout import TensorSpec
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Context, Rule, Tensor, finish_step, largest_scale

Gradients = Callable[[int], Mapping[str, Array]]
"""The gradients of the worker of that rank, flat float32 by name; asked for once a step, in the order of ranks."""


class _Posted:
    """A collective that waits for the other workers."""

    def __init__(self, kind: str, array: NDArray) -> None:
        self.kind, self.array = kind, array


class _Collectives:
    """What an exchange asks of its collectives."""

    takes_device_memory = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def allgather(self, array: NDArray, name: str) -> _Posted:
        return _Posted("gather", array)

    def alltoall(self, array: NDArray, name: str) -> _Posted:
        return _Posted("scatter", array)


class Workers:
    """``workers`` of them, who train ``weights``, flat float32 arrays by name that are updated in place.

    All arrays are compressed after ``warmup_steps`` exact ones. ``recipe.exchange`` is "direct" or "two_stage"; assign
    ``rule`` to change the learning rate.
    """

    def __init__(
        self, weights: Mapping[str, Array], rule: Rule, workers: int, *, warmup_steps: int, recipe: Recipe
    ) -> None:
        self.rule, self.workers, self.warmup_steps, self.steps = rule, workers, warmup_steps, 0
        self.context = Context(backend(), recipe, workers)
        specs = [TensorSpec(name, array.size, "") for name, array in weights.items()]
        self.layout = layout.plan(specs, recipe, workers)
        self.tensors = [self._tensor(name, array) for name, array in weights.items()]
        self._feedback = [ErrorFeedback(self.context.kernels) for _ in range(workers)]
        way, self._exchanges = exchange.find(recipe.exchange), []
        for rank, feedback in enumerate(self._feedback):
            # Only what ``travel`` needs; nothing here is collective.
            collectives: Any = _Collectives(rank, workers)
            made = way(self.context, collectives, feedback, self.layout.buckets, self.layout.digest)
            self._exchanges.append(made)
        self._messages = [[wire.Message(bucket) for bucket in self.layout.buckets] for _ in range(workers)]

    def _tensor(self, name: str, array: Array) -> Tensor:
        tensor = Tensor(name, array, np.zeros_like(array), np.zeros_like(array), np.zeros_like(array))
        self.rule.init(tensor)
        return tensor

    def step(self, gradients: Gradients) -> None:
        """One step of all workers; nothing changes if a gradient has NaN or Inf."""
        if self.steps < self.warmup_steps:
            self.steps += self._exact(gradients)
        else:
            self.steps += self._compressed([gradients(rank) for rank in range(self.workers)])

    def _exact(self, gradients: Gradients) -> bool:
        totals = {name: grad.copy() for name, grad in gradients(0).items()}
        for rank in range(1, self.workers):
            for name, grad in gradients(rank).items():
                totals[name] += grad
        if not all_finite(totals.values()):
            return False
        for tensor in self.tensors:
            self.rule.exact_step(tensor, totals[tensor.name] / np.float32(self.workers), self.context)
            if self.steps + 1 == self.warmup_steps:
                self.rule.begin(tensor, self.context)
        return True

    def _compressed(self, grads: list[Mapping[str, Array]]) -> bool:
        arrived = [self._bucket(number, grads) for number in range(len(self.layout.buckets))]
        taken = all(bool(np.all(messages.finite)) for messages in arrived)
        if not taken:
            self._take_back(grads)
            return False
        for one in self._exchanges:
            one.commit()
        rules = [self.rule] * len(self.tensors)
        for messages in arrived:
            apply(messages, rules, self.tensors, self.context)
        finish_step(rules, self.tensors, self.context)
        return True

    def _bucket(self, number: int, grads: list[Mapping[str, Array]]) -> wire.Gathered:
        """What worker 0 receives for a bucket."""
        bucket = self.layout.buckets[number]
        parts = [(self.rule, self.tensors[piece.tensor], piece.block_size) for piece in bucket.pieces]
        stamp = wire.Stamp(self.steps, self.layout.digest, largest_scale(parts, self.context))
        known = [self.rule] * len(self.tensors), self.tensors, self.context
        predict, variance = predictor(*known), variance_of(*known)
        travels = []
        for rank, own in enumerate(grads):
            message = self._messages[rank][number]
            encode = self._encoder(rank, own, stamp)
            outgoing = exchange.Outgoing(message, _unused, encode, stamp, "bucket", predict, variance)
            travels.append(self._exchanges[rank].travel(outgoing))
        waiting: list[Any] = [next(travel) for travel in travels]
        while True:
            results = _meet(waiting)
            try:
                waiting = [travel.send(result) for travel, result in zip(travels, results, strict=True)]
            except StopIteration as end:  # of worker 0: the others would decode the same
                arrived: wire.Gathered = end.value
                return arrived

    def _encoder(self, rank: int, grads: Mapping[str, Array], stamp: wire.Stamp) -> exchange.Encode:
        def encode(message: wire.Message, gradient: Gradient) -> None:
            for part, grad, at, block_size in self._parts(rank, grads, message.bucket):
                self.rule.encode(part, grad, message.row, at, block_size, self.context)
            message.written(stamp)

        return encode

    def _take_back(self, grads: list[Mapping[str, Array]]) -> None:
        for rank, own in enumerate(grads):
            for message in self._messages[rank]:
                for part, grad, at, block_size in self._parts(rank, own, message.bucket):
                    self.rule.restore(part, grad, message.row, at, block_size, self.context)

    def _parts(
        self, rank: int, grads: Mapping[str, Array], bucket: layout.Bucket
    ) -> Iterator[tuple[Tensor, Array, int, int]]:
        """What worker ``rank`` encodes: part of a tensor with its own residual, gradient, first byte, block size."""
        for piece in bucket.pieces:
            tensor = self.tensors[piece.tensor]
            residual = self._feedback[rank].residual(tensor.name, tensor.weight.size)
            part = replace(tensor, residual=residual).part(piece.start, piece.stop)
            grad = grads[tensor.name][piece.start : piece.stop]
            yield part, grad, wire.RECORDS + piece.bytes.start, piece.block_size


def _unused(piece: layout.Piece) -> Array:
    raise NotImplementedError("encode has the gradients")


def _meet(waiting: list[_Posted]) -> list[NDArray]:
    """What each worker gets of the collective that all have started."""
    arrays = np.stack([posted.array for posted in waiting])
    if waiting[0].kind == "gather":
        return [arrays.reshape(-1)] * len(waiting)
    workers = len(waiting)
    return [part.reshape(-1) for part in arrays.reshape(workers, workers, -1).transpose(1, 0, 2)]

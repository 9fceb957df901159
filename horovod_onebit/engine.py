"""One compressed step: rule -> feedback -> exchange -> rule, bucket by bucket.

send     1. the rule encodes each tensor of the bucket into one message: scales and bits
         2. the message starts on its way; the next bucket is encoded meanwhile
receive  3. all messages are there, and are what this step expects, or an error on every worker
         4. every worker knows whether all were finite: apply all, or take all back
         5. the rule decodes the mean and moves the weights
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_onebit import wire
from horovod_onebit._version import __version__
from horovod_onebit.errors import JOINED, DesyncError, NonFiniteError
from horovod_onebit.exchange import Collectives, Handle, Pending
from horovod_onebit.exchange import make as make_exchange
from horovod_onebit.feedback import ErrorFeedback
from horovod_onebit.kernels import backend
from horovod_onebit.kernels.reference import Array, denominator
from horovod_onebit.layout import Layout, TensorSpec, plan
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Context, Rule, Tensor
from horovod_onebit.schedule import Kind
from horovod_onebit.stats import Stats, Times, Traffic, allreduce_bytes

logger = logging.getLogger("horovod_onebit")

HANDSHAKE = np.dtype([("version", "<u8"), ("layout", "<u8"), ("rules", "<u8"), ("step", "<u8")])
HANDSHAKE_MEANING = {
    "version": "the version of horovod_onebit",
    "layout": "the recipe, or the compressed parameters' names, shapes, dtypes or order",
    "rules": "the optimizer's algorithm",
    "step": "the number of compressed steps taken",
}
AGREEMENT = np.dtype([("version", "<u8"), ("setup", "<u8"), ("options", "<u8"), ("step", "<u8"), ("finite", "<u8")])
AGREEMENT_MEANING = {
    "version": "the version of horovod_onebit",
    "setup": "the recipe, the warm-up, or what is trained (names, shapes, dtypes, memory order, frozen parameters, how "
    "far the warm-up is)",
    "options": "the learning rate or another hyperparameter",
    "step": "the number of compressed steps taken",
}


@dataclass
class _Sent:
    """A bucket under way, with all that is needed to apply it or to take it back."""

    message: wire.Message
    pending: Pending
    grads: Mapping[int, Array]
    rules: Sequence[Rule]


class Engine:
    """The compressed stage of one worker, over arrays and a ``Collectives``; it knows no framework.

    ``prepare`` says which tensors there are, ``send`` is called once for each bucket, then ``receive`` once. All
    workers must do the same in the same order.
    """

    def __init__(self, recipe: Recipe, collectives: Collectives, *, kernels: str = "cpu", name: str = "onebit") -> None:
        self.recipe = recipe
        self.collectives = collectives
        self.name = name
        self.context = Context(backend(kernels), recipe, collectives.size)
        self.feedback = ErrorFeedback()
        self.exchange = make_exchange(self.context, collectives, self.feedback)
        self.traffic = Traffic()
        self.times = Times()
        self.exchanges = 0
        self.skipped = 0
        self.layout: Layout | None = None
        self.tensors: list[Tensor] = []
        self._messages: list[wire.Message] = []
        self._sent: list[_Sent] = []
        self._rules: list[Rule] = []

    def prepare(self, tensors: Sequence[Tensor], rules: Sequence[Rule], details: Sequence[str] | None = None) -> None:
        """Lay out ``tensors`` and make sure that all workers see the same (collective when anything changed).

        ``rules`` are the rules by tensor, ``details`` anything else by tensor that must agree, as text. Raises
        ``DesyncError`` on every worker if they do not agree.
        """
        texts = details or [""] * len(tensors)
        specs = [TensorSpec(t.name, t.weight.size, text) for t, text in zip(tensors, texts, strict=True)]
        self.tensors = list(tensors)
        self._rules = list(rules)
        if self.layout is not None and self.layout.tensors == tuple(specs):
            return
        layout = plan(specs, self.recipe, self.collectives.size)
        self._handshake(layout, rules)
        self.layout = layout
        self.exchange.prepare(layout)
        self._messages = [wire.Message(bucket) for bucket in layout.buckets]
        logger.log(
            logging.INFO if self.collectives.rank == 0 else logging.DEBUG,
            "1-bit compression of %s parameters in %d tensors, %d messages a step",
            f"{layout.size:,}",
            len(specs),
            len(layout.buckets),
        )

    def _handshake(self, layout: Layout, rules: Sequence[Rule]) -> None:
        """One small allgather; every worker compares all records with worker 0's, so all raise alike."""
        record = np.zeros(1, HANDSHAKE)
        names = ",".join(rule.name for rule in rules)
        record[0] = (_hash(__version__), layout.digest, _hash(names), self.exchanges)
        gathered = self.collectives.allgather(record.view(np.uint8), f"{self.name}.handshake").wait()
        _compare(gathered, HANDSHAKE, self.collectives.size, HANDSHAKE_MEANING)

    def start_agreement(self, *, setup: str, options: str, finite: bool = True) -> Handle:
        """Start telling all workers what this one is about to do; hand the result to ``finish_agreement``.

        ``setup`` is what is trained and how, ``options`` the hyperparameters of this step, ``finite`` whether its
        gradients are. One small collective, which every worker starts in every step whatever it believes, so that
        workers that disagree are told and not stuck.
        """
        # A sum of rows, all but one of them zeros, is an allgather that Horovod can do when a worker has joined.
        records = np.zeros(self.collectives.size, AGREEMENT)
        record = records[self.collectives.rank : self.collectives.rank + 1]
        for field, text in (("version", __version__), ("setup", f"{self.recipe} {setup}"), ("options", options)):
            record[field] = _hash(text)
        record["step"], record["finite"] = self.exchanges, finite
        return self.collectives.allreduce(records.view(np.int32), f"{self.name}.agreement")

    def finish_agreement(self, handle: Handle) -> bool:
        """Raise ``DesyncError``, on every worker alike, if they do not agree; whether all are finite."""
        records = _compare(handle.wait(), AGREEMENT, self.collectives.size, AGREEMENT_MEANING)
        return bool(records["finite"].all())

    def end_step(self) -> None:
        """Close this step's accounts."""
        self.traffic.end_step()
        self.times.end_step()

    def send(self, bucket_index: int, grads: Mapping[int, Array], rules: Sequence[Rule]) -> None:
        """Encode a bucket and start its message. ``grads`` (flat float32) and ``rules`` are by tensor number.

        The gradients must stay as they are until ``receive``.
        """
        assert self.layout is not None
        message = self._messages[bucket_index]
        finite = True
        with self.times.measure("encode"):
            for piece in message.bucket.pieces:
                tensor = self.tensors[piece.tensor].part(piece.start, piece.stop)
                grad = grads[piece.tensor][piece.start : piece.stop]
                scales, bits = message.scales[piece.blocks], message.bits[piece.bytes]
                rule = rules[piece.tensor]
                finite &= rule.encode(tensor, grad, scales, bits, piece.block_size, self.context)
        stamp = wire.Stamp(self.exchanges, self.layout.digest)
        message.seal(stamp, finite=finite)
        pending = self.exchange.start(message, stamp, f"{self.name}.bucket.{bucket_index}")
        self._sent.append(_Sent(message, pending, grads, rules))
        fp32 = allreduce_bytes(4 * message.bucket.size, self.collectives.size)
        self.traffic.add(self.exchange.bytes_sent(message.bucket), fp32)

    def step(
        self,
        kind: Kind,
        grads: Mapping[int, Array],
        rules: Sequence[Rule],
        *,
        agreed: Callable[[], bool],
        others: Callable[[], bool],
    ) -> bool:
        """One whole step of ``kind``; returns and raises as ``receive``.

        ``agreed`` waits for what all workers must say before anything else is waited for, and returns whether all
        gradients are finite, as far as is known. ``others`` waits for the exact means of what is not compressed.
        """
        assert self.layout is not None
        if self.recipe.rescale_error:
            self._rescale(rules)
        if kind in (Kind.ONEBIT, Kind.GRADIENT):
            for bucket in self.layout.buckets:
                self.send(bucket.index, grads, rules)
            try:
                agreed()
            except DesyncError:
                self._abandon()
                raise
            return self.receive(finite=others())
        finite = agreed() & others()
        if kind is Kind.EXACT:
            return self.exact(grads, rules, finite=finite)
        if not finite:
            self.exchanges += 1
            self._say_skipped("the gradients of some worker")
            return False
        with self.times.measure("decode"):
            for index, tensor in enumerate(self.tensors):
                rules[index].local_step(tensor, grads[index], self.context)
        if kind is Kind.SYNC:
            for bucket in self.layout.buckets:
                self.send(bucket.index, grads, rules)
            return self.receive()
        self.exchanges += 1
        self.traffic.add(0, allreduce_bytes(4 * self.layout.size, self.collectives.size))
        for tensor in self.tensors:
            tensor.step += 1
        return True

    def _rescale(self, rules: Sequence[Rule]) -> None:
        """What is owed was measured with the last learning rate."""
        for tensor, rule in zip(self.tensors, rules, strict=True):
            if tensor.learning_rate > 0 and rule.lr > 0:
                tensor.residual *= np.float32(min(max(tensor.learning_rate / rule.lr, 0.5), 2.0))
            tensor.learning_rate = rule.lr

    def exact(self, grads: Mapping[int, Array], rules: Sequence[Rule], *, finite: bool = True) -> bool:
        """Take a full-precision step: the mean gradients travel as float32. Returns and raises as ``receive``."""
        assert self.layout is not None
        self.exchanges += 1
        handles = []
        for bucket in self.layout.buckets:
            fused = np.concatenate([grads[piece.tensor][piece.start : piece.stop] for piece in bucket.pieces])
            handles.append(self.collectives.allreduce(fused, f"{self.name}.exact.{bucket.index}"))
            sent = allreduce_bytes(fused.nbytes, self.collectives.size)
            self.traffic.add(sent, sent)
        with self.times.measure("exchange"):
            totals = [handle.wait() for handle in handles]
        if not (finite and all(np.isfinite(total).all() for total in totals)):
            self._say_skipped("the mean gradient")
            return False
        means = [np.empty(tensor.weight.size, np.float32) for tensor in self.tensors]
        for bucket, total in zip(self.layout.buckets, totals, strict=True):
            start = 0
            for piece in bucket.pieces:
                size = piece.stop - piece.start
                means[piece.tensor][piece.start : piece.stop] = total[start : start + size]
                start += size
        with self.times.measure("decode"):
            for index, tensor in enumerate(self.tensors):
                rules[index].exact_step(tensor, means[index] / np.float32(self.collectives.size))
        return True

    def flush(self, rules: Sequence[Rule]) -> None:
        """Bring all workers to the same weights, exactly, after local steps. Collective."""
        for index, tensor in enumerate(self.tensors):
            moved = rules[index].pending(tensor)
            if moved is not None:
                total = self.collectives.allreduce(moved, f"{self.name}.flush.{index}").wait()
                sent = allreduce_bytes(moved.nbytes, self.collectives.size)
                self.traffic.add(sent, 0)
                rules[index].settle(tensor, total / np.float32(self.collectives.size), self.context)

    def _abandon(self) -> None:
        """Take back what was encoded and sent, without waiting for it."""
        sent, self._sent = self._sent, []
        for item in sent:
            self._restore(item)

    def receive(self, *, finite: bool = True) -> bool:
        """Wait for all buckets that were sent, and move the weights.

        ``finite`` False says that something all workers know alike (an exact mean, say) was not finite. Returns
        whether the step was taken; if any worker had NaN or Inf, none takes it, momentum and weights stay as they
        were, and the error feedback comes back to rounding. Raises ``NonFiniteError`` then if the recipe says so.
        """
        assert self.layout is not None
        sent, self._sent = self._sent, []
        self.exchanges += 1
        with self.times.measure("exchange"):
            for item in sent:
                item.pending.advance()
            opened = [item.pending.wait() for item in sent]
        everywhere = np.logical_and.reduce([g.finite for g in opened], axis=0)
        taken = finite and bool(np.all(everywhere))
        self.exchange.settle(taken)
        with self.times.measure("decode"):
            if taken:
                for item, messages in zip(sent, opened, strict=True):
                    self._apply(item, messages)
                for index, tensor in enumerate(self.tensors):
                    sent[0].rules[index].finish(tensor, self.context)
                    tensor.step += 1
                return True
            for item in sent:
                self._restore(item)
        where = np.flatnonzero(~np.atleast_1d(everywhere)).tolist()
        self._say_skipped(f"the gradients of worker {where or 'unknown'}")
        return False

    def _say_skipped(self, where: str) -> None:
        self.skipped += 1
        text = f"NaN or Inf in {where}"
        if self.recipe.on_nonfinite == "raise":
            raise NonFiniteError(f"{text}; nothing was changed. Use on_nonfinite='skip' to skip such steps")
        # A run that diverges skips every step: speak the 1st, 2nd, 4th, 8th ... time only.
        speak = self.collectives.rank == 0 and self.skipped & (self.skipped - 1) == 0
        logger.log(logging.WARNING if speak else logging.DEBUG, "%s: step skipped (%d so far)", text, self.skipped)

    def _apply(self, item: _Sent, messages: wire.Gathered) -> None:
        for piece in item.message.bucket.pieces:
            tensor = self.tensors[piece.tensor].part(piece.start, piece.stop)
            scales, bits = messages.scales[:, piece.blocks], messages.bits[:, piece.bytes]
            item.rules[piece.tensor].apply(tensor, scales, bits, piece.block_size, self.context)

    def _restore(self, item: _Sent) -> None:
        for piece in item.message.bucket.pieces:
            tensor = self.tensors[piece.tensor].part(piece.start, piece.stop)
            grad = item.grads[piece.tensor][piece.start : piece.stop]
            scales, bits = item.message.scales[piece.blocks], item.message.bits[piece.bytes]
            item.rules[piece.tensor].restore(tensor, grad, scales, bits, piece.block_size, self.context)

    def stats(self, *, phase: str, step: int, parameters: int, compressed: int, norms: bool) -> Stats:
        """A snapshot; the face says what only it knows: steps taken, elements trained and compressed."""
        error, momentum = self.norms() if norms else (math.nan, math.nan)
        traffic, times = self.traffic, self.times
        return Stats(
            phase=phase,
            step=step,
            skipped_steps=self.skipped,
            parameters=parameters,
            compressed_parameters=compressed,
            bytes_sent=traffic.total,
            bytes_received=traffic.total,
            step_bytes_sent=traffic.step,
            step_bytes_received=traffic.step,
            ratio_to_fp32=traffic.fp32_step / traffic.step if traffic.step else 1.0,
            encode_seconds=times.encode,
            exchange_seconds=times.exchange,
            decode_seconds=times.decode,
            error_norm=error,
            momentum_norm=momentum,
        )

    def norms(self) -> tuple[float, float]:
        """Euclidean norms of this worker's error feedback and of the momentum, in the space that is compressed.

        Over all compressed tensors; a full pass over memory, so for reports rather than for every step.
        """
        error = momentum = 0.0
        for tensor, rule in zip(self.tensors, self._rules, strict=True):
            variance, _, spec = rule.coding(tensor, 8, self.context)
            m = tensor.momentum if variance is None else tensor.momentum / denominator(variance, spec)
            momentum += float(np.dot(m, m))
            error += float(np.dot(tensor.residual, tensor.residual))
        return float(np.sqrt(error)), float(np.sqrt(momentum))


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

"""What may leave while the backward pass is still running: exact averages in warm-up, buckets afterwards.

When to send is each worker's own affair: a message that leaves during backward and one that leaves in ``step`` are the
same collective by the same name. What must not happen is that something changes after it was sent. So every gradient
is remembered as it was when it was final; ``step`` compares, and tells all workers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from horovod_onebit.layout import Layout
from horovod_onebit.rules import Rule
from horovod_onebit.schedule import Kind
from horovod_onebit.torch.binding import is_dense
from horovod_onebit.warmup import Phase
from horovod_onebit.world import workers_changed

if TYPE_CHECKING:
    from horovod_onebit.torch.binding import Binding
    from horovod_onebit.torch.compressor import Compressor

logger = logging.getLogger("horovod_onebit")

SAMPLE = 16
"""Elements of each gradient whose values are remembered: changes by way of ``.data`` do not show in its version."""


@dataclass(frozen=True)
class _Mark:
    """A gradient when it was final."""

    grad: torch.Tensor
    version: int
    sample: bytes

    @classmethod
    def of(cls, grad: torch.Tensor) -> _Mark:
        return cls(grad, grad._version, _sample(grad))


def _sample(grad: torch.Tensor) -> bytes:
    """Some of the values; none of a GPU's, which would have to be waited for."""
    if grad.device.type != "cpu" or grad.layout is not torch.strided or not grad.numel():
        return b""
    grad = grad.detach()
    flat = grad.as_strided((grad.numel(),), (1,)) if is_dense(grad) else grad.reshape(-1)
    values = flat[:: max(1, flat.numel() // SAMPLE)]
    return (values.view(torch.int16) if values.dtype is torch.bfloat16 else values).numpy().tobytes()


class Overlap:
    """Belongs to one ``Compressor``; ``ready`` is called for each gradient, ``reset`` after each step."""

    def __init__(self, compressor: Compressor, enabled: bool) -> None:
        self._compressor = compressor
        self.enabled = enabled
        self.averages = enabled  # in warm-up, until gradients are seen to change between backward() and step()
        self._marks: dict[torch.Tensor, _Mark] = {}
        self._overwritten: list[torch.Tensor] = []  # parameters whose gradients changed in place after they were sent
        self._proven = False  # a step has been seen whose gradients did not change between backward() and step()
        self._sends: bool | None = None  # in this step; None: not decided yet
        self._rules: list[Rule] = []
        self._bindings: list[Binding] = []  # by number, in this step
        self._version = -1  # of the compressor, when the first message of this step was sent
        self._planned: Layout | None = None
        self._buckets: list[list[int]] = []  # of each tensor
        self._members: list[int] = []  # tensors of each bucket
        self._missing: list[int] = []  # gradients that each bucket still waits for
        self._numbers: dict[torch.Tensor, int] = {}

    def ready(self, p: torch.Tensor) -> bool:
        """The gradient of ``p`` is final, as far as the backward pass knows: send its buckets if they may leave now.

        Returns whether, in warm-up, its exact average may be started now.
        """
        compressor = self._compressor
        if p.grad is None:
            return False
        if compressor.phase is Phase.WARMUP:
            if self.averages:
                self._marks[p] = _Mark.of(p.grad)
            return self.averages
        if not self.enabled or p not in compressor.bindings:
            return False
        if self._sends is None:
            self._sends = self._begin()
        self._marks[p] = _Mark.of(p.grad)
        if self._sends:
            for bucket in self._buckets[self._numbers[p]]:
                self._missing[bucket] -= 1
                if not self._missing[bucket]:
                    self._send(bucket)
        return False

    def _begin(self) -> bool:
        """At the first gradient of a step: whether its messages may leave before ``step``."""
        compressor = self._compressor
        if not self._proven or workers_changed(compressor.engine) or compressor.schedule is not None:
            return False
        if not compressor.prepared or compressor.phase is Phase.WARMUP:
            return False
        trained = {p for p in compressor.ordered() if p.requires_grad}
        if not all(p in trained and binding.is_current() for p, binding in compressor.bindings.items()):
            return False
        self._plan()
        self._missing = list(self._members)
        self._rules = compressor.rules(1.0, Kind.ONEBIT)
        self._bindings = list(compressor.bindings.values())
        self._version = compressor.version
        return True

    def _plan(self) -> None:
        """Which tensor is in which bucket."""
        compressor = self._compressor
        layout = compressor.engine.layout
        assert layout is not None
        self._numbers = {p: i for i, p in enumerate(compressor.bindings)}
        if layout is not self._planned:
            self._planned = layout
            members = [{piece.tensor for piece in bucket.pieces} for bucket in layout.buckets]
            self._members = [len(m) for m in members]
            self._buckets = [[] for _ in layout.tensors]
            for index, tensors in enumerate(members):
                for tensor in tensors:
                    self._buckets[tensor].append(index)

    @torch.no_grad()
    def _send(self, bucket: int) -> None:
        compressor = self._compressor
        bindings = self._bindings
        assert self._planned is not None
        grads = {}
        for number in {piece.tensor for piece in self._planned.buckets[bucket].pieces}:
            bindings[number].pull()
            grads[number] = bindings[number].grad()
        compressor.engine.send(bucket, grads, self._rules)

    def edited(self) -> bool:
        """Whether anything has changed that was sent already; learns to send later where it can."""
        compressor = self._compressor
        changed = [p for p, mark in self._marks.items() if _changed(p, mark)]
        self._proven |= bool(self._marks) and not changed
        if compressor.phase is Phase.WARMUP:
            return bool(changed)
        if not self._sends:
            if changed:
                self.disable("gradients change between backward() and step()")
            return False
        if changed:
            names = ", ".join(compressor.names[p] for p in changed[:5])
            self._overwritten = [p for p in changed if p.grad is self._marks[p].grad]
            logger.error("gradients changed after they were sent: %s%s", names, " ..." if len(changed) > 5 else "")
        if changed or self._version != compressor.version:
            return True
        # All parameters of a group have the same rule.
        pairs = set(zip(self._rules, compressor.rules(1.0, Kind.ONEBIT), strict=True))
        return any(_coding(sent) != _coding(now) for sent, now in pairs)

    def settle(self) -> None:
        """After messages were taken back: where the gradients that were sent are lost, so is what was owed before."""
        names = [self._compressor.names[p] for p in self._overwritten]
        self._compressor.engine.feedback.reset(names)
        self._overwritten.clear()

    def disable(self, reason: str, *, averages: bool = False) -> None:
        """From the next step on, send in ``step``: the gradients are not final during backward.

        ``averages``: those of warm-up, too.
        """
        if self.enabled or (averages and self.averages):
            self.enabled, self.averages = False, self.averages and not averages
            level = logging.INFO if self._compressor.engine.collectives.rank == 0 else logging.DEBUG
            logger.log(level, "gradients are sent in step() and not during backward(): %s", reason)

    def fingerprint(self) -> str:
        """A few values of every averaged gradient: they must be the same on all workers."""
        digest = hashlib.blake2b(digest_size=8)
        for p in self._compressor.exact():
            digest.update(b"" if p.grad is None else _sample(p.grad))
        return digest.hexdigest()

    def reset(self) -> None:
        """The step is over."""
        self._marks.clear()
        self._overwritten.clear()
        self._bindings = []
        self._sends = None


def _changed(p: torch.Tensor, mark: _Mark) -> bool:
    grad = p.grad
    return grad is not mark.grad or grad._version != mark.version or _sample(grad) != mark.sample


def _coding(rule: Rule) -> Rule:
    """``rule`` without what a message does not depend on."""
    return dataclasses.replace(rule, lr=0.0)  # type: ignore[type-var]

"""What a run has cost so far, as this worker counts it.

Ranges for NVIDIA's profilers (Nsight Systems) are ``encode``, ``exchange`` and ``decode`` in the domain
``horovod_onebit``, where the package ``nvtx`` is installed. Without a profiler they cost a microsecond.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields

try:
    import nvtx
except ImportError:
    nvtx = None

DOMAIN = "horovod_onebit"


def mark(name: str) -> AbstractContextManager[object]:
    """A range called ``name``, from here to the end of the ``with``."""
    return nullcontext() if nvtx is None else nvtx.annotate(name, domain=DOMAIN)


@dataclass
class Traffic:
    """Bytes of gradients that this worker sent; it receives as many.

    By the usual convention: a ring allreduce sends ``2 (n - 1) / n`` times its data, a ring allgather
    ``(n - 1)`` times this worker's message. Framing by TCP or MPI is not counted.
    """

    total: int = 0
    step: int = 0
    fp32_total: int = 0
    fp32_step: int = 0
    closed: bool = False

    def end_step(self) -> None:
        """The step is over; what is added next belongs to another one. Steps in which nothing was sent belong to the
        next one in which something is."""
        self.closed = self.step > 0

    def add(self, sent: int, fp32: int) -> None:
        """``sent`` bytes went out, where float32 gradients would have been ``fp32``."""
        if self.closed:
            self.step = self.fp32_step = 0
            self.closed = False
        self.step += sent
        self.total += sent
        self.fp32_step += fp32
        self.fp32_total += fp32


def allreduce_bytes(nbytes: int, workers: int) -> int:
    """Bytes that one of ``workers`` sends in a ring allreduce of ``nbytes`` bytes."""
    return round(2 * (workers - 1) / workers * nbytes)


@dataclass
class Times:
    """Seconds of wall time of the last step. ``exchange`` is time spent waiting for messages."""

    encode: float = 0.0
    exchange: float = 0.0
    decode: float = 0.0
    closed: bool = False

    def end_step(self) -> None:
        """The step is over; what is measured next belongs to another one."""
        self.closed = True

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with mark(what):
                yield
        finally:
            self.add(what, time.perf_counter() - start)

    def add(self, what: str, spent: float) -> None:
        """Account for ``spent`` seconds of ``what``."""
        if self.closed:
            self.encode = self.exchange = self.decode = 0.0
            self.closed = False
        setattr(self, what, getattr(self, what) + spent)


@dataclass(frozen=True)
class Stats:
    """A snapshot of a worker's run.

    Attributes:
        phase: ``"warmup"`` or ``"compressed"``.
        step: optimizer steps taken.
        skipped_steps: steps that all workers skipped because of NaN or Inf; with local steps, those that this worker
            skipped, and lost rounds.
        parameters: elements that are trained.
        compressed_parameters: elements that travel as one bit (0 during warm-up).
        coded_parameters: elements whose gradients travel in few bits (0 once they travel as one bit).
        bytes_sent, bytes_received: gradients' bytes of this worker, in all.
        step_bytes_sent, step_bytes_received: of the last step.
        ratio_to_fp32: bytes of a float32 ring allreduce divided by the bytes that the last step sent; 1 if that sent
            nothing, 0 if it sent something else (0/1 Adam's ``flush``). An allreduce by n workers counts as
            2 (n - 1) / n times its data, an allgather as n - 1 times this worker's message.
        encode_seconds, exchange_seconds, decode_seconds: of the last step; exchange is time spent waiting.
        error_norm, momentum_norm: Euclidean norms of the error feedback and of the momentum, in the space that is
            compressed (in update space: of what it would add to the weights), over the compressed tensors.
    """

    phase: str
    step: int
    skipped_steps: int
    parameters: int
    compressed_parameters: int
    coded_parameters: int
    bytes_sent: int
    bytes_received: int
    step_bytes_sent: int
    step_bytes_received: int
    ratio_to_fp32: float
    encode_seconds: float
    exchange_seconds: float
    decode_seconds: float
    error_norm: float
    momentum_norm: float

    @property
    def error_to_momentum(self) -> float:
        """``error_norm / momentum_norm`` (0 when nothing moves)."""
        return self.error_norm / self.momentum_norm if self.momentum_norm else 0.0

    def as_dict(self) -> dict[str, float | int | str]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"error_to_momentum": self.error_to_momentum}

    def __str__(self) -> str:
        ms = [1e3 * t for t in (self.encode_seconds, self.exchange_seconds, self.decode_seconds)]
        share = (
            f", {100 / self.ratio_to_fp32:.1f} % of float32's" if self.step_bytes_sent and self.ratio_to_fp32 else ""
        )
        coded = f"{self.coded_parameters:,} in few bits; " if self.coded_parameters else ""
        return (
            f"step {self.step} ({self.phase}, {self.skipped_steps} skipped): "
            f"{self.step_bytes_sent:,} bytes sent{share}; "
            f"{self.compressed_parameters:,} of {self.parameters:,} parameters as one bit; {coded}"
            f"encode {ms[0]:.1f} ms, exchange {ms[1]:.1f} ms, decode {ms[2]:.1f} ms; "
            f"error/momentum {self.error_to_momentum:.2f}"
        )

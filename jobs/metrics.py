"""A run's metrics: JSON lines in a file, progress for a person. Worker 0 alone writes."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jobs.options import Options


class Metrics:
    """``with Metrics(options, rank) as metrics``: then ``log`` at intervals and ``final`` once.

    A line holds ``step, loss, phase, bytes_sent, bytes_received, seconds`` (bytes of gradients by this worker, in all
    so far), and ``accuracy`` where it was evaluated; the last one has ``"final": true``.
    """

    def __init__(self, options: Options, rank: int) -> None:
        self.options = options
        self.active = rank == 0
        self.start = time.perf_counter()
        self.file = options.metrics.open("w") if self.active and options.metrics else None
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, disable=not (self.active and sys.stderr.isatty()))
        self.bar = self.progress.add_task(f"{options.task}, {options.compression}", total=options.steps)

    def __enter__(self) -> Metrics:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        if self.file:
            self.file.close()

    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.start

    def log(self, step: int, **values: Any) -> None:
        """Write what is known after ``step`` steps."""
        if not self.active:
            return
        self._write({"step": step, **values, "seconds": round(self.seconds(), 3)})
        self.progress.update(self.bar, completed=step, description=f"loss {values['loss']:.3f}")
        if not sys.stderr.isatty() and (step % (10 * self.options.log_interval) == 0 or "accuracy" in values):
            accuracy = f", accuracy {values['accuracy']:.3f}" if "accuracy" in values else ""
            self.console.print(f"step {step}: loss {values['loss']:.4f}{accuracy} ({values['phase']})")

    def final(self, **values: Any) -> None:
        """Write the totals."""
        if self.active:
            config = {k: str(v) if v is not None else None for k, v in dataclasses.asdict(self.options).items()}
            self._write({"final": True, **values, "seconds": round(self.seconds(), 3), "config": config})

    def _write(self, record: dict[str, Any]) -> None:
        if self.file:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()

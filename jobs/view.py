"""What a person sees while jobs train one after the other: a table that changes on a terminal, else lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Records = Sequence[dict[str, Any]]
"""The lines of a metrics file."""


@dataclass
class _Row:
    """One run: what it is called, how far it is, and what it has written so far."""

    label: str
    state: str = "waiting"
    records: list[dict[str, Any]] = field(default_factory=list)
    began: float = 0.0
    baseline: _Row | None = None

    def last(self, key: str) -> Any:
        """The newest value of ``key``; None if there is none yet."""
        return next((record[key] for record in reversed(self.records) if key in record), None)

    def at(self, step: int) -> dict[str, Any] | None:
        return next((record for record in self.records if record["step"] == step), None)


class View:
    """The runs ``labels``, in their order, of ``steps`` steps each; run i is compared with run ``baselines[i]``.

    ``with View(...) as view``, then ``with view.run(i) as watch`` and ``watch(records)`` at will.
    """

    def __init__(self, console: Console, labels: Sequence[str], steps: int, baselines: Sequence[int]) -> None:
        self.console = console
        self.steps = steps
        self.rows = [_Row(label) for label in labels]
        for row, index in zip(self.rows, baselines, strict=True):
            row.baseline = self.rows[index]
        self.live = (
            Live(console=console, get_renderable=self._table, refresh_per_second=5) if console.is_terminal else None
        )

    def __enter__(self) -> View:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    @contextmanager
    def run(self, index: int) -> Iterator[Callable[[Records], None]]:
        """While run ``index`` is going on: what is called with its records."""
        row = self.rows[index]
        row.state, row.began = "starting", time.monotonic()
        if not self.live:
            self.console.print(f"{row.label}: starting")

        def watch(records: Records) -> None:
            new = [dict(record) for record in records[len(row.records) :] if "step" in record]
            row.records += new
            if row.records:
                row.state = "training"
            if not self.live:
                for record in new:
                    if "accuracy" in record:
                        self.console.print(self._line(row, record), soft_wrap=True, highlight=False)

        yield watch
        row.state = "done"

    def _line(self, row: _Row, record: dict[str, Any]) -> str:
        text = (
            f"{row.label}: step {record['step']} of {self.steps}, {record['seconds']:.1f} s, "
            f"loss {record['loss']:.3f}, accuracy {100 * record['accuracy']:.1f} %, "
            f"{1e-6 * record['bytes_sent']:.1f} MB sent"
        )
        return "\n".join(filter(None, (text, self._comparison(row, record))))

    def _comparison(self, row: _Row, record: dict[str, Any] | None) -> str:
        """How far the run that this one is compared with was after as many steps."""
        first = row.baseline or row
        same = first.at(record["step"]) if record else None
        if first is row or record is None or same is None or not record["seconds"]:
            return ""
        ratio = same["seconds"] / record["seconds"]
        faster = f": {ratio:.1f} times as fast" if ratio > 1 else ""
        return (
            f"After {record['step']} steps: {first.label} {same['seconds']:.1f} s, loss {same['loss']:.3f}; "
            f"{row.label} {record['seconds']:.1f} s, loss {record['loss']:.3f}{faster}"
        )

    def _table(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for heading, justify in (("", "left"), ("", "left"), *((h, "right") for h in COLUMNS)):
            table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(row.label, *self._cells(row))
        moving = [row for row in self.rows if row.records]
        below = self._comparison(moving[-1], moving[-1].records[-1]) if moving else ""
        return Group(table, Text(below, style="bold"))

    def _cells(self, row: _Row) -> list[Any]:
        if not row.records:
            seconds = f" {time.monotonic() - row.began:.0f} s" if row.state == "starting" else ""
            return [Text(f"{row.state}{seconds}", style="dim")]
        step, accuracy = row.last("step"), row.last("accuracy")
        return [
            ProgressBar(total=self.steps, completed=step, width=14),
            f"{step}/{self.steps}",
            f"{row.last('loss'):.3f}",
            "" if accuracy is None else f"{100 * accuracy:.1f} %",
            f"{1e-6 * row.last('bytes_sent'):.1f} MB",
            f"{row.last('seconds'):.1f} s",
        ]


COLUMNS = ("step", "loss", "accuracy", "sent", "time")

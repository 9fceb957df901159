"""A table and a plot from the metrics files of several runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table


def dense_bytes(parameters: int, width: int, workers: int) -> int:
    """Bytes that a worker sends in a ring allreduce of ``parameters`` numbers of ``width`` bytes."""
    return round(2 * (workers - 1) / workers * parameters * width)


@dataclass(frozen=True)
class Run:
    """One metrics file: the lines of its steps, and the last one with the totals."""

    steps: list[dict[str, Any]]
    final: dict[str, Any]

    @property
    def compression(self) -> str:
        return self.final["config"]["compression"]


def read(path: Path) -> Run:
    """Raises ``ValueError`` if the run did not come to its end."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines or not lines[-1].get("final"):
        raise ValueError(f"{path}: the last line is not the final one, so the run did not come to its end")
    return Run(lines[:-1], lines[-1])


def table(runs: Sequence[Run], title: str) -> Table:
    """A row for each kind of compression, averaged over its runs (seeds)."""
    result = Table(title=title, show_edge=False)  # 80 columns are enough for it
    headings = (
        "method",
        "test accuracy",
        "test loss",
        "bytes per step",
        "fewer",
        "bytes in all",
        "fewer",
        "time, s",
    )
    for heading in headings:
        result.add_column(heading, justify="left" if heading == "method" else "right")
    for kind in dict.fromkeys(run.compression for run in runs):
        of_kind = [run.final for run in runs if run.compression == kind]

        def average(key: str, of_kind: list[dict[str, Any]] = of_kind) -> float:
            return mean(final[key] for final in of_kind)

        dense = average("fp32_step_bytes")
        steps = int(of_kind[0]["config"]["steps"])
        result.add_row(
            kind,
            f"{100 * average('accuracy'):.2f} %",
            f"{average('test_loss'):.4f}",
            f"{average('last_step_bytes'):,.0f}",
            f"{dense / average('last_step_bytes'):.1f}",
            f"{average('bytes_sent') / 1e6:,.1f} M",
            f"{dense * steps / average('bytes_sent'):.1f}",
            f"{average('seconds'):.1f}",
        )
    return result


def plot(runs: Sequence[Run], path: Path) -> None:
    """Loss curves of all runs, one colour for each kind of compression."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), constrained_layout=True)
    kinds = list(dict.fromkeys(run.compression for run in runs))
    for run in runs:
        color = f"C{kinds.index(run.compression)}"
        label = run.compression if run is next(r for r in runs if r.compression == run.compression) else None
        axes.plot([s["step"] for s in run.steps], [s["loss"] for s in run.steps], color=color, label=label, lw=1.2)
        begin = next((s["step"] for s in run.steps if s["phase"] == "compressed"), None)
        if begin is not None and label:
            axes.axvline(begin, color=color, ls=":", lw=1, label="compression starts")
    axes.set(xlabel="step", ylabel="training loss", yscale="log", title=runs[0].final["config"]["task"])
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

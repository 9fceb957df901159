"""A table, a picture and predictions from the metrics files of several runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.table import Table

from horovod_onebit.recipe import Recipe
from horovod_onebit.tools import planner, show
from horovod_onebit.warmup import EXACT_FIRST
from jobs.options import warmed_up

NAMES = {"none": "float32", "fp16": "float16", "onebit": "one bit"}
"""What a person reads for each kind of compression."""


@dataclass(frozen=True)
class Run:
    """One metrics file: the lines of its steps, and the last one with the totals."""

    steps: list[dict[str, Any]]
    final: dict[str, Any]

    @property
    def compression(self) -> str:
        return self.final["config"]["compression"]


def lines(path: Path) -> list[dict[str, Any]]:
    """What a run has written so far; nothing if it has not begun."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def read(path: Path) -> Run:
    """Raises ``ValueError`` if the run did not come to its end."""
    found = lines(path)
    if not found or not found[-1].get("final"):
        raise ValueError(f"{path}: the last line is not the final one, so the run did not come to its end")
    return Run(found[:-1], found[-1])


def average(runs: Sequence[Run], kind: str, key: str) -> float:
    """The mean of a total over the runs (seeds) of one kind of compression."""
    return mean(run.final[key] for run in runs if run.compression == kind)


AVERAGED = ("accuracy", "test_loss", "last_step_bytes", "fp32_step_bytes", "bytes_sent", "seconds")


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
    steps = int(runs[0].final["config"]["steps"])
    for kind in kinds(runs):
        of_kind = {key: average(runs, kind, key) for key in AVERAGED}
        dense, step, total = (of_kind[key] for key in ("fp32_step_bytes", "last_step_bytes", "bytes_sent"))
        result.add_row(
            NAMES[kind],
            f"{100 * of_kind['accuracy']:.2f} %",
            f"{of_kind['test_loss']:.4f}",
            f"{step:,.0f}",
            f"{dense / step:.1f}",
            f"{total / 1e6:,.1f} M",
            f"{dense * steps / total:.1f}",
            f"{of_kind['seconds']:.1f}",
        )
    return result


def conclusion(runs: Sequence[Run]) -> str:
    """A sentence that compares one bit with float32; empty if one of them was not run."""
    if not {"none", "onebit"} <= set(kinds(runs)):
        return ""
    exact, onebit = ({key: average(runs, kind, key) for key in AVERAGED} for kind in ("none", "onebit"))
    ratio = exact["seconds"] / onebit["seconds"]
    speed = f"{ratio:.1f} times as fast as" if ratio > 1 else f"{1 / ratio:.1f} times as long as"
    return (
        f"With one bit, training {'was' if ratio > 1 else 'took'} {speed} with float32. Each worker sent "
        f"{exact['bytes_sent'] / onebit['bytes_sent']:.1f} times fewer bytes (after the warm-up: "
        f"{exact['last_step_bytes'] / onebit['last_step_bytes']:.1f} times fewer). The test loss "
        f"is {onebit['test_loss']:.3f} (float32: {exact['test_loss']:.3f})."
    )


def readable(rate: str) -> str:
    """``100mbit`` -> ``100 Mbit/s``."""
    return rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def predictions(runs: Sequence[Run], rates: Sequence[str]) -> Table:
    """Seconds of a whole run of each kind by links of ``rates``, as ``horovod_onebit.tools.planner`` predicts them.

    A worker is taken to compute for as long as a step of the first run took. That includes its exchange on this
    machine, so the predicted ratio is rather too small.
    """
    result = Table(title="Predicted seconds, a process on each host", show_edge=False)
    result.add_column("link")
    for kind in kinds(runs):
        result.add_column(NAMES[kind], justify="right")
    for rate in rates:
        result.add_row(readable(rate), *_predicted(runs, rate))
    return result


def _recipe(config: Mapping[str, Any]) -> Recipe:
    """That of a run, with its warm-up."""
    exact = config["optimizer"] == "zero_one_adam" and config["warmup"] == "auto"  # by its schedule
    return warmed_up(config["recipe"], "exact" if exact else config["warmup"])


def _predicted(runs: Sequence[Run], rate: str) -> list[str]:
    final, steps = runs[0].final, [{"step": 0, "seconds": 0.0}, *runs[0].steps]
    # The median: the first steps include compilation.
    compute = median((b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(steps))
    plan = planner.plan(
        planner.Job(
            parameters=final["parameters"], workers=final["workers"], link=planner.rate(rate), compute=compute,
            recipe=_recipe(runs[-1].final["config"]),
        )
    )  # fmt: skip
    exact, half = (next(e.step for e in plan.estimates if e.way == way) for way in planner.UNCOMPRESSED)
    config = runs[-1].final["config"]
    total = int(config["steps"])
    warmup = min(int(config["warmup_steps"]), total)
    few = 0.0 if plan.warmup is None else plan.warmup.step
    first = min(EXACT_FIRST, warmup) if few else warmup
    begin = half if config.get("half") == "True" else exact
    seconds = {
        "none": total * exact,
        "fp16": total * half,
        "onebit": first * begin + (warmup - first) * few + (total - warmup) * plan.unaware.step,
    }
    return [f"{seconds[kind]:.1f}" for kind in kinds(runs)]


def kinds(runs: Sequence[Run]) -> list[str]:
    """The kinds of compression, in the order of the runs."""
    return list(dict.fromkeys(run.compression for run in runs))


def plot(runs: Sequence[Run], path: Path) -> None:
    """Training loss by step and by bytes sent, one colour for each kind of compression."""
    figure = show.figure(8, 3.3)
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for index, kind in enumerate(kinds(runs)):
        for number, run in enumerate(run for run in runs if run.compression == kind):
            label = f"{NAMES[kind]}: {1e-6 * average(runs, kind, 'bytes_sent'):,.0f} MB" if number == 0 else None
            style: dict[str, Any] = {"color": COLORS[index], "lw": 1.4, "label": label}
            loss = [s["loss"] for s in run.steps]
            by_step.plot([s["step"] for s in run.steps], loss, ls=LINES[index], **style)
            by_bytes.plot([1e-6 * s["bytes_sent"] for s in run.steps], loss, **style)
    compressed = [run for run in runs if run.steps[-1]["phase"] == "compressed"]
    if compressed:
        begin = int(compressed[0].final["config"]["warmup_steps"])
        by_step.axvline(begin, color="0.5", ls=":", lw=1)
        by_step.annotate("one bit starts", (begin, 1), (3, -3), xycoords=("data", "axes fraction"),
                         textcoords="offset points", va="top", fontsize=9, color="0.35")  # fmt: skip
    by_step.set(xlabel="step", ylabel="training loss", yscale="log", title="Loss by step")
    by_bytes.set(xlabel="MB sent by a worker (log scale)", xscale="log", title="Loss by bytes sent")
    by_bytes.xaxis.set_major_formatter("{x:g}")
    by_bytes.legend(frameon=False)
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


COLORS = ("#d95f02", "#1b9e77", "#3056b8")
LINES = ("-", "--", ":")

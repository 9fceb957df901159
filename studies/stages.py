"""Study 8: what a second stage costs a language model; the task ``text`` of study 6."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

from horovod_onebit.recipe import Recipe
from studies import pool, report
from studies.rates import EXCHANGES, SEEDS, Cell, Result, kept, measured, train
from studies.recipes import PRESETS

RATE, WORKERS = 2e-3, (4, 8, 16)
ROBUST = PRESETS["robust"]
WAYS: dict[str, Recipe | None] = {
    "exact": None,
    "direct": replace(ROBUST, exchange="direct"),
    "two stages": replace(ROBUST, exchange="two_stage"),
    "one bit in two stages": replace(ROBUST, exchange="two_stage", server_codec="sign"),
}


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    way: str
    workers: int
    seed: int


def result(run: Run) -> Result:
    """The result of ``run``; study 6 has some of them."""
    recipe, cell = WAYS[run.way], Cell("text", run.workers, RATE, "auto", run.seed)
    if recipe is None:
        return measured(replace(cell, workers=4, warmup=None))
    if recipe == replace(ROBUST, exchange=EXCHANGES.get(run.workers, "auto")):
        return measured(cell)
    name = f"stages/{run.way.replace(' ', '-')}-{run.workers}-{run.seed}"
    return kept(name, lambda: train(cell, recipe))


def _rows(found: dict[Run, Result]) -> Iterator[list[str]]:
    for way in WAYS:
        row = [way]
        for workers in WORKERS:
            loss, direct = (mean(found[Run(name, workers, seed)]["loss"] for seed in SEEDS) for name in (way, "direct"))
            beside = f" ({100 * (loss / direct - 1):+.2f} %)" if way not in ("exact", "direct") else ""
            row.append(f"{loss:.4f}{beside}")
        yield row


def run() -> str:
    """The section of the page."""
    todo = [Run(way, workers, seed) for workers in sorted(WORKERS, reverse=True) for way in WAYS for seed in SEEDS]
    found = pool.results(result, todo)
    text = [
        "## 8. A second stage on text",
        f"The task `text` of study 6 at a rate of {RATE:g} with the automatic warm-up; the global batch is the same "
        f"for any number of workers. The table shows the test loss, means of {len(SEEDS)} seeds, and in brackets how "
        "far it is above that of the direct exchange.",
        report.table(["", *(f"{workers} workers" for workers in WORKERS)], _rows(found)),
    ]
    return "\n\n".join(text) + "\n"

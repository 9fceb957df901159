"""Study 12: a warm-up whose gradients travel in few bits (``Recipe.warmup``), beside one of exact steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

from horovod_onebit.coded import FIRST
from horovod_onebit.recipe import PRESETS, Recipe
from horovod_onebit.schedule import Gradients
from studies import pool, report
from studies.language import float32
from studies.rates import SEEDS, Cell, Result, beside, kept, train

RATE = 4e-3
"""That of exact Adam's least loss (study 6)."""
STEPS = 200


@dataclass(frozen=True)
class Way:
    """A row of the table: how the gradients of a warm-up of ``steps`` travel; None: all steps are exact."""

    text: str
    warmup: str = "exact"
    steps: int | None = STEPS
    workers: int = 4
    exchange: str = "direct"
    schedule: Gradients | None = None

    @property
    def recipe(self) -> Recipe:
        return replace(PRESETS["robust"], exchange=self.exchange, warmup=self.warmup)


EXACT = Way("exact Adam, no compression", steps=None)
WAYS = [
    EXACT,
    Way(f"{STEPS} exact steps"),
    *(Way(f'`warmup="{bits}_bit"`', f"{bits}_bit") for bits in ("two", "three", "four")),
    Way('`warmup="three_bit"`, two workers', "three_bit", workers=2),
    Way("`schedule=Gradients()`: Adam's own steps", steps=None, schedule=Gradients()),
]


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    way: Way
    seed: int


def result(run: Run) -> Result:
    """The result of ``run``."""
    way = run.way
    cell = Cell("text", way.workers, RATE, way.steps, run.seed)
    kind = way.warmup if way.schedule is None else "gradients"
    name = f"few_bits/{kind}-{way.steps or 'all'}-{way.workers}-{run.seed}"
    return kept(name, lambda: train(cell, way.recipe, schedule=way.schedule))


def _rows(found: dict[Run, Result]) -> Iterator[list[str]]:
    exact = mean(found[Run(EXACT, seed)]["loss"] for seed in SEEDS)
    for way in WAYS:
        of_seeds = [found[Run(way, seed)] for seed in SEEDS]
        losses = [each["loss"] for each in of_seeds]
        text = f"{exact:.3f}" if way == EXACT else beside(mean(losses), exact)
        times = 1.0 if way == EXACT else float32(way.workers) / of_seeds[0]["bits"]
        yield [way.text, f"{times:.1f}", *(f"{loss:.3f}" for loss in losses), text]


def run() -> str:
    """The section of the page."""
    found = pool.results(result, [Run(way, seed) for way in WAYS for seed in SEEDS])
    head = ["", "times fewer bits, whole run", *(f"seed {seed}" for seed in SEEDS), "mean test loss, above exact Adam"]
    text = [
        "## 12. A warm-up in few bits",
        f"`text` of study 6, at a rate of {RATE:g}: 1,000 steps, of which {STEPS} are the warm-up, {len(SEEDS)} seeds, "
        f"4 workers that exchange directly unless told otherwise. With `warmup=...` the first {FIRST} steps are exact; "
        "then each element of a gradient has two, three or four bits, in units of the root of its second moment. "
        "`Gradients()` averages in three bits until the end; no second moment is frozen.",
        report.table(head, _rows(found)),
    ]
    return "\n\n".join(text) + "\n"

"""Of study 16: LAMB and 1-bit LAMB on two of the networks; simulated workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import isfinite
from statistics import mean

from horovod_onebit.recipe import Recipe
from horovod_onebit.rules.lamb import LAMB
from studies import pool, report
from studies.language import WORKERS, float32
from studies.rates import SEEDS, Cell, Result, beside, in_a_name, kept, train
from studies.recipes import PRESETS

ROBUST = replace(PRESETS["robust"], exchange="direct")
DECAY = 0.01
RATES = {"resnet": (4e-3, 8e-3, 1.6e-2, 3.2e-2), "vgg": (4e-3, 8e-3, 1.6e-2, 3.2e-2)}
"""Of exact LAMB, with the first seed."""
BEST = {"resnet": 1.6e-2, "vgg": 8e-3}
"""Those with its least loss."""
EARLY = 60
"""20 % of the steps of both."""


@dataclass(frozen=True)
class Way:
    """A row of the table; ``warmup`` exact steps, None if all are."""

    text: str
    warmup: int | str | None = None
    recipe: Recipe = ROBUST


EXACT = Way("exact LAMB")
WAYS = [
    EXACT,
    Way("`paper`, after 20 %", EARLY, PRESETS["paper"]),
    Way("`fixed`, after 20 %", EARLY, PRESETS["fixed"]),
    Way("`robust`, after 20 %", EARLY),
    Way("`robust`", "auto"),
    Way('`robust`, `warmup="three_bit"`', "auto", replace(ROBUST, warmup="three_bit")),
]


@dataclass(frozen=True)
class Run:
    """One run."""

    task: str
    way: Way
    rate: float
    seed: int


def result(run: Run) -> Result:
    """The result of ``run``."""
    cell = Cell(run.task, WORKERS, run.rate, run.way.warmup, run.seed)
    name = f"lamb/{run.task}-{in_a_name(run.way.text)}-{run.rate:g}-{run.seed}"
    return kept(name, lambda: train(cell, run.way.recipe, rule=partial(LAMB, weight_decay=DECAY)))


def _rows(found: Mapping[Run, Result], task: str) -> Iterator[list[str]]:
    exact = mean(found[Run(task, EXACT, BEST[task], seed)]["loss"] for seed in SEEDS)
    for way in WAYS:
        runs = [found[Run(task, way, BEST[task], seed)] for seed in SEEDS]
        loss = mean(one["loss"] for one in runs)
        times = 1.0 if way == EXACT else float32(WORKERS) / mean(one["bits"] for one in runs)
        yield [
            task, way.text, *(f"{one['loss']:.3f}" if isfinite(one["loss"]) else "diverged" for one in runs),
            f"{exact:.3f}" if way == EXACT else beside(loss, exact),
            f"{100 * mean(one['accuracy'] for one in runs):.1f} %", f"{times:.1f}",
        ]  # fmt: skip


def section() -> str:
    """This part of the page."""
    swept = [Run(task, EXACT, rate, SEEDS[0]) for task, rates in RATES.items() for rate in rates]
    rows = [Run(task, way, BEST[task], seed) for task, way, seed in product(RATES, WAYS, SEEDS)]
    found = pool.results(result, dict.fromkeys([*swept, *rows]))
    tried = "; ".join(
        f"`{task}` " + ", ".join(f"{found[Run(task, EXACT, rate, SEEDS[0])]['loss']:.3f} at {rate:g}" for rate in rates)
        for task, rates in RATES.items()
    )
    head = ["network", "", *(f"seed {seed}" for seed in SEEDS), "mean test loss", "right", "times fewer bits"]
    text = [
        f"LAMB (weight decay {DECAY:g}) on the ResNet and the VGG, at the rate of exact LAMB's least loss (first seed: "
        f"{tried}); `paper` compresses the momentum, as 1-bit LAMB does. Test loss:",
        report.table(head, (row for task in RATES for row in _rows(found, task))),
        "What to see: `paper` is lost on the VGG with LAMB, too. The others are within 0.3 points of exact LAMB, but "
        "for a warm-up in three bits on the VGG: 0.7 points less, and the highest loss on both. Losses of single seeds "
        "differ by a factor of three.",
    ]
    return "\n\n".join(text)

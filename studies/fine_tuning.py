"""Study 15: fine-tuning, a few hundred steps from a network that was trained on another text; simulated workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from statistics import mean
from typing import Any

import torch

from horovod_onebit.schedule import Gradients, Local, Schedule
from studies import pool, report
from studies.language import float32
from studies.rates import (
    OTHERS,
    RUNS,
    SEEDS,
    Cell,
    Result,
    begin,
    beside,
    in_a_name,
    kept,
    losses,
    rate_at,
    result_of,
    train,
)
from studies.recipes import PRESETS

WORKERS, KIND = 4, OTHERS["source"]
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
"""Of exact Adam, with the first seed: that of ``KIND`` should be the best of them."""
BASE = Cell("language", 1, OTHERS["language"].rates[0], None, 0)


@dataclass(frozen=True)
class Way:
    """A row of the table; ``steps`` of warm-up, None if all are exact."""

    text: str
    steps: int | str | None = None
    warmup: str = "exact"
    schedule: Schedule | None = None
    workers: int = WORKERS


EXACT = Way("exact Adam")
WAYS = [
    EXACT,
    Way("`robust`", "auto"),
    Way("`robust`, `warmup_steps=50`", 50),
    Way('`warmup="three_bit"`, `warmup_steps=50`', 50, "three_bit"),
    Way('`warmup="three_bit"`, `warmup_steps=50`, two workers', 50, "three_bit", workers=2),
    Way('`warmup="two_bit"`, `warmup_steps=50`', 50, "two_bit"),
    Way("`schedule=Gradients()`", schedule=Gradients()),
    Way("`schedule=Local(every=4)`", schedule=Local(every=4)),
]


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    way: Way
    rate: float
    seed: int


@cache
def base() -> tuple[dict[str, Any], float]:
    """The network that all runs begin with, after 2,000 steps of Adam on the documentation of Python; and the test loss
    that it has on what it is to learn."""
    file = RUNS / "fine_tuning" / "base.pt"
    (model,), data, options = begin(BASE)
    if not file.exists():
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(BASE.kind.steps):
            optimizer.param_groups[0]["lr"] = rate_at(BASE, step)
            optimizer.zero_grad()
            losses(model, *data.batch(options, step, 0, 1))[0].backward()
            optimizer.step()
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
    model.load_state_dict(torch.load(file))
    _, other, _ = begin(Cell("source", WORKERS, KIND.rates[0], None, 0))
    return model.state_dict(), result_of(model, other)["loss"]


def result(run: Run) -> Result:
    """The result of ``run``."""
    way = run.way
    cell = Cell("source", way.workers, run.rate, way.steps, run.seed)
    recipe = replace(PRESETS["robust"], exchange="direct", warmup=way.warmup)
    name = f"fine_tuning/{in_a_name(way.text)}-{run.rate:g}-{run.seed}"
    return kept(name, lambda: train(cell, recipe, schedule=way.schedule, start=base()[0]))


def _rows(found: dict[Run, Result]) -> Iterator[list[str]]:
    exact = mean(found[Run(EXACT, KIND.rates[0], seed)]["loss"] for seed in SEEDS)
    for way in WAYS:
        of_seeds = [found[Run(way, KIND.rates[0], seed)] for seed in SEEDS]
        fewer = float32(way.workers) / mean(each["bits"] for each in of_seeds) if way != EXACT else 1.0
        loss = mean(each["loss"] for each in of_seeds)
        right = 100 * mean(each["accuracy"] for each in of_seeds)
        each = [f"{one['loss']:.3f}" for one in of_seeds]
        text = f"{exact:.3f}" if way == EXACT else beside(loss, exact)
        yield [way.text, f"{fewer:.1f}", *each, text, f"{right:.1f} %"]


def run() -> str:
    """The section of the page."""
    before, rate = base()[1], KIND.rates[0]
    firsts = [Run(EXACT, one, SEEDS[0]) for one in RATES]
    found = pool.results(result, [*firsts, *(Run(way, rate, seed) for way, seed in product(WAYS, SEEDS))])
    tried = ", ".join(f"{found[one]['loss']:.3f} at {one.rate:g}" for one in firsts)
    head = ["", "times fewer bits, whole run", *(f"seed {seed}" for seed in SEEDS), "mean test loss", "right"]
    text = [
        "## 15. Fine-tuning",
        "A language model of 0.36 M parameters (study 10) was trained on the documentation of Python for "
        f"{BASE.kind.steps:,} steps. Then {WORKERS} workers, which exchange directly, train it on the source code of "
        f"NumPy for {KIND.steps} steps of Adam, at a rate of {rate:g}, which rises and falls as in study 6 (exact "
        f"Adam with the first seed: {tried}). Before that, its test loss there is {before:.3f}. Means of {len(SEEDS)} "
        "seeds, each of other batches; in brackets, how far above exact Adam.",
        report.table(head, _rows(found)),
    ]
    return "\n\n".join(text) + "\n"

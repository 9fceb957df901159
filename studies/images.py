"""Study 11: a ResNet and a vision transformer as a library has them, on images; simulated workers.

Needs ``transformers``: pip install -r requirements/studies.txt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from statistics import mean

from studies import pool, report
from studies.language import EXACT, WORKERS, Way, float32, way
from studies.library import LIBRARY
from studies.rates import OTHERS, Cell, Result, kept, network, train

TASKS = tuple(LIBRARY)
SEEDS = (0, 1, 2)


WAYS = (EXACT, way("robust", 20), way("robust", "auto"), way("fixed", 20), way("paper", 20))


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    task: str
    way: Way
    seed: int


def result(run: Run) -> Result:
    """The result of ``run``."""
    cell = Cell(run.task, WORKERS, OTHERS[run.task].rates[0], run.way.warmup, run.seed)
    return kept(f"images/{run.task}-{run.way.file}-{run.seed}", lambda: train(cell, run.way.recipe))


def _rows(found: dict[Run, Result], task: str) -> Iterator[list[str]]:
    for one in WAYS:
        of_seeds = [found[Run(task, one, seed)] for seed in SEEDS]
        losses = [each["loss"] for each in of_seeds]
        fewer = 1.0 if one == EXACT else float32(WORKERS) / mean(each["bits"] for each in of_seeds)
        loss = f"{mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})" if all(map(math.isfinite, losses)) else ""
        right = 100 * mean(each["accuracy"] for each in of_seeds)
        yield [one.text, f"{fewer:.1f}", loss or "diverged", f"{right:.1f} %"]


def run() -> str:
    """The section of the page."""
    found = pool.results(result, [Run(*one) for one in product(TASKS, WAYS, SEEDS)])
    head = ["", "times fewer bits, whole run", "test loss", "right"]
    text = [
        "## 11. A ResNet and a vision transformer",
        "Both as the library `transformers` has them (`pip install -r requirements/studies.txt`), on scikit-learn's "
        "digits enlarged to 32x32. Adam, "
        f"{WORKERS} workers with {OTHERS[TASKS[0]].batch // WORKERS} images each, a rate that falls along a cosine. "
        f"Means of {len(SEEDS)} seeds, and the smallest and the largest loss. `robust` exchanges directly, the others "
        "in two stages.",
    ]
    for task, name in zip(TASKS, ("ResNet-18", "Vision transformer"), strict=True):
        size = 1e-6 * sum(p.numel() for p in network(task).parameters())
        kind = OTHERS[task]
        title = f"### {name} of {size:.1f} M parameters, {kind.steps} steps, rate {kind.rates[0]:g}"
        text += [title, report.table(head, _rows(found, task))]
    return "\n\n".join(text) + "\n"

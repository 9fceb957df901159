"""Study 12: a warm-up whose gradients travel in few bits (``Recipe.warmup``), beside one of exact steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean

from horovod_onebit.coded import FIRST
from horovod_onebit.recipe import PRESETS, Recipe
from horovod_onebit.schedule import Gradients
from studies import pool, report, wrapped
from studies.language import float32
from studies.rates import EXCHANGES, SEEDS, WORKERS, Cell, Result, beside, kept, measured, train

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


TASKS = [("text", 4, 2e-3), ("text", 4, 8e-3), ("text", 16, 4e-3), ("vgg", 4, 5e-4), ("vgg", 4, 1e-3),
         ("vgg", 16, 1e-3), ("resnet", 4, 2e-3), ("vit", 4, 5e-4), ("language", 4, 2e-3)]  # fmt: skip
"""Tasks, workers and rates with the warm-up that is the default, exact and in three bits."""
WARMUPS = (None, "exact", "three_bit")
MORE_SEEDS = {"vit": range(8), "resnet": range(5), "vgg": range(8)}
"""Of tasks that differ more between seeds."""
OF_TASKS = (
    'Other tasks, workers and rates with `warmup_steps="auto"`, the default: test loss, beside exact Adam\'s, '
    "accuracy, and how many times fewer bits the whole run sends. `vgg` is that of study 6 with eight seeds, "
    "`resnet` that of study 11 with five, both of 300 steps, `vit` the vision transformer of study 11, 600 "
    "steps and eight seeds, and `language` the GPT of study 10, 2,000 steps; 16 workers exchange in two stages. "
    "A warm-up in three bits ends below exact Adam on texts and on the ResNet, and on the VGG at most 0.3 "
    "points of accuracy below it. The vision transformer ends 1.9 points of accuracy below exact Adam, with 17.5 % "
    "more loss: the loss is higher with six of eight seeds, and one of them makes two thirds of the difference. What "
    "is kept of errors and of gradients (`rules.gradient.KEPT`, `MOST`), the scale and its block (`coded.BLOCK`) were "
    "chosen by runs of `text` at 0.008 and with 16 workers, of `vgg`, of `vit` and of the first Transformer of study "
    "16; the other rows had no part in that."
)


@dataclass(frozen=True)
class Elsewhere:
    """A run of one of ``TASKS``; ``warmup`` is that of the recipe, None if no step is compressed."""

    task: tuple[str, int, float]
    warmup: str | None
    seed: int


def result_elsewhere(run: Elsewhere) -> Result:
    """The result of ``run``."""
    task, workers, rate = run.task
    if run.warmup in (None, "exact"):  # as in study 6; exact runs are the same for any number of workers
        return measured(
            Cell(task, WORKERS[0] if run.warmup is None else workers, rate, run.warmup and "auto", run.seed)
        )
    recipe = replace(PRESETS["robust"], exchange=EXCHANGES[workers], warmup=run.warmup)
    name = f"few_bits/{task}-{workers}-{rate:g}-auto-{run.warmup}-{run.seed}"
    return kept(name, lambda: train(Cell(task, workers, rate, "auto", run.seed), recipe))


def _seeds(task: tuple[str, int, float]) -> Sequence[int]:
    return MORE_SEEDS.get(task[0], SEEDS)


def _rows_elsewhere(found: dict[Elsewhere, Result]) -> Iterator[list[str]]:
    for task in TASKS:
        of = {w: [found[Elsewhere(task, w, seed)] for seed in _seeds(task)] for w in WARMUPS}
        loss, right = ({w: mean(one[key] for one in runs) for w, runs in of.items()} for key in ("loss", "accuracy"))
        row = [task[0], str(task[1]), f"{task[2]:g}", f"{loss[None]:.3f}, {100 * right[None]:.1f} %"]
        for warmup in ("exact", "three_bit"):
            times = float32(task[1]) / of[warmup][0]["bits"]
            row.append(f"{beside(loss[warmup], loss[None])}, {100 * right[warmup]:.1f} %, {times:.1f}")
        yield row


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
    runs = [Elsewhere(task, w, seed) for task, w in product(TASKS, WARMUPS) for seed in _seeds(task)]
    elsewhere = pool.results(result_elsewhere, runs)
    found = pool.results(result, [Run(way, seed) for way in WAYS for seed in SEEDS])
    head = ["", "times fewer bits, whole run", *(f"seed {seed}" for seed in SEEDS), "mean test loss, above exact Adam"]
    text = [
        "## 12. A warm-up in few bits",
        f"`text` of study 6, at a rate of {RATE:g}: 1,000 steps, of which {STEPS} are the warm-up, {len(SEEDS)} seeds, "
        f"4 workers that exchange directly unless told otherwise. With `warmup=...` the first {FIRST} steps are exact; "
        "then each element of a gradient has two, three or four bits, in units of the root of its second moment. "
        "`Gradients()` averages in three bits until the end; no second moment is frozen.",
        report.table(head, _rows(found)),
        wrapped.section(),
        OF_TASKS,
        report.table(
            ["task", "workers", "rate", "exact Adam", "exact warm-up", "warm-up in three bits"],
            _rows_elsewhere(elsewhere),
        ),
    ]
    return "\n\n".join(text) + "\n"

"""Study 12: a warm-up whose gradients travel in few bits (``Recipe.warmup``), beside one of exact steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from horovod_onebit import simulation
from horovod_onebit.averages import start_mean
from horovod_onebit.coded import FIRST, CodedMean
from horovod_onebit.engine import Engine
from horovod_onebit.exchange import Collectives
from horovod_onebit.recipe import PRESETS, Recipe
from horovod_onebit.schedule import Gradients
from horovod_onebit.tasks import run as run_task
from studies import pool, report
from studies.language import float32
from studies.rates import (
    EXCHANGES,
    SEEDS,
    WORKERS,
    Cell,
    Result,
    begin,
    beside,
    kept,
    losses,
    measured,
    rate_at,
    result_of,
    train,
)

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


OTHERS = {"RMSprop": 1e-3, "Adafactor": 1e-2}
"""Optimizers of PyTorch that have no one-bit form, and a rate of each, which is not its best."""


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    way: Way
    seed: int


@dataclass(frozen=True)
class Other:
    """A run of one of ``OTHERS``, with mean gradients in three bits, or exact ones."""

    optimizer: str
    coded: bool
    seed: int


def train_other(run: Other) -> Result:
    """Test loss of ``run``, and the bits that a worker has sent for a parameter in a step."""
    import torch

    cell = Cell("text", 4, OTHERS[run.optimizer], None, run.seed)
    models, data, options = begin(cell)
    recipe = replace(PRESETS["robust"], exchange="direct", warmup="three_bit")

    def worker(collectives: Collectives) -> float:
        rank, n = collectives.rank, collectives.size
        model = models[rank]
        optimizer = getattr(torch.optim, run.optimizer)(model.parameters())
        means, named = Means(recipe, collectives, coded=run.coded), dict(model.named_parameters())
        for step in range(cell.kind.steps):
            optimizer.param_groups[0]["lr"] = rate_at(cell, step)
            loss, _ = losses(model, *data.batch(options, step, rank, n))
            found = torch.autograd.grad(loss, list(named.values()))
            grads = {name: g.numpy().reshape(-1) for name, g in zip(named, found, strict=True)}
            for name, grad in means.of(grads).items():
                named[name].grad = torch.from_numpy(grad).view(named[name].shape)
            optimizer.step()
        return 8 * means.engine.traffic.total / sum(p.numel() for p in named.values()) / cell.kind.steps

    with np.errstate(all="ignore"):
        bits = simulation.run(worker, cell.workers, timeout=900)[0]
    return result_of(models[0], data, bits=bits)


class Means:
    """Mean gradients of simulated workers, as ``schedule=Gradients()`` takes them in PyTorch."""

    def __init__(self, recipe: Recipe, collectives: Collectives, *, coded: bool) -> None:
        self.engine = Engine(recipe, collectives)
        self._coded = CodedMean(self.engine) if coded else None
        self._least = recipe.min_compressed_size

    def of(self, grads: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        """The means of ``grads``, flat, by name, until the next call. Collective."""
        large = {name: grad for name, grad in grads.items() if grad.size >= self._least}
        small = {name: grad for name, grad in grads.items() if name not in large}
        if self._coded is None:
            arriving = start_mean(list(grads.values()), self.engine.collectives, "exact", self.engine.traffic)
            means = dict(zip(grads, run_task(arriving), strict=True))
        else:
            averaged = run_task(self._coded.average(large, list(small.values())))
            assert averaged is not None, "a gradient is not finite"
            means = averaged[0] | dict(zip(small, averaged[1], strict=True))
        self.engine.traffic.end_step()
        return means


TASKS = [("text", 4, 2e-3), ("text", 4, 8e-3), ("text", 16, 4e-3), ("vgg", 4, 5e-4), ("vgg", 4, 1e-3),
         ("vgg", 16, 1e-3), ("resnet", 4, 2e-3)]  # fmt: skip
"""Tasks, workers and rates with the warm-up that is the default, exact and in three bits."""
OF_TASKS = (
    'Other tasks, workers and rates with `warmup_steps="auto"`, the default: test loss, beside exact Adam\'s, '
    "accuracy, and how many times fewer bits the whole run sends. `vgg` is that of study 6, `resnet` that of study 11, "
    "both of 300 steps; 16 workers exchange in two stages. With 4 workers and up to Adam's best rate, three bits cost "
    "at most half a point. At twice that rate (`text` at 0.008), and with 16 workers, the loss ends above that of an "
    "exact warm-up."
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


def _rows_elsewhere(found: dict[Elsewhere, Result]) -> Iterator[list[str]]:
    for task in TASKS:
        of = {w: [found[Elsewhere(task, w, seed)] for seed in SEEDS] for w in (None, "exact", "three_bit")}
        loss, right = ({w: mean(one[key] for one in runs) for w, runs in of.items()} for key in ("loss", "accuracy"))
        row = [task[0], str(task[1]), f"{task[2]:g}", f"{loss[None]:.3f}, {100 * right[None]:.1f} %"]
        for warmup in ("exact", "three_bit"):
            times = float32(task[1]) / of[warmup][0]["bits"]
            row.append(f"{beside(loss[warmup], loss[None])}, {100 * right[warmup]:.1f} %, {times:.1f}")
        yield row


def result_of_other(run: Other) -> Result:
    """The result of ``run``."""
    kind = "three_bit" if run.coded else "exact"
    return kept(f"few_bits/{run.optimizer}-{kind}-{run.seed}", lambda: train_other(run))


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


def _rows_of_others(found: dict[Other, Result]) -> Iterator[list[str]]:
    for name, rate in OTHERS.items():
        exact, coded = ([found[Other(name, few, seed)] for seed in SEEDS] for few in (False, True))
        expected = mean(each["loss"] for each in exact)
        text = beside(mean(each["loss"] for each in coded), expected)
        yield [name, f"{rate:g}", f"{expected:.3f}", text, f"{exact[0]['bits'] / coded[0]['bits']:.1f}"]


def run() -> str:
    """The section of the page."""
    others = pool.results(result_of_other, [Other(n, few, s) for n in OTHERS for few in (False, True) for s in SEEDS])
    ways = (None, "exact", "three_bit")
    elsewhere = pool.results(result_elsewhere, [Elsewhere(t, way, s) for t in TASKS for way in ways for s in SEEDS])
    found = pool.results(result, [Run(way, seed) for way in WAYS for seed in SEEDS])
    head = ["", "times fewer bits, whole run", *(f"seed {seed}" for seed in SEEDS), "mean test loss, above exact Adam"]
    text = [
        "## 12. A warm-up in few bits",
        f"`text` of study 6, at a rate of {RATE:g}: 1,000 steps, of which {STEPS} are the warm-up, {len(SEEDS)} seeds, "
        f"4 workers that exchange directly unless told otherwise. With `warmup=...` the first {FIRST} steps are exact; "
        "then each element of a gradient has two, three or four bits, in units of the root of its second moment. "
        "`Gradients()` averages in three bits until the end; no second moment is frozen.",
        report.table(head, _rows(found)),
        "Other optimizers of PyTorch with `schedule=Gradients()`, in the same task, each at a rate that is not its "
        "best:",
        report.table(
            ["", "rate", "mean test loss, exact means", "in three bits, beside these", "times fewer bits"],
            _rows_of_others(others),
        ),
        OF_TASKS,
        report.table(
            ["task", "workers", "rate", "exact Adam", "exact warm-up", "warm-up in three bits"],
            _rows_elsewhere(elsewhere),
        ),
    ]
    return "\n\n".join(text) + "\n"

"""Of study 12: local steps, before whose freeze workers average gradients in few bits; simulated workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any

from numpy.typing import NDArray

from horovod_onebit.handshake import Verdict
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules import Rule
from horovod_onebit.schedule import Local
from horovod_onebit.tasks import run as run_task
from studies import pool, report
from studies.language import float32
from studies.local import FREEZE, ROBUST
from studies.rates import SEEDS, Cell, Result, beside, in_a_name, kept, measured, train
from studies.zero_one import three_bit_means

TASK, WORKERS, RATE = "text", 4, 4e-3


class InFewBits(NumpyOptimizer):
    """``Local`` steps of Adam, once its second moment is frozen; until then all workers take Adam's own steps, of mean
    gradients in three bits."""

    def __init__(self, weights: Mapping[str, NDArray], rule: Rule, **options: Any) -> None:
        super().__init__(weights, rule, **options)
        self.coded = three_bit_means(self)

    def step(self, grads: Mapping[str, NDArray]) -> bool:
        if self.frozen:
            return super().step(grads)
        self._grads = self._flat(grads)
        finite = run_task(self.average(Verdict()))
        assert finite, "a gradient is not finite"
        self.exact_step()
        self.steps += 1
        if self.driver.warmup.reached(self.steps, self.learning_rate):  # type: ignore[attr-defined]
            for moment in self.second_moments():
                self.freeze(moment.of, moment.variance)
        self.engine.end_step()
        return True


@dataclass(frozen=True)
class Way:
    """A row of the table."""

    text: str
    every: int
    make: type[NumpyOptimizer] = NumpyOptimizer


WAYS = [
    Way("`Local()`: rounds of 8, before the freeze of 4", 8),
    Way("rounds of 8, before the freeze three bits", 8, InFewBits),
    Way("`Local(every=2)`", 2),
    Way("`Local(every=1)`", 1),
]


@dataclass(frozen=True)
class Run:
    """One run."""

    way: Way
    seed: int


def result(run: Run) -> Result:
    """The result of ``run``."""
    way, cell = run.way, Cell(TASK, WORKERS, RATE, None, run.seed)
    schedule = Local(way.every, freeze=FREEZE[TASK])
    name = f"few_bits/local-{in_a_name(way.text)}-{run.seed}"
    return kept(name, lambda: train(cell, ROBUST, schedule=schedule, make=way.make))


def _rows(found: Mapping[Run, Result], exact: float) -> Iterator[list[str]]:
    for way in WAYS:
        runs = [found[Run(way, seed)] for seed in SEEDS]
        losses = [one["loss"] for one in runs]
        times = f"{float32(WORKERS) / runs[0]['bits']:.1f}"
        yield [way.text, times, *(f"{loss:.3f}" for loss in losses), beside(mean(losses), exact)]


def section() -> str:
    """This part of the page."""
    exact = mean(measured(Cell(TASK, WORKERS, RATE, None, seed))["loss"] for seed in SEEDS)
    found = pool.results(result, [Run(way, seed) for way, seed in product(WAYS, SEEDS)])
    head = ["", "times fewer bits", *(f"seed {seed}" for seed in SEEDS), "mean test loss, above exact Adam"]
    text = [
        f"`Local(freeze={FREEZE[TASK]})` in the same task: workers take steps alone, and exchange what they have moved "
        "in one bit; Adam's second moment is averaged and frozen once. Before that, mean gradients in three bits could "
        "take the place of rounds:",
        report.table(head, _rows(found, exact)),
        "What to see: they cost more bytes than they are worth. Rounds of 2 end lower, for two thirds of the bytes.",
    ]
    return "\n\n".join(text)

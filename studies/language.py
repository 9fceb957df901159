"""Study 10: a larger language model on real text; simulated workers, and real ones (``studies.language_worker``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

from horovod_onebit.recipe import Recipe
from jobs.processes import horovodrun
from studies import pool, report
from studies.peers import PowerSGD, powersgd_bits
from studies.rates import OTHERS, Cell, Result, beside, in_a_name, kept, network, train
from studies.recipes import PRESETS

ROBUST, KIND = PRESETS["robust"], OTHERS["language"]
STEPS = KIND.steps
LOOK = 100
"""Steps between two looks at the test loss."""
SEEDS = (0, 1, 2)
WORKERS = 4


def float32(workers: int) -> float:
    """Bits of a parameter that each of ``workers`` sends in a ring."""
    return 32 * 2 * (workers - 1) / workers


@dataclass(frozen=True)
class Way:
    """A row of the table: ``warmup`` exact steps (None: all); with ``rank``, PowerSGD in place of one bit.

    ``workers`` are simulated, or processes that horovodrun starts: ``real``.
    """

    text: str
    warmup: int | str | None
    recipe: Recipe = ROBUST
    rank: int = 0
    workers: int = WORKERS
    real: bool = False

    @property
    def file(self) -> str:
        """``text`` as a part of a file's name."""
        return in_a_name(self.text)


def way(name: str, warmup: int | str, exchange: str = "direct", workers: int = WORKERS, *, real: bool = False) -> Way:
    recipe = replace(ROBUST, exchange=exchange) if name == "robust" else PRESETS[name]
    steps = '"auto"' if warmup == "auto" else f"{warmup} exact steps"
    text = f"`{name}`, {steps}"
    if (exchange, workers, real) != ("direct", WORKERS, False):
        text += f", {workers} {'processes' if real else 'workers'}, {exchange.replace('_', '-')}"
    return Way(text, warmup, recipe, workers=workers, real=real)


EXACT = Way("exact", None)
WAYS = [
    EXACT,
    way("robust", 20),
    way("robust", 200),
    way("robust", "auto"),
    way("fixed", 200),
    way("paper", 200),
    Way("PowerSGD, rank 1, 200 exact steps", 200, rank=1),
    Way("PowerSGD, rank 4, 200 exact steps", 200, rank=4),
    way("robust", "auto", "direct", 16),
    way("robust", "auto", "two_stage", 16),
    way("robust", "auto", "direct", 2, real=True),
    way("robust", "auto", "two_stage", 4, real=True),
]
DRAWN = ("exact", '`robust`, "auto"', "`robust`, 20 exact steps", "PowerSGD, rank 4, 200 exact steps")


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    way: Way
    seed: int


def result(run: Run) -> Result:
    """The result of ``run``."""
    way = run.way
    cell = Cell("language", way.workers, KIND.rates[0], None if way.rank else way.warmup, run.seed)
    hook = partial(PowerSGD, way.rank, int(way.warmup or 0)) if way.rank else None
    name = f"language/language-{way.file}-{way.workers}-{run.seed}"
    return kept(name, lambda: of_processes(run) if way.real else train(cell, way.recipe, hook, look=LOOK))


def of_processes(run: Run) -> Result:
    """The result of ``run`` by processes that horovodrun starts."""
    exchange, workers = run.way.recipe.exchange, run.way.workers
    script = Path(__file__).with_name("language_worker.py")
    return dict(horovodrun(workers, script, exchange, str(run.seed), backend="gloo", timeout=7200))


def fewer(way: Way, found: Result) -> float:
    """How many times fewer bits than float32 a worker sends in a whole run, by what our optimizer counts."""
    if way == EXACT:
        return 1.0
    if not way.rank:
        return float32(way.workers) / found["bits"]
    exact = int(way.warmup or 0)
    rest = powersgd_bits([tuple(p.shape) for p in network("language").parameters()], way.rank)
    return 32 * STEPS / (32 * exact + rest * (STEPS - exact))


def _rows(found: dict[Run, Result]) -> Iterator[list[str]]:
    exact = mean(found[Run(EXACT, seed)]["loss"] for seed in SEEDS)
    for one in WAYS:
        of_seeds = [found[Run(one, seed)] for seed in SEEDS]
        loss = mean(each["loss"] for each in of_seeds)
        text = f"{loss:.3f}" if one == EXACT else beside(loss, exact)
        right = 100 * mean(each["accuracy"] for each in of_seeds)
        yield [one.text, f"{fewer(one, of_seeds[0]):.1f}", text, f"{right:.1f} %"]


def _curves(found: dict[Run, Result]) -> str:
    """Test loss by step, and by the bits that were sent until then."""
    figure, (by_step, by_bits) = report.axes(ncols=2, figsize=(10, 4), sharey=True)
    for one in WAYS:
        if one.text not in DRAWN:
            continue
        run = found[Run(one, SEEDS[0])]
        steps = range(LOOK, STEPS + 1, LOOK)
        losses = [run[f"loss at {step}"] for step in steps]
        exact_steps = STEPS if one == EXACT else int(one.warmup) if one.rank else int(run["exact_steps"])  # type: ignore
        later, ring = 0.0, float32(one.workers)
        if one != EXACT:
            later = ring * (STEPS / fewer(one, run) - exact_steps) / (STEPS - exact_steps)
        sent = [(ring * min(step, exact_steps) + later * max(0, step - exact_steps)) / 8e3 for step in steps]
        by_step.plot(steps, losses, label=one.text.replace("`", ""))
        by_bits.plot(sent, losses)
    by_step.set(xlabel="step", ylabel="test loss")
    by_bits.set(xlabel="kilobytes sent for each parameter", xscale="log")
    by_step.legend()
    return report.save(figure, "language")


def run() -> str:
    """The section of the page."""
    found = pool.results(result, [Run(one, seed) for seed in SEEDS for one in WAYS if not one.real])
    for seed in SEEDS:  # one after the other: each has a process for each core
        found |= {Run(one, seed): result(Run(one, seed)) for one in WAYS if one.real}
    head = ["", "times fewer bits, whole run", "test loss, above exact", "right"]
    size = sum(p.numel() for p in network("language").parameters())
    text = [
        "## 10. A larger language model",
        f"A GPT of {1e-6 * size:.1f} M parameters on the documentation that comes with Python, {STEPS:,} steps at "
        f"a rate of {KIND.rates[0]:g} that falls along a cosine, {len(SEEDS)} seeds, "
        f"{WORKERS} simulated workers unless told otherwise, whose batches always add up to the same. `robust` "
        "exchanges directly unless told otherwise, `fixed` and `paper` in two stages. Processes are those of a "
        "horovodrun job with PyTorch. "
        "PowerSGD (Vogels et al. 2019) with error feedback replaces the "
        "mean gradient, before Adam; it is linear, so that the number of workers does not matter.",
        report.table(head, _rows(found)),
        _curves(found),
    ]
    return "\n\n".join(text) + "\n"

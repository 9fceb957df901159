"""Study 10: a larger language model on real text; simulated workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean

from horovod_onebit.recipe import PRESETS, Recipe
from studies import pool, report
from studies.peers import PowerSGD, powersgd_bits
from studies.rates import OTHERS, Cell, Result, beside, kept, network, train

ROBUST, KIND = PRESETS["robust"], OTHERS["language"]
STEPS = KIND.steps
LOOK = 100
"""Steps between two looks at the test loss."""
SEEDS = (0, 1, 2)
WORKERS = 4
FLOAT32 = 32 * 2 * (WORKERS - 1) / WORKERS
"""Bits of a parameter that a worker sends in a ring."""


@dataclass(frozen=True)
class Way:
    """A row of the table: ``warmup`` exact steps (None: all); with ``rank``, PowerSGD in place of one bit."""

    text: str
    warmup: int | str | None
    recipe: Recipe = ROBUST
    rank: int = 0

    @property
    def file(self) -> str:
        """``text`` as a part of a file's name."""
        return "".join(letter for letter in self.text if letter.isalnum() or letter == " ").replace(" ", "-")


def way(name: str, warmup: int | str) -> Way:
    recipe = replace(ROBUST, exchange="direct") if name == "robust" else PRESETS[name]
    steps = '"auto"' if warmup == "auto" else f"{warmup} exact steps"
    return Way(f"`{name}`, {steps}", warmup, recipe)


EXACT = Way("exact", None)
WAYS = [
    EXACT,
    way("robust", 20),
    way("robust", 200),
    way("robust", "auto"),
    way("fixed", 200),
    Way("PowerSGD, rank 1, 200 exact steps", 200, rank=1),
    Way("PowerSGD, rank 4, 200 exact steps", 200, rank=4),
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
    cell = Cell("language", WORKERS, KIND.rates[0], None if way.rank else way.warmup, run.seed)
    hook = partial(PowerSGD, way.rank, int(way.warmup or 0)) if way.rank else None
    name = f"language/language-{way.file}-{WORKERS}-{run.seed}"
    return kept(name, lambda: train(cell, way.recipe, hook, look=LOOK))


def fewer(way: Way, found: Result) -> float:
    """How many times fewer bits than float32 a worker sends in a whole run, by what our optimizer counts."""
    if way == EXACT:
        return 1.0
    if not way.rank:
        return FLOAT32 / found["bits"]
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
        later = 0.0
        if one != EXACT:
            later = FLOAT32 * (STEPS / fewer(one, run) - exact_steps) / (STEPS - exact_steps)
        sent = [(FLOAT32 * min(step, exact_steps) + later * max(0, step - exact_steps)) / 8e3 for step in steps]
        by_step.plot(steps, losses, label=one.text.replace("`", ""))
        by_bits.plot(sent, losses)
    by_step.set(xlabel="step", ylabel="test loss")
    by_bits.set(xlabel="kilobytes sent for each parameter", xscale="log")
    by_step.legend()
    return report.save(figure, "language")


def run() -> str:
    """The section of the page."""
    found = pool.results(result, [Run(one, seed) for seed in SEEDS for one in WAYS])
    head = ["", "times fewer bits, whole run", "test loss, above exact", "right"]
    size = sum(p.numel() for p in network("language").parameters())
    text = [
        "## 10. A larger language model",
        f"A GPT of {1e-6 * size:.1f} M parameters on the documentation that comes with Python, {STEPS:,} steps at "
        f"a rate of {KIND.rates[0]:g} that falls along a cosine, {len(SEEDS)} seeds, "
        f"{WORKERS} workers. `robust` exchanges directly, `fixed` "
        "in two stages. "
        "PowerSGD (Vogels et al. 2019) with error feedback replaces the "
        "mean gradient, before Adam; it is linear, so that the number of workers does not matter.",
        report.table(head, _rows(found)),
        _curves(found),
    ]
    return "\n\n".join(text) + "\n"

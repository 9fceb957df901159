"""Study 18: DiLoCo and PowerSGD with settings of their own that were searched for, beside ours; simulated workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import mean

from studies import peers, pool, report
from studies.local import EXACT, ONEBIT, ROBUST, Run, fewer, local
from studies.local import result as result_of_ours
from studies.rates import SEEDS, Cell, Result, beside, kept, measured, network, train

TASK, WORKERS, RATE = "text", 4, 4e-3
EVERY = (16, 64)
OUTER, MOMENTA = (0.3, 0.5, 0.7, 1.0), (0.0, 0.5, 0.9)
PUBLISHED = (0.7, 0.9)
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
STARTS = (20, 60, 200)
OURS = (EXACT, ONEBIT, local(8), local(16), local(64))


@dataclass(frozen=True)
class DiLoCo:
    """One of its runs; without ``lr`` and ``momentum``, as the paper has them."""

    every: int
    lr: float = 0.7
    momentum: float = 0.9
    rate: float = RATE
    seed: int = SEEDS[0]


@dataclass(frozen=True)
class PowerSGD:
    """One of its runs."""

    rank: int
    start: int
    rate: float = RATE
    seed: int = SEEDS[0]


One = DiLoCo | PowerSGD | Run


def result(run: One) -> Result:
    """The result of ``run``."""
    if isinstance(run, Run):
        if run.way not in (EXACT, ONEBIT):
            return result_of_ours(run)
        return measured(Cell(TASK, WORKERS, run.rate, run.way.warmup, run.seed))
    cell = Cell(TASK, WORKERS, run.rate, None, run.seed)
    if isinstance(run, PowerSGD):
        name = f"powersgd-{run.rank}-{run.start}-{run.rate:g}-{run.seed}"
        return kept(f"tuned/{name}", lambda: train(cell, ROBUST, partial(peers.PowerSGD, run.rank, run.start)))
    name = f"diloco-{run.every}-{run.lr:g}-{run.momentum:g}-{run.rate:g}-{run.seed}"
    return kept(f"tuned/{name}", lambda: peers.train(cell, run.every, peers.DiLoCo(run.lr, run.momentum)))


def loss_of(run: DiLoCo | PowerSGD) -> float:
    return result(run)["loss"]


def first(every: int) -> list[DiLoCo]:
    """What is tried at ``RATE``."""
    return [DiLoCo(every, *pair) for pair in product(OUTER, MOMENTA)]


def second(every: int) -> list[DiLoCo]:
    """What is tried at other rates, too: the best one at half and twice of it, and the published pair, whose best rates
    are lower (study 9), at half and a quarter."""
    top = min((one for one in first(every) if (one.lr, one.momentum) != PUBLISHED), key=loss_of)
    tried = [replace(top, rate=rate) for rate in RATES[1:]]
    return tried + [DiLoCo(every, *PUBLISHED, rate=rate) for rate in RATES[:-1]]


POWERSGD = [PowerSGD(4, STARTS[0], RATE / 2), *(PowerSGD(4, start) for start in STARTS)]


def best(runs: Sequence[DiLoCo | PowerSGD]) -> DiLoCo | PowerSGD:
    return min(runs, key=loss_of)


def chosen() -> list[DiLoCo | PowerSGD]:
    """What is run with all seeds: each method at its best, and DiLoCo as published at its best rate."""
    found: list[DiLoCo | PowerSGD] = []
    for every in EVERY:
        tried = second(every)
        published = best([one for one in tried if (one.lr, one.momentum) == PUBLISHED])
        found += [published, *(one for one in (best(tried),) if one != published)]
    return found + [best([run for run in POWERSGD if run.start == start]) for start in (STARTS[0], STARTS[-1])]


def seeds_of(one: One) -> list[One]:
    return [replace(one, seed=seed) for seed in SEEDS]


def times_fewer(one: One, found: Result) -> float:
    """How many times fewer bytes than for float32 gradients in a ring a worker sends in a whole run."""
    steps = Cell(TASK, WORKERS, RATE, None, 0).kind.steps
    if isinstance(one, DiLoCo):
        return 32 / found["bits"]
    if isinstance(one, PowerSGD):
        rest = peers.powersgd_bits([tuple(p.shape) for p in network(TASK).parameters()], one.rank)
        return 32 * steps / (32 * one.start + rest * (steps - one.start))
    return 1.0 if one.way == EXACT else fewer(one.way, TASK, found["exact_steps"])


def text_of(one: One) -> str:
    if isinstance(one, DiLoCo):
        return f"DiLoCo, rounds of {one.every}, outer rate {one.lr:g}, momentum {one.momentum:g}"
    if isinstance(one, PowerSGD):
        return f"PowerSGD, rank {one.rank}, {one.start} exact steps"
    return one.way.text


def _rows(found: Mapping[One, Result], ways: Sequence[One]) -> Iterator[list[str]]:
    of = {way: [found[one] for one in seeds_of(way)] for way in ways}
    losses = {way: mean(one["loss"] for one in runs) for way, runs in of.items()}
    times = {way: times_fewer(way, runs[0]) for way, runs in of.items()}
    for way in sorted(ways, key=lambda way: times[way]):
        text, right = beside(losses[way], losses[ways[0]]), 100 * mean(one["accuracy"] for one in of[way])
        yield [text_of(way), f"{way.rate:g}", f"{times[way]:.1f}", text, f"{right:.1f} %"]


def _outer_rows(found: Mapping[DiLoCo, Result]) -> Iterator[list[str]]:
    for every, lr in product(EVERY, OUTER):
        yield [str(every), f"{lr:g}", *(f"{found[DiLoCo(every, lr, m)]['loss']:.3f}" for m in MOMENTA)]


def _rate_rows(found: Mapping[DiLoCo | PowerSGD, Result]) -> Iterator[list[str]]:
    """The losses of a method at all rates that were tried, in a row."""
    ways = {replace(one, rate=RATE): None for one in found}
    for way in ways:
        tried = {rate: found.get(replace(way, rate=rate)) for rate in RATES}
        yield [text_of(way), *("" if one is None else f"{one['loss']:.3f}" for one in tried.values())]


def run() -> str:
    """The section of the page."""
    grid = pool.results(result, [one for every in EVERY for one in first(every)])
    tried = pool.results(result, [*(one for every in EVERY for one in second(every)), *POWERSGD])
    ways = [*(Run(way, TASK, RATE, SEEDS[0]) for way in OURS), *chosen()]
    found = pool.results(result, [one for way in ways for one in seeds_of(way)])
    text = [
        "## 18. DiLoCo and PowerSGD, tuned",
        f"`text` of study 6, 1,000 steps, {WORKERS} workers. What study 9 and the benchmarks have of DiLoCo are the "
        "published outer rate of 0.7 and Nesterov's momentum of 0.9. Here both were searched for, with the first seed: "
        f"the test loss with an inner rate of {RATE:g} is",
        report.table(["rounds of", "outer rate", *(f"momentum {m:g}" for m in MOMENTA)], _outer_rows(grid)),
        "The best outer rate and momentum are at the edge of what was tried.",
        "The best of each, the published one, and PowerSGD after a number of exact steps, at other rates, first seed:",
        report.table(["test loss at a rate of", *(f"{rate:g}" for rate in RATES)], _rate_rows(tried)),
        f"Each at the best of these, beside ours at exact Adam's best rate (study 6): means of {len(SEEDS)} seeds. "
        f"The bytes are those that one of {WORKERS} workers sends in a whole run: DiLoCo, PowerSGD and exact steps in "
        "a ring allreduce, one bit by the direct exchange (of two workers, each would send 3.9 times fewer with one "
        "bit in every step, 107 times fewer in rounds of 8). `rounds of 8` is `Local(freeze=200)`; one bit in every "
        "step has an exact warm-up of 220 steps.",
        report.table(["", "rate", "times fewer bytes", "test loss, above exact", "right"], _rows(found, ways)),
    ]
    return "\n\n".join(text) + "\n"

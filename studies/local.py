"""Study 9: local steps with 1-bit weight deltas; the data of study 6, simulated workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.recipe import Recipe
from horovod_onebit.schedule import Local
from studies import peers, pool, report
from studies.language import float32
from studies.moments import mean_of
from studies.rates import RISE, SEEDS, Cell, Hook, Result, beside, kept, network, train
from studies.recipes import PRESETS

WORKERS = 4
ROBUST = replace(PRESETS["robust"], exchange="direct")


@dataclass(frozen=True)
class Way:
    """One row of a table: ``warmup`` steps that are exact (None: all), or local steps by ``schedule``; ``whole`` if
    deltas travel in float32."""

    text: str
    warmup: int | str | None = None
    schedule: Local | None = None
    whole: bool = False

    def schedule_of(self, task: str) -> Local | None:
        """``schedule``, which freezes Adam's moments after a share of the run of ``task``, if at all."""
        if self.schedule is None or not self.schedule.freeze:
            return self.schedule
        return replace(self.schedule, freeze=FREEZE[task])


def local(every: int, doubling: int = 0, momentum: float = 0.0, *, own: bool = False, whole: bool = False) -> Way:
    """``own``: each worker keeps moments of its own."""
    grows = f", doubled every {doubling} steps" if doubling else ""
    outer = f", momentum {momentum:g}" if momentum else ""
    text = f"rounds of {'1 to ' if doubling else ''}{every}{grows}{outer}{', own moments' if own else ''}"
    schedule = Local(every, doubling, momentum, freeze=0 if own or momentum else Local.freeze)
    return Way(text + (" in float32" if whole else ""), schedule=schedule, whole=whole)


EXACT, ONEBIT = Way("exact"), Way("one bit in every step", warmup="auto")
ALL = [
    EXACT,
    ONEBIT,
    Way("one bit in every step after 20 exact ones", warmup=20),
    local(4),
    local(8),
    local(16),
    local(16, 200),
    local(4, whole=True),
    local(8, whole=True),
    local(16, whole=True),
    *(local(every, own=True) for every in (1, 4, 8, 16)),
    local(16, own=True, whole=True),
]
IMAGES = [EXACT, ONEBIT, local(4), local(8), local(16), local(16, whole=True), local(4, own=True), local(16, own=True)]
LONG = "long text"
TASKS = {LONG: (ALL, 4e-3), "vgg": (IMAGES, 1e-3), "digits": (IMAGES, 1e-3)}
"""What is run of each task, and at which rate."""
FREEZE = {LONG: 400, "text": 200, "vgg": 40, "digits": 100}
"""About a fifth of each task's steps, less those in which the learning rate rises."""


RATES = (1e-3, 2e-3, 4e-3, 8e-3)
OF_RATES = (EXACT, local(4), local(16), local(16, own=True))
"""What is run of the long text at each of ``RATES``, with the first seed."""


@dataclass(frozen=True)
class Peer:
    """A row of the table: rounds of ``every`` steps, exchanged as another method does."""

    text: str
    every: int
    outer: Callable[[], peers.Outer]

    def times_fewer(self, found: Result) -> float:
        """As ``fewer``: SparseLoCo's messages are gathered, as ours are; DiLoCo's travel in a ring."""
        return 1 / gathered(found["bits"]) if self.outer is peers.SparseLoCo else 32 / found["bits"]


PEERS = [
    *(Peer(f"DiLoCo, rounds of {every}", every, peers.DiLoCo) for every in (4, 16)),
    *(Peer(f"SparseLoCo, rounds of {every}", every, peers.SparseLoCo) for every in (1, 4, 16)),
]
PEER_RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)


MANY = 16
OF_MANY = (local(4), local(8), local(8, own=True))
"""What is run of the long text with ``MANY`` workers, with the first seed; exact Adam is the same for any number."""


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    way: Way
    task: str
    rate: float
    seed: int
    workers: int = WORKERS


def result(run: Run) -> Result:
    """The result of ``run``."""
    way = run.way
    cell = Cell(run.task, run.workers, run.rate, way.warmup, run.seed)
    name = f"local/{run.task.replace(' ', '-')}-{way.text.replace(' ', '-').replace(',', '')}-{run.rate:g}-{run.seed}"
    name += f"-{run.workers}" if run.workers != WORKERS else ""
    exact = ["*"] if way.whole else None
    return kept(name, lambda: train(cell, ROBUST, schedule=way.schedule_of(run.task), exact=exact))


def of_peer(run: tuple[Peer, float]) -> Result:
    """The result of a peer on the long text, at a learning rate."""
    peer, rate = run
    cell = Cell(LONG, WORKERS, rate, None, 0)
    name = peer.text.replace(",", "").replace(" ", "-")
    return kept(f"local/{name}-{rate:g}", lambda: peers.train(cell, peer.every, peer.outer()))


class Averaged:
    """A hook: the workers average these moments exactly before each step."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, optimizer: NumpyOptimizer, grads: dict[str, NDArray]) -> None:
        for tensor, name in product(optimizer._tensors, self.names):
            values = getattr(tensor, name)
            values[:] = mean_of(optimizer, f"{tensor.name}.{name}", values)


class Decayed:
    """A hook: the error feedback is multiplied by ``factor`` before each step, or follows a falling learning rate."""

    def __init__(self, factor: float | None = None) -> None:
        self.factor = factor
        self.rate = 0.0

    def __call__(self, optimizer: NumpyOptimizer, grads: dict[str, NDArray]) -> None:
        rate, before = optimizer.rule.lr, self.rate
        factor = self.factor if self.factor is not None else min(1.0, rate / before if before else 1.0)
        for tensor in optimizer._tensors:
            tensor.residual *= np.float32(factor)
        self.rate = rate


@dataclass(frozen=True)
class Trial:
    """Something that was tried, on the task ``text``."""

    text: str
    schedule: Local
    recipe: Recipe = ROBUST
    hook: Callable[[], Hook] | None = None
    whole: bool = False


def own(every: int, doubling: int = 0, delay: int = 0) -> Local:
    """Rounds in which all moments are each worker's own."""
    return Local(every, doubling, delay=delay, freeze=0)


GROWN = own(16, 150)
TRIED = {
    "1": Trial("rounds of 1", own(1)),
    "1-first": Trial("the same, first moments averaged in each step", own(1), hook=lambda: Averaged("momentum")),
    "1-second": Trial("second moments averaged", own(1), hook=lambda: Averaged("variance")),
    "1-both": Trial("both averaged", own(1), hook=lambda: Averaged("momentum", "variance")),
    "1-two-bit": Trial("two bits", own(1), replace(ROBUST, codec="two_bit")),
    "1-whole": Trial("float32", own(1), whole=True),
    "grown": Trial("rounds of 1 to 16, doubled every 150 steps", GROWN),
    "grown-decay": Trial("the same, errors times 0.99 in each step", GROWN, hook=lambda: Decayed(0.99)),
    "grown-rate": Trial("errors that follow the learning rate down", GROWN, hook=Decayed),
    "grown-128": Trial("blocks of 128", GROWN, replace(ROBUST, block_size=128)),
    "grown-two-bit": Trial("two bits", GROWN, replace(ROBUST, codec="two_bit")),
    "grown-whole": Trial("float32", GROWN, whole=True),
    "4": Trial("rounds of 4", own(4)),
    "4-hidden-1": Trial("the same, hidden behind 1 step", own(4, delay=1)),
    "4-hidden-4": Trial("hidden behind 4 steps", own(4, delay=4)),
    "16": Trial("rounds of 16", own(16)),
    "16-hidden-1": Trial("the same, hidden behind 1 step", own(16, delay=1)),
    "16-hidden-16": Trial("hidden behind 16 steps", own(16, delay=16)),
    "16-common": Trial(f"rounds of 16, moments frozen after {RISE + 400} steps", Local(16)),
    "16-common-hidden-1": Trial("the same, hidden behind 1 step", Local(16, delay=1)),
    "16-common-hidden-2": Trial("hidden behind 2 steps", Local(16, delay=2)),
    "16-common-hidden-4": Trial("hidden behind 4 steps", Local(16, delay=4)),
    **{
        f"4-frozen-{after}": Trial(f"rounds of 4, moments frozen after {RISE + after} steps", Local(4, 0, freeze=after))
        for after in (20, 50, 100, 200, 400)
    },
}
TRIED_AT = 4e-3


def tried(name: str) -> Result:
    """The result of a trial."""
    trial, cell = TRIED[name], Cell("text", WORKERS, TRIED_AT, None, 0)
    exact = ["*"] if trial.whole else None
    run = partial(train, cell, trial.recipe, trial.hook, schedule=trial.schedule, exact=exact)
    return kept(f"local/tried-{name}", run)


def todo() -> Iterator[Run]:
    """All runs."""
    for seed, (task, (ways, rate)) in product(SEEDS, TASKS.items()):
        for way in ways:
            yield Run(way, task, rate, seed)
    for rate, way in product(RATES, OF_RATES):
        if rate != TASKS[LONG][1]:
            yield Run(way, LONG, rate, SEEDS[0])
    for way in OF_MANY:
        yield Run(way, LONG, TASKS[LONG][1], SEEDS[0], MANY)


@cache
def _small(task: str) -> float:
    """The share of a network's parameters that are not compressed."""
    sizes = [p.numel() for p in network(task).parameters()]
    return sum(size for size in sizes if size < ROBUST.min_compressed_size) / sum(sizes)


def gathered(bits: float) -> float:
    """What each of ``WORKERS`` sends in all of a message that all others receive, compared with a ring of float32."""
    return (WORKERS - 1) * bits / float32(WORKERS)


def fewer(way: Way, task: str, exact_steps: float) -> float:
    """How many times fewer bytes than for float32 gradients in a ring one of ``WORKERS`` sends in a whole run, by the
    direct exchange. What is exact travels in a ring, too."""
    steps, small = Cell(task, WORKERS, 0.0, None, 0).kind.steps, _small(task)
    one_bit = small + gathered(1 + 32 / 1024) * (1 - small)
    if (schedule := way.schedule_of(task)) is not None:
        freeze = RISE + schedule.freeze if schedule.shares_moments else 0
        ends = {step for step in range(1, steps + 1) if schedule.ends_round(step, first=step <= freeze)}
        ends |= {steps}  # by flush()
        rounds, once = len(ends | {freeze} - {0}), 2 if freeze else 0
        return steps / (rounds * (1 if way.whole else one_bit) + once)
    return steps / (exact_steps + one_bit * (steps - exact_steps))


def _rows(found: dict[Run, Result], task: str) -> Iterator[list[str]]:
    ways, rate = TASKS[task]

    def means(way: Way, key: str) -> float:
        return mean(found[Run(way, task, rate, seed)][key] for seed in SEEDS)

    exact = means(EXACT, "loss")
    for way in ways:
        loss = means(way, "loss")
        times = fewer(way, task, means(way, "exact_steps")) if way != EXACT else 1.0
        text = f"{loss:.4f}" if way == EXACT else beside(loss, exact, digits=4)
        yield [way.text, f"{times:.0f}", text, f"{100 * means(way, 'accuracy'):.1f} %"]


def _rate_rows(found: dict[Run, Result]) -> Iterator[list[str]]:
    """The loss of each way at each rate, its best one marked, and how far that is above the best one of exact Adam."""
    losses = {way: [found[Run(way, LONG, rate, SEEDS[0])]["loss"] for rate in RATES] for way in OF_RATES}
    for way, row in losses.items():
        best, exact = min(row), min(losses[EXACT])
        cells = [f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in row]
        yield [way.text, *cells, "" if way == EXACT else f"{100 * (best / exact - 1):+.1f} %"]


def _many_rows(found: dict[Run, Result]) -> Iterator[list[str]]:
    """The loss with few and with many workers."""
    rate = TASKS[LONG][1]
    exact = found[Run(EXACT, LONG, rate, SEEDS[0])]["loss"]
    for way in OF_MANY:
        few, many = (found[Run(way, LONG, rate, SEEDS[0], workers)]["loss"] for workers in (WORKERS, MANY))
        yield [way.text, beside(few, exact, digits=4), beside(many, exact, digits=4)]


def _peer_rows(found: dict[Run, Result]) -> Iterator[list[str]]:
    """Beside our own runs of the same seed."""
    rate = TASKS[LONG][1]
    exact = found[Run(EXACT, LONG, rate, 0)]["loss"]
    rows = [(way.text, f"{rate:g}", fewer(way, LONG, 0), found[Run(way, LONG, rate, 0)]) for way in ALL if way.schedule]
    of_peers = pool.results(of_peer, product(PEERS, PEER_RATES))
    for peer in PEERS:
        best = min(PEER_RATES, key=lambda rate: of_peers[peer, rate]["loss"])
        one = of_peers[peer, best]
        rows.append((peer.text, f"{best:g}", peer.times_fewer(one), one))
    for text, at, times, one in sorted(rows, key=lambda row: row[2]):
        yield [text, at, f"{times:.0f}", beside(one["loss"], exact, digits=4), f"{100 * one['accuracy']:.1f} %"]


def run() -> str:
    """The section of the page."""
    found = pool.results(result, todo())
    text = [
        "## 9. Local steps",
        f"Adam, {WORKERS} workers, whose batches add up to that of exact Adam; means of {len(SEEDS)} seeds. The bytes "
        f"are those that one of {WORKERS} workers sends in a whole run with the direct exchange, its exact steps and "
        "the averages of second moments included, compared with float32 gradients in every step by a ring allreduce. "
        "`rounds of 8` is `Local(every=8)`, and `rounds of 1 to 16, doubled every 200 steps` is `Local(every=16, "
        f"doubling=200)`. Moments are frozen {FREEZE[LONG]} steps after the learning rate has risen ({FREEZE['vgg']} "
        f"with vgg, {FREEZE['digits']} with digits, whose runs are shorter), and never in the rows with own moments "
        "(`freeze=0`). In the rows with float32, the changes of the weights are averaged exactly. The text is that of "
        "study 6, in 2,000 steps.",
    ]
    for task in TASKS:
        head = ["", "times fewer bytes", "test loss, above exact", "right"]
        text += [f"### {task}, rate {TASKS[task][1]:g}", report.table(head, _rows(found, task))]
    trials = pool.results(tried, TRIED)
    text += [
        "### Other rates: long text, one seed",
        report.table(
            ["test loss at a rate of", *(f"{rate:g}" for rate in RATES), "best, above exact"], _rate_rows(found)
        ),
        f"### {MANY} workers: long text, one seed",
        "With the direct exchange; the workers' batches have the same size together, so that each has a quarter of the "
        "examples.",
        report.table(["test loss, above exact", f"{WORKERS} workers", f"{MANY} workers"], _many_rows(found)),
        "### Other methods: long text, one seed",
        "DiLoCo (Douillard et al. 2023) averages in float32, with an outer learning rate of 0.7 and a momentum of 0.9. "
        "SparseLoCo (Sarfi et al. 2025) sends the largest 64 of each 4,096 elements in 14 bits each. Both have the "
        "same inner Adam and batches, and the best of the rates "
        f"{', '.join(f'{rate:g}' for rate in PEER_RATES)}; ours have the one of the first table.",
        report.table(["", "rate", "times fewer bytes", "test loss, above exact", "right"], _peer_rows(found)),
        f"### What else was tried: the text in 1,000 steps, rate {TRIED_AT:g}, one seed",
        "Each worker keeps its own moments, unless they are frozen.",
        report.table(["", "test loss"], ([TRIED[name].text, f"{one['loss']:.3f}"] for name, one in trials.items())),
    ]
    return "\n\n".join(text) + "\n"

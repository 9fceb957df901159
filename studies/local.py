"""Study 9: local steps with 1-bit weight deltas; the data of study 6, simulated workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

from horovod_onebit.recipe import PRESETS
from horovod_onebit.schedule import Local
from studies import pool, report
from studies.rates import SEEDS, Cell, Result, kept, network, train

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


def local(every: int, doubling: int = 0, momentum: float = 0.0, *, whole: bool = False) -> Way:
    grows = f", doubled every {doubling} steps" if doubling else ""
    outer = f", momentum {momentum:g}" if momentum else ""
    text = f"rounds of {'1 to ' if doubling else ''}{every}{grows}{outer}"
    return Way(text + (" in float32" if whole else ""), schedule=Local(every, doubling, momentum), whole=whole)


EXACT, ONEBIT = Way("exact"), Way("one bit in every step", warmup="auto")
WAYS = [
    EXACT,
    ONEBIT,
    local(1),
    local(4),
    local(16),
    local(16, 100),
    local(16, 200),
    local(16, 300),
    local(16, 400),
    local(64, 200),
    local(16, whole=True),
    local(16, 200, whole=True),
    local(16, 200, 0.3),
]


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    way: Way
    task: str
    rate: float
    seed: int


def result(run: Run) -> Result:
    """The result of ``run``."""
    way = run.way
    cell = Cell(run.task, WORKERS, run.rate, way.warmup, run.seed)
    name = f"local/{run.task.replace(' ', '-')}-{way.text.replace(' ', '-').replace(',', '')}-{run.rate:g}-{run.seed}"
    exact = ["*"] if way.whole else None
    return kept(name, lambda: train(cell, ROBUST, schedule=way.schedule, exact=exact))

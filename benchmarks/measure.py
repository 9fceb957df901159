"""How the benchmarks compare: on a quiet machine, in turns, until the ratios are known.

1. A run is refused while other processes use more than a tenth of the cores; rounds in which they did are discarded.
2. In a round every way takes one turn, in an order that changes from round to round. Ratios are taken within a round.
3. Rounds are repeated until the 95 % confidence interval of the median of every ratio is within 10 % of that median, or
   the time is up, which the result then says.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import comb, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LIMIT = 0.1
"""The share of a machine's cores that other processes may use."""
CONFIDENCE = 0.95
TARGET = 0.1
"""How far an interval may reach from its median, relative to it."""


# -- statistics -------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """The median of ``count`` values, and two of them between which the true median is with ``confidence``."""

    median: float
    low: float
    high: float
    confidence: float
    count: int

    def settled(self, target: float = TARGET) -> bool:
        """Whether the interval is one of 95 % and within ``target`` of the median."""
        near = abs(self.high - self.median) <= target * abs(self.median) >= abs(self.median - self.low)
        return self.confidence >= CONFIDENCE and near


def interval(values: Sequence[float]) -> Interval:
    """The interval of the median by order statistics: the narrowest that holds it with 95 %, whatever the distribution.

    It takes six values. Of fewer, the interval is the smallest and the largest, and ``confidence`` is below 0.95.
    """
    ordered, n = sorted(values), len(values)
    if not n:
        return Interval(nan, nan, nan, 0.0, 0)
    inside = [k for k in range(2, n // 2 + 1) if _coverage(n, k) >= CONFIDENCE]
    k = max(inside, default=1)
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[n - k], _coverage(n, k), n)


def _coverage(n: int, k: int) -> float:
    """How probably the median is between the ``k``-th smallest and the ``k``-th largest of ``n`` values."""
    return 1 - 2 * sum(comb(n, i) for i in range(k)) / 2**n


# -- the machine's load -----------------------------------------------------------------------------------------------


class Loaded(RuntimeError):
    """Other processes use the cores that are to be measured."""


class Usage(NamedTuple):
    """What one process sees at the time ``clock``: the CPU seconds that its ``machine`` has spent, and its own."""

    machine: str
    cores: int
    busy: float
    own: float
    clock: float


def usage() -> Usage:
    """Now. ``own`` includes children that have ended."""
    lines = Path("/proc/stat").read_text().splitlines()
    user, nice, system, _, _, _, _, stolen = (int(word) for word in lines[0].split()[1:9])
    # Interrupts are left out: most of them are the packets of the benchmark itself, and belong to no process.
    busy = (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")
    cores = sum(line.startswith("cpu") for line in lines) - 1
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Usage(machine, cores, busy, sum(os.times()[:4]), time.perf_counter())


def others(before: Sequence[Usage], after: Sequence[Usage]) -> float:
    """The share of a machine's cores that was used by processes other than those that report; the largest of all
    machines. Of each process one ``Usage`` from before and one from after. Several may be on one machine."""
    shares = []
    for machine in {one.machine for one in before}:
        pairs = [(a, b) for a, b in zip(before, after, strict=True) if a.machine == machine]
        busy = max(b.busy for _, b in pairs) - min(a.busy for a, _ in pairs)
        own = sum(b.own - a.own for a, b in pairs)
        seconds = statistics.mean(b.clock - a.clock for a, b in pairs)
        shares.append(max(0.0, busy - own) / max(seconds * pairs[0][0].cores, 1e-9))
    return max(shares)


def look(seconds: float = 2.0) -> float:
    """The share of this machine's cores that other processes use, as seen for so many seconds. The caller has no
    children under way."""
    before = usage()
    time.sleep(seconds)
    return others([before], [usage()])


def refuse(share: float, *, anyway: bool) -> None:
    """Raise ``Loaded`` if other processes use more of the cores than ``LIMIT``, unless ``anyway``."""
    if share > LIMIT and not anyway:
        raise Loaded(
            f"other processes use {share:.0%} of the cores, expected at most {LIMIT:.0%}: wait until they have ended, "
            "or pass --anyway, which marks the results"
        )


# -- turns ------------------------------------------------------------------------------------------------------------


class Workers:
    """The processes of a job, by ``horovod.torch`` or ``horovod.tensorflow``."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd

    def barrier(self) -> None:
        self._hvd.allreduce(self._one(), name="measure.barrier")

    def _one(self) -> Any:
        if not hasattr(self, "_tensor"):
            if self._hvd.__name__ == "horovod.torch":
                import torch

                self._tensor: Any = torch.ones(1)
            else:
                import tensorflow as tf

                self._tensor = tf.ones(1)
        return self._tensor

    def gather(self, value: Any) -> list[Any]:
        """What each process has, by rank; the same on all."""
        found: list[Any] = self._hvd.allgather_object(value, name="measure.gather")
        return found

    def agree(self, value: Any) -> Any:
        """What rank 0 has."""
        return self._hvd.broadcast_object(value, root_rank=0, name="measure.agree")


@dataclass(frozen=True)
class Way:
    """One of what is compared.

    Attributes:
        run: one call, which is timed by the wall clock, unless it returns seconds that it has measured itself.
        steps: the training steps that one call takes; what is reported is for one of them.
        calls: how many calls make a turn, whose time is their median.
        most: rounds that it takes part in at most, for what takes minutes.
        rest: what is done when a turn is over, untimed.
    """

    run: Callable[[], float | None]
    steps: int = 1
    calls: int = 1
    most: int = 10**6
    rest: Callable[[], object] = lambda: None


class Turn(NamedTuple):
    """Seconds and received bytes of one step."""

    seconds: float
    received: float


Round = Mapping[str, Turn]


class Verdict(StrEnum):
    """What follows a round."""

    MORE = "another round"
    MET = "every interval is within the target"
    OUT = "time or rounds are used up"


def verdict(
    rounds: Sequence[Round],
    pairs: Sequence[tuple[str, str]],
    most: Mapping[str, int],
    *,
    elapsed: float,
    another: float,
    seconds: float,
    target: float = TARGET,
) -> Verdict:
    """Whether to continue after ``elapsed`` seconds with a round that will take ``another``, if ``seconds`` are given.

    ``pairs`` are the ways whose ratios are wanted; ``most`` is how often each may take part.
    """
    open_pairs = [pair for pair in pairs if not interval(ratios(rounds, *pair)).settled(target)]
    if not open_pairs:
        return Verdict.MET
    can_settle = any(all(len(taken(rounds, name)) < most[name] for name in pair) for pair in open_pairs)
    if elapsed + another > seconds or not can_settle:
        return Verdict.OUT
    return Verdict.MORE


def taken(rounds: Sequence[Round], way: str) -> list[Turn]:
    """The turns of ``way``."""
    return [one[way] for one in rounds if way in one]


def ratios(rounds: Sequence[Round], way: str, baseline: str) -> list[float]:
    """Seconds of ``way`` to those of ``baseline``, in each round that has both."""
    return [one[way].seconds / one[baseline].seconds for one in rounds if way in one and baseline in one]


def differences(rounds: Sequence[Round], way: str, baseline: str) -> list[float]:
    """Seconds of ``way`` beyond those of ``baseline``, in each round that has both."""
    return [one[way].seconds - one[baseline].seconds for one in rounds if way in one and baseline in one]


def order(ways: Sequence[str], number: int) -> list[str]:
    """The ways in the order of round ``number``; the same on all workers."""
    return random.Random(number).sample(list(ways), len(ways))


def compare(
    ways: Mapping[str, Way],
    pairs: Sequence[tuple[str, str]],
    workers: Workers,
    *,
    seconds: float,
    anyway: bool = False,
    target: float = TARGET,
    received: Callable[[], int] = lambda: 0,
) -> dict[str, Any]:
    """Rounds of turns; what was found, as plain values. Collective; all workers have the same result.

    Ends when the ratios of all ``pairs`` (way, baseline) are known, or when another round would take longer than what
    is left of ``seconds``. Times are those of the slowest worker. Raises ``Loaded`` on all workers if other processes
    disturbed all rounds and ``anyway`` is False.
    """
    rounds: list[Round] = []
    loads: list[float] = []
    durations: list[tuple[Round, float]] = []
    ends, discarded, number, decision = [time.perf_counter()], 0, 0, Verdict.MORE
    most = {name: way.most for name, way in ways.items()}
    while decision is Verdict.MORE:
        names = [name for name in order(list(ways), number) if len(taken(rounds, name)) < most[name]]
        number += 1
        found, load = _round({name: ways[name] for name in names}, workers, received)
        ends.append(time.perf_counter())
        if load > LIMIT and not anyway:
            discarded += 1
        else:
            rounds.append(found)
            loads.append(load)
        left = [name for name in ways if len(taken(rounds, name)) < most[name]]
        durations.append((found, ends[-1] - ends[-2]))
        another = max(_share(turns, ways, left) * took for turns, took in durations)
        spent = {"elapsed": ends[-1] - ends[0], "another": another}
        decision = workers.agree(verdict(rounds, pairs, most, **spent, seconds=seconds, target=target))
    if not rounds:
        refuse(load, anyway=anyway)
    return {
        "ways": {name: summary(rounds, name, pairs) for name in ways if taken(rounds, name)},
        "rounds": len(rounds),
        "discarded": discarded,
        "met": decision is Verdict.MET,
        "pairs": len(pairs),
        "settled": sum(interval(ratios(rounds, *pair)).settled(target) for pair in pairs),
        "seconds": ends[-1] - ends[0],
        "load": {"median": statistics.median(loads), "largest": max(loads)},
        "anyway": anyway,
    }


def _share(turns: Round, ways: Mapping[str, Way], left: Sequence[str]) -> float:
    """The share of the ways ``left`` in the time that ``turns`` took: without those that had all their rounds."""
    seconds = {name: turn.seconds * ways[name].steps * ways[name].calls for name, turn in turns.items()}
    return sum(seconds.get(name, 0.0) for name in left) / max(sum(seconds.values()), 1e-9)


def _round(ways: Mapping[str, Way], workers: Workers, received: Callable[[], int]) -> tuple[dict[str, Turn], float]:
    """One turn of each of ``ways``, and the largest share of cores that others used meanwhile."""
    before = usage()
    own = {name: _turn(way, workers, received) for name, way in ways.items()}
    everybody = workers.gather((before, usage(), own))
    load = others([a for a, _, _ in everybody], [b for _, b, _ in everybody])
    found = {}
    for name, way in ways.items():
        calls = zip(*(turns[name][0] for _, _, turns in everybody), strict=True)
        slowest = statistics.median(max(times) for times in calls)
        found[name] = Turn(slowest / way.steps, own[name][1] / way.steps)
    return found, load


def _turn(way: Way, workers: Workers, received: Callable[[], int]) -> tuple[list[float], float]:
    """Seconds of each call, and the bytes of one on the average."""
    seconds = []
    workers.barrier()
    before = received()
    for _ in range(way.calls):
        workers.barrier()
        start = time.perf_counter()
        own = way.run()
        spent = time.perf_counter() - start
        seconds.append(spent if own is None else own)
    workers.barrier()
    nbytes = (received() - before) / way.calls
    way.rest()
    return seconds, nbytes


def summary(rounds: Sequence[Round], way: str, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """What is known of ``way``: seconds and bytes of a step, and ratios and differences to its baselines."""
    turns = taken(rounds, way)
    low, middle, high = np.percentile([turn.seconds for turn in turns], [10, 50, 90])
    baselines = [baseline for name, baseline in pairs if name == way]
    return {
        "seconds": {"median": float(middle), "p10": float(low), "p90": float(high)},
        "received": statistics.median(turn.received for turn in turns),
        "rounds": len(turns),
        "ratios": {b: interval(ratios(rounds, way, b))._asdict() for b in baselines},
        "differences": {b: interval(differences(rounds, way, b))._asdict() for b in baselines},
    }


# -- what the programs share ------------------------------------------------------------------------------------------


def pairs_of(ways: Sequence[str], baselines: Sequence[str]) -> list[tuple[str, str]]:
    """Each of ``ways`` with each of those ``baselines`` that are among them."""
    return [(way, baseline) for way in ways for baseline in baselines if way != baseline and baseline in ways]


def describe(found: Mapping[str, Any]) -> str:
    """One sentence on how well something that ``compare`` returned is known."""
    known = "every interval of a ratio is within 10 %"
    if not found["met"]:
        known = f"**{found['settled'] or 'none'} of {found['pairs']} intervals are within 10 %**"
    load = f"other processes used {100 * found['load']['median']:.0f} % of the cores"
    load += f" (at most {100 * found['load']['largest']:.0f} %)"
    if found["load"]["largest"] > LIMIT:
        load = f"**measured on a loaded machine**: {load}"
    rounds = "1 round" if found["rounds"] == 1 else f"{found['rounds']} rounds"
    discarded = f", {found['discarded']} more discarded" if found["discarded"] else ""
    return f"{rounds}{discarded}; {known}; {load}."

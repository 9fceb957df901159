"""Study 21: the model of study 19 on slow links, by the clock; two hosts of jobs/cluster.py. Linux and root.

python -m studies.clock [--links 10mbit] [--ways float32 onebit] [--seed 1]     makes the runs, and keeps them
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from jobs.cluster import cluster, unavailable
from jobs.processes import packages, result
from jobs.report import readable
from studies import large, report
from studies.problem import MissingError
from studies.rates import kept

MINUTES = {"10mbit": 7.0, "100mbit": 4.0, "1gbit": 4.0}
"""How long each way trains, by link."""
LOOKS = 21
"""Test losses of a run, if it has so many rounds."""
ROWS, RATE, RISE = 8, 1e-3, 10
"""Rows of each worker's batch; the rate rises, and then stays."""
WAYS = {
    "float32": "Horovod, float32",
    "float16": "Horovod, float16",
    "powersgd 1": "PowerSGD, rank 1",
    "powersgd 4": "PowerSGD, rank 4",
    "diloco 16": "DiLoCo, rounds of 16",
    "diloco 64": "DiLoCo, rounds of 64",
    "onebit": "one bit",
    "onebit two": "one bit, two bits in the warm-up",
    "onebit 20": "one bit, `warmup_steps=20`",
    "local": "`Local()`: rounds of 8",
}
OURS = ("onebit", "onebit two", "onebit 20", "local")
LEFT_OUT = {
    ("10mbit", 0): ("powersgd 1", "diloco 64", "onebit two"),
    ("10mbit", 1): (),
    ("100mbit", 0): (),
    ("100mbit", 1): tuple(way for way in WAYS if way not in ("powersgd 4", "local")),
    ("1gbit", 0): ("powersgd 1", "diloco 16", "onebit two", "onebit 20"),
}
"""By link and seed, the tables, and which of ``WAYS`` they have not."""
Found = dict[str, dict[str, Any]]
CONCLUSION = (
    "At 10 Mbit/s, with seed 0, `Local()` is the first at every loss that any way reaches, 1.1 to 2.0 times as fast "
    "as the next one. With seed 1, on another machine and with all ways, it is the first at every loss of the table "
    "but 6.83, 1.2 to 2.6 times as fast as the next one. At 6.83 DiLoCo with rounds of 16 is there 4 seconds before "
    "it (71 and 75), at 6.63 DiLoCo with rounds of 64 3 seconds (123 and 126). The picture shows these runs. Of the "
    "ways that exchange in every step, one bit is ahead of float32, whose best loss it reaches in 236 seconds in "
    "place of 463 (seed 1), and of float16 once its ten exact steps are over, which take 23 seconds each, more than "
    "half of the time in all. Two bits in the warm-up take 62 steps in place of 52, and end at 6.63 in place of 6.69. "
    "In a run as short as this, PowerSGD and DiLoCo are ahead of one bit. A step in three bits takes 4.6 seconds with "
    "seed 0 and 4.9 with seed 1, one in one bit 1.9 and 2.9 (`warmup_steps=20`), one of PowerSGD of rank 4 2.0 and "
    "2.3.\n\n"
    "At 100 Mbit/s, where most of a step is computation, `Local()` and one bit are not the first. PowerSGD of rank 4 "
    "is, down to a loss of 5.74; in the end DiLoCo with rounds of 64 is, whose last look comes 56 seconds late: at "
    "the end of the 4 minutes it and `Local()` are level. One bit reaches the last loss of float16 in 133 seconds in "
    "place of 250, and that of float32 in 88 in place of 244, and takes 1.2 to 1.4 times as long to a loss as "
    "PowerSGD. `Local()` receives the fewest bytes, 2 to 11 times fewer than the others that are compressed. It "
    "reaches each loss before one bit does (68, 104 and 152 seconds in place of 88, 133 and 167), and down to 5.74 "
    "after PowerSGD of rank 4. Two bits in the warm-up save a fifth of the bytes, and no time to a loss. (`Local()` "
    "was run there a second time, when nothing ran beside it.) With seed 1, on another machine, these two alone were "
    "run: `Local()` is before PowerSGD of rank 4 at a loss of 6.69 and 6.23 (59 and 73 seconds, 173 and 185), after "
    "it at 6.48 (119 and 107), and ends at 5.69 in place of 5.88.\n\n"
    "At 1 Gbit/s, on an AMD EPYC whose cores take most of a step for computing, all ways are within a fifth of each "
    "other: `Local()` is the first at each loss of the table, one bit is 2 to 9 % after it, PowerSGD of rank 4 14 %, "
    "float16 and float32 17 to 19 %, DiLoCo with rounds of 64 9 to 20 %. (DiLoCo is looked at three times in these 4 "
    "minutes, and its last look is 12 seconds late.)"
)


def ways_at(link: str, seed: int) -> list[str]:
    """Those of ``WAYS`` that are run."""
    return [way for way in WAYS if way not in LEFT_OUT.get((link, seed), ())]


def measured(link: str, way: str, seed: int) -> dict[str, Any]:
    """The curve of a way on a link, by horovodrun on two hosts with a core each."""
    return kept(f"clock/{link}-{way.replace(' ', '-')}-{seed}", lambda: _run(link, way, seed))


def _run(link: str, way: str, seed: int) -> dict[str, Any]:
    if reason := unavailable():
        raise MissingError(reason)
    large.text()
    with cluster(2, link) as hosts:
        command = ["python", "-m", "studies.clock_worker", "--hosts", ",".join(hosts.addresses)]
        command += ["--minutes", str(MINUTES[link]), "--seed", str(seed), way.replace(" ", "_")]
        timeout = 60 * MINUTES[link] + 1800
        found: dict[str, Any] = result(
            hosts.horovodrun("mpi", *command, timeout=timeout, variables={"PYTHONPATH": packages()})
        )
    return found | {"machine": report.system()}


def reached(found: dict[str, Any], loss: float) -> float:
    """Seconds until a test loss of at most ``loss`` was seen first; infinite if it was not."""
    return min((s for s, seen in zip(found["seconds"], found["losses"], strict=True) if seen <= loss), default=math.inf)


def losses(found: Found) -> list[float]:
    """The least of each way that is not ours, and the least of all, rounded up; from the first to the last."""
    least = {way: math.ceil(100 * min(one["losses"])) / 100 for way, one in found.items()}
    return sorted({*(least[way] for way in found if way not in OURS), min(least.values())}, reverse=True)


def _cell(seconds: float, first: float) -> str:
    if math.isinf(seconds):
        return ""
    return f"**{seconds:.0f}**" if seconds == first else f"{seconds:.0f}"


def rows(found: Found) -> Iterator[list[str]]:
    """Of the table, by way; who reaches a loss first is in bold type."""
    wanted = losses(found)
    first = [min(reached(one, loss) for one in found.values()) for loss in wanted]
    for way, one in found.items():
        seconds, steps, megabytes = one["seconds"][-1], one["steps"][-1], one["received"][-1] / 1e6
        to = [_cell(reached(one, loss), least) for loss, least in zip(wanted, first, strict=True)]
        text = [f"{seconds / steps:.2f}", str(steps), f"{megabytes:.0f}", f"{one['losses'][-1]:.2f}"]
        yield [WAYS[way], *text, *to]


def _curves(found: Found) -> str:
    figure, axes = report.axes(figsize=(8, 4))
    for way, one in found.items():
        axes.plot(np.array(one["seconds"]) / 60, one["losses"], label=WAYS[way].replace("`", ""))
    axes.set(title="10 Mbit/s", xlabel="minutes of training", ylabel="test loss, nats a token")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return report.save(figure, "clock")


def _table(link: str, seed: int, found: Found) -> str:
    what = f"{readable(link)}, {MINUTES[link]:g} minutes, seed {seed}"
    head = [what, "s a step", "steps", "MB received", "test loss"]
    return report.table([*head, *(f"s to {loss:g}" for loss in losses(found))], rows(found))


def run() -> str:
    """The section of the page."""
    tables = {(link, seed): {way: measured(link, way, seed) for way in ways_at(link, seed)} for link, seed in LEFT_OUT}
    parameters = tables["10mbit", 0]["local"]["parameters"]
    machines = {key: f"{readable(key[0])}, seed {key[1]}: {found['local']['machine']}"
                for key, found in tables.items()}  # fmt: skip
    text = [
        "## 21. The larger model on a slow link, by the clock",
        f"The GPT and the texts of study 19 ({parameters / 1e6:.1f} M parameters), on two hosts with a core each, "
        f"joined by a link of the given rate (network namespaces). These runs are short: the 5,120 steps of study 19, "
        "by which long ones are to be judged, would take one of these cores more than an hour. All ways train for the "
        f"same time, at a constant rate of {RATE:g}, which was not searched for, after {RISE} steps, with batches of "
        f"{ROWS} rows of "
        f"{large.LENGTH} tokens on each worker. DiLoCo has the outer rate of 1 without momentum that study 18 found "
        "best; PowerSGD begins after the two exact steps that PyTorch requires; one bit sends its exact steps in "
        "float16, where PowerSGD and DiLoCo send float32. The test loss is computed some "
        f"{LOOKS} times in a run, for ways with rounds at the end of a round, of which the last one may end after the "
        "time is over. A loss counts as reached at the first of these looks that shows it. Each way is one run, a job "
        f"of its own. ({'; '.join(machines.values())}.)",
        *(_table(link, seed, found) for (link, seed), found in tables.items()),
        CONCLUSION,
        _curves(tables["10mbit", 1]),
    ]
    return "\n\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="*", default=tuple(MINUTES), choices=MINUTES)
    parser.add_argument("--ways", nargs="*", choices=WAYS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for link in options.links:
        for way in options.ways or ways_at(link, options.seed):
            measured(link, way, options.seed)


if __name__ == "__main__":
    main()

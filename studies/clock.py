"""Study 21: the model of study 19 on slow links, by the clock; two hosts of jobs/cluster.py. Linux and root.

python -m studies.clock [--settings 10mbit] [--ways float32 onebit] [--seed 1]     makes the runs, and keeps them
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jobs.cluster import cluster, unavailable
from jobs.processes import packages, result
from jobs.report import readable
from studies import large, report
from studies.problem import MissingError
from studies.rates import kept


class Setting(NamedTuple):
    """Of a table: how long each way trains on which link, the rows of each worker's batch, and the model's size."""

    link: str
    minutes: float
    rows: int = 8
    width: int = large.WIDTH
    heads: int = large.HEADS


SETTINGS = {
    "10mbit": Setting("10mbit", 7),
    "10mbit long": Setting("10mbit", 42, rows=4, width=256, heads=4),
    "100mbit": Setting("100mbit", 4),
    "1gbit": Setting("1gbit", 4),
}
LOOKS = 21
"""Test losses of a run, if it has so many rounds."""
RATE, RISE = 1e-3, 10
"""The rate rises for so many steps, and then stays."""
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
    ("10mbit long", 0): tuple(way for way in WAYS if way not in ("powersgd 4", "diloco 64", "local")),
    ("100mbit", 0): (),
    ("100mbit", 1): tuple(way for way in WAYS if way not in ("powersgd 4", "local")),
    ("1gbit", 0): ("powersgd 1", "diloco 16", "onebit two", "onebit 20"),
}
"""By setting and seed, the tables, and which of ``WAYS`` they have not."""
PICTURED = ("10mbit", 1), ("10mbit long", 0)
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
    "In the 42 minutes at 10 Mbit/s, `Local()` takes 5,952 steps and ends at a test loss of 3.72. DiLoCo with rounds "
    "of 64, the nearest to it in the shorter runs, takes 3,136 and ends at 4.28, which `Local()` reaches in 1,318 "
    "seconds in place of 2,588, half the time. PowerSGD of rank 4 takes 2,911 steps and ends at 4.36, where `Local()` "
    "is after 1,318 seconds, too. At the first looks others are before it (PowerSGD at 6.97, 69 seconds and 112; "
    "DiLoCo at 6.77, 51 and 112, and at 5.91, 257 and 291); from 5.59 on `Local()` is first at each look of the "
    "three, 1.2 to 2.2 times as fast as the others. Second moments travel once, after 400 steps: between 208 and 432 "
    "steps a step takes 0.80 seconds, and 0.42 from then on. `Local()` receives 140 KB in a step, DiLoCo 395, "
    "PowerSGD 630. The other ways were not run so long.\n\n"
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


def ways_of(name: str, seed: int) -> list[str]:
    """Those of ``WAYS`` that are run in the setting of this name."""
    return [way for way in WAYS if way not in LEFT_OUT.get((name, seed), ())]


def measured(name: str, way: str, seed: int) -> dict[str, Any]:
    """The curve of a way in a setting, by horovodrun on two hosts with a core each."""
    return kept(f"clock/{name}-{way}-{seed}".replace(" ", "-"), lambda: _run(name, way, seed))


def _run(name: str, way: str, seed: int) -> dict[str, Any]:
    if reason := unavailable():
        raise MissingError(reason)
    large.text()
    setting = SETTINGS[name]
    with cluster(2, setting.link) as hosts:
        command = ["python", "-m", "studies.clock_worker", "--hosts", ",".join(hosts.addresses), "--seed", str(seed)]
        command += [one.replace(" ", "_") for one in (name, way)]
        timeout = 60 * setting.minutes + 1800
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


def _curves(tables: dict[str, Found]) -> str:
    """Of each table, by its title, the curves of its ways."""
    figure, panels = report.axes(ncols=len(tables), figsize=(11, 4))
    lines = {}
    for axes, (title, found) in zip(panels, tables.items(), strict=True):
        for number, (way, text) in enumerate(WAYS.items()):
            if way in found:
                minutes, label = np.array(found[way]["seconds"]) / 60, text.replace("`", "")
                (lines[label],) = axes.plot(minutes, found[way]["losses"], f"C{number}")
        axes.set(title=title, xlabel="minutes of training", ylabel="test loss, nats a token")
    panels[-1].legend(lines.values(), lines, loc="center left", bbox_to_anchor=(1, 0.5))
    return report.save(figure, "clock")


def _about(name: str, seed: int) -> str:
    setting = SETTINGS[name]
    return f"{readable(setting.link)}, {setting.minutes:g} minutes, seed {seed}"


def _table(name: str, seed: int, found: Found) -> str:
    head = [_about(name, seed), "s a step", "steps", "MB received", "test loss"]
    return report.table([*head, *(f"s to {loss:g}" for loss in losses(found))], rows(found))


def run() -> str:
    """The section of the page."""
    tables = {(name, seed): {way: measured(name, way, seed) for way in ways_of(name, seed)} for name, seed in LEFT_OUT}
    long, few = SETTINGS["10mbit long"], tables["10mbit long", 0]["local"]["parameters"]
    parameters = tables["10mbit", 0]["local"]["parameters"]
    machines = {key: f"{_about(*key)}: {found['local']['machine']}" for key, found in tables.items()}
    text = [
        "## 21. The larger model on a slow link, by the clock",
        f"The GPT and the texts of study 19 ({parameters / 1e6:.1f} M parameters), on two hosts with a core each, "
        f"joined by a link of the given rate (network namespaces). All ways of a table train for the same time, at a "
        f"constant rate of {RATE:g}, which was not searched for, after {RISE} steps, with batches of "
        f"{SETTINGS['10mbit'].rows} rows of {large.LENGTH} tokens on each worker; in the table of {long.minutes:g} "
        f"minutes with {long.rows} rows and a width of {long.width} ({few / 1e6:.1f} M parameters), so that `Local()` "
        "takes more than the 5,120 steps of study 19. DiLoCo has the outer rate of 1 without momentum that study 18 "
        "found best; PowerSGD begins after the two exact steps that PyTorch requires; one bit sends its exact steps in "
        "float16, where PowerSGD and DiLoCo send float32. The test loss is computed some "
        f"{LOOKS} times in a run, for ways with rounds at the end of a round, of which the last one may end after the "
        "time is over. A loss counts as reached at the first of these looks that shows it. Each way is one run, a job "
        f"of its own. ({'; '.join(machines.values())}.)",
        *(_table(link, seed, found) for (link, seed), found in tables.items()),
        CONCLUSION,
        _curves({_about(*key): tables[key] for key in PICTURED}),
    ]
    return "\n\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", default=tuple(SETTINGS), choices=SETTINGS)
    parser.add_argument("--ways", nargs="*", choices=WAYS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.settings:
        for way in options.ways or ways_of(name, options.seed):
            measured(name, way, options.seed)


if __name__ == "__main__":
    main()

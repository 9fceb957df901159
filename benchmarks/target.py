"""Seconds until a small GPT on real text reaches a given test loss, over links of several rates. Linux and root.

    python -m benchmarks.target [--links 10mbit 100mbit] [--ways "horovod fp32" onebit] [--target 2.6] [--anyway]

Two hosts (network namespaces of this machine) with a core each. All ways of one link train in one job, by turns, with
the same data and learning rate. The clock stands still during evaluations. Results are added to those of other links
and other losses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure
from jobs.cluster import cluster, unavailable
from jobs.processes import result
from studies import report

RESULTS = Path(__file__).parent / "results" / "target.json"
LINKS = ("10mbit", "50mbit", "100mbit", "1gbit", "10gbit")
BASELINE = "horovod fp32"
WAYS = (
    BASELINE, "horovod fp16", "ddp powersgd 1", "ddp powersgd 4", "diloco 16", "diloco 16 mean",
    "onebit default", "onebit", "onebit three bits", "onebit local 8", "onebit local 16",
)  # fmt: skip
TASK = {"--task": "charlm", "--width": "64", "--lr": "4e-3"}
STEPS = 800
TARGET = 2.6
"""The test loss, in nats a character."""


def run(rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """What two hosts found on a link of ``rate``. Raises ``measure.Loaded`` if other processes disturb them."""
    measure.refuse(measure.look(), anyway=options.anyway)
    ways = ",".join(way.replace(" ", "_") for way in options.ways)
    own = {"--steps": str(options.steps), "--target": str(options.target)}
    arguments = [word for pair in (TASK | own).items() for word in pair]
    arguments += ["--ways", ways, "--seeds", str(options.seeds), *(["--anyway"] if options.anyway else [])]
    with cluster(2, rate) as hosts:
        command = ["python", "benchmarks/target_worker.py", "--hosts", ",".join(hosts.addresses)]
        found = result(hosts.horovodrun("mpi", *command, *arguments, timeout=3600))
    if "refused" in found["ways"]:
        raise measure.Loaded(found["ways"]["refused"])
    return {"rate": rate, "cores": os.cpu_count(), "target": options.target, **found}


def row(runs: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the runs of one way, by seed: median, smallest and largest; the ratio to ``baseline`` is taken within a seed.

    Where a run did not get there, ``reached`` counts fewer than there are seeds, and the seconds are those it took.
    """
    seconds = [run["seconds"] for run in runs]
    both = list(zip(runs, baseline, strict=True))
    return {
        "seconds": [statistics.median(seconds), min(seconds), max(seconds)],
        "steps": statistics.median(run["steps"] for run in runs),
        "received": statistics.median(run["received"] for run in runs),
        "reached": sum(run["reached"] for run in runs),
        "seeds": len(runs),
        "ratio": measure.interval([a["seconds"] / b["seconds"] for a, b in both])._asdict() if both else None,
    }


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By way."""
    ways = found["ways"]
    return {way: row(runs, ways.get(BASELINE, [])[: len(runs)] or runs) for way, runs in ways.items()}


def load(found: dict[str, Any]) -> float:
    """The largest share of the cores that others used in any run."""
    return max(run["load"] for runs in found["ways"].values() for run in runs)


def show(console: Console, found: dict[str, Any]) -> None:
    title = f"seconds to a test loss of {found['target']}, {found['rate']}"
    table = Table("", "s", "smallest to largest", f"to {BASELINE}", "steps", "MB received", "reached", title=title)
    for way, one in rows(found).items():
        middle, low, high = one["seconds"]
        ratio = f"{one['ratio']['median']:.3f}"
        table.add_row(
            way, f"{middle:.1f}", f"{low:.1f} to {high:.1f}", ratio, f"{one['steps']:.0f}",
            f"{1e-6 * one['received']:.2f}", f"{one['reached']} of {one['seeds']}",
        )  # fmt: skip
    table.caption = f"other processes used at most {load(found):.0%} of the cores"
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="*", default=LINKS, help="as tc writes it")
    parser.add_argument("--ways", nargs="*", default=WAYS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=TARGET, help="the test loss, in nats a character")
    parser.add_argument("--steps", type=int, default=STEPS, help="at most")
    parser.add_argument("--anyway", action="store_true", help="measure on a loaded machine, too, and mark the results")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    console = Console()
    if reason := unavailable():
        console.print(f"Not run: {reason}")
        return
    results = json.loads(options.json.read_text())["results"] if options.json.exists() else {}
    machine = report.system()
    for rate in options.links:
        try:
            with console.status(f"Two hosts, {rate} ..."):
                found = results[f"{rate} {options.target}"] = run(rate, options)
        except measure.Loaded as error:
            parser.exit(1, f"{rate} not run: {error}\n")
        show(console, found)
        options.json.parent.mkdir(exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "task": TASK, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

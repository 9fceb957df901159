"""Training and exchange on shaped links, against what one would use instead. Linux and root.

    python -m benchmarks.link [--slow] [--only 2-1gbit-25M ...] [--json benchmarks/results/link.json]

Hosts are network namespaces of this machine, a core for each as far as there are cores, joined by links that `tc`
shapes. Everything that is compared runs in one job, on the same links, in turns; the figures to look at are ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.cluster import cluster, unavailable
from jobs.processes import result
from studies.report import processor

# Open MPI adds up the gradients of three hosts on one of them. With other numbers it takes a ring, as NCCL and Gloo do.
RING = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
RESULTS = Path(__file__).parent / "results" / "link.json"
ALL = (
    "no communication", "horovod fp32", "horovod fp16", "ddp fp32", "ddp fp16", "ddp powersgd 1", "ddp powersgd 4",
    "onebit", "onebit no overlap",
)  # fmt: skip
FEW = ("no communication", "horovod fp32", "horovod fp16", "ddp powersgd 1", "onebit", "onebit no overlap")
SLOW = (
    "no communication", "ddp powersgd 1", "onebit", "onebit local 8", "onebit local 16", "onebit local 64",
)  # fmt: skip
SLOWEST = ("no communication", "onebit local 16", "onebit local 64")  # others begin with exact steps of minutes
MANY = ("no communication", "horovod fp32", "ddp powersgd 1", "onebit direct", "onebit two-stage")


@dataclass(frozen=True)
class Setting:
    """One job: hosts with one process each, their links, the model, and what is compared."""

    hosts: int
    rate: str
    model: str
    ways: tuple[str, ...]
    rounds: int = 2
    steps: int = 4
    exchanges: int = 5

    @property
    def name(self) -> str:
        return f"{self.hosts}-{self.rate}-{self.model}"


SETTINGS = (
    Setting(2, "1gbit", "25M", ALL, rounds=3, exchanges=9),
    Setting(2, "1gbit", "1M", ALL, steps=10),
    Setting(2, "1gbit", "110M", FEW, rounds=1, steps=3, exchanges=2),
    Setting(2, "100mbit", "1M", FEW),
    Setting(2, "100mbit", "25M", FEW, rounds=1, steps=2, exchanges=1),
    Setting(2, "10gbit", "25M", FEW),
    Setting(3, "1gbit", "25M", MANY, rounds=1, steps=3, exchanges=2),
    Setting(4, "1gbit", "25M", MANY, rounds=1, steps=3, exchanges=2),
)

SLOW_SETTINGS = (
    Setting(2, "50mbit", "25M", SLOW, rounds=1, steps=2, exchanges=0),
    Setting(2, "10mbit", "25M", SLOWEST, rounds=1, steps=2, exchanges=0),
)
"""With local steps, which have results of their own."""


def run(setting: Setting) -> dict[str, Any]:
    ways = ",".join(way.replace(" ", "_") for way in setting.ways)
    with cluster(setting.hosts, setting.rate) as hosts:
        output = hosts.horovodrun(
            "mpi", "python", "benchmarks/link_worker.py", "--master", hosts.addresses[0], "--model", setting.model,
            "--ways", ways, "--rounds", str(setting.rounds), "--steps", str(setting.steps),
            "--exchange-rounds", str(setting.exchanges), timeout=1800, variables=RING if setting.hosts == 3 else {},
        )  # fmt: skip
    return {"hosts": setting.hosts, "rate": setting.rate, "cores": os.cpu_count(), **result(output)}


def show(console: Console, found: dict[str, Any]) -> None:
    for part, baseline in (("exchange", "float32"), ("training", "horovod fp32")):
        rows = found.get(part, {})
        baseline = baseline if baseline in rows else "ddp powersgd 1"
        title = f"{part}: {found['parameters']:,} parameters, {found['hosts']} hosts, {found['rate']}"
        table = Table("", "ms", "10 % to 90 %", "times faster", "MB received", title=title)
        for way, row in rows.items():
            s = row["seconds"]
            faster = rows[baseline]["seconds"]["median"] / s["median"] if baseline in rows else float("nan")
            spread = f"{1e3 * s['p10']:,.0f} to {1e3 * s['p90']:,.0f}"
            table.add_row(way, f"{1e3 * s['median']:,.1f}", spread, f"{faster:.1f}", f"{1e-6 * row['received']:,.2f}")
        if rows:
            console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", action="store_true", help="the links that local steps are for")
    parser.add_argument("--only", nargs="*", help=f"any of {', '.join(s.name for s in SETTINGS + SLOW_SETTINGS)}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.json = options.json or RESULTS.with_name("slow.json" if options.slow else "link.json")
    console = Console()
    if reason := unavailable():
        console.print(f"Not run: {reason}")
        return
    old = json.loads(options.json.read_text())["results"] if options.json.exists() and options.only else {}
    machine = f"{os.cpu_count()} cores of an {processor()}, Linux {platform.release().split('-')[0]}"
    for setting in SLOW_SETTINGS if options.slow else SETTINGS:
        if options.only and setting.name not in options.only:
            continue
        with console.status(f"{setting.hosts} hosts, {setting.rate}, {setting.model} parameters ..."):
            old[setting.name] = run(setting)
        show(console, old[setting.name])
        options.json.parent.mkdir(exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "results": old}, indent=1) + "\n")


if __name__ == "__main__":
    main()

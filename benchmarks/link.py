"""Training and exchange on shaped links, against what one would use instead. Linux and root.

    python -m benchmarks.link [--local | --framework tf] [--only 2-1gbit-25M ...] [--anyway]

Hosts are network namespaces of this machine, a core for each as far as there are cores, joined by links that `tc`
shapes. Everything that is compared runs in one job, on the same links, in turns (`benchmarks/measure.py`); the figures
to look at are ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure
from benchmarks.link_job import BASELINES, MODELS
from jobs.cluster import cluster, unavailable
from jobs.processes import result
from studies import report

# Open MPI adds up the gradients of three hosts on one of them. With other numbers it takes a ring, as NCCL and Gloo do.
RING = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
RESULTS = Path(__file__).parent / "results"
WORKERS = {"torch": "benchmarks/link_worker.py", "tf": "benchmarks/link_keras_worker.py"}
KEPT = 20
"""Bytes that a way keeps for each parameter between its turns: weights, moments, buckets, error feedback."""

# NAME:N takes part in N rounds at most: there a turn takes a minute or so.
ALL = (
    "no communication", "horovod fp32", "horovod fp16", "ddp fp32", "ddp fp16", "ddp bf16", "ddp powersgd 1",
    "ddp powersgd 4", "onebit", "onebit no overlap", "onebit torch.distributed", "exact torch.distributed",
    "gradients in three bits",
)  # fmt: skip
BOTH = (
    "no communication", "horovod fp32", "horovod fp16", "ddp fp32", "ddp fp16", "ddp bf16", "ddp powersgd 1", "onebit",
    "onebit torch.distributed", "gradients in three bits",
)  # fmt: skip
FEW = (
    "no communication", "horovod fp32", "horovod fp16", "ddp powersgd 1", "onebit", "onebit torch.distributed",
    "gradients in three bits",
)  # fmt: skip
SLOW = (
    "no communication", "horovod fp32:1", "horovod fp16:1", "ddp powersgd 1", "onebit", "onebit local 8",
    "onebit local 16", "onebit local 16 hidden", "onebit local 64:3", "diloco 16:1", "diloco 64:1",
)  # fmt: skip
SLOWEST = (  # others begin with exact steps of minutes
    "no communication", "onebit local 8", "onebit local 16", "onebit local 16 hidden", "onebit local 64:3",
    "diloco 16:1", "diloco 64:1",
)  # fmt: skip
ROUNDS = (
    "no communication", "horovod fp32", "horovod fp16", "ddp powersgd 1", "onebit", "onebit local 8",
    "onebit local 16", "onebit local 16 hidden", "onebit local 64", "diloco 16", "diloco 64",
)  # fmt: skip
MANY = ("no communication", "horovod fp32", "ddp powersgd 1", "onebit direct", "onebit two-stage")
KERAS = (
    "no communication", "no communication fit", "horovod fp32", "horovod fp16", "mirrored fp32", "onebit", "onebit fit",
    "gradients in three bits",
)  # fmt: skip
KERAS_SLOW = (*(way for way in KERAS if way != "mirrored fp32"), "mirrored fp32:2")


@dataclass(frozen=True)
class Setting:
    """One job: hosts with one process each, their links, the model, and what is compared for how long.

    ``steps`` make a turn. ``seconds`` are for the training and ``exchange`` for the exchange alone, the start and the
    first steps of each way not counted. ``yields``: a process of Open MPI that waits leaves its core to who computes.
    """

    hosts: int
    rate: str
    model: str
    ways: tuple[str, ...]
    steps: int = 1
    seconds: float = 90
    exchange: float = 20
    framework: str = "torch"
    yields: bool = False

    @property
    def name(self) -> str:
        return f"{self.hosts}-{self.rate}-{self.model}"

    @property
    def memory(self) -> int:
        """Bytes that the job needs, about."""
        layers, width, _ = MODELS[self.model]
        return self.hosts * layers * width**2 * KEPT * len(self.ways)


SETTINGS = (
    Setting(2, "1gbit", "25M", ALL, seconds=180, exchange=40),
    Setting(2, "1gbit", "1M", ALL, steps=10, seconds=60),
    Setting(2, "1gbit", "110M", FEW, seconds=120, exchange=60),
    Setting(2, "100mbit", "1M", BOTH, steps=2, seconds=60),
    Setting(2, "100mbit", "25M", BOTH, seconds=300, exchange=60),
    Setting(2, "10gbit", "25M", BOTH, steps=2, seconds=90),
    Setting(3, "1gbit", "25M", MANY, seconds=60, yields=True),
    Setting(4, "1gbit", "25M", MANY, seconds=60, yields=True),
)

LOCAL_SETTINGS = (
    Setting(2, "10mbit", "1M", SLOW, steps=4, seconds=90, exchange=0),
    Setting(2, "50mbit", "1M", SLOW, steps=4, seconds=60, exchange=0),
    *(Setting(2, rate, "1M", ROUNDS, steps=8, seconds=60, exchange=0) for rate in ("100mbit", "1gbit", "10gbit")),
    Setting(2, "10mbit", "25M", SLOWEST, steps=4, seconds=800, exchange=0),
    Setting(2, "50mbit", "25M", SLOW, steps=4, seconds=420, exchange=0),
    *(Setting(2, rate, "25M", ROUNDS, seconds=300, exchange=0) for rate in ("100mbit", "1gbit", "10gbit")),
)
"""With local steps, which have results of their own."""

KERAS_SETTINGS = (
    Setting(2, "1gbit", "25M", KERAS, seconds=90, exchange=0, framework="tf"),
    Setting(2, "1gbit", "1M", KERAS, steps=5, seconds=45, exchange=0, framework="tf"),
    Setting(2, "100mbit", "25M", KERAS_SLOW, seconds=180, exchange=0, framework="tf"),
    Setting(2, "100mbit", "1M", KERAS, steps=2, seconds=45, exchange=0, framework="tf"),
)


def run(setting: Setting, *, anyway: bool) -> dict[str, Any]:
    """What a job on a cluster of its own found. Raises ``measure.Loaded`` if other processes disturb it."""
    measure.refuse(measure.look(), anyway=anyway)
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if setting.memory > free:
        need = f"needs about {1e-9 * setting.memory:.0f} GB of memory, and {1e-9 * free:.0f} GB are free"
        raise MemoryError(f"{setting.name} {need}: compare fewer ways, with --ways")
    ways = ",".join(way.replace(" ", "_") for way in setting.ways)
    variables = dict(RING) if setting.hosts == 3 else {}
    if setting.yields:
        variables["OMPI_MCA_mpi_yield_when_idle"] = "1"
    with cluster(setting.hosts, setting.rate) as hosts:
        output = hosts.horovodrun(
            "mpi", "python", WORKERS[setting.framework], "--hosts", ",".join(hosts.addresses), "--model", setting.model,
            "--ways", ways, "--steps", str(setting.steps), "--seconds", str(setting.seconds),
            "--exchange-seconds", str(setting.exchange), *(["--anyway"] if anyway else []),
            timeout=3600, variables=variables,
        )  # fmt: skip
    found = result(output)
    if "refused" in found:
        raise measure.Loaded(found["refused"])
    return {"hosts": setting.hosts, "rate": setting.rate, "cores": os.cpu_count(), "yields": setting.yields, **found}


def show(console: Console, found: dict[str, Any]) -> None:
    for part in ("exchange", "training"):
        rows = found.get(part, {})
        baselines = [name for name in ("float32", *BASELINES) if name in rows]
        title = f"{part}: {found['parameters']:,} parameters, {found['hosts']} hosts, {found['rate']}"
        heading = ["", "ms", "10 % to 90 %", *(f"to {name}" for name in baselines), "MB received"]
        table = Table(*heading, title=title, caption=rows and measure.describe(found["measured"][part]))
        for way, row in rows.items():
            s = row["seconds"]
            spread = f"{1e3 * s['p10']:,.0f} to {1e3 * s['p90']:,.0f}"
            shown = [ratio(row["ratios"].get(name)) for name in baselines]
            table.add_row(way, f"{1e3 * s['median']:,.1f}", spread, *shown, f"{1e-6 * row['received']:,.2f}")
        if rows:
            console.print(table)


def ratio(found: dict[str, Any] | None) -> str:
    """Of seconds: median and interval."""
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]" if found else ""


def choose(options: argparse.Namespace) -> Sequence[Setting]:
    """The settings that are wanted, in which way they are wanted."""
    named = {"torch": LOCAL_SETTINGS if options.local else SETTINGS, "tf": KERAS_SETTINGS}[options.framework]
    changed = {
        "ways": tuple(options.ways.split(",")) if options.ways else None,
        "seconds": options.seconds,
        "exchange": options.exchange_seconds,
    }
    changed = {name: value for name, value in changed.items() if value is not None}
    return [replace(s, **changed) for s in named if not options.only or s.name in options.only]  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true", help="local steps, on slow links and fast ones")
    parser.add_argument("--framework", choices=tuple(WORKERS), default="torch")
    parser.add_argument("--only", nargs="*", help=f"any of {', '.join(s.name for s in SETTINGS + LOCAL_SETTINGS)}")
    parser.add_argument("--ways", help="what to compare in place of what each setting does, comma-separated")
    parser.add_argument("--seconds", type=float, help="for the training of each setting")
    parser.add_argument("--exchange-seconds", type=float, help="for the exchange alone of each setting")
    parser.add_argument("--anyway", action="store_true", help="measure on a loaded machine, too, and mark the results")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    name = "keras.json" if options.framework == "tf" else "local_steps.json" if options.local else "link.json"
    options.json = options.json or RESULTS / name
    console = Console(width=None if sys.stdout.isatty() else 150)
    if reason := unavailable():
        console.print(f"Not run: {reason}")
        return
    old = json.loads(options.json.read_text())["results"] if options.json.exists() and options.only else {}
    machine = report.system()
    for setting in choose(options):
        try:
            with console.status(f"{setting.hosts} hosts, {setting.rate}, {setting.model} parameters ..."):
                old[setting.name] = {"machine": machine, **run(setting, anyway=options.anyway)}
        except (measure.Loaded, MemoryError) as error:
            parser.exit(1, f"{setting.name} not run: {error}\n")
        show(console, old[setting.name])
        options.json.parent.mkdir(exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "results": old}, indent=1) + "\n")


if __name__ == "__main__":
    main()

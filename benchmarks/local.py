"""How long the workers of one host take to add up float32 gradients, so that each has the sum of a share.

    python -m benchmarks.local [--json benchmarks/results/local.json]

Nanoseconds a parameter, two workers on this machine: Horovod's allreduce and reduce-scatter, and the alltoall that
``hierarchical`` uses with the addition that follows it; an allgather of a bit a parameter for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.processes import two_processes
from studies.report import processor

RESULTS = Path(__file__).parent / "results" / "local.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    console = Console()
    found: dict[str, Any] = {}
    for backend in ("mpi", "gloo"):
        with console.status(f"Two workers, {backend} ..."):
            found[backend] = two_processes("benchmarks/local_worker.py", backend=backend)
    table = Table("nanoseconds a parameter", *found)
    for name in found["mpi"]:
        table.add_row(name, *(f"{one[name]:.2f}" for one in found.values()))
    console.print(table)
    options.json.parent.mkdir(exist_ok=True)
    machine = f"{os.cpu_count()} cores of an {processor()}"
    options.json.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

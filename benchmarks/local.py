"""How long the workers of one host take to add up float32 gradients, so that each has the sum of a share.

    python -m benchmarks.local [--anyway] [--json benchmarks/results/local.json]

Nanoseconds a parameter, two workers on this machine: Horovod's allreduce and reduce-scatter, and the alltoall that
``hierarchical`` uses with the addition that follows it; an allgather of a bit a parameter for comparison. With MPI also
by TCP, which is what its messages between hosts cost processors that have nothing else to do. The same over
``torch.distributed``, by Gloo in both jobs, with the sums in 16 bits of the hooks of ``DistributedDataParallel``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure
from benchmarks.link import ratio
from jobs.processes import horovodrun
from studies import report

RESULTS = Path(__file__).parent / "results" / "local.json"
TCP = "mpi over TCP"
BACKENDS: dict[str, dict[str, str]] = {"mpi": {}, TCP: {"OMPI_MCA_btl_tcp_exclusivity": "100000"}, "gloo": {}}
"""With the variables of each. Between processes of a host, Open MPI takes shared memory unless TCP goes before it (the
``btl`` that is given in the environment is overruled by horovodrun's), and Gloo TCP."""


def job(backend: str, *, anyway: bool, seconds: float) -> dict[str, Any]:
    """What two workers found. Raises ``measure.Loaded`` if other processes disturb them."""
    measure.refuse(measure.look(), anyway=anyway)
    arguments = ["--seconds", str(seconds), *(["--anyway"] if anyway else [])]
    path, launcher = "benchmarks/local_worker.py", backend.split()[0]
    found = horovodrun(2, path, *arguments, backend=launcher, **BACKENDS[backend])
    if "refused" in found:
        raise measure.Loaded(found["refused"])
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="for each backend")
    parser.add_argument("--anyway", action="store_true", help="measure on a loaded machine, too, and mark the results")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    console = Console()
    found: dict[str, Any] = {}
    try:
        for backend in BACKENDS:
            with console.status(f"Two workers, {backend} ..."):
                found[backend] = job(backend, anyway=options.anyway, seconds=options.seconds)
    except measure.Loaded as error:
        parser.exit(1, f"Not run: {error}\n")
    for backend, one in found.items():
        title = f"nanoseconds a parameter, {backend}"
        table = Table("", "ns", "to allreduce", title=title, caption=measure.describe(one))
        for name, row in one["ways"].items():
            table.add_row(name, f"{1e9 * row['seconds']['median']:.2f}", ratio(row["ratios"].get("allreduce")))
        console.print(table)
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps({"machine": report.machine(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

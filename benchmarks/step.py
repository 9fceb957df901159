"""What a compressed step costs where there is no slow link: two processes on this machine.

    python -m benchmarks.step [--json benchmarks/results/step.json]

step    a whole step of 25 M parameters, to that of Horovod with float32
small   Python's own work in a step with 300 small tensors, beyond the optimizer's, and its calls of functions; those of
        a step with 300 compressed tensors
memory  peak bytes a parameter, beyond plain AdamW
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

RESULTS = Path(__file__).parent / "results" / "step.json"


def job(*arguments: str) -> dict[str, Any]:
    """The result of a job on two processes over MPI."""
    return two_processes("benchmarks/step_worker.py", *arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    console = Console()
    with console.status("A step without a slow link ..."):
        step = job("step")
    with console.status("300 small tensors ..."):
        small = job("small")
    with console.status("Memory ..."):
        memory = {way: job("memory", "--way", way) for way in ("plain", "horovod fp32", "onebit")}
    size = memory["plain"]["parameters"]
    extra = {way: (memory[way]["peak"] - memory["plain"]["peak"]) / size for way in ("horovod fp32", "onebit")}
    table = Table("", "", "to reach")
    table.add_row("compressed step, time to Horovod fp32's", f"{step['onebit'] / step['horovod fp32']:.2f}", "1.15")
    table.add_row(
        "300 small tensors, Python's work a step", f"{1e3 * (small['onebit'] - small['plain']):.1f} ms", "3 ms"
    )
    table.add_row("the same, calls of functions a step", f"{small['calls']:,}", "")
    table.add_row("300 compressed tensors, calls of functions a step", f"{small['calls compressed']:,}", "")
    table.add_row("memory beyond AdamW, bytes a parameter", f"{extra['onebit']:.1f}", "8")
    table.add_row("the same of Horovod fp32", f"{extra['horovod fp32']:.1f}", "")
    console.print(table)
    options.json.parent.mkdir(exist_ok=True)
    machine = f"{os.cpu_count()} cores of an {processor()}"
    found = {"machine": machine, "step": step, "small": small, "memory": memory}
    options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

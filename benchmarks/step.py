"""What a compressed step costs where there is no slow link: two processes on this machine.

    python -m benchmarks.step [--framework tf] [--anyway] [--json benchmarks/results/step.json]

step    a whole step of 25 M parameters, to that of Horovod with float32
small   the work of a step with 300 small tensors beyond the optimizer's: in PyTorch Python's own work and its calls of
        functions, and those of a step with 300 compressed tensors; in Keras the time of a step of `fit`, with two
        processes, and with one, which has nobody to wait for
memory  peak bytes a parameter, beyond plain AdamW (PyTorch)
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

RESULTS = Path(__file__).parent / "results"
WORKERS = {"torch": "benchmarks/step_worker.py", "tf": "benchmarks/step_keras_worker.py"}


def job(framework: str, *arguments: str, anyway: bool, workers: int = 2) -> dict[str, Any]:
    """The result of a job over MPI. Raises ``measure.Loaded`` if other processes disturb it."""
    measure.refuse(measure.look(), anyway=anyway)
    found = horovodrun(workers, WORKERS[framework], *arguments, *(["--anyway"] if anyway else []))
    if "refused" in found:
        raise measure.Loaded(found["refused"])
    return dict(found)


def milliseconds(found: dict[str, Any]) -> str:
    """What a step of ours takes beyond plain training: median and interval."""
    found = found["ways"]["onebit"]["differences"]["plain"]
    return f"{1e3 * found['median']:.1f} [{1e3 * found['low']:.1f}, {1e3 * found['high']:.1f}] ms"


def rows(framework: str, found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What was measured, and the target."""
    step, small = found["step"]["ways"], milliseconds(found["small"])
    wanted = "1.15" if framework == "torch" else "1.1"
    result = [("compressed step, time to Horovod fp32's", ratio(step["onebit"]["ratios"]["horovod fp32"]), wanted)]
    if framework == "tf":
        fit = ratio(step["onebit fit"]["ratios"]["horovod fp32"])
        return [
            *result,
            ("the same in fit", fit, "1.1"),
            ("300 small variables, a step", small, "3 ms"),
            ("the same in one process", milliseconds(found["alone"]), "3 ms"),
        ]
    memory = found["memory"]
    extra = {way: (memory[way]["peak"] - memory["plain"]["peak"]) / memory[way]["parameters"] for way in memory}
    return [
        *result,
        ("300 small tensors, Python's work a step", small, "3 ms"),
        ("the same, calls of functions a step", f"{found['small']['calls']:,}", ""),
        ("300 compressed tensors, calls of functions a step", f"{found['small']['calls compressed']:,}", ""),
        ("memory beyond AdamW, bytes a parameter", f"{extra['onebit']:.1f}", "8"),
        ("the same in the warm-up", f"{extra['onebit warm-up']:.1f}", ""),
        ("the same of Horovod fp32", f"{extra['horovod fp32']:.1f}", ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=tuple(WORKERS), default="torch")
    parser.add_argument("--seconds", type=float, default=60, help="for each of the comparisons")
    parser.add_argument("--anyway", action="store_true", help="measure on a loaded machine, too, and mark the results")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.json = options.json or RESULTS / ("step_keras.json" if options.framework == "tf" else "step.json")
    console = Console()
    found: dict[str, Any] = {"machine": report.machine()}
    try:
        for what, text in (("step", "A step without a slow link"), ("small", "300 small tensors")):
            with console.status(f"{text} ..."):
                seconds = ["--seconds", str(options.seconds)]
                found[what] = job(options.framework, what, *seconds, anyway=options.anyway)
        if options.framework == "tf":
            with console.status("300 small tensors in one process ..."):
                found["alone"] = job("tf", "small", *seconds, anyway=options.anyway, workers=1)
        else:
            with console.status("Memory ..."):
                ways = ("plain", "horovod fp32", "onebit", "onebit warm-up")
                found["memory"] = {way: job("torch", "memory", "--way", way, anyway=options.anyway) for way in ways}
    except measure.Loaded as error:
        parser.exit(1, f"Not run: {error}\n")
    table = Table("", "", "target")
    for row in rows(options.framework, found):
        table.add_row(*row)
    console.print(table)
    for what in ("step", "small"):
        console.print(f"{what}: {measure.describe(found[what])}")
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

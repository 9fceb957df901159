"""Train with and without compression, one after the other, and compare.

python -m jobs.demo --framework torch --task digits --seeds 0 1 2

What it does not know itself (--optimizer lamb, --width 64, ...) it hands to the job.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from jobs import report

ROOT = Path(__file__).resolve().parents[1]


def run(args: argparse.Namespace, compression: str, seed: int) -> report.Run:
    """One horovodrun job. Exits with its status, after the end of its output, if it fails."""
    metrics = args.output / f"{args.framework}-{args.task}-{compression}-{seed}.jsonl"
    metrics.unlink(missing_ok=True)
    horovodrun = Path(sys.executable).with_name("horovodrun")
    job = ROOT / args.framework / "train.py"
    command = [str(horovodrun), "-np", str(args.np), f"--{args.backend}", sys.executable, str(job)]
    command += ["--task", args.task, "--compression", compression, "--seed", str(seed), "--steps", str(args.steps)]
    command += ["--warmup-steps", str(args.warmup_steps), "--recipe", args.recipe, "--metrics", str(metrics)]
    command += args.more
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0 or not metrics.exists():
        lines = "\n".join(result.stdout.splitlines()[-25:])
        sys.exit(f"{lines}\njobs.demo: {' '.join(command)}\nended with status {result.returncode}")
    return report.read(metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("torch", "tf"), default="torch")
    parser.add_argument("--task", choices=("digits", "vgg", "charlm"), default="digits")
    parser.add_argument("--compressions", nargs="+", default=["none", "onebit"], choices=("none", "fp16", "onebit"))
    parser.add_argument("--recipe", default="robust")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--np", type=int, default=2, help="processes")
    parser.add_argument("--backend", choices=("gloo", "mpi"), default="gloo")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "demo")
    args, more = parser.parse_known_args()
    args.more = more
    args.output = args.output.absolute()
    args.output.mkdir(parents=True, exist_ok=True)

    console = Console()
    runs = []
    for compression in args.compressions:
        for seed in args.seeds:
            what = f"{args.task} on {args.np} processes, {args.steps} steps, compression {compression}, seed {seed}"
            with console.status(f"Training {what} ..."):
                runs.append(run(args, compression, seed))
            final = runs[-1].final
            console.print(f"Trained {what}: accuracy {final['accuracy']:.3f}, {final['seconds']:.1f} s")
    title = f"{args.task} in {args.framework}, {args.np} processes, {args.steps} steps, seeds {args.seeds}"
    console.print(report.table(runs, title))
    picture = args.output / f"{args.framework}-{args.task}.png"
    report.plot(runs, picture)
    console.print(f"Loss curves: {picture}")


if __name__ == "__main__":
    main()

"""Train with and without compression, one after the other over a slow link, and compare.

    python -m jobs.demo                       # what `make demo` does: about a minute
    python -m jobs.demo --framework tf        # the same in Keras
    python -m jobs.demo --launcher torchrun   # the same in PyTorch without Horovod
    python -m jobs.demo --link none --task digits --compressions none fp16 onebit --steps 600 --seeds 0 1 2

The link is between network namespaces (jobs/link.py), where the machine allows that. What the demo does not know itself
(--optimizer lamb, --width 64, ...) it hands to the job.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console

from horovod_onebit.recipe import Bits
from horovod_onebit.warmup import EXACT_FIRST
from jobs import link, report
from jobs.options import TASKS
from jobs.processes import ROOT, guarded, result, started
from jobs.view import Records, View

FRAMEWORKS = {"torch": "PyTorch", "tf": "Keras"}
LAUNCHERS = {"horovodrun": "Horovod", "torchrun": "torch.distributed"}
"""What the gradients travel over."""
RATES = ("100mbit", "1gbit")
STEPS, WARMUP, TASK = 300, 20, "mlp"


def run(
    args: argparse.Namespace,
    compression: str,
    seed: int,
    network: Sequence[str] = (),
    watch: Callable[[Records], None] = lambda records: None,
    launcher: str = "horovodrun",
) -> report.Run:
    """One job, by ``launcher`` or in the ``network`` of ``jobs.link``; ``watch`` gets its records while it runs.

    Exits with its status, after the end of its output, if it fails.
    """
    name = f"{args.framework}-{args.task}-{compression}-{seed}.jsonl"
    with tempfile.TemporaryDirectory(prefix=".running-", dir=args.output) as folder:
        metrics, log = Path(folder, name), Path(folder, "log")
        command = _job(args, compression, seed, metrics)
        if network:
            command = [*network, "--workers", str(args.np), "--", *command]
        else:
            program, options = str(Path(sys.executable).with_name(launcher)), ["-np", str(args.np), f"--{args.backend}"]
            if launcher == "torchrun":
                options = ["--standalone", "--nproc-per-node", str(args.np), "--no-python"]
            command = guarded([program, *options, *command])
        with started(command, link.environment(), log) as job:
            while job.poll() is None:
                watch(report.lines(metrics))
                time.sleep(0.1)
            watch(report.lines(metrics))
        output = log.read_text(errors="replace")
        if job.returncode != 0 or not metrics.exists():
            end = "\n".join(output.splitlines()[-60:])
            sys.exit(f"{end}\njobs.demo: {' '.join(command)}\nended with status {job.returncode}")
        done = report.read(metrics)
        if network:
            done.final["link_bytes"] = max(result(output)["sent"])
        os.replace(metrics, args.output / name)
    return done


def _job(args: argparse.Namespace, compression: str, seed: int, metrics: Path) -> list[str]:
    half = ["--half"] if compression == "onebit" and args.warmup != "exact" else []
    often = ["--log-interval", str(max(1, args.steps // 60)), "--eval-interval", str(max(1, args.steps // 6))]
    return [
        sys.executable, str(ROOT / args.framework / "train.py"), "--task", args.task, "--compression", compression,
        "--seed", str(seed), "--steps", str(args.steps), "--warmup-steps", str(args.warmup_steps),
        "--warmup", args.warmup, "--recipe", args.recipe, "--metrics", str(metrics), *half, *often, *args.more,
    ]  # fmt: skip


def network_of(args: argparse.Namespace) -> tuple[list[str], str]:
    """The command prefix of ``jobs.link``; or none, and why.

    Raises ``UnavailableError`` if a link was demanded.
    """
    if args.link == "none":
        return [], "--link none"
    rate = RATES[0] if args.link == "auto" else args.link
    try:
        if args.backend != "gloo":
            raise link.UnavailableError("a link needs --backend gloo, since MPI starts its processes on hosts by ssh")
        return link.prefix(rate, args.launcher), ""
    except link.UnavailableError as error:
        if args.link != "auto":
            raise
        return [], str(error)


def introduce(console: Console, args: argparse.Namespace, network: Sequence[str], reason: str) -> None:
    """Say what is going to happen, and for how long."""
    ways = " then ".join(report.NAMES[kind] for kind in args.compressions)
    how = (
        "exact steps"
        if args.warmup == "exact"
        else f"steps, {EXACT_FIRST} in float16 and the others in {args.warmup[:-4]} bits"
    )
    exact = f" One bit begins after {args.warmup_steps} {how}." if "onebit" in args.compressions else ""
    console.print(
        f"This trains the network `{args.task}` in {FRAMEWORKS[args.framework]} over {LAUNCHERS[args.launcher]} on "
        f"{args.np} processes, for {args.steps} steps each time, with gradients of {ways}.{exact}",
        highlight=False,
    )
    if network:
        rate = report.readable(RATES[0] if args.link == "auto" else args.link)
        console.print(
            f"Each process is in a network namespace of its own. A link of {rate} joins them, so that they wait for "
            "the network as they would on two hosts.",
            highlight=False,
        )
    else:
        console.print(
            f"There is no slow link ({reason}). Processes on one machine have no network to wait for, so one bit "
            "cannot be faster here. The times on a network are predicted at the end.",
            highlight=False,
        )
    usual = (args.task, args.steps, args.seeds, args.np, args.more) == (TASK, STEPS, [0], 2, [])
    if usual and len(args.compressions) == 2:
        console.print("It takes about a minute on two quiet cores. Ctrl-C ends it and leaves nothing behind.\n")
    else:
        console.print("The table shows how far it is. Ctrl-C ends it and leaves nothing behind.\n")


def conclude(console: Console, args: argparse.Namespace, runs: Sequence[report.Run]) -> None:
    """The table, the picture, and what to do next."""
    title = f"{args.task} in {FRAMEWORKS[args.framework]}, {args.np} processes, {args.steps} steps, seeds {args.seeds}"
    console.print()
    console.print(report.table(runs, title))
    console.print()
    if text := report.conclusion(runs):
        console.print(text, style="bold", highlight=False)
    if all("link_bytes" in run.final for run in runs):
        counted = {report.NAMES[kind]: report.average(runs, kind, "link_bytes") for kind in report.kinds(runs)}
        text = ", ".join(f"{1e-6 * count:,.1f} MB with {name}" for name, count in counted.items())
        console.print(
            f"The network interface of a process counted {text}, with headers, the first broadcast and "
            f"messages of {LAUNCHERS[args.launcher]} itself.",
            highlight=False,
        )
    else:
        console.print("\n", report.predictions(runs, RATES))
    picture = args.output / f"{args.framework}-{args.task}.png"
    report.plot(runs, picture)
    console.print(f"Picture: {picture}", soft_wrap=True, highlight=False)
    other = "make demo FRAMEWORK=tf    # the same in Keras"
    guide = "make docs                 # how to change your own job, in docs/_build/html/index.html"
    if args.framework == "tf":
        other = "make demo FRAMEWORK=torch    # the same in PyTorch"
    elif args.launcher == "torchrun":
        other = "make demo                 # the same over Horovod, which is built for it"
        guide = "docs/torchrun.md          # how to change your own job"
    program = Path(sys.executable).with_name("horovod-onebit")
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    console.print(
        f"""
Next:
  {other}
  {program} plan --parameters 110M --workers 16 --link 10gbit --compute-ms 250
                            # will it pay for your model, on your network?
  {guide}""",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--framework", choices=FRAMEWORKS, default="torch")
    add("--launcher", choices=LAUNCHERS, default="horovodrun")
    add("--task", choices=TASKS, default=TASK)
    add("--compressions", nargs="+", default=["none", "onebit"], choices=report.NAMES)
    add("--recipe", default="robust")
    add("--steps", type=int, default=STEPS)
    add("--warmup-steps", type=int, default=WARMUP)
    add("--warmup", choices=get_args(Bits), help="before one bit (three_bit; exact for zero_one_adam, paper and fixed)")
    add("--seeds", type=int, nargs="+", default=[0])
    add("--np", type=int, default=2, help="processes")
    add("--backend", choices=("gloo", "mpi"), default="gloo")
    add("--link", choices=("auto", "none", *RATES), default="auto", help="auto is 100mbit where that is possible")
    add("--output", type=Path, default=ROOT / "build" / "demo")
    args, args.more = parser.parse_known_args(argv)
    exact = any(one.endswith("zero_one_adam") for one in args.more) or args.recipe in ("paper", "fixed")
    args.warmup = args.warmup or ("exact" if exact else "three_bit")
    if args.np < 2:
        parser.error(f"--np {args.np}: expected 2 processes or more, since one has nothing to send")
    if args.launcher == "torchrun" and args.framework == "tf":
        parser.error("--launcher torchrun: Keras needs Horovod. Take --framework torch, or --launcher horovodrun")
    if args.launcher == "torchrun" and args.backend == "mpi":
        parser.error("--backend mpi: torchrun has no MPI here. Take --backend gloo, or --launcher horovodrun")
    for name in ("steps", "warmup_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected a positive number")
    args.output = args.output.absolute()
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {args.output}: {error.strerror}")
    return args


def main() -> None:
    args = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: what was started is ended
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    console = Console()
    try:
        network, reason = network_of(args)
    except link.UnavailableError as error:
        sys.exit(
            f"jobs.demo: --link {args.link}: {error}. Take --link none, which needs no link and predicts the times."
        )
    introduce(console, args, network, reason)
    planned = [(kind, seed) for kind in args.compressions for seed in args.seeds]
    labels = [report.NAMES[kind] + (f", seed {seed}" if len(args.seeds) > 1 else "") for kind, seed in planned]
    runs = []
    try:
        baselines = [index % len(args.seeds) for index in range(len(planned))]  # the first kind's run of the same seed
        with View(console, labels, args.steps, baselines) as view:
            for index, (kind, seed) in enumerate(planned):
                with view.run(index) as watch:
                    runs.append(run(args, kind, seed, network, watch, args.launcher))
    except KeyboardInterrupt:
        sys.exit("\njobs.demo: ended by Ctrl-C; the processes and their network are gone.")
    conclude(console, args, runs)


if __name__ == "__main__":
    main()

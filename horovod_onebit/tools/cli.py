"""``horovod-onebit``: check and estimate a job before it runs, and show the results of one that has run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from horovod_onebit import costs
from horovod_onebit._version import __version__
from horovod_onebit.checks import whole
from horovod_onebit.errors import OnebitError, error_text
from horovod_onebit.recipe import exchanges
from horovod_onebit.schedule import EXACT
from horovod_onebit.tools import doctor, link, monitor, planner, show, trial
from horovod_onebit.tools.diagnostics import Report

Answer = tuple[str, Any, int]
"""Text for a person, the same data for a program, and the exit status. No text: another worker answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if the answer is bad news; 2 if an argument is wrong."""
    args = _parser().parse_args(argv)
    try:
        text, data, status = args.run(args)
    except OnebitError as error:
        sys.stderr.write(f"horovod-onebit: {error}\n")
        return 2
    except (OverflowError, MemoryError) as error:
        sys.stderr.write(f"horovod-onebit: a number is too large: {error_text(error)}\n")
        return 2
    if text:
        sys.stdout.write((json.dumps(show.finite(data), indent=2) if args.json else text) + "\n")
    return status


def _parser() -> argparse.ArgumentParser:
    text = "Check and estimate a job before it runs, and show the results of one that has run."
    parser = argparse.ArgumentParser(prog="horovod-onebit", description=text)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="for programs: JSON instead of text")

    def add(name: str, run: Any, help: str, example: str) -> Any:
        epilog = f"example: horovod-onebit {example}"
        command = commands.add_parser(name, help=help, description=help, epilog=epilog, parents=[shared])
        command.set_defaults(run=run)
        return command.add_argument

    add("doctor", _doctor, "check the installation: versions, conflicts, and how to resolve them", "doctor")
    help = "measure the network between the hosts of a job; by horovodrun or torchrun, one process for each worker"
    option = add("link", _link, help, "link --parameters 110M")
    option("--parameters", metavar="N", help='of the model, to say which exchange "auto" takes: 25000000, 110M, 1.3B')

    _add_plan(add)
    _add_simulate(add)

    option = add("diagnose", _diagnose, "show a report on gradients that Report.save wrote", "diagnose report.json")
    option("report", help="the JSON file")
    option("--plot", metavar="FILE", help="write the magnitudes by layer to this file (.png, .svg, ...)")

    option = add(
        "plot", _plot, "draw the files that Monitor or a training job wrote", "plot run.jsonl --output run.png"
    )
    option("runs", nargs="+", metavar="RUN", help="files of JSON lines, one for each run")
    option("--output", default="run.png", metavar="FILE", help="the picture (run.png)")
    return parser


def _add_plan(add: Any) -> None:
    help = "estimate the bytes and the time of a step, with and without compression"
    rates = "of each host, in bits a second: 1gbit, 100mbit, 10Gbps; or in bytes: 1.2GB, 1.2GBps, 1.2GB/s"
    option = add("plan", _plan, help, "plan --parameters 110M --workers 16 --link 10gbit --compute-ms 250")
    option("--parameters", required=True, metavar="N", help="of the model: 25000000, 110M, 1.3B")
    option("--workers", required=True, type=int, metavar="N", help="processes in all")
    option("--link", required=True, metavar="RATE", help=rates)
    option("--compute-ms", required=True, type=float, metavar="MS", help="forward, backward and optimizer of one step")
    option("--workers-per-host", type=int, default=1, metavar="N", help="they share the host's link (1)")
    option("--latency-us", type=float, default=100.0, metavar="US", help="from host to host (100)")
    option("--device", choices=costs.DEVICES, default="cpu", help="where gradients are (cpu)")
    option(
        "--no-process-sets",
        action="store_true",
        help="no hierarchical: in PyTorch over Horovod without hvd.init(process_sets='dynamic'), and for 0/1 Adam",
    )
    option("--local", type=int, default=1, metavar="H", help="local steps: one exchange every H steps (1)")
    option("--delay", type=int, default=0, metavar="N", help="local steps: N of the next round hide the exchange (0)")
    option("--plot", metavar="FILE", help="write the step time by number of workers to this file (.png, .svg, ...)")


def _add_simulate(add: Any) -> None:
    help = "compare the quality of recipes: train a small network on simulated workers, in this process"
    option = add("simulate", _simulate, help, "simulate --workers 16 --recipes exact robust paper")
    option("--recipes", nargs="+", default=["exact", "robust"], metavar="RECIPE",
           help="exact, robust, paper, fixed (exact robust)")  # fmt: skip
    help = "instead of the recipe's own, which is often direct for so small a network; large models on many hosts "
    option("--exchange", choices=exchanges(), help=help + "use two_stage")
    option("--workers", type=int, default=4, metavar="N", help="simulated processes (4)")
    option("--workers-per-host", type=int, default=1, metavar="N", help="of them (1)")
    option("--steps", type=int, default=400, metavar="N", help="optimizer steps (400)")
    option("--warmup-steps", type=int, default=20, metavar="N", help="steps of the warm-up (20)")
    option("--lr", type=float, default=3e-3, help="Adam's learning rate (0.003)")
    option("--batch-size", type=int, default=16, metavar="N", help="of each worker (16)")
    option("--noise", type=float, default=0.1, help="standard deviation of it in each worker's targets (0.1)")
    option("--seed", type=int, default=0, metavar="N", help="of weights, samples and noise (0)")
    option("--plot", metavar="FILE", help="write the loss by step and by bytes to this file (.png, .svg, ...)")


def _doctor(args: argparse.Namespace) -> Answer:
    return doctor.report()


def _link(args: argparse.Namespace) -> Answer:
    parameters = None if args.parameters is None else whole("parameters", planner.number(args.parameters))
    collectives = link.collectives()
    found = link.measure(collectives)
    return link.text(found, parameters) if collectives.rank == 0 else "", asdict(found), 0


def _diagnose(args: argparse.Namespace) -> Answer:
    report = Report.load(args.report)
    if args.plot:
        report.plot(args.plot)
    return report.text(show.table), report.as_dict(), 0


def _plot(args: argparse.Namespace) -> Answer:
    titles = monitor.plot(args.runs, args.output)
    return f"{args.output}: {', '.join(titles)}", {"output": args.output, "panels": titles}, 0


def _simulate(args: argparse.Namespace) -> Answer:
    names = set(trial.Trial.__dataclass_fields__)
    task = trial.Trial(**{name: value for name, value in vars(args).items() if name in names})
    for recipe in args.recipes:
        trial.recipe_of(recipe, args.exchange)  # before the first one trains
    if args.plot:
        show.check(args.plot)
    outcomes = []
    for recipe in args.recipes:
        with show.progress(f"{recipe}, {task.workers} workers", task.steps) as advance:
            outcomes.append(trial.run(task, recipe, exchange=args.exchange, progress=advance))
    head = ["recipe", "test loss", "MB sent by a worker", "fewer", "bytes of the last step", "replicas"]
    rows = [
        [
            o.recipe,
            f"{o.loss:.4g}" if o.loss < 1e3 else "diverged",
            f"{1e-6 * o.bytes:.2f}",
            f"{o.fp32_bytes / o.bytes:.1f}" if o.bytes else "-",
            f"{o.last_bytes:,}",
            "equal" if o.replicas_equal else "DIFFER",
        ]
        for o in outcomes
    ]
    if args.plot:
        trial.plot(outcomes, args.plot)
    equal = all(o.replicas_equal for o in outcomes)
    text = show.table(head, rows)
    if task.steps <= task.warmup_steps and set(args.recipes) != {EXACT}:
        text += f"\n\nNo step sent one bit: all {task.steps} are of the warm-up (--warmup-steps)."
    return text, [asdict(o) for o in outcomes], 0 if equal else 1


def _plan(args: argparse.Namespace) -> Answer:
    job = planner.Job(
        parameters=planner.number(args.parameters),
        workers=args.workers,
        link=planner.rate(args.link),
        compute=1e-3 * args.compute_ms,
        workers_per_host=args.workers_per_host,
        latency=1e-6 * args.latency_us,
        device=costs.DEVICES[args.device],
        process_sets=not args.no_process_sets,
        every=args.local,
        delay=args.delay,
    )
    plan = planner.plan(job)
    if args.plot:
        planner.plot(job, args.plot)
    return _plan_text(plan), plan.as_dict(), 0


def _plan_text(plan: planner.Prediction) -> str:
    job = plan.job
    head = ["exchange", "MB by a host", "transfer ms", "exposed ms", "step ms", "steps/s"]
    rows = [
        [
            e.way,
            f"{1e-6 * e.received:,.1f}",
            f"{1e3 * e.transfer:,.1f}",
            f"{1e3 * e.exposed:,.1f}",
            f"{1e3 * e.step:,.1f}",
            f"{1 / e.step if e.step else 0:.2f}",
        ]
        for e in plan.estimates
    ]
    title = (
        f"{job.parameters:,} parameters, {job.workers} workers on {job.hosts} hosts, "
        f"{8e-9 * job.link:g} Gbit/s, {1e3 * job.compute:g} ms of compute, {job.device.name}"
        + (f"; of 1 bit, a step of {job.every} local ones" if job.every > 1 else "")
    )
    return "\n".join([title, "", show.table(head, rows), "", plan.verdict, *([plan.before] if plan.before else [])])

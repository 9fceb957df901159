"""``horovod-onebit``: what can be said about a job before it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from horovod_onebit import doctor, planner
from horovod_onebit._version import __version__
from horovod_onebit.diagnostics import Report
from horovod_onebit.errors import OnebitError


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    args = _parser().parse_args(argv)
    try:
        answer = args.run(args)
    except OnebitError as error:
        sys.stderr.write(f"horovod-onebit: {error}\n")
        return 2
    text, status = answer if isinstance(answer, tuple) else (answer, 0)
    sys.stdout.write(text + "\n")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="horovod-onebit", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    ill = commands.add_parser("doctor", help="is everything there? Versions, what does not fit together, what to do")
    ill.add_argument("--json", action="store_true", help="for programs")
    ill.set_defaults(run=lambda args: doctor.report(as_json=args.json))

    diagnose = commands.add_parser("diagnose", help="will it work? Show a report that Report.save wrote")
    diagnose.add_argument("report", help="the JSON file")
    diagnose.add_argument("--plot", help="write the magnitudes by layer to this file (.png, .svg, ...)")
    diagnose.set_defaults(run=_diagnose)

    plan = commands.add_parser(
        "plan",
        help="will it pay? Bytes and time of a step, by way of exchanging",
        epilog="example: horovod-onebit plan --parameters 110M --workers 16 --link 10gbit --compute-ms 250",
    )
    plan.add_argument("--parameters", required=True, help="of the model: 25000000, 110M, 1.3B")
    plan.add_argument("--workers", required=True, type=int, help="processes in all")
    plan.add_argument("--link", required=True, help="of each host: 1gbit, 10gbit, 1.2GB (bytes a second)")
    plan.add_argument("--compute-ms", required=True, type=float, help="forward, backward and optimizer of one step")
    plan.add_argument("--workers-per-host", type=int, default=1, help="they share the host's link (1)")
    plan.add_argument("--latency-us", type=float, default=100.0, help="from host to host (100)")
    plan.add_argument("--device", choices=planner.DEVICES, default="cpu", help="where gradients are (cpu)")
    plan.add_argument("--json", action="store_true", help="numbers instead of a table")
    plan.add_argument("--plot", help="write the step time by number of workers to this file (.png, .svg, ...)")
    plan.set_defaults(run=_plan)
    return parser


def _diagnose(args: argparse.Namespace) -> str:
    report = Report.load(args.report)
    if args.plot:
        report.plot(args.plot)
    return report.text()


def _plan(args: argparse.Namespace) -> str:
    job = planner.Job(
        parameters=planner.number(args.parameters),
        workers=args.workers,
        link=planner.rate(args.link),
        compute=1e-3 * args.compute_ms,
        workers_per_host=args.workers_per_host,
        latency=1e-6 * args.latency_us,
        device=planner.DEVICES[args.device],
    )
    plan = planner.plan(job)
    if args.plot:
        _plot(job, args.plot)
    return json.dumps(plan.as_dict(), indent=2) if args.json else _table(plan)


def _table(plan: planner.Plan) -> str:
    job = plan.job
    lines = [
        f"{job.parameters:,} parameters, {job.workers} workers on {job.hosts} hosts, "
        f"{8e-9 * job.link:g} Gbit/s, {1e3 * job.compute:g} ms of compute, {job.device.name}",
        "",
        f"{'':16} {'MB by a host':>13} {'transfer ms':>12} {'exposed ms':>11} {'step ms':>9} {'steps/s':>8}",
    ]
    lines += [
        f"{e.way:16} {1e-6 * e.received:13,.1f} {1e3 * e.transfer:12,.1f} {1e3 * e.exposed:11,.1f} "
        f"{1e3 * e.step:9,.1f} {1 / e.step if e.step else 0:8.2f}"
        for e in plan.estimates
    ]
    return "\n".join([*lines, "", plan.verdict])


def _plot(job: planner.Job, path: str) -> None:
    """Step time over the number of workers, up to 1,024."""
    from dataclasses import replace

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = [job.workers_per_host * 2**k for k in range(11) if job.workers_per_host * 2**k <= max(1024, job.workers)]
    plans = [planner.plan(replace(job, workers=n)) for n in counts]
    figure, axes = pyplot.subplots(constrained_layout=True)
    for i, estimate in enumerate(plans[0].estimates):
        axes.plot(counts, [1e3 * plan.estimates[i].step for plan in plans], marker="o", label=estimate.way)
    axes.set(yscale="log", xlabel="workers", ylabel="milliseconds a step")
    axes.set_xscale("log", base=2)
    axes.legend()
    save: Any = figure.savefig
    save(path)
    pyplot.close(figure)

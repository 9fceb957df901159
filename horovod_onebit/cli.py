"""``horovod-onebit``: what can be said about a model without training it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from horovod_onebit._version import __version__
from horovod_onebit.diagnostics import Report
from horovod_onebit.errors import OnebitError


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="horovod-onebit", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    diagnose = commands.add_parser("diagnose", help="show a report that Report.save wrote")
    diagnose.add_argument("report", help="the JSON file")
    diagnose.add_argument("--plot", help="write the magnitudes by layer to this file (.png, .svg, ...)")
    args = parser.parse_args(argv)
    try:
        report = Report.load(args.report)
        sys.stdout.write(report.text() + "\n")
        if args.plot:
            report.plot(args.plot)
    except OnebitError as error:
        sys.stderr.write(f"horovod-onebit: {error}\n")
        return 2
    return 0

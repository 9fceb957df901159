"""What the workers of `benchmarks/link.py` share, whatever their framework."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure import Loaded, Way, Workers, compare, pairs_of

RX = Path("/sys/class/net/e0/statistics/rx_bytes")

# Parameters: layers, width, batch size
MODELS = {"1M": (4, 512, 256), "25M": (6, 2048, 128), "110M": (7, 4000, 32)}
FIT = "no communication fit"
BASELINES = ("no communication", "horovod fp32", FIT)


def received() -> int:
    """Bytes that the network interface of this host has received; 0 if it is not one of `jobs/cluster.py`."""
    return int(RX.read_text()) if RX.exists() else 0


def parse(doc: str | None) -> argparse.Namespace:
    """The options of a worker. ``ways`` is {name: rounds at most}."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--model", choices=MODELS, default="25M")
    parser.add_argument("--ways", required=True, help="comma-separated, with _ for spaces; NAME:N for N rounds at most")
    parser.add_argument("--steps", type=int, default=2, help="steps of each way in a turn; of local steps, a round")
    parser.add_argument("--seconds", type=float, default=60, help="for the training, the first steps not counted")
    parser.add_argument("--exchange-seconds", type=float, default=0, help="for the exchange alone")
    parser.add_argument("--anyway", action="store_true", help="measure on a loaded machine, too")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--hosts", default="127.0.0.1", help="the addresses of all workers, comma-separated")
    options = parser.parse_args()
    named = (way.replace("_", " ").partition(":") for way in options.ways.split(","))
    options.ways = {name: int(most or 10**6) for name, _, most in named}
    if options.batch:
        MODELS[options.model] = (*MODELS[options.model][:2], options.batch)
    return options


def take_core(rank: int) -> None:
    """Let this process run on one core, which it shares with others only if there are fewer cores than processes."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def limited(way: Way, most: int, steps: int) -> Way:
    """``way`` with ``most`` rounds and ``steps`` steps in a turn."""
    return replace(way, most=most, calls=max(1, steps // way.steps))


def finish(
    options: argparse.Namespace,
    hvd: Any,
    ways: Mapping[str, Way],
    *,
    parameters: int,
    exchange: Callable[[], Mapping[str, Way]] | None = None,
) -> None:
    """Compare, and print the result on rank 0. Collective. ``exchange`` makes the ways of exchanging gradients."""
    workers = Workers(hvd)
    result: dict[str, Any] = {
        "model": options.model, "workers": hvd.size(), "parameters": parameters, "measured": {}
    }  # fmt: skip
    given: dict[str, Any] = {"received": received, "anyway": options.anyway}
    try:
        if exchange is not None and options.exchange_seconds:
            kinds = exchange()
            found = compare(
                kinds, pairs_of(list(kinds), ["float32"]), workers, seconds=options.exchange_seconds, **given
            )
            result["exchange"], result["measured"]["exchange"] = found.pop("ways"), found
        if options.seconds:
            pairs = [
                (way, base) for way, base in pairs_of(list(ways), BASELINES) if base != FIT or way.endswith(" fit")
            ]
            found = compare(ways, pairs, workers, seconds=options.seconds, **given)
            result["training"], result["measured"]["training"] = found.pop("ways"), found
    except Loaded as error:
        result["refused"] = str(error)
    if hvd.rank() == 0:
        sys.stdout.write(f"RESULT {json.dumps(result)}\n")
        sys.stdout.flush()
    workers.barrier()

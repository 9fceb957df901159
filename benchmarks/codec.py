"""How fast the CPU kernels are, beside a memcpy, separate torch operations, and torch's own fused Adam.

    python benchmarks/codec.py [--elements 25600000] [--threads 1] [--anyway] [--json results.json]

Everything is timed in one run, interleaved, on the same arrays; the figures to compare are the ratios, which are taken
within a repeat: their medians and 95 % intervals are shown. Refused while other processes use the machine.

Bytes per element count each array once: encode in update space reads g, m, v, error and writes error (20 bytes) and one
bit; in momentum space 16; decode + Adam reads v, m or nothing, w and writes m, w; LAMB reads m, v, w twice, writes w.
Of a gradient in few bits, encode reads g and v; decode reads v, and writes v and the mean.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from horovod_onebit import __version__, codecs, coded
from horovod_onebit.kernels import cpu
from horovod_onebit.kernels.reference import CHUNK, Arrays, Coding, num_blocks
from horovod_onebit.rules import adam, gradient, lamb, scalars

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import measure

BLOCK = 1024
WORKERS = 2
BETA1, BETA2, EPS, CLIP, LR = 0.9, 0.999, 1e-8, 3.0, 1e-3


class Inputs:
    """Inputs that hold no zeros and no denormals, much larger than the caches."""

    def __init__(self, size: int) -> None:
        rng = np.random.default_rng(0)
        self.grad, self.momentum, self.error, self.weight, self.target = (
            rng.standard_normal(size, dtype=np.float32) for _ in range(5)
        )
        self.variance = rng.random(size, dtype=np.float32) + np.float32(0.1)
        self.rows = rng.integers(0, 256, (WORKERS, CODING.codec.size(size, BLOCK)), dtype=np.uint8)
        self.rows.view(np.float32)[:, :: CODING.codec.record_size(BLOCK) // 4] = 1

    def all(self) -> Arrays:
        return Arrays(self.grad, self.momentum, self.variance, self.weight)


CODING = Coding(codecs.find("sign"), BLOCK, codecs.GUARD)
ADAM = scalars(
    adam.Scalars,
    beta1=BETA1,
    grad=1 - BETA1,
    l2=0,
    correction=1,
    eps_inside=0,
    eps=EPS,
    clip=CLIP,
    decay=1,
    step=LR,
)
GRADIENT = scalars(
    gradient.Scalars,
    correction=1,
    floor=0,
    start=0.01,
    keep=0.999,
    take=0.001,
    then_correction=1,
    then_floor=0,
    then_start=0.01,
    most=gradient.MOST,
)
LAMB = scalars(lamb.Step, first=1.5, inside=0.01, correction=1, eps_inside=0, eps=EPS, decay=1, step=1e-9)


def encode(a: Inputs, formula: Any) -> None:
    cpu.encode(formula, ADAM, a.all(), a.error, a.rows[0], 0, CODING)


def decode_apply(a: Inputs) -> None:
    cpu.apply(adam.move_by_update, ADAM, a.all(), a.rows, 0, CODING)


def gradient_in(bits: str, a: Inputs) -> tuple[Callable[[], None], Callable[[], None]]:
    """Encode a gradient in units of its second moment's root, and decode that of two workers."""
    coding = Coding(codecs.find(bits), coded.BLOCK, codecs.NO_GUARD)
    size, record = coding.codec.size(a.grad.size, coded.BLOCK), coding.codec.record_size(coded.BLOCK)
    rows = np.random.default_rng(0).integers(0, 256, (WORKERS, size), dtype=np.uint8)
    rows.view(np.float32)[:, :: record // 4] = 1
    arrays, moved = a.all(), Arrays(None, a.error, a.variance, a.target)

    def encode() -> None:
        cpu.encode(gradient.contribute_only, GRADIENT, arrays, a.error, rows[0], 0, coding)

    def decode() -> None:
        cpu.apply(gradient.receive_only, GRADIENT, moved, rows, 0, coding)

    return encode, decode


def separate_encode(a: Inputs) -> Callable[[], None]:
    """The same compression as one torch operation after another, each a pass over memory."""
    g, m, v, error = map(torch.from_numpy, (a.grad, a.momentum, a.variance, a.error))
    powers = 2 ** torch.arange(8, dtype=torch.uint8)

    def work() -> None:
        u = (BETA1 * m + (1 - BETA1) * g) / (v.sqrt() + EPS)
        c = u.clamp(-CLIP, CLIP) + error
        blocks = c.view(-1, BLOCK)
        rms = blocks.pow(2).mean(1).sqrt()
        scale = torch.minimum(rms, 1.5 * blocks.abs().mean(1))
        negative = c < 0
        decoded = torch.where(negative.view(-1, BLOCK), -scale[:, None], scale[:, None])
        error.copy_((blocks - decoded).view(-1))
        (negative.view(-1, 8) * powers).sum(1, dtype=torch.uint8)

    return work


def lamb_step(a: Inputs) -> Callable[[], None]:
    sums = np.empty((num_blocks(a.weight.size, CHUNK), 2))
    layer = a.all()._replace(gradient=None)

    def work() -> None:
        cpu.sums(lamb.lengths, LAMB, layer, sums)
        cpu.move(lamb.move, LAMB, layer)

    return work


def separate_lamb(a: Inputs) -> Callable[[], None]:
    """The same step as one torch operation after another."""
    m, v, w = map(torch.from_numpy, (a.momentum, a.variance, a.weight))

    def work() -> None:
        update = 1.5 * m / (v.sqrt() + EPS) + 0.01 * w
        w.norm(), update.norm()
        w.sub_(1e-9 * update)

    return work


def fused_adam(a: Inputs) -> Callable[[], None]:
    p = torch.nn.Parameter(torch.from_numpy(a.weight))
    p.grad = torch.from_numpy(a.grad)
    return torch.optim.Adam([p], lr=LR, fused=True).step


def repeated(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, the calls interleaved."""
    for call in work.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, call in work.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_600_000, help="a multiple of 1024")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--anyway", action="store_true", help="measure on a loaded machine, too, and mark the results")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.elements < BLOCK or args.elements % BLOCK:
        parser.error(f"--elements {args.elements}: expected a positive multiple of {BLOCK}")

    torch.set_num_threads(args.threads)
    cpu.set_num_threads(args.threads)
    a = Inputs(args.elements)
    copy_from, copy_to = torch.from_numpy(a.grad), torch.from_numpy(a.target)
    work: dict[str, tuple[Callable[[], object], float]] = {
        "memcpy": (lambda: copy_to.copy_(copy_from), 8),
        "encode, update space": (lambda: encode(a, adam.update), 20 + 1 / 8),
        "encode, momentum space": (lambda: encode(a, adam.momentum), 16 + 1 / 8),
        "encode as separate torch operations": (separate_encode(a), 20 + 1 / 8),
        f"decode {WORKERS} workers + Adam": (lambda: decode_apply(a), 16 + WORKERS / 8),
        "torch.optim.Adam(fused=True)": (fused_adam(a), 28),
        "LAMB, lengths and step of a layer": (lamb_step(a), 28),
        "LAMB as separate torch operations": (separate_lamb(a), 28),
    }
    for bits, codec in (("two", "logistic_two"), ("three", "logistic_three"), ("four", "logistic_four")):
        coded, decoded = gradient_in(codec, a)
        nbytes = codecs.find(codec).bits / 8
        work[f"encode a gradient in {bits} bits"] = coded, 8 + nbytes
        work[f"decode {WORKERS} workers' gradients in {bits} bits"] = decoded, 12 + WORKERS * nbytes
    try:
        measure.refuse(measure.look(), anyway=args.anyway)
        before = measure.usage()
        times = repeated({name: call for name, (call, _) in work.items()}, args.repeats)
        load = measure.others([before], [measure.usage()])
        measure.refuse(load, anyway=args.anyway)
    except measure.Loaded as error:
        parser.exit(1, f"Not run: {error}\n")
    report(args, {name: nbytes for name, (_, nbytes) in work.items()}, times, load)


RATIOS = (
    ("encode / memcpy bandwidth (target: at least 0.6)", "memcpy", "encode, update space", (20 + 1 / 8) / 8),
    (
        "separate operations / encode, time (target: at least 15)",
        "encode as separate torch operations",
        "encode, update space",
        1,
    ),
    (
        "decode + Adam / fused Adam, time (target: at most 1.3)",
        f"decode {WORKERS} workers + Adam",
        "torch.optim.Adam(fused=True)",
        1,
    ),
    (
        "a gradient in two bits / one bit of the update, encode, time (target: at most 1.3)",
        "encode a gradient in two bits",
        "encode, update space",
        1,
    ),
    (
        "a gradient in two bits / one bit and Adam, decode, time (target: at most 1.3)",
        f"decode {WORKERS} workers' gradients in two bits",
        f"decode {WORKERS} workers + Adam",
        1,
    ),
    (
        "LAMB: separate operations / kernels, time",
        "LAMB as separate torch operations",
        "LAMB, lengths and step of a layer",
        1,
    ),
)
"""Of a repeat: the ratio's name, seconds of what to those of what, times what."""


def report(args: argparse.Namespace, nbytes: dict[str, float], times: dict[str, list[float]], load: float) -> None:
    median = {name: statistics.median(values) for name, values in times.items()}
    rate = {name: nbytes[name] * args.elements / median[name] / 1e9 for name in median}
    table = Table(title=f"{args.elements:,} elements, {args.threads} thread(s), median of {args.repeats}")
    for heading in ("", "ns/element", "spread", "GB/s", "of memcpy's GB/s"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, value in median.items():
        spread = (max(times[name]) - min(times[name])) / value
        table.add_row(
            name,
            f"{1e9 * value / args.elements:.3f}",
            f"{100 * spread:.0f} %",
            f"{rate[name]:.1f}",
            f"{rate[name] / rate['memcpy']:.2f}",
        )
    paired = {label: [scale * x / y for x, y in zip(times[a], times[b], strict=True)] for label, a, b, scale in RATIOS}
    console = Console()
    console.print(table)
    for name, values in paired.items():
        found = measure.interval(values)
        console.print(f"{name}: [bold]{found.median:.2f}[/bold] ({found.low:.2f} to {found.high:.2f})")
    console.print(f"other processes used {load:.0%} of the cores")
    if args.json:
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        versions = {"horovod_onebit": __version__, "torch": torch.__version__, "numpy": np.__version__}
        result = {
            "machine": machine,
            "versions": versions,
            "elements": args.elements,
            "threads": args.threads,
            "seconds": times,
            "gigabytes_per_second": rate,
            "paired": paired,
            "load": load,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

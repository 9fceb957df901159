"""Writes docs/performance.md from benchmarks/results and the planner: `python -m benchmarks.report`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from horovod_onebit import costs
from horovod_onebit.tools import planner
from studies.report import DOCS, axes, save, table

RESULTS = Path(__file__).parent / "results"
KINDS = {"float32": "float32", "float16": "float16", "1 bit": "1-bit direct"}
PAGE = """# Performance

Made by `make bench` and `python -m benchmarks.report` on {machine}. The hosts are network namespaces
of that machine, with a core for each as far as there are cores, and `tc` limits the rate of their links in both
directions. Everything that a table compares ran in one job, in turns. Times vary with the machine, so compare ratios.

## When not to use it

Compression helps only if steps wait for the network. `horovod-onebit plan` predicts this from the number of
parameters, the workers, the link and the computing time of a step:

    horovod-onebit plan --parameters 110M --workers 16 --link 10gbit --compute-ms 250

## The exchange alone

{exchanges}

## Training

The networks are linear layers of one width, trained by AdamW. "no communication" is the step of one process with
`torch.optim.AdamW`. Over Gloo, PowerSGD crashes with more than one bucket, so it has one. Three and four hosts share
two cores: nothing can be faster there than "no communication".

{trainings}

## Local steps on slow links

Measured on {slow_machine} by `python -m benchmarks.link --slow`. `onebit local 16` is
`schedule=Local(every=16, doubling=0)`; milliseconds and megabytes are those of one step, averaged over a round.

{slow}

## Without a slow link

Two processes on one machine (`python -m benchmarks.step`). "wanted" is the aim of the project.

| | measured | wanted |
|---|---|---|
| compressed step, time to Horovod fp32's | {ratio:.2f} | 1.15 |
| Python's work for 300 small tensors, a step | {small:.1f} ms | 3 ms |
| peak memory beyond AdamW's, bytes a parameter | {memory:.1f} | 8 |

## Within a host

Two workers on one machine add up float32 gradients, each of them one half; nanoseconds per parameter
(`python -m benchmarks.local`). A hierarchical exchange uses the alltoall.

{local}

## The codec

{elements:,} elements, one thread (`python benchmarks/codec.py`).

{codec}

## Is the planner right?

{foretold}

## On a GPU

Not measured, because no GPU was available; `make test-gpu` measures on one. What limits the CUDA kernels can be
counted without a GPU: the instructions that a warp executes for 128 elements. The counts come from running the compiled
kernels on the CPU (PTX for compute capability 9.0; blocks of 1,024, messages of two workers).

    python -m tests.cuda.instructions > benchmarks/results/instructions.json

{instructions}

The last column is computed from the data of the GPU: 132 processors that start four instructions a cycle, at
1.755 GHz, and a copy rate of 4.3 TB/s. A division or a root counts as one instruction and takes about ten. Memory can
limit a kernel only where its instructions are clearly fewer. They are not in a server's second stage, which handles
about one n-th of the elements.

## Looking ahead

Predictions of the planner, in milliseconds a step: 110 M parameters, 250 ms of computing, eight workers on a host.
None of this was measured. The time of compression on a GPU is estimated from the bandwidth of its memory. A
hierarchical exchange adds up in host memory, from a GPU too, which takes 0.4 s of its step here.

{ahead}
"""


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def job(result: dict[str, Any], compute: float = 0.0) -> planner.Job:
    """The planner's view of a measurement. A core computes and communicates, so that nothing hides behind anything."""
    return planner.Job(
        parameters=result["parameters"],
        workers=result["workers"],
        link=planner.rate(result["rate"]),
        compute=compute,
        backward=0.0,
        workers_per_core=max(1.0, result["workers"] / result["cores"]),
    )


def predictions(results: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, float, float]]:
    """Measurement, kind of exchange, seconds predicted, seconds measured."""
    for result in results.values():
        foretold = {e.way: e for e in planner.plan(job(result)).estimates}
        for kind, way in KINDS.items():
            yield result, kind, foretold[way].transfer, result["exchange"][kind]["seconds"]["median"]


def steps_foretold(results: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, float, float]]:
    """Measurement, way, seconds of a step predicted, seconds measured; of local steps."""
    for result in results.values():
        found = result["training"]
        compute = found["no communication"]["seconds"]["median"]
        for way in [way for way in found if "local" in way]:
            told = planner.plan(replace(job(result, compute), every=int(way.split()[-1])))
            direct = next(e for e in told.estimates if e.way == KINDS["1 bit"])
            yield result, way, direct.step, found[way]["seconds"]["median"]


def slow(results: dict[str, Any]) -> str:
    told = {(id(result), way): seconds for result, way, seconds, _ in steps_foretold(results)}
    parts = []
    for result in results.values():
        found = result["training"]
        alone = found["no communication"]["seconds"]["median"]
        rows = []
        for way, row in found.items():
            seconds, said = row["seconds"]["median"], told.get((id(result), way))
            shares = [f"{100 * alone / seconds:.0f} %", f"{1e-6 * row['received']:.3f}"]
            rows.append([way, *_ms(row), *shares, "" if said is None else f"{1e3 * said:,.0f}"])
        heading = ["way", "ms a step", "10 to 90 %", "of it compute", "MB received", "predicted, ms"]
        parts += [f"### {_title(result)}", table(heading, rows)]
    return "\n\n".join(parts)


def _title(result: dict[str, Any]) -> str:
    rate = result["rate"].replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")
    return f"{1e-6 * result['parameters']:.0f} M parameters, {result['hosts']} hosts, {rate}"


def _ms(row: dict[str, Any]) -> list[str]:
    s = row["seconds"]
    return [f"{1e3 * s['median']:,.0f}", f"{1e3 * s['p10']:,.0f} to {1e3 * s['p90']:,.0f}"]


def exchanges(results: dict[str, Any]) -> str:
    rows = []
    for result in results.values():
        found = result["exchange"]
        base = found["float32"]
        for kind, row in found.items():
            faster = base["seconds"]["median"] / row["seconds"]["median"]
            fewer = base["received"] / row["received"]
            megabytes = f"{1e-6 * row['received']:.2f}"
            rows.append([_title(result), kind, *_ms(row), f"{faster:.1f}", megabytes, f"{fewer:.1f}"])
    return table(["", "exchange of", "ms", "10 to 90 %", "times faster", "MB received", "times fewer"], rows)


def trainings(results: dict[str, Any]) -> str:
    parts = []
    for result in results.values():
        found = result["training"]
        base = found["horovod fp32"]["seconds"]["median"]
        rows = [
            [way, *_ms(row), f"{base / row['seconds']['median']:.1f}", f"{1e-6 * row['received']:.2f}"]
            for way, row in found.items()
        ]
        heading = ["way", "ms a step", "10 to 90 %", "times Horovod fp32's speed", "MB received"]
        parts += [f"### {_title(result)}", table(heading, rows)]
    return "\n\n".join(parts)


def foretold(results: dict[str, Any]) -> str:
    rows = [
        [_title(result), kind, f"{1e3 * said:.0f}", f"{1e3 * seen:.0f}", f"{100 * (said / seen - 1):+.0f} %"]
        for result, kind, said, seen in predictions(results)
    ]
    return table(["", "exchange of", "predicted, ms", "measured, ms", "off by"], rows)


def ahead() -> str:
    """Step times to 1,024 workers: 110 M parameters, 250 ms of compute, eight workers on a host."""
    rows, figure_data = [], []
    for link in ("1gbit", "10gbit", "100gbit"):
        for workers in (16, 128, 1024):
            plan = planner.plan(
                planner.Job(
                    parameters=110_000_000, workers=workers, link=planner.rate(link), compute=0.25,
                    workers_per_host=8, device=costs.GPU,
                )
            )  # fmt: skip
            steps = [f"{1e3 * e.step:,.0f}" for e in plan.estimates]
            rows.append([link, f"{workers:,}", *steps, f"{plan.speedup:.1f}"])
            figure_data.append((link, workers, plan))
    figure, axis = axes(figsize=(6, 4))
    for link in ("1gbit", "10gbit", "100gbit"):
        points = [(workers, plan.speedup) for name, workers, plan in figure_data if name == link]
        axis.plot(*zip(*points, strict=True), marker="o", label=link)
    axis.set(xscale="log", xlabel="workers", ylabel="best 1-bit to best uncompressed, steps a second")
    axis.legend()
    names = ["link", "workers", *(e.way for e in figure_data[0][2].estimates), "times faster"]
    return table(names, rows) + "\n\n" + save(figure, "ahead")


def main() -> None:
    link, step, codec, local, slow_links = (load(name) for name in ("link", "step", "codec", "local", "slow"))
    size = step["memory"]["plain"]["parameters"]
    text = PAGE.format(
        machine=link["machine"],
        exchanges=exchanges(link["results"]),
        trainings=trainings(link["results"]),
        slow_machine=slow_links["machine"],
        slow=slow(slow_links["results"]),
        ratio=step["step"]["onebit"] / step["step"]["horovod fp32"],
        small=1e3 * (step["small"]["onebit"] - step["small"]["plain"]),
        memory=(step["memory"]["onebit"]["peak"] - step["memory"]["plain"]["peak"]) / size,
        local=table(
            ["", "MPI", "Gloo"],
            [[name, f"{local['mpi'][name]:.1f}", f"{local['gloo'][name]:.1f}"] for name in local["mpi"]],
        ),
        elements=codec["elements"],
        codec=codec_table(codec),
        foretold=foretold(link["results"]),
        instructions=instructions(load("instructions")),
        ahead=ahead(),
    )
    (DOCS / "performance.md").write_text(text)


def instructions(counts: dict[str, Any]) -> str:
    """Beside the instructions that an H200 can start while its memory moves the bytes."""
    starts_per_byte = 132 * 4 * 1.755e9 / 4.3e12
    rows = [
        [name, f"{one['bytes']:.1f}", str(one["instructions"]), f"{128 * one['bytes'] * starts_per_byte:.0f}"]
        for name, one in counts.items()
    ]
    return table(["kernel", "bytes an element", "instructions", "an H200 starts meanwhile"], rows)


def codec_table(codec: dict[str, Any]) -> str:
    return table(["", "ratio"], [[name, f"{value:.2f}"] for name, value in codec["ratios"].items()])


if __name__ == "__main__":
    main()

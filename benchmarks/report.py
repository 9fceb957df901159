"""Writes docs/performance.md from benchmarks/results and the planner: `python -m benchmarks.report`."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import measure, target
from benchmarks.link_job import FIT
from benchmarks.local import TCP
from horovod_onebit import costs
from horovod_onebit.tools import planner
from jobs.report import readable
from studies.report import DOCS, axes, save, table

RESULTS = Path(__file__).parent / "results"
ALONE = "no communication"
YIELDS = "Processes that wait yield their core (`OMPI_MCA_mpi_yield_when_idle=1`)."
KINDS = {"float32": "float32", "float16": "float16", "1 bit": "1-bit direct"}
PAGE = """# Performance

Made by `make bench` and `python -m benchmarks.report` on {machine}. The hosts are network namespaces
of that machine, with a core for each as far as there are cores, and `tc` limits the rate of their links in both
directions. Links have no delay of their own: the kernel of this machine cannot add one (it lacks `netem`).

All methods in a table are measured in one job. In each round every method takes one turn, in an order that changes,
and its time is divided by that of the baseline in the same round. Tables show medians of times, and medians of these
ratios with the 95 % confidence interval in brackets. "(2 of them)" says that there were only two rounds, fewer than
such an interval needs: the bracket is then their range. Rounds are repeated until every interval is within 10 % of its
median or the time is up. For most tables it was up: read the brackets. A run is refused, and a round is discarded, if
other processes use more than a tenth of the cores. Times differ between machines: look at the ratios. Targets are this
project's own, and not all of them are met.

## When not to use it

Compression helps only if steps wait for the network. `horovod-onebit plan` predicts this from the number of
parameters, the workers, the link and the computing time of a step:

    horovod-onebit plan --parameters 110M --workers 16 --link 10gbit --compute-ms 250

[Decisions](decisions.md#does-it-pay-at-all) has its answers for several models and links.

## The exchange alone

{exchanges}

## Training

The networks are linear layers of one width, trained by AdamW. "no communication" is `torch.optim.AdamW` on all hosts
at once, each alone; the time is that of the slowest host, as it is for all methods. One bit can be faster than that on
a fast link: it takes AdamW's step in its own kernel. One core computes that sooner than PyTorch's default
implementation, with which all other methods of these tables were measured; PyTorch's `fused=True` is as fast ([the
codec](#the-codec)), and [the tables below](#training-with-pytorchs-fused-adamw) have it. Over Gloo, PowerSGD crashes
with more than one bucket, so it has one. Three and four hosts share two cores.

{trainings}

{fused}{keras}## Local steps

On {local_machine} (`python -m benchmarks.link --local`). `onebit local 8` is `schedule=Local()`, with one exchange for
8 steps, after the second moments were frozen; before that, rounds have 4 steps, and the second moments travel once, 8
bytes a parameter. `diloco 16` is DiLoCo in float32 with rounds of 16 steps (Douillard et al. 2023: AdamW inside,
Nesterov's SGD outside with a learning rate of 0.7 and a momentum of 0.9), whose weights travel by Horovod's allreduce.
Milliseconds and megabytes are those of one step, averaged over a round of local steps. `hidden` adds `delay=4`: the
exchange runs during the next steps; when this was measured, all moments stayed each worker's own then, and now the
second ones are common. Local steps with frozen moments can be faster than steps without communication: they are taken
in our own kernel, and not in PyTorch's AdamW.

{local_steps}

{target}## Without a slow link

{step}

## Within a host

Two workers on one machine add up float32 gradients, each of them one half; nanoseconds per parameter, and the ratio to
the allreduce (`python -m benchmarks.local`). A hierarchical exchange uses the alltoall. The planner takes what an
allreduce costs over TCP for what it costs where spare cores do its work.

{local}

## The codec

{elements:,} elements, one thread (`python benchmarks/codec.py`).

{codec}

## Is the planner right?

{foretold}

Three and four hosts share two cores here, and what that costs was measured on the same machine. On 2 cores of an AMD
EPYC the exchanges of 2 hosts were within 24 % (here within 25 %), but for 4 hosts the predicted times were 14 to 53 %
too high (`python -m benchmarks.link --only 4-1gbit-25M --json link.json`): steps there were 4.5 times as fast as
Horovod's in float32 with one bit, 3.9 times with PowerSGD of rank 1, and 5.0 times without communication.

## On a GPU

{gpu}

What limits the kernels can be counted: the instructions that a warp executes for 128 elements. The counts come from
running the compiled kernels on the CPU (PTX for compute capability 9.0; blocks of 1,024, messages of two workers).

    python -m tests.cuda.instructions > benchmarks/results/instructions.json

{instructions}

The last column is computed from the data of the GPU: 132 processors that start four instructions a cycle, at
1.755 GHz, and a copy rate of 4.3 TB/s. A division or a root counts as one instruction and takes about ten. Memory can
limit a kernel only where its instructions are clearly fewer.

## Looking ahead

Predictions of the planner, in milliseconds a step: 110 M parameters, 250 ms of computing, eight workers on a host.
None of this was measured as a whole. `--device gpu` estimates the time of compression from the bandwidth of a GPU's
memory, and that of the sums within a host, which need NCCL in Horovod, from the bandwidth of PCIe 4.0. Without NCCL
(`--device gpu-without-nccl`) these sums are taken in host memory, and a hierarchical step is 0.25 to 0.37 s longer.

{ahead}
"""

FUSED = """## Training with PyTorch's fused AdamW

All methods but one bit take their steps by `torch.optim.AdamW(fused=True)`, which takes as long as our kernel, so that
what differs is communication (`python -m benchmarks.link --json benchmarks/results/link_fused.json`; 25 M parameters
at 1 and 10 Gbit/s with fewer methods, `--ways`, for 260 and 180 `--seconds`). The machine is another than that of the
tables above: compare within a table.

{trainings}

"""
KERAS = """## Training with Keras 3

The same model and links on {machine}, by TensorFlow with one core a host (`python -m benchmarks.link --framework tf`).
Stock Horovod has no optimizer that synchronises under Keras 3: its rows are a `tf.function` with a `tf.GradientTape`
whose gradients are averaged by `hvd.allreduce`. `mirrored fp32` is `tf.distribute.MultiWorkerMirroredStrategy` in such
a loop; `model.fit` does not run under it (Keras 3.15 stops with "Attempt to convert a value (PerReplica ...) with an
unsupported type to a Tensor"). `onebit` is `DistributedOptimizer` in such a loop and `onebit fit` the same in the train
function of `model.fit`, beside `no communication fit`. XLA compiles none of them.

{trainings}

"""
GPU = """One {card}, {parameters:,} parameters, messages of two workers, in one run. The bandwidth is beside that of a
copy by PyTorch, {copy:.1f} TB/s.

    python -m benchmarks.gpu

{kernels}

Encode and decode together take {fused:.1f} times as long as PyTorch's fused Adam alone; the same work by separate
operations of PyTorch takes {separate:.1f} times as long as they. A launch costs the host {encode:.0f} µs (encode) and
{decode:.0f} µs (decode).

Whole steps of one worker with 302 million parameters in 288 tensors (24 layers of a Transformer), over NCCL, in the
same run, backward pass apart:

{steps}

The host's work in Python takes most of the step with one bit; kernels and NCCL took 6 ms of it by PyTorch's profiler.
So it is the host's speed that counts: on two other machines with the same GPU this step took 55 and 93 ms, and that
in three bits, in blocks of 1,024, 89 and 132. Before messages of GPUs were made four times as large, it took 205 ms on
the first of these, and one in three bits, which the host compressed then, 1,120 ms. Since elements that have never had
a gradient stay where they are, encoding and decoding take longer: on the machine with 93 ms and without that, encode in
update space reached 73 % of the bandwidth of a copy, and decode and Adam 73 %."""
TARGETS = """## Seconds until a given test loss

A small GPT (`charlm`, 64 features) learns real text on two hosts of {machine}, with the same data, learning rate and
seeds for all methods (`python -m benchmarks.target`). The learning rate is constant, and all begin with it.

- `onebit default` is `DistributedOptimizer(optimizer)`: ten steps in float32, then gradients in three bits; at this
  constant rate one bit begins after 210 steps, which is later than the target is reached.
- `onebit` begins with 20 steps in float32 (`Recipe(warmup="exact")`, `warmup_steps=20`).
- `onebit three bits` begins with ten steps in float16 and ten in three bits (`Recipe(warmup="three_bit")`,
  `warmup_steps=20`, `compression=hvd.Compression.fp16`).
- `onebit local 8` is `schedule=Local()`: at so few steps, its second moments are not frozen yet, and its rounds have 4
  steps. `onebit local 16` is `Local(every=16, freeze=0)`, whose moments stay each worker's own, with rounds of 16.
- PowerSGD begins with two exact steps, the fewest that PyTorch's hook takes.
- `diloco 16` has the published outer rate and momentum; `diloco 16 mean` has an outer rate of 1 and no momentum, which
  [study 18](studies.md#18-diloco-and-powersgd-tuned) found to be the best for short runs.

All methods have `AdamW(fused=True)`. The tables of 10 and 100 Mbit/s are of another machine of this kind: compare
seconds within a table only. Evaluations are not timed. Brackets hold the smallest and the
largest of the seeds; ratios are taken within a seed.

{tables}

"""


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def there(name: str) -> bool:
    """Whether there are results of that name."""
    return (RESULTS / f"{name}.json").exists()


def known(found: dict[str, Any], machine: str = "") -> str:
    """How well the ratios of a table are known, in a sentence; and on which ``machine``, if that is to be said."""
    text = measure.describe(found)
    return f"On {machine}. {text[0].upper()}{text[1:]}" if machine else text


def times(rows: dict[str, Any], way: str, baseline: str, *, inverse: bool = False) -> str:
    """Seconds of ``way`` to those of ``baseline``, or the inverse: the median and its interval; nothing if ``baseline``
    was not measured."""
    if baseline not in rows:
        return ""
    if way == baseline:
        return "1"
    found = rows[way]["ratios"][baseline]
    values = [found[key] for key in ("median", "low", "high")]
    if inverse:
        values = [1 / value for value in (values[0], values[2], values[1])]
    return between(*values, found)


def between(middle: float, low: float, high: float, found: dict[str, Any]) -> str:
    """A median and its interval; where ``found`` has too few values for 95 %, their range and how many there are."""
    few = "" if found["confidence"] >= measure.CONFIDENCE else f" ({found['count']} of them)"
    span = f" [{_number(low)}, {_number(high)}]" if found["count"] > 1 else ""
    return f"{_number(middle)}{span}{few}"


def _number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


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
    """Measurement, kind of exchange, seconds foretold, seconds measured."""
    for result in results.values():
        foretold = {e.way: e for e in planner.plan(job(result)).estimates}
        for kind, way in KINDS.items() if "exchange" in result else ():
            yield result, kind, foretold[way].transfer, result["exchange"][kind]["seconds"]["median"]


def steps_foretold(results: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, float, float]]:
    """Measurement, way, seconds of a step foretold, seconds measured; of local steps whose exchange is waited for."""
    for result in results.values():
        found = result["training"]
        compute = found["no communication"]["seconds"]["median"]
        for way in [way for way in found if re.fullmatch(r"onebit local \d+", way)]:
            told = planner.plan(replace(job(result, compute), every=int(way.split()[-1])))
            direct = next(e for e in told.estimates if e.way == KINDS["1 bit"])
            yield result, way, direct.step, found[way]["seconds"]["median"]


def local_steps(results: dict[str, Any]) -> str:
    """A table for each number of parameters, then one for each link."""
    ordered = sorted(results.values(), key=lambda one: (-one["parameters"], planner.rate(one["rate"])))
    models = dict.fromkeys(result["parameters"] for result in ordered)
    parts = [_by_link([one for one in ordered if one["parameters"] == model]) for model in models]
    return "\n\n".join([*parts, *_link_by_link(ordered)])


def _by_link(results: list[dict[str, Any]]) -> str:
    """A step of each way, on all links."""
    rows = []
    for way in max((result["training"] for result in results), key=len):
        found = [result["training"].get(way) for result in results]
        ratios = ["" if row is None else _number(row["ratios"].get(ALONE, {"median": 1})["median"]) for row in found]
        received = statistics.median(row["received"] for row in found if row is not None)
        rows.append([way, *ratios, f"{1e-6 * received:.3f}"])
    heading = ["method", *(readable(result["rate"]) for result in results), "MB received"]
    title = f"### {1e-6 * results[0]['parameters']:.0f} M parameters, 2 hosts: a step, to one without communication"
    return "\n\n".join([title, table(heading, rows)])


def _link_by_link(results: list[dict[str, Any]]) -> list[str]:
    told = {(id(result), way): seconds for result, way, seconds, _ in steps_foretold(dict(enumerate(results)))}
    parts = []
    for result in results:
        found = result["training"]
        rows = []
        for way, row in found.items():
            said = told.get((id(result), way))
            megabytes = f"{1e-6 * row['received']:.3f}"
            foretold = "" if said is None else f"{1e3 * said:,.0f}"
            rows.append([way, _ms(row), times(found, way, "no communication"), megabytes, foretold])
        heading = ["method", "ms a step", 'to "no communication"', "MB received", "predicted, ms"]
        parts += [f"### {_title(result)}", _known(result, "training"), table(heading, rows)]
    return parts


def _known(result: dict[str, Any], part: str) -> str:
    text = known(result["measured"][part], result.get("machine", ""))
    return f"{text} {YIELDS}" if result.get("yields") else text


def _title(result: dict[str, Any]) -> str:
    return f"{1e-6 * result['parameters']:.0f} M parameters, {result['hosts']} hosts, {readable(result['rate'])}"


def _ms(row: dict[str, Any]) -> str:
    return f"{1e3 * row['seconds']['median']:,.{0 if row['seconds']['median'] >= 0.01 else 1}f}"


def exchanges(results: dict[str, Any]) -> str:
    rows, results = [], {name: result for name, result in results.items() if "exchange" in result}
    for result in results.values():
        found = result["exchange"]
        for kind, row in found.items():
            fewer = found["float32"]["received"] / row["received"]
            megabytes = f"{1e-6 * row['received']:.2f}"
            faster = times(found, kind, "float32", inverse=True)
            rows.append([_title(result), kind, _ms(row), faster, megabytes, f"{fewer:.1f}"])
    sentences = {_known(result, "exchange") for result in results.values()}
    text = sentences.pop() if len(sentences) == 1 else _all_known(results)
    return f"{text}\n\n" + table(["", "exchange of", "ms", "times faster", "MB received", "times fewer"], rows)


def _all_known(results: dict[str, Any]) -> str:
    """How well the ratios of several measurements are known."""
    machines = {result.get("machine", "") for result in results.values()}
    same = machines.pop() if len(machines) == 1 else ""
    parts = [f"On {same}.\n"] if same else []
    for result in results.values():
        parts.append(f"- {_title(result)}: {_known(result | {'machine': ''} if same else result, 'exchange')}")
    return "\n".join(parts)


def trainings(results: dict[str, Any]) -> str:
    parts = []
    for result in results.values():
        found = result["training"]
        rows = []
        for way, row in found.items():
            alone = FIT if way.endswith(" fit") and FIT in found else ALONE
            ratios = [times(found, way, alone), times(found, way, "horovod fp32", inverse=True)]
            rows.append([way, _ms(row), *ratios, f"{1e-6 * row['received']:.2f}"])
        heading = ["method", "ms a step", 'to "no communication"', "times Horovod fp32's speed", "MB received"]
        parts += [f"### {_title(result)}", _known(result, "training"), table(heading, rows)]
    return "\n\n".join(parts)


def fused() -> str:
    """The section on PyTorch's fastest AdamW; nothing as long as nothing was measured with it."""
    return FUSED.format(trainings=trainings(load("link_fused")["results"])) if there("link_fused") else ""


def keras() -> str:
    """The section on Keras; nothing as long as nothing was measured."""
    if not there("keras"):
        return ""
    found = load("keras")
    return KERAS.format(machine=found["machine"], trainings=trainings(found["results"]))


def step_rows() -> list[list[str]]:
    """What a step costs without a slow link: measured, and the target."""
    step = load("step")
    size, memory = step["memory"]["plain"]["parameters"], step["memory"]
    extra = {way: (memory[way]["peak"] - memory["plain"]["peak"]) / size for way in memory}
    return [
        ["compressed step, time to Horovod fp32's", times(step["step"]["ways"], "onebit", "horovod fp32"), "1.15"],
        ["Python's work for 300 small tensors, a step", f"{_milliseconds(step['small'])} ms", "3 ms"],
        ["peak memory beyond AdamW's, bytes a parameter", f"{extra['onebit']:.1f}", "8"],
        ["the same in the default warm-up", f"{extra['onebit warm-up']:.1f}", ""],
    ]


def _milliseconds(found: dict[str, Any]) -> str:
    """What a step of ours takes beyond plain training."""
    difference = found["ways"]["onebit"]["differences"]["plain"]
    return between(*(1e3 * difference[key] for key in ("median", "low", "high")), difference)


def keras_step_rows() -> list[list[str]]:
    found = load("step_keras")
    ways = found["step"]["ways"]
    return [
        ["compressed step in a loop, time to Horovod fp32's", times(ways, "onebit", "horovod fp32"), "1.1"],
        ["the same in `fit`", times(ways, "onebit fit", "horovod fp32"), "1.1"],
        ["a step of `fit` with 300 small variables, beyond plain Keras", f"{_milliseconds(found['small'])} ms", "3 ms"],
        ["the same in one process, which waits for nobody", f"{_milliseconds(found['alone'])} ms", "3 ms"],
    ]


def steps() -> str:
    """Both frameworks' tables."""
    heading = ["", "measured", "our target, at most"]
    text = f"Two processes on {load('step')['machine']} (`python -m benchmarks.step`). "
    parts = [text + known(load("step")["step"]), table(heading, step_rows())]
    if there("step_keras"):
        text = f"The same in Keras, on {load('step_keras')['machine']} (`python -m benchmarks.step --framework tf`). "
        parts += [text + known(load("step_keras")["step"]), table(heading, keras_step_rows())]
    return "\n\n".join(parts)


def local() -> str:
    found = load("local")
    backends = {"MPI": found["mpi"], "MPI over TCP": found[TCP], "Gloo": found["gloo"]}
    rows, heading = [], [""]
    for name in backends:
        heading += [name, "to its allreduce"]
    for way in (way for way in found["mpi"]["ways"] if not way.startswith("torch.distributed")):
        cells = [
            (f"{1e9 * one['ways'][way]['seconds']['median']:.1f}", times(one["ways"], way, "allreduce"))
            for one in backends.values()
        ]
        rows.append([way, *(text for pair in cells for text in pair)])
    text = "\n".join(f"- {name}: {known(one)}" for name, one in backends.items())
    return f"On {found['machine']}:\n\n{text}\n\n" + table(heading, rows)


def targets() -> str:
    """The section on the time to a test loss; nothing as long as nothing was measured."""
    if not there("target"):
        return ""
    found = load("target")
    parts = []
    for result in sorted(found["results"].values(), key=lambda one: planner.rate(one["rate"])):
        rows = []
        for way, one in target.rows(result).items():
            middle, low, high = one["seconds"]
            reached = "" if one["reached"] == one["seeds"] else f", {one['reached']} of {one['seeds']} got there"
            ratio = one["ratio"]
            spans = [f"{middle:.1f} [{low:.1f}, {high:.1f}]{reached}"]
            spans.append(f"{_number(ratio['median'])} [{_number(ratio['low'])}, {_number(ratio['high'])}]")
            rows.append([way, *spans, f"{one['steps']:.0f}", f"{1e-6 * one['received']:.2f}"])
        seeds = max(len(runs) for runs in result["ways"].values())
        load_text = f"{seeds} seeds; other processes used at most {target.load(result):.0%} of the cores."
        heading = ["method", "seconds", "to Horovod fp32's", "steps", "MB received"]
        title = f"### To a test loss of {result['target']}, {readable(result['rate'])}"
        parts += [title, load_text, table(heading, rows)]
    return TARGETS.format(machine=found["machine"], tables="\n\n".join(parts))


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
    names = ["link", "workers", *(e.way for e in figure_data[0][2].estimates), "times as fast as the better float"]
    return table(names, rows) + "\n\n" + save(figure, "ahead")


def main() -> None:
    link, codec, found = (load(name) for name in ("link", "codec", "local_steps"))
    text = PAGE.format(
        machine=link["machine"],
        exchanges=exchanges(link["results"]),
        trainings=trainings(link["results"]),
        fused=fused(),
        keras=keras(),
        local_machine=found["machine"],
        local_steps=local_steps(found["results"]),
        target=targets(),
        step=steps(),
        local=local(),
        elements=codec["elements"],
        codec=codec_table(codec),
        foretold=foretold(link["results"]),
        gpu=gpu(load("gpu")),
        instructions=instructions(load("instructions")),
        ahead=ahead(),
    )
    (DOCS / "performance.md").write_text(text)


def gpu(found: dict[str, Any]) -> str:
    """What a GPU was measured to do."""
    share, launch = "share of the copy's bandwidth", found["host microseconds a launch"]
    names = ("encode, update space", "encode, momentum space", "decode and Adam")
    kernels = [[name, f"{found[name]['ms']:.2f}", f"{found[name][share]:.0%}"] for name in names]
    steps = found["milliseconds of a step of 302 M parameters"]
    return GPU.format(
        card=found["card"],
        parameters=found["parameters"],
        copy=found["copy"]["TB/s"],
        kernels=table(["kernel", "ms", "bandwidth, of a copy's"], kernels),
        fused=found["both, as a multiple of fused Adam"],
        separate=found["separate operations, as a multiple of both"],
        encode=launch["encode"],
        decode=launch["decode and Adam"],
        steps=table(["step", "ms"], [[name, f"{ms:,.0f}"] for name, ms in steps.items()]),
    )


def instructions(counts: dict[str, Any]) -> str:
    """Beside the instructions that an H200 can start while its memory moves the bytes."""
    starts_per_byte = 132 * 4 * 1.755e9 / 4.3e12
    rows = [
        [name, f"{one['bytes']:.1f}", str(one["instructions"]), f"{128 * one['bytes'] * starts_per_byte:.0f}"]
        for name, one in counts.items()
    ]
    return table(
        [
            "kernel",
            "bytes an element",
            "instructions",
            "instructions that an H200 starts while its memory moves the bytes",
        ],
        rows,
    )


def codec_table(codec: dict[str, Any]) -> str:
    rows = []
    for name, values in codec["paired"].items():
        found = measure.interval(values)
        rows.append([name, between(found.median, found.low, found.high, found._asdict())])
    return table(["", "ratio"], rows)


if __name__ == "__main__":
    main()

"""Study 20: fine-tuning as it is mostly done: LoRA, gradients clipped by their norm, and float16; real workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from horovod_onebit.recipe import Recipe
from horovod_onebit.schedule import EXACT, Local, Schedule
from jobs.processes import horovodrun
from studies import report
from studies.language import float32
from studies.problem import need
from studies.rates import OTHERS, RUNS, Result, beside, in_a_name, kept
from studies.recipes import PRESETS

WORKERS, KIND, SEEDS = 2, OTHERS["source"], (0, 1, 2)
RANK, ALPHA, TARGETS = 8, 16, ("linear1", "linear2")
RATES = (4e-3, 1.6e-2, 6.4e-2)
"""Of exact Adam with LoRA, with the first seed: ``LORA_RATE`` should be the best of them."""
LORA_RATE = 1.6e-2
MAX_NORM = 0.5
"""Below the norm of the mean gradient in most steps of exact Adam."""
ROBUST = replace(PRESETS["robust"], exchange="direct")
ALL = replace(ROBUST, min_compressed_size=256)
THREE_BIT = replace(ROBUST, warmup="three_bit")


@dataclass(frozen=True)
class Way:
    """A row of a table: arguments of ``DistributedOptimizer``, and what is trained how.

    Attributes:
        max_norm: gradients are clipped by this norm in each step; None: never.
        half: the forward pass is in float16 (``torch.autocast``), and the loss is scaled (``torch.amp.GradScaler``).
    """

    text: str
    recipe: str | Recipe = ROBUST
    warmup: int | str | None = None
    schedule: Schedule | None = None
    lora: bool = True
    max_norm: float | None = None
    half: bool = False


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    way: Way
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """That of what is kept of it."""
        way = self.way
        kind = "lora" if way.lora else "half" if way.half else "clipped"
        return f"lora/{kind}-{in_a_name(way.text)}-{self.rate:g}-{self.seed}"


LORA = [
    Way("exact Adam", EXACT),
    Way("`robust`", warmup="auto"),
    Way("`robust`, `warmup_steps=20`, `min_compressed_size=256`", ALL, 20),
    Way("`robust`, `warmup_steps=50`, `min_compressed_size=256`", ALL, 50),
    Way('`warmup="three_bit"`, `warmup_steps=50`, `min_compressed_size=256`', replace(ALL, warmup="three_bit"), 50),
    Way("`schedule=Local()`, `min_compressed_size=256`", ALL, schedule=Local()),
]
CLIPPED = [
    Way("exact Adam", EXACT, lora=False, max_norm=MAX_NORM),
    Way("`robust`", warmup="auto", lora=False, max_norm=MAX_NORM),
    Way('`warmup="three_bit"`, `warmup_steps=50`', THREE_BIT, 50, lora=False, max_norm=MAX_NORM),
    Way("`schedule=Local()`", schedule=Local(), lora=False, max_norm=MAX_NORM),
]
HALF = [replace(way, max_norm=None, half=True) for way in CLIPPED]
HALF_SEEDS = SEEDS[:1]
"""A step in float16 takes several times as long on a CPU."""


def runs() -> list[Run]:
    """All of the study."""
    found = [Run(LORA[0], rate, SEEDS[0]) for rate in RATES]
    for seed in SEEDS:
        found += [Run(way, KIND.rates[0], seed) for way in CLIPPED]
        found += [Run(way, LORA_RATE, seed) for way in LORA]
    found += [Run(way, KIND.rates[0], seed) for way in HALF for seed in HALF_SEEDS]
    return list(dict.fromkeys(found))


def missing() -> list[Run]:
    """Those that have not been run."""
    return [run for run in runs() if not (RUNS / f"{run.name}.json").exists()]


def results() -> dict[Run, Result]:
    """Of each run; those that are missing are run first."""
    if missing():
        need(modules=("peft",))
        horovodrun(WORKERS, Path(__file__).with_name("lora_worker.py"), backend="gloo", timeout=4 * 3600)
    return {run: kept(run.name, dict) for run in runs()}


def _table(found: dict[Run, Result], first: str, ways: list[Way], rate: float, seeds: Sequence[int] = SEEDS) -> str:
    heading = [first, "times fewer bits, whole run", *(f"seed {seed}" for seed in seeds), "mean"]
    return report.table(heading, _rows(found, ways, rate, seeds))


def _rows(found: dict[Run, Result], ways: list[Way], rate: float, seeds: Sequence[int]) -> Iterator[list[str]]:
    exact = mean(found[Run(ways[0], rate, seed)]["loss"] for seed in seeds)
    for way in ways:
        of_seeds = [found[Run(way, rate, seed)] for seed in seeds]
        loss = mean(one["loss"] for one in of_seeds)
        row = [way.text, f"{float32(WORKERS) / mean(one['bits'] for one in of_seeds):.1f}"]
        row += [*(f"{one['loss']:.3f}" for one in of_seeds), f"{loss:.3f}" if way == ways[0] else beside(loss, exact)]
        yield row


def _clipped(found: dict[Run, Result]) -> str:
    """How often gradients were clipped, and from which norms."""
    runs = [one for run, one in found.items() if run.way.max_norm is not None]
    share = 100 * mean(one["clipped"] for one in runs)
    before, after = (mean(one[key] for one in runs if key in one) for key in ("norm before", "norm after"))
    return (
        f"{share:.0f} % of the steps were clipped. The norm was {before:.2f} in the last exact steps, and {after:.2f} "
        "in the first compressed ones, where it is the root mean square of the workers' own. What to see: one bit "
        "costs nothing that shows, and `Local()` less than one percent."
    )


def _skipped(found: dict[Run, Result]) -> str:
    """Of the runs in float16."""
    skipped = sum(one["skipped"] for run, one in found.items() if run.way.half)
    return f"{skipped} steps overflowed." if skipped else "No step overflowed."


def run() -> str:
    """The section of the page."""
    found, full = results(), KIND.rates[0]
    exact = [found[Run(LORA[0], rate, SEEDS[0])]["loss"] for rate in RATES]
    tried = ", ".join(f"{loss:.3f} at {rate:g}" for loss, rate in zip(exact, RATES, strict=True))
    sizes = sorted({RANK * size for size in (104, 416)})
    trained = found[Run(LORA[0], LORA_RATE, SEEDS[0])]["parameters"]
    text = [
        "## 20. LoRA, clipping and float16",
        f"The network, the texts and the {KIND.steps} steps of study 15, in a PyTorch job of {WORKERS} processes "
        f"(`horovodrun`), which exchange directly and have {KIND.batch // WORKERS} examples each. Test loss; in "
        "brackets, how far above exact Adam with the same settings.",
        f"LoRA of rank {RANK} (`peft`) for the linear layers of each block, {trained:,.0f} parameters at a rate of "
        f"{LORA_RATE:g} (exact Adam with the first seed: {tried}). Half of its matrices have {sizes[0]} elements, and "
        f"half {sizes[1]:,}: by default, the small ones travel in float32.",
        _table(found, "LoRA", LORA, LORA_RATE),
        "What to see: one bit costs LoRA nothing that shows, unless compression starts after 20 steps, when the rate "
        "has just risen. The gradients of LoRA's matrices A are zero in the first step, because B starts at zero, and "
        "then grow with B. `robust` alone leaves the small matrices in float32 in all steps, which is why it saves so "
        "little; `auto` took 30, 220 and 40 exact steps with the three seeds.",
        f"All parameters, at a rate of {full:g}; gradients are clipped by `optimizer.clip_grad_norm_({MAX_NORM:g})` in "
        f"each step. {_clipped(found)}",
        _table(found, f"clipped at {MAX_NORM:g}", CLIPPED, full),
        "The same without clipping, and with the forward pass in float16 (`torch.autocast`) and "
        f"`torch.amp.GradScaler` (a scale of 65,536). {_skipped(found)} What to see: with one seed, float16 "
        "changes nothing that shows.",
        _table(found, "float16", HALF, full, HALF_SEEDS),
    ]
    return "\n\n".join(text) + "\n"

"""Study 4: every recipe and rule on quadratics whose gradients differ in magnitude, with simulated workers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from horovod_onebit.kernels.reference import Array
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Rule
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.lamb import LAMB
from horovod_onebit.rules.sgd import SGD
from studies import pool, report
from studies.lockstep import Workers
from studies.recipes import PRESETS

LAYERS, WIDTH, STEPS, FREEZE, COLD_STEPS = 4, 512, 400, 60, 50
SPREADS = ("none", "layers 1e4", "layers 1e8", "elements 1e4", "elements 1e8", "5 % cold", "1e4, 5 % cold")
WORKERS = (1, 4, 16, 64, 256)
RULES: dict[str, Callable[[float], Rule]] = {
    "Adam": lambda lr: Adam(lr=0.05 * lr),
    "LAMB": lambda lr: LAMB(lr=0.02 * lr, eps=1e-8),
    "SGD": lambda lr: SGD(lr=0.05 * lr, momentum=0.9),
}
BLOCKS = dataclasses.replace(PRESETS["robust"], block_size=128, exchange="direct")
RECIPES: dict[str, Recipe | None] = {
    "exact": None,
    "paper": PRESETS["paper"],
    "fixed": PRESETS["fixed"],
    "no clip": dataclasses.replace(BLOCKS, clip=None),
    "robust": BLOCKS,
    "two stages": dataclasses.replace(BLOCKS, exchange="two_stage"),
    "one bit in two stages": dataclasses.replace(BLOCKS, exchange="two_stage", server_codec="sign"),
}
TWO_BITS = {"two-bit workers": dataclasses.replace(BLOCKS, codec="two_bit", exchange="two_stage")}


@dataclass(frozen=True)
class Cell:
    """One run of the study."""

    rule: str
    recipe: str
    spread: str
    workers: int
    freeze: int = FREEZE

    def exists(self) -> bool:
        """SGD has no denominator, so that its gradients must be of one magnitude; and of 256 servers, each would have
        eight elements, with a scale for each of them in the published recipes."""
        if self.rule == "SGD" and (self.spread != "none" or self.recipe in ("fixed", "no clip")):
            return False
        return self.workers <= 64 or self.recipe not in ("paper", "fixed", "no clip")


def magnitudes(spread: str) -> np.ndarray:
    """(LAYERS, WIDTH): what each element's gradient is multiplied by."""
    rng = np.random.default_rng(5)
    if spread.startswith("layers"):
        decades = math.log10(float(spread.split()[1]))
        return np.repeat(10.0 ** np.linspace(-decades / 2, decades / 2, LAYERS), WIDTH).reshape(LAYERS, WIDTH)
    if spread != "none" and not spread.startswith("5 %"):
        decades = math.log10(float(spread.replace(",", " ").split()[1 if "elements" in spread else 0]))
        return 10.0 ** rng.uniform(-decades, 0, (LAYERS, WIDTH))
    return np.ones((LAYERS, WIDTH))


def final_loss(cell: Cell) -> float:
    """Mean squared distance to the optimum after STEPS steps, on a cosine schedule; infinity if it diverged."""
    f32 = np.float32
    rng = np.random.default_rng(6)
    start, target = rng.standard_normal((2, LAYERS, WIDTH)).astype(f32)
    magnitude = magnitudes(cell.spread).astype(f32)
    cold = rng.random((LAYERS, WIDTH)) < (0.05 if "cold" in cell.spread else 0)
    recipe = (RECIPES | TWO_BITS)[cell.recipe]
    chosen: Recipe = recipe or BLOCKS  # which does not matter to exact steps

    noise = [np.random.default_rng(100 + rank) for rank in range(cell.workers)]
    layers = {f"{i}": start[i].copy() for i in range(LAYERS)}
    warmup = cell.freeze if recipe else STEPS
    workers = Workers(layers, RULES[cell.rule](1.0), cell.workers, warmup_steps=warmup, recipe=chosen)
    with np.errstate(all="ignore"):
        for step in range(STEPS):
            workers.rule = RULES[cell.rule](0.5 * (1 + math.cos(math.pi * step / STEPS)))
            distance = np.stack(list(layers.values())) - target
            factor = magnitude * (~cold | (step >= cell.freeze + COLD_STEPS))

            def gradients(rank: int, distance: Array = distance, factor: Array = factor) -> dict[str, Array]:
                noisy = distance + f32(0.5) * noise[rank].standard_normal(target.shape, dtype=f32)
                return dict(zip(layers, factor * noisy, strict=True))

            workers.step(gradients)
        loss = float(np.mean((np.stack(list(layers.values())) - target).astype(np.float64) ** 2))
    return loss if np.isfinite(loss) else math.inf


def cells() -> Iterator[Cell]:
    """All cells, the long ones first."""
    for workers in sorted(WORKERS, reverse=True):
        for rule in RULES:
            for recipe in RECIPES:
                for spread in SPREADS:
                    cell = Cell(rule, recipe, spread, workers)
                    if cell.exists():
                        yield cell


def most_workers() -> dict[str, list[tuple[Cell, Cell]]]:
    """With the most workers, by what is varied: the second stage, and the exact rule beside it, of each column."""
    varied = {f"{n} exact steps": ("two stages", n) for n in (FREEZE, 80, 100)}
    varied |= {f"{FREEZE} exact steps, workers of two bits": ("two-bit workers", FREEZE)}
    return {
        name: [
            (Cell(rule, recipe, spread, max(WORKERS), freeze), Cell(rule, "exact", spread, max(WORKERS), freeze))
            for rule in ("Adam", "LAMB")
            for spread in ("none", "5 % cold")
        ]
        for name, (recipe, freeze) in varied.items()
    }


def by_warmup(losses: dict[Cell, float]) -> str:
    """Losses as multiples of the exact rule's."""
    rows = [
        [name, *(report.number(losses[cell] / losses[exact]) for cell, exact in pairs)]
        for name, pairs in most_workers().items()
    ]
    return report.table(["", "Adam", "Adam, 5 % cold", "LAMB", "LAMB, 5 % cold"], rows)


def worst_ratio(losses: dict[Cell, float], rule: str, recipe: str, to: str) -> float:
    """The largest loss of ``recipe`` as a multiple of that of the exact rule ``to``, over all spreads and workers."""
    return max(
        loss / losses[dataclasses.replace(cell, rule=to, recipe="exact")]
        for cell, loss in losses.items()
        if (cell.rule, cell.recipe, cell.freeze) == (rule, recipe, FREEZE)
    )


def run() -> str:
    """The section of the page."""
    more = [cell for pairs in most_workers().values() for pair in pairs for cell in pair]
    losses = pool.results(final_loss, dict.fromkeys([*cells(), *more]))
    text = [
        "## 4. Gradients of different magnitude",
        f"{LAYERS} layers of {WIDTH}, noisy quadratics, {STEPS} steps with a cosine schedule, compression after "
        f"{FREEZE}. The loss is the mean squared distance to the optimum. `layers 1e4`: gradients of the layers "
        "differ by factors of up to 1e4; `elements 1e4`: those of single elements do. `cold`: 5 % of the elements get "
        f"no gradient until {COLD_STEPS} steps after compression has started. `no clip` is `robust` without its clip. "
        "Blocks of 128 for `robust`, since the layers are small. SGD has no denominator that equalises magnitudes, so "
        "it is studied without spread only.",
        "`robust` uses the direct exchange. In `two stages`, the servers compress a second time, with two bits by "
        "default: the mean less what all workers know of it, their momentum. With one bit they send the mean itself, "
        "and what is lost is of its size, however many workers there are: it shows from 4 workers on. `paper` also "
        "uses two stages, but with 64 servers it has a scale for every 8 elements here: five bits an element.",
    ]
    for rule in RULES:
        for workers in WORKERS:
            names = [r for r in RECIPES if Cell(rule, r, "none", workers).exists()]
            spreads = [s for s in SPREADS if Cell(rule, "exact", s, workers).exists()]
            rows = [[n, *(report.number(losses[Cell(rule, n, s, workers)]) for s in spreads)] for n in names]
            text += [f"### {rule}, {workers} worker{'s' if workers > 1 else ''}", report.table(["", *spreads], rows)]
    summary = [
        [rule, recipe, *(report.number(worst_ratio(losses, rule, recipe, to)) for to in (rule, "Adam"))]
        for rule in RULES
        for recipe in RECIPES
        if recipe != "exact" and Cell(rule, recipe, "none", 1).exists()
    ]
    heading = ["rule", "recipe", "to the exact rule's", "to Adam's"]
    text += ["### The worst cell: its loss as a multiple", report.table(heading, summary)]
    text += [
        f"### {max(WORKERS)} workers: a longer warm-up",
        "So many workers leave little noise, and what remains of the loss is not what one bit loses: the second moment "
        f"was frozen after {FREEZE} of {STEPS} steps, when gradients were larger, so that later steps are too short. "
        "With two bits from the workers, Adam's loss is the same; LAMB's is five times higher without cold elements, "
        "which is not explained. The loss of two stages, as a multiple of the exact rule's:",
        by_warmup(losses),
    ]
    return "\n\n".join(text) + "\n"

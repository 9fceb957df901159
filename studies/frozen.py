"""Study 13: exact Adam whose second moment is frozen where compression starts, beside ``robust``; tasks of study 6.

What compression does to the loss comes from three changes: the second moment is frozen, each worker's update is
clipped, and what travels is one bit. Here they are made one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np

from horovod_onebit.averages import all_finite
from horovod_onebit.kernels import reference
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rules import Tensor
from horovod_onebit.rules.adam import Adam
from studies import pool, report
from studies.lockstep import Workers
from studies.rates import SEEDS, Cell, Result, begin, beside, kept, losses, measured, rate_at, result_of
from studies.recipes import PRESETS

ROBUST = replace(PRESETS["robust"], exchange="direct")
UNCLIPPED = replace(ROBUST, clip=None)
GROUPS: dict[tuple[str, int, int | str], tuple[float, ...]] = {
    ("text", 4, "auto"): (2e-3, 4e-3, 8e-3),
    ("text", 16, "auto"): (4e-3,),
    ("text", 4, 20): (4e-3,),
    ("vgg", 4, "auto"): (5e-4, 1e-3),
    ("vgg", 16, "auto"): (1e-3,),
    ("vgg", 4, 20): (5e-4, 1e-3),
}
"""Rates by task, workers and warm-up."""
INTRODUCTION = (
    "Compression changes three things once the warm-up is over. Here they are made one after the other, in the runs of "
    f"study 6, means of {len(SEEDS)} seeds:\n\n"
    "- `frozen`: float32 means as before, by Adam whose second moment stays as it is, its bias corrected by the steps "
    "that it has seen. No bits.\n"
    "- `frozen, clipped`: each worker's update is clipped besides, as by `robust`, and the float32 mean of the updates "
    "makes the step.\n"
    "- `one bit`: `robust`, which compresses these updates; with 16 workers in two stages.\n\n"
    f"Tensors of fewer than {ROBUST.min_compressed_size:,} elements continue with exact Adam in all of them. The table "
    "shows the test loss, in brackets how far it is above exact Adam's. `bit alone` says how far one bit ends above "
    "`frozen, clipped`, in brackets the least and the most of the seeds."
)
CONCLUSION = (
    "What to see: where one bit ends below exact Adam on text, the frozen second moment does that, and without any "
    'compression Adam ends there, too. After `"auto"`, clip and bit change nothing that shows with 4 workers. With 16 '
    "they take back more than half of what the frozen second moment gains. After 20 exact steps the bit costs more, "
    "and a second moment frozen so early does harm unless the updates are clipped. On vgg most runs without a clip "
    "diverge: elements that have had no gradient until then (study 3) are divided by epsilon. There, seeds differ more "
    "than clipped runs with and without bits."
)


class Uncompressed(Workers):
    """Those of ``lockstep``, who after the warm-up average their contributions in float32.

    Small tensors continue with exact steps, as those that a recipe does not compress.
    """

    def _compressed(self, grads: list[Mapping[str, Array]]) -> bool:
        if not all(all_finite(own.values()) for own in grads):
            return False
        for tensor in self.tensors:
            of_workers = [own[tensor.name] for own in grads]
            if tensor.weight.size < self.context.recipe.min_compressed_size:
                self.rule.exact_step(tensor, average(of_workers), self.context)
            else:
                self._frozen_step(tensor, of_workers)
        return True

    def _frozen_step(self, tensor: Tensor, grads: list[Array]) -> None:
        formula, p = self.rule.contribution(tensor, self.context)
        sent = [reference.contribution(formula, p, tensor.arrays(grad)) for grad in grads]
        self.context.kernels.move(*self.rule.motion(tensor, self.context), tensor.arrays(average(sent)))
        tensor.step += 1


def average(arrays: list[Array]) -> Array:
    """The mean, summed in the order of ranks."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return np.asarray(total / np.float32(len(arrays)))


@dataclass(frozen=True)
class Frozen:
    """A run of float32 means, its second moment frozen after ``steps``. Without ``clip``, the number of workers does
    not matter: the step is linear in the gradients."""

    cell: Cell
    steps: int
    clip: bool


def train(run: Frozen) -> Result:
    """Test loss and accuracy of ``run``."""
    import torch

    cell = run.cell
    (model, *_), data, options = begin(cell)
    named = dict(model.named_parameters())
    weights = {name: p.detach().numpy().reshape(-1) for name, p in named.items()}
    recipe, rule = ROBUST if run.clip else UNCLIPPED, Adam(lr=cell.rate)
    workers = Uncompressed(weights, rule, cell.workers, warmup_steps=run.steps, recipe=recipe)
    for step in range(cell.kind.steps):

        def gradients(rank: int, step: int = step) -> dict[str, Array]:
            loss, _ = losses(model, *data.batch(options, step, rank, cell.workers))
            found = torch.autograd.grad(loss, list(named.values()))
            return {name: g.numpy().reshape(-1) for name, g in zip(named, found, strict=True)}

        workers.rule = replace(rule, lr=rate_at(cell, step))
        with np.errstate(all="ignore"):
            workers.step(gradients)
    return result_of(model, data)


def result(run: Frozen) -> Result:
    """The result of ``run``."""
    cell, kind = run.cell, f"clip-{run.cell.workers}" if run.clip else "no-clip"
    return kept(f"frozen/{cell.task}-{cell.rate:g}-{run.steps}-{kind}-{cell.seed}", lambda: train(run))


@dataclass(frozen=True)
class Row:
    """A row of the table: a task with ``workers``, a warm-up and a rate."""

    task: str
    workers: int
    warmup: int | str
    rate: float

    @property
    def cells(self) -> list[Cell]:
        """One for each seed, with one bit."""
        return [Cell(self.task, self.workers, self.rate, self.warmup, seed) for seed in SEEDS]


ROWS = [Row(*group, rate) for group, rates in GROUPS.items() for rate in rates]


def plain(cell: Cell) -> Cell:
    """Of the exact run that ``cell`` is compared with; study 6 has it with 4 workers."""
    return replace(cell, workers=4, warmup=None)


def frozen(cell: Cell, steps: int, *, clip: bool) -> Frozen:
    """The run of float32 means that is to be compared with ``cell``, which was exact for ``steps``."""
    return Frozen(replace(plain(cell), workers=cell.workers if clip else 4), steps, clip)


@dataclass(frozen=True)
class Losses:
    """Test losses by seed: of exact Adam, with its second moment frozen, with a clip besides, with one bit besides."""

    exact: list[float]
    frozen: list[float]
    clipped: list[float]
    bit: list[float]
    exact_steps: float


def found_losses() -> dict[Row, Losses]:
    """The losses of each row."""
    cells = [cell for row in ROWS for cell in row.cells]
    bits = pool.results(measured, cells)
    exact = pool.results(measured, dict.fromkeys(map(plain, cells)))
    steps = {cell: int(found["exact_steps"]) for cell, found in bits.items()}
    free, clipped = ({cell: frozen(cell, steps[cell], clip=clip) for cell in cells} for clip in (False, True))
    without = pool.results(result, dict.fromkeys([*free.values(), *clipped.values()]))
    return {
        row: Losses(
            [exact[plain(cell)]["loss"] for cell in row.cells],
            [without[free[cell]]["loss"] for cell in row.cells],
            [without[clipped[cell]]["loss"] for cell in row.cells],
            [bits[cell]["loss"] for cell in row.cells],
            mean(steps[cell] for cell in row.cells),
        )
        for row in ROWS
    }


def above(found: list[float], reference: list[float]) -> str:
    """How far the mean of ``found`` is above that of ``reference``."""
    return f"{100 * (mean(found) / mean(reference) - 1):+.1f} %"


def compared(found: list[float], exact: list[float]) -> str:
    """The mean of ``found``, and how far it is above ``exact``; or how many runs have diverged."""
    diverged = sum(not math.isfinite(loss) for loss in found)
    return f"{diverged} of {len(found)} diverged" if diverged else beside(mean(found), mean(exact))


def _cells_of(row: Row, of: Losses) -> list[str]:
    shares = [100 * (bit / clipped - 1) for bit, clipped in zip(of.bit, of.clipped, strict=True)]
    alone = f"{above(of.bit, of.clipped)} ({min(shares):+.1f} to {max(shares):+.1f})"
    steps = f"{of.exact_steps:.0f}" + (' (`"auto"`)' if row.warmup == "auto" else "")
    head = [row.task, str(row.workers), steps, f"{row.rate:g}", f"{mean(of.exact):.3f}"]
    return [*head, *(compared(losses, of.exact) for losses in (of.frozen, of.clipped, of.bit)), alone]


def parts(row: Row, of: Losses) -> str:
    """By what the loss of ``row`` differs from exact Adam's, one change after the other, in percent of exact Adam's."""
    exact = mean(of.exact)
    frozen, clip, bit = (
        100 * (mean(after) - mean(before)) / exact
        for before, after in ((of.exact, of.frozen), (of.frozen, of.clipped), (of.clipped, of.bit))
    )
    share = 100 * (mean(of.bit) / exact - 1)
    difference = f"{abs(share):.1f} % {'below' if share < 0 else 'above'}"
    return (
        f"With {row.workers} workers at a rate of {row.rate:g}, one bit ends {difference} exact Adam: of this, "
        f"freezing the second moment makes {frozen:+.1f} points, the clip {clip:+.1f}, the bit {bit:+.1f}."
    )


def run() -> str:
    """The section of the page."""
    found = found_losses()
    head = ["task", "workers", "exact steps", "rate", "exact Adam", "frozen", "frozen, clipped", "one bit", "bit alone"]
    shown = [row for row in ROWS if (row.task, row.warmup) == ("text", "auto")]
    text = [
        "## 13. Frozen, clipped, one bit",
        INTRODUCTION,
        report.table(head, (_cells_of(row, of) for row, of in found.items())),
        CONCLUSION,
        "\n".join(f"- {parts(row, found[row])}" for row in shown),
    ]
    return "\n\n".join(text) + "\n"

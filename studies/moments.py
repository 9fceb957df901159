"""Study 7: other ways to keep the second moment once compression has started; the tasks are those of study 6."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.formulas import denominator
from horovod_onebit.kernels.reference import num_blocks
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Tensor
from horovod_onebit.rules.adam import Adam
from horovod_onebit.warmup import Phase
from studies import pool, report
from studies.rates import Cell, Hook, Result, beside, kept, train
from studies.rates import measured as measured_cell
from studies.recipes import PRESETS

RATES, WORKERS, SEED = (2e-3, 4e-3, 8e-3), 4, 0
BLOCK = 1024
FIRST, LONGEST = 10, 320
"""Compressed steps until workers average for the first time; their number doubles each time, up to ``LONGEST``."""
ROBUST = replace(PRESETS["robust"], exchange="direct")


def mean_of(optimizer: NumpyOptimizer, name: str, values: NDArray) -> NDArray:
    """The workers' mean. Collective, and exact: a study of what could be gained at best need not save."""
    total = optimizer.engine.collectives.allreduce(np.ascontiguousarray(values, np.float32), f"study.{name}").wait()
    return np.asarray(total / np.float32(optimizer.engine.collectives.size))


def power(x: NDArray) -> NDArray:
    """Each element's share of the power of its block."""
    padded = np.zeros(num_blocks(x.size, BLOCK) * BLOCK, np.float64)
    padded[: x.size] = np.square(x, dtype=np.float64)
    return np.repeat(padded.reshape(-1, BLOCK).mean(axis=1), BLOCK)[: x.size]


def ratio(optimizer: NumpyOptimizer, name: str, grad: NDArray) -> NDArray:
    """By how much the mean gradient has less power than the workers' own: from 1, all signal, to 1/n, all noise."""
    own = mean_of(optimizer, f"{name}.power", power(grad))
    common = power(mean_of(optimizer, f"{name}.mean", grad))
    return np.asarray(common / np.maximum(own, 1e-38), np.float32)


def averaging(compressed_steps: int) -> bool:
    """Whether workers average after so many compressed steps."""
    k, rest = divmod(compressed_steps, FIRST)
    doubling = rest == 0 and k > 0 and k & (k - 1) == 0
    return (doubling and compressed_steps <= LONGEST) or (compressed_steps > 0 and compressed_steps % LONGEST == 0)


class Follow:
    """What all hooks share: they are given one compressed tensor at a time."""

    def __init__(self) -> None:
        self.compressed_steps = 0

    def __call__(self, optimizer: NumpyOptimizer, grads: dict[str, NDArray]) -> None:
        if optimizer.phase is Phase.WARMUP or not optimizer.engine.tensors:
            return
        assert isinstance(optimizer.rule, Adam)
        self.compressed_steps += 1
        for tensor in optimizer.engine.tensors:
            self.follow(optimizer, optimizer.rule, tensor, grads[tensor.name].reshape(-1))

    def follow(self, optimizer: NumpyOptimizer, rule: Adam, tensor: Tensor, grad: NDArray) -> None:
        raise NotImplementedError


class Live(Follow):
    """That of the mean gradient in each step, which no compressed exchange can know."""

    def follow(self, optimizer: NumpyOptimizer, rule: Adam, tensor: Tensor, grad: NDArray) -> None:
        squares = np.square(mean_of(optimizer, tensor.name, grad))
        assert tensor.variance is not None
        tensor.variance[:] += np.float32(1 - rule.beta2) * (squares - tensor.variance)
        tensor.variance_steps += 1


class Own(Follow):
    """Each worker divides by its own, of its own gradients times ``ratio``; they are averaged now and then."""

    def follow(self, optimizer: NumpyOptimizer, rule: Adam, tensor: Tensor, grad: NDArray) -> None:
        v = tensor.variance
        assert v is not None
        before = denominator(rule.scalars(tensor, optimizer.engine.context), v)
        squares = ratio(optimizer, tensor.name, grad) * np.square(grad)
        v += np.float32(1 - rule.beta2) * (squares - v)
        tensor.variance_steps += 1
        if averaging(self.compressed_steps):
            v[:] = mean_of(optimizer, f"{tensor.name}.own", v)
        # Workers have momentum / D in common.
        tensor.momentum *= denominator(rule.scalars(tensor, optimizer.engine.context), v) / before


class Renewed(Follow):
    """At growing intervals it is replaced by the mean of the workers' own, times ``ratio``."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[str, NDArray] = {}

    def follow(self, optimizer: NumpyOptimizer, rule: Adam, tensor: Tensor, grad: NDArray) -> None:
        assert tensor.variance is not None
        own = self.own.setdefault(tensor.name, tensor.variance.copy())
        own += np.float32(1 - rule.beta2) * (ratio(optimizer, tensor.name, grad) * np.square(grad) - own)
        if averaging(self.compressed_steps):
            tensor.variance[:] = mean_of(optimizer, f"{tensor.name}.own", own)
            own[:] = tensor.variance
            tensor.variance_steps = tensor.step + 1


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    text: str
    warmup: int | None = 20
    recipe: Recipe = ROBUST
    hook: Callable[[], Hook] | None = None


TIGHT = replace(ROBUST, clip=1.0)
WAYS = {
    "exact": Way("exact Adam", warmup=None),
    "frozen-20": Way("frozen after 20 steps"),
    "frozen-60": Way("frozen after 60 steps", warmup=60),
    "frozen-200": Way("frozen after 200 steps", warmup=200),
    "renewed": Way("frozen after 20, renewed after 10, 20, 40, ... more from the workers' own", hook=Renewed),
    "own": Way("each worker its own, alive, averaged after 10, 20, 40, ... steps", hook=Own),
    "own-clip": Way("the same, clip 1", recipe=TIGHT, hook=Own),
    "live": Way("alive, that of the mean gradient", hook=Live),
    "live-clip": Way("the same, clip 1", recipe=TIGHT, hook=Live),
    "clip": Way("frozen after 20, clip 1", recipe=TIGHT),
    "two-bit": Way("frozen after 20, two bits", recipe=replace(ROBUST, codec="two_bit")),
}


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    way: str
    rate: float


def measured(run: Run) -> Result:
    """The result of ``run``; study 6 has some of them."""
    way = WAYS[run.way]
    cell = Cell("text", WORKERS, run.rate, way.warmup, SEED)
    if way == Way(way.text, way.warmup):
        return measured_cell(cell)
    return kept(f"moments/{run.way}-{run.rate:g}-{SEED}", lambda: train(cell, way.recipe, way.hook))


def _rows(found: dict[Run, Result]) -> Iterator[list[str]]:
    exact = {rate: found[Run("exact", rate)]["loss"] for rate in RATES}
    yield [WAYS["exact"].text, *(f"{exact[rate]:.3f}" for rate in RATES)]
    for name in list(WAYS)[1:]:
        yield [WAYS[name].text, *(beside(found[Run(name, rate)]["loss"], exact[rate]) for rate in RATES)]


def run() -> str:
    """The section of the page."""
    found = pool.results(measured, (Run(way, rate) for way in WAYS for rate in RATES))
    text = [
        "## 7. Should the second moment be updated after the warm-up?",
        f"The task `text` of study 6, {WORKERS} workers, one seed. The table shows the test loss, and in brackets how "
        "far it is above exact Adam's at the same rate. Where workers keep second moments of their own, these are of "
        "their own gradients g, times sum(mean(g)^2) / mean(sum(g^2)): sums over blocks of 1,024 elements, means over "
        "the workers. In this study they know that ratio exactly in each step, and what they average is not "
        "compressed. A one-bit exchange cannot know the second moment of the mean gradient in each step. So these rows "
        "show the most that such methods could gain.",
        report.table(["second moment", *(f"rate {rate:g}" for rate in RATES)], _rows(found)),
    ]
    return "\n\n".join(text) + "\n"

"""A trial of recipes on simulated workers: ``horovod-onebit simulate``.

A network of two tanh layers learns to imitate another one with random weights. Each worker has its own samples and
noise. The whole algorithm runs as it would between real workers, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from horovod_onebit import checks, simulation
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.exchange import Collectives
from horovod_onebit.kernels.reference import Array
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.recipe import Recipe, resolve
from horovod_onebit.rules.adam import Adam
from horovod_onebit.schedule import EXACT
from horovod_onebit.tools import show

WIDTHS = (32, 64, 64, 8)
TEST_EXAMPLES = 512
POINTS = 50


@dataclass(frozen=True)
class Trial:
    """What is trained, and how.

    Attributes:
        workers, workers_per_host: simulated processes in all, and on each host.
        steps, warmup_steps: optimizer steps of a run, and those of the warm-up.
        lr, batch_size: of Adam; of one worker.
        noise: standard deviation of the errors in each worker's targets.
        seed: of weights, samples and noise.
    """

    workers: int = 4
    workers_per_host: int = 1
    steps: int = 400
    warmup_steps: int = 20
    lr: float = 3e-3
    batch_size: int = 16
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("workers", "workers_per_host", "steps", "warmup_steps", "batch_size"):
            checks.whole(name, getattr(self, name))
        checks.whole("seed", self.seed, least=0)
        if not checks.finite("lr", self.lr) > 0:
            raise ConfigurationError(f"lr={self.lr!r}: expected a positive number")
        checks.finite("noise", self.noise)


@dataclass(frozen=True)
class Outcome:
    """One recipe's run: the mean squared error on examples without noise at the end, and a worker's traffic.

    ``loss`` is NaN where the run diverged. ``bytes`` are of the whole run, ``last_bytes`` of its last step. ``curve``
    has some ``POINTS`` of the run: steps taken, bytes sent until then, and the loss.
    """

    recipe: str
    loss: float
    bytes: int
    last_bytes: int
    fp32_bytes: int
    replicas_equal: bool
    curve: tuple[tuple[int, int, float], ...] = ()


def recipe_of(recipe: str | Recipe, exchange: str | None) -> Recipe:
    """That of a run with ``recipe``, which may be ``"exact"``; ``exchange`` replaces its own."""
    chosen = Recipe(warmup="exact") if recipe == EXACT else resolve(recipe)
    return chosen if exchange is None else replace(chosen, exchange=exchange)


def run(
    trial: Trial,
    recipe: str | Recipe,
    *,
    exchange: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Train with ``recipe``, or with plain Adam for ``"exact"``. ``progress`` is called with the number of steps done.

    ``exchange`` replaces the recipe's own.
    """
    chosen, warmup = recipe_of(recipe, exchange), trial.steps if recipe == EXACT else trial.warmup_steps

    every = max(1, trial.steps // POINTS)
    curve: list[tuple[int, int, float]] = []

    def worker(collectives: Collectives) -> tuple[dict[str, Array], Any]:
        weights = _network(np.random.default_rng(trial.seed + 1))
        optimizer = NumpyOptimizer(weights, Adam(trial.lr), collectives=collectives, warmup_steps=warmup, recipe=chosen)
        teacher = _network(np.random.default_rng(trial.seed))
        rng = np.random.default_rng([trial.seed, 2, collectives.rank])
        for step in range(trial.steps):
            x = rng.standard_normal((trial.batch_size, WIDTHS[0]), np.float32)
            noise = np.float32(trial.noise) * rng.standard_normal((trial.batch_size, WIDTHS[-1]), np.float32)
            optimizer.step(_gradients(weights, x, _forward(teacher, x)[-1] + noise))
            if collectives.rank == 0 and (step + 1) % every == 0:
                curve.append((step + 1, optimizer.engine.traffic.total, _test_loss(trial, weights)))
            if progress and collectives.rank == 0 and (step + 1) % 10 == 0:
                progress(step + 1)
        return weights, optimizer.engine.traffic

    with np.errstate(over="ignore", invalid="ignore"):
        results = simulation.run(worker, trial.workers, workers_per_host=trial.workers_per_host)
        weights, traffic = results[0]
        loss = _test_loss(trial, weights)
    equal = all(np.array_equal(weights[n], other[n], equal_nan=True) for other, _ in results for n in weights)
    name = recipe if isinstance(recipe, str) else "own"
    return Outcome(name, loss, traffic.total, traffic.step, traffic.fp32_total, equal, tuple(curve))


def plot(outcomes: Sequence[Outcome], path: str) -> None:
    """Draw the loss of each run by step, and by the bytes that a worker has sent; needs matplotlib."""
    figure = show.figure(9.6, 4.0)
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for one in outcomes:
        steps, sent, loss = zip(*one.curve, strict=True)
        by_step.plot(steps, loss, label=one.recipe)
        by_bytes.plot([1e-6 * n for n in sent], loss, label=one.recipe)
    by_step.set(yscale="log", xlabel="steps", ylabel="loss on examples without noise")
    by_bytes.set(xscale="log", xlabel="megabytes sent by a worker")
    by_step.legend()
    show.save(figure, path)


def _network(rng: np.random.Generator) -> dict[str, Array]:
    weights: dict[str, Array] = {}
    for i, (inputs, outputs) in enumerate(pairwise(WIDTHS)):
        scale = np.float32(1 / np.sqrt(inputs))
        weights[f"{i}.weight"] = scale * rng.standard_normal((inputs, outputs), np.float32)
        weights[f"{i}.bias"] = np.zeros(outputs, np.float32)
    return weights


def _forward(weights: dict[str, Array], x: Array) -> list[Array]:
    """Each layer's values, the input first."""
    values, last = [x], len(WIDTHS) - 2
    for i in range(last + 1):
        z = values[-1] @ weights[f"{i}.weight"] + weights[f"{i}.bias"]
        values.append(z if i == last else np.tanh(z))
    return values


def _gradients(weights: dict[str, Array], x: Array, y: Array) -> dict[str, Array]:
    values = _forward(weights, x)
    back = 2 * (values[-1] - y) / np.float32(y.size)
    gradients: dict[str, Array] = {}
    for i in reversed(range(len(WIDTHS) - 1)):
        gradients[f"{i}.weight"], gradients[f"{i}.bias"] = values[i].T @ back, back.sum(0)
        back = (back @ weights[f"{i}.weight"].T) * (1 - values[i] ** 2)
    return gradients


def _test_loss(trial: Trial, weights: dict[str, Array]) -> float:
    rng = np.random.default_rng([trial.seed, 3])
    x = rng.standard_normal((TEST_EXAMPLES, WIDTHS[0]), np.float32)
    teacher = _network(np.random.default_rng(trial.seed))
    return float(np.square(_forward(weights, x)[-1] - _forward(teacher, x)[-1]).mean())

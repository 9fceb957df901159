"""Predicts from the gradients of a few steps whether 1-bit training of a model works, and with which recipe.

1-bit Adam diverges where magnitudes spread (Tarasov and Ershov 2022, figs. 3 to 5): the codec gives all elements that
share a scale one magnitude, and each is then divided by its own D. A report therefore gives for every layer the spread,
the share of elements that have had no gradient yet, and the longest first compressed step of any element, as a multiple
of an ordinary step of Adam.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.checks import mapping
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels.reference import Array
from horovod_onebit.recipe import PRESETS, Recipe
from horovod_onebit.tools import show

RISKY, DIVERGES = 10.0, 1000.0
"""Steps longer than Adam's by these factors slow training down, or make it diverge."""


@dataclass(frozen=True)
class Layer:
    """One parameter.

    Attributes:
        mean, median: of the magnitudes of its gradients, over elements and steps.
        spread: the 99th percentile of the elements' root mean square gradients over the 1st, unseen ones left out.
        unseen: share of elements whose gradient was 0 in every step.
        blow_up: by recipe, the longest step of any element as a multiple of Adam's.
    """

    name: str
    size: int
    mean: float
    median: float
    spread: float
    unseen: float
    blow_up: dict[str, float]


@dataclass(frozen=True)
class Report:
    """All layers of a model, in order."""

    steps: int
    layers: tuple[Layer, ...]

    @property
    def spread(self) -> float:
        """The largest mean magnitude of any layer over the smallest."""
        means = [layer.mean for layer in self.layers if layer.mean > 0]
        return max(means) / min(means) if means else 1.0

    def worst(self, recipe: str) -> float:
        """The longest step of any element of the model under ``recipe``, as a multiple of Adam's."""
        return max(layer.blow_up[recipe] for layer in self.layers)

    def verdict(self, recipe: str) -> str:
        """``"fine"``, ``"risky"`` or ``"diverges"``."""
        return verdict(self.worst(recipe))

    def text(self, table: Callable[[list[str], list[list[str]]], str] = show.plain) -> str:
        """A table and the verdicts. ``table`` draws headers and rows."""
        if not self.layers:
            return f"{self.steps} steps, and no layer in any of them: there is nothing to report."
        recipes = list(self.layers[0].blow_up)
        head = ["layer", "size", "mean |g|", "median |g|", "spread", "unseen", *recipes]
        rows = [
            [
                layer.name,
                f"{layer.size:,}",
                f"{layer.mean:.1e}",
                f"{layer.median:.1e}",
                f"{layer.spread:.1e}",
                f"{100 * layer.unseen:.1f} %",
                *(f"{layer.blow_up[recipe]:.1e}" for recipe in recipes),
            ]
            for layer in self.layers
        ]
        lines = [
            table(head, rows),
            "",
            f"{self.steps} steps. Mean magnitudes differ by {self.spread:.1e} between layers.",
            "The last columns: the longest step of any element, as a multiple of Adam's, if compression starts now.",
            *(f"{recipe}: {self.verdict(recipe)}" for recipe in recipes),
        ]
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Mean and median magnitudes by layer, as in the paper's figs. 3 to 5; needs matplotlib."""
        figure = show.figure(max(6, 0.25 * len(self.layers)), 4)
        axes = figure.subplots()
        positions = range(len(self.layers))
        for what in ("mean", "median"):
            axes.plot(positions, [getattr(layer, what) or math.nan for layer in self.layers], "o-", ms=3, label=what)
        axes.set(yscale="log", ylabel="magnitude of the gradient", xlabel="layer")
        axes.legend()
        show.save(figure, path)

    def as_dict(self) -> dict[str, Any]:
        """Everything, in plain types; with the verdicts."""
        recipes = self.layers[0].blow_up if self.layers else {}
        return dataclasses.asdict(self) | {"verdicts": {recipe: self.verdict(recipe) for recipe in recipes}}

    def save(self, path: str | Path) -> None:
        """As JSON, for ``horovod-onebit diagnose``."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def load(path: str | Path) -> Report:
        """Read what ``save`` wrote. Raises ``ConfigurationError`` for anything else."""
        try:
            data = json.loads(Path(path).read_text())
            found = Report(data["steps"], tuple(Layer(**layer) for layer in data["layers"]))
            found.text()  # which needs numbers where they belong
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path}: expected a report that Report.save wrote ({error})") from error
        return found


def verdict(blow_up: float) -> str:
    """The verdict on a step that is ``blow_up`` times as long as Adam's."""
    return "fine" if blow_up < RISKY else "risky" if blow_up < DIVERGES else "diverges"


class Collector:
    """Collects statistics of gradients over a few steps; 8 bytes a parameter. ::

        collector = Collector()
        for ...:                      # 20 steps of your training, at any stage of it
            ...
            collector.add({name: gradient.numpy() for ...})
        print(collector.report().text())

    ``eps`` is that of the optimizer.
    """

    def __init__(self, *, eps: float = 1e-8, recipes: Mapping[str, Recipe] = PRESETS) -> None:
        self.eps = eps
        self.recipes = dict(recipes)
        self.steps = 0
        self._sums: dict[str, Array] = {}
        self._squares: dict[str, Array] = {}
        self._medians: dict[str, list[float]] = {}

    def add(self, gradients: Mapping[str, NDArray[Any]]) -> None:
        """One step's gradients, by name of the parameter. A name that is missing had none in this step."""
        for name, gradient in mapping("gradients", gradients, "names to arrays").items():
            g = np.abs(np.asarray(gradient, np.float32).reshape(-1))
            if not np.isfinite(g).all():
                raise ConfigurationError(f"the gradient of {name!r} has NaN or Inf: expected finite ones")
            if name not in self._sums:
                self._sums[name], self._squares[name] = np.zeros_like(g), np.zeros_like(g)
                self._medians[name] = []
            if self._sums[name].size != g.size:
                raise ConfigurationError(
                    f"the gradient of {name!r} has {g.size} elements, before {self._sums[name].size}"
                )
            self._sums[name] += g
            self._squares[name] += g * g
            self._medians[name].append(float(np.median(g)))
        self.steps += 1

    def report(self) -> Report:
        """The report on the steps so far. Raises ``ConfigurationError`` before the first one."""
        if not self._sums:
            raise ConfigurationError("no gradients yet: call add() after a backward pass, in some 20 steps")
        return Report(self.steps, tuple(self._layer(name) for name in self._sums if self._sums[name].size))

    def _layer(self, name: str) -> Layer:
        v = self._squares[name] / np.float32(self.steps)
        root = np.sqrt(v)
        seen = root[root > 0]
        low, high = np.percentile(seen, [1, 99]) if seen.size else (1.0, 1.0)
        return Layer(
            name=name,
            size=v.size,
            mean=float(self._sums[name].mean() / self.steps),
            median=float(np.mean(self._medians[name])),
            spread=float(high / low),
            unseen=1 - seen.size / v.size,
            blow_up={key: self._blow_up(root, recipe) for key, recipe in self.recipes.items()},
        )

    def _blow_up(self, root: Array, recipe: Recipe) -> float:
        """``scale / D`` of the worst element, where an ordinary element of Adam moves by 1."""
        if root.size < recipe.min_compressed_size:
            return 1.0
        d = np.sqrt(np.square(root, dtype=np.float64) + self.eps) if recipe.eps_inside_sqrt else root + self.eps
        if recipe.space == "momentum":
            size = recipe.block_size_for(root.size)
            blocks = [slice(i, i + size) for i in range(0, root.size, size)]
            return float(max(np.sqrt(np.mean(np.square(root[b], dtype=np.float64))) / d[b].min() for b in blocks))
        # In update space every element of a block moves by one scale, which the clip bounds.
        if (root > 0).all():
            return 1.0 if recipe.clip is None else min(recipe.clip, 1.0)
        if recipe.clip is not None:
            return recipe.clip
        return float(root[root > 0].mean() / self.eps) if root.any() else 1.0

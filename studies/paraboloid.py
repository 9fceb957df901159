"""Study 1: the paper's figures 1 and 6. Minimise x^2 + y^2 from (0.1 k, 0.1), with one scale for both elements."""

from __future__ import annotations

import dataclasses

import numpy as np

from horovod_onebit import simulation
from horovod_onebit.exchange import Collectives
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules.adam import Adam
from studies import report
from studies.recipes import PRESETS

KS = (1, 10, 100)
STARTS = (10, 100)
STEPS = 3000
LR = 1e-2
PAPER = (
    "In the paper, compressed Adam approaches the optimum more slowly than Adam (its fig. 1) and diverges as soon as "
    "one argument is ten times the other (fig. 6). The first result is confirmed. The second one is not, if the error "
    "is the difference to the *scaled* sign: then the smaller argument oscillates and comes back, after a number of "
    "steps that grows with k, for every recipe in which the two elements share one scale. If the error is the "
    "difference to the unscaled sign, as the paper prints it (lines 9 and 13), Adam diverges at once, for every k."
)
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def descend(recipe: Recipe | None, start: int, k: float) -> np.ndarray:
    """The function's value after each step; ``recipe`` None is Adam itself."""

    def worker(collectives: Collectives) -> np.ndarray:
        weights = {"xy": np.array([0.1 * k, 0.1], np.float32)}
        chosen = dataclasses.replace(recipe or PRESETS["robust"], min_compressed_size=1)
        warmup = start if recipe else STEPS
        optimizer = NumpyOptimizer(weights, Adam(lr=LR), collectives=collectives, warmup_steps=warmup, recipe=chosen)
        values = []
        for _ in range(STEPS):
            optimizer.step({"xy": 2 * weights["xy"]})
            values.append(float(np.square(weights["xy"], dtype=np.float64).sum()))
        return np.array(values)

    with np.errstate(all="ignore"):
        return simulation.run(worker, 1)[0]


def as_printed(start: int, k: float) -> np.ndarray:
    """The same by Algorithm 1 as it is printed, with the error against the unscaled sign."""
    w, m, v, error, server_error = np.array([0.1 * k, 0.1]), *np.zeros((4, 2))
    values, d = [], np.ones(2)
    for t in range(1, STEPS + 1):
        g = 2 * w
        if t <= start:
            m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
            d = np.sqrt(v / (1 - BETA2**t)) + EPS
        else:
            c = BETA1 * m + (1 - BETA1) * g + error
            y = np.sqrt(np.mean(c * c)) * np.sign(c)
            error = c - np.sign(c)
            y = y + server_error
            m = np.sqrt(np.mean(y * y)) * np.sign(y)
            server_error = y - np.sign(y)
        w = w - LR / (1 - BETA1**t) * m / d
        values.append(float(np.sum(w * w)))
    return np.array(values)


def run() -> str:
    """The section of the page."""
    figure, panels = report.axes(ncols=len(KS), figsize=(12, 3.8), sharex=True)
    rows = []
    for panel, k in zip(panels, KS, strict=True):
        curves = {"Adam": descend(None, STEPS, k)}
        with np.errstate(all="ignore"):
            curves["as printed, compressed after 100"] = as_printed(100, k)
        for name in ("paper", "fixed", "robust"):
            for start in STARTS:
                curves[f"{name}, compressed after {start}"] = descend(PRESETS[name], start, k)
        for index, (label, values) in enumerate(curves.items()):
            style = "--" if label.endswith(f"after {STARTS[0]}") else "-"
            panel.plot(values, label=label, color=f"C{(index + 2) // 2}", ls=style, lw=1)
        panel.set(yscale="log", ylim=(1e-30, 1e6), title=f"from ({0.1 * k:g}, 0.1)", xlabel="step")
        rows.append([str(k), *(report.number(float(np.median(v[-100:]))) for v in curves.values())])
    panels[0].legend(fontsize=7)
    text = report.table(["k", *curves], rows)
    return (
        f"## 1. Minimising x² + y²\n\n{PAPER}\n\n{report.save(figure, 'paraboloid')}\n\nThe table shows the "
        f"median of the last 100 of {STEPS} values, with a constant learning rate of {LR}:\n\n{text}\n"
    )

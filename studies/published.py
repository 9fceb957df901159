"""Study 5: the ``paper`` recipe against the published pseudo-code, transcribed line by line in NumPy.

Algorithm 1 of Tarasov and Ershov 2022, which is that of Tang et al. 2021, with sign(0) = +1 and the error against the
scaled sign. Each server's share is a vector of its own, with one scale from each worker and one back.
"""

from __future__ import annotations

import numpy as np

from horovod_onebit import simulation
from horovod_onebit.exchange import Collectives
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam
from studies import report
from studies.recipes import PRESETS

SIZE, STEPS, FREEZE, LR, BETA1, BETA2, EPS = 4096, 200, 20, 1e-3, 0.9, 0.999, 1e-8
f32 = np.float32


def gradient(weights: np.ndarray, rank: int, step: int) -> np.ndarray:
    """A noisy quadratic's, the same for both."""
    noise = np.random.default_rng([rank, step]).standard_normal(SIZE).astype(f32)
    return weights - f32(1) + f32(0.3) * noise


def compress(x: np.ndarray, workers: int) -> np.ndarray:
    """C(x), share by share: the norm divided by the root of the length, with the signs of x."""
    shares = np.array_split(x, workers)
    scales = [f32(np.sqrt(np.mean(np.square(share, dtype=np.float64)))) for share in shares]
    return np.concatenate([np.where(x < 0, -s, s) for x, s in zip(shares, scales, strict=True)])


def transcription(workers: int) -> np.ndarray:
    """The weights after STEPS steps of Algorithm 1; the numbers are its lines."""
    w, m, v = np.zeros(SIZE, f32), np.zeros(SIZE, f32), np.zeros(SIZE, f32)
    errors = [np.zeros(SIZE, f32) for _ in range(workers)]
    server_error = np.zeros(SIZE, f32)
    for t in range(1, STEPS + 1):
        grads = [gradient(w, rank, t) for rank in range(workers)]
        if t <= FREEZE:  # 2: Adam
            g = sum(grads[1:], grads[0]) / f32(workers)
            m = m + f32(1 - BETA1) * (g - m)
            v = f32(BETA2) * v + f32(1 - BETA2) * g * g
            d = np.sqrt(v) / f32(np.sqrt(1 - BETA2**t)) + f32(EPS)
        else:
            sent = []
            for i, g in enumerate(grads):
                c = f32(BETA1) * m + f32(1 - BETA1) * g + errors[i]  # 7
                sent.append(compress(c, workers))  # 8
                errors[i] = c - sent[i]  # 9
            y = sum(s / f32(workers) for s in sent) + server_error  # 11
            m = compress(y, workers)  # 12
            server_error = y - m  # 13
            d = np.sqrt(v * f32(1 / (1 - BETA2**FREEZE))) + f32(EPS)
        w = w - f32(LR / (1 - BETA1**t)) * (m / d)  # 16
    return w


def ours(workers: int) -> np.ndarray:
    """The weights after STEPS steps of the ``paper`` recipe, on simulated workers."""

    def worker(collectives: Collectives) -> np.ndarray:
        weights = {"w": np.zeros(SIZE, f32)}
        rule = Adam(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS)
        optimizer = NumpyOptimizer(weights, rule, collectives=collectives, warmup_steps=FREEZE, recipe=PRESETS["paper"])
        for t in range(1, STEPS + 1):
            optimizer.step({"w": gradient(weights["w"], collectives.rank, t)})
        return weights["w"]

    return simulation.run(worker, workers)[0]


def difference(workers: int) -> float:
    """The largest difference of any weight."""
    return float(np.abs(transcription(workers) - ours(workers)).max())


def run() -> str:
    """The section of the page."""
    rows = [[str(n), f"{difference(n):.1e}"] for n in (1, 2, 4)]
    return (
        "## 5. Against the published pseudo-code\n\n"
        f"The `paper` recipe is compared with a line-by-line transcription of Algorithm 1 in NumPy: {SIZE} parameters, "
        f"{STEPS} steps, compressed after {FREEZE}.\n\n"
        + report.table(["workers", "largest difference of a weight"], rows)
        + "\n"
    )

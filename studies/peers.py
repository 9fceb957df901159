"""What the studies compare with: PowerSGD in each step; DiLoCo and SparseLoCo in rounds of local steps.

All by their papers' formulas, the exchange computed exactly and not sent. The inner optimizer is Adam, as in our runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.optimizer import NumpyOptimizer
from studies.moments import mean_of
from studies.rates import Cell, Result, begin, losses, rate_at, result_of


class PowerSGD:
    """A hook that replaces gradients of two dimensions and more by PowerSGD's approximation of their mean.

    Vogels et al. 2019 (arXiv 1905.13727), Algorithms 1 and 2, the second factor kept from step to step. All of it is
    linear in the gradients: with the workers' mean error, one computation serves any number of workers. The first
    ``start`` steps are exact, as PyTorch's hook has them.
    """

    def __init__(self, rank: int, start: int) -> None:
        self.rank, self.start, self.steps = rank, start, 0
        self.errors: dict[str, NDArray] = {}
        self.factors: dict[str, NDArray] = {}

    def __call__(self, optimizer: NumpyOptimizer, grads: dict[str, NDArray]) -> None:
        self.steps += 1
        if self.steps <= self.start:
            return
        for name, grad in grads.items():
            if grad.ndim > 1:
                mean = mean_of(optimizer, name, grad.reshape(-1)).reshape(len(grad), -1)
                grad[...] = self._approximate(name, mean).reshape(grad.shape)

    def _approximate(self, name: str, mean: NDArray) -> NDArray:
        if name not in self.factors:
            draw = np.random.default_rng(len(self.factors))  # the same on all workers
            rank = min(self.rank, *mean.shape)
            self.factors[name] = draw.standard_normal((mean.shape[1], rank)).astype(np.float32)
            self.errors[name] = np.zeros_like(mean)
        matrix = mean + self.errors[name]
        left, _ = np.linalg.qr(matrix @ self.factors[name])
        self.factors[name] = matrix.T @ left
        found = left @ self.factors[name].T
        self.errors[name] = matrix - found
        return found


def powersgd_bits(shapes: Sequence[tuple[int, ...]], rank: int) -> float:
    """Bits that a worker sends in a step of PowerSGD, for each parameter."""
    bits = 0
    for shape in shapes:
        rows, columns = shape[0], math.prod(shape[1:])
        bits += 32 * (rank * (rows + columns) if len(shape) > 1 and rank < min(rows, columns) else rows * columns)
    return bits / sum(map(math.prod, shapes))


class Outer(Protocol):
    """What becomes of a round."""

    def __call__(self, moved: Sequence[NDArray]) -> NDArray:
        """The change of the common weights, (k,), from what each worker's steps have changed, n arrays (k,)."""
        ...

    def bits(self, size: int) -> float:
        """That a worker sends in a round of ``size`` parameters, in all."""
        ...


class DiLoCo:
    """Float32 and Nesterov's SGD outside (Douillard et al. 2023, arXiv 2311.08105, Algorithm 1 and its section 3)."""

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum
        self.velocity: Any = 0.0

    def __call__(self, moved: Sequence[NDArray]) -> NDArray:
        mean = np.mean(moved, axis=0)
        self.velocity = self.momentum * self.velocity + mean
        return np.asarray(self.lr * (mean + self.momentum * self.velocity))

    def bits(self, size: int) -> float:
        return 32.0 * size


class SparseLoCo:
    """The largest 64 of each 4,096 elements, in two bits, with a decayed error (Sarfi et al. 2025, arXiv 2508.15706).

    Two bits are a sign and one of two magnitudes: the means of those above and below the mean magnitude. An index takes
    12 bits more.
    """

    CHUNK, KEPT, DECAY = 4096, 64, 0.95

    def __init__(self) -> None:
        self.errors: list[NDArray] | None = None

    def __call__(self, moved: Sequence[NDArray]) -> NDArray:
        before = self.errors or [np.zeros_like(one) for one in moved]
        sums = [np.float32(self.DECAY) * error + one for error, one in zip(before, moved, strict=True)]
        sent = [self._coded(one) for one in sums]
        self.errors = [one - code for one, code in zip(sums, sent, strict=True)]
        return np.asarray(np.mean(sent, axis=0))

    def _coded(self, values: NDArray) -> NDArray:
        padded = np.zeros(-(-values.size // self.CHUNK) * self.CHUNK, np.float32)
        padded[: values.size] = values
        chunks = padded.reshape(-1, self.CHUNK)
        largest = np.argpartition(-np.abs(chunks), self.KEPT, axis=1)[:, : self.KEPT]
        chosen = np.take_along_axis(chunks, largest, axis=1)
        magnitudes = np.abs(chosen)
        above = magnitudes > magnitudes.mean(axis=1, keepdims=True)
        levels = [
            np.sum(magnitudes * part, axis=1, keepdims=True) / np.maximum(part.sum(axis=1, keepdims=True), 1)
            for part in (above, ~above)
        ]
        coded = np.zeros_like(chunks)
        np.put_along_axis(coded, largest, np.sign(chosen) * np.where(above, *levels), axis=1)
        return coded.reshape(-1)[: values.size]

    def bits(self, size: int) -> float:
        return size / self.CHUNK * (self.KEPT * 14 + 64)


def train(cell: Cell, every: int, outer: Outer) -> Result:
    """One run in rounds of ``every`` local steps of Adam, then ``outer``; as ``studies.rates.train`` otherwise."""
    import torch

    models, data, options = begin(cell)
    inner = [torch.optim.Adam(model.parameters(), lr=cell.rate) for model in models]
    weights, steps = _flat(models[0]), cell.kind.steps
    for start in range(0, steps, every):
        moved = []
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            _load(model, weights)
            for step in range(start, min(start + every, steps)):
                optimizer.param_groups[0]["lr"] = rate_at(cell, step)
                optimizer.zero_grad()
                loss, _ = losses(model, *data.batch(options, step, rank, cell.workers))
                loss.backward()
                optimizer.step()
            moved.append(_flat(model) - weights)
        weights = weights + outer(moved).astype(np.float32)
    _load(models[0], weights)
    bits = outer.bits(weights.size) * -(-steps // every) / weights.size / steps
    return result_of(models[0], data, exact_steps=0, bits=bits)


def _flat(model: Any) -> NDArray:
    from torch.nn.utils import parameters_to_vector

    found: NDArray = parameters_to_vector(model.parameters()).detach().numpy()
    return found


def _load(model: Any, weights: NDArray) -> None:
    import torch
    from torch.nn.utils import vector_to_parameters

    # A copy: the parameters become parts of the vector, which the model's steps change.
    vector_to_parameters(torch.from_numpy(weights.copy()), model.parameters())

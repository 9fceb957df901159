"""The compressed step as a part of a graph: what the engine reads goes in as tensors, what it changes comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_onebit.tf.collectives import view
from horovod_onebit.tf.compressor import Compressor, Progress, Values
from horovod_onebit.tf.graph import adopt, host_values, in_rounds

Pairs = Sequence[tuple[Any, Any]]
"""Gradients and their variables."""


def compressed(compressor: Compressor, large: Pairs, small: Pairs) -> tuple[Any, list[Any], list[tuple[Any, Any]]]:
    """One run of the engine over ``large``, float32; the gradients of ``small`` are averaged on the way. Collective.

    Returns whether the step is taken, the means of ``small``'s gradients, and variables with their new values.
    """
    optimizer, adapter = compressor.optimizer, compressor.adapter
    indices = tuple(optimizer._get_variable_index(v) for _, v in large)
    momenta = [adapter.momentum(optimizer, i) for i in indices]
    variances = [adapter.variance(optimizer, i) for i in indices]
    changed = [v for _, v in large] + [m for m in momenta if m is not None]

    def work(learning_rate: Any, steps: Any, compressed: Any, *tensors: Any) -> tuple[bool, list[Any]]:
        flat = iter([view(t).reshape(-1) for t in tensors[: -len(small) or None]])
        values = Values(
            [next(flat) for _ in large],
            [next(flat) for _ in large],
            [None if m is None else next(flat) for m in momenta],
            [None if v is None else next(flat) for v in variances],
        )
        progress = Progress(float(learning_rate), int(steps), int(steps) - int(compressed))
        exact = [view(t) for t in tensors[len(tensors) - len(small) :]]
        return compressor.step(indices, values, exact, progress)

    def collect(_: Any) -> list[Any]:
        taken, means = compressor.coroutine.result
        compressor.coroutine.result = None
        new = [t.weight for t in compressor.tensors]
        new += [t.momentum for t, m in zip(compressor.tensors, momenta, strict=True) if m is not None]
        return [np.bool_(taken), *means, *map(adopt, new)]

    now = [optimizer.learning_rate, optimizer._iterations, optimizer._compressed_steps]
    state = [v for v in (*(v for _, v in large), *momenta, *variances) if v is not None]
    inputs = [*now, *(g for g, _ in large), *state, *(g for g, _ in small)]
    done = in_rounds(compressor.coroutine, compressor.collectives, work, [tf.convert_to_tensor(i) for i in inputs])
    outputs = [tf.bool, *(g.dtype for g, _ in small), *(tf.float32 for _ in changed)]
    taken, *results = host_values(collect, [done], outputs)
    taken.set_shape([])
    means = [tf.ensure_shape(mean, v.shape) for mean, (_, v) in zip(results, small, strict=False)]
    new = [(v, tf.reshape(value, v.shape)) for v, value in zip(changed, results[len(small) :], strict=True)]
    return taken, means, new

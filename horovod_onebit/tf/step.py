"""The compressed step as a part of a graph: what the engine reads goes in as tensors, what it changes comes out.

    agreement -> begin -> for each section, as soon as its gradients are there: encode -> rounds -> decode -> conclude

TensorFlow runs host functions in the order in which they were traced: sections follow each other. Weights change at the
end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_onebit.tf.collectives import view
from horovod_onebit.tf.compressor import Compressor, Progress, Values
from horovod_onebit.tf.graph import adopt, host_values, in_rounds, in_turns
from horovod_onebit.tf.sections import Section, sections

Pairs = Sequence[tuple[Any, Any]]
"""Gradients and their variables."""


def compressed(compressor: Compressor, large: Pairs, small: Pairs) -> tuple[Any, list[Any], list[tuple[Any, Any]]]:
    """One run of the engine over ``large``, float32; the gradients of ``small`` are averaged on the way. Collective.

    Returns whether the step is taken, the means of ``small``'s gradients, and variables with their new values.
    """
    if compressor.in_one_piece:
        return _at_once(compressor, large, small)
    begun = _begin(compressor, large, small)
    members = sections([int(np.prod(v.shape)) for _, v in large], compressor.engine.recipe)
    arrived = []
    for number, numbers in enumerate(members):
        section = Section(compressor, members, number)
        grads = [large[i][0] for i in numbers] + ([g for g, _ in small] if section.last else [])
        arrived.append(_travel(compressor, section, len(numbers), begun, grads, str(number)))
    return _collect(compressor, large, small, arrived, compressor.conclude)


def _begin(compressor: Compressor, large: Pairs, small: Pairs) -> Any:
    """Begin the step, of the state before it; a tensor that is there when that is done."""
    optimizer = compressor.optimizer
    indices, momenta, variances = _state(compressor, large)
    clips = optimizer.clipnorm or optimizer.global_clipnorm
    grads = [g for g, _ in (*large, *small)] if clips else []

    def work(learning_rate: Any, steps: Any, compressed: Any, *tensors: Any) -> None:
        arrays = iter([view(t) for t in tensors])
        values = _values(arrays, large, momenta, variances)
        compressor.begin_step(indices, values, _progress(learning_rate, steps, compressed), len(small), list(arrays))

    return in_rounds(compressor.coroutine, compressor.collectives, work, _inputs(compressor, large, grads))


def _at_once(compressor: Compressor, large: Pairs, small: Pairs) -> tuple[Any, list[Any], list[tuple[Any, Any]]]:
    """``compressed`` in one piece, when all gradients are there."""
    indices, momenta, variances = _state(compressor, large)

    def work(learning_rate: Any, steps: Any, compressed: Any, *tensors: Any) -> Any:
        arrays = iter([view(t) for t in tensors])
        values = _values(arrays, large, momenta, variances)
        grads = [next(arrays).reshape(-1) for _ in large]
        return compressor.step(indices, values, grads, list(arrays), _progress(learning_rate, steps, compressed))

    def end() -> Any:
        result, compressor.coroutine.result = compressor.coroutine.result, None
        return result

    inputs = _inputs(compressor, large, [g for g, _ in (*large, *small)])
    done = in_rounds(compressor.coroutine, compressor.collectives, work, inputs)
    return _collect(compressor, large, small, [done], end)


def _inputs(compressor: Compressor, large: Pairs, grads: Sequence[Any]) -> list[Any]:
    """What ``_progress`` and ``_values`` are read of, and ``grads``."""
    optimizer = compressor.optimizer
    now = [optimizer.learning_rate, optimizer._iterations, optimizer._compressed_steps]
    _, momenta, variances = _state(compressor, large)
    state = [v for v in (*(v for _, v in large), *momenta, *variances) if v is not None]
    return [tf.convert_to_tensor(i) for i in (*now, *state, *grads)]


def _progress(learning_rate: Any, steps: Any, compressed: Any) -> Progress:
    return Progress(float(learning_rate), int(steps), int(steps) - int(compressed))


def _values(arrays: Iterator[Any], large: Pairs, momenta: Sequence[Any], variances: Sequence[Any]) -> Values:
    return Values(
        [next(arrays).reshape(-1) for _ in large],
        [None if m is None else next(arrays).reshape(-1) for m in momenta],
        [None if v is None else next(arrays).reshape(-1) for v in variances],
    )


def _state(compressor: Compressor, large: Pairs) -> tuple[tuple[int, ...], list[Any], list[Any]]:
    """The numbers of the variables, and those that hold their momenta and second moments, None where there is none."""
    optimizer, adapter = compressor.optimizer, compressor.adapter
    indices = tuple(optimizer._get_variable_index(v) for _, v in large)
    return indices, [adapter.momentum(optimizer, i) for i in indices], [adapter.variance(optimizer, i) for i in indices]


def _travel(compressor: Compressor, section: Section, count: int, begun: Any, grads: Sequence[Any], label: str) -> Any:
    """``section`` with its gradients, ``count`` compressed ones and then exact ones, once the step has begun."""

    def start(_: Any, *tensors: Any) -> Any:
        arrays = [view(t) for t in tensors]
        return section.start([array.reshape(-1) for array in arrays[:count]], arrays[count:])

    return in_turns(start, section.resume, compressor.collectives, [begun, *map(tf.convert_to_tensor, grads)], label)


def _collect(
    compressor: Compressor, large: Pairs, small: Pairs, arrived: Sequence[Any], end: Callable[[], Any]
) -> tuple[Any, list[Any], list[tuple[Any, Any]]]:
    """``end`` the step when all has ``arrived``; returns what ``compressed`` does."""
    _, momenta, _ = _state(compressor, large)
    changed = [v for _, v in large] + [m for m in momenta if m is not None]

    def work(*_: Any) -> list[Any]:
        taken, means, moved = end()
        new = [t.weight for t in moved] + [t.momentum for t, m in zip(moved, momenta, strict=True) if m is not None]
        return [np.bool_(taken), *means, *map(adopt, new)]

    outputs = [tf.bool, *(g.dtype for g, _ in small), *(tf.float32 for _ in changed)]
    taken, *results = host_values(work, arrived, outputs)
    taken.set_shape([])
    means = [tf.ensure_shape(mean, v.shape) for mean, (_, v) in zip(results, small, strict=False)]
    new = [(v, tf.reshape(value, v.shape)) for v, value in zip(changed, results[len(small) :], strict=True)]
    return taken, means, new

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
from horovod_onebit.tf.compressor import Compressor, Exact, Progress, Values, packed, unpacked
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
        exact = small if section.last else []
        arrived.append(_travel(compressor, section, [large[i][0] for i in numbers], exact, begun, str(number)))
    return _collect(compressor, large, small, arrived, compressor.conclude)


def _begin(compressor: Compressor, large: Pairs, small: Pairs) -> Any:
    """Begin the step, of the state before it; a tensor that is there when that is done."""
    optimizer = compressor.optimizer
    indices, momenta, variances = _state(compressor, large)
    clips = optimizer.clipnorm or optimizer.global_clipnorm
    grads = [*(g for g, _ in large), *_packed(small)] if clips else []

    def work(learning_rate: Any, steps: Any, compressed: Any, *tensors: Any) -> None:
        arrays = iter([view(t) for t in tensors])
        values = _values(arrays, large, momenta, variances)
        known = [next(arrays).reshape(-1) for _ in large] + _exact(arrays, small).each() if clips else []
        compressor.begin_step(indices, values, _progress(learning_rate, steps, compressed), len(small), known)

    return in_rounds(compressor.coroutine, compressor.collectives, work, _inputs(compressor, large, grads))


def _at_once(compressor: Compressor, large: Pairs, small: Pairs) -> tuple[Any, list[Any], list[tuple[Any, Any]]]:
    """``compressed`` in one piece, when all gradients are there."""
    indices, momenta, variances = _state(compressor, large)

    def work(learning_rate: Any, steps: Any, compressed: Any, *tensors: Any) -> Any:
        arrays = iter([view(t) for t in tensors])
        values = _values(arrays, large, momenta, variances)
        grads, exact = [next(arrays).reshape(-1) for _ in large], _exact(arrays, small)
        return compressor.step(indices, values, grads, exact, _progress(learning_rate, steps, compressed))

    def end() -> Any:
        result, compressor.coroutine.result = compressor.coroutine.result, None
        return result

    inputs = _inputs(compressor, large, [*(g for g, _ in large), *_packed(small)])
    done = in_rounds(compressor.coroutine, compressor.collectives, work, inputs)
    return _collect(compressor, large, small, [done], end)


def _inputs(compressor: Compressor, large: Pairs, grads: Sequence[Any]) -> list[Any]:
    """What ``_progress`` and ``_values`` are read of, and ``grads``."""
    optimizer = compressor.optimizer
    now = [optimizer.learning_rate, optimizer._iterations, optimizer._compressed_steps]
    _, momenta, variances = _state(compressor, large)
    state = [v for v in (*(v for _, v in large), *momenta, *variances) if v is not None]
    return [tf.convert_to_tensor(i) for i in (*now, *state, *grads)]


def _packed(small: Pairs) -> list[Any]:
    """One tensor of all gradients of ``small``, float32; none if there are none."""
    return [packed([g for g, _ in small], [v for _, v in small], tf.float32)] if small else []


def _exact(arrays: Iterator[Any], small: Pairs) -> Exact:
    """What has become of ``_packed`` in a host function."""
    values = next(arrays).reshape(-1) if small else np.empty(0, np.float32)
    return Exact(values, [int(np.prod(v.shape)) for _, v in small])


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


def _travel(
    compressor: Compressor, section: Section, grads: Sequence[Any], exact: Pairs, begun: Any, label: str
) -> Any:
    """``section`` with its gradients and those of ``exact``, once the step has begun."""

    def start(_: Any, *tensors: Any) -> Any:
        arrays = iter([view(t) for t in tensors])
        return section.start([next(arrays).reshape(-1) for _ in grads], _exact(arrays, exact))

    inputs = [begun, *map(tf.convert_to_tensor, grads), *_packed(exact)]
    return in_turns(start, section.resume, compressor.collectives, inputs, label)


def _collect(
    compressor: Compressor, large: Pairs, small: Pairs, arrived: Sequence[Any], end: Callable[[], Any]
) -> tuple[Any, list[Any], list[tuple[Any, Any]]]:
    """``end`` the step when all has ``arrived``; returns what ``compressed`` does."""
    _, momenta, _ = _state(compressor, large)
    changed = [v for _, v in large] + [m for m in momenta if m is not None]

    def work(*_: Any) -> list[Any]:
        taken, mean, moved = end()
        new = [t.weight for t in moved] + [t.momentum for t, m in zip(moved, momenta, strict=True) if m is not None]
        return [np.bool_(taken), mean, *map(adopt, new)]

    taken, mean, *results = host_values(work, arrived, [tf.bool, tf.float32, *(tf.float32 for _ in changed)])
    taken.set_shape([])
    parts = unpacked(mean, [v for _, v in small]) if small else []
    means = [tf.cast(part, g.dtype) for part, (g, _) in zip(parts, small, strict=True)]
    new = [(v, tf.reshape(value, v.shape)) for v, value in zip(changed, results, strict=True)]
    return taken, means, new

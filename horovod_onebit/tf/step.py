"""The compressed step as a part of a graph: what the engine reads goes in as tensors, what it changes comes out.

    agreement -> begin -> for each section, as soon as its gradients are there: encode -> rounds -> decode -> conclude

An average of gradients in few bits goes the same way, but decodes when all messages are there.

TensorFlow runs host functions in the order in which they were traced: sections follow each other. Weights change at the
end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_onebit.recipe import Recipe
from horovod_onebit.tasks import Task
from horovod_onebit.tf.collectives import Errand, view
from horovod_onebit.tf.compressor import Compressor, Progress, Values
from horovod_onebit.tf.graph import adopt, handed, host_value, host_values, in_rounds, on_device
from horovod_onebit.tf.place import Place, tensor_of
from horovod_onebit.tf.sections import Section, sections

Pairs = Sequence[tuple[Any, Any]]
"""Gradients and their variables."""


def compressed(
    compressor: Compressor, large: Pairs, small: Pairs, finite: Any
) -> tuple[Any, Any, list[tuple[Any, Any]]]:
    """One run of the engine over ``large``, float32, beside exact gradients, ``small``. Collective.

    ``finite``: whether the averages of ``small`` are, a tensor. Returns whether the step is taken, the factors by which
    these averages are clipped by their norms, and variables with their new values.
    """
    place = compressor.place_of([v for _, v in large])
    if compressor.in_one_piece:
        return _collect(compressor, place, large, [finite, _begin(compressor, place, large, small, [finite])])
    begun = _begin(compressor, place, large, small)
    arrived = _by_sections(compressor, place, large, begun, compressor.engine.recipe)
    return _collect(compressor, place, large, [finite, *arrived])


def averaged(compressor: Compressor, large: Pairs) -> tuple[list[Any], Any]:
    """The averages of the gradients of ``large``, float32, in few bits, and whether all is finite, on all workers
    alike. Collective."""
    assert compressor.coded is not None
    indices = tuple(compressor.optimizer._get_variable_index(v) for _, v in large)

    def begin() -> bool:
        compressor.begin_average(indices)
        return True

    begun = host_value(begin, [], tf.bool)
    arrived = _by_sections(compressor, None, large, begun, compressor.coded.engine.recipe)
    inputs, opened = handed(None, [tf.convert_to_tensor(grad) for grad, _ in large])
    means: list[Any] = []

    def work(*values: Any) -> Task[None]:
        means.clear()
        return compressor.average_in_bits(indices, opened(values[len(arrived) :]), means)

    def collect(_: Any) -> list[Any]:
        found, means[:] = list(means), []
        finite = np.bool_(len(found) == len(large))
        return [finite, *(map(adopt, found) if finite else map(tf.zeros, _sizes(large)))]

    done = in_rounds(compressor.errand, compressor.collectives, work, [*arrived, *inputs])
    finite, *averages = host_values(collect, [done], [tf.bool, *(tf.float32 for _ in large)])
    finite.set_shape([])
    return [tf.reshape(mean, v.shape) for mean, (_, v) in zip(averages, large, strict=True)], finite


def _begin(compressor: Compressor, place: Place | None, large: Pairs, small: Pairs, finite: Sequence[Any] = ()) -> Any:
    """Begin the step, of the state before it; a tensor that is there when that is done.

    ``finite``: nothing, so that the step begins before the averages of ``small`` are there; or, where it is taken as it
    begins, whether they are finite.
    """
    optimizer, sizes = compressor.optimizer, _sizes(small)
    indices, momenta, variances = _state(compressor, large)
    now = [optimizer.learning_rate, optimizer._iterations, optimizer._seen, optimizer._marks]
    state = [v for v in (*(v for _, v in large), *momenta, *variances) if v is not None]
    grads = [g for g, _ in large] if compressor.in_one_piece else []
    inputs, opened = handed(place, [tf.convert_to_tensor(i) for i in (*state, *grads)])

    def work(learning_rate: Any, steps: Any, seen: Any, marks: Any, squares: Any, *rest: Any) -> Task[None]:
        arrays = iter(opened(rest[len(finite) :]))
        values = _values(arrays, large, momenta, variances)
        now = Progress(float(learning_rate), int(steps), np.array(seen), np.array(marks))
        known = all(rest[: len(finite)])
        compressor.go_to(place)
        return compressor.begin_step(indices, values, now, sizes, list(arrays), view(squares), finite=known)

    scalars = [*map(tf.convert_to_tensor, now), _squares(compressor, large, small), *finite]
    return in_rounds(compressor.errand, compressor.collectives, work, [*scalars, *inputs])


def _squares(compressor: Compressor, large: Pairs, small: Pairs) -> Any:
    """The squared norms of all gradients, if the step wants them."""
    if not compressor.clips_norms:
        return tf.zeros([0])
    return tf.stack([tf.reduce_sum(tf.square(tf.cast(g, tf.float32))) for g, _ in (*large, *small)])


def _sizes(pairs: Pairs) -> list[int]:
    """The variables' numbers of elements, which Keras is slow to tell."""
    return [math.prod(v.shape) for _, v in pairs]


def _values(arrays: Iterator[Any], large: Pairs, momenta: Sequence[Any], variances: Sequence[Any]) -> Values:
    return Values(
        [next(arrays) for _ in large],
        [None if m is None else next(arrays) for m in momenta],
        [None if v is None else next(arrays) for v in variances],
    )


def _state(compressor: Compressor, large: Pairs) -> tuple[tuple[int, ...], list[Any], list[Any]]:
    """The numbers of the variables, and those that hold their momenta and second moments, None where there is none."""
    optimizer, adapter = compressor.optimizer, compressor.adapter
    indices = tuple(optimizer._get_variable_index(v) for _, v in large)
    return indices, [adapter.momentum(optimizer, i) for i in indices], [adapter.variance(optimizer, i) for i in indices]


def _by_sections(compressor: Compressor, place: Place | None, large: Pairs, begun: Any, recipe: Recipe) -> list[Any]:
    """Each section of ``large`` on its way with its gradients, once the step has ``begun``: tensors that are there when
    it has arrived. ``recipe`` is that of the engine that sends."""
    members, arrived = sections(tuple(_sizes(large)), recipe), []
    for number, numbers in enumerate(members):
        section = Section(compressor, members, number)
        arrived.append(_travel(section, place, [large[i][0] for i in numbers], begun, str(number)))
    return arrived


def _travel(section: Section, place: Place | None, grads: Sequence[Any], begun: Any, label: str) -> Any:
    """``section`` with its gradients, once the step has begun."""
    inputs, opened = handed(place, [*map(tf.convert_to_tensor, grads)])

    def work(_: Any, *values: Any) -> Task[None]:
        return section.travel(opened(values))

    errand = Errand(section.collectives, section.compressor.compute)
    return in_rounds(errand, section.collectives, work, [begun, *inputs], label)


def _collect(
    compressor: Compressor, place: Place | None, large: Pairs, arrived: Sequence[Any]
) -> tuple[Any, Any, list[tuple[Any, Any]]]:
    """End the step when all has ``arrived``, first of it whether averages are finite; returns what ``compressed``
    does."""
    _, momenta, _ = _state(compressor, large)
    changed = [v for _, v in large] + [m for m in momenta if m is not None]
    new: list[Any] = []

    def work(finite: Any, *_: Any) -> list[Any]:
        taken, factors, moved = compressor.conclude(finite=bool(finite))
        new[:] = [t.weight for t in moved] + [t.momentum for t, m in zip(moved, momenta, strict=True) if m is not None]
        return [np.bool_(taken), factors, *(map(adopt, new) if place is None else ())]

    def there(_: Any) -> list[Any]:
        tensors, new[:] = [tensor_of(array) for array in new], []
        return tensors

    kinds: list[Any] = [tf.float32 for _ in changed]
    taken, factors, *results = host_values(work, arrived, [tf.bool, tf.float32, *(kinds if place is None else ())])
    taken.set_shape([])
    factors.set_shape([None])
    if place is not None:
        results = on_device(place, there, [taken], kinds)
    return taken, factors, [(v, tf.reshape(value, v.shape)) for v, value in zip(changed, results, strict=True)]

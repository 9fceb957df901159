"""Sections: variables whose messages leave together, as soon as their gradients are there.

Which variables a section has follows from their sizes and the recipe alone, so that all workers know it when they trace
a step, without asking. Which buckets leave with it is known when the engine has laid them out: those of its variables.
The last section has all variables. It takes the buckets that no other has alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from horovod_onebit.kernels.reference import Array
from horovod_onebit.layout import Layout, TensorSpec, plan
from horovod_onebit.recipe import Recipe
from horovod_onebit.tasks import Task
from horovod_onebit.tf.compressor import Compressor, Leaving

MOST = 32
"""Sections of a step, about: each costs some time when a step is traced."""


@lru_cache(maxsize=16)
def sections(sizes: tuple[int, ...], recipe: Recipe) -> tuple[tuple[int, ...], ...]:
    """The numbers of the variables of each section, the last variables first: their gradients come first.

    ``sizes`` are those of the compressed variables, in elements. There is at least one section.
    """
    # Other exchanges may lay buckets out otherwise, by a few scales.
    layout = plan([TensorSpec(str(i), size) for i, size in enumerate(sizes)], replace(recipe, exchange="direct"), 1)
    enough = max(recipe.bucket() // 2, layout.size // MOST)
    early: list[tuple[int, ...]] = []
    numbers, size = set[int](), 0
    for bucket in reversed(layout.buckets):
        numbers |= {piece.tensor for piece in bucket.pieces}
        size += bucket.size
        if 0 in numbers:  # the gradient that comes last
            break
        if size >= enough:
            if not any(numbers <= set(section) for section in early):  # of a variable that is cut, say
                early.append(tuple(sorted(numbers)))
            numbers, size = set(), 0
    return (*early, tuple(range(len(sizes))))


class Section:
    """One section's way to the other workers, in one graph."""

    def __init__(self, compressor: Compressor, all_sections: Sequence[tuple[int, ...]], number: int) -> None:
        self.compressor = compressor
        self.collectives = compressor.collectives
        self._all = all_sections
        self._number = number
        self._layout: Layout | None = None
        self._buckets: list[int] = []

    def travel(self, grads: Sequence[Array]) -> Task[None]:
        """Encode the section's buckets, and take in their messages when they have arrived; nothing if none may leave
        before all gradients are there."""
        step = self.compressor.under_way
        if step is None:
            return
        there = dict(zip(self._all[self._number], grads, strict=True))
        step.grads |= {i: step.contributed(there[at]) for i, at in enumerate(step.places) if at in there}
        own = self._own(step)
        for bucket in own:
            step.engine.send(bucket, step.grads, step.plan)
        step.sent = time.perf_counter(), step.engine.times.decode
        yield from step.arrive(own)

    def _own(self, step: Leaving) -> list[int]:
        """The buckets of this section."""
        layout = step.engine.layout
        assert layout is not None
        if layout is not self._layout:
            self._layout, self._buckets = layout, []
            for bucket in layout.buckets:
                members = {step.places[piece.tensor] for piece in bucket.pieces}
                if self._number == next(i for i, one in enumerate(self._all) if members <= set(one)):
                    self._buckets.append(bucket.index)
        return self._buckets

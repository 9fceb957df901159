"""Kernels that are compiled before they are needed: a step of a few numbers, taken alone, leaves what Numba keeps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from horovod_onebit import simulation
from horovod_onebit.engine import Engine
from horovod_onebit.exchange import Collectives
from horovod_onebit.kernels.reference import Arrays
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Rule, Tensor
from horovod_onebit.rules.gradient import Gradient
from horovod_onebit.schedule import Sends
from horovod_onebit.tasks import run

logger = logging.getLogger("horovod_onebit")

TWO_STAGE_FROM = 4
"""Workers from which ``exchange="auto"`` may take two stages."""
_done: set[tuple[object, ...]] = set()


Lent = Literal["nothing", "gradients", "all but momenta", "all"]


def compile_steps(
    recipe: Recipe, rules: Iterable[Rule], workers: int, *, divides: bool, lent: Lent = "nothing"
) -> None:
    """Compile what compressed steps of ``rules`` run on the CPU, unless this process has it: some seconds (on an
    empty cache ten to thirty), once on a machine. Local.

    ``divides``: there are second moments. ``lent``: what is in memory of the framework's that nobody writes to; with
    ``"all"``, steps write the new weights and momenta elsewhere, with ``"all but momenta"`` the weights. Numba compiles
    for that apart.
    """
    # Hierarchical is made of the others.
    ways = ("direct", "two_stage") if workers >= TWO_STAGE_FROM else ("direct",)
    start = time.monotonic()
    for rule in rules:
        for exchange in ways if recipe.exchange in ("auto", "hierarchical") else (recipe.exchange,):
            formulas = type(rule), *map(bool, vars(rule).values())
            codecs = recipe.codec, recipe.server_codec
            how = *formulas, exchange, *codecs, recipe.space, recipe.clip is None, divides, lent
            if how not in _done:
                _done.add(how)
                one = replace(recipe, exchange=exchange, on_nonfinite="skip")
                simulation.run(partial(_step, one, rule, divides, lent), 1)
    if (seconds := time.monotonic() - start) > 1:
        logger.info("compiled the kernels of compressed steps in %.1f s", seconds)


class _Lending:
    """Collectives whose results nobody may write to."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def allgather(self, array: NDArray[np.uint8], name: str) -> Any:
        return _LentResult(self._collectives.allgather(array, name))

    def alltoall(self, array: NDArray[np.uint8] | NDArray[np.float32], name: str) -> Any:
        return _LentResult(self._collectives.alltoall(array, name))


@dataclass(frozen=True)
class _LentResult:
    handle: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def wait(self) -> NDArray:
        result: NDArray = self.handle.wait().view()
        result.flags.writeable = False
        return result


def _step(recipe: Recipe, rule: Rule, divides: bool, lent: Lent, alone: Collectives) -> None:
    size = recipe.block_size or 1024
    zeros = [np.zeros(size, np.float32) for _ in range(4)]
    grads = {0: np.ones(size, np.float32)}
    for i, array in enumerate([grads[0], zeros[0], zeros[2], zeros[1]]):
        array.flags.writeable = i >= {"nothing": 0, "gradients": 1, "all but momenta": 3, "all": 4}[lent]
    tensor = Tensor("x", zeros[0], zeros[1], zeros[2] if divides else None, zeros[3], step=1, variance_steps=1)
    rule.init(tensor)
    engine = Engine(recipe, alone if lent == "nothing" else cast(Collectives, _Lending(alone)), what=None)
    rule.begin(tensor, engine.context)
    if isinstance(rule, Gradient):
        rule.observe([tensor], [np.zeros_like(zeros[3])], engine.context)
        if not rule.divides:
            engine.context.kernels.move(*rule.rescale(tensor), Arrays(None, zeros[3], zeros[2], zeros[0], None))
    run(engine.prepare([tensor], [rule]))
    engine.exchanges = 1  # after one the workers ``look``
    plan = engine.plan(Sends.CONTRIBUTION, [rule])
    run(engine.look(plan.rules))
    engine.send_rest(grads, plan)
    if lent in ("nothing", "gradients"):
        run(engine.receive(grads, plan))
        return
    assert engine.layout is not None
    momentum = np.zeros_like(zeros[1]) if lent == "all" else zeros[1]
    moved = [replace(tensor, weight=np.zeros_like(zeros[0]), momentum=momentum)]
    run(engine.step_into([bucket.index for bucket in engine.layout.buckets], moved))
    engine.conclude(plan, moved)

"""Kernels that are compiled before they are needed: a step of a few numbers, taken alone, leaves what Numba keeps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from horovod_onebit import simulation
from horovod_onebit.engine import Engine
from horovod_onebit.exchange import Collectives
from horovod_onebit.layout import Layout
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Rule, Tensor
from horovod_onebit.schedule import Kind
from horovod_onebit.tasks import run

logger = logging.getLogger("horovod_onebit")

TWO_STAGE_FROM = 4
"""Workers from which ``exchange="auto"`` may take two stages."""
_done: set[tuple[object, ...]] = set()


def compile_steps(recipe: Recipe, rules: Iterable[Rule], workers: int, *, divides: bool) -> None:
    """Compile what compressed steps of ``rules`` run on the CPU, unless this process has it: some seconds, once on a
    machine. ``divides``: there are second moments. Local."""
    ways = ("direct", "two_stage") if workers >= TWO_STAGE_FROM else ("direct",)
    start = time.monotonic()
    for rule in rules:
        for exchange in ways if recipe.exchange == "auto" else (recipe.exchange,):
            formulas = type(rule), *map(bool, vars(rule).values())
            how = *formulas, exchange, recipe.codec, recipe.server_codec, recipe.space, recipe.clip is None, divides
            if how not in _done and exchange != "hierarchical":  # which is made of the others
                _done.add(how)
                one = replace(recipe, exchange=exchange, on_nonfinite="skip")
                simulation.run(partial(_step, one, rule, divides), 1)
    if (seconds := time.monotonic() - start) > 1:
        logger.info("compiled the kernels of compressed steps in %.1f s", seconds)


class _Engine(Engine):
    def say_layout(self, layout: Layout, exchange: str, what: str = "") -> None:
        """Nothing: it is nobody's."""


def _step(recipe: Recipe, rule: Rule, divides: bool, alone: Collectives) -> None:
    size = recipe.block_size or 1024
    zeros = [np.zeros(size, np.float32) for _ in range(4)]
    tensor = Tensor("x", zeros[0], zeros[1], zeros[2] if divides else None, zeros[3], step=1, variance_steps=1)
    rule.init(tensor)
    engine = _Engine(recipe, alone)
    run(engine.prepare([tensor], [rule]))
    plan = engine.plan(Kind.ONEBIT, [rule])
    grads = {0: np.ones(size, np.float32)}
    engine.send_rest(grads, plan)
    run(engine.receive(grads, plan))

"""The studies' parts that are claims about this library."""

import dataclasses
import functools
import sys
from pathlib import Path

import numpy as np
import pytest

from horovod_onebit import simulation
from horovod_onebit.optimizer import NumpyOptimizer

sys.path.append(str(Path(__file__).resolve().parents[2]))

from studies import paraboloid, published, quadratics, report
from studies.lockstep import Workers

f32 = np.float32


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_paper_recipe_is_the_published_pseudo_code(workers):
    assert published.difference(workers) < 1e-6


def test_the_error_as_printed_diverges_and_ours_does_not():
    with np.errstate(all="ignore"):
        assert not np.isfinite(paraboloid.as_printed(100, 10)[-1])
    assert paraboloid.descend(published.PRESETS["paper"], 100, 10)[-1] < 1e-6


def test_a_cell_of_the_table_of_quadratics():
    def loss(recipe, spread):
        return quadratics.final_loss(quadratics.Cell("Adam", recipe, spread, 2))

    assert loss("robust", "elements 1e8") < 2 * loss("exact", "elements 1e8")
    assert loss("paper", "elements 1e8") > 1e3
    assert len(list(quadratics.cells())) == len(set(quadratics.cells()))
    assert quadratics.magnitudes("layers 1e8").max() / quadratics.magnitudes("layers 1e8").min() == pytest.approx(1e8)
    assert quadratics.magnitudes("1e4, 5 % cold").min() < 1e-3


@pytest.mark.parametrize("rule", quadratics.RULES)
@pytest.mark.parametrize("recipe", ["robust", "two stages", "one bit in two stages", "paper"])
def test_workers_in_lockstep_are_those_of_the_simulation(rule, recipe):
    """To the bit, a step that all skip included."""
    rng, steps = np.random.default_rng(0), 14
    start = {"a": rng.standard_normal(700).astype(f32), "b": rng.standard_normal(90).astype(f32)}
    chosen = dataclasses.replace(quadratics.RECIPES[recipe], min_compressed_size=1)
    noise = rng.standard_normal((steps, 3, 790)).astype(f32)
    noise[9, 1, 5] = np.inf

    def gradients(weights, step, rank):
        return {"a": weights["a"] + noise[step, rank, :700], "b": weights["b"] + noise[step, rank, 700:]}

    def worker(collectives):
        weights = {name: array.copy() for name, array in start.items()}
        made = quadratics.RULES[rule](1.0)
        optimizer = NumpyOptimizer(weights, made, collectives=collectives, warmup_steps=4, recipe=chosen)
        for step in range(steps):
            optimizer.step(gradients(weights, step, collectives.rank))
        return weights

    weights = {name: array.copy() for name, array in start.items()}
    workers = Workers(weights, quadratics.RULES[rule](1.0), 3, warmup_steps=4, recipe=chosen)
    for step in range(steps):
        now = {name: array.copy() for name, array in weights.items()}
        workers.step(functools.partial(gradients, now, step))
    assert workers.steps == steps - 1
    for name, expected in simulation.run(worker, 3)[0].items():
        np.testing.assert_array_equal(weights[name], expected)


def test_two_bits_from_the_servers_cost_nothing_and_one_does():
    """The second stage's error does not average away; figures in the changelog."""
    direct, two_bits, one_bit = (
        quadratics.final_loss(quadratics.Cell("Adam", recipe, "none", 16))
        for recipe in ("robust", "two stages", "one bit in two stages")
    )
    assert two_bits < 1.1 * direct
    assert one_bit > 5 * direct


def test_nor_with_lamb_whose_steps_do_not_shrink():
    """Without the prediction, it would be 1.37 times the loss of the direct exchange."""
    direct, two_bits = (quadratics.final_loss(quadratics.Cell("LAMB", r, "none", 16)) for r in ("robust", "two stages"))
    assert two_bits < 1.1 * direct


def test_numbers_of_the_page():
    assert [report.number(x) for x in (0.0123, 2e6, float("nan"), float("inf"))] == ["0.012", *["diverged"] * 3]
    assert report.table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"

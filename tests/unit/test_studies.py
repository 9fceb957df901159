"""The studies' parts that are claims about this library."""

import dataclasses
import functools
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from horovod_onebit import simulation
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules.adam import Adam
from horovod_onebit.schedule import Local

sys.path.append(str(Path(__file__).resolve().parents[2]))

from studies import (
    before_freeze,
    clock,
    frozen,
    of_deepspeed,
    paraboloid,
    published,
    quadratics,
    report,
    tuned,
    wrapped,
    zero_one,
)
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


def test_frozen_without_bits_is_adam_with_a_second_moment_that_stays():
    """In float64, by the formulas; without a clip, the workers' mean gradient is all that matters. A small tensor goes
    on as Adam."""
    rng, lr, freeze = np.random.default_rng(0), 1e-2, 5
    start = {"large": rng.standard_normal(1100), "small": rng.standard_normal(8)}
    grads = {name: rng.standard_normal((12, 3, x.size)).astype(f32) for name, x in start.items()}
    weights = {name: x.astype(f32) for name, x in start.items()}
    workers = frozen.Uncompressed(weights, Adam(lr=lr), 3, warmup_steps=freeze, recipe=frozen.UNCLIPPED)
    for step in range(12):
        workers.step(lambda rank, step=step: {name: grads[name][step, rank] for name in start})
    for name, w in start.items():
        m, v, seen = np.zeros_like(w), np.zeros_like(w), 0
        w = w.astype(f32).astype(np.float64)
        for step, of_workers in enumerate(grads[name].astype(np.float64)):
            g = of_workers.mean(axis=0)
            m = 0.9 * m + 0.1 * g
            if step < freeze or name == "small":
                v, seen = 0.999 * v + 0.001 * g**2, step + 1
            w -= lr * m / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.999**seen)) + 1e-8)
        np.testing.assert_allclose(weights[name], w, rtol=1e-5, atol=1e-6)


def test_frozen_and_clipped_is_the_compressed_phase_where_the_bits_lose_nothing():
    """One bit is exact where all elements are of one magnitude; the gradient of step 8 is clipped."""
    signs = np.sign(np.random.default_rng(0).standard_normal(2048)).astype(f32)
    sizes = [1, 2, 1, 3, 2, 1, 2, 1, 90, 1, 2, 1]

    def gradient(step):
        return {"a": f32(sizes[step]) * signs}

    def worker(collectives):
        weights = {"a": np.zeros(2048, f32)}
        optimizer = NumpyOptimizer(weights, Adam(1e-2), collectives=collectives, warmup_steps=5, recipe=frozen.ROBUST)
        for step in range(len(sizes)):
            optimizer.step(gradient(step))
        return weights["a"]

    found = {}
    for recipe in (frozen.ROBUST, frozen.UNCLIPPED):
        found[recipe.clip] = {"a": np.zeros(2048, f32)}
        workers = frozen.Uncompressed(found[recipe.clip], Adam(1e-2), 1, warmup_steps=5, recipe=recipe)
        for step in range(len(sizes)):
            workers.step(lambda rank, step=step: gradient(step))
    expected = simulation.run(worker, 1)[0]
    np.testing.assert_allclose(found[3.0]["a"], expected, rtol=1e-5)
    assert not np.allclose(found[None]["a"], expected, rtol=1e-2)


def test_a_gradient_that_is_not_finite_is_skipped_by_frozen_too():
    weights = {"a": np.ones(2048, f32)}
    workers = frozen.Uncompressed(weights, Adam(1e-2), 1, warmup_steps=1, recipe=frozen.ROBUST)
    for value in (1, np.nan, np.inf, 1):
        workers.step(lambda rank, value=value: {"a": np.full(2048, value, f32)})
    assert workers.steps == 2
    assert np.isfinite(weights["a"]).all()


def test_what_each_change_makes_of_the_loss():
    row = frozen.Row("text", 4, "auto", 4e-3)
    losses = frozen.Losses([2.0, 2.0], [1.8, 1.8], [1.9, 1.9], [1.9, 2.0], 220)
    text = frozen.parts(row, losses)
    assert "ends 2.5 % below exact Adam" in text
    assert "makes -10.0 points, the clip +5.0, the bit +2.5." in text
    assert frozen._cells_of(row, losses)[-1] == "+2.6 % (+0.0 to +5.3)"
    assert frozen.compared([1.0, np.inf, np.nan], [1.0]) == "2 of 3 diverged"


def test_signs_travel_as_deepspeed_has_them():
    values = np.array([1, -1, 0, -0.0, 2, -3, 4, -5, -1, -1, -1, -1, -1, -1, -1, 1], f32)
    assert of_deepspeed.packed(values).tolist() == [0b10101010, 1]
    assert of_deepspeed.unpacked(of_deepspeed.packed(values)).tolist() == np.where(np.signbit(values), -1, 1).tolist()


def test_without_deepspeed_its_study_says_so(monkeypatch):
    monkeypatch.setattr(of_deepspeed, "VERSION", "0")
    assert of_deepspeed.MISSING in of_deepspeed.run()
    settings = of_deepspeed.SETTINGS
    runs = [of_deepspeed.Run(one, way, seed) for one in settings for way in of_deepspeed.ways(one) for seed in (0, 1)]
    assert len({run.name for run in runs}) == len(runs)


def trained(steps, make, workers=3, **options):
    """The weights of each worker, and the bytes that it has sent."""
    start = {"blocks.a": np.random.default_rng(0).standard_normal((32, 40)).astype(f32), "b": np.ones(8, f32)}

    def worker(collectives):
        weights, draw = {name: x.copy() for name, x in start.items()}, np.random.default_rng(collectives.rank)
        optimizer = make(weights, Adam(1e-2), collectives=collectives, recipe=frozen.ROBUST, **options)
        for _ in range(steps):
            optimizer.step({name: x + draw.standard_normal(x.shape).astype(f32) for name, x in weights.items()})
        return weights, optimizer

    return start, simulation.run(worker, workers)


@pytest.mark.parametrize("way", wrapped.WAYS)
def test_wrapped_optimizers_of_torch(way):
    """With exact means, Muon and AdamW take their own steps of these; otherwise, workers stay together."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("PyTorch has no Muon")
    make = functools.partial(wrapped.Wrapped, of=wrapped.muon)
    start, found = trained(14, make, schedule=wrapped.WAYS[way])
    for weights, _ in found[1:]:
        for name, x in found[0][0].items():
            np.testing.assert_array_equal(weights[name], x)
    expected = {name: torch.nn.Parameter(torch.from_numpy(x.copy())) for name, x in start.items()}
    optimizers = [wrapped.muon(name, p) for name, p in expected.items()]
    assert [type(one).__name__ for one in optimizers] == ["Muon", "AdamW"]
    draws = [np.random.default_rng(rank) for rank in range(3)]
    for _ in range(14):
        for p, one in zip(expected.values(), optimizers, strict=True):
            noise = sum(draw.standard_normal(p.shape).astype(f32) for draw in draws)
            p.grad, one.param_groups[0]["lr"] = p.detach() + torch.from_numpy(noise / f32(3)), 1e-2
            one.step()
    off = max(float(np.abs(expected[name].detach().numpy() - x).max()) for name, x in found[0][0].items())
    low, high = {"exact": (0, 1e-5), "three_bit": (1e-5, 5e-3), "every step alone": (1e-5, 0.2)}[way]
    assert low <= off < high


def test_zero_one_adam_in_few_bits():
    """Workers stay together, and the second moment sees exact means alone."""
    schedule = zero_one.schedule(40, 12)
    _, found = trained(30, zero_one.InFewBits, schedule=schedule)
    _, one_bit = trained(30, NumpyOptimizer, schedule=schedule)
    for weights, _ in found[1:]:
        for name, x in found[0][0].items():
            np.testing.assert_array_equal(weights[name], x)
    large, small = found[0][1]._tensors
    assert large.step == small.step == small.variance_steps == 30
    assert large.variance_steps == 12 + 9
    assert found[0][1].engine.traffic.total > one_bit[0][1].engine.traffic.total
    off = np.abs(found[0][0]["blocks.a"] - one_bit[0][0]["blocks.a"])
    assert 0 < off.mean() < 0.05


def test_local_steps_after_gradients_in_few_bits():
    """Until the freeze all workers have the same weights in every step, then after every round."""
    for steps, alike in ((7, True), (12, True), (15, False), (16, True), (32, True)):
        _, found = trained(steps, before_freeze.InFewBits, schedule=Local(4, freeze=12))
        assert all(optimizer.frozen == (steps >= 12) for _, optimizer in found)
        for (weights, optimizer), name in itertools.product(found[1:], found[0][0]):
            assert np.array_equal(weights[name], found[0][0][name]) == alike
            own, other = ({t.name: t.variance for t in each._tensors} for each in (optimizer, found[0][1]))
            np.testing.assert_array_equal(own[name], other[name])


def test_diloco_and_powersgd_count_their_bytes():
    assert tuned.times_fewer(tuned.DiLoCo(16), {"bits": 2.0}) == 16
    exact = tuned.times_fewer(tuned.PowerSGD(4, 1000), {})
    assert exact == 1
    assert 3 < tuned.times_fewer(tuned.PowerSGD(4, 200), {}) < 5
    runs = [*(one for every in tuned.EVERY for one in tuned.first(every)), *tuned.POWERSGD]
    assert len({tuned.text_of(one) + str(one.rate) for one in runs}) == len(runs)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (Recipe(), {"warmup_steps": 1}),
        (Recipe(), {"warmup_steps": 20}),
        (Recipe(warmup="three_bit"), {"warmup_steps": 20}),
        (Recipe(), {"schedule": Local(freeze=100)}),
    ],
)
def test_matrices_of_lora_of_which_one_starts_at_zero(recipe, options):
    """The other one has no gradient in the first step. If that is the only exact one, its second moment is still 0 when
    compression starts."""
    rng, steps = np.random.default_rng(0), 300
    target = (rng.standard_normal((64, 8)) @ rng.standard_normal((8, 64)) / 64).astype(f32)
    start = (rng.uniform(-1, 1, (8, 64)) / 8).astype(f32)

    def worker(collectives):
        draw, weights = np.random.default_rng(collectives.rank), {"A": start.copy(), "B": np.zeros((64, 8), f32)}
        chosen = dataclasses.replace(recipe, min_compressed_size=256)
        optimizer = NumpyOptimizer(weights, Adam(1e-2), collectives=collectives, recipe=chosen, **options)
        for step in range(steps):
            optimizer.rule = dataclasses.replace(optimizer.rule, lr=1e-2 * (1 - step / steps))
            x = draw.standard_normal((64, 16)).astype(f32)
            error = (weights["B"] @ weights["A"] - target) @ x / f32(16)
            grads = {"A": weights["B"].T @ error @ x.T, "B": error @ (weights["A"] @ x).T}
            assert grads["A"].any() == (step > 0)
            optimizer.step(grads)
        optimizer.flush()
        return np.square(weights["B"] @ weights["A"] - target).mean() / np.square(target).mean()

    assert simulation.run(worker, 2)[0] < 1e-3


def test_runs_with_lora_are_kept_apart():
    pytest.importorskip("torch.nn")
    from studies import lora

    assert len({run.name for run in lora.runs()}) == len(lora.runs())
    assert lora.LORA_RATE in lora.RATES


def test_of_several_ways_the_clock_names_the_one_that_reaches_a_loss_first():
    found = {
        way: {"seconds": [0.0, 10.0, 20.0], "steps": [0, 1, 2], "received": [0, 4e6, 8e6], "losses": losses}
        for way, losses in {"float32": [8.0, 7.6, 6.0], "local": [8.0, 5.0, 4.0], "diloco 16": [8.0, 9.0, 7.5]}.items()
    }
    assert clock.reached(found["float32"], 6.5) == 20
    assert clock.reached(found["float32"], 5.9) == np.inf
    rows = list(clock.rows(found))
    assert clock.losses(found) == [7.5, 6.0, 4.0]
    assert rows[0] == [clock.WAYS["float32"], "10.00", "2", "8", "6.00", "20", "20", ""]
    assert rows[1] == [clock.WAYS["local"], "10.00", "2", "8", "4.00", "**10**", "**10**", "**20**"]
    assert rows[2] == [clock.WAYS["diloco 16"], "10.00", "2", "8", "7.50", "20", "", ""]

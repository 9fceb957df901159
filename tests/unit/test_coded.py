"""The mean gradient in few bits: its codecs, its rule, and warm-ups of it."""

import dataclasses
import functools
import math
import warnings

import numpy as np
import pytest

from horovod_onebit import ConfigurationError, NonFiniteError, Recipe, averages, codecs, simulation
from horovod_onebit.coded import BLOCK, CodedMean
from horovod_onebit.engine import Engine
from horovod_onebit.kernels import reference
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules import Context, Tensor, Wraps, gradient
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.lion import Lion
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.schedule import Gradients, Local, ZeroOne, resolve
from horovod_onebit.stats import allreduce_bytes
from horovod_onebit.tasks import run
from horovod_onebit.warmup import EXACT_FIRST
from tests.long import LONG

f32 = np.float32
SIZES = {"scalar": 1, "odd": 1025, "even": 2048, "long": 5003}
TWO = Recipe(warmup="two_bit", block_size=128, min_compressed_size=1000, bucket_size=2000, exchange="direct")


@pytest.mark.parametrize("name", ["logistic_two", "logistic_three", "logistic_four"])
def test_the_levels_are_those_of_lloyd_and_max(name):
    """Zero, and otherwise each the mean of a logistic distribution between its bounds; the nearest one is taken."""
    kind = codecs.find(name)
    x = np.linspace(-15, 15, 1_500_001).astype(f32)
    code = kind.code(x, f32(1))
    values = kind.value(code, f32(1))
    levels = np.unique(values)
    assert len(levels) == 2**kind.bits - 1
    assert 0 in levels
    density = np.cosh(x.astype(np.float64) * math.pi / math.sqrt(12)) ** -2  # of variance 1
    for level in levels:
        here = values == level
        assert abs((x[here] * density[here]).sum() / density[here].sum() - level) < 2e-3
    nearest = levels[np.abs(x[:, None][::1000] - levels).argmin(axis=1)]
    edges = np.abs(np.abs(x[::1000] - values[::1000]) - np.abs(x[::1000] - nearest))
    assert edges.max() < 1e-3


def test_one_bit_is_too_few():
    with pytest.raises(ConfigurationError, match="warmup='sign': expected one of"):
        Recipe(warmup="sign")


def weights():
    return {name: np.zeros(size, f32) for name, size in SIZES.items()}


def gradients(rng, sizes):
    """Of elements whose magnitudes differ by five orders."""
    return {
        name: (10 ** np.linspace(-5, 0, size) * (1 + 0.5 * rng.standard_normal(size))).astype(f32)
        for name, size in sizes.items()
    }


def train(collectives, recipe=TWO, rule=None, steps=40, warmup_steps=30, kernels="cpu", spoil=lambda rank, step, g: g):
    found, rng = weights(), np.random.default_rng([7, collectives.rank])
    optimizer = NumpyOptimizer(
        found, rule or Adam(lr=0.01), collectives=collectives, warmup_steps=warmup_steps, recipe=recipe, kernels=kernels
    )
    taken = [optimizer.step(spoil(collectives.rank, step, gradients(rng, SIZES))) for step in range(steps)]
    return optimizer, np.concatenate(list(found.values())), taken


@pytest.mark.cases(6)
@pytest.mark.parametrize("bits", ["two_bit", "three_bit", "four_bit"])
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_replicas_are_equal_and_both_kernels_agree(bits, exchange, workers):
    recipe = dataclasses.replace(TWO, warmup=bits, exchange=exchange)
    cpu, reference = (simulation.run(lambda c, k=k: train(c, recipe, kernels=k), workers) for k in ("cpu", "reference"))
    for _, found, taken in cpu:
        np.testing.assert_array_equal(found, cpu[0][1])
        assert all(taken)
    np.testing.assert_allclose(cpu[0][1], reference[0][1], atol=1e-4)


@pytest.mark.parametrize("learned", [3, EXACT_FIRST])
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_what_was_learned_is_saved(exchange, learned):
    """While it learns, or after steps in few bits: another one goes on from there, bit for bit."""

    def worker(collectives):
        recipe, sizes = dataclasses.replace(TWO, exchange=exchange), {"long": 5003, "even": 2048}
        first, again = (CodedMean(Engine(recipe, collectives, name=name)) for name in ("first", "again"))
        rng = np.random.default_rng([3, collectives.rank])
        assert first.state() is None
        for _ in range(learned if learned < EXACT_FIRST else EXACT_FIRST + 5):
            run(first.average(gradients(rng, sizes)))
        saved = first.state()
        again.check(saved, sizes)
        again.load(saved)
        for _ in range(20):
            grads = gradients(rng, sizes)
            found = [run(one.average(grads))[0] for one in (first, again)]
            for name in sizes:
                np.testing.assert_array_equal(found[0][name], found[1][name])
        again.load(None)
        assert again.fresh

    simulation.run(worker, 3)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("together", [500, 2**26])
def test_exact_means_in_float16(workers, together, monkeypatch):
    """In one exchange, and in several: the mean but for two roundings, the same on all workers, half of the bytes."""
    monkeypatch.setattr(averages, "TOGETHER", together)
    sizes = {"long": 5003, "odd": 1025}

    def worker(collectives):
        of = {half: CodedMean(Engine(TWO, collectives, name=f"of {half}"), half=half) for half in (False, True)}
        rng = np.random.default_rng([3, collectives.rank])
        for _ in range(EXACT_FIRST):
            grads = gradients(rng, sizes)
            other = np.arange(3, dtype=f32).reshape(3, 1) + collectives.rank
            exact, halves = (run(one.average(grads, [other])) for one in of.values())
            for name in sizes:
                off = np.abs(halves[0][name] - exact[0][name])
                assert (off <= 2e-3 * 10 ** np.linspace(-5, 0, sizes[name]) + 1e-7).all()
            np.testing.assert_allclose(halves[1][0], exact[1][0], rtol=2e-3)
        sent = {half: one.engine.traffic for half, one in of.items()}
        assert sent[True].fp32_total == sent[False].fp32_total == sent[False].total
        assert sent[True].total == pytest.approx(sent[False].total / 2, rel=0.1)
        assert {tensor.name for tensor in of[True].ready(sizes)} == set(sizes)
        return np.concatenate([*halves[0].values()])

    found = simulation.run(worker, workers)
    for one in found:
        np.testing.assert_array_equal(one, found[0])


def test_means_beyond_float16_are_no_means():
    def worker(collectives):
        coded = CodedMean(Engine(TWO, collectives), half=True)
        for other in (1.0, -1e5):
            large = np.full(5003, 1e5 if collectives.rank == 0 else other, f32)
            with warnings.catch_warnings(action="error"):
                assert run(coded.average({"long": large})) is None
        assert run(coded.average({"long": np.ones(5003, f32)})) is not None

    simulation.run(worker, 2)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda saved: saved["units"].update(long=np.zeros(5, f32)), "'long': got 5 elements, expected 5003"),
        (lambda saved: saved["units"]["long"].fill(np.nan), "NaN or Inf"),
        (lambda saved: saved["feedback"].update(other=np.zeros(5, f32)), "does not have: .'other'"),
        (lambda saved: saved["seen"].clear(), "not complete"),
    ],
)
def test_what_was_learned_of_another_model_is_refused(damage, text):
    def worker(collectives):
        coded = CodedMean(Engine(TWO, collectives))
        run(coded.average({"long": np.ones(5003, f32)}))
        saved = coded.state()
        damage(saved)
        with pytest.raises(ConfigurationError, match=text):
            coded.check(saved, {"long": 5003})

    simulation.run(worker, 1)


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_what_is_lost_of_a_gradient_is_delivered_later(exchange):
    """The sum of the means that are given is that of the gradients, but for a few of them."""
    steps, sizes = 400, {"long": 5003}

    def worker(collectives):
        recipe = dataclasses.replace(TWO, exchange=exchange)
        coded, rng = CodedMean(Engine(recipe, collectives)), np.random.default_rng([3, collectives.rank])
        unit = coded.tensor("long", 5003)
        own, given = np.zeros(5003), np.zeros(5003)
        for _ in range(EXACT_FIRST):
            coded.observe([unit], [(10 ** np.linspace(-5, 0, 5003)).astype(f32)])
        for _ in range(steps):
            grads = gradients(rng, sizes)
            own += grads["long"]
            assert run(coded.mean([unit], [grads["long"]], beside=finite()))
            given += unit.weight
        return own, given

    found = simulation.run(worker, 3)
    expected = np.mean([own for own, _ in found], axis=0)
    for _, given in found:
        np.testing.assert_array_equal(given, found[0][1])
        assert np.abs(given / expected - 1).mean() < 0.02


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_late_gradients_arrive_whole_where_all_errors_are_kept(exchange):
    """Of elements that have rested: what was owed to them meanwhile comes, too."""
    late = np.arange(4096) % 16 == 0

    def worker(collectives):
        recipe = Recipe(warmup="three_bit", exchange=exchange)
        coded, rng = CodedMean(Engine(recipe, collectives)), np.random.default_rng([3, collectives.rank])
        own, given = np.zeros(4096), np.zeros(4096)
        for step in range(400):
            grad = (1 + 0.3 * rng.standard_normal(4096)).astype(f32)
            grad = np.where(late & (step < 150), f32(0), grad)
            own, given = own + grad, given + run(coded.average({"rows": grad}))[0]["rows"]
        return own, given

    found = simulation.run(worker, 2)
    own, given = np.mean([own for own, _ in found], axis=0), found[0][1]
    assert given[late].sum() == pytest.approx(own[late].sum(), rel=2e-3)


@pytest.mark.parametrize("bits", ["two_bit", "three_bit"])
def test_gradients_that_are_rare_arrive_whole(bits):
    """As those of an embedding's rows, which one step in 50 has: SGD must move as far as with exact means."""

    def worker(collectives):
        coded = CodedMean(Engine(dataclasses.replace(TWO, warmup=bits), collectives))
        rng = np.random.default_rng([3, collectives.rank])
        own, given = np.zeros(4096), np.zeros(4096)
        for step in range(EXACT_FIRST + 600):
            rows = np.repeat(rng.random(128) < 0.02, 32)
            grad = (rows * (1 + 0.5 * rng.standard_normal(4096))).astype(f32)
            mean = run(coded.average({"rows": grad}))[0]["rows"]
            if step >= 300:
                own, given = own + grad, given + mean
        return own, given

    found = simulation.run(worker, 2)
    own, given = np.mean([own for own, _ in found], axis=0), found[0][1]
    assert abs(given @ own / (own @ own) - 1) < 0.03


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_the_sum_of_what_is_given_and_of_what_is_kept_is_that_of_the_gradients(exchange):
    """Though the workers' gradients cancel here and there, units follow their mean, and it jumps to 100 times."""

    def worker(collectives):
        recipe = dataclasses.replace(TWO, exchange=exchange)
        coded, rng = CodedMean(Engine(recipe, collectives)), np.random.default_rng([3, collectives.rank])
        unit = coded.tensor("long", 5003)
        common = (10 ** np.linspace(-5, 0, 5003)).astype(f32)
        own, given = np.zeros(5003), np.zeros(5003)
        for _ in range(EXACT_FIRST):
            coded.observe([unit], [common])
        for step in range(100):
            size = (1 + 99 * (step > 50)) * 1.02**step
            grad = common * f32(size + 2 * (-1) ** collectives.rank * rng.random(5003))
            own += grad
            assert run(coded.mean([unit], [grad], beside=finite()))
            given += unit.weight
        formula, p = coded._rule.contribution(unit, coded.engine.context)
        served = np.zeros(5003, f32)
        for name, bucket in coded.engine.exchange.served().items():
            where = np.concatenate([np.arange(piece.start, piece.stop) for piece in bucket.pieces] or [[]]).astype(int)
            served[where] = coded.engine.feedback.residual(name, bucket.size)
        units = 1 / formula(p, f32(1), None, unit.variance, None, None)
        return own, given, unit.residual * units, served * units

    found = simulation.run(worker, 4)
    own, given, kept, _ = (np.mean(each, axis=0) for each in zip(*found, strict=True))
    kept += np.sum([served for *_, served in found], axis=0)
    np.testing.assert_allclose(given + kept, own, rtol=1e-3)
    assert np.abs(kept).sum() > 1e-3 * np.abs(own).sum()


@pytest.mark.parametrize(
    ("bits", "noise", "most"),
    [
        ("two_bit", 0, 0.93),
        ("three_bit", 0, 0.54),
        ("four_bit", 0, 0.27),
        ("three_bit", 4, 0.07),
        ("four_bit", 4, 0.025),
    ],
)
def test_gradients_that_stay_apart_are_off_by_so_much(bits, noise, most):
    """Where the optimizer divides by a second moment: docs/recipes.md has the figures. The workers' gradients differ
    by four times their mean, alike in all steps; their own ``noise`` is another one in each step."""
    mean, *own = np.random.default_rng(1).standard_normal((5, 4096)).astype(f32)
    own = mean + 4 * f32(4 / 3) ** f32(0.5) * (own - np.mean(own, axis=0))

    def worker(collectives):
        coded = CodedMean(Engine(Recipe(warmup=bits, exchange="direct"), collectives), divides=True)
        rng, given, sent = np.random.default_rng([5, collectives.rank]), 0, 0
        for step in range(EXACT_FIRST + 300):
            grad = own[collectives.rank] + noise * rng.standard_normal(4096).astype(f32)
            found = run(coded.average({"long": grad}))[0]["long"]
            if step >= EXACT_FIRST:
                given, sent = given + found, sent + grad
        return given, sent

    found = simulation.run(worker, 4)
    sent = np.mean([sent for _, sent in found], axis=0)
    off = [np.linalg.norm(given - sent) / np.linalg.norm(sent) for given, _ in found]
    assert off[0] == off[1] < most


@pytest.mark.cases(6)
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("bits", ["two_bit", "three_bit", "four_bit"])
@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("apart", [4, 32])
def test_units_do_not_grow_where_gradients_stay_apart(apart, divides, bits, exchange):
    """Then gradients have many units, and beside them, in the same blocks, are elements whose gradients stopped."""
    mean, *own = np.random.default_rng(1).standard_normal((5, 4096)).astype(f32)
    own = mean + apart * (own - np.mean(own, axis=0))
    gone = np.random.default_rng(2).random(4096) < 0.3

    def worker(collectives):
        recipe = Recipe(warmup=bits, exchange=exchange)
        coded, means = CodedMean(Engine(recipe, collectives), divides=divides), []
        for step in range(EXACT_FIRST + 300):
            grad = np.where(gone & (step >= EXACT_FIRST), f32(0), own[collectives.rank])
            means.append(run(coded.average({"long": grad}))[0]["long"].copy())
        return means

    means = simulation.run(worker, 4)[0]
    assert max(float(np.abs(found).max()) for found in means) < 10 * np.abs(own).max()
    assert not means[-1][gone].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [17, 5000], ids=["moves", "rests"])
def test_no_bound_hides_what_is_not_finite(where, bad):
    def worker(collectives):
        coded = CodedMean(Engine(Recipe(warmup="three_bit"), collectives), divides=True)
        grad = (np.arange(5003) < 4900).astype(f32)
        for _ in range(EXACT_FIRST + 3):
            assert run(coded.average({"long": grad})) is not None
        before, spoilt = coded.state(), grad.copy()
        if collectives.rank == 1:
            spoilt[where] = bad
        assert run(coded.average({"long": spoilt})) is None
        np.testing.assert_array_equal(coded.state()["units"]["long"], before["units"]["long"])
        assert run(coded.average({"long": grad})) is not None

    simulation.run(worker, 2)


def test_elements_that_come_late_are_learned_in_few_bits():
    """Elements that have had no gradient for long, and then have one in every step: Adam learns them as with exact
    means, because they begin with the unit of their tensor and owe nothing of before."""
    late = np.arange(4096) % 256 < 2

    def train_on(warmup):
        def worker(collectives):
            found, rng = {"rows": np.zeros(4096, f32)}, np.random.default_rng([3, collectives.rank])
            recipe = Recipe(warmup=warmup, exchange="direct")
            optimizer = NumpyOptimizer(found, Adam(lr=0.01), collectives=collectives, warmup_steps=1000, recipe=recipe)
            for step in range(620):
                grad = 1e-4 * (found["rows"] - 1 + 0.1 * rng.standard_normal(4096)).astype(f32)
                optimizer.step({"rows": np.where(late & (step < 500), f32(0), grad)})
            return found["rows"][late]

        return simulation.run(worker, 2)[0]

    exact, few = train_on("exact"), train_on("three_bit")
    assert exact.mean() > 0.9
    assert few.mean() > 0.98 * exact.mean()


def test_elements_that_begin_to_move_do_not_silence_others():
    """What is owed to them is not sent at once: the others of their blocks would be nothing beside it."""
    late = np.arange(4096) % 256 < 8

    def worker(collectives):
        coded = CodedMean(Engine(Recipe(warmup="three_bit", exchange="direct"), collectives), divides=True)
        rng, told = np.random.default_rng([3, collectives.rank]), []
        for step in range(400):
            grad = (1 + 0.3 * rng.standard_normal(4096)).astype(f32)
            found = run(coded.average({"rows": np.where(late & (step < 150), f32(0), grad)}))[0]["rows"]
            told.append(float(found[~late].mean()) if step >= 150 else 1.0)
        return told, float(found[late].mean())

    told, learned = simulation.run(worker, 2)[0]
    assert min(told) > 0.9
    assert learned == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("workers", "most"), [(2, 32), (64, 32), (100, 40)])
def test_a_contribution_is_bounded_where_the_optimizer_divides(workers, most):
    """By 32 units, and by more where many workers' noise makes contributions larger; NaN and Inf are not hidden."""
    for divides, expected in ((True, most), (False, 1e6)):
        rule, context = gradient.Gradient(divides), Context(reference, Recipe(), workers)
        tensor = Tensor("x", *(np.ones(4, f32) for _ in range(4)), step=10**6, variance_steps=10**6)
        rule.init(tensor)
        formula, p = rule.contribution(tensor, context)
        found = reference.contribution(formula, p, tensor.arrays(np.array([1, -1e6, math.nan, math.inf], f32)))
        np.testing.assert_allclose(found, [1, -expected, math.nan, math.inf], rtol=1e-3)


@pytest.mark.parametrize(("drop", "least", "most"), [(5, 0.9, 1.1), (20, 0.25, 0.9)])
def test_elements_that_fall_behind_others_wait_for_their_unit(drop, least, most):
    """A quarter of the elements have gradients that are a ``drop``-th from some step on: how far Adam moves them in the
    next 300 steps beside exact means; docs/recipes.md has the figures."""
    behind = np.random.default_rng(2).random(1024) < 0.25

    def worker(collectives, warmup):
        weights = {"long": np.zeros(1024, f32)}
        recipe = Recipe(warmup=warmup, exchange="direct", min_compressed_size=1)
        optimizer = NumpyOptimizer(weights, Adam(lr=1e-3), collectives=collectives, warmup_steps=10**6, recipe=recipe)
        rng = np.random.default_rng([5, collectives.rank])
        for step in range(360):
            if step == 60:
                before = weights["long"].copy()
            grad = 0.1 + 0.2 * rng.standard_normal(1024)
            optimizer.step({"long": np.where(behind & (step >= 60), grad / drop, grad).astype(f32)})
        return float((weights["long"] - before)[behind].mean())

    exact, found = (simulation.run(functools.partial(worker, warmup=w), 4)[0] for w in ("exact", "three_bit"))
    assert least < found / exact < most


@pytest.mark.parametrize("exchange", ["direct", "two_stage", "hierarchical"])
def test_no_error_is_kept_where_the_optimizer_divides(exchange):
    """Neither by workers nor by servers; of elements that rest, the residual tells that they are wanted."""
    rests = np.arange(8192) % 8 == 0

    def worker(collectives, divides):
        coded = CodedMean(Engine(Recipe(warmup="three_bit", exchange=exchange), collectives), divides=divides)
        rng = np.random.default_rng([3, collectives.rank])
        for _ in range(EXACT_FIRST + 20):
            run(coded.average({"long": np.where(rests, f32(0), rng.standard_normal(8192).astype(f32))}))
        run(coded.average({"long": np.ones(8192, f32)}))
        kept = coded.state()["feedback"]
        return {name for name, values in kept.items() if values.size == 8192 and values[~rests].any()}, kept

    for names, kept in simulation.run(functools.partial(worker, divides=True), 8, workers_per_host=4):
        assert not names
        assert all(not values.any() for values in kept.values() if values.size != 8192)
    assert any(names for names, _ in simulation.run(functools.partial(worker, divides=False), 8, workers_per_host=4))


@pytest.mark.parametrize(
    ("bits", "workers", "off"),
    [pytest.param("three_bit", 64, 0.2, marks=LONG), ("three_bit", 16, 0.1), ("two_bit", 4, 0.3)],
)
def test_adam_moves_elements_without_noise_as_far_beside_others(bits, workers, off):
    """Where most of a block is the noise of many workers, which sets its scale: they are told of when their unit has
    followed what they are told of."""
    quiet, steps = np.random.default_rng(2).random(1024) < 0.25, 200

    def worker(collectives, warmup):
        weights = {"long": np.zeros(1024, f32)}
        recipe = Recipe(warmup=warmup, exchange="direct", min_compressed_size=1)
        optimizer = NumpyOptimizer(weights, Adam(lr=1e-3), collectives=collectives, warmup_steps=10**6, recipe=recipe)
        rng = np.random.default_rng([5, collectives.rank])
        for _ in range(EXACT_FIRST + steps):
            noise = rng.standard_normal(1024) * f32(0.1 * workers**0.5)
            optimizer.step({"long": np.where(quiet, f32(0.1), noise).astype(f32)})
        return float(weights["long"][quiet].mean())

    exact, found = (simulation.run(functools.partial(worker, warmup=w), workers)[0] for w in ("exact", bits))
    assert found / exact == pytest.approx(1, abs=off)


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_of_gradients_that_were_large_once_little_is_under_way(exchange, kernels):
    """After a few elements' gradients of 30 times their unit, as in the first steps of a run."""

    def worker(collectives):
        recipe = dataclasses.replace(TWO, exchange=exchange)
        coded, rng = CodedMean(Engine(recipe, collectives), divides=True, kernels=kernels), np.random.default_rng(3)
        unit = coded.tensor("long", 5003)
        for _ in range(EXACT_FIRST):
            coded.observe([unit], [np.ones(5003, f32)])
        large = np.where(rng.random(5003) < 0.01, f32(30), f32(1)).astype(f32)
        given = []
        for step in range(12):
            small = (1e-2 * rng.standard_normal(5003)).astype(f32)
            run(coded.mean([unit], [large if step == 0 else small], beside=finite()))
            given.append(np.array(unit.weight))
            assert not unit.residual.any()
        return given

    given = simulation.run(worker, 2)[0]
    assert given[0].max() > 1.5
    assert np.abs(given[1:]).max() < 0.1


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("bits", ["two_bit", "three_bit", "four_bit"])
def test_a_gradient_that_is_zero_for_long(bits, exchange):
    """It is exact until it has not been for some steps, so that its units are known; and so is a larger one."""
    recipe = dataclasses.replace(TWO, exchange=exchange, warmup=bits)

    def worker(collectives):
        found = {"late": np.zeros(2048, f32), "early": np.zeros(2048, f32)}
        optimizer = NumpyOptimizer(found, SGD(lr=1.0), collectives=collectives, warmup_steps=1000, recipe=recipe)
        rng, sizes = np.random.default_rng(collectives.rank), []
        for step in range(60):
            noise = {name: (1e-3 * (1 + rng.standard_normal(2048))).astype(f32) for name in found}
            before = found["late"].copy()
            assert optimizer.step(noise if step >= 25 else noise | {"late": np.zeros(2048, f32)})
            sizes.append(float(np.sqrt(np.mean(np.square(found["late"] - before)))))
        return found, sizes

    (ours, sizes), (others, _) = simulation.run(worker, 2)
    assert all(np.array_equal(ours[name], others[name]) for name in ours)
    assert not any(sizes[:25])
    assert all(0.5 < size / 1.22e-3 < 2 for size in sizes[25:])


def test_gradients_that_overflow_are_skipped_and_forgotten():
    def worker(collectives):
        coded, rng = CodedMean(Engine(TWO, collectives)), np.random.default_rng(collectives.rank)
        unit, found = coded.tensor("long", 5003), []
        for _ in range(EXACT_FIRST):
            coded.observe([unit], [rng.standard_normal(5003).astype(f32)])
        for step in range(6):
            size = 1e25 if step == 1 else 1.0
            run(coded.mean([unit], [(size * rng.standard_normal(5003)).astype(f32)], beside=finite()))
            found.append(np.isfinite(unit.weight).all() and np.isfinite(unit.variance).all())
        return found

    assert all(map(all, simulation.run(worker, 2)))


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_nothing_is_kept_when_compression_starts(exchange):
    recipe = dataclasses.replace(TWO, exchange=exchange)

    def worker(collectives):
        coded = CodedMean(Engine(recipe, collectives))
        for _ in range(2):
            unit = coded.tensor("long", 5003)
            for _ in range(EXACT_FIRST):
                coded.observe([unit], [np.ones(5003, f32)])
            assert run(coded.mean([unit], [np.ones(5003, f32)], beside=finite()))
            coded.forget(["long"])
            engine = coded.engine
            assert not [*engine.feedback, *engine.tensors, *engine._messages, *engine.exchange.served()]

    simulation.run(worker, 2)


def finite():
    yield from ()
    return True


@pytest.mark.parametrize(
    "rule", [Adam(lr=0.01), Adam(lr=0.01, weight_decay=0.1), SGD(lr=0.01, momentum=0.9), Lion(lr=0.01)]
)
def test_any_rule_moves_as_with_exact_steps(rule):
    """Stationary gradients: the weights go as far, and compression starts as ever."""
    exact = dataclasses.replace(TWO, warmup="exact")
    (_, ours, _), (_, plain, _) = (
        simulation.run(lambda c, r=r: train(c, r, rule, steps=160, warmup_steps=120), 2)[0] for r in (TWO, exact)
    )
    large = np.arange(len(ours)) > 0
    assert abs(np.abs(ours[large]).mean() / np.abs(plain[large]).mean() - 1) < 0.05


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("where", ["long", "scalar"])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_nan_on_one_worker_changes_nothing_anywhere(exchange, where, policy):
    """In the twelfth step, and the steps after it are as if it had not been."""

    def spoil(rank, step, grads):
        if step == EXACT_FIRST + 2 and rank == 1:
            grads[where][0] = math.nan
        return grads

    recipe = dataclasses.replace(TWO, exchange=exchange, on_nonfinite=policy)
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="nothing was changed"):
            simulation.run(lambda c: train(c, recipe, spoil=spoil), 2)
        return
    runs = simulation.run(lambda c: train(c, recipe, spoil=spoil), 2)
    for optimizer, found, taken in runs:
        assert [i for i, one in enumerate(taken) if not one] == [EXACT_FIRST + 2]
        assert optimizer.engine.skipped == 1
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, runs[0][1])

    def without(collectives):
        found, rng = weights(), np.random.default_rng([7, collectives.rank])
        optimizer = NumpyOptimizer(found, Adam(lr=0.01), collectives=collectives, warmup_steps=30, recipe=recipe)
        for step in range(40):
            grads = gradients(rng, SIZES)
            if step != EXACT_FIRST + 2:
                optimizer.step(grads)
        return np.concatenate(list(found.values()))

    # One step fewer in the warm-up of neither: both have skipped it. The error feedback comes back to rounding.
    np.testing.assert_allclose(simulation.run(without, 2)[0], runs[0][1], atol=2e-3)


def test_a_warm_up_sends_two_bits_after_its_first_steps():
    def worker(collectives):
        optimizer, _, _ = train(collectives, steps=1, warmup_steps=100)
        sent = [optimizer.engine.traffic.total]
        rng = np.random.default_rng(1)
        for _ in range(40):
            optimizer.step(gradients(rng, SIZES))
            sent.append(optimizer.engine.traffic.total)
        return np.diff(sent)

    sent, elements = simulation.run(worker, 2)[0], sum(SIZES.values())
    assert (sent[: EXACT_FIRST - 1] == allreduce_bytes(4 * elements, 2)).all()
    assert (sent[EXACT_FIRST:] < 1.3 * elements * 2 / 8 + 200).all()


def test_a_run_of_one_worker_alone():
    optimizer, found, taken = simulation.run(train, 1)[0]
    assert all(taken)
    assert optimizer.steps == 40
    assert np.isfinite(found).all()


@pytest.mark.parametrize("schedule", [Local(), ZeroOne(), Gradients("three_bit")])
def test_with_another_schedule_there_is_no_such_warm_up(schedule):
    with pytest.raises(ConfigurationError, match=r"warmup='two_bit'.*schedule"):
        resolve(TWO, schedule)


@pytest.mark.parametrize(
    ("recipe", "schedule", "warmup"),
    [
        ("robust", None, "three_bit"),
        (Recipe(exchange="two_stage"), None, "three_bit"),
        (Recipe(warmup="exact"), None, "exact"),
        ("paper", None, "exact"),
        ("fixed", None, "exact"),
        ("robust", Local(), "exact"),
        ("robust", ZeroOne(), "exact"),
        ("robust", Gradients("two_bit"), "two_bit"),
        ("paper", Gradients("two_bit"), "two_bit"),
        (TWO, Gradients("two_bit"), "two_bit"),
    ],
)
def test_the_warm_up_of_each_recipe(recipe, schedule, warmup):
    assert resolve(recipe, schedule).warmup == warmup


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, "exact"), (EXACT_FIRST, "exact"), (EXACT_FIRST + 1, "three_bit"), ("auto", "three_bit")]
)
def test_a_warm_up_of_exact_steps_alone_learns_no_units(steps, warmup):
    def worker(collectives):
        optimizer = NumpyOptimizer(weights(), Adam(lr=0.01), collectives=collectives, warmup_steps=steps)
        assert (optimizer.coded is None) == (warmup == "exact")

    simulation.run(worker, 1)


def test_by_default_the_warm_up_sends_three_bits():
    """After ten exact steps, 32 bits of an element, and but for small tensors and scales."""

    def worker(collectives):
        found, rng = {"w": np.zeros(2**16, f32)}, np.random.default_rng(collectives.rank)
        optimizer, sent = NumpyOptimizer(found, Adam(lr=0.01), collectives=collectives, warmup_steps=30), []
        for _ in range(30):
            before = optimizer.engine.traffic.total
            assert optimizer.step(gradients(rng, {"w": 2**16}))
            sent.append(8 * (optimizer.engine.traffic.total - before) / 2**16)
        return sent

    sent = simulation.run(worker, 2)[0]
    assert sent[:EXACT_FIRST] == pytest.approx([32] * EXACT_FIRST, rel=0.01)
    assert sent[EXACT_FIRST:] == pytest.approx([3 + 32 / BLOCK] * 20, rel=0.02)


def test_gradients_in_every_step_are_a_warm_up_that_does_not_end():
    def worker(collectives, schedule, recipe):
        found, rng = weights(), np.random.default_rng([7, collectives.rank])
        steps = 10**6 if schedule is None else None
        optimizer = NumpyOptimizer(
            found, Adam(lr=0.01), collectives=collectives, recipe=recipe, schedule=schedule, warmup_steps=steps
        )
        for _ in range(30):
            assert optimizer.step(gradients(rng, SIZES))
        assert optimizer.phase == "warmup"
        return np.concatenate(list(found.values()))

    plain = dataclasses.replace(TWO, warmup="exact")
    ours = simulation.run(lambda c: worker(c, Gradients("two_bit"), plain), 2)
    same = simulation.run(lambda c: worker(c, None, TWO), 2)
    np.testing.assert_array_equal(ours, same)
    np.testing.assert_array_equal(ours[0], ours[1])


def test_the_recipe_exact_is_a_warm_up_that_does_not_end():
    def worker(collectives, **arguments):
        found, rng = weights(), np.random.default_rng([7, collectives.rank])
        optimizer = NumpyOptimizer(found, Adam(lr=0.01), collectives=collectives, **arguments)
        for _ in range(30):
            assert optimizer.step(gradients(rng, SIZES))
        assert optimizer.phase == "warmup"
        return np.concatenate(list(found.values()))

    ours = simulation.run(lambda c: worker(c, recipe="exact", warmup_steps=3), 2)
    same = simulation.run(lambda c: worker(c, recipe=Recipe(warmup="exact"), warmup_steps=10**6), 2)
    np.testing.assert_array_equal(ours, same)
    with pytest.raises(ConfigurationError, match=r"recipe='exact' never compresses, and schedule=Local"):
        simulation.run(lambda c: worker(c, recipe="exact", schedule=Local()), 2)


def test_bits_of_gradients_that_do_not_exist():
    with pytest.raises(ConfigurationError, match="codec='sign': expected one of"):
        Gradients("sign")


@dataclasses.dataclass(frozen=True)
class OwnAdam(SGD):
    """A rule with a second moment that is none of the library's."""

    has_variance = True


@pytest.mark.parametrize("rule", [SGD(lr=0.1), OwnAdam(lr=0.1), Adam(lr=0.1)])
def test_a_rule_says_whether_it_has_a_second_moment(rule):
    """In NumPy, too, no error of gradients in few bits is kept then."""

    def worker(collectives):
        weights = {"w": np.zeros(5000, np.float32)}
        return NumpyOptimizer(weights, rule, collectives=collectives, recipe=Recipe(warmup="three_bit")).coded

    (coded,) = simulation.run(worker, 1)
    assert coded._rule.divides is type(rule).has_variance is (type(rule) is not SGD)
    with pytest.raises(ConfigurationError, match="has_variance"):
        Wraps("torch.optim.Own", type(rule), momentum="m", variance="v" if type(rule) is SGD else None)

"""Local steps with 1-bit weight deltas, over simulated workers."""

import dataclasses
import functools
import itertools
import json

import numpy as np
import pytest

from horovod_onebit import CheckpointError, ConfigurationError, NonFiniteError, Recipe, simulation
from horovod_onebit.averages import own_share, second_moments
from horovod_onebit.checkpoint import save_checkpoint
from horovod_onebit.kernels import reference
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules import Context, Tensor
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.lamb import LAMB
from horovod_onebit.rules.lion import Lion
from horovod_onebit.rules.local import Delta
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.schedule import Local, ZeroOne
from horovod_onebit.stats import Traffic
from horovod_onebit.tasks import run
from horovod_onebit.warmup import AfterRise

f32 = np.float32
SIZES = {"scalar": 1, "nine": 9, "odd": 1025, "even": 2048, "long": 5003}
RECIPE = Recipe(block_size=16, min_compressed_size=10, bucket_size=700)


def gradients(weights, rng):
    return {name: (w - 1 + 0.3 * rng.standard_normal(w.size)).astype(f32) for name, w in weights.items()}


def make(collectives, *, recipe=RECIPE, rule=None, schedule=None, kernels="cpu", sizes=SIZES):
    weights = {name: np.zeros(size, f32) for name, size in sizes.items()}
    schedule = schedule or Local(every=4, doubling=6, freeze=9)
    optimizer = NumpyOptimizer(
        weights, rule or Adam(lr=0.01), collectives=collectives, schedule=schedule, recipe=recipe, kernels=kernels
    )
    return optimizer, weights


def train(collectives, steps=40, **options):
    rng = np.random.default_rng(collectives.rank)
    optimizer, weights = make(collectives, **options)
    for _ in range(steps):
        optimizer.step(gradients(weights, rng))
    optimizer.flush()
    return optimizer, np.concatenate(list(weights.values()))


def test_rounds_grow_and_every_step_is_in_one():
    schedule = Local(every=12, doubling=8)
    ends = [step for step in range(1, 100) if schedule.ends_round(step)]
    assert ends[:14] == [*range(1, 9), 10, 12, 14, 16, 20, 24]
    assert np.diff(ends).max() == 12
    assert [step for step in range(1, 50) if Local(every=16, doubling=0).ends_round(step)] == [16, 32, 48]
    assert all(Local(every=1).ends_round(step) for step in range(1, 1000))
    assert [step for step in range(1, 30) if Local(every=16).ends_round(step, first=True)] == [4, 8, 12, 16, 20, 24, 28]


def test_moments_are_frozen_after_the_learning_rate_has_risen():
    freezing = AfterRise(5)
    rates = [1.0, 2.0, 2.0, 3.0, 3.0, *[2.0] * 10, 9.0]
    due = [step for step, rate in enumerate(rates, 1) if freezing.reached(step, rate)]
    assert due == list(range(9, 17))
    again = AfterRise(5)
    again.load_state_dict(json.loads(json.dumps(freezing.state_dict())))
    assert again == freezing
    late = AfterRise(5)  # a run that has begun before, and whose rate still rises
    assert [step for step in range(64, 80) if late.reached(step, min(step, 66))] == list(range(71, 80))
    constant = AfterRise(5)
    assert [step for step in range(1, 10) if constant.reached(step, 0.1)] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0},
        {"every": 2.5},
        {"doubling": -1},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"momentum": "a"},
        {"delay": -1},
        {"delay": 17},
        {"freeze": -1},
    ],
)
def test_bad_schedules(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Local(**wrong)


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("exchange", "workers", "delay"),
    [
        *(("hierarchical", *case) for case in [(4, 0), (4, 1), (8, 0)]),
        *itertools.product(["direct", "two_stage"], [1, 2, 4, 8], [0]),
        *itertools.product(["direct", "two_stage"], [3], [0, 4]),
    ],
)
def test_workers_are_equal_after_rounds_and_both_kernels_agree(workers, exchange, delay):
    recipe = dataclasses.replace(RECIPE, exchange=exchange)
    schedule = Local(every=4, doubling=6, delay=delay, freeze=9)
    per_host = 2 if exchange == "hierarchical" else 1
    run = functools.partial(simulation.run, workers=workers, workers_per_host=per_host)
    fast, slow = (
        run(functools.partial(train, recipe=recipe, schedule=schedule, kernels=kernels))
        for kernels in ("cpu", "reference")
    )
    for _, weights in fast:
        np.testing.assert_array_equal(weights, fast[0][1])
    np.testing.assert_allclose(fast[0][1], slow[0][1], atol=1e-5)
    assert np.abs(fast[0][1] - 1).mean() < 0.75


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("rule", "momentum", "delay"),
    [
        (Adam(lr=0.01), 0.0, 0),
        (Adam(lr=0.01), 0.3, 0),
        (Adam(lr=0.01), 0.0, 1),
        (Adam(lr=0.01), 0.3, 4),
        (LAMB(lr=0.01), 0.0, 0),
        (SGD(lr=0.01, momentum=0.9), 0.0, 0),
        (Lion(lr=0.003), 0.0, 0),
    ],
)
def test_any_rule_trains_to_where_exact_steps_lead(rule, momentum, delay):
    schedule = Local(every=4, doubling=10, momentum=momentum, delay=delay, freeze=100)
    [(local, weights), *others] = simulation.run(functools.partial(train, steps=400, rule=rule, schedule=schedule), 4)
    assert all((weights == other).all() for _, other in others)
    exact = functools.partial(train_exactly, steps=400, rule=rule)
    assert np.abs(weights - 1).mean() < 1.1 * np.abs(simulation.run(exact, 4)[0] - 1).mean() + 0.02
    traffic = local.engine.traffic
    # With Adam, the second moments and the last gradients travel once.
    once = (
        1.5 * sum(8 * size + 4 * -(-size // 16) + 4 for size in SIZES.values())
        if schedule.freeze and local.frozen
        else 0
    )
    assert traffic.total == 110 * traffic.step + once
    assert traffic.fp32_total - once == 100 * traffic.fp32_step  # of a round of 4


def train_exactly(collectives, steps, rule):
    rng = np.random.default_rng(collectives.rank)
    weights = {name: np.zeros(size, f32) for name, size in SIZES.items()}
    optimizer = NumpyOptimizer(weights, rule, collectives=collectives, warmup_steps=steps)
    for _ in range(steps):
        optimizer.step(gradients(weights, rng))
    return np.concatenate(list(weights.values()))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_round_is_what_the_rule_says(momentum):
    """Against the formulas of ``rules.local``, of which only ``1bit`` is taken from the kernels."""
    size, workers, every, rounds, rate = 100, 3, 5, 6, 0.1
    start = np.linspace(-1, 1, size).astype(f32)
    pushes = np.random.default_rng(0).standard_normal((rounds, workers, every, size)).astype(f32)

    def worker(collectives):
        weights = {"w": start.copy()}
        schedule = Local(every=every, doubling=0, momentum=momentum)
        optimizer = NumpyOptimizer(weights, SGD(lr=rate), collectives=collectives, schedule=schedule, recipe=RECIPE)
        for grad in pushes[:, collectives.rank].reshape(-1, size):
            optimizer.step({"w": grad})
        return weights["w"]

    context = Context(reference, RECIPE, workers)
    coding, rule = context.coding(16), Delta(momentum)
    common, m, errors = start.copy(), np.zeros(size, f32), np.zeros((workers, size), f32)
    for of_round in pushes:
        rows = np.zeros((workers, coding.codec.size(size, 16)), np.uint8)
        for i in range(workers):
            own = common.copy()
            for grad in of_round[i]:
                own -= f32(rate) * grad
            tensor = Tensor("w", own, m, None, errors[i], anchor=common)
            rule.encode(tensor, own, rows[i], 0, 16, context)
        x = reference.decode_mean(rows, 0, size, coding)
        m = f32(momentum) * m + x
        common = common - (x + f32(momentum) * m)
    for weights in simulation.run(worker, workers):
        np.testing.assert_allclose(weights, common, atol=2e-6)


def freezing(every=1, freeze=5):
    """Local steps whose messages are exact."""
    return {"schedule": Local(every=every, doubling=0, freeze=freeze), "exact": ["*"]}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_after_the_freeze_exact_rounds_of_one_step_are_adam_of_the_mean_gradient(decay):
    """But for its second moment, which is frozen."""
    size, workers, steps, freeze, lr = 300, 3, 30, 5, 0.01
    pushes = np.random.default_rng(1).standard_normal((steps, workers, size)) * np.logspace(-3, 3, size)
    start = np.linspace(-1, 1, size).astype(f32)

    def worker(collectives):
        weights = {"w": start.copy()}
        rule = Adam(lr=lr, weight_decay=decay)
        recipe = dataclasses.replace(RECIPE, clip=1e6)
        optimizer = NumpyOptimizer(weights, rule, collectives=collectives, recipe=recipe, **freezing(freeze=freeze))
        seen = []
        for grads in pushes:
            optimizer.step({"w": grads[collectives.rank].astype(f32)})
            seen.append((weights["w"].copy(), optimizer._tensors[0].momentum.copy()))
        return seen, optimizer._tensors[0].variance

    results = simulation.run(worker, workers)
    for seen, variance in results:
        np.testing.assert_array_equal(variance, results[0][1])
        np.testing.assert_array_equal(seen[-1], results[0][0][-1])
    weights, momentum = map(np.float64, results[0][0][freeze][:2])
    denominator = np.sqrt(np.float64(results[0][1]) / (1 - 0.999**freeze)) + 1e-8
    for step in range(freeze + 1, steps):
        momentum = 0.9 * momentum + 0.1 * pushes[step].mean(axis=0)
        weights = weights * (1 - lr * decay) - lr / (1 - 0.9 ** (step + 1)) * momentum / denominator
    np.testing.assert_allclose(results[0][0][-1][0], weights, atol=3e-5)
    np.testing.assert_allclose(results[0][0][-1][1] / denominator, momentum / denominator, atol=1e-3)


def test_a_round_of_frozen_adam_is_what_the_rule_says():
    """Against the formulas of ``rules.frozen``, with messages in float32. Epsilon is set in the middle of a round."""
    size, workers, every, freeze, lr, decay = 50, 3, 4, 8, 0.01, 0.05
    pushes = np.random.default_rng(2).standard_normal((28, workers, size))
    start = np.linspace(-1, 1, size).astype(f32)

    def rate_at(step):
        return lr * (3 if step < freeze else 1 + step % 3)

    def eps_at(step):
        return 1e-8 if step < 18 else 0.3

    def worker(collectives):
        weights, rule = {"w": start.copy()}, Adam(lr=lr, weight_decay=decay)
        optimizer = NumpyOptimizer(weights, rule, collectives=collectives, recipe=RECIPE, **freezing(every, freeze))
        tensor, seen = optimizer._tensors[0], []
        for step, grads in enumerate(pushes):
            optimizer.rule = dataclasses.replace(rule, lr=rate_at(step), eps=eps_at(step))
            optimizer.step({"w": grads[collectives.rank].astype(f32)})
            seen.append((weights["w"].copy(), tensor.momentum.copy()))
        return seen, tensor.variance

    results = simulation.run(worker, workers)
    clip, root = RECIPE.clip_for(workers), np.sqrt(np.float64(results[0][1]) / (1 - 0.999**freeze))
    common = np.float64(results[0][0][freeze - 1][0])
    momenta = [np.float64(seen[freeze - 1][1]) for seen, _ in results]
    for first in range(freeze, len(pushes), every):
        rates, kept, own = 0.0, 1.0, [common.copy() for _ in results]
        for step in range(first, first + every):
            rate = rate_at(step)
            rates, kept = rates + rate / (1 - 0.9 ** (step + 1)), kept * (1 - rate * decay)
            for i in range(workers):
                momenta[i] = 0.9 * momenta[i] + 0.1 * pushes[step, i]
                moved = np.clip(momenta[i] / (root + eps_at(step)), -clip, clip)
                own[i] = own[i] * (1 - rate * decay) - rate / (1 - 0.9 ** (step + 1)) * moved
        denominator = root + eps_at(first + every - 1)
        momenta = [(kept * common - np.mean(own, axis=0)) * denominator / rates] * workers
        common = np.mean(own, axis=0)
        for seen, _ in results:
            np.testing.assert_allclose(seen[first + every - 1][0], common, atol=1e-5)
            np.testing.assert_allclose(seen[first + every - 1][1], momenta[0], atol=1e-3)


def test_second_moments_of_the_mean_gradient():
    """The ratio is 1 where all workers have the same gradient, 1/n where theirs cancel, block by block."""
    noise = np.random.default_rng(0).standard_normal((4, 2048)).astype(f32)

    def worker(collectives):
        same, alone = noise[0], noise[collectives.rank]
        gradient = np.concatenate([same, alone, np.zeros(8, f32), f32([3.0])])
        own = np.arange(gradient.size, dtype=f32) * (1 + collectives.rank)
        traffic = Traffic()
        arguments = [own], [gradient], [1.0], lambda size: 8, collectives, "second", traffic
        return run(second_moments(*arguments))[0], traffic.total

    results = simulation.run(worker, 4)
    for found, sent in results:
        np.testing.assert_array_equal(found, results[0][0])
        assert sent == 1.5 * 4 * (2 * found.size + -(-found.size // 8) + 1)
    ratio = results[0][0][1:] / (2.5 * np.arange(1, results[0][0].size))
    np.testing.assert_allclose(ratio[:2047], 1, rtol=1e-6)
    assert ratio[2048:4095].min() >= 0.25 - 1e-6
    assert ratio[2048:4095].mean() == pytest.approx(0.27, abs=0.03)
    np.testing.assert_allclose(ratio[-1], 1, rtol=1e-6)  # of a gradient that all have
    # Of no gradients at all in this step: as the others.
    mean, square = float(np.square(noise.mean(0)).sum()), float(np.square(noise).sum()) / 4
    everywhere = float(np.square(noise[0]).sum()) + 9
    np.testing.assert_allclose(ratio[-9:-1], (everywhere + mean) / (everywhere + square), rtol=1e-5)


def test_second_moments_that_were_of_the_mean_gradient_before():
    """As after exact steps: only what own gradients have added since is of another size."""
    beta2, before, after, n = 0.999, 900, 150, 4

    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        own = 0.0
        for step in range(before + after):
            mean_power, own_power = 1.0, float(n)  # of gradients that are nothing but noise
            own = beta2 * own + (1 - beta2) * (mean_power if step < before else own_power)
        variance = np.full(4096, own / (1 - beta2 ** (before + after)), f32)
        gradient = f32(2) * rng.standard_normal(4096).astype(f32)
        share = own_share(beta2, after, before + after)
        arguments = [variance], [gradient], [share], lambda _: 4096, collectives, "s", Traffic()
        return run(second_moments(*arguments))[0].mean()

    assert simulation.run(worker, n)[0] == pytest.approx(1.0, rel=0.05)
    assert own_share(beta2, 5, 5) == own_share(beta2, 9, 5) == own_share(beta2, 0, 0) == 1.0
    assert own_share(beta2, 0, 5) == 0.0


@pytest.mark.parametrize("size", [1e19, 1e38])
def test_second_moments_of_gradients_whose_squares_overflow(size):
    def worker(collectives):
        own = [np.full(16, 2.0, f32)]
        return run(second_moments(own, [np.full(16, size, f32)], [1.0], lambda _: 8, collectives, "s", Traffic()))

    for found in simulation.run(worker, 2):
        np.testing.assert_array_equal(found, [np.full(16, 2.0, f32)])


@pytest.mark.parametrize("how", ["skipped", "lost", "variance", "gradient"])
def test_second_moments_that_one_worker_cannot_use(how, caplog):
    """They are frozen as soon as those of all can be used; who cannot use theirs is said."""

    def worker(collectives):
        rng, frozen = np.random.default_rng(collectives.rank), []
        optimizer, weights = make(collectives, schedule=Local(every=4, doubling=6, freeze=10))
        unspoilt = optimizer.second_moments

        def spoilt():
            moments = unspoilt()
            moments[2].gradient[3] = np.inf
            return moments

        for step in range(1, 15):
            grads = gradients(weights, rng)
            if how == "gradient" and collectives.rank == 1 and step in (10, 13):
                optimizer.second_moments = spoilt if step == 10 else unspoilt
            if collectives.rank == 1 and step == {"skipped": 10, "lost": 10, "variance": 3, "gradient": 0}[how]:
                grads["odd"][3] = np.nan if how == "skipped" else 1e20
                if how == "lost":
                    weights["odd"][3] = np.inf
            optimizer.step(grads)
            frozen.append(optimizer.frozen)
            if how == "variance" and step == 12 and collectives.rank == 1:
                optimizer.arrays()["variance/odd"][3] = 1
        return frozen, np.concatenate(list(weights.values()))

    results = simulation.run(worker, 3)
    first = {"skipped": 11, "lost": 11, "variance": 13, "gradient": 13}[how]
    for frozen, weights in results:
        assert frozen == [step >= first for step in range(1, 15)]
        assert np.isfinite(weights).all()
    said = [record.getMessage() for record in caplog.records if "not frozen yet" in record.getMessage()]
    assert len(said) == (how in ("variance", "gradient"))
    assert all(": there are NaN or Inf in those of worker 1. " in text for text in said)


@pytest.mark.parametrize(
    "options", [{"momentum": 0.5}, {"freeze": 0}, {"delay": 1, "freeze": 0}, {"rule": SGD(lr=0.01, momentum=0.9)}]
)
def test_moments_stay_each_workers_own(options):
    options = {"every": 4, "doubling": 6, "freeze": 9, "rule": Adam(lr=0.01)} | options
    rule = options.pop("rule")
    schedule = Local(**options)
    results = simulation.run(functools.partial(train, rule=rule, schedule=schedule), 2)
    assert not any(optimizer.frozen for optimizer, _ in results)
    assert not all((a.momentum == b.momentum).all() for a, b in zip(*(o._tensors for o, _ in results), strict=True))


@pytest.mark.parametrize("delay", [1, 3, 4])
def test_second_moments_are_common_with_a_delay_too(delay):
    """The freeze ends the exchange that is under way; from then on messages are hidden again, and momenta are own."""

    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        optimizer, weights = make(collectives, schedule=Local(every=4, delay=delay, freeze=10))
        frozen, hidden = [], []
        for _ in range(22):
            optimizer.step(gradients(weights, rng))
            frozen.append(optimizer.frozen)
            hidden.append(optimizer.driver.rounds.hidden)
        variances = np.concatenate([t.variance for t in optimizer._tensors])
        momenta = np.concatenate([t.momentum for t in optimizer._tensors])
        optimizer.flush()
        return frozen, hidden, variances, momenta, np.concatenate(list(weights.values()))

    results = simulation.run(worker, 3)
    assert all(frozen == [step >= 10 for step in range(1, 23)] for frozen, *_ in results)
    assert all(hidden[9] is False and hidden[7] and hidden[11] for _, hidden, *_ in results)
    for of_all, differ in zip(zip(*results, strict=True), (0, 0, 0, 1, 0), strict=True):
        assert all(np.array_equal(one, of_all[0]) for one in of_all[1:]) != differ


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_gradient_in_the_step_of_the_freeze(value):
    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        optimizer, weights = make(collectives)
        for step in range(40):
            wrong = collectives.rank == 1 and step == 8
            optimizer.step(bad(weights, rng, value) if wrong else gradients(weights, rng))
        optimizer.flush()
        return np.concatenate([np.concatenate([t.weight, t.momentum, t.variance]) for t in optimizer._tensors])

    results = simulation.run(worker, 3)
    assert all((found == results[0]).all() and np.isfinite(found).all() for found in results)


def test_after_a_lost_round_the_momentum_is_that_of_the_next_one():
    """What was counted in the lost round is forgotten."""

    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        optimizer, weights = make(collectives, schedule=Local(every=4, doubling=0, freeze=8))
        for step in range(24):
            if step == 14 and collectives.rank == 1:
                weights["odd"][3] = np.nan
            optimizer.step(gradients(weights, rng))
            if step == 15:
                counted = [tensor.layer.copy() for tensor in optimizer._tensors]
        momenta = np.concatenate([tensor.momentum for tensor in optimizer._tensors])
        return counted, momenta

    results = simulation.run(worker, 3)
    for counted, momenta in results:
        np.testing.assert_array_equal(counted, [[0, 1, 0]] * len(SIZES))
        np.testing.assert_array_equal(momenta, results[0][1])


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_a_round_that_ends_early_leaves_the_momentum_as_large_as_it_was(exchange):
    """Residuals of whole rounds, divided by the rates of one step, would make it three to four times as large."""
    size, flushed = 4096, 41

    def worker(collectives, flushes):
        own, common = np.random.default_rng(collectives.rank), np.random.default_rng(99)
        schedule, recipe = Local(every=8, doubling=0, freeze=16), dataclasses.replace(RECIPE, exchange=exchange)
        optimizer, _ = make(collectives, schedule=schedule, recipe=recipe, sizes={"w": size})
        lengths, momenta = [], []
        for step in range(1, 65):
            gradient = common.standard_normal(size) + own.standard_normal(size)
            optimizer.step({"w": gradient.astype(f32)})
            if flushes and step == flushed:
                optimizer.flush()
            momenta.append(optimizer._tensors[0].momentum.copy())
            lengths.append(float(np.sqrt(np.mean(momenta[-1] ** 2))))
        return lengths, momenta[flushed - 1]

    usual = max(simulation.run(functools.partial(worker, flushes=False), 4)[0][0][flushed:])
    results = simulation.run(functools.partial(worker, flushes=True), 4)
    assert max(results[0][0][flushed - 1 :]) < 1.4 * usual
    assert min(results[0][0][flushed - 1 :]) > usual / 4
    assert all((momentum == results[0][1]).all() for _, momentum in results)


SCHEDULES = [
    Local(every=4, doubling=0, freeze=16),
    ZeroOne(var_freeze_step=16, var_update_scaler=8, local_step_scaler=8, local_step_clipper=4),
]


def momenta(collectives, schedule, rate, *, exchange="direct", steps=64):
    """After each step, with the learning rate ``rate(step)``."""
    own, common = np.random.default_rng(collectives.rank), np.random.default_rng(99)
    recipe = dataclasses.replace(RECIPE, exchange=exchange)
    sizes, seen = {"large": 4096, "small": 5}, []
    optimizer, _ = make(collectives, schedule=schedule, recipe=recipe, sizes=sizes)
    for step in range(1, steps + 1):
        optimizer.rule = Adam(lr=rate(step))
        drawn = {name: common.standard_normal(size) + own.standard_normal(size) for name, size in sizes.items()}
        optimizer.step({name: gradient.astype(f32) for name, gradient in drawn.items()})
        seen.append(np.concatenate([tensor.momentum for tensor in optimizer._tensors]))
    optimizer.flush()
    return np.array(seen), np.concatenate([tensor.momentum for tensor in optimizer._tensors])


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fall_of_the_rate_leaves_the_momentum_as_large_as_it_was(schedule, exchange):
    """Residuals of rounds at the old rate, divided by the new one, would make it hundreds of times as large."""
    job = functools.partial(momenta, schedule=schedule, exchange=exchange)
    (steady, _), _ = simulation.run(functools.partial(job, rate=lambda step: 0.01), 2)
    (fallen, _), _ = simulation.run(functools.partial(job, rate=lambda step: 0.01 if step <= 40 else 1e-5), 2)
    size = np.sqrt(np.mean(fallen[40:] ** 2, axis=1)) / np.sqrt(np.mean(steady[40:] ** 2, axis=1))
    assert 0.25 < size.min() <= size.max() < 4


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rate", [lambda step: 0.01 * (step <= 40), lambda step: 0.01 * (step <= 40 or step > 48)])
def test_without_a_rate_the_workers_have_one_momentum(schedule, rate):
    (first, flushed), *others = simulation.run(functools.partial(momenta, schedule=schedule, rate=rate), 3)
    ends = [step for step in range(44, len(first) + 1) if step % 4 == 0]  # after these steps, all are together
    assert np.isfinite(first).all()
    for seen, last in others:
        assert all(seen[step - 1].tobytes() == first[step - 1].tobytes() for step in ends)
        assert last.tobytes() == flushed.tobytes()


@pytest.mark.parametrize("delay", [1, 3, 5])
def test_a_hidden_exchange_is_what_the_rule_says(delay):
    """Each worker goes on from its own weights, and what all have moved arrives ``delay`` steps later."""
    size, workers, every, rounds, rate = 100, 3, 5, 6, 0.1
    start = np.linspace(-1, 1, size).astype(f32)
    pushes = np.random.default_rng(0).standard_normal((rounds * every, workers, size)).astype(f32)

    def worker(collectives):
        weights, seen = {"w": start.copy()}, []
        schedule = Local(every=every, doubling=0, delay=delay)
        optimizer = NumpyOptimizer(weights, SGD(lr=rate), collectives=collectives, schedule=schedule, recipe=RECIPE)
        for grad in pushes[:, collectives.rank]:
            optimizer.step({"w": grad})
            seen.append(weights["w"].copy())
        optimizer.flush()
        return seen, weights["w"]

    context = Context(reference, RECIPE, workers)
    coding, rule = context.coding(16), Delta()
    common, errors, rows = start.copy(), np.zeros((workers, size), f32), None
    own, sent, after = np.array([start] * workers), None, []
    for step, grads in enumerate(pushes):
        own = own - f32(rate) * grads
        if rows is not None and step % every == (every + delay - 1) % every:
            common = common - reference.decode_mean(rows, 0, size, coding)
            own, rows = common + (own - sent), None
        if step % every == every - 1:
            sent, rows = own.copy(), np.zeros((workers, coding.codec.size(size, 16)), np.uint8)
            for i in range(workers):
                tensor = Tensor("w", common, common, None, errors[i], anchor=common)
                rule.encode(tensor, own[i], rows[i], 0, 16, context)
        after.append(own.copy())
    common = common - reference.decode_mean(rows, 0, size, coding)
    for i, (seen, last) in enumerate(simulation.run(worker, workers)):
        np.testing.assert_allclose(seen, [of_all[i] for of_all in after], atol=2e-6)
        np.testing.assert_allclose(last, common, atol=2e-6)


@pytest.mark.parametrize("delay", [0, 1])
def test_flush_ends_the_round_and_nothing_is_lost(delay):
    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        optimizer, weights = make(collectives, schedule=Local(every=8, doubling=0, delay=delay))
        for _ in range(11):
            optimizer.step(gradients(weights, rng))
        apart = np.concatenate(list(weights.values()))
        own = {name: w.copy() for name, w in weights.items()}
        optimizer.flush()
        residuals = optimizer.engine.feedback.state_dict()
        return apart, {n: (own[n], weights[n].copy(), residuals[n]) for n in weights}

    results = simulation.run(worker, 3)
    assert not (results[0][0] == results[1][0]).all()
    for name in SIZES:
        common = results[0][1][name][1]
        assert all((result[1][name][1] == common).all() for result in results)
        # What all have moved since the round began is in the weights or in residuals; those from before it are the
        # same in all rows.
        if name in ("scalar", "nine"):
            np.testing.assert_allclose(common, np.mean([result[1][name][0] for result in results], axis=0), atol=1e-6)


def bad(weights, rng, value):
    grads = gradients(weights, rng)
    grads["odd"][7] = value
    return grads


@pytest.mark.parametrize("rule", [Adam(lr=1e-5), SGD(lr=1e-5)])
def test_weights_that_are_set_between_rounds_are_where_the_next_one_begins(rule):
    """As ``load_weights`` sets them."""

    def worker(collectives):
        optimizer, weights = make(collectives, rule=rule)
        for step in range(24):
            if step == 16:
                for weight in weights.values():
                    weight[:] = np.arange(weight.size) % 7
            optimizer.step(gradients(weights, np.random.default_rng(step)))
        optimizer.flush()
        return max(np.abs(weight - np.arange(weight.size) % 7).max() for weight in weights.values())

    assert max(simulation.run(worker, 2)) < 0.01


def test_workers_that_have_taken_different_numbers_of_local_steps_save_no_checkpoint(tmp_path):
    """Only some of them would have to end a round."""

    def worker(collectives):
        optimizer, weights = make(collectives, schedule=Local(every=4, doubling=0, freeze=0))
        for step in range(8 + collectives.rank):
            optimizer.step(gradients(weights, np.random.default_rng(step)))
        with pytest.raises(CheckpointError, match="worker 0 has taken 8 steps, worker 1 9"):
            save_checkpoint(tmp_path, optimizer)
        return True

    assert all(simulation.run(worker, 2, timeout=60))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_worker_skips_a_bad_step_alone(value):
    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        optimizer, weights = make(collectives)
        taken = []
        for step in range(40):
            wrong = collectives.rank == 1 and step == 33
            taken.append(optimizer.step(bad(weights, rng, value) if wrong else gradients(weights, rng)))
        return taken, optimizer.engine.skipped, np.concatenate(list(weights.values()))

    results = simulation.run(worker, 3)
    assert [sum(not one for one in taken) for taken, _, _ in results] == [0, 1, 0]
    assert [skipped for _, skipped, _ in results] == [0, 1, 0]
    assert all((weights == results[0][2]).all() and np.isfinite(weights).all() for _, _, weights in results)


def test_all_raise_if_the_recipe_says_so():
    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        optimizer, weights = make(collectives, recipe=dataclasses.replace(RECIPE, on_nonfinite="raise"))
        for step in range(40):
            wrong = collectives.rank == 1 and step == 33
            try:
                optimizer.step(bad(weights, rng, np.nan) if wrong else gradients(weights, rng))
            except NonFiniteError:
                return step, np.concatenate(list(weights.values()))
        return None

    results = simulation.run(worker, 3)
    assert {step for step, _ in results} == {35}
    assert all((weights == results[0][1]).all() for _, weights in results)


def test_a_round_with_weights_that_are_not_finite_is_lost_and_the_others_go_on():
    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        optimizer, weights = make(collectives, schedule=Local(every=4, doubling=0))
        lost, before = None, {}
        for step in range(60):
            if step == 20:
                before = {name: w.copy() for name, w in weights.items()}
            if step == 22 and collectives.rank == 1:
                weights["odd"][3] = np.nan  # what a user's code did
            taken = optimizer.step(gradients(weights, rng))
            if step == 23:
                lost = taken, all((weights[name] == before[name]).all() for name in weights)
                residuals = sum(np.square(r).sum() for r in optimizer.engine.feedback.state_dict().values())
        return lost, residuals, np.concatenate(list(weights.values()))

    results = simulation.run(worker, 3)
    assert [lost for lost, _, _ in results] == [(False, True)] * 3
    assert results[1][1] < min(results[0][1], results[2][1])  # the others' round travels with the next one
    assert all((weights == results[0][2]).all() and np.isfinite(weights).all() for _, _, weights in results)


@pytest.mark.parametrize("schedule", [Local(every=4, freeze=8), Local(every=4, momentum=0.5)])
def test_after_a_lost_round_nothing_stays_infinite(schedule):
    def worker(collectives):
        rng, results = np.random.default_rng(collectives.rank), []
        optimizer, weights = make(collectives, schedule=schedule)
        for step in range(40):
            grads = gradients(weights, rng)
            if step == 31 and collectives.rank == 1:
                weights["odd"][3] = np.inf
                for array in optimizer.arrays().values():
                    array[:1] = np.inf
            results.append(optimizer.step(grads))
        return [step for step, taken in enumerate(results) if not taken], optimizer.arrays()

    for lost, arrays in simulation.run(worker, 2):
        assert lost == [31]
        assert all(np.isfinite(array).all() for array in arrays.values())


@pytest.mark.parametrize("delay", [1, 2, 4])
def test_a_hidden_round_that_is_lost_is_found_later(delay):
    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        optimizer, weights = make(collectives, schedule=Local(every=4, doubling=0, delay=delay))
        taken = {}
        for step in range(60):
            if step == 22 and collectives.rank == 1:
                weights["odd"][3] = np.nan  # what a user's code did
            taken[step] = optimizer.step(gradients(weights, rng))
            if step == 23 + delay:
                back = np.concatenate(list(weights.values()))
        optimizer.flush()
        return [step for step in taken if not taken[step]], back, np.concatenate(list(weights.values()))

    results = simulation.run(worker, 3)
    assert {step for lost, _, _ in results[::2] for step in lost} == {23 + delay}
    for which in (1, 2):
        assert all((one[which] == results[0][which]).all() and np.isfinite(one[which]).all() for one in results)
    assert np.abs(results[0][2] - 1).mean() < 0.75


def test_hidden_rounds_raise_if_the_recipe_says_so():
    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        schedule = Local(every=4, doubling=0, delay=2)
        optimizer, weights = make(
            collectives, recipe=dataclasses.replace(RECIPE, on_nonfinite="raise"), schedule=schedule
        )
        for step in range(40):
            wrong = collectives.rank == 1 and step == 33
            try:
                optimizer.step(bad(weights, rng, np.nan) if wrong else gradients(weights, rng))
            except NonFiniteError as error:
                return step, str(error), np.concatenate(list(weights.values()))
        return None

    results = simulation.run(worker, 3)
    assert {step for step, _, _ in results} == {37}
    assert all("worker 1 " in text and (weights == results[0][2]).all() for _, text, weights in results)


def test_a_round_under_way_is_the_same_whatever_the_messages():
    """Buckets and kernels do not matter to what a round does."""
    recipes = [RECIPE, dataclasses.replace(RECIPE, bucket_size=1 << 20)]
    first, second = (simulation.run(functools.partial(train, recipe=r), 2)[0][1] for r in recipes)
    np.testing.assert_array_equal(first, second)

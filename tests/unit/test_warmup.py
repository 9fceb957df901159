"""When compression starts: the policies, and the automatic one on real optimizers."""

import functools
import math

import numpy as np
import pytest

from horovod_onebit import ConfigurationError, simulation
from horovod_onebit import warmup as warmups
from horovod_onebit.face import warmup_of
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.schedule import Local, ZeroOne
from horovod_onebit.warmup import NEVER, AfterRise, AutoWarmup, FixedWarmup, Phase


def run(warmup, norms, rates, beta2=0.999):
    """The first compressed step that ``warmup`` decides on, from norms and learning rates by step."""
    for step in range(1, 2000):
        if warmup.wants(step):
            warmup.observe(step, norms(step), rates(step), beta2)
        if warmup.phase(step) is Phase.COMPRESSED:
            return step
    return None


def test_what_users_may_give():
    assert warmups.make(100) == FixedWarmup(100)
    assert warmups.make(0.15, 1001) == FixedWarmup(151)
    assert warmups.make(0.07, 100) == FixedWarmup(7)  # 0.07 * 100 is 7.000000000000001
    assert isinstance(warmups.make("auto"), AutoWarmup)
    for wrong in (0, -3, True, 1.0, 2.5, "soon", None, float("nan")):
        with pytest.raises(ConfigurationError, match="expected a whole number of optimizer steps"):
            warmups.make(wrong, 100)
    for wrong in (None, 0, 10.0):
        with pytest.raises(ConfigurationError, match="total_steps is"):
            warmups.make(0.2, wrong)
    for alone in (100, "auto"):
        with pytest.raises(ConfigurationError, match="total_steps=1000"):
            warmups.make(alone, 1000)


@pytest.mark.parametrize("schedule", [None, ZeroOne(), Local()])
def test_total_steps_without_a_share_of_it_is_refused(schedule):
    with pytest.raises(ConfigurationError, match="total_steps=1000"):
        warmup_of(None, 1000, schedule)
    warmup_of(None, None, schedule)


def test_warmup_steps_means_that_many_exact_steps():
    assert [FixedWarmup(3).phase(n) for n in range(5)] == [Phase.WARMUP] * 3 + [Phase.COMPRESSED] * 2


@pytest.mark.parametrize(("direction", "beta2"), [(1, 0.999), (-1, 0.999), (1, 0.9)])
def test_the_second_moment_must_be_stable_in_both_directions(direction, beta2):
    """It grows or falls by a factor of 10 over 400 steps, and then stays."""
    decided = run(AutoWarmup(most=NEVER), lambda t: 10 ** (direction * min(t, 400) / 400), lambda t: 1.0, beta2)
    assert decided >= (400 if beta2 < 0.99 else 700)
    assert run(AutoWarmup(), lambda t: 1.0, lambda t: 1.0, beta2) == 20


def test_the_learning_rates_own_warm_up_is_waited_for():
    assert run(AutoWarmup(), lambda t: 1.0, lambda t: min(t, 300) / 300) == 310
    assert run(AutoWarmup(), lambda t: 1.0, lambda t: 1 - t / 2000) == 20
    assert run(AutoWarmup(), lambda t: None, lambda t: 0.1) == 20


def test_a_second_moment_that_never_settles_is_waited_for_200_steps_after_the_rise_of_the_learning_rate():
    assert run(AutoWarmup(), lambda t: t, lambda t: 1.0) == 210
    assert run(AutoWarmup(), lambda t: t, lambda t: min(t, 300)) == 500
    assert run(AutoWarmup(), lambda t: math.nan, lambda t: 1.0) is None


def test_a_resumed_run_decides_alike():
    norms, rates = (lambda t: 1 + 1 / math.sqrt(t)), (lambda t: min(t, 60))
    expected = run(AutoWarmup(), norms, rates)
    first, second = AutoWarmup(), AutoWarmup()
    for step in range(1, 31):
        if first.wants(step):
            first.observe(step, norms(step), rates(step), 0.999)
    second.load_state_dict(first.state_dict())
    assert second.steps == NEVER
    for step in range(31, 1000):
        if second.wants(step):
            second.observe(step, norms(step), rates(step), 0.999)
    assert second.steps == expected
    second.load_state_dict({})
    assert second == AutoWarmup()


@pytest.mark.parametrize("rule", [Adam(lr=1e-4), SGD(lr=0.05, momentum=0.9)])
def test_all_workers_start_at_the_same_step(rule):
    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        weights = {"w": np.zeros(3000, np.float32)}
        optimizer = NumpyOptimizer(weights, rule, collectives=collectives, warmup_steps="auto")
        for _ in range(200):
            optimizer.step({"w": (weights["w"] - 1 + rng.standard_normal(3000)).astype(np.float32)})
        return optimizer.driver.warmup.steps, weights["w"]

    results = simulation.run(functools.partial(worker), 3)
    assert 20 <= results[0][0] <= 150
    for steps, weights in results:
        assert steps == results[0][0]
        np.testing.assert_array_equal(weights, results[0][1])


def test_a_policy_takes_nothing_of_another():
    auto, after = AutoWarmup(), AfterRise(after=40)
    for step in range(1, 31):
        auto.observe(step, 1.0, 0.1, 0.9)
        after.reached(step, 0.1)
    assert auto.steps == 20
    other, begun = AfterRise(after=40), AutoWarmup()
    other.load_state_dict(auto.state_dict())
    begun.load_state_dict(after.state_dict())
    assert (other.state_dict(), begun.state_dict()) == (AfterRise(after=40).state_dict(), AutoWarmup().state_dict())
    begun.load_state_dict({"steps": 50, "peak": 0.1, "peak_step": 1})  # of local steps, by version 0.1.0
    assert begun.state_dict() == AutoWarmup().state_dict()


def test_second_moments_of_zeros_are_not_stable():
    auto = AutoWarmup()
    for step in range(1, 101):
        auto.observe(step, 0.0, 0.1, 0.9)
    assert auto.steps == NEVER


def test_the_flat_start_of_a_long_cosine_is_a_rise():
    warmup, rises = AutoWarmup(), 300_000  # of OneCycleLR with 1,000,000 steps
    for step in range(10, 2000, 10):
        rate = 1e-3 - (1e-3 - 4e-5) / 2 * (1 + math.cos(math.pi * (step - 1) / rises))
        warmup.observe(step, 1.0, rate, 0.999)
    assert warmup.steps == NEVER

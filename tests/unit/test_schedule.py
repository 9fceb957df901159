"""0/1 Adam's two policies, and what they do."""

import dataclasses
import math
from itertools import permutations

import numpy as np
import pytest

from horovod_onebit import ConfigurationError, DesyncError, Recipe, simulation
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.lamb import LAMB
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.schedule import Sends, Stepwise, ZeroOne, step_of, text_of

f32 = np.float32
SIZE = 2000


def published(steps, schedule):
    """DeepSpeed's counters, as its code advances them."""
    interval, updates, local, counter = 1, 0, 1, 0
    for k in range(1, steps + 1):
        if k <= schedule.var_freeze_step:
            exact = k % interval == 0
            yield Sends.MEAN if exact else Sends.GRADIENT
            updates += exact
            if exact and updates == schedule.var_update_scaler:
                updates, interval = 0, 2 * interval
        else:
            yield Sends.DISPLACEMENT if k % local == 0 else Sends.NOTHING
            counter += 1
            if counter == schedule.local_step_scaler:
                counter, local = 0, min(schedule.local_step_clipper, 2 * local)


@pytest.mark.parametrize("schedule", [ZeroOne(), ZeroOne(300, 4, 50, 8), ZeroOne(37, 5, 7, 6), ZeroOne(18, 16, 10, 4)])
def test_the_policies_are_the_published_ones(schedule):
    expected = list(published(2000, schedule))[schedule.var_update_scaler :]
    ours = [step_of(schedule, s) for s in range(1, len(expected) + 1)]
    assert ours == expected
    assert {step_of(None, s) for s in range(1, 500)} == {Sends.CONTRIBUTION}


def test_with_a_warm_up_in_few_bits_all_steps_until_the_freeze_are_of_it():
    schedule = ZeroOne(var_freeze_step=30, local_step_scaler=8, local_step_clipper=4, warmup="three_bit")

    def worker(collectives):
        loss, synced, optimizer = train(collectives, Adam(lr=0.05), schedule=schedule)
        assert optimizer._large[0].variance_steps == 30
        return loss, synced, optimizer.engine.traffic.total

    results = simulation.run(worker, 2)
    for own, other in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_array_equal(own, other)
    published = simulation.run(
        lambda c: train(c, Adam(lr=0.05), schedule=dataclasses.replace(schedule, warmup="exact")), 2
    )
    assert results[0][0] < 1.5 * published[0][0]
    with pytest.raises(ConfigurationError, match="leave one out"):
        simulation.run(lambda c: train(c, Adam(lr=0.05), schedule=schedule, recipe=Recipe(warmup="two_bit")), 2)


@pytest.mark.parametrize("change", [{"warmup": "three_bit"}, {"var_freeze_step": 8}, {"var_update_scaler": 8}])
def test_a_state_belongs_to_its_schedule(change):
    """What residuals are of depends on it: those of gradients are far too large for moved weights."""

    def worker(collectives):
        _, _, optimizer = train(collectives, Adam(lr=0.05), steps=12, schedule=SCHEDULE)
        saved, other = optimizer.state(), dataclasses.replace(SCHEDULE, **change)
        train(collectives, Adam(lr=0.05), steps=1, schedule=SCHEDULE)[2].load_state(saved)
        _, _, others = train(collectives, Adam(lr=0.05), steps=1, schedule=other)
        with pytest.raises(ConfigurationError, match=r"ZeroOne\(var_freeze_step=140, .* this optimizer is with"):
            others.load_state(saved)

    simulation.run(worker, 2)


def test_the_text_of_a_schedule_is_that_of_what_is_not_a_default():
    assert text_of(ZeroOne()) == "ZeroOne()"
    assert text_of(ZeroOne(100_000, 4)) == "ZeroOne(var_update_scaler=4)"
    assert text_of(Said((Sends.MEAN,), 4)) == "Said(said=(<Sends.MEAN: 'mean'>,), exact_steps=4)"


def test_bad_policies():
    for wrong in (
        {"warmup": "one_bit"},
        {"var_freeze_step": 0},
        {"var_update_scaler": 1.5},
        {"local_step_clipper": True},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            ZeroOne(**wrong)


def train(collectives, rule, steps=360, spread=0, poison=None, recipe=None, **arguments):
    """Noisy quadratics whose gradients differ by ``spread`` decades; losses, weights and the optimizer."""
    rng = np.random.default_rng(1)
    target = rng.standard_normal(SIZE).astype(f32)
    magnitude = (10.0 ** rng.uniform(-spread, 0, SIZE)).astype(f32)
    noise = np.random.default_rng(10 + collectives.rank)
    weights = {"w": np.ones(SIZE, f32), "small": np.ones(10, f32)}
    recipe = recipe or Recipe(block_size=128)
    optimizer = NumpyOptimizer(weights, rule, collectives=collectives, recipe=recipe, **arguments)
    synced = []
    for step in range(steps):
        optimizer.rule = dataclasses.replace(rule, lr=rule.lr * 0.5 * (1 + math.cos(math.pi * step / steps)))
        gradient = magnitude * (weights["w"] - target + f32(0.3) * noise.standard_normal(SIZE, dtype=f32))
        if step == poison and collectives.rank == 1:
            gradient[7] = np.nan
        optimizer.step({"w": gradient, "small": weights["small"]})
        schedule, taken = optimizer.driver.stepwise, optimizer.engine.exchanges
        if taken == 0 or step_of(schedule, taken) is not Sends.NOTHING:
            synced.append(weights["w"].copy())
    return float(np.mean((synced[-1] - target) ** 2)), synced, optimizer


SCHEDULE = ZeroOne(var_freeze_step=140, var_update_scaler=4, local_step_scaler=50, local_step_clipper=4)


@pytest.mark.parametrize("spread", [0, 8])
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_zero_one_adam_comes_as_close_as_adam(spread, exchange):
    recipe = Recipe(block_size=128, exchange=exchange)

    def worker(collectives, **arguments):
        return train(collectives, Adam(lr=0.05), spread=spread, recipe=recipe, **arguments)

    exact = simulation.run(lambda c: worker(c, warmup_steps=10**6), 3)[0][0]
    results = simulation.run(lambda c: worker(c, schedule=SCHEDULE), 3)
    assert results[0][0] < 3 * exact
    for _, synced, _ in results:
        for own, other in zip(synced, results[0][1], strict=True):
            np.testing.assert_array_equal(own, other)


def test_zero_one_adam_sends_less_than_a_bit_for_each_parameter_and_step():
    schedule = ZeroOne(var_freeze_step=24, var_update_scaler=2, local_step_scaler=20, local_step_clipper=16)
    _, _, optimizer = simulation.run(lambda c: train(c, Adam(lr=0.01), steps=800, schedule=schedule), 2)[0]
    bits = 8 * optimizer.engine.traffic.total / (800 * SIZE)
    assert bits < 1


def test_a_flush_brings_all_to_the_same_weights():
    def worker(collectives):
        _, _, optimizer = train(collectives, Adam(lr=0.05), steps=301, schedule=SCHEDULE)
        assert optimizer.driver.stepwise.sends(optimizer.engine.exchanges) is Sends.NOTHING
        before = optimizer._large[0].weight.copy()
        optimizer.flush()
        after = optimizer._large[0].weight.copy()
        optimizer.flush()
        np.testing.assert_array_equal(after, optimizer._large[0].weight)
        return before, after

    (first, one), (second, other) = simulation.run(worker, 2)
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(first, second)
    np.testing.assert_allclose(one, (first + second) / 2, atol=1e-6)


def test_in_momentum_space_too():
    recipe = Recipe(space="momentum", clip=None, scale="rms", block_size=128)
    loss, _, _ = simulation.run(lambda c: train(c, Adam(lr=0.05), recipe=recipe, schedule=SCHEDULE), 2)[0]
    assert loss < 0.05


@pytest.mark.parametrize("poison", [2, 9, 100, 210, 331])
def test_nan_is_skipped_by_all_in_every_kind_of_step(poison):
    results = simulation.run(lambda c: train(c, Adam(lr=0.05), poison=poison, schedule=SCHEDULE), 2)
    for loss, synced, optimizer in results:
        assert optimizer.engine.skipped == 1
        assert loss < 0.05
        np.testing.assert_array_equal(synced[-1], results[0][1][-1])


def test_exact_steps_renew_the_second_moment():
    """Also of elements that get their first gradient after the warm-up; no other step changes it."""
    schedule = ZeroOne(var_freeze_step=60, var_update_scaler=4, local_step_scaler=50, local_step_clipper=4)

    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        weights = {"w": np.full(SIZE, 2, f32)}
        optimizer = NumpyOptimizer(weights, Adam(lr=0.05), collectives=collectives, schedule=schedule)
        cold, exact = np.arange(SIZE) % 20 == 0, schedule.var_update_scaler
        for step in range(1, 201):
            g = weights["w"] - 1 + f32(0.1) * rng.standard_normal(SIZE, dtype=f32)
            before = optimizer._large[0].variance.copy()
            optimizer.step({"w": np.where(cold & (step < 10), 0, g).astype(f32)})
            if step > schedule.var_update_scaler:
                renewed = schedule.sends(step - schedule.var_update_scaler) is Sends.MEAN
                assert renewed != np.array_equal(before, optimizer._large[0].variance)
                exact += renewed
        assert optimizer._large[0].variance_steps == exact > schedule.var_update_scaler + 3
        return weights["w"], optimizer._large[0].variance

    (weights, variance), (other, _) = simulation.run(worker, 2)
    assert (variance[::20] > 0).all()
    np.testing.assert_array_equal(weights, other)
    assert np.abs(weights - 1).mean() < 0.2


@dataclasses.dataclass(frozen=True)
class Said(Stepwise):
    """Steps as they are given, over and over."""

    said: tuple
    exact_steps: int = 3

    def sends(self, number):
        return self.said[(number - 1) % len(self.said)]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (["one bit"], "sends\\(1\\) gave 'one bit': expected one of Sends"),
        ([Sends.MEAN, Sends.NOTHING], "sends\\(3\\) gave .*MEAN.* workers move alone in the step before"),
        ([Sends.GRADIENT, Sends.DISPLACEMENT], "sends\\(3\\) gave .*GRADIENT.* workers move alone in the step before"),
    ],
)
def test_steps_that_there_are_not(said, text):
    with pytest.raises(ConfigurationError, match=text):
        simulation.run(lambda c: train(c, Adam(lr=0.05), steps=9, schedule=Said(tuple(said))), 2)


def test_workers_whose_schedules_say_different_things_are_told(monkeypatch):
    monkeypatch.setattr(Said, "__repr__", lambda self: "Said()")  # it cannot be told from what they were given

    def worker(collectives):
        said = Sends.CONTRIBUTION, Sends.MEAN if collectives.rank else Sends.CONTRIBUTION
        train(collectives, Adam(lr=0.05), steps=9, schedule=Said(said))

    with pytest.raises(DesyncError, match="what a step sends, by the schedule's own word differs"):
        simulation.run(worker, 2)


def test_a_schedule_is_compared_by_its_fields():
    class Plain(Stepwise):
        exact_steps = 3

        def sends(self, number):
            return Sends.CONTRIBUTION

    with pytest.raises(ConfigurationError, match="expected a dataclass"):
        simulation.run(lambda c: train(c, Adam(lr=0.05), schedule=Plain()), 1)


@pytest.mark.parametrize("warmup", ["one_bit", "two_bit"])
def test_the_warm_up_of_a_schedule_of_ones_own(warmup):
    @dataclasses.dataclass(frozen=True)
    class Own(Said):
        said: tuple = (Sends.CONTRIBUTION,)
        exact_steps: int = 14
        warmup: str = "exact"

    def sent(warmup):
        _, _, optimizer = simulation.run(lambda c: train(c, Adam(lr=0.05), steps=14, schedule=Own(warmup=warmup)), 2)[0]
        return optimizer.engine.traffic.total

    if warmup == "one_bit":
        with pytest.raises(ConfigurationError, match="warmup of Own='one_bit': expected one of 'exact', 'two_bit'"):
            sent(warmup)
    else:
        assert sent(warmup) < 0.8 * sent("exact")


TOGETHER = Sends.MEAN, Sends.CONTRIBUTION, Sends.GRADIENT


@pytest.mark.cases(5)
@pytest.mark.parametrize(("first", "second"), list(permutations(TOGETHER, 2)))
@pytest.mark.parametrize("often", [1, 9])
def test_steps_of_all_kinds_follow_each_other(first, second, often):
    """Residuals of one are not sent with those of another, in whose unit they may be ten times too large."""
    said = (first,) * often + (second,)
    results = simulation.run(lambda c: train(c, Adam(lr=0.05), steps=360, schedule=Said(said)), 2)
    for loss, synced, _ in results:
        assert loss < 0.15
        np.testing.assert_array_equal(synced[-1], results[0][1][-1])


@pytest.mark.parametrize("before", TOGETHER)
def test_steps_alone_follow_any_kind(before):
    @dataclasses.dataclass(frozen=True)
    class Then(Stepwise):
        exact_steps: int = 3

        def sends(self, number):
            return before if number < 100 else Sends.NOTHING if number % 4 else Sends.DISPLACEMENT

    for poison in (None, 108, 200):  # in a step that sends the displacement, and in one that sends nothing
        results = simulation.run(lambda c, p=poison: train(c, Adam(lr=0.05), poison=p, schedule=Then()), 2)
        for loss, synced, _ in results:
            assert loss < 0.05
            np.testing.assert_array_equal(synced[-1], results[0][1][-1])


def test_a_schedule_says_how_long_its_warm_up_is():
    @dataclasses.dataclass(frozen=True)
    class Forgets(Stepwise):
        def sends(self, number):
            return Sends.CONTRIBUTION

    with pytest.raises(ConfigurationError, match="exact_steps of Forgets"):
        simulation.run(lambda c: train(c, Adam(lr=0.05), schedule=Forgets()), 1)


@pytest.mark.parametrize(
    ("rule", "schedule", "text"),
    [
        (SGD(lr=0.1), ZeroOne(), "is for Adam"),
        (LAMB(lr=0.1), ZeroOne(), "is for Adam"),
        (Adam(lr=0.1), "local", "expected a ZeroOne, another Stepwise"),
    ],
)
def test_what_zero_one_adam_is_not(rule, schedule, text):
    def worker(collectives):
        NumpyOptimizer({"w": np.ones(2000, f32)}, rule, collectives=collectives, schedule=schedule)

    with pytest.raises(ConfigurationError, match=text):
        simulation.run(worker, 1)

"""Elements that have never had a gradient stay where they are, and are learned from when they get one."""

import time
from functools import partial

import numpy as np
import pytest

import horovod_onebit as onebit
from horovod_onebit import rest, simulation
from horovod_onebit.checkpoint import load_checkpoint, save_checkpoint
from horovod_onebit.errors import DesyncError
from horovod_onebit.kernels.reference import CHUNK
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.lamb import LAMB
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.schedule import ZeroOne

f32 = np.float32
ROWS, WIDTH, WARMUP = 64, 32, 40
ALWAYS, LATE, NEVER = np.arange(0, ROWS, 2), np.arange(1, ROWS, 4), np.arange(3, ROWS, 4)
"""Rows of an embedding that are met from the start, after the warm-up, and never: in one block of a scale."""


class Embedding:
    """Learned towards a target, a few rows a step, by each worker's own examples."""

    def __init__(self, collectives, rule=None, *, late=lambda step, rank: step >= 100, **options):
        rng = np.random.default_rng(1)
        self.weight = rng.standard_normal((ROWS, WIDTH)).astype(f32)
        self.start, self.target = self.weight.copy(), rng.standard_normal((ROWS, WIDTH)).astype(f32)
        self.rng, self.rank, self.late = np.random.default_rng(10 + collectives.rank), collectives.rank, late
        options = {"warmup_steps": None if "schedule" in options else WARMUP} | options
        self.optimizer = NumpyOptimizer(
            {"embedding": self.weight}, rule or Adam(lr=0.02), collectives=collectives, **options
        )

    def gradient(self, step):
        grad, known = np.zeros_like(self.weight), ALWAYS
        if self.late(step, self.rank):
            known = np.concatenate([ALWAYS, LATE])
        rows = self.rng.choice(known, 16)
        noise = 0.02 * self.rng.standard_normal((16, WIDTH)).astype(f32)
        np.add.at(grad, rows, (self.weight - self.target)[rows] / 16 + noise)
        return grad

    def train(self, steps):
        for step in range(steps):
            self.optimizer.step({"embedding": self.gradient(step)})
        self.optimizer.flush()
        return self

    def loss(self, rows):
        return float(np.square(self.weight - self.target)[rows].mean())

    def moved(self, rows):
        return np.abs(self.weight - self.start)[rows].max()


RECIPES = {
    "direct": onebit.Recipe(exchange="direct"),
    "two-stage": onebit.Recipe(exchange="two_stage"),
    "hierarchical": onebit.Recipe(exchange="hierarchical"),
    "two bits": onebit.Recipe(codec="two_bit"),
    "an exact warm-up": onebit.Recipe(warmup="exact"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_rows_stay_until_they_are_met_and_are_then_learned(name):
    def worker(collectives):
        one = Embedding(collectives, recipe=RECIPES[name]).train(100)
        assert one.moved(LATE) == one.moved(NEVER) == 0
        for step in range(100, 400):
            one.optimizer.step({"embedding": one.gradient(step)})
        assert one.moved(NEVER) == 0
        return one.weight, one.loss(ALWAYS), one.loss(LATE)

    found = simulation.run(worker, 4, workers_per_host=2)
    for weight, always, late in found:
        np.testing.assert_array_equal(weight, found[0][0])
        assert always < 0.05
        assert late < 0.1, "at 2.0 before they are met"


@pytest.mark.parametrize("exchange", ["two_stage", "hierarchical"])
def test_they_stay_where_another_number_of_workers_continues(exchange, tmp_path):
    """What servers keep, which becomes workers' residuals, has nothing of them."""

    def begun(collectives):
        one = Embedding(collectives, recipe=onebit.Recipe(exchange=exchange), late=lambda *_: False).train(120)
        save_checkpoint(tmp_path, one.optimizer)

    def resumed(collectives):
        one = Embedding(collectives, late=lambda *_: False)
        load_checkpoint(tmp_path, one.optimizer)
        residual = one.optimizer.residuals()["feedback"]["embedding"].reshape(ROWS, WIDTH)
        assert residual[ALWAYS].any()
        assert not residual[NEVER].any()
        return one.train(100).moved(NEVER)

    simulation.run(begun, 4, workers_per_host=2)
    assert simulation.run(resumed, 3) == [0] * 3


def test_they_are_learned_about_as_fast_as_by_adam():
    def losses(recipe):
        return simulation.run(lambda one: Embedding(one, recipe=recipe).train(200).loss(LATE), 4)[0]

    assert losses("robust") < losses("exact")


@pytest.mark.parametrize("rule", [Adam(0.02), Adam(0.02, weight_decay=0.01), LAMB(0.02, min_coeff=0.1)])
def test_rows_that_are_never_met_move_by_their_decay_alone(rule):
    decay = {"adam": rule.decay, "lamb": 1.0}[rule.name]

    def worker(collectives):
        return Embedding(collectives, rule).train(300)

    one = simulation.run(worker, 2)[0]
    np.testing.assert_allclose(one.weight[NEVER], one.start[NEVER] * f32(decay) ** 300, rtol=2e-5)
    assert one.loss(ALWAYS) < 0.3


def test_one_worker_alone_may_meet_them():
    def worker(collectives):
        return Embedding(collectives, late=lambda step, rank: rank == 1 and step >= 100).train(400)

    first, second = simulation.run(worker, 2)
    np.testing.assert_array_equal(first.weight, second.weight)
    assert first.moved(NEVER) == 0
    assert first.loss(LATE) < 0.3


def test_zero_one_adam():
    schedule = ZeroOne(60, 20, 40, 8)

    def worker(collectives):
        return Embedding(collectives, schedule=schedule).train(400)

    one = simulation.run(worker, 2)[0]
    assert one.loss(ALWAYS) < 0.3
    assert one.moved(NEVER) == 0
    assert one.loss(LATE) < 1.0, "at 2.0 before they are met"


def test_an_element_that_is_met_in_an_exact_step_of_zero_one_adam_keeps_what_that_has_learned():
    """Workers look in step 46, which is exact and learns the second moment."""

    def worker(collectives, met):
        weight, largest = np.zeros(2048, f32), 0.0
        options = {"collectives": collectives, "schedule": ZeroOne(2000, 9, 4000, 8)}
        optimizer = NumpyOptimizer({"w": weight}, Adam(0.01), **options)
        rng = np.random.default_rng(collectives.rank)
        for step in range(90):
            grad = rng.standard_normal(2048).astype(f32)
            grad[7] = 1.0 if step >= met else 0.0
            optimizer.step({"w": grad})
            largest = max(largest, np.abs(weight).max())
        return largest, weight[7]

    for met in range(36, 64):
        largest, weight = simulation.run(partial(worker, met=met), 2)[0]
        assert largest < 2
        assert weight < 0


def test_what_waits_of_a_row_is_not_sent_after_an_exact_step_has_given_it_a_second_moment():
    """Looks are rare by then, and come after that step: the row has waited for 46 steps, in units of the least second
    moment."""

    def worker(collectives):
        rng, weight, largest = np.random.default_rng(collectives.rank), np.zeros((8, 128), f32), 0.0
        optimizer = NumpyOptimizer({"w": weight}, Adam(1e-3), collectives=collectives, schedule=ZeroOne())
        for step in range(1, 1101):
            grad = rng.standard_normal((8, 128)).astype(f32)
            grad[0] = step >= 1042
            before = weight.copy()
            optimizer.step({"w": grad})
            others = np.abs(weight - before)[1:].max()
            largest = max(largest, others) if step > 600 else 0.0
        return largest

    assert simulation.run(worker, 2)[0] < 3e-3  # it would be 26e-3


@pytest.mark.parametrize("exchange", ["direct", "two_stage", "hierarchical"])
def test_a_run_is_the_same_again_whenever_messages_arrive(exchange):
    def worker(collectives, late):
        recipe = onebit.Recipe(exchange=exchange, bucket_size=512, min_compressed_size=1)
        one = Embedding(collectives, recipe=recipe)
        for step in range(150):
            grad = one.gradient(step)
            if collectives.rank == late:
                time.sleep(0.0005)
            one.optimizer.step({"embedding": grad})
        return one.weight

    runs = [simulation.run(lambda one, late=late: worker(one, late), 4, workers_per_host=2)[0] for late in range(4)]
    for weight in runs:
        np.testing.assert_array_equal(weight, runs[0])


def test_bits_may_travel_in_pieces(monkeypatch):
    whole = simulation.run(lambda collectives: Embedding(collectives).train(160), 2)[0]
    monkeypatch.setattr(rest, "PIECE", 7)
    pieces = simulation.run(lambda collectives: Embedding(collectives).train(160), 2)[0]
    assert whole.moved(LATE) > 0
    np.testing.assert_array_equal(whole.weight, pieces.weight)


def test_rules_without_a_second_moment_move_all():
    def worker(collectives):
        return Embedding(collectives, SGD(0.5, momentum=0.9)).train(100).moved(NEVER)

    assert simulation.run(worker, 2)[0] > 0


def test_nan_in_a_row_that_rests_is_noticed():
    def worker(collectives):
        one = Embedding(collectives, late=lambda step, rank: False).train(60)
        before, grad = one.weight.copy(), one.gradient(60)
        if collectives.rank:
            grad[NEVER[0], 3] = np.nan
        assert not one.optimizer.step({"embedding": grad})
        np.testing.assert_array_equal(one.weight, before)
        one.optimizer.step({"embedding": one.gradient(61)})
        return one.moved(NEVER)

    assert simulation.run(worker, 2) == [0, 0]


def test_second_moments_that_differ_are_an_error_on_all():
    def worker(collectives):
        one = Embedding(collectives).train(60)
        if collectives.rank:
            one.optimizer.engine.tensors[0].variance[-1] = 1
        with pytest.raises(DesyncError, match="which elements have had a gradient"):
            one.train(70)
        return True

    assert all(simulation.run(worker, 2))


def test_workers_look_often_at_first_and_then_at_growing_intervals():
    looked = [step for step in range(5000) if rest.looks(step)]
    assert looked[:32] == [*range(1, 33)]
    assert np.diff(looked).max() == 64
    for steps in (100, 500, 1000):
        assert len([one for one in looked if steps < one <= 2 * steps]) in range(15, 33)


def test_large_tensors_and_few_elements():
    """Of a tensor of several chunks one element rests, which one worker wants from step 8 on: in step 9 the workers
    find that out."""
    size = 3 * CHUNK + 5

    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        weight = np.zeros(size, f32)
        optimizer = NumpyOptimizer({"w": weight}, Adam(0.1), collectives=collectives, warmup_steps=5)
        for step in range(12):
            grad = rng.standard_normal(size).astype(f32)
            grad[-1] = 1.0 if step >= 8 and collectives.rank == 1 else 0.0
            optimizer.step({"w": grad})
            assert (weight[-1] != 0) == (step >= 10)
        return weight

    first, second = simulation.run(worker, 2)
    np.testing.assert_array_equal(first, second)
    assert first[-1] < 0

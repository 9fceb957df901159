"""What arrives is not what was sent, or was wrong when it was sent: every exchange refuses it and names the worker."""

import numpy as np
import pytest

from horovod_onebit import DesyncError, Recipe, WireError, simulation
from horovod_onebit.codecs import GUARD, find, names
from horovod_onebit.kernels import reference
from horovod_onebit.kernels.reference import Coding
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules import Context, Tensor
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.lamb import LAMB
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.rules.zero_one_adam import of
from horovod_onebit.schedule import Sends

f32 = np.float32


class Damaging:
    """Collectives of which one, by the end of its name, loses a bit on its way to worker 0."""

    takes_device_memory = False

    def __init__(self, collectives, name, bit, everybody=None):
        self.inner, self.name, self.bit = collectives, name, bit
        self.everybody = everybody or collectives
        self.rank, self.size = collectives.rank, collectives.size

    def host(self):
        return self.inner.host()

    def hosts(self, places):
        hosts = self.inner.hosts(places)
        return hosts and tuple(Damaging(one, self.name, self.bit, self.everybody) for one in hosts)

    def __getattr__(self, kind):
        def start(array, name):
            handle = getattr(self.inner, kind)(array, name)
            return _Handle(handle, self.bit if name.endswith(self.name) and self.everybody.rank == 0 else None)

        return start


class _Handle:
    def __init__(self, handle, bit):
        self.ready, self.inner, self.bit = handle.ready, handle, bit

    def wait(self):
        result = self.inner.wait().copy()
        if self.bit is not None:
            bit = self.bit % (8 * result.size)
            result[bit // 8] ^= np.uint8(1 << bit % 8)
        return result


def train(collectives, exchange, steps=4, residual=0.0):
    rng = np.random.default_rng(collectives.rank)
    weights = {"a": np.zeros(3000, f32), "b": np.zeros(500, f32)}
    recipe = Recipe(block_size=64, min_compressed_size=1, exchange=exchange)
    optimizer = NumpyOptimizer(weights, Adam(lr=0.01), collectives=collectives, warmup_steps=1, recipe=recipe)
    optimizer.engine.feedback.residual("b", 500)[7] = residual if collectives.rank == 1 else 0
    for _ in range(steps):
        optimizer.step({name: rng.standard_normal(w.size).astype(f32) for name, w in weights.items()})
    return weights


@pytest.mark.parametrize(
    ("exchange", "name"),
    [
        ("direct", "bucket.0.0.0"),
        ("two_stage", ".scatter"),
        ("two_stage", ".gather"),
        ("hierarchical", ".between"),
        ("hierarchical", ".share"),
    ],
)
@pytest.mark.parametrize("bit", [8 * 14, 8 * 40 + 3, -200])
def test_a_bit_that_is_lost_on_the_way(exchange, name, bit):
    per_host = 2 if exchange == "hierarchical" else 1
    with pytest.raises(WireError, match=r"the message of workers? \d"):
        simulation.run(lambda c: train(Damaging(c, name, bit), exchange), 4, workers_per_host=per_host)
    simulation.run(lambda c: train(Damaging(c, "none", bit), exchange), 4, workers_per_host=per_host)


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_a_scale_beyond_what_the_clip_allows(exchange):
    with pytest.raises(WireError, match=r"worker 1 is corrupt.*recipe allows"):
        simulation.run(lambda c: train(c, exchange, residual=1e25), 3)
    simulation.run(lambda c: train(c, exchange, residual=1e5), 3)


@pytest.mark.cases(4)
@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("codec", names())
def test_no_residual_grows_beyond_the_bound_of_the_scales(size, codec):
    """The worst that a worker can do to itself: it always pushes where the residual is largest."""
    clip, rng = 3.0, np.random.default_rng(0)
    for spread in (0.0, 0.5, 1.0):
        error = np.zeros(size, f32)
        coding = Coding(find(codec), size, GUARD)
        row = np.zeros(coding.codec.size(size, size), np.uint8)
        most = 0.0
        for _ in range(5000):
            u = np.where(error < 0, -clip, clip) * (rng.random(size) >= spread)
            u[np.abs(error).argmax()] = clip * np.sign(error[np.abs(error).argmax()] or 1)
            c = (u + error).astype(f32)
            reference._compress(c, error, row, 0, coding)
            most = max(most, float(row.view(f32)[0]))
        assert most <= (2.2 if codec == "two_bit" else 1) * clip * 8 * size / 3


def test_where_scales_have_no_bound():
    flat = np.ones(64, f32)
    tensor = Tensor("a", flat, flat, flat, flat)

    def bound(rule, **recipe):
        return rule.largest_scale(tensor, 64, Context(reference, Recipe(**recipe), 4))

    free = [
        bound(SGD(0.1)),
        bound(Adam(0.1), clip=None),
        bound(Adam(0.1), scale="rms"),
        bound(Adam(0.1), space="momentum", clip=None),
        bound(of(Adam(0.1), Sends.DISPLACEMENT)),
    ]
    assert free == [np.inf] * 5
    assert np.isfinite([bound(Adam(0.1)), bound(LAMB(0.1)), bound(of(Adam(0.1), Sends.GRADIENT))]).all()


@pytest.mark.parametrize(("exchange", "name"), [("direct", "bucket.0.0.0"), ("two_stage", "bucket.0.0.0.gather")])
def test_after_damage_that_one_worker_saw_none_continues(exchange, name):
    """That worker has not taken the step, and the others have."""

    def worker(collectives):
        damaged = Damaging(collectives, name, 1000)
        rng = np.random.default_rng(collectives.rank)
        weights = {"a": np.zeros(3000, f32)}
        recipe = Recipe(block_size=64, min_compressed_size=1, exchange=exchange)
        optimizer = NumpyOptimizer(weights, Adam(lr=0.01), collectives=damaged, warmup_steps=1, recipe=recipe)
        outcomes = []
        for _ in range(3):
            try:
                outcomes.append(optimizer.step({"a": rng.standard_normal(3000).astype(f32)}))
            except (WireError, DesyncError) as error:
                outcomes.append(type(error))
        return outcomes

    outcomes = simulation.run(worker, 3, timeout=2)
    assert outcomes == [[True, WireError, DesyncError], *([[True, True, DesyncError]] * 2)]


def test_an_overflow_that_the_server_alone_meets_skips_the_step():
    """All gradients are finite, and so are the messages of the workers."""

    def worker(collectives):
        weights = {"a": np.zeros(1024, f32)}
        recipe = Recipe(exchange="two_stage", min_compressed_size=1, block_size=64)
        optimizer = NumpyOptimizer(
            weights, SGD(1e-3, momentum=0.9), collectives=collectives, warmup_steps=1, recipe=recipe
        )
        return [optimizer.step({"a": np.full(1024, grad, f32)}) for grad in (3.3e38, -3.4e38, 1e-3, 1e-3)]

    with np.errstate(over="ignore", invalid="ignore"):
        assert simulation.run(worker, 1) == [[True, False, True, True]]


@pytest.mark.parametrize("size", [1e19, 1e20, 1e25])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_one_huge_gradient_in_the_warm_up_stops_nobody(size):
    """The second moment is finite, and with its bias corrected it is not; or it is infinite itself."""

    def worker(collectives):
        weights, rng = {"a": np.ones(1024, f32)}, np.random.default_rng(collectives.rank)
        recipe = Recipe(min_compressed_size=1, warmup="exact")
        optimizer = NumpyOptimizer(weights, Adam(lr=0.01), collectives=collectives, warmup_steps=8, recipe=recipe)
        taken = []
        for step in range(20):
            grad = rng.standard_normal(1024).astype(f32)
            grad[3] = size if step == 4 else grad[3]
            taken.append(optimizer.step({"a": grad}))
        return all(taken) and bool(np.isfinite(weights["a"]).all())

    assert simulation.run(worker, 2) == [True, True]

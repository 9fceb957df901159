"""The whole algorithm with simulated workers: replicas, agreement, faults, convergence."""

import dataclasses
import functools
import math
import time

import numpy as np
import pytest

from horovod_onebit import (
    PRESETS,
    ConfigurationError,
    DesyncError,
    NonFiniteError,
    Recipe,
    UnsupportedError,
    averages,
    costs,
    simulation,
    wire,
)
from horovod_onebit.checkpoint import save_checkpoint
from horovod_onebit.exchange import choose, hierarchical
from horovod_onebit.formulas import of_innovation, remainder
from horovod_onebit.kernels import reference
from horovod_onebit.kernels.reference import Arrays
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules import Context, Tensor
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.lamb import LAMB
from horovod_onebit.rules.lion import Lion
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.rules.zero_one_adam import of
from horovod_onebit.schedule import Gradients, Local, Sends, ZeroOne
from horovod_onebit.stats import Traffic
from horovod_onebit.tasks import run
from horovod_onebit.warmup import Phase
from horovod_onebit.world import ResidualLayout, total_residuals
from tests.unit.test_run_state import broken

f32 = np.float32
SIZES = {"scalar": 1, "nine": 9, "odd": 1025, "even": 2048, "long": 5003}
LINEAR = (Adam(lr=0.01),)
EVERYTHING = Recipe(block_size=16, min_compressed_size=1, bucket_size=700)


def gradients(weights, rng):
    return {name: (w - 1 + 0.3 * rng.standard_normal(w.size)).astype(f32) for name, w in weights.items()}


def train(collectives, recipe, rule=None, steps=40, warmup=5, kernels="cpu"):
    rng = np.random.default_rng(collectives.rank)
    weights = {name: np.zeros(size, f32) for name, size in SIZES.items()}
    optimizer = NumpyOptimizer(
        weights, rule or Adam(lr=0.01), collectives=collectives, warmup_steps=warmup, recipe=recipe, kernels=kernels
    )
    for _ in range(steps):
        optimizer.step(gradients(weights, rng))
    return optimizer, np.concatenate(list(weights.values()))


ALL = [
    EVERYTHING,
    dataclasses.replace(EVERYTHING, exchange="two_stage"),
    dataclasses.replace(PRESETS["paper"], min_compressed_size=8),
    dataclasses.replace(PRESETS["paper"], min_compressed_size=8, exchange="direct"),
]


def test_arrays_that_are_never_compressed():
    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        weights = {name: np.zeros(2048, f32) for name in ("layer.weight", "words.weight")}
        optimizer = NumpyOptimizer(
            weights, SGD(lr=0.01), collectives=collectives, warmup_steps=3, recipe=EVERYTHING, exact=["words.*"]
        )
        for _ in range(20):
            grads = gradients(weights, rng)
            for grad in grads.values():
                grad[:100] = 0
            optimizer.step(grads)
        with pytest.raises(ConfigurationError, match=r"'word' matches no parameter; their names are layer.weight"):
            NumpyOptimizer(weights, Adam(lr=0.01), collectives=collectives, exact=["word"])
        return weights

    weights = simulation.run(worker, 2)[0]
    assert weights["layer.weight"][:100].any()
    assert not weights["words.weight"][:100].any()
    assert weights["words.weight"][100:].all()


@pytest.mark.cases(9)
@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("recipe", ALL)
def test_replicas_are_equal_and_both_kernels_agree(workers, recipe):
    fast = simulation.run(functools.partial(train, recipe=recipe), workers)
    slow = simulation.run(functools.partial(train, recipe=recipe, kernels="reference"), workers)
    for _, weights in fast:
        np.testing.assert_array_equal(weights, fast[0][1])
    np.testing.assert_allclose(fast[0][1], slow[0][1], atol=1e-5)
    assert np.abs(fast[0][1] - 1).mean() < 0.75


@pytest.mark.cases(3)
@pytest.mark.parametrize(("codec", "server_codec"), [("two_bit", "sign"), ("sign", "two_bit"), ("two_bit", "two_bit")])
@pytest.mark.parametrize("exchange", ["direct", "two_stage", "hierarchical"])
def test_every_codec_at_workers_and_servers(codec, server_codec, exchange):
    recipe = dataclasses.replace(EVERYTHING, codec=codec, server_codec=server_codec, exchange=exchange, block_size=64)
    per_host = 2 if exchange == "hierarchical" else 1
    run = functools.partial(simulation.run, workers=4, workers_per_host=per_host)
    fast, slow = (run(functools.partial(train, recipe=recipe, kernels=kernels)) for kernels in ("cpu", "reference"))
    for _, weights in fast:
        np.testing.assert_array_equal(weights, fast[0][1])
    np.testing.assert_allclose(fast[0][1], slow[0][1], atol=1e-5)
    signs = dataclasses.replace(recipe, codec="sign", server_codec="sign")
    sent, least = (run(functools.partial(train, recipe=r))[0][0].engine.traffic.total for r in (recipe, signs))
    assert (sent > least) == (codec == "two_bit" or exchange == "two_stage")


def test_a_collective_that_all_called_gives_its_result_though_a_worker_failed_since():
    """Whoever fails first, every worker finds its own error."""

    def worker(collectives):
        waiting = collectives.allgather(np.array([collectives.rank], np.uint8), "all")
        if collectives.rank:
            waiting.wait()
            raise DesyncError("found by worker 1")
        while not collectives._world.failed:
            time.sleep(0.001)
        assert waiting.wait().tolist() == [0, 1]
        collectives.allgather(np.zeros(1, np.uint8), "alone").wait()

    with pytest.raises(DesyncError, match="found by worker 1"):
        simulation.run(worker, 2)


def test_workers_whose_servers_differ_are_told():
    def worker(collectives):
        recipe = dataclasses.replace(
            EVERYTHING, exchange="two_stage", server_codec=("sign", "two_bit")[collectives.rank]
        )
        train(collectives, recipe)

    with pytest.raises(DesyncError, match="the recipe"):
        simulation.run(worker, 2)


def test_a_hierarchy_over_two_stages_with_two_bits_from_the_servers(monkeypatch):
    """The message of the mean is of another codec than the workers'."""
    monkeypatch.setattr(hierarchical.Exchange, "between", "two_stage")
    recipe = dataclasses.replace(EVERYTHING, server_codec="two_bit", exchange="hierarchical")
    results = simulation.run(functools.partial(train, recipe=recipe), 4, workers_per_host=2)
    for _, weights in results:
        np.testing.assert_array_equal(weights, results[0][1])
    assert np.abs(results[0][1] - 1).mean() < 0.75


@pytest.mark.cases(1)
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_lion_learns_with_one_bit(exchange):
    recipe = dataclasses.replace(EVERYTHING, exchange=exchange, block_size=128)
    run = functools.partial(train, recipe=recipe, rule=Lion(lr=0.01, weight_decay=0.01), steps=150, warmup=5)
    results = simulation.run(run, 4)
    exact = simulation.run(functools.partial(run, warmup=10**6), 4)
    for _, weights in results:
        np.testing.assert_array_equal(weights, results[0][1])
    assert np.abs(results[0][1] - 1).mean() < 1.5 * np.abs(exact[0][1] - 1).mean() + 0.01


@pytest.mark.parametrize("space", ["update", "momentum"])
@pytest.mark.parametrize(
    "rule",
    [
        Adam(lr=0.1),
        Adam(lr=0.1, weight_decay=0.1, decoupled=False),
        LAMB(lr=0.1),
        Lion(lr=0.1),
        SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ],
    ids=lambda rule: rule.name,
)
def test_the_mean_less_what_is_predicted_moves_as_the_mean_does(rule, space):
    """What is predicted is the mean, if all gradients are 0 and nothing decays."""
    recipe = Recipe(space=space, clip=3.0 if space == "update" else None)
    context, rng = Context(reference, recipe, 4), np.random.default_rng(1)
    x, m, v, w = rng.standard_normal((4, 300)).astype(f32)
    tensor = Tensor("x", w, m, v * v + f32(0.1), np.zeros(300, f32), 7, 7)
    rule.init(tensor)
    predicted = np.zeros_like(x)
    (move, p), predict = rule.motion(tensor, context), rule.prediction(context)
    reference.move(remainder(predict), p, Arrays(None, m, tensor.variance, predicted, None))  # 0 less what is predicted
    plain = dataclasses.replace(rule, **({"weight_decay": 0.0} if "weight_decay" in vars(rule) else {}))
    alone = reference.contribution(*plain.contribution(tensor, context), tensor.arrays(np.zeros_like(x)))
    np.testing.assert_array_equal(-predicted, alone)
    moved = []
    for how, sent in ((move, x), (of_innovation(move, predict), x + predicted)):
        arrays = Arrays(sent, m.copy(), tensor.variance.copy(), w.copy(), None)
        reference.move(how, p, arrays)
        moved.append((arrays.momentum, arrays.weight))
    for expected, found in zip(*moved, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_predicted():
    context = Context(reference, Recipe(), 4)
    for rule in (SGD(lr=0.1), of(Adam(lr=0.1), Sends.DISPLACEMENT)):
        assert rule.prediction(context) is None


@pytest.mark.parametrize(("codec", "predicts"), [("two_bit", True), ("sign", False)])
def test_servers_of_two_bits_send_what_nobody_knows(codec, predicts, monkeypatch):
    """Where gradients are the same in every step, what is left to send is a tenth of the momentum."""
    found, opened = [], wire.read_shares

    def look(gathered, cut, stamp, *, hosts):
        whole = opened(gathered, cut, stamp, hosts=hosts)
        found.append((stamp.step, float(wire.scales_of(whole.rows, whole.bucket).mean())))
        return whole

    def worker(collectives):
        weights = {"x": np.zeros(4096, f32)}
        recipe = dataclasses.replace(EVERYTHING, exchange="two_stage", server_codec=codec, bucket_size=4096)
        optimizer = NumpyOptimizer(weights, Adam(lr=0.01), collectives=collectives, warmup_steps=10, recipe=recipe)
        for _ in range(30):
            optimizer.step({"x": np.ones(4096, f32)})

    monkeypatch.setattr(wire, "read_shares", look)
    simulation.run(worker, 3)
    last = max(step for step, _ in found)
    scale = np.mean([scale for step, scale in found if step == last])
    assert (scale < 0.5) == predicts


@pytest.mark.cases(3)
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (2, 3), (3, 2), (2, 4)])
@pytest.mark.parametrize("recipe", [EVERYTHING, dataclasses.replace(PRESETS["paper"], min_compressed_size=8)])
def test_hierarchical_replicas_are_equal_and_both_kernels_agree(hosts, per_host, recipe):
    recipe = dataclasses.replace(recipe, exchange="hierarchical")
    run = functools.partial(simulation.run, workers=hosts * per_host, workers_per_host=per_host)
    fast, slow = (run(functools.partial(train, recipe=recipe, kernels=kernels)) for kernels in ("cpu", "reference"))
    for _, weights in fast:
        np.testing.assert_array_equal(weights, fast[0][1])
    np.testing.assert_allclose(fast[0][1], slow[0][1], atol=1e-5)
    assert np.abs(fast[0][1] - 1).mean() < 0.75


@pytest.mark.parametrize("recipe", [EVERYTHING, dataclasses.replace(EVERYTHING, space="momentum", clip=None)])
def test_a_hierarchy_is_a_direct_exchange_of_the_hosts_mean_gradients(recipe):
    def worker(collectives, kind, per_host):
        weights = {name: np.zeros(size, f32) for name, size in SIZES.items()}
        recipe_here = dataclasses.replace(recipe, exchange=kind)
        optimizer = NumpyOptimizer(weights, Adam(lr=0.01), collectives=collectives, warmup_steps=2, recipe=recipe_here)
        for step in range(12):
            host = collectives.rank // per_host
            optimizer.step(gradients(weights, np.random.default_rng(100 * step + host)))
        return np.concatenate(list(weights.values()))

    flat = simulation.run(functools.partial(worker, kind="direct", per_host=1), 2)
    tree = simulation.run(functools.partial(worker, kind="hierarchical", per_host=2), 4, workers_per_host=2)
    np.testing.assert_allclose(tree[0], flat[0], atol=1e-5)


def test_auto_follows_the_hosts():
    def worker(collectives, elements, link, rules=LINEAR):
        return run(choose(Recipe(link=link), elements, collectives, rules)).exchange

    def kinds(workers, per_host, elements=10_000_000, link=125e6, **options):
        run = functools.partial(worker, elements=elements, link=link, **options)
        return set(simulation.run(run, workers, workers_per_host=per_host))

    assert kinds(2, 1) == kinds(3, 1) == {"direct"}
    assert kinds(4, 1) == kinds(16, 1) == {"two_stage"}
    assert kinds(4, 1, 10_000) == kinds(4, 2, 10_000) == {"direct"}  # a small model
    assert kinds(4, 2, link=1.25e9) == {"direct"}
    assert kinds(4, 2) == kinds(4, 2, link=12.5e6) == kinds(16, 8) == kinds(32, 8) == {"hierarchical"}
    assert kinds(16, 8, rules=[of(Adam(lr=0.01), Sends.DISPLACEMENT)]) == {"two_stage"}  # 0/1 Adam
    with pytest.raises(ConfigurationError, match="hierarchical"):
        simulation.run(functools.partial(train, recipe=Recipe(exchange="hierarchical")), 2)


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ([(0, 4)] * 4, "4 workers on 1 host: use"),
        ([(0, 1), (1, 1), (2, 1), (3, 1)], "4 workers on 4 hosts: use"),
        ([(0, 3), (0, 3), (0, 3), (1, 1)], "hosts that differ"),
        ([(0, 3), (0, 3), (1, 3), (1, 3)], "hosts that differ"),  # a part of the world
        ([(0, 2), (0, 2), (1, 2), (1, 2)], "process_sets='dynamic'"),
    ],
)
def test_a_hierarchy_that_cannot_be_is_an_error_and_auto_does_without(numbers, error, monkeypatch):
    monkeypatch.setattr(simulation.SimulatedCollectives, "host", lambda self: numbers[self.rank])
    for_link = dataclasses.replace(EVERYTHING, link=1e4)
    with pytest.raises(ConfigurationError, match=error):
        simulation.run(functools.partial(train, recipe=dataclasses.replace(for_link, exchange="hierarchical")), 4)
    found = simulation.run(functools.partial(train, recipe=for_link), 4)
    assert {optimizer.engine.exchange.name for optimizer, _ in found} <= {"direct", "two_stage"}


def test_many_hosts_exchange_in_two_stages_and_few_directly():
    names = [costs.between_hosts(10_000_000, Recipe(), hosts) for hosts in (2, 3, 4, 16)]
    assert names == ["direct", "direct", "two_stage", "two_stage"]
    assert costs.between_hosts(10_000, Recipe(), 4) == "direct"

    def worker(collectives, bucket_size):
        recipe = dataclasses.replace(EVERYTHING, exchange="hierarchical", bucket_size=bucket_size, link=1e4)
        optimizer, weights = train(collectives, recipe)
        return optimizer.engine.exchange._between.name, weights

    found = simulation.run(functools.partial(worker, bucket_size=1000), 8, workers_per_host=2)
    assert {name for name, _ in found} == {"two_stage"}
    for _, weights in found:
        np.testing.assert_array_equal(weights, found[0][1])


def assert_owed_alike(results):
    """``results``: of each worker, its residuals at several times; their total is the same each time."""
    first, *later = (total_residuals(at_a_time) for at_a_time in zip(*results, strict=True))
    assert later
    for after in later:
        for name, value in first.items():
            np.testing.assert_allclose(after[name], value, atol=1e-6)


@pytest.mark.cases(6)
@pytest.mark.parametrize("to", ["direct", "two_stage", "hierarchical"])
@pytest.mark.parametrize("since", ["direct", "two_stage", "hierarchical"])
@pytest.mark.parametrize("between", ["direct", "two_stage"])
def test_what_is_owed_is_kept_when_the_exchange_changes(since, to, between, monkeypatch):
    """As after a checkpoint of a job whose ``"auto"`` meant something else."""
    monkeypatch.setattr(hierarchical.Exchange, "between", between)

    def worker(collectives):
        optimizer, _ = train(collectives, dataclasses.replace(EVERYTHING, exchange=since))
        engine = optimizer.engine
        before, tensors, rules = engine.residuals(), engine.tensors, [optimizer.rule] * len(engine.tensors)
        engine.recipe = dataclasses.replace(engine.recipe, exchange=to)
        engine.residuals_replaced(ResidualLayout.saved(before))
        run(engine.prepare(tensors, rules))
        return before, engine.residuals()

    found = simulation.run(worker, 4, workers_per_host=2)
    assert_owed_alike(found)
    assert set(total_residuals([before for before, _ in found])) == set(SIZES)
    if since == to:
        for old, new in found:
            for name, residual in old["feedback"].items():
                np.testing.assert_array_equal(new["feedback"][name], residual)


@pytest.mark.parametrize("exchange", ["direct", "two_stage", "hierarchical"])
@pytest.mark.parametrize("between", ["direct", "two_stage"])
def test_what_is_owed_is_kept_when_tensors_come_and_go(exchange, between, monkeypatch):
    """Layers that are frozen and trained again; what this worker cannot send is with others."""
    monkeypatch.setattr(hierarchical.Exchange, "between", between)

    def worker(collectives):
        recipe = dataclasses.replace(EVERYTHING, exchange=exchange, bucket_size=20_000)
        optimizer, _ = train(collectives, recipe)
        engine = optimizer.engine
        tensors, found = engine.tensors, [engine.residuals()]
        for chosen in (tensors[1:], tensors[:-1], tensors):
            run(engine.prepare(chosen, [optimizer.rule] * len(chosen)))
            found.append(engine.residuals())
            own = engine.exchange.encodes()
            if own is not None:
                held = {(chosen[p.tensor].name, p.start, p.stop) for bucket in own for p in bucket.pieces}
                for tensor in chosen:
                    rest = engine.feedback.residual(tensor.name, tensor.weight.size).copy()
                    for name, start, stop in held:
                        if name == tensor.name:
                            rest[start:stop] = 0
                    assert not rest.any()
        return found

    assert_owed_alike(simulation.run(worker, 4, workers_per_host=2))


@pytest.mark.parametrize("exchange", ["direct", "two_stage", "hierarchical"])
def test_all_that_is_sent_may_be_written_to(exchange, monkeypatch):
    """PyTorch warns of arrays that may not."""
    start, names = simulation.SimulatedCollectives._start, set()

    def checked(self, name, array, combine):
        names.add(name)
        assert array.flags.writeable, name
        return start(self, name, array, combine)

    def worker(collectives):
        engine = train(collectives, dataclasses.replace(EVERYTHING, exchange=exchange))[0].engine
        run(engine.prepare(engine.tensors[1:], engine._rules[1:]))

    monkeypatch.setattr(simulation.SimulatedCollectives, "_start", checked)
    simulation.run(worker, 4, workers_per_host=2)
    assert "onebit.residual_layout" in names


def test_what_servers_owe_to_a_tensor_that_was_removed_is_forgotten():
    def worker(collectives):
        optimizer, _ = train(collectives, dataclasses.replace(EVERYTHING, exchange="two_stage"))
        engine = optimizer.engine
        engine.feedback.discard("long")
        left = engine.tensors[:-1]
        run(engine.prepare(left, [optimizer.rule] * len(left)))
        return engine.residuals()

    found = total_residuals(simulation.run(worker, 4))
    assert set(found) == set(SIZES) - {"long"}


@pytest.mark.parametrize("exchange", ["direct", "two_stage", "hierarchical"])
def test_workers_that_change_twice_before_a_step_owe_the_same(exchange):
    def worker(collectives):
        engine = train(collectives, dataclasses.replace(EVERYTHING, exchange=exchange))[0].engine
        found = [engine.residuals()]
        for _ in range(2):
            run(engine.redistribute(engine.leave_world(None), SIZES))
            found.append(engine.residuals())
        return found

    assert_owed_alike(simulation.run(worker, 4, workers_per_host=2))


@pytest.mark.parametrize("exchange", ["auto", "direct", "two_stage", "hierarchical"])
def test_nothing_to_compress(exchange):
    def worker(collectives):
        weights = {"w": np.zeros(10, f32)}
        recipe = Recipe(exchange=exchange)
        optimizer = NumpyOptimizer(weights, LINEAR[0], collectives=collectives, warmup_steps=1, recipe=recipe)
        for _ in range(3):
            optimizer.step({"w": np.full(10, collectives.rank + 1, f32)})
        return weights["w"]

    for weights in simulation.run(worker, 4, workers_per_host=2):
        assert (weights < 0).all()


def test_workers_with_gradients_in_different_memories_choose_alike():
    def worker(collectives):
        on_device = collectives.rank == 0
        return run(choose(Recipe(), 1_000_000, collectives, LINEAR, on_device=on_device)).exchange

    assert len(set(simulation.run(worker, 4))) == 1


def test_a_scale_for_a_whole_tensor_is_shared_by_the_workers_of_a_host():
    """Or one of them would have all the work."""
    recipe = dataclasses.replace(EVERYTHING, exchange="hierarchical", block_size=None)

    def worker(collectives):
        weights = {"w": np.zeros(5003, f32)}
        optimizer = NumpyOptimizer(weights, LINEAR[0], collectives=collectives, warmup_steps=1, recipe=recipe)
        for _ in range(4):
            optimizer.step({"w": np.full(5003, collectives.rank, f32)})
        return weights["w"], [share.bucket.size for share in optimizer.engine.exchange._shared[0].shares]

    for weights, sizes in simulation.run(worker, 4, workers_per_host=2):
        assert weights.any()
        assert min(sizes) > 0.9 * max(sizes)


def test_zero_one_adam_has_no_hierarchy():
    def worker(collectives, exchange):
        recipe = dataclasses.replace(EVERYTHING, exchange=exchange)
        weights = {"w": np.zeros(100, f32)}
        schedule = ZeroOne(var_freeze_step=4, var_update_scaler=2)
        optimizer = NumpyOptimizer(weights, Adam(lr=0.01), collectives=collectives, recipe=recipe, schedule=schedule)
        for _ in range(6):
            optimizer.step({"w": np.ones(100, f32)})
        return optimizer.engine.exchange.name

    run = functools.partial(simulation.run, workers=4, workers_per_host=2)
    assert run(functools.partial(worker, exchange="auto")) == ["direct"] * 4
    with pytest.raises(UnsupportedError, match="0/1 Adam"):
        run(functools.partial(worker, exchange="hierarchical"))


@pytest.mark.parametrize("between", ["direct", "two_stage"])
def test_any_exchange_travels_between_hosts(between, monkeypatch):
    """As a world of one worker a host whose gradients are the hosts' means."""
    monkeypatch.setattr(hierarchical.Exchange, "between", between)
    recipe = dataclasses.replace(EVERYTHING, exchange="hierarchical", bucket_size=2000)
    steps, per_host, hosts = 20, 2, 3

    def noise(worker, step):
        return np.random.default_rng([worker, step]).standard_normal(5003).astype(f32)

    def train_on(collectives, recipe, workers):
        weights = {"w": np.zeros(5003, f32)}
        optimizer = NumpyOptimizer(weights, Adam(lr=0.01), collectives=collectives, warmup_steps=3, recipe=recipe)
        for step in range(steps):
            own = [noise(worker, step) for worker in workers(collectives.rank)]
            mean = sum(own[1:], own[0]) / f32(len(own))
            optimizer.step({"w": weights["w"] - 1 + mean})
        return weights["w"]

    one = functools.partial(train_on, recipe=recipe, workers=lambda rank: [rank])
    found = simulation.run(one, hosts * per_host, workers_per_host=per_host)
    assert all(np.array_equal(w, found[0]) for w in found)
    of_hosts = lambda rank: range(rank * per_host, (rank + 1) * per_host)  # noqa: E731
    flat = dataclasses.replace(recipe, exchange=between, clip=recipe.clip_for(hosts * per_host) / (1.03**0.5))
    expected = simulation.run(functools.partial(train_on, recipe=flat, workers=of_hosts), hosts)
    np.testing.assert_allclose(found[0], expected[0], atol=0.02)


def test_a_nan_under_a_hierarchy_is_taken_back():
    def worker(collectives):
        recipe = dataclasses.replace(EVERYTHING, exchange="hierarchical")
        optimizer, before = train(collectives, recipe, steps=8)
        residuals = optimizer.engine.feedback.state_dict()
        weights = {t.name: t.weight for t in optimizer._tensors}
        grads = gradients(weights, np.random.default_rng(collectives.rank))
        if collectives.rank == 3:
            next(iter(grads.values()))[:] = np.nan
        assert not optimizer.step(grads)
        np.testing.assert_array_equal(np.concatenate(list(weights.values())), before)
        for name, value in optimizer.engine.feedback.state_dict().items():
            np.testing.assert_allclose(value, residuals[name], atol=1e-5)

    simulation.run(worker, 4, workers_per_host=2)


@pytest.mark.parametrize("rule", [Adam(lr=0.01), LAMB(lr=0.1), SGD(lr=0.1), SGD(lr=0.05, momentum=0.9, nesterov=True)])
def test_never_leaving_warm_up_is_the_exact_rule(rule):
    recipe = dataclasses.replace(EVERYTHING, warmup="exact")
    _, weights = simulation.run(functools.partial(train, recipe=recipe, rule=rule, warmup=10**6), 2)[0]
    plain = {name: np.zeros(size, f32) for name, size in SIZES.items()}
    rngs = [np.random.default_rng(rank) for rank in range(2)]
    tensors = {n: Tensor(n, w, np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)) for n, w in plain.items()}
    for tensor in tensors.values():
        rule.init(tensor)
    context = Context(reference, EVERYTHING, 2)
    for _ in range(40):
        both = [gradients(plain, rng) for rng in rngs]
        for name, tensor in tensors.items():
            rule.exact_step(tensor, (both[0][name] + both[1][name]) / f32(2), context)
    np.testing.assert_array_equal(weights, np.concatenate(list(plain.values())))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_equal_gradients_of_one_magnitude_make_compression_exact(workers):
    """Powers of two everywhere, so that every product and mean is exact: 1-bit Adam is then Adam with a frozen v."""
    signs = np.where(np.random.default_rng(0).random(2048) < 0.5, f32(-0.25), f32(0.25))
    recipe = Recipe(space="momentum", clip=None, scale="rms", block_size=128, min_compressed_size=1)
    rule = Adam(lr=0.125, beta1=0.5, beta2=0.5, eps=0.0, decoupled=True)

    def worker(collectives):
        weights = {"w": np.zeros(2048, f32)}
        optimizer = NumpyOptimizer(weights, rule, collectives=collectives, warmup_steps=1, recipe=recipe)
        for _ in range(20):
            optimizer.step({"w": signs})
        return weights["w"], optimizer.engine.feedback.state_dict()

    m, v, w = np.zeros(2048, f32), np.zeros(2048, f32), np.zeros(2048, f32)
    for step in range(1, 21):
        m = f32(0.5) * m + f32(0.5) * signs
        v = f32(0.5) * signs * signs if step == 1 else v
        d = np.sqrt(v * f32(2))
        w = w - f32(0.125 / (1 - 0.5**step)) * (m / d)
    for weights, left in simulation.run(worker, workers):
        np.testing.assert_array_equal(weights, w)
        assert not any(residual.any() for residual in left.values())


def test_one_worker_is_local_error_feedback():
    recipe = Recipe(space="momentum", clip=None, scale="rms", block_size=64, min_compressed_size=1)

    def worker(collectives):
        rng = np.random.default_rng(3)
        weights = {"w": np.zeros(640, f32)}
        optimizer = NumpyOptimizer(weights, SGD(lr=0.5), collectives=collectives, warmup_steps=1, recipe=recipe)
        for _ in range(30):
            optimizer.step({"w": rng.standard_normal(640).astype(f32)})
        return weights["w"]

    rng = np.random.default_rng(3)
    w = -f32(0.5) * rng.standard_normal(640).astype(f32)
    error = np.zeros(640, f32)
    for _ in range(29):
        c = rng.standard_normal(640).astype(f32) + error
        scale = np.sqrt(np.square(c.reshape(-1, 64).astype(np.float64)).mean(1)).astype(f32).repeat(64)
        sent = np.where(c < 0, -scale, scale)
        error, w = c - sent, w - f32(0.5) * sent
    np.testing.assert_allclose(simulation.run(worker, 1)[0], w, rtol=1e-5, atol=1e-6)


def test_the_engine_telescopes_in_float32():
    """The mean of what is applied, summed, is the mean of what was contributed less the error that is left."""

    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        weights = {"w": np.zeros(4000, f32)}
        rule = SGD(lr=1.0)
        optimizer = NumpyOptimizer(weights, rule, collectives=collectives, warmup_steps=1, recipe="robust")
        total = np.zeros(4000)
        for _ in range(120):
            g = rng.standard_normal(4000).astype(f32)
            total += g
            optimizer.step({"w": g})
        return weights["w"], total, optimizer.engine.feedback.state_dict()["w"]

    results = simulation.run(worker, 3)
    contributed = np.mean([total for _, total, _ in results], axis=0)
    residuals = np.mean([error for _, _, error in results], axis=0)
    np.testing.assert_allclose(-results[0][0] + residuals, contributed, atol=2e-4)


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_on_one_worker_is_skipped_by_all(recipe, bad):
    def worker(collectives):
        optimizer, _ = train(collectives, recipe, steps=20)
        before = [a.copy() for t in optimizer._tensors for a in (t.weight, t.momentum, t.variance)]
        residual = {t.name: t.residual.copy() for t in optimizer._tensors}
        rng = np.random.default_rng(99 + collectives.rank)
        grads = gradients({t.name: t.weight for t in optimizer._tensors}, rng)
        if collectives.rank == 1:
            grads["odd"][17] = bad
        steps = [t.step for t in optimizer._tensors]
        assert optimizer.step(grads) is False
        after = [a for t in optimizer._tensors for a in (t.weight, t.momentum, t.variance)]
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a, b)
        for t in optimizer._tensors:
            np.testing.assert_allclose(t.residual, residual[t.name], atol=2e-6)
        assert steps == [t.step for t in optimizer._tensors]
        assert optimizer.engine.skipped == 1
        assert optimizer.step(gradients({t.name: t.weight for t in optimizer._tensors}, rng)) is True
        return np.concatenate([t.weight for t in optimizer._tensors])

    results = simulation.run(worker, 3)
    for weights in results:
        assert np.isfinite(weights).all()
        np.testing.assert_array_equal(weights, results[0])


def test_raising_is_agreed_on_as_well():
    raised = []

    def worker(collectives):
        recipe = dataclasses.replace(EVERYTHING, on_nonfinite="raise")
        optimizer, _ = train(collectives, recipe, steps=10)
        grads = {
            t.name: np.full(t.weight.size, np.nan if collectives.rank == 1 else 1, f32) for t in optimizer._tensors
        }
        with pytest.raises(NonFiniteError, match="worker 1"):
            optimizer.step(grads)
        raised.append(collectives.rank)

    simulation.run(worker, 3)
    assert sorted(raised) == [0, 1, 2]


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("recipe", lambda rank: {"recipe": dataclasses.replace(EVERYTHING, scale="rms") if rank == 1 else EVERYTHING}),
        ("algorithm", lambda rank: {"recipe": EVERYTHING, "rule": SGD(lr=0.1) if rank == 1 else Adam(lr=0.1)}),
    ],
)
def test_workers_that_disagree_are_told_before_anything_is_sent(what, change):
    raised = []

    def worker(collectives):
        with pytest.raises(DesyncError, match=what):
            train(collectives, **change(collectives.rank))
        raised.append(collectives.rank)

    simulation.run(worker, 3, timeout=10)
    assert sorted(raised) == [0, 1, 2]


def test_a_worker_that_fails_stops_the_others():
    def worker(collectives):
        if collectives.rank == 2:
            raise ZeroDivisionError("mine")
        train(collectives, EVERYTHING)

    with pytest.raises(ZeroDivisionError, match="mine"):
        simulation.run(worker, 3, timeout=30)


def test_traffic_is_counted_as_documented():
    optimizer, _ = simulation.run(functools.partial(train, recipe=Recipe(), steps=7), 2)[0]
    compressed = [SIZES["odd"], SIZES["even"], SIZES["long"]]
    blocks = [2, 2, 5]
    message = 32 + sum(4 * b for b in blocks) + sum(-(-size // 8) for size in compressed)
    small = 4 * (SIZES["scalar"] + SIZES["nine"])
    assert optimizer.engine.traffic.step == -(-message // 16) * 16 + small
    assert optimizer.engine.traffic.fp32_step == 4 * sum(SIZES.values())


# -- convergence ------------------------------------------------------------------------------------------------------

LAYERS, WIDTH, STEPS, FREEZE = 8, 512, 700, 150
ADAM = Adam(lr=0.02)
SPREADS = ("flat", "layers 1e8", "elements 1e4", "elements 1e8", "cold 5 %")


def magnitudes(spread):
    rng = np.random.default_rng(5)
    if spread == "layers 1e8":
        return np.repeat(10.0 ** np.linspace(-4, 4, LAYERS), WIDTH).reshape(LAYERS, WIDTH)
    if spread.startswith("elements"):
        decades = 8 if spread.endswith("8") else 4
        return 10.0 ** rng.uniform(-decades, 0, (LAYERS, WIDTH))
    return np.ones((LAYERS, WIDTH))


@functools.cache
def final_loss(recipe, spread, compressed=True, feedback=True, rule=ADAM):
    """Mean squared distance to the optimum of quadratics, 4 workers, cosine schedule. If it is not ``compressed``, the
    warm-up lasts to the end."""
    rng = np.random.default_rng(6)
    target = rng.standard_normal((LAYERS, WIDTH)).astype(f32)
    magnitude = magnitudes(spread).astype(f32)
    cold = rng.random((LAYERS, WIDTH)) < (0.05 if spread == "cold 5 %" else 0)

    def worker(collectives):
        noise = np.random.default_rng(100 + collectives.rank)
        weights = {"w": np.zeros((LAYERS, WIDTH), f32)}
        warmup = FREEZE if compressed else STEPS
        optimizer = NumpyOptimizer(weights, rule, collectives=collectives, warmup_steps=warmup, recipe=recipe)
        for step in range(STEPS):
            optimizer.rule = dataclasses.replace(rule, lr=rule.lr * 0.5 * (1 + np.cos(np.pi * step / STEPS)))
            distance = weights["w"] - target + f32(0.5) * noise.standard_normal(target.shape, dtype=f32)
            alive = ~cold | (step >= FREEZE + 50)
            optimizer.step({"w": magnitude * distance * alive})
            if not feedback:
                optimizer.engine.feedback.reset()
        return float(np.mean((weights["w"] - target).astype(np.float64) ** 2))

    with np.errstate(all="ignore"):
        loss = simulation.run(worker, 4)[0]
    return loss if np.isfinite(loss) else np.inf


BLOCKS = Recipe(block_size=128)
EXACT = dataclasses.replace(BLOCKS, warmup="exact")


@pytest.mark.cases(4)
@pytest.mark.parametrize("recipe", [BLOCKS, EXACT], ids=["default", "exact warm-up"])
@pytest.mark.parametrize("spread", SPREADS)
def test_robust_stays_close_to_adam(spread, recipe):
    assert final_loss(recipe, spread) < 1.5 * final_loss(EXACT, spread, compressed=False)


@pytest.mark.cases(2)
@pytest.mark.parametrize("spread", SPREADS)
def test_gradients_in_few_bits_in_all_steps_stay_close_to_adam(spread):
    assert final_loss(BLOCKS, spread, compressed=False) < 1.1 * final_loss(EXACT, spread, compressed=False)


@pytest.mark.cases(2)
@pytest.mark.parametrize("spread", SPREADS)
def test_robust_lamb_stays_close_to_lamb(spread):
    rule = LAMB(lr=0.02)
    assert final_loss(BLOCKS, spread, rule=rule) < 1.5 * final_loss(EXACT, spread, compressed=False, rule=rule)


def test_lamb_in_momentum_space_diverges_on_spread_elements():
    assert final_loss(PRESETS["paper"], "elements 1e8", rule=LAMB(lr=0.02)) > 1e2


def test_the_papers_recipe_diverges_on_spread_elements_and_the_fix_ends_far_off():
    paper, fixed = (final_loss(PRESETS[name], "elements 1e8") for name in ("paper", "fixed"))
    assert paper > 1e3
    assert 1 < fixed < 100


def test_without_error_feedback_compression_is_worse():
    assert final_loss(BLOCKS, "flat", feedback=False) > 3 * final_loss(BLOCKS, "flat")


def test_a_flush_after_other_numbers_of_steps_is_an_error_on_all():
    """Some workers may be at the end of a round, where they have nothing to bring together."""

    def worker(collectives):
        weights, grads = {"a": np.ones(9000, f32)}, {"a": np.ones(9000, f32)}
        optimizer = NumpyOptimizer(weights, Adam(lr=1e-3), collectives=collectives, schedule=Local(every=4))
        for _ in range(4 + collectives.rank):
            optimizer.step(grads)
        with pytest.raises(DesyncError, match=r"number of steps taken differs between workers: 4 on worker 0, 5 on"):
            optimizer.flush()

    simulation.run(worker, 2, timeout=20)


OTHER = {"table": np.ones((40, 41), f32), "bias": np.ones(40, f32)}


def test_workers_that_have_loaded_different_states_are_all_told():
    raised = []

    def worker(collectives):
        optimizer, _ = train(collectives, EVERYTHING, steps=3)
        state, again = optimizer.state(), train(collectives, EVERYTHING, steps=0)[0]
        if collectives.rank == 1:
            again.load_state(state)
        with pytest.raises(DesyncError, match=r"number of steps taken differs between workers: 0 on worker.* 3 on"):
            again.step({t.name: np.ones(t.weight.size, f32) for t in again._tensors})
        raised.append(collectives.rank)

    simulation.run(worker, 3, timeout=10)
    assert sorted(raised) == [0, 1, 2]


AFTER = {
    "a wrong shape": (DesyncError, "ConfigurationError: grads.* has shape"),
    "a name is missing": (DesyncError, "ConfigurationError: grads are of"),
    "no gradient at all": (DesyncError, "names to arrays"),
    "lr": (DesyncError, "the rule's lr differs between workers: 0.1 on worker.* 0.2 on worker 1"),
}


@pytest.mark.parametrize("what", AFTER)
@pytest.mark.parametrize("at", [0, 3, 8])
@pytest.mark.parametrize("schedule", [None, Gradients(), ZeroOne(4, 2, 2)])
def test_an_error_of_one_worker_is_told_to_all_and_changes_nothing(what, at, schedule):
    """In the first step, in the warm-up, and after it."""
    ended = {}

    def worker(collectives, odd):
        weights, random = {"w": np.ones((40, 40), f32)}, np.random.default_rng(collectives.rank)
        warmup = {"warmup_steps": 5} if schedule is None else {}
        optimizer = NumpyOptimizer(weights, Adam(lr=0.1), collectives=collectives, schedule=schedule, **warmup)
        for step in range(12):
            grads = {"w": random.standard_normal((40, 40)).astype(f32)}
            if step == at and odd:
                wrong, own = grads, collectives.rank == 1
                if own and what == "lr":
                    optimizer.rule = Adam(lr=0.2)
                elif own:
                    wrong = {"a wrong shape": {"w": np.ones(3)}, "a name is missing": {}}.get(what)
                error, text = AFTER[what]
                error = ConfigurationError if own and what != "lr" else error
                text = "grads" if own and what != "lr" else text
                with pytest.raises(error, match=text):
                    optimizer.step(wrong)
                optimizer.rule = Adam(lr=0.1)
            optimizer.step(grads)
        optimizer.flush()
        ended[odd, collectives.rank] = weights["w"].copy()

    for odd in (False, True):
        simulation.run(functools.partial(worker, odd=odd), 3, timeout=20)
    for array in ended.values():
        np.testing.assert_array_equal(array, ended[False, 0])


@pytest.mark.parametrize("rate", [0.1, math.nextafter(0.1, 1), 0.2])
def test_rounds_end_alike_on_all_workers(rate):
    def worker(collectives):
        weights = {"w": np.ones((40, 40), f32)}
        optimizer = NumpyOptimizer(weights, Adam(lr=0.1), collectives=collectives, schedule=Local(2))
        for step in range(8):
            if step == 5 and collectives.rank == 1:
                optimizer.rule = Adam(lr=rate)
            if step == 5 and rate == 0.2:
                with pytest.raises(DesyncError, match=r"the rule's lr differs .* 0\.1 on worker.* 0\.2 on"):
                    optimizer.step(weights)
                return
            optimizer.step(weights)

    simulation.run(worker, 3, timeout=20)


def test_learning_rates_that_differed_within_a_round_are_found_where_it_ends():
    """From them follows when second moments are frozen."""

    def worker(collectives):
        weights = {"w": np.ones((40, 40), f32)}
        optimizer = NumpyOptimizer(weights, Adam(lr=0.1), collectives=collectives, schedule=Local(4, freeze=6))
        for step in range(3):
            optimizer.rule = Adam(lr=0.2 if step == 1 and collectives.rank == 1 else 0.1)
            optimizer.step(weights)
        with pytest.raises(DesyncError, match="the learning rate's last rise differs between workers"):
            optimizer.step(weights)

    simulation.run(worker, 3, timeout=20)


def test_an_exchange_that_was_hidden_when_a_flush_was_refused_is_not_lost():
    ended = []

    def worker(collectives):
        weights, random = {"w": np.ones((40, 40), f32)}, np.random.default_rng(collectives.rank)
        schedule = Local(4, delay=2, freeze=0)
        optimizer = NumpyOptimizer(weights, Adam(lr=0.01), collectives=collectives, schedule=schedule)
        for _ in range(4):
            optimizer.step({"w": random.standard_normal((40, 40)).astype(f32)})
        optimizer.rule = Adam(lr=0.02 if collectives.rank == 1 else 0.01)
        with pytest.raises(DesyncError, match="lr differs"):
            optimizer.flush()
        optimizer.rule = Adam(lr=0.01)
        assert optimizer.pending
        before = weights["w"].copy()
        optimizer.flush()
        assert not optimizer.pending
        assert not np.array_equal(weights["w"], before)
        ended.append(weights["w"])

    simulation.run(worker, 3, timeout=20)
    for array in ended:
        np.testing.assert_array_equal(array, ended[0])


def test_calls_of_several_optimizers_are_not_mixed(tmp_path):
    """By turns on one worker; another rule; a checkpoint beside a step."""

    def worker(collectives):
        one, odd = np.ones((40, 40), f32), collectives.rank == 1
        pair = [
            NumpyOptimizer({name: one.copy()}, Adam(lr=0.1), collectives=collectives, warmup_steps=9)
            for name in ("generator", "critic")
        ]
        for optimizer, name in zip(pair, ("generator", "critic"), strict=True):
            optimizer.step({name: one})
        first = pair[odd]
        with pytest.raises(DesyncError, match=r"step \(generator\) on worker.* step \(critic\) on worker 1"):
            first.step({"critic" if odd else "generator": one})
        pair[0].rule = None if odd else Adam(lr=0.1)
        with pytest.raises(ConfigurationError if odd else DesyncError, match="another Adam"):
            pair[0].step({"generator": one})
        pair[0].rule = Adam(lr=0.1)
        with pytest.raises(DesyncError, match=r"worker 1 save_checkpoint"):
            save_checkpoint(tmp_path, pair[0]) if odd else pair[0].step({"generator": one})
        assert pair[0].step({"generator": one})

    simulation.run(worker, 3, timeout=20)
    with pytest.raises(ConfigurationError, match="has the name 0: expected a text"):
        simulation.run(lambda c: NumpyOptimizer({0: np.ones(3, f32)}, Adam(lr=0.1), collectives=c), 1)


def test_what_means_the_same_is_the_same_to_all():
    def worker(collectives):
        weights, one = {"w": np.ones((40, 40), f32)}, collectives.rank == 1
        rule = Adam(lr=np.float64(0.1) if one else 0.1)
        warmup = {"warmup_steps": "auto"} if one else {}
        assert NumpyOptimizer(weights, rule, collectives=collectives, **warmup).step(weights)

    simulation.run(worker, 2, timeout=10)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("warmup differs .* exact on worker 0, three_bit on workers 1 and 2", {"recipe": Recipe(warmup="exact")}),
        ("warmup_steps differs .* 5 on worker 0, auto on workers 1 and 2", {"warmup_steps": 5}),
        ("schedule differs", {"schedule": Local(4)}),
        ("array 0 differs .* not compressed on worker 0", {"exact": ["table"]}),
        ("array 0 differs .* shape", {"weights": OTHER}),
        ("array 0 differs between workers: 'bias'", {"weights": dict(reversed(OTHER.items()))}),
        ("rule's lr differs between workers: 0.2 on worker 0", {"rule": Adam(lr=0.2)}),
    ],
)
def test_workers_that_begin_differently_are_all_told_by_the_first_step(what, change):
    raised = []

    def worker(collectives):
        given = {"weights": {"table": np.ones((40, 40), f32), "bias": np.ones(40, f32)}, "rule": Adam(lr=0.1)}
        if collectives.rank == 0:
            given |= change
        weights = {name: array.copy() for name, array in given.pop("weights").items()}
        optimizer = NumpyOptimizer(weights, given.pop("rule"), collectives=collectives, **given)
        with pytest.raises(DesyncError, match=what):
            optimizer.step({name: np.ones_like(array) for name, array in weights.items()})
        np.testing.assert_array_equal(weights["bias"], 1)
        raised.append(collectives.rank)

    simulation.run(worker, 3, timeout=10)
    assert sorted(raised) == [0, 1, 2]


def test_exact_means_travel_in_pieces(monkeypatch):
    monkeypatch.setattr(averages, "TOGETHER", 100)
    shapes = [(30, 7), (), (0,), (99,), (1,)]

    def worker(collectives):
        random = np.random.default_rng(collectives.rank)
        own = [random.standard_normal(shape).astype(f32) for shape in shapes]
        sent, allreduce = [], collectives.allreduce

        def counted(array, name):
            sent.append((array.size, name))
            return allreduce(array, name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "allreduce", counted)
            means = run(averages.start_mean(own, collectives, "means", Traffic()))
        return own, means, sent

    found = simulation.run(worker, 3)
    for index, shape in enumerate(shapes):
        expected = np.mean([own[index] for own, _, _ in found], axis=0)
        for _, means, pieces in found:
            assert pieces == [(100, "means"), (100, "means.1"), (100, "means.2"), (11, "means.3")]
            assert means[index].shape == shape
            np.testing.assert_allclose(means[index], expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(means[index], found[0][1][index])


def test_a_step_that_a_collective_has_ended_is_taken_back():
    """The next one would send the gradient of before, in the buckets that were encoded."""

    def worker(collectives):
        weights = {"w": np.zeros(4096, f32)}
        recipe = Recipe(bucket_size=2048, exchange="direct")
        optimizer = NumpyOptimizer(weights, Adam(1e-2), collectives=collectives, warmup_steps=1, recipe=recipe)
        for _ in range(3):
            optimizer.step({"w": np.ones(4096, f32)})
        residual = optimizer.engine.feedback.state_dict()["w"].copy()
        with broken(collectives, ".bucket.1."):
            optimizer.step({"w": np.full(4096, 50, f32)})
        np.testing.assert_allclose(optimizer.engine.feedback.state_dict()["w"], residual, atol=1e-5)
        before = weights["w"].copy()
        optimizer.step({"w": np.full(4096, -50, f32)})
        return (weights["w"] - before)[[0, 4000]]

    for moved in simulation.run(worker, 2):
        assert (moved > 0).all()


def test_an_exchange_of_local_steps_that_a_collective_has_ended_is_taken_back():
    """What was sent of it is not part of the next one, to which all that was moved belongs."""

    def worker(collectives):
        weights = {"w": np.zeros(4096, f32), "b": np.zeros(4, f32)}
        recipe = Recipe(bucket_size=2048, exchange="direct")
        optimizer = NumpyOptimizer(weights, SGD(0.1), collectives=collectives, schedule=Local(2), recipe=recipe)

        gradient = 1.0 + collectives.rank  # 1.5 in the mean

        def step():
            optimizer.step({"w": np.full(4096, gradient, f32), "b": np.full(4, gradient, f32)})

        step()
        with broken(collectives, ".bucket.1."):
            step()
        assert not optimizer.engine.under_way
        assert not optimizer.engine.feedback.state_dict()["w"].any()
        assert optimizer.pending
        step()
        step()
        optimizer.flush()
        return *weights["w"][[0, 4000]], weights["b"][0]

    for ends in simulation.run(worker, 2):
        np.testing.assert_allclose(ends, -0.6, atol=1e-3)


def test_the_automatic_warm_up_of_numpy_waits_for_a_gradient():
    def worker(collectives):
        rng, weights = np.random.default_rng(collectives.rank), {"w": np.zeros(2048, f32), "b": np.zeros(4, f32)}
        optimizer = NumpyOptimizer(weights, Adam(1e-3), collectives=collectives)
        for step in range(40):
            grad = (step >= 25) * rng.standard_normal(2048)
            optimizer.step({"w": grad.astype(f32), "b": np.ones(4, f32)})
        return optimizer.phase

    assert simulation.run(worker, 2) == [Phase.WARMUP] * 2

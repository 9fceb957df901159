"""Runs of ``NumpyOptimizer`` that are saved and resumed, in the simulation: bit for bit the runs that were not."""

import dataclasses
import json
import pickle
import shutil
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from horovod_onebit import (
    CheckpointArgumentError,
    CheckpointError,
    ConfigurationError,
    Recipe,
    checkpoints,
    simulation,
)
from horovod_onebit.checkpoint import load_checkpoint, load_weights, save_checkpoint
from horovod_onebit.checkpoints import files, lock
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.lamb import LAMB
from horovod_onebit.rules.lion import Lion
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.schedule import Gradients, Local, Sends, ZeroOne
from horovod_onebit.tasks import run
from horovod_onebit.world import total_residuals

f32 = np.float32
SHAPES = {"scalar": (), "small": (3, 3), "table": (20, 16), "long": (1003,)}
LATE, NEVER = slice(5, 9), slice(9, 12)
"""Rows of the table that are met after step 50 by one worker, and by none."""
RECIPE = Recipe(block_size=64, min_compressed_size=10, bucket_size=700)
TWO_STAGE = dataclasses.replace(RECIPE, exchange="two_stage", server_codec="two_bit")
MOMENTUM = dataclasses.replace(RECIPE, space="momentum", clip=None)
THREE = dataclasses.replace(RECIPE, warmup="three_bit")
ADAM = Adam(lr=0.01, weight_decay=0.01)
SHORT = ZeroOne(var_freeze_step=14, var_update_scaler=4, local_step_scaler=5, local_step_clipper=4)
HIERARCHY = {"recipe": dataclasses.replace(RECIPE, exchange="hierarchical"), "workers": 4, "per_host": 2}

CASES = {
    "fixed warm-up": {"warmup_steps": 5, "at": (3, 5, 6, 21)},
    "two stages": {"recipe": TWO_STAGE, "warmup_steps": 5, "at": (2, 5, 11)},
    "hierarchy": {**HIERARCHY, "warmup_steps": 5, "at": (2, 5, 11)},
    "momentum space": {"recipe": MOMENTUM, "warmup_steps": 5, "at": (11,)},
    "automatic warm-up": {"warmup_steps": "auto", "at": (9, 20, 25), "steps": 60},
    "three bits": {"recipe": THREE, "warmup_steps": 20, "at": (6, 20, 24, 14)},
    "three bits, two stages": {
        "recipe": dataclasses.replace(THREE, exchange="two_stage"), "warmup_steps": 20, "at": (14, 24)
    },
    "gradients": {"schedule": Gradients(), "rule": Lion(lr=1e-3), "at": (6, 14)},
    "never compressed": {"recipe": "exact", "at": (6,)},
    "between two looks": {"warmup_steps": 5, "at": (40, 56, 61), "steps": 90},
    "0/1 Adam": {"schedule": SHORT, "at": (3, 9, 16, 23, 27)},
    "0/1 Adam, two stages": {"schedule": SHORT, "recipe": TWO_STAGE, "at": (9, 27)},
    "rounds": {"schedule": Local(every=4, freeze=9), "at": (3, 8, 9, 11, 18, 23)},
    "rounds, two stages": {"schedule": Local(every=4, freeze=9), "recipe": TWO_STAGE, "at": (3, 18)},
    "rounds, hierarchy": {"schedule": Local(every=4, freeze=9), **HIERARCHY, "at": (3, 18)},
    "rounds with momentum": {"schedule": Local(every=4, momentum=0.5), "rule": LAMB(lr=0.01), "at": (3, 18)},
    "hidden rounds": {"schedule": Local(every=4, delay=2), "rule": SGD(lr=0.1, momentum=0.9), "at": (5, 8, 18)},
    "LAMB": {"rule": LAMB(lr=0.01), "warmup_steps": 5, "at": (3, 5, 11)},
    "Lion": {"rule": Lion(lr=1e-3), "recipe": TWO_STAGE, "warmup_steps": 2, "at": (1, 11)},
    "SGD": {"rule": SGD(lr=0.1, momentum=0.9, nesterov=True), "warmup_steps": 2, "at": (1, 11)},
}  # fmt: skip


def build(collectives, rule=ADAM, recipe=RECIPE, shapes=SHAPES, **options):
    weights = {name: np.ones(shape, f32) for name, shape in shapes.items()}
    options = {"collectives": collectives, "recipe": recipe, "kernels": "reference"} | options
    return NumpyOptimizer(weights, rule, **options), weights


def gradients(weights, rank, step):
    rng = np.random.default_rng([rank, step])
    grads = {name: (w - 3 + 0.3 * rng.standard_normal(w.shape)).astype(f32) for name, w in weights.items()}
    grads["table"][NEVER] = 0
    if step < 50 or rank:
        grads["table"][LATE] = 0
    if step == 7 and rank == 1:
        grads["long"][5] = np.nan
    return grads


def train(optimizer, weights, start, stop, at=(), save=None):
    """Steps ``start`` to ``stop``; after those of ``at`` the workers are brought together, and ``save`` is called."""
    rank = optimizer.engine.collectives.rank
    for step in range(start, stop):
        optimizer.step(gradients(weights, rank, step))
        if step + 1 in at:
            optimizer.flush() if save is None else save(step + 1)
    optimizer.flush()
    return flat({"weights": {name: w.copy() for name, w in weights.items()}, **optimizer.state()})


def flat(state, where=""):
    """By its path, each value of ``state``; arrays as their bytes."""
    if isinstance(state, dict):
        return {key: value for name, one in state.items() for key, value in flat(one, f"{where}/{name}").items()}
    if isinstance(state, np.ndarray):
        return {where: (state.shape, state.dtype, state.tobytes())}
    return {where: state}


def case(name):
    options = dict(CASES[name])
    world = {"workers": options.pop("workers", 2), "workers_per_host": options.pop("per_host", 1)}
    return options.pop("at"), options.pop("steps", 30), options, world


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(name, tmp_path):
    at, steps, options, world = case(name)

    def whole(collectives):
        optimizer, weights = build(collectives, **options)

        def save(step):
            save_checkpoint(tmp_path / str(step), optimizer, extra={"step": step})

        return train(optimizer, weights, 0, steps, at, save)

    def resumed(collectives, step):
        optimizer, weights = build(collectives, **options)
        assert load_checkpoint(tmp_path / str(step), optimizer) == {"step": step}
        return train(optimizer, weights, step, steps, at)

    expected = simulation.run(whole, **world)
    assert expected[1]["/counts/skipped"] == 1
    for step in at:
        assert simulation.run(partial(resumed, step=step), **world) == expected


@pytest.mark.parametrize("name", CASES)
def test_files_of_ones_own_and_another_run_in_between(name):
    """What ``state()`` has gone through ``pickle``, and its counts through JSON; it is loaded by an optimizer that has
    taken other steps since."""
    at, steps, options, world = case(name)
    step = at[-1]

    def worker(collectives):
        optimizer, weights = build(collectives, **options)
        train(optimizer, weights, 0, step)
        state = optimizer.state()
        saved = pickle.dumps((state, weights))
        first = train(optimizer, weights, step, steps)
        train(optimizer, weights, 3, 8 + step % 4)
        state, values = pickle.loads(saved)
        for name, value in values.items():
            weights[name][...] = value
        optimizer.load_state(state | {"counts": json.loads(json.dumps(state["counts"]))})
        return first, train(optimizer, weights, step, steps)

    for first, again in simulation.run(worker, **world):
        assert first == again


@pytest.mark.parametrize("name", ["0/1 Adam", "rounds", "hidden rounds"])
def test_between_exchanges_there_is_no_state(name):
    _, _, options, world = case(name)

    def worker(collectives):
        optimizer, weights = build(collectives, **options)
        train(optimizer, weights, 0, 24)
        grads = gradients(weights, collectives.rank, 24)
        while not optimizer.pending:
            optimizer.step(grads)
        with pytest.raises(ConfigurationError, match=r"call flush\(\) on all workers before"):
            optimizer.state()
        optimizer.flush()
        return {name: w.tobytes() for name, w in weights.items()}, optimizer.state()["arrays"].keys()

    one, other = simulation.run(worker, **world)
    assert one == other


@pytest.mark.parametrize("name", ["two stages", "hierarchy", "rounds, two stages", "three bits"])
@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers(name, workers, tmp_path, caplog):
    _, _, options, world = case(name)
    smaller = {"recipe": dataclasses.replace(options["recipe"], exchange="auto")}

    def saved(collectives):
        optimizer, weights = build(collectives, **options)
        train(optimizer, weights, 0, 18)
        save_checkpoint(tmp_path, optimizer)
        return optimizer.residuals(), weights, optimizer.counts()

    def resumed(collectives):
        optimizer, weights = build(collectives, **options | smaller)
        load_checkpoint(tmp_path, optimizer)
        loaded = optimizer.residuals()["feedback"], {name: w.copy() for name, w in weights.items()}, optimizer.counts()
        train(optimizer, weights, 18, 40)
        return loaded, weights

    before = simulation.run(saved, **world)
    total = total_residuals(residuals for residuals, _, _ in before)
    assert any(residual.any() for residual in total.values()) or name == "three bits"
    after = simulation.run(resumed, workers)
    assert f"is of {world['workers']} workers and there are {workers}" in caplog.text
    for (residuals, loaded, counts), weights in after:
        assert residuals.keys() == total.keys()
        assert all(np.array_equal(residuals[name], total[name]) for name in total)
        assert all(np.array_equal(loaded[name], before[0][1][name]) for name in loaded)
        assert counts == before[0][2]
        for name in SHAPES:
            np.testing.assert_array_equal(weights[name], after[0][1][name])
        assert np.abs(weights["long"] - 3).mean() < np.abs(loaded["long"] - 3).mean()


def damage(path):
    path.write_bytes(path.read_bytes()[::-1])


WRONG = {
    "other names": ({"shapes": {**SHAPES, "more": (4,)}}, None, r"of another model: it lacks more"),
    "other shapes": ({"shapes": {**SHAPES, "long": (1004,)}}, None, r"another model: long is \(1003,\) float32 there"),
    "another rule": ({"rule": LAMB(lr=0.01)}, None, r"another optimizer: it lacks layer/"),
    "a rule alike": ({"rule": Lion(lr=0.01)}, None, r"optimizer: the rule is adam there, expected lion"),
    "another schedule": (
        {"schedule": Gradients(), "warmup_steps": None}, None, r"the schedule is None there, expected Gradients\(",
    ),
    "rounds": ({"schedule": Local(), "warmup_steps": None}, None, r"optimizer is with schedule=Local\(...\): build"),
    "a longer warm-up": ({"warmup_steps": 12}, None, r"that compresses, after 8 steps.* warm-up \(12\) is not over"),
    "an automatic one": ({"warmup_steps": None}, None, r"warm-up \('auto'\) is not over then: give warmup_steps=8, or"),
    "another space": ({"recipe": MOMENTUM}, None, r"of space='momentum': build"),
    "a missing file": ({}, lambda folder, key: files.worker_file(folder, key, 1).unlink(), r"worker-0001.* not exist"),
    "a damaged file": ({}, lambda folder, key: damage(files.worker_file(folder, key, 1)), r"worker 1: .*is damaged"),
    "damage for all": ({}, lambda folder, key: damage(files.shared_file(folder, key)), r"worker 0: .*is damaged"),
    "nothing there": ({}, lambda folder, key: shutil.rmtree(folder), r"there is no complete checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_an_error_on_all_and_changes_nothing(what, tmp_path):
    changes, harm, text = WRONG[what]

    def saved(collectives):
        optimizer, weights = build(collectives, warmup_steps=5)
        train(optimizer, weights, 0, 9)
        save_checkpoint(tmp_path / "folder", optimizer)

    def resumed(collectives):
        # One worker alone, if it is the arguments that are wrong.
        options = {"warmup_steps": 5} | (changes if collectives.rank else {})
        optimizer, weights = build(collectives, **options)
        before = flat({"weights": weights, **optimizer.state()})
        with pytest.raises(CheckpointError, match=text) as raised:
            load_checkpoint(tmp_path / "folder", optimizer)
        assert flat({"weights": weights, **optimizer.state()}) == before
        return str(raised.value)

    simulation.run(saved, 2)
    if harm is not None:
        harm(tmp_path / "folder", files.history(tmp_path / "folder")[0].key)
    one, other = simulation.run(resumed, 2)
    assert one == other


def test_a_state_that_does_not_fit_changes_nothing():
    def worker(collectives):
        optimizer, weights = build(collectives, warmup_steps=5)
        train(optimizer, weights, 0, 9)
        good = optimizer.state()
        before = flat({"weights": weights, **good})
        wrong = {
            "expected what state": {"a": 1},
            "is that of one of 3 workers, and there are 2": good | {"workers": 3},
            "this state was saved with schedule=Local": good | {"kind": "local"},
            "the rule is sgd there": good | {"counts": good["counts"] | {"rule": "sgd"}},
            "it lacks steps": good | {"counts": {k: v for k, v in good["counts"].items() if k != "steps"}},
            "momentum/long is": good | {"arrays": good["arrays"] | {"momentum/long": np.zeros(5, f32)}},
            "does not have: .'other'": good | {"feedback": good["feedback"] | {"other": np.zeros(5, f32)}},
            "NaN or Inf": good | {"feedback": good["feedback"] | {"long": np.full(1003, np.nan, f32)}},
        }
        for text, state in wrong.items():
            with pytest.raises(ConfigurationError, match=text):
                optimizer.load_state(state)
            assert flat({"weights": weights, **optimizer.state()}) == before

    simulation.run(worker, 2)


def test_saving_that_fails_leaves_the_checkpoint_before(tmp_path):
    def worker(collectives):
        optimizer, weights = build(collectives, warmup_steps=5)
        train(optimizer, weights, 0, 9)
        save_checkpoint(tmp_path, optimizer, extra=1)
        train(optimizer, weights, 9, 12)
        with pytest.raises(CheckpointError, match=r"worker 0: TypeError: extra\['f'\] is .*function, which cannot be"):
            save_checkpoint(tmp_path, optimizer, extra={"f": worker})
        save_checkpoint(tmp_path, optimizer, extra=2)
        names = {name: w.copy() for name, w in weights.items()}
        assert load_checkpoint(tmp_path, optimizer, previous=True) == 1
        assert optimizer.steps == 8  # one was skipped
        assert load_checkpoint(tmp_path, optimizer) == 2
        assert all(np.array_equal(weights[name], names[name]) for name in names)
        for call in (save_checkpoint, load_checkpoint):
            with pytest.raises(CheckpointArgumentError, match="folder=3: expected a path"):
                call(3, optimizer)
            with pytest.raises(CheckpointArgumentError, match="dict: expected a NumpyOptimizer"):
                call(tmp_path, weights)

    simulation.run(worker, 3)


def test_a_residual_of_nan_is_not_saved(tmp_path):
    def worker(collectives):
        optimizer, weights = build(collectives, warmup_steps=5)
        train(optimizer, weights, 0, 9)
        if collectives.rank == 0:
            optimizer.engine.feedback.put("long", np.full(1003, np.nan, f32))
        with pytest.raises(CheckpointError, match=r"worker 0: .*error feedback of 'long' has NaN or Inf"):
            save_checkpoint(tmp_path, optimizer)
        assert [path.name for path in tmp_path.iterdir()] == ["in-use"]

    simulation.run(worker, 2)


@pytest.mark.parametrize("to", ["direct", "hierarchical"])
def test_another_exchange_gets_the_residuals_of_servers_too(to, tmp_path):
    def saved(collectives):
        optimizer, weights = build(collectives, recipe=TWO_STAGE, warmup_steps=5)
        train(optimizer, weights, 0, 15)
        save_checkpoint(tmp_path, optimizer)
        return optimizer.residuals()

    def resumed(collectives):
        optimizer, _ = build(collectives, recipe=dataclasses.replace(RECIPE, exchange=to), warmup_steps=5)
        load_checkpoint(tmp_path, optimizer)
        run(optimizer.prepare(Sends.CONTRIBUTION))
        return optimizer.residuals()

    before, after = (total_residuals(simulation.run(one, 4, workers_per_host=2)) for one in (saved, resumed))
    for name in SHAPES:
        np.testing.assert_allclose(after[name], before[name], atol=1e-5)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_round_is_given_up_when_another_state_is_loaded(delay, tmp_path):
    """But for an exchange that is under way, which would arrive in memory that is not there any more."""

    def worker(collectives):
        optimizer, weights = build(collectives, schedule=Local(every=4, delay=delay))
        train(optimizer, weights, 0, 8)
        save_checkpoint(tmp_path, optimizer)
        state = optimizer.state()
        before = flat(state)
        for step in range(8, 13):
            optimizer.step(gradients(weights, collectives.rank, step))
        if delay:
            with pytest.raises(ConfigurationError, match="under way"):
                optimizer.load_state(state)
            with pytest.raises(CheckpointError, match=r"under way: call flush\(\) on all workers"):
                load_checkpoint(tmp_path, optimizer)
            optimizer.flush()
        load_checkpoint(tmp_path, optimizer)
        assert flat(optimizer.state()) == before

    simulation.run(worker, 2)


@contextmanager
def broken(collectives, part):
    """An allgather with ``part`` in its name fails."""
    allgather = collectives.allgather

    def fails(array, name):
        if part in name:
            raise RuntimeError("the network is gone")
        return allgather(array, name)

    collectives.allgather = fails
    try:
        with pytest.raises(RuntimeError, match="the network is gone"):
            yield
    finally:
        collectives.allgather = allgather


def full_disk(*_):
    raise OSError("the disk is full")


def test_a_run_that_has_not_loaded_keeps_the_checkpoints_of_the_one_before(tmp_path, monkeypatch):
    def first(collectives):
        optimizer, weights = build(collectives, warmup_steps=5)
        train(optimizer, weights, 0, 9)
        save_checkpoint(tmp_path, optimizer)
        return train(optimizer, weights, 9, 12)

    def second(collectives):
        optimizer, weights = build(collectives, warmup_steps=5)
        for step in range(3):
            train(optimizer, weights, step, step + 1)
            save_checkpoint(tmp_path, optimizer)

    def third(collectives):
        optimizer, weights = build(collectives, warmup_steps=5)
        load_checkpoint(next(tmp_path.glob("of-*")), optimizer)
        return train(optimizer, weights, 9, 12)

    def failing(collectives):
        optimizer, weights = build(collectives, warmup_steps=5)
        train(optimizer, weights, 0, 1)
        with pytest.raises(CheckpointError, match="the disk is full"):
            save_checkpoint(tmp_path, optimizer)

    expected = simulation.run(first, 2)
    lock.release(tmp_path)
    lock._folders.clear()  # as in another process
    before = (tmp_path / "latest.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_write", full_disk)
        simulation.run(failing, 2)
    assert (tmp_path / "latest.json").read_bytes() == before
    assert not list(tmp_path.glob("of-*"))
    simulation.run(second, 2)
    assert simulation.run(third, 2) == expected


def test_a_step_that_has_failed_leaves_nothing_behind(tmp_path):
    def worker(collectives):
        optimizer, weights = build(collectives, warmup_steps=5)
        train(optimizer, weights, 0, 9)
        save_checkpoint(tmp_path, optimizer)
        expected = train(optimizer, weights, 9, 15)
        load_checkpoint(tmp_path, optimizer)
        with broken(collectives, ".bucket.1."):
            optimizer.step(gradients(weights, collectives.rank, 20))
        load_checkpoint(tmp_path, optimizer)
        assert train(optimizer, weights, 9, 15) == expected

    simulation.run(worker, 2)


def test_the_weights_alone(tmp_path):
    def worker(collectives):
        optimizer, weights = build(collectives, warmup_steps=5)
        found = train(optimizer, weights, 0, 9)
        save_checkpoint(tmp_path, optimizer)
        return found, weights

    _, weights = simulation.run(worker, 2)[0]
    found = {name: np.zeros(shape, f32) for name, shape in SHAPES.items()}
    load_weights(tmp_path, found)
    assert all(np.array_equal(found[name], weights[name]) for name in SHAPES)
    found["long"] = np.zeros(7, f32)
    with pytest.raises(CheckpointError, match=r"another model: long is \(1003,\) float32 there"):
        load_weights(tmp_path, found)
    with pytest.raises(CheckpointArgumentError, match="expected a writable C-contiguous float32 array, got float64"):
        load_weights(tmp_path, {"long": np.zeros(7)})
    with np.load(next(tmp_path.glob("*.shared.npz"))) as arrays:
        assert {"model/long", "optimizer/arrays/momentum/long"} <= set(arrays.files)


def test_a_checkpoint_of_another_framework_is_named(tmp_path):
    """Where its weights are arrays of the same names, they can be loaded alone."""

    def saved(collectives):
        save_checkpoint(tmp_path, build(collectives, warmup_steps=5)[0])

    def refused(collectives):
        optimizer, _ = build(collectives, warmup_steps=5)
        with pytest.raises(CheckpointError, match=r"worker 0: .* is of Keras, expected one of NumPy: .*_onebit\.tf"):
            load_checkpoint(tmp_path, optimizer)

    simulation.run(saved, 2)
    latest = tmp_path / "latest.json"
    latest.write_text(latest.read_text().replace('"NumPy"', '"Keras"'))
    simulation.run(refused, 2)
    weights = {name: np.zeros(shape, f32) for name, shape in SHAPES.items()}
    load_weights(tmp_path, weights)
    assert all((w == 1).all() for w in weights.values())
    with pytest.raises(CheckpointError, match="is of Keras, expected one of NumPy"):
        load_weights(tmp_path, {"small": weights["small"]})


@pytest.mark.parametrize("options", [{"warmup_steps": 12}, {"schedule": SHORT}, {"schedule": Local(every=4, freeze=8)}])
@pytest.mark.parametrize("resumes", [False, True])
def test_frozen_second_moments_do_not_follow_another_beta2(options, resumes):
    def worker(collectives, changes):
        rng = np.random.default_rng(collectives.rank)

        def made():
            weights = {"w": np.zeros(1000, f32)}
            return NumpyOptimizer(weights, ADAM, collectives=collectives, recipe=RECIPE, **options), weights

        optimizer, weights = made()
        for step in range(40):
            if step == 24:
                optimizer.flush()
                if resumes:
                    state, known = optimizer.state(), weights["w"]
                    optimizer, weights = made()
                    optimizer.load_state(state)
                    weights["w"][:] = known
                if changes:
                    optimizer.rule = dataclasses.replace(ADAM, beta2=0.9)
            optimizer.step({"w": rng.standard_normal(1000).astype(f32)})
        optimizer.flush()
        return weights["w"]

    steady, changed = (simulation.run(partial(worker, changes=changes), 2) for changes in (False, True))
    np.testing.assert_array_equal(steady, changed)


def test_servers_residuals_of_a_world_of_another_size_are_replaced():
    """Of Horovod elastic: what was saved by two workers is restored where three have trained since."""

    def before(collectives):
        optimizer, weights = build(collectives, recipe=TWO_STAGE, warmup_steps=2)
        train(optimizer, weights, 0, 6)
        return optimizer.residuals()

    saved = simulation.run(before, 2)

    def worker(collectives):
        optimizer, weights = build(collectives, recipe=TWO_STAGE, warmup_steps=2)
        train(optimizer, weights, 0, 6)
        optimizer.load_residuals(saved[0])
        train(optimizer, weights, 6, 9)
        return weights["long"]

    found = simulation.run(worker, 3)
    for weights in found:
        np.testing.assert_array_equal(weights, found[0])

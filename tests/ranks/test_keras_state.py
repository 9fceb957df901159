"""The Keras face on real ranks: saved runs, loss scaling."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import contextlib
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.functions import allgather_object, broadcast_object

import horovod_onebit.tf as onebit
from horovod_onebit import ConfigurationError, Recipe
from horovod_onebit.feedback import MARK, SERVER_PREFIX, mark
from horovod_onebit.tf import elastic
from horovod_onebit.tf.diagnostics import Collector
from horovod_onebit.tf.diagnostics import gradients as by_name
from horovod_onebit.tools.monitor import read
from horovod_onebit.warmup import Phase
from horovod_onebit.world import total_residuals
from tests.long import LONG
from tests.ranks.keras_common import (
    LOSS,
    OPTIMIZERS,
    RANK,
    SIZE,
    assert_replicas_equal,
    batch,
    build,
    gradients,
    scaled_step,
    train,
    weights,
    wrap,
)
from tests.ranks.kinds import KINDS


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lamb"])
@pytest.mark.parametrize("at", [3, 12])
def test_a_saved_run_continues_bit_for_bit(kind, at, tmp_path):
    model = build()
    optimizer = wrap(OPTIMIZERS[kind](), warmup_steps=5)
    model.compile(optimizer=optimizer, loss=LOSS)
    train(model, optimizer, at)
    path = tmp_path / f"model-{RANK}.keras"
    model.save(path)
    feedback = optimizer.feedback_state_dict()
    train(model, optimizer, 6, start=at)

    again = keras.models.load_model(path)
    assert isinstance(again.optimizer, type(OPTIMIZERS[kind]()))
    assert again.optimizer.recipe == optimizer.recipe
    again.optimizer.load_feedback_state_dict(feedback)
    train(again, again.optimizer, 6, start=at)
    np.testing.assert_array_equal(weights(model), weights(again))


WITHOUT = """
import sys, keras, numpy as np
model = keras.models.load_model(sys.argv[1], compile=False)
np.save(sys.argv[2], model.predict(np.load(sys.argv[2]), verbose=0))
assert not {"horovod", "horovod_onebit"} & sys.modules.keys()
"""


def test_a_saved_model_is_read_without_this_library(tmp_path):
    model = build()
    model.compile(optimizer=wrap(keras.optimizers.Adam(1e-3)), loss=LOSS, jit_compile=False)
    x, y = batch(0)
    model.fit(x, y, epochs=1, verbose=0)
    path, values = tmp_path / "model.keras", tmp_path / "x.npy"
    if RANK == 0:
        model.save(path)
        np.save(values, x)
        subprocess.run([sys.executable, "-c", WITHOUT, path, values], check=True, timeout=300)
        np.testing.assert_allclose(np.load(values), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    broadcast_object(None, name="read")


def of_kind(kind, optimizer="adamw"):
    model = build()
    optimizer = onebit.DistributedOptimizer(OPTIMIZERS[optimizer](), **KINDS[kind])
    optimizer.build(model.trainable_variables)
    return model, optimizer


@cache
def residuals_of(kind):
    model, optimizer = of_kind(kind)
    train(model, optimizer, 8)
    return optimizer.feedback_state_dict()


def assert_same(before, after):
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("since", KINDS)
def test_residuals_are_of_a_kind_of_run(since, to):
    residuals, optimizer = residuals_of(since), of_kind(to)[1]
    assert any(value.any() for value in residuals.values())
    before = optimizer.feedback_state_dict()
    if since == to:
        optimizer.load_feedback_state_dict(residuals)
        assert_same(residuals, optimizer.feedback_state_dict())
        return
    with pytest.raises(ConfigurationError, match="these residuals were saved with"):
        optimizer.load_feedback_state_dict(residuals)
    assert_same(before, optimizer.feedback_state_dict())


@pytest.mark.parametrize("given", [False, True], ids=["forgotten", "given"])
@pytest.mark.parametrize("kind", ["update", "local"])
def test_residuals_of_a_run_that_worker_0_has_left_are_forgotten(kind, given):
    """Worker 0 loads a state, alone, and sends it to the others: as if all had loaded it."""
    found = []
    for loads in (RANK == 0, True):
        model, optimizer = of_kind(kind)
        train(model, optimizer, 8)
        values = [np.array(v) for v in model.variables], [np.array(v) for v in optimizer.variables]
        residuals = optimizer.feedback_state_dict()
        train(model, optimizer, 8, start=8)
        if loads:
            model.set_weights(values[0])
            optimizer.set_weights(values[1])
        if given:
            optimizer.load_feedback_state_dict(residuals)
        onebit.broadcast_variables([*model.variables, *optimizer.variables])
        train(model, optimizer, 4, start=8)
        found.append(optimizer.feedback_state_dict() | {"weights": weights(model)})
        assert any(value.any() for name, value in found[-1].items() if name != "weights")
        train(model, optimizer, 4, start=12)
        assert_replicas_equal(model)
    assert_same(*found)


def test_without_a_second_moment_residuals_are_of_one_kind():
    residuals = of_kind("momentum", "sgd")[1].feedback_state_dict()
    of_kind("update", "sgd")[1].load_feedback_state_dict(residuals)


def test_residuals_of_an_earlier_version_have_no_mark():
    residuals = residuals_of("momentum")
    unmarked = {name: value for name, value in residuals.items() if not name.startswith(MARK)}
    assert len(unmarked) == len(residuals) - 1
    optimizer = of_kind("update")[1]
    optimizer.load_feedback_state_dict(unmarked)
    assert_same(unmarked | {mark("step", SIZE): np.empty(0)}, optimizer.feedback_state_dict())


def test_residuals_of_servers_are_of_a_number_of_workers():
    own = residuals_of("update")
    residuals = {name: value for name, value in own.items() if not name.startswith(MARK)}
    residuals |= {mark("step", SIZE + 1): np.empty(0, np.float32)}
    optimizer = of_kind("update")[1]
    server = {f"{SERVER_PREFIX}0": np.ones(5, np.float32)}
    with pytest.raises(ConfigurationError, match=f"one of {SIZE + 1} workers, and there are {SIZE}"):
        optimizer.load_feedback_state_dict(residuals | server)
    optimizer.load_feedback_state_dict(residuals)
    assert_same(own, optimizer.feedback_state_dict())


@pytest.mark.parametrize("call", ["broadcast_variables", "broadcast_object"])
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_a_worker_that_is_lost_while_an_elastic_state_is_shared(exchange, call, monkeypatch):
    """As Horovod elastic calls it; here the new world has as many workers."""
    model = build()
    recipe = Recipe(exchange=exchange, block_size=64)
    model.compile(optimizer=wrap(OPTIMIZERS["adamw"](), warmup_steps=2, recipe=recipe), loss=LOSS)
    engine = model.optimizer._compressor.engine
    train(model, model.optimizer, 8)
    state = elastic.KerasState(model, step=8)
    saved, before = weights(model), total_residuals(allgather_object(engine.residuals(), name="before"))
    train(model, model.optimizer, 2, start=8)
    state.step = 10

    def lost(*arguments, **options):
        raise HorovodInternalError("a worker is lost")

    for _ in range(2):
        state.restore()
        with monkeypatch.context() as patch:
            patch.setattr(elastic, call, lost)
            with pytest.raises(HorovodInternalError):
                state.sync()
        state.restore()
        assert state.step == 8  # as the weights
        state.step = 10
    state.restore()
    state.sync()
    np.testing.assert_array_equal(weights(model), saved)
    state.step = 9
    state.sync()  # of check_host_updates(), say, without a commit
    assert state.step == 9
    assert before.keys() == engine.feedback.state_dict().keys()
    for name, value in engine.feedback.state_dict().items():
        np.testing.assert_allclose(value, before[name], rtol=1e-5, atol=1e-7)
    train(model, model.optimizer, 4, start=8)
    assert_replicas_equal(model)


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_wait_are_those_of_all_workers_after_an_elastic_sync(scaled):
    model, plain = build(), OPTIMIZERS["adam"]()
    plain = keras.optimizers.LossScaleOptimizer(plain, initial_scale=4.0) if scaled else plain
    optimizer = onebit.DistributedOptimizer(plain, warmup_steps=2, backward_passes_per_step=2)
    model.compile(optimizer=optimizer, loss=LOSS)
    for number in range(5):  # the last one is the first of two passes
        model.train_on_batch(*batch(number))
    waiting = optimizer._compressor.optimizer._accumulated
    means = [hvd.allreduce(v.value).numpy() for v in waiting]
    assert any(mean.any() for mean in means)
    elastic.KerasState(model).sync()
    for total, mean in zip(waiting, means, strict=True):
        np.testing.assert_allclose(total, mean, rtol=1e-5, atol=1e-7)
    model.train_on_batch(*batch(5))
    assert_replicas_equal(model)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_automatic_warm_up_is_the_default(kind, tmp_path):
    model = build(hidden=(96, 48))
    optimizer = onebit.DistributedOptimizer(OPTIMIZERS[kind]())
    model.compile(optimizer=optimizer, loss=LOSS)
    train(model, optimizer, 15, graph=True)
    assert optimizer.phase is Phase.WARMUP
    train(model, optimizer, 185, start=15, graph=True)
    assert optimizer.phase is Phase.COMPRESSED
    assert 20 <= int(optimizer._warmup_steps) < 200
    assert_replicas_equal(model)
    model.save(tmp_path / "auto.keras")
    again = keras.models.load_model(tmp_path / "auto.keras").optimizer
    assert int(again._warmup_steps) == int(optimizer._warmup_steps)
    assert again.phase is Phase.COMPRESSED


@LONG
def test_backup_and_restore_resumes_a_run_that_was_interrupted(tmp_path):
    x, y = batch(0)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 4:
                raise InterruptedError

    def fit(epochs, *callbacks):
        model = build()
        model.compile(optimizer=wrap(OPTIMIZERS["adam"](), warmup_steps=6), loss=LOSS)
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / str(RANK)), delete_checkpoint=False)
        with contextlib.suppress(InterruptedError):
            model.fit(data, epochs=epochs, verbose=0, callbacks=[backup, *callbacks])
        return model

    first = fit(6, Interrupt())
    assert first.optimizer.phase is Phase.COMPRESSED
    again = fit(4)  # restores after epoch 4, so that there is nothing left to do
    np.testing.assert_array_equal(weights(first), weights(again))
    assert int(again.optimizer.iterations) == 16
    assert again.optimizer.phase is Phase.COMPRESSED
    more = fit(6)
    assert int(more.optimizer.iterations) == 24
    assert_replicas_equal(more)


@pytest.mark.parametrize("how", ["fit", "loop"])
def test_a_loss_scale_optimizer_skips_alike_on_all_workers(how, tmp_path):
    def scaled():
        inner = keras.optimizers.Adam(1e-3)
        return wrap(keras.optimizers.LossScaleOptimizer(inner, initial_scale=256.0), warmup_steps=4)

    model, optimizer = build(), scaled()
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if how == "fit":
        model.compile(optimizer=optimizer, loss=LOSS)
    for step in range(10):
        x, y = batch(step)
        if step in (1, 7) and RANK == SIZE - 1:
            x[0, 0] = np.inf
        before = weights(model)
        if how == "fit":
            model.fit(x, y, verbose=0)
        else:
            scaled_step(model, optimizer, x, y)
        assert np.array_equal(before, weights(model)) == (step in (1, 7))
    assert_replicas_equal(model)
    assert float(optimizer.dynamic_scale) == 64.0
    assert optimizer.stats().step == 8
    assert optimizer.phase is Phase.COMPRESSED
    if how == "fit":
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
        assert again.optimizer.phase is Phase.COMPRESSED
        assert float(again.optimizer.dynamic_scale) == 64.0


def of_one_layer(optimizer, built=True):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(10)])
    model.compile(optimizer=optimizer, loss=LOSS)
    if built:
        optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("scaled", [False, True])
def test_the_file_of_a_plain_optimizer(scaled, tmp_path):
    """It goes on with its loss scale; what is not built takes nothing, and says so."""

    def made():
        found = keras.optimizers.Adam(1e-3)
        return keras.optimizers.LossScaleOptimizer(found, initial_scale=64.0) if scaled else found

    model = of_one_layer(made())
    for step in range(5):
        x, y = batch(step, rank=0)
        if scaled and step == 2:
            x[0, 0] = np.inf
        model.train_on_batch(x, y)
    path = str(tmp_path / "plain.weights.h5")
    model.save_weights(path)

    again = of_one_layer(wrap(made(), warmup_steps=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_weights(path)
    assert int(again.optimizer.iterations) == int(model.optimizer.iterations) == (4 if scaled else 5)
    if scaled:
        assert (float(again.optimizer.dynamic_scale), int(again.optimizer.step_counter)) == (32.0, 2)
    assert again.optimizer.phase is Phase.WARMUP
    again.train_on_batch(*batch(5))
    assert_replicas_equal(again)

    unbuilt = of_one_layer(wrap(made(), warmup_steps=3), built=False)
    with pytest.warns(UserWarning, match=r"it is not built: call optimizer\.build\(model\.trainable_variables\)"):
        unbuilt.load_weights(path)
    np.testing.assert_array_equal(weights(unbuilt), weights(model))
    assert int(unbuilt.optimizer.iterations) == 0


def sum_of(weight, optimizer):
    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight.value))
        optimizer.apply_gradients([(tape.gradient(loss, weight.value), weight)])

    return step


@pytest.mark.parametrize("schedule", [None, onebit.Local(every=2)])
def test_the_loss_is_multiplied_by_the_scale_of_now(schedule):
    """Also in a graph that is traced before the optimizer is built, as Keras does."""
    found = []
    for wrapped in (False, True):
        weight = keras.Variable(np.zeros(2048, np.float32))
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=256.0, dynamic_growth_steps=1
        )
        if wrapped:
            options = {"recipe": "exact"} if schedule is None else {"schedule": schedule}
            optimizer = onebit.DistributedOptimizer(optimizer, **options)

        step = sum_of(weight, optimizer)
        for _ in range(4):
            step()
        assert [v.name for v in optimizer._variables][-2:] == ["step_counter", "dynamic_scale"]
        found.append((np.array(weight), float(optimizer.dynamic_scale)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    assert found[0][1] == found[1][1] == 4096.0


def test_mixed_precision():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = build()
        optimizer = wrap(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), warmup_steps=4)
        model.compile(optimizer=optimizer, loss=LOSS)
        model.fit(*batch(0), epochs=10, verbose=0)
        assert optimizer.phase is Phase.COMPRESSED
        assert_replicas_equal(model)
    finally:
        keras.config.set_dtype_policy(policy)


def test_diagnostics_of_a_model():
    model, collector = build(), Collector()
    for step in range(4):
        grads, _ = gradients(model, *batch(step))
        collector.add(by_name(grads, model.trainable_variables))
    found = collector.report()
    assert len(found.layers) == 4
    assert found.verdict("robust") == "fine"


def test_worker_0_writes_what_a_loop_costs(tmp_path):
    path, folder = tmp_path / "run.jsonl", tmp_path / "board"
    model, optimizer = build(), wrap(OPTIMIZERS["adam"](), warmup_steps=4)
    with onebit.Monitor(optimizer, jsonl=path, tensorboard=folder, every=2) as monitor:
        for step in range(9):
            monitor.step(loss=train(model, optimizer, 1, start=step))
    assert path.exists() == folder.exists() == (RANK == 0)
    if RANK == 0:
        rows = read(path)
        assert [row["step"] for row in rows] == [2, 4, 6, 8]
        assert [row["phase"] for row in rows] == ["warmup", "compressed", "compressed", "compressed"]
        assert rows[-1]["bytes_sent"] == optimizer.stats().bytes_sent - optimizer.stats().step_bytes_sent
    with pytest.raises(ConfigurationError, match="optimizer is Adam"):
        onebit.Monitor(OPTIMIZERS["adam"]())


def test_the_first_worker_of_a_process_set_writes(tmp_path):
    """The others do nothing, whether they are in the set or not."""
    path, last = tmp_path / "run.jsonl", SIZE - 1
    members = hvd.add_process_set([last])
    model, optimizer = build(), wrap(OPTIMIZERS["adam"](), warmup_steps=2, process_set=members)
    with onebit.Monitor(optimizer, jsonl=path, tensorboard=tmp_path / "board", every=2) as monitor:
        for step in range(4):
            monitor.step(loss=train(model, optimizer, 1, start=step))
    assert path.exists() == (tmp_path / "board").exists() == (last == RANK)
    assert last != RANK or [row["step"] for row in read(path)] == [2, 4]
    hvd.allgather_object(0)  # the set must not go before its member has trained
    hvd.remove_process_set(members)


def test_a_loss_scale_around_has_checkpoints_replica_checks_and_stats(tmp_path):
    folder = Path(broadcast_object(str(tmp_path), root_rank=0, name="folder"))

    def compiled(seed=0):
        inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3), initial_scale=64.0)
        model = build(seed)
        model.compile(optimizer=wrap(inner, warmup_steps=3), loss=LOSS)
        return model

    model, again = compiled(), compiled(5)
    callbacks = [onebit.callbacks.ReplicaCheckCallback(2), onebit.callbacks.StatsCallback(jsonl=tmp_path / "x.jsonl")]
    for step in range(6):
        model.fit(*batch(step), verbose=0, callbacks=callbacks)
    onebit.save_checkpoint(folder, model)
    again.optimizer.build(again.trainable_variables)
    again.optimizer.dynamic_scale.assign(2.0)
    onebit.load_checkpoint(folder, again)
    assert float(again.optimizer.dynamic_scale) == 64.0
    for step in range(6, 10):
        for part in (model, again):
            part.train_on_batch(*batch(step))
    if SIZE == 2:
        np.testing.assert_array_equal(weights(model), weights(again))
    assert_replicas_equal(again)

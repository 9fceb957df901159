"""The Keras face on real ranks: 0/1 Adam, whose workers' weights differ between exchanges."""

from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow.functions import broadcast_object

import horovod_onebit.tf as onebit
from horovod_onebit import ConfigurationError, DesyncError, NonFiniteError, Recipe, UnsupportedError
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam
from horovod_onebit.schedule import Sends
from horovod_onebit.tf import agreement, elastic
from horovod_onebit.tf.collectives import HorovodCollectives
from horovod_onebit.warmup import Phase
from tests.long import LONG
from tests.ranks.keras_common import (
    LOSS,
    RANK,
    SIZE,
    assert_replicas_equal,
    batch,
    beside_pytorch,
    build,
    gradients,
    train,
    weights,
)
from tests.ranks.kinds import Renewed

# As in test_torch_algorithms.py, and one in which every kind comes soon.
SCHEDULE = onebit.ZeroOne(var_freeze_step=40, var_update_scaler=4, local_step_scaler=20, local_step_clipper=4)
FEW_BITS = onebit.ZeroOne(var_freeze_step=16, local_step_scaler=8, local_step_clipper=4, warmup="three_bit")
SHORT = onebit.ZeroOne(var_freeze_step=12, var_update_scaler=3, local_step_scaler=4, local_step_clipper=4)


def zero_one(schedule=SCHEDULE, kind=keras.optimizers.AdamW, recipe="robust", rate=1e-3, wrapping=None, **arguments):
    optimizer = kind(rate, **arguments)
    return onebit.DistributedOptimizer(optimizer, schedule=schedule, recipe=recipe, **(wrapping or {}))


def kind_at(step, schedule=SCHEDULE):
    """The kind of optimizer step number ``step`` (from 1), None in warm-up."""
    return schedule.sends(step - schedule.exact_steps) if step > schedule.exact_steps else None


def differ(model):
    rows = hvd.allgather(weights(model)[None], name="check.local").numpy()
    return not (rows == rows[0]).all()


@pytest.fixture
def folder(tmp_path):
    return Path(broadcast_object(str(tmp_path), root_rank=0, name="folder"))


@LONG  # as in PyTorch
def test_replicas_that_differ_between_exchanges_are_compared_after_them(monkeypatch):
    """Before the second step, when compression starts, and once workers are together after each fifth step. Of SHORT,
    steps 16, 18, 20 are exchanges, then 24, 28 and so on."""
    compared, sums = [], agreement.checksums
    monkeypatch.setattr(agreement, "checksums", lambda *args, **more: compared.append(step) or sums(*args, **more))
    model, optimizer = build(), zero_one(SHORT, wrapping={"check_replicas_every": 5})
    for step in range(33):
        train(model, optimizer, 1, start=step)
    assert compared == [1, 3, 5, 10, 15, 20, 28, 32]
    if RANK == 0:
        model.trainable_variables[1].assign_add(tf.ones(128))
    with pytest.raises(DesyncError, match=r"bias.* of worker 1 differs"):
        train(model, optimizer, 4, start=33)


@pytest.mark.parametrize(
    ("recipe", "graph"), [("robust", True), (Recipe(exchange="two_stage"), True), ("paper", False)]
)
def test_zero_one_adam(recipe, graph):
    model = build()
    optimizer = zero_one(recipe=recipe)
    start = train(model, optimizer, 4, graph=graph)
    assert optimizer.phase is Phase.COMPRESSED
    kinds = {}
    for step in range(5, 97):
        variance = np.array(optimizer._velocities[0])
        end = train(model, optimizer, 1, start=step - 1, graph=graph)
        kind = kind_at(step)
        kinds[kind] = optimizer.stats(norms=False).step_bytes_sent
        assert (variance != np.array(optimizer._velocities[0])).any() == (kind is Sends.MEAN)
        if kind is Sends.NOTHING:
            assert differ(model)
        else:
            assert_replicas_equal(model)
    assert end < 0.9 * start
    assert kinds[Sends.NOTHING] < kinds[Sends.DISPLACEMENT] == kinds[Sends.GRADIENT] < kinds[Sends.MEAN]
    assert optimizer.stats().step == 96


@pytest.mark.parametrize("schedule", [SHORT, FEW_BITS, Renewed()])
@pytest.mark.parametrize("recipe", ["robust", "fixed", Recipe(exchange="two_stage", block_size=64)])
def test_the_weights_are_those_of_numpy(recipe, schedule):
    """The same gradients, of which some are small tensors; epsilon counts for nothing, since Keras's means another."""
    model = build()
    optimizer = zero_one(schedule, recipe=recipe, epsilon=1e-12, weight_decay=0.01)
    optimizer.build(model.trainable_variables)
    arrays = {str(i): np.array(v) for i, v in enumerate(model.trainable_variables)}
    other = NumpyOptimizer(
        arrays,
        Adam(lr=1e-3, eps=1e-12, weight_decay=0.01),
        collectives=HorovodCollectives(name="onebit.numpy"),
        recipe=recipe,
        schedule=schedule,
    )
    for step in range(40):
        grads, _ = gradients(model, *batch(step))
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        other.step({str(i): np.array(g) for i, g in enumerate(grads)})
        for i, v in enumerate(model.trainable_variables):
            near = np.isclose(np.asarray(v), arrays[str(i)], rtol=1e-7, atol=2e-5)
            # Of gradients in few bits, rounding decides on a code now and then.
            assert near.all() or (schedule is FEW_BITS and near.mean() > 0.95), f"step {step + 1}"
    assert optimizer._compressor.engine.exchanges == other.engine.exchanges
    assert optimizer.stats().bytes_sent == other.engine.traffic.total


@LONG
@pytest.mark.skipif(SIZE != 2, reason="compared on two ranks")
def test_the_pytorch_face_gives_the_same_weights_and_sends_as_many_bytes():
    model = build()
    optimizer = zero_one(SHORT, epsilon=1e-12)
    options = {"lr": 1e-3, "eps": 1e-12, "weight_decay": 0.004}  # Keras's default

    def same_bytes(other):
        assert optimizer.stats(norms=False).step_bytes_sent == other.stats(norms=False).step_bytes_sent

    _, parameters = beside_pytorch(model, optimizer, "AdamW", 40, {"schedule": SHORT}, same_bytes, **options)
    for v, p in zip(model.trainable_variables, parameters, strict=True):
        np.testing.assert_allclose(np.asarray(v), p.detach().numpy(), atol=2e-5)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("steps", [4, 7, 14, 22])
def test_nan_on_one_worker_is_skipped_by_all(steps, graph):
    """In an exact step, one that sends gradients, the first local ones, and one that ends an interval."""
    model, optimizer = build(), zero_one(SHORT)
    train(model, optimizer, steps, graph=graph)
    before = [np.array(v) for v in [*model.variables, *optimizer.variables]]
    x, y = map(np.array, batch(steps))
    if RANK == SIZE - 1:
        x[0, 0] = np.nan

    def step(x, y):
        grads, _ = gradients(model, x, y)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    (tf.function(step) if graph else step)(tf.constant(x), tf.constant(y))
    for variable, old in zip([*model.variables, *optimizer.variables], before, strict=True):
        if variable is not optimizer._tried:
            np.testing.assert_array_equal(old, np.array(variable), err_msg=variable.name)
    train(model, optimizer, 12, start=steps, graph=graph)
    assert optimizer.stats().skipped_steps == 1
    optimizer.flush()
    assert_replicas_equal(model)


def test_nan_is_an_error_on_all_where_that_is_wanted():
    model, optimizer = build(), zero_one(SHORT, recipe=Recipe(on_nonfinite="raise"))
    train(model, optimizer, 22)
    before = weights(model)
    grads = [tf.fill(v.shape, np.float32(np.nan if RANK == 0 else 1)) for v in model.trainable_variables]
    with pytest.raises(NonFiniteError, match="NaN or Inf"):
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    np.testing.assert_array_equal(weights(model), before)
    train(model, optimizer, 12, start=22)
    optimizer.flush()
    assert_replicas_equal(model)


def compiled(seed=0, schedule=SHORT, **arguments):
    model = build(seed)
    model.compile(optimizer=zero_one(schedule, **arguments), loss=LOSS)
    return model


def fit(model, steps, start=0):
    for step in range(start, start + steps):
        model.train_on_batch(*batch(step))


@pytest.mark.parametrize(
    ("steps", "schedule"), [(2, SHORT), (8, SHORT), (12, SHORT), (23, SHORT), (14, FEW_BITS), (27, FEW_BITS)]
)
def test_a_resumed_run_goes_on_bit_for_bit(folder, steps, schedule):
    """From warm-up, exact or in few bits, the gradient's stage, the freeze, and between two exchanges."""
    model = compiled(schedule=schedule)
    fit(model, steps)
    assert (kind_at(steps, schedule) is Sends.NOTHING) == (steps in (23, 27)) == differ(model)
    onebit.save_checkpoint(folder, model)
    again = compiled(seed=5, schedule=schedule)
    fit(again, 3)
    onebit.load_checkpoint(folder, again)
    for part in (model, again):
        fit(part, 12, start=steps)
    if SIZE == 2:
        for one, other in zip(model.variables, again.variables, strict=True):
            np.testing.assert_array_equal(one, other)
    for part in (model, again):
        part.optimizer.flush()
        onebit.check_replicas(part.optimizer)


def test_each_workers_saved_model_goes_on_from_the_middle_of_an_interval(folder):
    model = compiled()
    fit(model, 23)
    assert differ(model)
    path = folder / f"{RANK}.keras"
    model.save(path)
    again = keras.saving.load_model(path)
    assert again.optimizer._wrapping.schedule == SHORT
    again.optimizer.load_feedback_state_dict(model.optimizer.feedback_state_dict())
    for part in (model, again):
        fit(part, 12, start=23)
    np.testing.assert_array_equal(weights(model), weights(again))


def test_a_model_with_a_schedule_of_ones_own_is_saved_if_keras_knows_its_class(folder):
    model = build()
    model.compile(optimizer=zero_one(Renewed()), loss=LOSS)
    fit(model, 13)
    path = folder / f"{RANK}.keras"
    model.save(path)
    with pytest.raises(ConfigurationError, match="schedule of the class Renewed, which Keras does not know"):
        keras.saving.load_model(path)
    with keras.saving.custom_object_scope({"Renewed": Renewed}):
        again = keras.saving.load_model(path)
    assert again.optimizer._wrapping.schedule == Renewed()
    again.optimizer.load_feedback_state_dict(model.optimizer.feedback_state_dict())
    for part in (model, again):
        fit(part, 12, start=13)
    np.testing.assert_array_equal(weights(model), weights(again))
    assert_replicas_equal(again)


def test_flush_in_the_middle_of_an_interval_brings_all_together():
    model, optimizer = build(), zero_one(SHORT)
    train(model, optimizer, 23)
    rows = hvd.allgather(weights(model)[None], name="rows").numpy()
    assert not (rows == rows[0]).all()
    optimizer.flush()
    assert_replicas_equal(model)
    np.testing.assert_allclose(weights(model), rows.mean(0), atol=1e-5)
    onebit.check_replicas(optimizer)
    sent = optimizer.stats(norms=False).bytes_sent
    optimizer.flush()
    assert optimizer.stats(norms=False).bytes_sent == sent
    train(model, optimizer, 9, start=23)
    assert kind_at(32, SHORT) is Sends.DISPLACEMENT
    assert_replicas_equal(model)


@pytest.mark.parametrize("graph", [False, True])
def test_what_is_trained_may_change_between_exchanges_only(graph):
    model, optimizer = build(hidden=(64, 64)), zero_one(SHORT)
    train(model, optimizer, 23)
    assert differ(model)
    layer = model.layers[0]
    layer.trainable = False
    before = [np.array(v) for v in [*model.variables, *optimizer.variables]]
    error = tf.errors.OpError if graph else ConfigurationError
    with pytest.raises(error, match=rf"{layer.kernel.path}.*call optimizer\.flush\(\) on all workers before"):
        train(model, optimizer, 1, start=23, graph=graph)
    for variable, old in zip([*model.variables, *optimizer.variables], before, strict=True):
        np.testing.assert_array_equal(old, np.array(variable), err_msg=variable.name)
    optimizer.flush()
    train(model, optimizer, 9, start=23, graph=graph)
    assert kind_at(32, SHORT) is Sends.DISPLACEMENT
    assert not optimizer._compressor.departed
    onebit.check_replicas(optimizer)


def test_a_flush_that_one_worker_makes_alone_is_an_error_on_all():
    model, optimizer = build(), zero_one(SHORT)
    train(model, optimizer, 23)
    call = optimizer.flush if RANK == 0 else (lambda: train(model, optimizer, 1, start=23))
    with pytest.raises(DesyncError, match="worker 0 flush"):
        call()
    train(model, optimizer, 9, start=23)
    assert_replicas_equal(model)


def zero(optimizer):
    for variable in (*optimizer._momentums, *optimizer._velocities):
        variable.assign(tf.zeros_like(variable.value))


@pytest.mark.parametrize("kind", [Sends.MEAN, Sends.GRADIENT, Sends.NOTHING])
def test_moments_that_one_worker_alone_resets_are_an_error_on_all(kind):
    model, optimizer = build(), zero_one(SHORT)
    step = next(step for step in range(8, 40) if kind_at(step, SHORT) is kind and kind_at(step - 1, SHORT) is not kind)
    train(model, optimizer, step - 1)
    if RANK == 0:
        zero(optimizer)
    with pytest.raises(DesyncError, match=r"state was changed on worker 0 and not on the others"):
        train(model, optimizer, 1, start=step - 1)


def test_moments_that_are_reset_between_exchanges_want_a_flush_first():
    model, optimizer = build(), zero_one(SHORT)
    train(model, optimizer, 23)
    assert differ(model)
    zero(optimizer)
    with pytest.raises(ConfigurationError, match=r"after local steps.*call optimizer\.flush\(\)"):
        train(model, optimizer, 1, start=23)
    optimizer.flush()
    assert_replicas_equal(model)
    train(model, optimizer, 2, start=23)
    assert optimizer.phase is Phase.WARMUP
    train(model, optimizer, 30, start=25)
    optimizer.flush()
    assert_replicas_equal(model)


def test_elastic_states_are_of_workers_that_were_brought_together():
    model = compiled()
    fit(model, 23)
    assert differ(model)
    state = elastic.KerasState(model, step=23)
    assert_replicas_equal(model)
    saved = weights(model)
    fit(model, 3, start=23)
    state.restore()
    np.testing.assert_array_equal(weights(model), saved)
    state.sync()
    fit(model, 9, start=23)
    assert_replicas_equal(model)
    onebit.check_replicas(model.optimizer)


def test_fit_in_one_execution_of_several_steps_with_all_that_goes_around_it():
    model = build(seed=RANK)
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3, global_clipnorm=1.0), initial_scale=8.0)
    optimizer = onebit.DistributedOptimizer(inner, schedule=SHORT, exact=["*bias"])
    model.compile(optimizer=optimizer, loss=LOSS, steps_per_execution=3)
    x, y = (np.concatenate(part) for part in zip(*(batch(step) for step in range(12)), strict=True))
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0), onebit.callbacks.FlushCallback()]
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    assert optimizer.stats().step == 36
    assert_replicas_equal(model)
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_the_moving_average_is_of_the_weights_that_all_have():
    model, optimizer = build(), zero_one(SHORT, use_ema=True, ema_momentum=0.9)
    expected, last = None, 0
    for step in range(1, 33):
        train(model, optimizer, 1, start=step - 1)
        if kind_at(step, SHORT) is not Sends.NOTHING:
            now, keep = np.array(model.trainable_variables[0]), 0.9 ** (step - last) if last else 0
            expected, last = keep * (0 if expected is None else expected) + (1 - keep) * now, step
    np.testing.assert_allclose(optimizer._model_variables_moving_average[0], expected, atol=1e-6)
    onebit.check_replicas(optimizer)


def test_several_passes_make_a_step():
    model, optimizer = build(), zero_one(SHORT, wrapping={"backward_passes_per_step": 2})
    train(model, optimizer, 64)
    assert optimizer.stats().step == 32
    assert kind_at(32, SHORT) is Sends.DISPLACEMENT
    assert_replicas_equal(model)


@pytest.mark.parametrize("what", ["schedule", "plain"])
def test_workers_that_disagree_are_told(what):
    other = onebit.ZeroOne(var_freeze_step=13, var_update_scaler=3) if what == "schedule" else None
    optimizer = zero_one(SHORT if RANK == 0 else other)
    with pytest.raises(DesyncError, match="argument of DistributedOptimizer"):
        train(build(), optimizer, 1)


@pytest.mark.parametrize(
    ("optimizer", "arguments", "error", "text"),
    [
        (lambda: keras.optimizers.SGD(0.1), {}, UnsupportedError, "is for Adam and AdamW"),
        (lambda: keras.optimizers.Lamb(0.1), {}, UnsupportedError, "is for Adam and AdamW"),
        (lambda: keras.optimizers.RMSprop(0.1), {}, UnsupportedError, "no 1-bit form"),
        (lambda: keras.optimizers.Adam(0.1), {"warmup_steps": 10}, ConfigurationError, "first steps are the warm-up"),
        (lambda: keras.optimizers.Adam(0.1), {"schedule": "zero_one"}, ConfigurationError, "expected a ZeroOne"),
    ],
)
def test_bad_arguments(optimizer, arguments, error, text):
    with pytest.raises(error, match=text):
        onebit.DistributedOptimizer(optimizer(), **({"schedule": SHORT} | arguments))


def test_a_hierarchy_is_refused():
    with pytest.raises((UnsupportedError, ConfigurationError, tf.errors.OpError), match=r"0/1 Adam's workers differ"):
        train(build(), zero_one(SHORT, recipe=Recipe(exchange="hierarchical")), 8)

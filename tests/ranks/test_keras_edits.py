"""The Keras face on real ranks: what becomes of a run whose state, variables or wrapping somebody changes."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow.functions import broadcast_object
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st

import horovod_onebit.tf as onebit
from horovod_onebit import ConfigurationError, DesyncError, UnsupportedError
from horovod_onebit.warmup import Phase
from tests.long import FEW
from tests.ranks.keras_common import (
    LOSS,
    OPTIMIZERS,
    RANK,
    assert_replicas_equal,
    batch,
    build,
    gradients,
    scaled_step,
    step_of,
    train,
    weights,
)

WARMUP = 5
KINDS = {
    "one bit": lambda: {"warmup_steps": WARMUP},
    "local": lambda: {"schedule": onebit.Local(every=2, freeze=6)},
    "0/1": lambda: {"schedule": onebit.ZeroOne(9, 4, 100, 1)},
}
OF_ADAM = ("adam", "adamw")
CASES = [("one bit", kind) for kind in ("adam", "adamw", "sgd", "lamb", "lion")]
CASES += [("local", kind) for kind in ("adam", "adamw", "sgd")] + [("0/1", "adam")]
LIMITS = {"one bit": 1.9, "local": 2.5, "0/1": 1.9}
"""By how much moves may be longer than the plain optimizer's: one bit has the same magnitude for a whole block, and
local steps divide by the size of one worker's gradients. What this file is about multiplies them by 3 and more."""


def made(kind, optimizer="adam", seed=0, **options):
    model = build(seed)
    found = onebit.DistributedOptimizer(OPTIMIZERS[optimizer](**options), **KINDS[kind]())
    found.build(model.trainable_variables)
    return model, found


def kernels(model):
    return np.concatenate([np.asarray(v).reshape(-1) for v in model.trainable_variables if len(v.shape) == 2])


def averages(grads):
    """The workers' means. Named: Horovod names them by Keras's layers, and these by how many a process has made."""
    return [hvd.allreduce(grad, name=f"plain.{i}") for i, grad in enumerate(grads)]


def plain_step(model, optimizer):
    """A step of a plain optimizer with the mean gradient."""

    def step(x, y):
        grads, _ = gradients(model, x, y)
        means = averages(grads)
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))

    return step


def moved(model, optimizer, steps, start, step=None):
    """How far an element of a kernel moves in a step, in learning rates: the mean of ``steps`` steps."""
    step, found = step or step_of(model, optimizer), []
    for number in range(start, start + steps):
        before = kernels(model)
        step(*map(tf.constant, batch(number)))
        found.append(np.abs(kernels(model) - before).mean() / float(optimizer.learning_rate))
    return float(np.mean(found))


def twin(model, optimizer):
    """A plain optimizer, made without this library, with the same state, and a model with the same weights."""
    other = build()
    for target, variable in zip(other.trainable_variables, model.trainable_variables, strict=True):
        target.assign(variable)
    plain = optimizer.plain_class().from_config(optimizer.wrapped_config())
    plain.build(other.trainable_variables)
    for target, variable in zip(plain.variables, onebit.plain_optimizer(optimizer).variables, strict=True):
        target.assign(variable)
    return other, plain


def assert_moves_like_plain(kind, model, optimizer, other, plain, start, steps=6):
    optimizer.flush()
    if kind == "local":  # the end of a round finds what was set, and takes its steps back
        train(model, optimizer, 2, start=start)
    ours = moved(model, optimizer, steps, start)
    optimizer.flush()
    expected = moved(other, plain, steps, start, plain_step(other, plain))
    assert ours < LIMITS[kind] * expected + 1e-3, (ours, expected)
    assert ours > 0.4 * expected, (ours, expected)
    assert_replicas_equal(model)


def moments(optimizer):
    return [v for v in optimizer.plain_variables if v.name.endswith(("momentum", "velocity"))]


def zero(variables):
    for variable in variables:
        variable.assign(tf.zeros_like(variable.value))


# -- wrapped again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_plain_optimizer_that_is_wrapped_again_goes_on(kind, name):
    model, plain = build(), OPTIMIZERS[name]()
    counts = set()
    for stage in range(3):
        optimizer = onebit.DistributedOptimizer(plain, **KINDS[kind]())
        if stage:
            assert optimizer.built
            assert int(optimizer.iterations) >= 8 * stage
            assert_moves_like_plain(kind, model, optimizer, *twin(model, optimizer), 8 * stage, 8)
        else:
            train(model, optimizer, 8)
            optimizer.flush()
        counts.add((len(optimizer.variables), len(plain.variables)))
    assert len(counts) == 1
    assert counts.pop()[1] == len(OPTIMIZERS[name]().variables)


@pytest.mark.parametrize("built", [False, True])
def test_options_that_were_set_since_an_optimizer_was_wrapped_are_kept(built):
    model, plain = build(), OPTIMIZERS["adamw"]()
    first = onebit.DistributedOptimizer(plain, warmup_steps=3)
    first.exclude_from_weight_decay(var_names=["bias"])
    if built:
        train(model, first, 4)
    first.learning_rate = keras.optimizers.schedules.CosineDecay(1e-3, 20)
    first.weight_decay, first.beta_1, first.clipnorm, plain.clipnorm = 0.1, 0.8, 2.0, 3.0
    again = onebit.DistributedOptimizer(plain, warmup_steps=3)
    assert (again.weight_decay, again.beta_1, again.clipnorm, again.beta_2) == (0.1, 0.8, 3.0, plain.beta_2)
    assert [again._use_weight_decay(v) for v in model.trainable_variables] == 2 * [True, False]
    train(model, again, 6, start=4)
    assert float(again.learning_rate) < 1e-3
    assert len(again.variables) == len(onebit.DistributedOptimizer(plain, warmup_steps=3).variables)
    assert all(v.name != "learning_rate" for v in again.variables)
    assert_replicas_equal(model)


@pytest.mark.parametrize("schedule", [None, onebit.Local(every=4)])
def test_the_scale_of_a_loss_goes_on_when_its_optimizer_is_wrapped_again(schedule):
    model = build()
    plain = keras.optimizers.LossScaleOptimizer(OPTIMIZERS["adam"](), initial_scale=8.0, dynamic_growth_steps=3)
    first = onebit.DistributedOptimizer(plain, schedule=schedule)
    for step in range(4):
        scaled_step(model, first, *batch(step))
    first.dynamic_growth_steps = 5
    again = onebit.DistributedOptimizer(plain, schedule=schedule)
    assert (float(again.dynamic_scale), int(again.step_counter), again.dynamic_growth_steps) == (16.0, 1, 5)
    for step in range(4, 8):
        scaled_step(model, again, *batch(step))
    assert (float(again.dynamic_scale), int(again.step_counter), int(again.iterations)) == (32.0, 0, 8)
    again.inner_optimizer.flush()
    assert_replicas_equal(model)


def test_what_was_wrapped_before_is_not_used_any_more():
    model, plain = build(), OPTIMIZERS["adam"]()
    first = onebit.DistributedOptimizer(plain, warmup_steps=3)
    train(model, first, 4)
    onebit.DistributedOptimizer(plain, warmup_steps=3)
    with pytest.raises(ConfigurationError, match="was wrapped again"):
        train(model, first, 1, start=4)


def test_local_steps_that_were_not_exchanged_are_not_taken_over():
    model, plain = build(), OPTIMIZERS["adam"]()
    first = onebit.DistributedOptimizer(plain, schedule=onebit.Local(every=4))
    train(model, first, 5)
    with pytest.raises(ConfigurationError, match="call flush"):
        onebit.DistributedOptimizer(plain, schedule=onebit.Local(every=4))
    first.flush()
    train(model, onebit.DistributedOptimizer(plain, schedule=onebit.Local(every=4)), 4, start=5)


def test_a_new_model_needs_an_optimizer_of_its_own():
    plain = OPTIMIZERS["adam"]()
    train(build(), onebit.DistributedOptimizer(plain, warmup_steps=3), 4)
    with pytest.raises(ConfigurationError, match="is unknown to this optimizer"):
        train(build(), onebit.DistributedOptimizer(plain, warmup_steps=3), 1)


def test_the_optimizer_of_a_loaded_plain_model_keeps_its_moments(tmp_path):
    model = build()
    model.compile(optimizer=OPTIMIZERS["adam"](), loss=LOSS)
    model.optimizer.build(model.trainable_variables)
    step = plain_step(model, model.optimizer)
    for number in range(12):
        step(*map(tf.constant, batch(number)))
    if RANK == 0:
        model.save(tmp_path / "plain.keras")
    path = broadcast_object(str(tmp_path / "plain.keras"), name="path")
    again = keras.models.load_model(path)
    optimizer = onebit.DistributedOptimizer(again.optimizer, warmup_steps=3)
    assert (np.asarray(optimizer._seen) == 12).all()
    assert_moves_like_plain("one bit", again, optimizer, model, model.optimizer, 12)


# -- back to Keras -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_training_goes_on_with_a_plain_optimizer(kind, name):
    model, optimizer = made(kind, name)
    train(model, optimizer, 14)
    optimizer.flush()
    plain = onebit.plain_optimizer(optimizer)
    assert type(plain) is type(OPTIMIZERS[name]())
    assert len(plain.variables) == len(optimizer.plain_variables)
    other = OPTIMIZERS[name]()
    beside = build()
    other.build(beside.trainable_variables)
    ours = moved(beside, other, 14, 0, plain_step(beside, other))
    assert moved(model, plain, 6, 14, plain_step(model, plain)) < 1.4 * ours


def test_a_plain_optimizer_of_local_steps_needs_a_flush():
    model, optimizer = made("local")
    train(model, optimizer, 3)
    with pytest.raises(ConfigurationError, match=r"call optimizer.flush\(\)"):
        onebit.plain_optimizer(optimizer)


# -- state that is set -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 12])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_moments_that_are_reset_are_measured_again(kind, name, at):
    model, optimizer = made(kind, name)
    train(model, optimizer, at)
    optimizer.flush()
    pair = twin(model, optimizer)
    zero(moments(optimizer))
    zero(moments_of_plain(pair[1]))
    assert_moves_like_plain(kind, model, optimizer, *pair, at, 9)
    if name in OF_ADAM and kind == "one bit":  # local steps give all moments one count when they freeze them
        compressed = [optimizer._compressor.is_compressed(v) for v in model.trainable_variables]
        assert 0 < np.asarray(optimizer._seen)[compressed].max() <= 9


@pytest.mark.parametrize(("kind", "name"), [("one bit", "adam"), ("one bit", "lamb"), ("0/1", "adam")])
def test_moments_that_are_reset_just_before_the_first_compressed_step_are_measured_again(kind, name):
    model, optimizer = made(kind, name)
    at = 0
    while optimizer.phase is Phase.WARMUP:
        train(model, optimizer, 1, start=at)
        at += 1
    pair = twin(model, optimizer)
    zero(moments(optimizer))
    zero(moments_of_plain(pair[1]))
    assert_moves_like_plain(kind, model, optimizer, *pair, at, 9)
    assert int(optimizer._exact_steps.value) < at + 9


def moments_of_plain(optimizer):
    return [v for v in optimizer.variables if v.name.endswith(("momentum", "velocity"))]


@pytest.mark.parametrize("how", ["value", "one variable", "all variables", "set_weights", "load_own_variables"])
def test_every_way_to_set_the_state_is_followed(how):
    model, optimizer = made("one bit")
    train(model, optimizer, 12)
    other, plain = twin(model, optimizer)
    if how == "value":
        for variable in moments(optimizer):
            variable.value.assign(tf.zeros_like(variable.value))
        zero(moments_of_plain(plain))
    elif how == "one variable":
        zero(moments(optimizer)[:2])
        zero(moments_of_plain(plain)[:2])
    elif how == "all variables":
        zero([v for v in optimizer.variables if "learning_rate" not in v.name])
        zero([v for v in plain.variables if "learning_rate" not in v.name])
    else:
        zero(moments_of_plain(plain))
        values = [np.asarray(v) for v in plain.variables]
        if how == "set_weights":
            optimizer.set_weights(values)
        else:
            optimizer.load_own_variables({str(i): value for i, value in enumerate(values)})
    assert_moves_like_plain("one bit", model, optimizer, other, plain, 12, 9)
    assert optimizer.phase is Phase.COMPRESSED


@pytest.mark.parametrize(
    "arguments", [{"recipe": "exact"}, {"schedule": onebit.Gradients()}], ids=["exact", "few bits"]
)
@pytest.mark.parametrize("graph", [False, True])
def test_an_optimizer_that_takes_its_own_steps_may_be_reset(arguments, graph):
    """As the moments of a plain one are, without its count of steps."""
    model, optimizer = build(), onebit.DistributedOptimizer(OPTIMIZERS["adam"](), **arguments)
    train(model, optimizer, 12, graph=graph)
    zero(optimizer.variables[2:])
    other, plain = twin(model, optimizer)
    assert int(plain.iterations) == 12
    train(model, optimizer, 4, start=12, graph=graph)
    step = plain_step(other, plain)
    for number in range(12, 16):
        step(*map(tf.constant, batch(number)))
    np.testing.assert_allclose(weights(model), weights(other), rtol=1e-4, atol=1e-6)
    assert optimizer.phase is Phase.WARMUP
    onebit.check_replicas(optimizer)


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_iterations_that_are_set_are_followed(name):
    model, optimizer = made("one bit", name)
    train(model, optimizer, 12)
    other, plain = twin(model, optimizer)
    for one in (optimizer, plain):
        one.iterations.assign(0)
    assert_moves_like_plain("one bit", model, optimizer, other, plain, 12, 9)
    train(model, optimizer, 12, start=21)
    assert optimizer.phase is Phase.COMPRESSED
    seen = np.array(optimizer._seen.value)
    assert seen[seen > 0].min() > 12  # the second moments have seen the steps before, too, and are corrected by them


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_second_moments_do_not_follow_beta_2(kind, graph, caplog):
    found = []
    for beta2 in (0.999, 0.99):
        model, optimizer = made(kind)
        train(model, optimizer, 12)
        optimizer.beta_2 = beta2
        if not graph:
            onebit.broadcast_variables(optimizer.variables, root_rank=0)  # which sends moments, and no hyperparameters
        train(model, optimizer, 1, start=12, graph=graph)
        found.append(kernels(model))
    np.testing.assert_array_equal(*found)
    said = [record.getMessage() for record in caplog.records if "beta_2" in record.getMessage()]
    assert said == (["optimizer.beta_2 is 0.99, and 0.999 when second moments were frozen: they stay what they are"]
                    if RANK == 0 else [])  # fmt: skip
    optimizer.beta_1 = 0.8  # the others may change
    step = step_of(model, optimizer)
    step = tf.function(step) if graph else step  # traced anew
    for number in range(13, 16):
        step(*map(tf.convert_to_tensor, batch(number)))
    optimizer.flush()
    assert_replicas_equal(model)
    variance, seen, taken = optimizer._velocities[0], int(optimizer._seen.value[0]), int(optimizer.iterations)
    plain = onebit.plain_optimizer(optimizer)
    expected = np.array(variance) * (1 - 0.99**taken) / (1 - 0.999**seen)
    np.testing.assert_allclose(np.array(plain._velocities[0]), expected, rtol=1e-5)


@pytest.mark.parametrize("how", ["plain optimizer", "wrapped again"])
def test_the_plain_form_of_second_moments_that_have_seen_all_steps_follows_beta_2(how):
    model, plain = build(), OPTIMIZERS["adam"]()
    optimizer = onebit.DistributedOptimizer(plain, schedule=onebit.Local(every=4, doubling=0, freeze=8))
    train(model, optimizer, 8)
    assert int(optimizer._frozen.value) == int(optimizer.iterations) == 8
    frozen = np.array(optimizer._velocities[0])
    optimizer.beta_2 = 0.99
    found = onebit.plain_optimizer(optimizer) if how == "plain optimizer" else onebit.DistributedOptimizer(plain)
    assert found.beta_2 == 0.99
    np.testing.assert_allclose(np.array(found._velocities[0]), frozen * (1 - 0.99**8) / (1 - 0.999**8), rtol=1e-5)


@pytest.mark.parametrize("how", ["file", "broadcast", "file of 0.1"])
def test_the_beta_2_of_frozen_second_moments_goes_with_them(how):
    beta2 = 0.999 if how == "file of 0.1" else 0.99  # which does not say it
    model, optimizer = made("one bit")
    train(model, optimizer, 12)
    values = [np.array(v) for v in optimizer.variables]
    again, other = made("one bit", seed=1, beta_2=beta2)
    if how == "broadcast":
        if RANK == 0:
            again.set_weights(model.get_weights())
            other.set_weights(values)
        onebit.broadcast_variables([*again.variables, *other.variables], root_rank=0)
    else:
        again.set_weights(model.get_weights())
        stored = values if how == "file" else values[:-1]
        other.load_own_variables({str(i): value for i, value in enumerate(stored)})
    residuals = optimizer.feedback_state_dict()
    other.load_feedback_state_dict(residuals)
    for one, its in ((model, optimizer), (again, other)):
        train(one, its, 1, start=12)
    np.testing.assert_array_equal(kernels(model), kernels(again))
    assert other.phase is Phase.COMPRESSED
    train(again, other, 3, start=13)
    assert_replicas_equal(again)


def test_a_loss_scale_optimizer_loads_a_file_of_0_1():
    found = []
    for seed in (0, 1):
        model = build(seed)
        optimizer = onebit.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(OPTIMIZERS["adam"](), initial_scale=8.0), warmup_steps=WARMUP
        )
        optimizer.build(model.trainable_variables)
        found.append((model, optimizer))
    (model, optimizer), (_, other) = found
    for number in range(WARMUP + 3):
        scaled_step(model, optimizer, *map(tf.constant, batch(number)))
    values = [np.array(v) for v in optimizer.variables]
    other.load_own_variables({str(i): value for i, value in enumerate(values[:-1])})
    for v, value in zip(other.variables[:-1], values[:-1], strict=True):
        np.testing.assert_array_equal(v, value)
    assert float(other.inner_optimizer._frozen_beta2.value) == 0


def test_a_warm_up_that_begins_again_forgets_residuals():
    model, optimizer = made("one bit")
    train(model, optimizer, 9)
    assert any(residual.any() for residual in optimizer.feedback_state_dict().values())
    zero(moments(optimizer))
    train(model, optimizer, 1, start=9)
    assert optimizer.phase is Phase.WARMUP
    assert not any(residual.any() for residual in optimizer.feedback_state_dict().values())


CHANGED = {
    "beta_1": 0.5,
    "beta_2": 0.9,
    "epsilon": 1e-2,
    "weight_decay": 0.5,
    "clipvalue": 1e-4,
    "global_clipnorm": 1e-3,
}


@pytest.mark.parametrize("at", [2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_keeps_the_hyperparameters_that_it_was_traced_with(kind, at):
    found = []
    for changed in (False, True):
        model, optimizer = made(kind, "adamw")
        train(model, optimizer, at, graph=True)
        for name, value in CHANGED.items() if changed else ():
            setattr(optimizer, name, value)
        train(model, optimizer, 12 - at, start=at, graph=True)
        optimizer.flush()
        found.append(weights(model))
    np.testing.assert_array_equal(*found)
    assert_replicas_equal(model)


def test_an_eager_step_follows_the_hyperparameters():
    model, optimizer = made("one bit", "adamw")
    train(model, optimizer, 8)
    before, optimizer.weight_decay = kernels(model), 100.0
    optimizer.learning_rate = 1e-2
    train(model, optimizer, 1, start=8)
    assert np.abs(kernels(model)).mean() < 0.2 * np.abs(before).mean()


def test_a_beta_2_that_changes_before_the_freeze_is_followed():
    model, optimizer = made("one bit")
    train(model, optimizer, WARMUP - 1)
    optimizer.beta_2 = 0.99
    train(model, optimizer, 5, start=WARMUP - 1)
    assert_replicas_equal(model)


def test_a_momentum_of_sgd_that_is_set_is_followed():
    model, optimizer = made("one bit", "sgd")
    train(model, optimizer, 9)
    other, plain = twin(model, optimizer)
    for variable in (moments(optimizer)[0], moments_of_plain(plain)[0]):
        variable.assign(tf.fill(variable.shape, 0.01))
    assert_moves_like_plain("one bit", model, optimizer, other, plain, 9, 9)


def test_the_state_of_sgd_of_version_0_1_is_refused():
    model, optimizer = made("one bit", "sgd")
    train(model, optimizer, 9)
    optimizer._marks.assign(np.ones(optimizer._marks.shape, np.int64))
    for use in (lambda: train(model, optimizer, 1, start=9), lambda: onebit.plain_optimizer(optimizer)):
        with pytest.raises(ConfigurationError, match=r"saved by horovod-onebit 0\.1 after compression had started"):
            use()


def test_moments_that_one_worker_alone_resets_are_an_error_on_all():
    model, optimizer = made("one bit")
    train(model, optimizer, 9, graph=True)
    if RANK == 0:
        zero(moments(optimizer))
    with pytest.raises((DesyncError, tf.errors.OpError), match=r"warm-up steps.*differs between workers"):
        train(model, optimizer, 3, start=9, graph=True)


def test_a_variable_that_is_trained_late_begins_the_warm_up_again():
    model, optimizer = made("one bit")
    kernel = model.trainable_variables[0]

    def step(x, y, *, whole):
        grads, _ = gradients(model, x, y)
        chosen = [(g, v) for g, v in zip(grads, model.trainable_variables, strict=True) if whole or v is not kernel]
        optimizer.apply_gradients(chosen)

    for number in range(8):
        step(*map(tf.constant, batch(number)), whole=False)
    assert optimizer.phase is Phase.COMPRESSED
    step(*map(tf.constant, batch(8)), whole=True)
    assert optimizer.phase is Phase.WARMUP
    for number in range(9, 16):
        before = np.array(kernel)
        step(*map(tf.constant, batch(number)), whole=True)
        assert np.abs(np.array(kernel) - before).mean() < 2e-3
    assert_replicas_equal(model)


def pass_over(model, optimizer, kernel):
    """Steps, and whether they have a gradient of ``kernel``."""

    def step(number, *, whole):
        grads, _ = gradients(model, *map(tf.constant, batch(number)))
        pairs = zip(grads, model.trainable_variables, strict=True)
        optimizer.apply_gradients([(g, v) for g, v in pairs if whole or v is not kernel])

    return step


@pytest.mark.parametrize("late", [1, 4])
def test_a_variable_that_is_trained_shortly_before_the_warm_up_ends(late):
    """Its second moment would stay that of one gradient for the rest of the run."""
    model = build()
    optimizer = onebit.DistributedOptimizer(keras.optimizers.Adam(1e-3), warmup_steps=8)
    optimizer.build(model.trainable_variables)
    step = pass_over(model, optimizer, model.trainable_variables[0])
    for number in range(8):
        step(number, whole=number >= 8 - late)
    step(8, whole=True)
    assert optimizer.phase is (Phase.WARMUP if late == 1 else Phase.COMPRESSED)
    for number in range(9, 24):
        step(number, whole=True)
    assert optimizer.phase is Phase.COMPRESSED
    assert_replicas_equal(model)


def test_the_freeze_of_local_steps_waits_for_a_variable_that_has_seen_little():
    model = build()
    optimizer = onebit.DistributedOptimizer(
        keras.optimizers.Adam(1e-3), schedule=onebit.Local(every=2, doubling=0, freeze=8)
    )
    optimizer.build(model.trainable_variables)
    step = pass_over(model, optimizer, model.trainable_variables[0])
    for number in range(16):
        assert not int(optimizer._frozen)
        step(number, whole=number >= 6)
    assert int(optimizer._frozen)
    assert_replicas_equal(model)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_loaded_in_the_middle_forget_what_came_after(kind, tmp_path):
    """Wherever a round, or what compression has lost, was."""
    file, found = str(tmp_path / "best.weights.h5"), []
    for more in (0, 3):
        model, optimizer = made(kind)
        model.compile(optimizer=optimizer)
        train(model, optimizer, 12, graph=True)
        optimizer.flush()
        model.save_weights(file)
        for number in range(12, 12 + more):
            train(model, optimizer, 1, start=number, graph=True)
        if kind == "0/1":
            optimizer.flush()
        model.load_weights(file)
        train(model, optimizer, 12, start=12, graph=True)
        optimizer.flush()
        assert_replicas_equal(model)
        found.append(weights(model))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("kind", ["local", "0/1"])
def test_fit_ends_with_the_same_weights_on_all_workers(kind):
    """Others may be put in their place then, as by ``EarlyStopping(restore_best_weights=True)``, and the next ``fit``
    begins with these."""
    model, optimizer = made(kind)
    model.compile(optimizer=optimizer, loss=LOSS)
    x, y = (np.concatenate(part) for part in zip(*(batch(step) for step in range(11)), strict=True))
    others = [np.array(v) for v in model.trainable_variables]
    for _ in range(2):
        model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
        assert_replicas_equal(model)
        for variable, value in zip(model.trainable_variables, others, strict=True):
            variable.assign(value)
    onebit.check_replicas(optimizer)


def test_fit_that_ends_in_other_rounds_is_an_error_on_all():
    """One worker has a batch more, and would end its round alone."""
    model = build()
    optimizer = onebit.DistributedOptimizer(keras.optimizers.SGD(0.01), schedule=onebit.Local(every=8, doubling=0))
    model.compile(optimizer=optimizer, loss=LOSS)
    x, y = (np.concatenate(part) for part in zip(*map(batch, range(9 if RANK else 8)), strict=True))
    with pytest.raises(DesyncError, match="steps of this round"):
        model.fit(x, y, batch_size=16, verbose=0)


def test_a_state_that_is_loaded_whole_is_no_edit(tmp_path):
    model, optimizer = made("one bit")
    train(model, optimizer, 9)
    values, residuals = [np.array(v) for v in (*model.variables, *optimizer.variables)], optimizer.feedback_state_dict()
    train(model, optimizer, 4, start=9)
    expected = weights(model)
    for variable, value in zip((*model.variables, *optimizer.variables), values, strict=True):
        variable.assign(value)
    optimizer.load_feedback_state_dict(residuals)
    train(model, optimizer, 4, start=9)
    np.testing.assert_array_equal(weights(model), expected)
    assert optimizer.phase is Phase.COMPRESSED


# -- replicas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one bit", "local"])
def test_a_forgotten_broadcast_is_an_error_before_the_second_step(kind):
    model, optimizer = made(kind, seed=RANK)
    with pytest.raises(DesyncError, match=r"kernel.*BroadcastGlobalVariablesCallback"):
        train(model, optimizer, 2)


def test_a_broadcast_after_the_first_step_is_in_time():
    model, optimizer = made("one bit", seed=RANK)
    train(model, optimizer, 1)
    onebit.broadcast_variables([*model.variables, *optimizer.variables])
    train(model, optimizer, 8, start=1)
    assert_replicas_equal(model)


@pytest.mark.parametrize("every", [None, False, 4])
def test_replicas_are_compared_as_often_as_the_user_wants(every):
    model = build()
    arguments = {"warmup_steps": 3, "check_replicas_every": every}
    optimizer = onebit.DistributedOptimizer(OPTIMIZERS["adam"](), **arguments)
    train(model, optimizer, 6)
    if RANK == 1:
        model.trainable_variables[0].assign_add(tf.ones_like(model.trainable_variables[0].value))
    if every:
        with pytest.raises(DesyncError, match=r"kernel.* of worker 1 differs"):
            train(model, optimizer, 4, start=6)
    else:
        train(model, optimizer, 4, start=6)


# -- what an error says ------------------------------------------------------------------------------------------------


def an_own_learning_rate(model, optimizer):
    optimizer.learning_rate = 0.003 if RANK else 0.001


def an_own_warm_up(model, optimizer):
    optimizer._warmup_steps.assign(7 + RANK)


def a_frozen_layer(model, optimizer):
    model.layers[0].trainable = RANK == 0


NAMED = {
    "learning rate": (
        an_own_learning_rate,
        "the learning rate differs between workers: 0.001 on worker 0, 0.003 on worker 1",
    ),
    "warm-up": (an_own_warm_up, "steps that the warm-up has differs between workers: 7 on worker 0, 8 on"),
    "frozen": (a_frozen_layer, "the gradient of variable 0, .*kernel differs between workers: there on worker 0, none"),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("what", NAMED)
def test_an_error_names_what_differs_and_the_values(what, graph):
    change, text = NAMED[what]
    model, optimizer = made("one bit")
    train(model, optimizer, 2)
    change(model, optimizer)
    with pytest.raises((DesyncError, tf.errors.OpError), match=text):
        train(model, optimizer, 1, start=2, graph=graph)


def test_an_argument_of_one_worker_is_named():
    model = build()
    optimizer = onebit.DistributedOptimizer(OPTIMIZERS["adam"](), warmup_steps=3, sparse_as_dense=RANK == 1)
    with pytest.raises(
        DesyncError, match="sparse_as_dense differs between workers: False on worker 0, True on worker 1"
    ):
        train(model, optimizer, 1)


def test_a_gradient_that_is_none_on_one_worker_is_named():
    model, optimizer = made("one bit")
    grads, _ = gradients(model, *batch(0))
    grads[-1] = None if RANK else grads[-1]
    with pytest.raises(
        DesyncError, match=r"the gradient of variable 3, .*bias differs between workers: there on worker 0"
    ):
        optimizer.apply(grads, model.trainable_variables)


# -- other dtypes, several optimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_variables_of_every_dtype(kind, dtype):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(96, activation="relu", dtype=dtype), keras.layers.Dense(10)]
    model = keras.Sequential([keras.layers.Input((32,)), *layers])
    optimizer = onebit.DistributedOptimizer(OPTIMIZERS["adam"](epsilon=1e-4), **KINDS[kind]())
    model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False)
    losses = []
    x, y = batch(0)
    for _ in range(14):
        losses.append(float(np.asarray(LOSS(y, model(x)))))
        model.train_on_batch(x, y)
    assert losses[-1] < losses[0]
    optimizer.flush()
    onebit.check_replicas(optimizer)
    rows = hvd.allgather(tf.constant(weights(model).astype(np.float32)[None])).numpy()
    assert (rows == rows[0]).all()


def several(scale=None, compile_with=None, **arguments):
    adam, sgd = (onebit.DistributedOptimizer(OPTIMIZERS[name](), **arguments) for name in ("adam", "sgd"))
    model = build()
    chosen = keras.optimizers.OptimizerMap(default_optimizer=adam, optimizer_map={".*bias": sgd})
    optimizer = keras.optimizers.MultiOptimizer(chosen, loss_scale_factor=scale)
    model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False, **(compile_with or {}))
    return model


@pytest.mark.parametrize("kind", ["one bit", "local"])
def test_a_multi_optimizer_of_wrapped_ones_trains(kind):
    model = several(**KINDS[kind]())
    callback = onebit.callbacks.BroadcastGlobalVariablesCallback(0)
    for number in range(8):
        model.fit(*batch(number), verbose=0, callbacks=[callback])
    for optimizer in model.optimizer.optimizers:
        optimizer.flush()
        onebit.check_replicas(optimizer)
    assert_replicas_equal(model)


def test_a_multi_optimizer_is_refused_by_name(tmp_path):
    plain = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(OPTIMIZERS["adam"]()))
    for arguments in ({}, {"schedule": onebit.Local()}):
        with pytest.raises(UnsupportedError, match="wrap each optimizer that is in it"):
            onebit.DistributedOptimizer(plain, **arguments)
    model = several(warmup_steps=3)
    with pytest.raises(ConfigurationError, match=r"each of model\.optimizer\.optimizers"):
        onebit.check_replicas(model.optimizer)
    with pytest.raises(Exception, match=r"each of model\.optimizer\.optimizers"):
        onebit.save_checkpoint(tmp_path, model)


def test_a_multi_optimizer_with_mixed_precision():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.raises(
            UnsupportedError, match=r"loss_scale_factor=.* model\.compile\(\.\.\., auto_scale_loss=False"
        ):
            several(warmup_steps=3).fit(*batch(0), verbose=0)
        model = several(warmup_steps=3, scale=1024.0, compile_with={"auto_scale_loss": False})
        model.fit(*batch(0), epochs=8, verbose=0)
    finally:
        keras.config.set_dtype_policy(policy)
    assert [optimizer.phase for optimizer in model.optimizer.optimizers] == 2 * [Phase.COMPRESSED]
    assert_replicas_equal(model)


# -- anything, in any order --------------------------------------------------------------------------------------------

LR = 1e-5
"""So small that weights hardly change, and labels are drawn: gradients stay what they are, and so do moves."""
STATIONARY = {
    "adam": lambda: keras.optimizers.Adam(LR),
    "adamw": lambda: keras.optimizers.AdamW(LR, weight_decay=0.01),
    "sgd": lambda: keras.optimizers.SGD(1e-3, momentum=0.9, nesterov=True),
    "lamb": lambda: keras.optimizers.Lamb(LR),
    "lion": lambda: keras.optimizers.Lion(LR / 3),
}
MODES = {
    "warm-up": lambda: {"warmup_steps": 500},
    "compressed": lambda: {"warmup_steps": 20},
    "local": lambda: {"schedule": onebit.Local(every=4, freeze=500)},
    "frozen": lambda: {"schedule": onebit.Local(every=4, freeze=20)},
    "0/1": lambda: {"schedule": onebit.ZeroOne(30, 16, 64)},
}
RUNS = [(mode, name) for mode in ("warm-up", "compressed") for name in STATIONARY]
RUNS += [(mode, name) for mode in ("local", "frozen") for name in ("adam", "adamw", "sgd")]
RUNS += [("0/1", "adam"), ("0/1", "adamw")]
SETTLING = 44
"""Steps in which what was reset is measured again and the error feedback comes to rest."""


class Run:
    """A model with our optimizer, and its twin with the plain one, which sees the mean gradients and the same edits."""

    def __init__(self, mode, name):
        self.mode, self.name, self.steps = mode, name, 0
        self.model, self.beside = build(), build()
        self.plain, self.twin = STATIONARY[name](), STATIONARY[name]()
        self.twin.build(self.beside.trainable_variables)
        self.wrap()

    def wrap(self):
        self.optimizer = onebit.DistributedOptimizer(self.plain, **MODES[self.mode]())
        if not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)
        self.step = tf.function(self._both)  # the optimizer of now

    def plain_and_back(self):
        self.plain = onebit.plain_optimizer(self.optimizer)
        self.wrap()

    def zero(self, which):
        """Those of ``which``: "all" moments with the count of steps, without which Adam's would not be corrected for
        their bias; "one"; or the "momenta"."""
        chosen = [moments(self.optimizer), moments_of_plain(self.twin)]
        if which == "all":
            chosen = [[*found, one.iterations] for found, one in zip(chosen, (self.optimizer, self.twin), strict=True)]
        if which == "momenta":
            chosen = [[v for v in found if v.name.endswith("momentum")] for found in chosen]
        for found in chosen:
            zero(found[:1] if which == "one" else found)

    def halve_rate(self):
        self.optimizer.learning_rate = self.twin.learning_rate = float(self.twin.learning_rate) / 2

    def _both(self, x, y):
        for model in (self.model, self.beside):
            with tf.GradientTape() as tape:
                loss = LOSS(y, model(x, training=True))
            grads = tape.gradient(loss, model.trainable_variables)
            if model is self.beside:
                grads = averages(grads)
            optimizer = self.twin if model is self.beside else self.optimizer
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    def train(self, steps):
        """Take so many steps; how far the kernels move on the way, in learning rates a step: ours, the twin's."""
        self.optimizer.flush()
        before = [kernels(self.model), kernels(self.beside)]
        for _ in range(steps):
            x, _ = batch(self.steps)
            y = np.random.default_rng([1, self.steps, RANK]).integers(10, size=len(x))
            self.step(tf.constant(x), tf.constant(y))
            self.steps += 1
        self.optimizer.flush()
        now = [kernels(self.model), kernels(self.beside)]
        return [float(np.sqrt(np.square(b - a).mean())) / steps / LR for a, b in zip(before, now, strict=True)]

    def check(self, steps=24):
        """``steps`` more move ours as far as the plain optimizer's; all workers have the same."""
        ours, plain = self.train(steps)
        # Of own moments much is noise, and steps are shorter; so are Lion's, whose signs differ between workers.
        shortest = 0.4 if self.name == "lion" else 0.6 if self.mode == "local" else 0.8
        assert shortest * plain <= ours <= 1.2 * plain, (self.mode, self.name, ours, plain)
        assert_replicas_equal(self.model)


EDITS = {
    "zero all": lambda run: run.zero("all"),
    "zero one": lambda run: run.zero("one"),
    "momenta": lambda run: run.zero("momenta"),
    "rate": Run.halve_rate,
    "wrap": Run.wrap,
    "plain and back": Run.plain_and_back,
    "nothing": lambda run: None,
}
ONCE = {"derandomize": True, "deadline": None, "database": None, "phases": [Stage.generate]}  # alike on all ranks


@settings(max_examples=2 if FEW else 4, suppress_health_check=list(HealthCheck), **ONCE)
@given(case=st.sampled_from(RUNS), edits=st.lists(st.sampled_from(list(EDITS)), min_size=2, max_size=4))
def test_after_any_edits_a_run_moves_as_a_plain_optimizer_does(tmp_path_factory, case, edits):
    run = Run(*case)
    run.train(SETTLING)
    for edit in edits:
        EDITS[edit](run)
        run.train(SETTLING)
        run.check()
    run.model.compile(optimizer=run.optimizer, loss=LOSS, jit_compile=False)
    folder = broadcast_object(str(tmp_path_factory.mktemp("edits")), name="folder")
    onebit.save_checkpoint(folder, run.model)
    again = Run(*case)
    again.model.compile(optimizer=again.optimizer, loss=LOSS, jit_compile=False)
    onebit.load_checkpoint(folder, again.model)
    again.steps = run.steps
    run.train(4), again.train(4)
    np.testing.assert_array_equal(weights(again.model), weights(run.model))


def test_a_rate_that_falls_before_compression_begins_and_rises_after_it():
    """SGD's momentum is a velocity: what it has of one rate is not multiplied by the next."""
    run = Run("compressed", "sgd")
    run.train(18)
    for rate in (1e-7, 1e-3):
        run.optimizer.learning_rate = run.twin.learning_rate = rate
        run.train(4)
    run.check()

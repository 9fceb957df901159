"""The Keras face on real ranks: local steps of any optimizer, and the exchange of what rounds of them have moved."""

from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow.functions import broadcast_object

import horovod_onebit.tf as onebit
from horovod_onebit import ConfigurationError, DesyncError, NonFiniteError, Recipe, UnsupportedError
from tests.ranks import keras_common
from tests.ranks.keras_common import LOSS, RANK, SIZE, assert_replicas_equal, batch, build

GROWING = onebit.Local(every=4, doubling=8)
SHORT = onebit.Local(every=4, doubling=0)


@keras.saving.register_keras_serializable("tests")
class Own(keras.optimizers.Optimizer):
    """A user's own: normalized gradients."""

    def update_step(self, gradient, variable, learning_rate):
        scale = keras.ops.cast(learning_rate, variable.dtype) / (keras.ops.norm(gradient) + 1e-6)
        self.assign_sub(variable, scale * gradient)


def local(optimizer, schedule=GROWING, **arguments):
    return onebit.DistributedOptimizer(optimizer, schedule=schedule, **arguments)


def train(model, optimizer, steps, start=0, eager=False):
    return keras_common.train(model, optimizer, steps, start, graph=not eager)


@pytest.fixture
def folder(tmp_path):
    return Path(broadcast_object(str(tmp_path), root_rank=0, name="folder"))


OPTIMIZERS = [
    lambda: keras.optimizers.AdamW(3e-3),
    lambda: keras.optimizers.RMSprop(1e-3),
    lambda: keras.optimizers.Adafactor(0.05),
    lambda: keras.optimizers.Muon(0.01),
    lambda: Own(0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["adamw", "rmsprop", "adafactor", "muon", "own"])
def test_any_optimizer_trains_and_all_are_equal_after_each_round(make):
    model, optimizer = build(), local(make())
    start = train(model, optimizer, 1)
    for step in range(1, 40):
        loss = train(model, optimizer, 1, start=step)
        sent = optimizer.stats(norms=False).step_bytes_sent
        if GROWING.ends_round(step + 1):
            assert_replicas_equal(model)
            assert sent
        else:
            assert not sent
    assert loss < 0.9 * start


@pytest.mark.parametrize("arguments", [{}, {"steps_per_execution": 3}, {"run_eagerly": True}])
def test_fit(arguments):
    model, optimizer = build(seed=RANK), local(keras.optimizers.Adam(3e-3))
    model.compile(optimizer=optimizer, loss=LOSS, **arguments)
    x, y = (np.concatenate(part) for part in zip(*(batch(step) for step in range(12)), strict=True))
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0), onebit.callbacks.FlushCallback()]
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    assert_replicas_equal(model)
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_eager_steps_and_flush():
    model, optimizer = build(), local(keras.optimizers.SGD(0.05, momentum=0.9), onebit.Local(every=8, doubling=0))
    train(model, optimizer, 5, eager=True)
    before = np.array(model.trainable_variables[0])
    optimizer.flush()
    assert_replicas_equal(model)
    assert not np.array_equal(before, model.trainable_variables[0])
    sent = optimizer.stats(norms=False).bytes_sent
    optimizer.flush()
    assert optimizer.stats(norms=False).bytes_sent == sent > 0


@pytest.mark.parametrize("recipe", [Recipe(exchange="two_stage", block_size=64), "paper"])
def test_every_recipe(recipe):
    model, optimizer = build(), local(keras.optimizers.Adam(3e-3), SHORT, recipe=recipe)
    start, end = train(model, optimizer, 1), train(model, optimizer, 39, start=1)
    assert_replicas_equal(model)
    assert end < 0.9 * start


def test_several_passes_make_a_step():
    model, optimizer = build(), local(keras.optimizers.Adam(3e-3), SHORT, backward_passes_per_step=2)
    train(model, optimizer, 16)
    assert_replicas_equal(model)
    assert optimizer.stats(norms=False).step == 8


@pytest.mark.parametrize(
    ("what", "text"), [("every", "argument"), ("rate", "learning rate"), ("weights", "drifted apart")]
)
def test_workers_that_disagree_are_told_and_may_go_on(what, text):
    model = build(seed=RANK if what == "weights" else 0)
    every = 4 if what == "every" and RANK == 0 else 8
    rate = 1e-3 * (1 + RANK) if what == "rate" else 1e-3
    optimizer = local(keras.optimizers.Adam(rate), onebit.Local(every=every, doubling=0))
    with pytest.raises((DesyncError, tf.errors.OpError), match=text):
        train(model, optimizer, 16, eager=True)
    if what == "weights":
        onebit.broadcast_variables(model.variables)
        train(model, optimizer, 8, eager=True)
        assert_replicas_equal(model)


def test_weights_that_were_set_between_rounds_are_where_the_next_one_begins():
    model, optimizer = build(), local(keras.optimizers.SGD(0.0), SHORT)
    train(model, optimizer, 4)
    saved = [np.ones(v.shape, np.float32) for v in model.trainable_variables]
    for variable, value in zip(model.trainable_variables, saved, strict=True):
        variable.assign(value)
    train(model, optimizer, 4)
    for variable, value in zip(model.trainable_variables, saved, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_a_round_with_damaged_weights_is_lost_and_training_goes_on():
    model, optimizer = build(), local(keras.optimizers.Adam(3e-3), SHORT)
    train(model, optimizer, 6)
    if RANK == SIZE - 1:
        model.trainable_variables[0].assign(model.trainable_variables[0] * float("nan"))
        optimizer._velocities[0].assign(optimizer._velocities[0] * float("nan"))
    train(model, optimizer, 14, start=6)
    assert_replicas_equal(model)


def test_what_is_trained_may_change_between_rounds_only():
    model, optimizer = build(hidden=(64, 64)), local(keras.optimizers.Adam(3e-3), SHORT)
    optimizer.build(model.trainable_variables)
    train(model, optimizer, 6, eager=True)
    model.layers[0].trainable = False
    with pytest.raises(ConfigurationError, match="in the middle of a round"):
        train(model, optimizer, 1, start=6, eager=True)
    optimizer.flush()
    train(model, optimizer, 4, start=6, eager=True)
    optimizer.flush()
    assert_replicas_equal(model)


def nan_on(rank, model, optimizer, step):
    """One step with NaN in a gradient of ``rank``."""
    x, y = batch(step)
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x, training=True))
    grads = tape.gradient(loss, model.trainable_variables)
    if rank == RANK:
        grads[0] = grads[0] * float("nan")
    optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))


def test_nan_on_one_worker_skips_its_own_step():
    model, optimizer = build(), local(keras.optimizers.Adam(3e-3), SHORT)
    train(model, optimizer, 5, eager=True)
    nan_on(0, model, optimizer, 5)
    train(model, optimizer, 6, start=6, eager=True)
    assert_replicas_equal(model)
    assert optimizer.stats(norms=False).skipped_steps == (RANK == 0)


def test_nan_on_one_worker_is_raised_on_all_at_the_end_of_the_round():
    optimizer = local(keras.optimizers.Adam(3e-3), SHORT, recipe=Recipe(on_nonfinite="raise"))
    model = build()
    train(model, optimizer, 5, eager=True)
    nan_on(0, model, optimizer, 5)
    train(model, optimizer, 1, start=6, eager=True)
    with pytest.raises(NonFiniteError):
        train(model, optimizer, 1, start=7, eager=True)
    assert_replicas_equal(model)
    train(model, optimizer, 4, start=8, eager=True)
    assert_replicas_equal(model)


@pytest.mark.parametrize("steps", [3, 8])
def test_a_resumed_run_goes_on_bit_for_bit(folder, steps):
    def compiled(seed):
        model = build(seed=seed)
        model.compile(optimizer=local(keras.optimizers.Adam(3e-3), SHORT), loss=LOSS)
        return model

    model = compiled(0)
    for step in range(steps):
        model.train_on_batch(*batch(step))
    onebit.save_checkpoint(folder, model, extra={"epoch": 3})
    again = compiled(5)
    again.train_on_batch(*batch(0))
    assert onebit.load_checkpoint(folder, again) == {"epoch": 3}
    for step in range(steps, steps + 10):
        model.train_on_batch(*batch(step))
        again.train_on_batch(*batch(step))
    if SIZE == 2:
        for one, other in zip(model.variables, again.variables, strict=True):
            np.testing.assert_array_equal(one, other)
    again.optimizer.flush()
    assert_replicas_equal(again)


def test_a_saved_model_goes_on(folder):
    model = build()
    model.compile(optimizer=local(keras.optimizers.Adam(3e-3), SHORT), loss=LOSS)
    for step in range(6):
        model.train_on_batch(*batch(step))
    model.optimizer.flush()
    path = folder / f"{RANK}.keras"
    model.save(path)
    again = keras.saving.load_model(path)
    assert again.optimizer._wrapping.schedule == SHORT
    for step in range(6, 12):
        again.train_on_batch(*batch(step))
    again.optimizer.flush()
    assert_replicas_equal(again)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"op": hvd.Sum}, UnsupportedError, "gradients are not averaged"),
        ({"schedule": "local"}, ConfigurationError, "expected a Local"),
        ({"schedule": onebit.Local(momentum=0.5)}, UnsupportedError, "no momentum"),
        ({"optimizer": keras.optimizers.Adam(1e-3, use_ema=True)}, UnsupportedError, "use_ema"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        onebit.DistributedOptimizer(**({"optimizer": keras.optimizers.Adam(1e-3), "schedule": SHORT} | arguments))
    with pytest.raises(UnsupportedError, match=r"schedule=horovod_onebit.tf.Local\(...\), any optimizer works"):
        onebit.DistributedOptimizer(keras.optimizers.RMSprop(1e-3))

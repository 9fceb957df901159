"""The Keras face on real ranks: local steps of any optimizer, and the exchange of what rounds of them have moved."""

from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow.functions import allgather_object, broadcast_object

import horovod_onebit.tf as onebit
from horovod_onebit import ConfigurationError, DesyncError, NonFiniteError, Recipe, UnsupportedError
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.tf import elastic
from horovod_onebit.tf.collectives import HorovodCollectives
from tests.ranks import keras_common
from tests.ranks.keras_common import LOSS, RANK, SIZE, assert_replicas_equal, batch, build, gradients, scaled_step

GROWING = onebit.Local(every=4, doubling=8, freeze=10)
SHORT = onebit.Local(every=4, doubling=0, freeze=6)
ZERO_ONE = onebit.ZeroOne(var_freeze_step=8, var_update_scaler=4, local_step_scaler=4, local_step_clipper=4)


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
    x, y = (np.concatenate(part) for part in zip(*(batch(step) for step in range(11)), strict=True))
    flush = onebit.callbacks.FlushCallback()
    equal = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: assert_replicas_equal(model))
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0), flush, equal]
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    assert_replicas_equal(model)
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_validation_on_one_worker_alone():
    """``FlushCallback`` flushes where validation begins, and on workers without it at the end of the epoch."""
    model, optimizer = build(), local(keras.optimizers.Adam(3e-3), onebit.Local(every=8))
    model.compile(optimizer=optimizer, loss=LOSS)
    x, y = (np.concatenate(part) for part in zip(*(batch(step) for step in range(11)), strict=True))
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0), onebit.callbacks.FlushCallback()]
    held_out = batch(11) if RANK == 0 else None
    for _ in range(2):
        history = model.fit(
            x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=callbacks, validation_data=held_out
        )
        assert ("val_loss" in history.history) == (RANK == 0)
        assert_replicas_equal(model)
    train(model, optimizer, 3, eager=True)
    assert optimizer._compressor.pending
    model.evaluate(x, y, verbose=0, callbacks=callbacks[1:])
    assert not optimizer._compressor.pending
    assert_replicas_equal(model)


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


class Adversaries(keras.Model):
    """A discriminator with the optimizer that this is compiled with, and a generator with one of its own."""

    def __init__(self, g_opt, how):
        super().__init__()
        self.discriminator, self.generator = build(seed=1), build(seed=2)
        if how == "compiled":
            self.generator.compile(optimizer=g_opt)
        else:
            self.held = [g_opt] if how == "list" else g_opt
        self.g_opt = lambda: g_opt  # where nobody looks for one

    def call(self, x):
        return self.discriminator(x)

    def train_step(self, data):
        x, y = data
        for part, optimizer in ((self.discriminator, self.optimizer), (self.generator, self.g_opt())):
            grads, loss = gradients(part, x, y)
            optimizer.apply(grads, part.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("how", ["list", "scaled", "compiled"])
def test_all_optimizers_of_a_model_are_flushed_and_none_is_left_out_of_a_checkpoint(how, folder):
    schedule = onebit.Local(every=8, doubling=0)
    g_opt = keras.optimizers.SGD(0.1)
    g_opt = local(keras.optimizers.LossScaleOptimizer(g_opt) if how == "scaled" else g_opt, schedule)
    model = Adversaries(g_opt, how)
    model.build((None, 32))
    model.compile(optimizer=local(keras.optimizers.Adam(1e-3), schedule), run_eagerly=True)
    found = []

    def look(epoch, logs):
        found.append(not model.optimizer._compressor.pending and not g_opt._compressor.pending)
        assert_replicas_equal(model)

    x, y = (np.concatenate(part) for part in zip(*(batch(step) for step in range(5)), strict=True))
    callbacks = [onebit.callbacks.FlushCallback(), keras.callbacks.LambdaCallback(on_epoch_end=look)]
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    assert_replicas_equal(model)
    assert found == [True, True]

    held = {"list": r"held\[0\]", "scaled": "held"}.get(how)
    if held:
        for call in (onebit.save_checkpoint, onebit.load_checkpoint):
            with pytest.raises(ConfigurationError, match=f"optimizers, optimizer, {held}; expected one"):
                call(folder, model)
    else:
        onebit.save_checkpoint(folder, model)
        onebit.save_checkpoint(folder / "generator", model.generator)
        onebit.load_checkpoint(folder / "generator", model.generator)
    with pytest.raises(ConfigurationError, match="2 of DistributedOptimizer's optimizers, optimizer, "):
        elastic.KerasState(model)
    with pytest.raises(ConfigurationError, match=r"KerasState takes one optimizer alone.*compile=False"):
        elastic.KerasState(model, g_opt)


def test_the_end_of_fit_flushes_once(monkeypatch):
    model = build()
    model.compile(optimizer=local(keras.optimizers.SGD(0.1), onebit.Local(every=8, doubling=0)), loss=LOSS)
    compressor, calls = model.optimizer._compressor, []
    flush = compressor.flush
    monkeypatch.setattr(compressor, "flush", lambda: calls.append(flush()))
    model.fit(*batch(0), epochs=2, verbose=0)
    assert len(calls) == 1
    assert_replicas_equal(model)


class AsInTheGuide(keras.Model):
    """As in Keras's guides, ``compile`` has an optimizer for each part, and Keras knows none of them."""

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = build(seed=RANK), build(seed=2 + RANK)

    def compile(self, d_optimizer, g_optimizer, **others):
        super().compile(**others)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, data):
        parts = (self.discriminator, self.d_optimizer), (self.generator, self.g_optimizer)
        for part, optimizer in parts:
            grads, loss = gradients(part, *data)
            optimizer.apply_gradients(zip(grads, part.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("others", [{}, {"optimizer": None}], ids=["rmsprop", "none"])
def test_a_model_that_was_compiled_with_none_of_its_optimizers(others):
    schedule = onebit.Local(every=8, doubling=0)
    model = AsInTheGuide()
    optimizers = [local(keras.optimizers.Adam(1e-3), schedule), local(keras.optimizers.SGD(0.1), schedule)]
    model.compile(*optimizers, run_eagerly=True, **others)
    equal = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: assert_replicas_equal(model))
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0), onebit.callbacks.FlushCallback(), equal]
    x, y = (np.concatenate(part) for part in zip(*(batch(step) for step in range(5)), strict=True))
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    assert_replicas_equal(model)
    assert [int(optimizer.iterations) for optimizer in optimizers] == [10, 10]


@pytest.mark.parametrize("several", [True, False], ids=["multi optimizer", "plain"])
def test_what_cannot_be_flushed_is_an_error_before_the_first_step(several):
    model, plain = build(), keras.optimizers.SGD(0.1)
    if several:
        model.held = local(keras.optimizers.SGD(0.1))
        plain = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(plain))
    model.compile(optimizer=plain, loss=LOSS, run_eagerly=True)
    before = keras_common.weights(model)
    with pytest.raises(ConfigurationError, match="is a MultiOptimizer" if several else "is SGD; expected what"):
        model.fit(*batch(0), verbose=0, callbacks=[onebit.callbacks.FlushCallback()])
    np.testing.assert_array_equal(keras_common.weights(model), before)


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
    ("what", "text"), [("every", "argument"), ("rate", "learning rate"), ("weights", "differs from that of worker 0")]
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
    train(model, optimizer, 7)
    if RANK == SIZE - 1:
        model.trainable_variables[0].assign(model.trainable_variables[0] * float("nan"))
        optimizer._velocities[0].assign(optimizer._velocities[0] * float("nan"))
    train(model, optimizer, 13, start=7)
    assert_replicas_equal(model)


def test_what_is_trained_may_change_between_rounds_only():
    model, optimizer = build(hidden=(64, 64)), local(keras.optimizers.Adam(3e-3), SHORT)
    optimizer.build(model.trainable_variables)
    train(model, optimizer, 7, eager=True)
    model.layers[0].trainable = False
    with pytest.raises(ConfigurationError, match="in the middle of a round"):
        train(model, optimizer, 1, start=7, eager=True)
    optimizer.flush()
    train(model, optimizer, 4, start=7, eager=True)
    optimizer.flush()
    assert_replicas_equal(model)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("constraint", "norm"), [("non_neg", None), ("unit_norm", 1.0)])
def test_constraints_hold_after_each_round(constraint, norm, eager):
    """Also where rounds end early; the next one begins with the same weights."""
    model, optimizer = build(), local(keras.optimizers.Adam(1e-2), SHORT)
    kernels = [layer.kernel for layer in model.layers]
    for kernel in kernels:
        kernel.constraint = keras.constraints.get(constraint)
        kernel.assign(kernel.constraint(kernel))
    for step in range(14):
        train(model, optimizer, 1, start=step, eager=eager)
        if step == 13:
            optimizer.flush()
        if not optimizer._compressor.pending and step != SHORT.freeze - 1:
            assert optimizer._compressor.begun(optimizer._compressor.indices)
        if not optimizer._compressor.pending:
            for kernel in map(np.array, kernels):
                assert kernel.min() >= 0 if norm is None else np.allclose(np.linalg.norm(kernel, axis=0), norm)
            assert_replicas_equal(model)
            onebit.check_replicas(optimizer)


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
    train(model, optimizer, 4, eager=True)
    for step in (5, 7):  # that of the freeze, which is put off then, and one after it
        if step == 7:
            train(model, optimizer, 1, start=6, eager=True)
            assert int(optimizer._frozen.value) == 7
        else:
            train(model, optimizer, 1, start=4, eager=True)
        with pytest.raises(NonFiniteError):
            nan_on(0, model, optimizer, step)
        assert_replicas_equal(model)
    train(model, optimizer, 4, start=8, eager=True)
    assert_replicas_equal(model)


def compiled(seed, schedule):
    model = build(seed=seed)
    model.compile(optimizer=local(keras.optimizers.Adam(3e-3), schedule), loss=LOSS)
    return model


@pytest.mark.parametrize("steps", [3, 8])
def test_a_resumed_run_goes_on_bit_for_bit(folder, steps):
    model = compiled(0, SHORT)
    for step in range(steps):
        model.train_on_batch(*batch(step))
    onebit.save_checkpoint(folder, model, extra={"epoch": 3})
    again = compiled(5, SHORT)
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


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("rate", [0.0, 3e-6])
@pytest.mark.parametrize("schedule", [SHORT, ZERO_ONE])
def test_after_a_fall_of_the_rate_the_momentum_is_that_of_all_and_as_large_as_it_was(schedule, rate, eager):
    model, optimizer = build(), local(keras.optimizers.AdamW(3e-3), schedule)
    sizes = []
    for step in range(36):
        if step == 24:
            optimizer.learning_rate = rate
        train(model, optimizer, 1, start=step, eager=eager)
        momenta = [np.array(v) for v in optimizer._momentums]
        sizes.append(max(float(np.abs(m).max()) for m in momenta))
        if step >= 24 and step % 4 == 3:
            for momentum in momenta:
                gathered = hvd.allgather(momentum[None]).numpy()
                assert gathered[0].tobytes() == gathered[-1].tobytes()
    assert max(sizes[24:]) < 6 * max(sizes[12:24])
    assert_replicas_equal(model)


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
    assert int(again.optimizer._frozen) == 6
    frozen = [np.array(v) for v in again.optimizer._velocities]
    for step in range(6, 20):  # they are not frozen once more
        again.train_on_batch(*batch(step))
    again.optimizer.flush()
    assert int(again.optimizer._frozen) == 6
    for before, velocity in zip(frozen, again.optimizer._velocities, strict=True):
        np.testing.assert_array_equal(before, velocity)
    assert_replicas_equal(again)


@pytest.mark.parametrize("how", ["graph", "eager"])
@pytest.mark.parametrize("make", [keras.optimizers.Adam, keras.optimizers.AdamW])
def test_the_weights_are_those_of_numpy_with_frozen_moments(make, how):
    """Messages are exact, so that rounding is not magnified."""
    model = build()
    optimizer = local(make(3e-3, epsilon=1e-12), SHORT, exact=["*"])
    optimizer.build(model.trainable_variables)
    arrays = {str(i): np.array(v) for i, v in enumerate(model.trainable_variables)}
    rule = Adam(lr=3e-3, eps=1e-12, weight_decay=0.004 if make is keras.optimizers.AdamW else 0.0)
    other = NumpyOptimizer(arrays, rule, collectives=HorovodCollectives(name="numpy"), schedule=SHORT, exact=["*"])

    def apply(*grads):
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    step_of = tf.function(apply, autograph=False) if how == "graph" else apply
    for step in range(24):
        grads = [tf.convert_to_tensor(g) for g in gradients(model, *batch(step))[0]]
        step_of(*grads)
        other.step({str(i): np.array(g) for i, g in enumerate(grads)})
    assert_replicas_equal(model)
    for i, v in enumerate(model.trainable_variables):
        np.testing.assert_allclose(np.asarray(v), arrays[str(i)], atol=5e-5)
    assert optimizer.stats().bytes_sent == other.engine.traffic.total
    assert int(optimizer._frozen.value) == 6


@pytest.mark.parametrize("bad", [(), (9,), (13, 14)])
def test_moments_are_those_of_all_workers_after_the_freeze(bad):
    """After each round; the second ones do not change any more. One worker skips the steps ``bad`` (from 0); if it
    skips that of the freeze, the next one has it."""
    last = 10 if 9 in bad else 9
    model, optimizer = build(), local(keras.optimizers.AdamW(3e-3, weight_decay=0.1))
    frozen = []
    for step in range(32):
        if step in bad:
            nan_on(0, model, optimizer, step)
        else:
            train(model, optimizer, 1, start=step)
        second = [np.array(v) for v in optimizer._velocities]
        if step == last:
            frozen = second
        if step >= last:
            for one, other in zip(second, frozen, strict=True):
                np.testing.assert_array_equal(one, other)
        if step > last and GROWING.ends_round(step + 1):
            for v in (*optimizer._velocities, *optimizer._momentums):
                gathered = hvd.allgather(np.array(v)[None])
                assert np.all(gathered == gathered[:1])
    assert optimizer.stats().skipped_steps == (RANK == 0) * len(bad)
    assert_replicas_equal(model)


@pytest.mark.parametrize("eager", [False, True])
def test_workers_that_disagree_about_the_freeze_are_told(eager):
    model, optimizer = build(), local(keras.optimizers.Adam(1e-3), SHORT)

    def trained():
        for step in range(20):
            optimizer.learning_rate = 1.5e-3 if RANK == 1 and step == 2 else 1e-3
            train(model, optimizer, 1, start=step, eager=eager)

    with pytest.raises((DesyncError, tf.errors.OpError), match="the learning rate's last rise differs between workers"):
        trained()


def test_frozen_moments_that_one_worker_alone_has_set_are_named():
    model, optimizer = build(), local(keras.optimizers.Adam(1e-3), SHORT)
    train(model, optimizer, 24, eager=True)
    assert int(optimizer._frozen.value)
    if RANK:
        optimizer._velocities[0].assign_add(tf.ones_like(optimizer._velocities[0].value))
    text = "whether somebody has set frozen second moments differs between workers: False on worker 0, True on worker 1"
    with pytest.raises(DesyncError, match=text):
        train(model, optimizer, 8, start=24, eager=True)


def test_a_flush_after_other_numbers_of_steps_is_an_error_on_all():
    """Worker 0 is at the end of a round, where it has nothing to bring together."""
    model, optimizer = build(), local(keras.optimizers.Adam(1e-3), onebit.Local(every=4, doubling=0))
    train(model, optimizer, 4, eager=True)
    optimizer.flush()
    if RANK:
        train(model, optimizer, 1, start=4, eager=True)
    text = r"flush \(.*, 0 steps of this round\) on worker 0, .*, 1 steps of this round"
    with pytest.raises(DesyncError, match=text):
        optimizer.flush()
    if RANK == 0:
        train(model, optimizer, 1, start=4, eager=True)
    optimizer.flush()
    assert_replicas_equal(model)


def test_the_weights_are_those_of_numpy_with_momentum_of_the_rounds():
    schedule = onebit.Local(every=4, doubling=0, momentum=0.9)
    model = build()
    optimizer = local(keras.optimizers.SGD(0.05), schedule)
    optimizer.build(model.trainable_variables)
    arrays = {str(i): np.array(v) for i, v in enumerate(model.trainable_variables)}
    collectives = HorovodCollectives(name="numpy")
    other = NumpyOptimizer(arrays, SGD(lr=0.05), collectives=collectives, schedule=schedule)
    for step in range(24):
        grads, _ = gradients(model, *batch(step))
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        other.step({str(i): np.array(g) for i, g in enumerate(grads)})
    assert_replicas_equal(model)
    for i, v in enumerate(model.trainable_variables):
        np.testing.assert_allclose(np.asarray(v), arrays[str(i)], atol=2e-4)
    assert optimizer.stats().bytes_sent == other.engine.traffic.total


def test_after_a_lost_round_each_worker_resumes_with_what_it_knows_of_its_residuals(folder):
    """The worker whose weights were damaged has no residuals of that round; the others send theirs in shares."""
    schedule = onebit.Local(every=4, doubling=0, freeze=4)
    model = compiled(0, schedule)
    for step in range(12):
        if step == 10 and RANK == SIZE - 1:
            model.trainable_variables[0].assign(model.trainable_variables[0] * float("nan"))
        model.train_on_batch(*batch(step))
    rates = allgather_object(max(model.optimizer._compressor.engine.feedback.rates.values()), name="rates")
    assert SIZE == 1 or rates[0] > 1.5 * rates[-1] > 0
    onebit.save_checkpoint(folder, model)
    again = compiled(3, schedule)
    onebit.load_checkpoint(folder, again)
    assert again.optimizer.stats().skipped_steps == model.optimizer.stats().skipped_steps
    for part in (model, again):
        for step in range(12, 20):
            part.train_on_batch(*batch(step))
        assert_replicas_equal(part)
    if SIZE == 2:
        for one, other in zip(model.variables, again.variables, strict=True):
            np.testing.assert_array_equal(one, other)


def test_momentum_of_the_rounds_is_saved(folder):
    schedule = onebit.Local(every=4, doubling=0, momentum=0.8)
    model, again = (compiled(seed, schedule) for seed in (0, 3))
    for step in range(10):
        model.train_on_batch(*batch(step))
    onebit.save_checkpoint(folder, model)
    again.train_on_batch(*batch(0))
    onebit.load_checkpoint(folder, again)
    for momentum in again.optimizer._round_momenta:
        assert np.any(np.array(momentum))
    for part in (model, again):
        for step in range(10, 20):
            part.train_on_batch(*batch(step))
    if SIZE == 2:
        for one, other in zip(model.variables, again.variables, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("graph", [True, False])
def test_the_moving_average_is_of_the_weights_that_all_have(graph):
    model = build()
    optimizer = local(keras.optimizers.Adam(3e-3, use_ema=True, ema_momentum=0.9), SHORT)
    expected, last = None, 0
    for step in range(1, 13):
        train(model, optimizer, 1, start=step, eager=not graph)
        if SHORT.ends_round(step) or step == SHORT.freeze:
            now, keep = [np.array(v) for v in model.trainable_variables], 0.9 ** (step - last)
            expected = now if last == 0 else [keep * e + (1 - keep) * n for e, n in zip(expected, now, strict=True)]
            last = step
    for average, value in zip(optimizer._model_variables_moving_average, expected, strict=True):
        np.testing.assert_allclose(average, value, atol=1e-6)
        rows = hvd.allgather(np.array(average)[None], name="average").numpy()
        assert (rows == rows[0]).all()


@pytest.mark.parametrize("schedule", [SHORT, ZERO_ONE])
def test_a_fit_that_ends_within_a_round_leaves_the_average_of_what_all_have(schedule):
    model = build()
    optimizer = local(keras.optimizers.Adam(3e-3, use_ema=True, ema_momentum=0.9), schedule)
    model.compile(optimizer=optimizer, loss=LOSS)
    x, y = (np.concatenate(part) for part in zip(*(batch(step) for step in range(15)), strict=True))
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0)]
    for _ in range(2):
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=callbacks)
        assert_replicas_equal(model)
        for average, v in zip(optimizer._model_variables_moving_average, model.trainable_variables, strict=True):
            np.testing.assert_array_equal(average, v)
    optimizer.flush()  # nothing is left of the round
    for average, v in zip(optimizer._model_variables_moving_average, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(average, v)
    assert_replicas_equal(model)


@pytest.mark.parametrize("swaps", [True, False], ids=["at the end of epochs", "to evaluate"])
def test_averages_are_not_exchanged_in_place_of_the_weights(swaps):
    """``FlushCallback`` comes before ``SwapEMAWeights``, or an error says so: in the beginning if it is known then."""
    x, y = (np.concatenate(part) for part in zip(*(batch(step) for step in range(5)), strict=True))
    begin, flush = onebit.callbacks.BroadcastGlobalVariablesCallback(0), onebit.callbacks.FlushCallback()
    text, model = "put FlushCallback before SwapEMAWeights in the callbacks of fit", build()
    start = model.get_weights()

    def fit(*callbacks, every=8):
        model.set_weights(start)
        schedule = onebit.Local(every=every, doubling=0) if every else ZERO_ONE
        model.compile(local(keras.optimizers.Adam(3e-3, use_ema=True), schedule), loss=LOSS, run_eagerly=True)
        model.optimizer.build(model.trainable_variables)
        listed = [keras.callbacks.SwapEMAWeights(swap_on_epoch=swaps) if one is None else one for one in callbacks]
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=listed, validation_data=batch(0))
        assert_replicas_equal(model)

    fit(flush, None)
    wrong = [((None, flush), 8, 5), ((begin, None, flush), 8, 0), ((begin, None), 0, 0)]
    for callbacks, every, steps in [*wrong, ((None,), 8, 10)] if swaps else wrong:
        with pytest.raises(ConfigurationError, match=text):
            fit(*callbacks, every=every)
        assert int(model.optimizer.iterations) == steps
    fit(begin, flush, None)


@pytest.mark.parametrize("schedule", [onebit.Local(every=4), ZERO_ONE], ids=["local", "0/1 Adam"])
def test_the_best_weights_are_those_that_all_have(schedule):
    """``FlushCallback`` comes before ``EarlyStopping(restore_best_weights=True)``, or an error says so."""
    x, y = (np.concatenate(part) for part in zip(*(batch(step) for step in range(5)), strict=True))
    begin, flush = onebit.callbacks.BroadcastGlobalVariablesCallback(0), onebit.callbacks.FlushCallback()

    def fit(*callbacks, restore=True):
        model = build()
        model.compile(local(keras.optimizers.Adam(3e-3), schedule), loss=LOSS, run_eagerly=True)
        worse = keras.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=restore)
        listed = [
            begin,
            onebit.callbacks.MetricAverageCallback(),
            *(worse if one is None else one for one in callbacks),
        ]
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=listed)
        assert_replicas_equal(model)

    fit(flush, None)
    fit(None, flush, restore=False)
    for callbacks in ((None, flush), (None,)):
        with pytest.raises(ConfigurationError, match="put FlushCallback before it"):
            fit(*callbacks)


@pytest.mark.parametrize("schedule", [SHORT, ZERO_ONE, None], ids=["local", "0/1 Adam", "none"])
def test_spectral_normalization_is_refused_where_workers_step_alone(schedule):
    keras.utils.set_random_seed(RANK)
    first = keras.layers.SpectralNormalization(keras.layers.Dense(128, activation="relu"))
    model = keras.Sequential([keras.layers.Input((32,)), first, keras.layers.Dense(10)])
    how = {"warmup_steps": 3} if schedule is None else {"schedule": schedule}
    model.compile(onebit.DistributedOptimizer(keras.optimizers.Adam(1e-3), **how), loss=LOSS, jit_compile=False)
    begin = onebit.callbacks.BroadcastGlobalVariablesCallback(0)
    if schedule is not None:
        with pytest.raises(UnsupportedError, match=r"a SpectralNormalization, .* or leave the layer out"):
            model.fit(*batch(0), verbose=0, callbacks=[begin])
        return
    model.fit(*batch(0), epochs=6, verbose=0, callbacks=[begin])
    assert int(model.optimizer._compressed_steps.value) == 3
    assert_replicas_equal(model)


@pytest.mark.parametrize("schedule", [SHORT, ZERO_ONE])
def test_an_average_of_weights_follows_steps_that_were_set_back(schedule):
    model = build()
    optimizer = local(keras.optimizers.Adam(3e-3, use_ema=True, ema_momentum=0.9), schedule)
    train(model, optimizer, 40)
    optimizer.flush()
    for variable in (optimizer.iterations, *optimizer._momentums, *optimizer._velocities):
        variable.assign(keras.ops.zeros_like(variable))
    train(model, optimizer, 16)
    optimizer.flush()
    for average, v in zip(optimizer._model_variables_moving_average, model.trainable_variables, strict=True):
        assert np.abs(np.array(average) - np.array(v)).max() < 0.1
    assert_replicas_equal(model)


def test_an_average_that_is_loaded_from_a_plain_optimizer_goes_on():
    model, plain = build(), keras.optimizers.Adam(0.0, use_ema=True, ema_momentum=0.9)
    plain.build(model.trainable_variables)
    plain.iterations.assign(100)
    for average in plain._model_variables_moving_average:
        average.assign(keras.ops.ones_like(average))
    optimizer = local(keras.optimizers.Adam(0.0, use_ema=True, ema_momentum=0.9), SHORT)
    optimizer.build(model.trainable_variables)
    optimizer.set_weights([np.array(v) for v in plain.variables])
    optimizer.learning_rate = 0.0
    train(model, optimizer, 4)
    share = 0.9**4
    for average, v in zip(optimizer._model_variables_moving_average, model.trainable_variables, strict=True):
        np.testing.assert_allclose(average, share + (1 - share) * np.array(v), rtol=1e-5, atol=1e-6)


def test_weights_are_overwritten_by_their_average_on_all_workers_alike():
    model = build()
    inner = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=8)
    optimizer = local(inner, SHORT)
    for step in range(24):
        train(model, optimizer, 1, start=step)
        if SHORT.ends_round(step + 1):
            assert_replicas_equal(model)
        if (step + 1) % 8 == 0:
            for average, v in zip(optimizer._model_variables_moving_average, model.trainable_variables, strict=True):
                np.testing.assert_array_equal(average, v)


@pytest.mark.parametrize("how", ["train_on_batch", "loop"])
def test_each_worker_has_a_loss_scale_of_its_own(how, folder):
    inner = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(3e-3), initial_scale=256.0, dynamic_growth_steps=8
    )
    model, optimizer = build(), local(inner, SHORT)
    model.compile(optimizer=optimizer, loss=LOSS)
    for step in range(14):
        x, y = map(np.array, batch(step))
        bad = step in (1, 4) and RANK == 0
        if bad:
            x[0, 0] = np.inf
        before = [np.array(v) for v in model.trainable_variables]
        if how == "loop":
            scaled_step(model, optimizer, x, y)
        else:
            model.train_on_batch(x, y)
        same = all(np.array_equal(v, old) for v, old in zip(model.trainable_variables, before, strict=True))
        assert same == bad
        if SHORT.ends_round(step + 1):
            assert_replicas_equal(model)
    # Worker 0: halved twice, then doubled after 8 steps; the others: doubled after 8 steps.
    assert float(optimizer.dynamic_scale) == (128.0 if RANK == 0 else 512.0)
    assert optimizer.stats().skipped_steps == (2 if RANK == 0 else 0)
    onebit.save_checkpoint(folder, model)
    optimizer.dynamic_scale.assign(1.0)
    onebit.load_checkpoint(folder, model)
    assert float(optimizer.dynamic_scale) == (128.0 if RANK == 0 else 512.0)


def test_replicas_are_compared_when_they_should_be_the_same():
    model, optimizer = build(), local(keras.optimizers.Adam(3e-3), SHORT)
    model.compile(optimizer=optimizer, loss=LOSS)
    x, y = (np.concatenate(part) for part in zip(*(batch(step) for step in range(10)), strict=True))
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False, callbacks=[onebit.callbacks.ReplicaCheckCallback(3)])
    onebit.check_replicas(optimizer)  # ``fit`` has ended the round
    model.train_on_batch(*batch(10))
    with pytest.raises(ConfigurationError, match=r"call optimizer.flush\(\)"):
        onebit.check_replicas(optimizer)
    optimizer.flush()
    onebit.check_replicas(optimizer)
    if RANK == SIZE - 1:
        model.trainable_variables[1].assign(model.trainable_variables[1] + 1)
    with pytest.raises(DesyncError, match="differs from that of worker 0"):
        onebit.check_replicas(optimizer)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"op": hvd.Sum}, UnsupportedError, "gradients are not averaged"),
        ({"schedule": "local"}, ConfigurationError, "or a Local"),
        ({"warmup_steps": 5}, ConfigurationError, "or a Local, which has none"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        onebit.DistributedOptimizer(**({"optimizer": keras.optimizers.Adam(1e-3), "schedule": SHORT} | arguments))
    with pytest.raises(UnsupportedError, match=r"schedule=horovod_onebit.tf.Local\(...\), any optimizer works"):
        onebit.DistributedOptimizer(keras.optimizers.RMSprop(1e-3))


def test_the_file_of_a_run_that_never_compressed_begins_with_rounds(folder):
    models = []
    for arguments in ({"recipe": "exact"}, {"schedule": onebit.Local(every=4)}):
        model = build()
        optimizer = onebit.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), **arguments)
        model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False)
        optimizer.build(model.trainable_variables)
        models.append(model)
    exact, rounds = models
    train(exact, exact.optimizer, 5)
    if RANK == 0:
        exact.save(folder / "exact.keras")
    hvd.allreduce(tf.ones(1), name="saved")
    rounds.load_weights(folder / "exact.keras")
    train(rounds, rounds.optimizer, 8, 5)
    assert rounds.optimizer.phase == "compressed"
    onebit.save_checkpoint(folder / "checkpoint", rounds)
    train(rounds, rounds.optimizer, 4, 13)
    assert_replicas_equal(rounds)


@pytest.mark.parametrize("steps", [2, 5])
def test_second_moments_that_compression_has_frozen_are_refused_for_own_steps(steps, folder):
    """Those of the warm-up are not frozen."""
    before, own = build(), build()
    schedule, path = onebit.Local(every=4, freeze=0), str(folder / f"{RANK}.weights.h5")
    before.compile(onebit.DistributedOptimizer(keras.optimizers.Adam(1e-3), warmup_steps=3))
    own.compile(local(keras.optimizers.Adam(1e-3), schedule))
    own.optimizer.build(own.trainable_variables)
    train(before, before.optimizer, steps, eager=True)
    before.save_weights(path)
    if steps < 3:
        own.load_weights(path)
        own.optimizer.set_weights([np.array(v) for v in before.optimizer.variables])
    else:
        text = r"second moments are frozen, and with Local\(.*plain_optimizer"
        with pytest.raises(ValueError, match=text):  # Keras's, with the text of ours
            own.load_weights(path)
        with pytest.raises(ConfigurationError, match=text):
            own.optimizer.set_weights([np.array(v) for v in before.optimizer.variables])
        own = before
        own.compile(local(onebit.plain_optimizer(before.optimizer), schedule))
    train(own, own.optimizer, 4, start=steps, eager=True)
    assert_replicas_equal(own)


def test_what_bfloat16_rounds_off_is_no_edit(caplog):
    """Second moments of elements whose gradient is there once fall a little faster than their decay."""
    variable = keras.Variable(np.ones((8, 64), np.float32), dtype="bfloat16")
    optimizer = local(keras.optimizers.AdamW(1e-3, beta_2=0.99), onebit.Local(every=4, doubling=0, freeze=24))
    optimizer.build([variable])
    first = np.random.default_rng(0).uniform(0.5, 2.0, (8, 64))
    for step in range(32):
        gradient = tf.cast(first if step == 0 else np.zeros((8, 64)), tf.bfloat16)
        optimizer.apply([gradient], [variable])
    assert not [record for record in caplog.records if "was set or reset" in record.getMessage()]
    assert int(optimizer._frozen.value) == 24


def test_moments_that_are_broadcast_were_not_edited():
    """Between two fits, say: those of worker 1 become worker 0's before the freeze, which is in one step on all."""
    model, optimizer = build(), local(keras.optimizers.Adam(1e-3), onebit.Local(every=4, doubling=0, freeze=24))
    train(model, optimizer, 12)
    optimizer.flush()
    onebit.broadcast_variables([*model.variables, *optimizer.variables])
    train(model, optimizer, 16, start=12)
    assert int(optimizer._frozen.value) == 24
    optimizer.flush()
    assert_replicas_equal(model)


def test_a_second_moment_of_local_steps_is_of_own_gradients_when_the_optimizer_is_wrapped_again():
    seconds = []
    for stages in (((32, 32),), ((12, 100), (20, 20))):
        variable, draw = keras.Variable(np.ones((64, 64), np.float32)), np.random.default_rng(RANK)
        plain = keras.optimizers.Adam(1e-3)
        for steps, freeze in stages:
            optimizer = local(plain, onebit.Local(every=4, freeze=freeze))
            optimizer.build([variable])
            for _ in range(steps):
                optimizer.apply([tf.constant(draw.standard_normal((64, 64)), tf.float32)], [variable])
            optimizer.flush()
        assert int(optimizer._frozen.value) == 32
        seconds.append(np.array(optimizer._velocities[0]))
    np.testing.assert_allclose(*seconds, rtol=1e-4)


def test_a_plain_state_that_is_set_in_the_middle_of_a_round():
    model, optimizer = build(), local(keras.optimizers.Adam(1e-3), SHORT)
    train(model, optimizer, 10)
    plain = keras.optimizers.Adam(1e-3)
    plain.build(model.trainable_variables)
    optimizer.set_weights([np.array(v) for v in plain.variables])
    train(model, optimizer, 8, start=10)
    optimizer.flush()
    assert_replicas_equal(model)


def test_frozen_moments_are_the_same_bits_for_another_number_of_workers():
    from horovod_onebit.tf.checkpoint import _Keras

    model, optimizer = build(), local(keras.optimizers.Adam(1e-3), SHORT)
    train(model, optimizer, 12)
    face = object.__new__(_Keras)
    face.model, face.optimizer = model, optimizer
    value = np.random.default_rng(0).random(4096).astype(np.float32)
    own = {**face._compressor.residuals(), "state": {"optimizer/v": value}}
    merged = face.merge(dict(own) for _ in range(3))
    np.testing.assert_array_equal(merged["state"]["optimizer/v"], value)


def test_an_optimizer_that_computes_weights_from_its_state_is_refused():
    with pytest.raises(UnsupportedError, match="Ftrl computes weights from its own state"):
        local(keras.optimizers.Ftrl(1e-3))

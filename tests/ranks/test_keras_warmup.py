"""The Keras face on real ranks: warm-ups whose gradients travel in few bits (``Recipe.warmup``), and ``Gradients``."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from dataclasses import replace
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_onebit.tf as onebit
from horovod_onebit import ConfigurationError, NonFiniteError, Recipe
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.tf.collectives import HorovodCollectives
from horovod_onebit.warmup import EXACT_FIRST, Phase
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

THREE = Recipe(warmup="three_bit")


def seen(optimizer):
    """How many averages of each gradient there were that was not zero, by name."""
    return {name: tensor.variance_steps for name, tensor in optimizer._compressor.coded._tensors.items()}


def loss_of(model):
    x, y = batch(500, 0)
    return float(LOSS(y, model(x)))


def test_by_default_gradients_travel_in_three_bits():
    model, sent = build(), []
    optimizer = wrap(OPTIMIZERS["adamw"](), warmup_steps=EXACT_FIRST + 5)
    for step in range(EXACT_FIRST + 8):
        train(model, optimizer, 1, start=step, graph=True)
        sent.append(optimizer.stats().step_bytes_sent)
    large = optimizer.stats().compressed_parameters
    small = 2 * (SIZE - 1) / SIZE * 4 * (optimizer.stats().parameters - large)
    bits = [8 * (found - small) / large / (SIZE - 1) for found in sent]
    assert bits[:EXACT_FIRST] == pytest.approx([64 / SIZE] * EXACT_FIRST, rel=0.05)
    assert bits[EXACT_FIRST : EXACT_FIRST + 5] == pytest.approx([3] * 5, rel=0.2)
    assert bits[EXACT_FIRST + 5 :] == pytest.approx([1] * 3, rel=0.3)
    assert_replicas_equal(model)


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("bits", ["two_bit", "three_bit", "four_bit"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_trains_and_replicas_are_equal(kind, bits, exchange):
    model, plain = build(), build()
    recipe = Recipe(warmup=bits, exchange=exchange)
    optimizer = wrap(OPTIMIZERS[kind](), warmup_steps=40, recipe=recipe)
    exact = wrap(OPTIMIZERS[kind](), warmup_steps=40, recipe=replace(recipe, warmup="exact"))
    for of, with_ in ((model, optimizer), (plain, exact)):
        train(of, with_, 40, graph=True)
        assert_replicas_equal(of)
    assert optimizer.phase is Phase.COMPRESSED
    assert not np.array_equal(weights(model), weights(plain))
    assert abs(loss_of(model) - loss_of(plain)) < 0.15
    train(model, optimizer, 20, start=40, graph=True)
    assert_replicas_equal(model)
    assert not seen(optimizer)  # their memory is free


def test_the_core_takes_the_same_steps():
    """``NumpyOptimizer`` over the same gradients: the first exact means apart, all is computed by the same code."""
    model = build()
    arrays = {f"{i}.kernel" if v.shape.rank > 1 else f"{i}.bias": np.array(v) for i, v in enumerate(model.weights)}
    optimizer = wrap(keras.optimizers.SGD(0.05), warmup_steps=100, recipe=THREE)
    other = NumpyOptimizer(
        arrays, SGD(0.05, momentum=0.0), collectives=HorovodCollectives(name="numpy"), recipe=THREE, warmup_steps=100
    )
    optimizer.build(model.trainable_variables)
    for step in range(EXACT_FIRST + 20):
        grads, _ = gradients(model, *batch(step))
        other.step({name: np.array(grad) for name, grad in zip(arrays, grads, strict=True)})
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    for variable, array in zip(model.weights, arrays.values(), strict=True):
        np.testing.assert_allclose(np.asarray(variable), array, atol=1e-5)


@pytest.mark.parametrize(("kind", "divides"), [("adamw", True), ("adam", True), ("sgd", False)])
def test_which_optimizers_divide_by_a_second_moment(kind, divides):
    """Of these no errors of gradients in few bits are kept, in a warm-up and in all steps."""
    for options in ({"recipe": THREE}, {"schedule": onebit.Gradients()}):
        assert wrap(OPTIMIZERS[kind](), None, **options)._compressor.adapter.divides is divides


def test_exact_means_before_few_bits_may_travel_as_float16():
    models, sent = [build(), build()], []
    for model, compression in zip(models, (hvd.Compression.none, hvd.Compression.fp16), strict=True):
        optimizer = wrap(keras.optimizers.SGD(0.05), warmup_steps=40, recipe=THREE, compression=compression)
        train(model, optimizer, EXACT_FIRST, graph=True)
        sent.append(optimizer.stats(norms=False).bytes_sent)
        assert_replicas_equal(model)
    assert sent[1] == pytest.approx(sent[0] / 2, rel=0.05)
    exact, half = map(weights, models)
    np.testing.assert_allclose(half, exact, atol=1e-3)


def test_fit_with_all_that_goes_with_it():
    model = build(seed=RANK)
    optimizer = wrap(OPTIMIZERS["adamw"](global_clipnorm=0.5), None, recipe=THREE)
    model.compile(optimizer=optimizer, loss=LOSS, metrics=["accuracy"], jit_compile=False)
    x, y = (np.concatenate(a) for a in zip(*(batch(step) for step in range(100)), strict=True))
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0), onebit.callbacks.MetricAverageCallback()]
    options = {"batch_size": 16, "verbose": 0, "callbacks": callbacks, "shuffle": False}
    history = model.fit(x, y, epochs=3, **options)
    assert_replicas_equal(model)
    assert model.optimizer.phase is Phase.COMPRESSED
    assert history.history["accuracy"][-1] > 0.5


@pytest.mark.parametrize("step", [3, EXACT_FIRST + 3])
@pytest.mark.parametrize("where", [0, 1])
def test_nan_on_one_rank_is_skipped_by_all(step, where):
    """In a gradient that travels in few bits, and in a small one beside it."""
    model = build()
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=30, recipe=THREE)
    train(model, optimizer, step)
    before = weights(model)
    grads, _ = gradients(model, *batch(step))
    if RANK == SIZE - 1:
        grads[where] = grads[where] * np.nan
    optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    assert np.array_equal(before, weights(model))
    assert optimizer.stats().skipped_steps == 1
    assert int(optimizer.iterations) == step
    train(model, optimizer, 40, start=step)
    assert optimizer.phase is Phase.COMPRESSED
    assert_replicas_equal(model)


def test_nan_raises_on_all_when_asked_to():
    model = build()
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=40, recipe=replace(THREE, on_nonfinite="raise"))
    train(model, optimizer, EXACT_FIRST + 2)
    grads, _ = gradients(model, *batch(0))
    if RANK == 0:
        grads[2] = grads[2] * np.inf
    with pytest.raises(NonFiniteError):
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    train(model, optimizer, 2, start=20)
    assert_replicas_equal(model)


def test_loss_scales_stay_together():
    model = build()
    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3), 8.0, dynamic_growth_steps=5)
    optimizer = wrap(plain, warmup_steps=60, recipe=THREE)
    optimizer.build(model.trainable_variables)
    scales = []
    for step in range(30):
        x, y = batch(step)
        scaled_step(model, optimizer, x * (np.inf if RANK == 0 and step == EXACT_FIRST + 5 else 1), y)
        scales.append(float(optimizer.dynamic_scale))
    assert scales[EXACT_FIRST + 5] == scales[EXACT_FIRST + 4] / 2
    assert optimizer.stats(norms=False).skipped_steps == 1
    assert (hvd.allgather(tf.constant([scales]), name="scales").numpy() == scales).all()
    assert_replicas_equal(model)


def test_a_sum_in_place_of_a_mean():
    model, other = build(), build()
    train(model, wrap(keras.optimizers.SGD(0.01), 30, recipe=THREE, op=hvd.Sum), 25)
    train(other, wrap(keras.optimizers.SGD(0.01 * SIZE), 30, recipe=THREE), 25)
    np.testing.assert_allclose(weights(model), weights(other), atol=1e-5, rtol=1e-3)


def test_gradients_that_are_accumulated():
    model = build()
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=20, recipe=THREE, backward_passes_per_step=2)
    train(model, optimizer, 60, graph=True)
    assert optimizer.phase is Phase.COMPRESSED
    assert_replicas_equal(model)


@pytest.mark.parametrize("settles", [False, True])
@pytest.mark.parametrize("hidden", [(128,), (96, 64, 48)])
def test_a_step_that_is_interrupted(hidden, settles):
    """What was sent for it is taken back, and the run goes on: messages that leave at once, and by sections."""
    model = build(hidden=hidden)
    recipe = replace(THREE, bucket_size=2048, block_size=64)
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=100, recipe=recipe)
    train(model, optimizer, EXACT_FIRST + 3)
    before, engine = weights(model), optimizer._compressor.coded.engine
    residuals = {name: value.copy() for name, value in engine.feedback.state_dict().items()}
    collectives = optimizer._compressor.collectives
    collectives.fuse = lambda kinds: 1 / 0  # with messages encoded
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, 1, start=20)
    del collectives.fuse
    assert np.array_equal(weights(model), before)
    if settles:
        optimizer._compressor.settle()
        for name, value in engine.feedback.state_dict().items():
            np.testing.assert_allclose(value, residuals[name], atol=1e-5)
    train(model, optimizer, 10, start=20)
    assert set(seen(optimizer).values()) == {EXACT_FIRST + 13}
    assert_replicas_equal(model)


def test_an_average_that_is_interrupted_when_its_messages_have_left():
    """They are taken back before those of the next step leave: the run goes on as if there had been no such step."""

    def run(interrupted):
        model = build(hidden=(96, 64, 48))
        recipe = replace(THREE, bucket_size=2048, block_size=64)
        optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=100, recipe=recipe)

        def step(number):
            grads, _ = gradients(model, *batch(number))
            grads[2] = tf.zeros_like(
                grads[2]
            )  # nothing is learned of it: its mean is exact, after the others have left
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

        for number in range(EXACT_FIRST + 3):
            step(number)
        compressor = optimizer._compressor
        if interrupted:
            collectives, own = compressor.collectives, compressor.collectives.fuse
            collectives.fuse = lambda kinds: 1 / 0 if compressor.under_way is None else own(kinds)
            with pytest.raises(ZeroDivisionError):
                step(20)
            del collectives.fuse
        step(EXACT_FIRST + 3)
        return weights(model), compressor.coded.engine.feedback.state_dict()

    found, expected = run(True), run(False)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    for name, value in expected[1].items():
        assert np.mean(np.abs(found[1][name] - value)) < 1e-3


def test_a_state_that_one_worker_loads_and_broadcasts():
    """That worker has learned nothing of it: all begin anew."""
    model = build()
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=100, recipe=THREE)
    train(model, optimizer, EXACT_FIRST + 5)
    assert set(seen(optimizer).values()) == {EXACT_FIRST + 5}
    if RANK == 0:
        optimizer.set_weights([np.array(v) for v in optimizer.variables])
        model.trainable_variables[0].assign_add(model.trainable_variables[0] * 0.1)
    onebit.broadcast_variables([*model.variables, *optimizer.variables])
    train(model, optimizer, 2, start=20)
    assert set(seen(optimizer).values()) == {2}
    train(model, optimizer, EXACT_FIRST + 5, start=30)
    assert_replicas_equal(model)


@pytest.mark.skipif(SIZE != 2, reason="compared on two ranks")
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("steps", [3, EXACT_FIRST + 5, 45])
def test_a_checkpoint(steps, exchange, tmp_path):
    """In the warm-up, while it learns and afterwards, and after it."""
    recipe = replace(THREE, exchange=exchange)
    folder = Path(hvd.broadcast_object(str(tmp_path), name="folder"))
    model, again = build(), build(seed=1)
    for one in (model, again):
        one.compile(optimizer=wrap(OPTIMIZERS["adam"](), warmup_steps=40, recipe=recipe), loss=LOSS, jit_compile=False)
    optimizer, resumed = model.optimizer, again.optimizer
    train(model, optimizer, steps)
    onebit.save_checkpoint(folder, model)
    onebit.load_checkpoint(folder, again)
    assert np.array_equal(weights(model), weights(again))
    for of, with_ in ((model, optimizer), (again, resumed)):
        train(of, with_, 4, start=steps)
        assert_replicas_equal(of)
    assert np.array_equal(weights(model), weights(again))
    for of, with_ in ((model, optimizer), (again, resumed)):
        train(of, with_, 50, start=steps + 4)
    assert np.array_equal(weights(model), weights(again))


def test_what_is_sent():
    model = build()
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=40, recipe=replace(THREE, exchange="direct"))
    sent = []
    for step in range(30):
        train(model, optimizer, 1, start=step)
        sent.append(optimizer.stats().step_bytes_sent)
    large = sum(int(np.prod(v.shape)) for v in model.trainable_variables if len(v.shape) > 1)
    small, ring = 128 + 10, 2 * (SIZE - 1) / SIZE
    assert sent[EXACT_FIRST - 1] == pytest.approx(4 * ring * (large + small), rel=0.01)
    assert sent[-1] < 4 * ring * small + 1.2 * (SIZE - 1) * large * 3 / 8 + 300
    stats = optimizer.stats()
    assert (stats.compressed_parameters, stats.coded_parameters) == (0, large)
    train(model, optimizer, 10, start=30)  # the warm-up is over, and no step was compressed yet
    assert optimizer.stats().coded_parameters == 0
    assert optimizer._compressor.coded.state() is None
    train(model, optimizer, 5, start=40)
    stats = optimizer.stats()
    assert (stats.compressed_parameters, stats.coded_parameters) == (large, 0)


ANY = {
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-3),
    "Adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "Nadam": lambda: keras.optimizers.Nadam(2e-3, weight_decay=0.01, global_clipnorm=1.0),
    "Muon": lambda: keras.optimizers.Muon(1e-2),
    "Adam with amsgrad": lambda: keras.optimizers.Adam(1e-3, amsgrad=True),
}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("kind", ANY)
def test_any_optimizer_takes_its_own_steps(kind, graph):
    """It has variables that say how often it was called: Nadam's products, say, change once a step."""
    model, plain = build(), build()
    optimizer = wrap(ANY[kind](), None, schedule=onebit.Gradients("four_bit"))
    exact = wrap(ANY[kind](), None, recipe="exact")
    train(model, optimizer, EXACT_FIRST, graph=graph)
    train(plain, exact, EXACT_FIRST, graph=graph)
    np.testing.assert_allclose(weights(model), weights(plain), rtol=1e-4, atol=1e-5)
    train(model, optimizer, 30, start=EXACT_FIRST, graph=graph)
    train(plain, exact, 30, start=EXACT_FIRST, graph=graph)
    assert_replicas_equal(model)
    assert abs(loss_of(model) - loss_of(plain)) < 0.15
    assert optimizer.stats().step_bytes_sent < exact.stats().step_bytes_sent / 3
    assert optimizer.phase is Phase.WARMUP


def test_gradients_survive_a_model_that_is_saved(tmp_path):
    folder = Path(hvd.broadcast_object(str(tmp_path), name="folder"))
    model = build()
    model.compile(wrap(ANY["RMSprop"](), None, schedule=onebit.Gradients("two_bit")), LOSS, jit_compile=False)
    train(model, model.optimizer, EXACT_FIRST + 3)
    if RANK == 0:
        model.save(folder / "model.keras")
    hvd.broadcast_object(None, name="saved")
    loaded = keras.models.load_model(folder / "model.keras")
    assert loaded.optimizer._wrapping.schedule == onebit.Gradients("two_bit")
    train(loaded, loaded.optimizer, EXACT_FIRST + 3, start=20)
    assert set(seen(loaded.optimizer).values()) == {EXACT_FIRST + 3}
    assert_replicas_equal(loaded)


def test_rows_that_never_have_a_gradient_do_not_hinder_others():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Embedding(64, 32), keras.layers.Flatten(), keras.layers.Dense(10)])
    unused = model.layers[0]
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=40, recipe=THREE, sparse_as_dense=True)
    for step in range(50):
        ids = np.random.default_rng([step, RANK]).integers(0, 32, (16, 8))
        with tf.GradientTape() as tape:
            loss = LOSS(ids[:, 0] % 10, model(ids))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        if step == EXACT_FIRST + 10:
            assert set(seen(optimizer).values()) == {EXACT_FIRST + 11}
    assert unused.built
    assert_replicas_equal(model)


@pytest.mark.parametrize("schedule", [onebit.Local(), onebit.ZeroOne(), onebit.Gradients("two_bit")])
def test_with_another_schedule_there_is_no_such_warm_up(schedule):
    with pytest.raises(ConfigurationError, match=r"warmup='three_bit'.*schedule"):
        wrap(keras.optimizers.Adam(), None, recipe=THREE, schedule=schedule)

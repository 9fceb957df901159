"""The Keras face on real ranks: warm-up, compression, options."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_onebit.tf as onebit
from horovod_onebit import Recipe
from horovod_onebit.tf import compressor
from horovod_onebit.warmup import Phase
from tests.long import LONG
from tests.ranks.keras_common import (
    LOSS,
    OPTIMIZERS,
    RANK,
    SIZE,
    assert_replicas_equal,
    batch,
    beside_pytorch,
    build,
    gradients,
    train,
    weights,
    wrap,
)

# Keras refuses two ways of clipping at once; what has nothing to do with clipping is tested along.
OPTIONS = [
    {},
    {"clipnorm": 0.05, "weight_decay": 0.02},
    {"global_clipnorm": 0.1, "use_ema": True},
    {"clipvalue": 0.01},
]


# What clips and decays is the same for all.
KINDS = [(kind, {}) for kind in OPTIMIZERS] + [("adamw", options) for options in OPTIONS[1:]] + [("lamb", OPTIONS[1])]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_warm_up_equals_one_process_on_the_joined_batch(kind, options):
    model, alone = build(), build()
    optimizer, plain = wrap(OPTIMIZERS[kind](**options), warmup_steps=50), OPTIMIZERS[kind](**options)
    train(model, optimizer, 8)
    for step in range(8):
        parts = [batch(step, rank) for rank in range(SIZE)]
        grads, _ = gradients(alone, *(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        plain.apply_gradients(zip(grads, alone.trainable_variables, strict=True))
    np.testing.assert_allclose(weights(model), weights(alone), rtol=2e-4, atol=2e-5)
    assert isinstance(optimizer, type(plain))
    if options.get("use_ema"):
        for a, b in zip(optimizer._model_variables_moving_average, plain._model_variables_moving_average, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_replicas_stay_equal_for_300_steps_and_the_loss_falls(kind):
    model = build()
    optimizer = wrap(OPTIMIZERS[kind](), warmup_steps=20)
    start = train(model, optimizer, 21, graph=True)
    assert optimizer.phase is Phase.COMPRESSED
    end = train(model, optimizer, 279, start=21, graph=True)
    assert_replicas_equal(model)
    assert end < 0.7 * start
    stats = optimizer.stats()
    small = 4 * (stats.parameters - stats.compressed_parameters)
    assert stats.step == 300
    assert stats.step_bytes_sent <= (SIZE - 1) * (1.1 * stats.compressed_parameters / 8 + 48) + 2 * small
    assert 0 < stats.error_to_momentum < 50


def test_fit_keeps_replicas_equal_and_reaches_everybody():
    model = build(seed=RANK)
    optimizer = wrap(OPTIMIZERS["adamw"](), warmup_steps=10)
    model.compile(optimizer=optimizer, loss=LOSS, metrics=["accuracy"])
    x, y = (np.concatenate(a) for a in zip(*(batch(step) for step in range(100)), strict=True))
    callbacks = [
        onebit.callbacks.BroadcastGlobalVariablesCallback(0),
        onebit.callbacks.MetricAverageCallback(),
        onebit.callbacks.LearningRateWarmupCallback(1e-3, warmup_epochs=2),
    ]
    history = model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=callbacks, shuffle=False)
    assert_replicas_equal(model)
    assert history.history["accuracy"][-1] > 0.5
    assert len({tuple(h) for h in hvd.allgather_object(history.history["loss"])}) == 1
    assert optimizer.stats().step == 300
    assert history.history["lr"][-1] == pytest.approx(1e-3, rel=0.1)


@LONG
def test_stock_horovod_drifts_under_keras_3():
    """The day that this fails, Horovod has been mended, and the docs can say so."""
    import horovod.keras

    drift = {}
    for name, wrapper in (("stock", horovod.keras.DistributedOptimizer), ("ours", lambda o: wrap(o, warmup_steps=3))):
        model = build()
        model.compile(optimizer=wrapper(keras.optimizers.Adam(1e-3)), loss=LOSS)
        x, y = (np.concatenate(a) for a in zip(*(batch(step) for step in range(10)), strict=True))
        model.fit(x, y, batch_size=16, epochs=1, verbose=0, shuffle=False)
        rows = hvd.allgather(weights(model)[None], name=f"drift.{name}").numpy()
        drift[name] = float(np.abs(rows - rows[0]).max())
    assert drift["ours"] == 0
    assert drift["stock"] > 1e-4


@pytest.mark.skipif(SIZE != 2, reason="compared on two ranks")
def test_the_pytorch_face_gives_the_same_weights():
    """20 compressed steps of Adam from one state: the one engine, seen from both sides."""
    model = build()
    optimizer = wrap(keras.optimizers.Adam(1e-3, epsilon=1e-12), warmup_steps=5)
    other, parameters = beside_pytorch(model, optimizer, "Adam", 25, {"warmup_steps": 5}, lr=1e-3, eps=1e-12)
    assert optimizer.phase is other.phase is Phase.COMPRESSED
    for v, p in zip(model.trainable_variables, parameters, strict=True):
        np.testing.assert_allclose(np.asarray(v), p.detach().numpy(), atol=1e-5)


def test_schedules_accumulation_and_snapshots():
    schedule = keras.optimizers.schedules.ExponentialDecay(1e-3, 5, 0.5)
    model = build()
    optimizer = wrap(keras.optimizers.Adam(schedule), warmup_steps=3, backward_passes_per_step=2)
    train(model, optimizer, 20, graph=True)
    assert optimizer.stats().step == 10
    assert float(optimizer.learning_rate) == pytest.approx(1e-3 * 0.5**2)
    assert_replicas_equal(model)
    snapshot = [tf.identity(v) for v in model.trainable_variables]
    before = [np.array(s) for s in snapshot]
    train(model, optimizer, 4, start=20, graph=True)
    for tensor, value in zip(snapshot, before, strict=True):
        np.testing.assert_array_equal(np.array(tensor), value)


def test_steps_take_turns_in_the_same_memory(monkeypatch):
    """Fresh memory would cost page faults in every step. What somebody still holds is not written to."""
    model = build()
    optimizer = wrap(keras.optimizers.Adam(1e-3), warmup_steps=1)
    train(model, optimizer, 3, graph=True)
    held = [v.value.read_value() for v in model.trainable_variables]
    before, fresh, make = [np.array(value) for value in held], [], compressor._aligned

    def counted(size):
        fresh.append(size)
        return make(size)

    monkeypatch.setattr(compressor, "_aligned", counted)
    train(model, optimizer, 8, start=3, graph=True)
    assert len(fresh) <= 8  # of 32: in place of those that are held, and the other turn
    for value, old in zip(held, before, strict=True):
        np.testing.assert_array_equal(np.array(value), old)


@pytest.mark.parametrize("graph", [False, True])
def test_weights_are_overwritten_by_their_average_where_all_are_compressed(graph):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(10, use_bias=False)])
    inner = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)
    optimizer = wrap(inner, warmup_steps=1, recipe=Recipe(min_compressed_size=1))
    same = []
    for step in range(7):
        train(model, optimizer, 1, start=step, graph=graph)
        same.append(np.array_equal(optimizer._model_variables_moving_average[0], model.trainable_variables[0]))
    assert optimizer.stats().compressed_parameters == 320
    # The first average is the weights themselves.
    assert same == [True, False, True, False, False, True, False]
    assert_replicas_equal(model)


@pytest.mark.parametrize("warmup", [1, 50])
def test_variables_that_are_excluded_from_decay_by_their_layers_name(warmup):
    def built():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(units, name=name) for name, units in (("first", 128), ("layer_norm", 10))]
        return keras.Sequential([keras.layers.Input((32,)), *layers])

    model, alone = built(), built()
    excluding, plain = OPTIMIZERS["adamw"](weight_decay=0.5), OPTIMIZERS["adamw"](weight_decay=0.5)
    for optimizer in (excluding, plain):
        optimizer.exclude_from_weight_decay(var_names=["layer_norm"])
    before, optimizer = [np.array(v) for v in model.trainable_variables], wrap(excluding, warmup_steps=warmup)
    for _ in range(4):
        for which, variables in ((optimizer, model.trainable_variables), (plain, alone.trainable_variables)):
            which.apply([tf.zeros(v.shape) for v in variables], variables)
    for old, v, expected in zip(before, model.trainable_variables, alone.trainable_variables, strict=True):
        np.testing.assert_allclose(v, expected, rtol=1e-6)
        if old.any():
            assert np.array_equal(old, v) == ("layer_norm" in v.path)


def test_an_optimizer_that_has_trained_already_and_plain_tf_variables():
    """Its second moment has seen more steps than ours; the weights must go on as smoothly as without compression."""
    moved = []
    for warmup in (1, 50):
        w = tf.Variable(np.zeros((64, 64), np.float32))
        inner = keras.optimizers.Adam(1e-3, beta_2=0.99)
        inner.build([w])
        rng = np.random.default_rng(0)
        for _ in range(100):
            inner.apply([tf.constant(rng.standard_normal((64, 64)), tf.float32)], [w])
        optimizer = wrap(inner, warmup_steps=warmup)
        assert int(optimizer.iterations) == 100
        before = w.numpy()
        for _ in range(20):
            optimizer.apply([tf.constant(rng.standard_normal((64, 64)), tf.float32)], [w])
        moved.append(np.abs(w.numpy() - before).mean())
    assert moved[0] == pytest.approx(moved[1], rel=0.35)


@pytest.mark.parametrize("clip", [{"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"clipvalue": 1.0 / 64}])
@pytest.mark.parametrize("size", [16, 64])
def test_sums_are_clipped_alike_before_and_after_warm_up(clip, size):
    """Of ``size`` squared elements: exact, and compressed. All workers have the same gradient."""
    w = keras.Variable(np.zeros((size, size), np.float32))
    optimizer = wrap(keras.optimizers.SGD(1.0, **clip), warmup_steps=1, op=hvd.Sum)
    moved = []
    for _ in range(2):
        before = np.array(w)
        optimizer.apply([tf.fill((size, size), 100.0)], [w])
        moved.append(np.array(w) - before)
    assert moved[0].any()
    np.testing.assert_allclose(moved[1], moved[0], rtol=1e-4)


def test_plain_tf_variables_in_rounds():
    w = tf.Variable(np.zeros((64, 64), np.float32))
    optimizer = onebit.DistributedOptimizer(keras.optimizers.SGD(0.1), schedule=onebit.Local(every=2, doubling=0))
    for _ in range(4):
        optimizer.apply([tf.fill((64, 64), RANK + 1.0)], [w])
    onebit.check_replicas(optimizer)
    np.testing.assert_allclose(w.numpy(), -0.4 * (SIZE + 1) / 2, rtol=1e-4)
    optimizer = wrap(keras.optimizers.Adam(), warmup_steps=1)
    optimizer.apply([tf.ones((64, 64))], [w])
    onebit.check_replicas(optimizer)


def test_small_plain_tf_variables_beside_those_of_keras():
    """As the coefficient of an equation, beside the network that solves it."""
    model, coefficient = build(), tf.Variable(0.0, name="coefficient")
    variables = [*model.trainable_variables, coefficient]
    optimizer = wrap(keras.optimizers.SGD(0.1), warmup_steps=2)
    for _ in range(4):
        optimizer.apply([tf.fill(v.shape, RANK + 1.0) for v in variables], variables)
    onebit.check_replicas(optimizer)
    assert coefficient.numpy() == pytest.approx(-0.4 * (SIZE + 1) / 2, rel=1e-5)


def test_every_optimizer_of_keras_can_be_loaded_by_its_name():
    """Of a model that another process saved, with ``Local``."""
    for name in ("RMSprop", "Adafactor", "Muon", "Nadam"):
        found = keras.saving.get_registered_object(f"horovod_onebit>{name}")
        assert issubclass(found, getattr(keras.optimizers, name))


@pytest.mark.parametrize(
    ("kind", "recipe"), [("adam", "paper"), ("adam", Recipe(exchange="two_stage")), ("lamb", "paper")]
)
def test_other_recipes(kind, recipe):
    model = build()
    optimizer = wrap(OPTIMIZERS[kind](), warmup_steps=15, recipe=recipe)
    train(model, optimizer, 40)
    rows = hvd.allgather(weights(model)[None], name="check.recipe").numpy()
    assert (rows == rows[0]).all()


EXACT = {
    "adamw": lambda: keras.optimizers.AdamW(1e-3),
    "adam that clips": lambda: keras.optimizers.Adam(1e-3, global_clipnorm=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-3),
}


@pytest.mark.parametrize("kind", EXACT)
def test_the_recipe_exact_never_compresses(kind):
    """Whatever the optimizer, and the warm-up that other recipes would have."""
    model, plain, own = build(), build(), EXACT[kind]()
    optimizer = wrap(EXACT[kind](), warmup_steps=3, recipe="exact")
    train(model, optimizer, 8)
    for step in range(8):
        grads, _ = gradients(plain, *batch(step))
        means = [hvd.allreduce(grad, name=f"mean.{i}") for i, grad in enumerate(grads)]
        own.apply_gradients(zip(means, plain.trainable_variables, strict=True))
    np.testing.assert_allclose(weights(model), weights(plain), atol=1e-6)
    rows = hvd.allgather(weights(model)[None], name="check.exact").numpy()
    assert (rows == rows[0]).all()
    stats = optimizer.stats()
    assert stats.phase == "warmup"
    assert stats.ratio_to_fp32 == 1.0


def test_a_model_saved_with_the_recipe_exact_keeps_it(tmp_path):
    model = build()
    model.compile(optimizer=wrap(keras.optimizers.RMSprop(1e-3), recipe="exact"), loss=LOSS, jit_compile=False)
    model.fit(*batch(0), epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, again):
        one.fit(*batch(1), epochs=8, shuffle=False, verbose=0)
        assert one.optimizer.phase is Phase.WARMUP
    np.testing.assert_array_equal(weights(model), weights(again))


def test_a_program_that_knows_horovod_alone():
    import horovod.tensorflow.keras as horovod

    from horovod_onebit.install import install, uninstall

    before = horovod.DistributedOptimizer, horovod.callbacks.MetricAverageCallback
    install(recipe="exact")
    try:
        model = build(seed=RANK)
        optimizer = horovod.DistributedOptimizer(keras.optimizers.RMSprop(1e-3))
        model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False)
        own = horovod.callbacks
        model.fit(
            *batch(0), batch_size=4, verbose=0,
            callbacks=[own.BroadcastGlobalVariablesCallback(0), own.MetricAverageCallback()],
        )  # fmt: skip
        onebit.check_replicas(model.optimizer)
        assert model.optimizer.phase is Phase.WARMUP
    finally:
        uninstall()
    assert before == (horovod.DistributedOptimizer, horovod.callbacks.MetricAverageCallback)

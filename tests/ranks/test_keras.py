"""The Keras face on real ranks."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_onebit.tf as onebit
from horovod_onebit import ConfigurationError, Recipe, UnsupportedError
from horovod_onebit.warmup import Phase

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build(seed=0):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((32,)),
            layers.Dense(96, activation="relu"),
            layers.Dense(48, activation="relu"),
            layers.Dense(10),
        ]
    )


def batch(step, rank=None):
    x = np.random.default_rng([step, RANK if rank is None else rank]).standard_normal((16, 32)).astype(np.float32)
    return x, x[:, :10].argmax(1)


def wrap(optimizer, warmup_steps=5, **arguments):
    return onebit.DistributedOptimizer(optimizer, warmup_steps=warmup_steps, **arguments)


def gradients(model, x, y):
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x, training=True))
    return tape.gradient(loss, model.trainable_variables), loss


def train(model, optimizer, steps, start=0, graph=False):
    def step(x, y):
        grads, loss = gradients(model, x, y)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    step = tf.function(step) if graph else step
    for number in range(start, start + steps):
        loss = step(*map(tf.convert_to_tensor, batch(number)))
    return float(loss)


def weights(model):
    return np.concatenate([np.asarray(v).reshape(-1) for v in model.trainable_variables])


def assert_replicas_equal(model):
    rows = hvd.allgather(weights(model)[None], name="check.weights").numpy()
    assert np.isfinite(rows).all()
    assert (rows == rows[0]).all()


OPTIMIZERS = {
    "adam": lambda **k: keras.optimizers.Adam(1e-3, **k),
    "adamw": lambda **k: keras.optimizers.AdamW(1e-3, **({"weight_decay": 0.01} | k)),
    "sgd": lambda **k: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, **k),
    "plain sgd": lambda **k: keras.optimizers.SGD(0.05, **k),
}
OPTIONS = [
    {},
    {"clipnorm": 0.05},
    {"global_clipnorm": 0.1},
    {"clipvalue": 0.01},
    {"weight_decay": 0.02},
    {"use_ema": True},
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("options", OPTIONS)
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
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.nn")
    import horovod.torch as hvd_torch

    import horovod_onebit.torch as onebit_torch

    hvd_torch.init()
    torch.set_num_threads(1)
    model = build()
    optimizer = wrap(keras.optimizers.Adam(1e-3, epsilon=1e-12), warmup_steps=5)
    parameters = [torch.nn.Parameter(torch.from_numpy(np.array(v))) for v in model.trainable_variables]
    other = torch.optim.Adam(parameters, lr=1e-3, eps=1e-12)
    named = [(str(i), p) for i, p in enumerate(parameters)]
    other = onebit_torch.DistributedOptimizer(other, named, warmup_steps=5)
    for step in range(25):
        grads, _ = gradients(model, *batch(step))
        other.zero_grad()
        for p, g in zip(parameters, grads, strict=True):
            p.grad = torch.from_numpy(np.array(g))
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        other.step()
    assert optimizer.phase is other.phase is Phase.COMPRESSED
    for v, p in zip(model.trainable_variables, parameters, strict=True):
        np.testing.assert_allclose(np.asarray(v), p.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
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
    assert isinstance(again.optimizer, keras.optimizers.AdamW if kind == "adamw" else keras.optimizers.SGD)
    assert again.optimizer.recipe == optimizer.recipe
    again.optimizer.load_feedback_state_dict(_renamed(feedback, optimizer, again.optimizer))
    train(again, again.optimizer, 6, start=at)
    np.testing.assert_array_equal(weights(model), weights(again))


def _renamed(feedback, old, new):
    assert all(name in {f"{i}.{v.path}" for i, v in enumerate(old._trainable_variables)} for name in feedback)
    paths = {f"{i}.{v.path}": i for i, v in enumerate(old._trainable_variables)}
    return {f"{paths[name]}.{new._trainable_variables[paths[name]].path}": value for name, value in feedback.items()}


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


@pytest.mark.parametrize(
    "options", [{"clipnorm": 0.05}, {"global_clipnorm": 0.1}, {"clipvalue": 1e-3}, {"use_ema": True}]
)
def test_options_after_warm_up_keep_replicas_equal(options):
    model = build()
    optimizer = wrap(OPTIMIZERS["adamw"](**options), warmup_steps=3)
    train(model, optimizer, 12)
    assert_replicas_equal(model)
    assert optimizer.clipnorm == options.get("clipnorm")


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


@pytest.mark.parametrize("recipe", ["paper", Recipe(exchange="two_stage")])
def test_other_recipes(recipe):
    model = build()
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=15, recipe=recipe)
    train(model, optimizer, 40)
    rows = hvd.allgather(weights(model)[None], name="check.recipe").numpy()
    assert (rows == rows[0]).all()


@pytest.mark.parametrize("graph", [False, True])
def test_nan_on_one_rank_is_skipped_by_all(graph):
    model = build()
    optimizer = wrap(OPTIMIZERS["adamw"](), warmup_steps=3)
    train(model, optimizer, 6)
    before = [np.array(v) for v in [*model.variables, *optimizer.variables]]
    x, y = batch(6)
    if RANK == SIZE - 1:
        x[3, 3] = np.nan

    def step(x, y):
        grads, _ = gradients(model, x, y)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    (tf.function(step) if graph else step)(tf.constant(x), tf.constant(y))
    for old, new in zip(before, [*model.variables, *optimizer.variables], strict=True):
        np.testing.assert_array_equal(old, np.array(new))
    assert optimizer.stats().skipped_steps == 1
    train(model, optimizer, 4, start=7)
    assert_replicas_equal(model)


def test_a_variable_without_gradient_and_sparse_gradients():
    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input((4,), dtype="int32")
    embedding = keras.layers.Embedding(100, 32)
    model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(embedding(inputs))))
    unused = keras.Variable(np.ones((40, 40), np.float32), name="unused")
    ids = tf.constant(np.random.default_rng(RANK).integers(0, 100, (16, 4)))
    for dense in (False, True):
        optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=2, sparse_as_dense=dense)
        variables = [*model.trainable_variables, unused]
        optimizer.build(variables)
        for _ in range(5):
            with tf.GradientTape() as tape:
                loss = LOSS(tf.zeros(16, tf.int64), model(ids))
            grads = tape.gradient(loss, variables)
            assert isinstance(grads[0], tf.IndexedSlices)
            if not dense:
                with pytest.raises(UnsupportedError, match="sparse_as_dense=True"):
                    optimizer.apply_gradients(zip(grads, variables, strict=True))
                break
            optimizer.apply_gradients(zip(grads, variables, strict=True))
    assert_replicas_equal(model)
    assert (np.asarray(unused) == 1).all()


def test_what_cannot_work_is_refused():
    class Own(keras.optimizers.Adam):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)

    refused = [
        (UnsupportedError, "Adam, AdamW, SGD", keras.optimizers.RMSprop(), {}),
        (UnsupportedError, "update_step", Own(), {}),
        (UnsupportedError, "amsgrad", keras.optimizers.Adam(amsgrad=True), {}),
        (UnsupportedError, "backward_passes", keras.optimizers.Adam(gradient_accumulation_steps=2), {}),
        (UnsupportedError, "not offered", keras.optimizers.Adam(), {"groups": 2}),
        (UnsupportedError, "fp16", keras.optimizers.Adam(), {"compression": "int8"}),
        (UnsupportedError, "hvd.Average", keras.optimizers.Adam(), {"op": hvd.Adasum}),
        (ConfigurationError, "already", wrap(keras.optimizers.Adam()), {}),
        (ConfigurationError, "recipe", keras.optimizers.Adam(), {"recipe": "fast"}),
        (ConfigurationError, "backward_passes", keras.optimizers.Adam(), {"backward_passes_per_step": 0}),
        (ConfigurationError, "predivide", keras.optimizers.Adam(), {"gradient_predivide_factor": -1.0}),
        (ConfigurationError, "warmup_steps", keras.optimizers.Adam(), {"warmup_steps": 0}),
    ]
    for kind, message, optimizer, arguments in refused:
        with pytest.raises(kind, match=message):
            wrap(optimizer, **arguments)
    model = build()
    model.compile(optimizer=wrap(keras.optimizers.Adam()), loss=LOSS, jit_compile=True)
    with pytest.raises(UnsupportedError, match="jit_compile=False"):
        model.fit(*batch(0), verbose=0)
    model = build()
    scaled = keras.optimizers.LossScaleOptimizer(wrap(keras.optimizers.Adam()))
    model.compile(optimizer=scaled, loss=LOSS)
    with pytest.raises(UnsupportedError, match="LossScaleOptimizer"):
        model.fit(*batch(0), verbose=0)
    with pytest.raises(UnsupportedError, match="momentum_correction"):
        onebit.callbacks.LearningRateWarmupCallback(0.1, momentum_correction=True)
    with pytest.raises(ConfigurationError, match="has a gradient"):
        wrap(keras.optimizers.Adam()).apply([None] * 6, build().trainable_variables)


def test_loss_scale_factor():
    results = []
    for scale in (None, 128.0):
        model = build()
        optimizer = wrap(keras.optimizers.Adam(1e-3, loss_scale_factor=scale), warmup_steps=3)
        for step in range(10):
            x, y = batch(step)
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(LOSS(y, model(x)))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        results.append(weights(model))
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-4)


def test_checkpoints_and_stats_are_written_by_worker_0(tmp_path):
    model = build()
    model.compile(optimizer=wrap(OPTIMIZERS["adam"]()), loss=LOSS)
    path = tmp_path / "best.keras"
    callbacks = [
        onebit.callbacks.BestModelCheckpoint(str(path), monitor="loss"),
        onebit.callbacks.StatsCallback(str(tmp_path / "logs")),
        onebit.callbacks.LearningRateScheduleCallback(1e-3, lambda epoch: 0.1**epoch),
    ]
    model.fit(*batch(0), epochs=2, verbose=0, callbacks=callbacks)
    assert path.exists() == (RANK == 0)
    assert (tmp_path / "logs").exists() == (RANK == 0)
    assert float(model.optimizer.learning_rate) == pytest.approx(1e-4)

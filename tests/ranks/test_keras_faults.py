"""The Keras face on real ranks: NaN, ranks that disagree, what is refused."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import time

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow.functions import broadcast_object

import horovod_onebit.tf as onebit
from horovod_onebit import ConfigurationError, DesyncError, NonFiniteError, Recipe, UnsupportedError
from horovod_onebit.stats import allreduce_bytes
from horovod_onebit.tf import collectives as onebit_collectives
from horovod_onebit.tf import elastic
from horovod_onebit.tf.collectives import Errand
from horovod_onebit.tf.graph import in_rounds
from horovod_onebit.tools.monitor import read
from tests.ranks.keras_common import (
    LOSS,
    OPTIMIZERS,
    RANK,
    SIZE,
    assert_replicas_equal,
    batch,
    build,
    gradients,
    train,
    weights,
    wrap,
)


@pytest.mark.parametrize(
    ("what", "warmup", "graph"), [("nan", 50, True), ("nan", 1, False), ("rate", 50, False), ("rate", 1, True)]
)
def test_a_refused_step_takes_its_passes_along(what, warmup, graph):
    """Those that follow do what they would have done before. In a graph, workers may refuse a step whose gradients are
    not all there."""
    model, odd, seconds = build(), RANK == SIZE - 1, [0.0]
    recipe = Recipe(on_nonfinite="raise")
    optimizer = wrap(OPTIMIZERS["adam"](), warmup, recipe=recipe, backward_passes_per_step=2)
    optimizer.build(model.trainable_variables)

    def late(grad):
        time.sleep(seconds[0])
        return grad

    def step(x, y):
        grads, _ = gradients(model, x, y)
        grads[0] = tf.ensure_shape(tf.numpy_function(late, [grads[0]], tf.float32, stateful=False), grads[0].shape)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    step = tf.function(step) if graph else step
    for number in range(4):
        step(*map(tf.constant, batch(number)))
    variables = [*model.variables, *optimizer.variables]
    before, residuals = [np.array(v) for v in variables], optimizer.feedback_state_dict()
    for number in (6, 7):
        step(*map(tf.constant, batch(number)))
    expected = weights(model)
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    optimizer.load_feedback_state_dict(residuals)

    x, y = batch(4)
    x[3, 3] = np.nan if odd and what == "nan" else 0
    optimizer.learning_rate = 0.5 if odd and what == "rate" else 1e-3
    seconds[0] = 0.2
    step(tf.constant(x), tf.constant(y))
    kind = NonFiniteError if what == "nan" else DesyncError
    with pytest.raises(tf.errors.OpError if graph else kind, match=r"NaN or Inf|learning rate"):
        step(*map(tf.constant, batch(5)))

    optimizer.learning_rate, seconds[0] = 1e-3, 0.0
    for number in (6, 7):
        step(*map(tf.constant, batch(number)))
    np.testing.assert_allclose(weights(model), expected, atol=1e-6)
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


def test_residuals_that_travel_where_gradients_are_none_in_turn_are_counted(monkeypatch):
    """As with losses that take turns, each with a head of its own."""
    shared, *heads = (keras.Variable(np.zeros((64, 64), np.float32)) for _ in range(3))
    recipe = Recipe(exchange="two_stage", warmup="exact")
    optimizer = wrap(keras.optimizers.SGD(0.1), warmup_steps=1, recipe=recipe)
    elements, allreduce = [], optimizer._compressor.collectives.allreduce

    def counted(array, name):
        elements.append(array.size if ".residuals." in name else 0)
        return allreduce(array, name)

    monkeypatch.setattr(optimizer._compressor.collectives, "allreduce", counted)
    sent = []
    for step, head in enumerate([0, 1, 1, 0, 0]):
        grads = [tf.random.normal((64, 64), seed=step + RANK) if v in (0, head + 1) else None for v in range(3)]
        elements.clear()
        optimizer.apply(grads, [shared, *heads])
        sent.append((optimizer.stats(norms=False).step_bytes_sent, sum(elements)))
    assert sent[2] == sent[4] == (sent[2][0], 0)
    assert sent[3][1] >= 2 * 64 * 64
    assert sent[3][0] == sent[2][0] + allreduce_bytes(4 * sent[3][1], SIZE)


@pytest.mark.parametrize("graph", [False, True])
def test_a_last_pass_without_gradients_of_those_before_is_refused(graph):
    """Nothing of the refused step is in the next one, whose last pass has all."""
    model, optimizer = build(), wrap(keras.optimizers.SGD(1.0), 50, backward_passes_per_step=2)
    optimizer.build(model.trainable_variables)

    def passed(*numbers):
        grads = [tf.ones(v.shape) if i in numbers else None for i, v in enumerate(model.trainable_variables)]
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    passed = tf.function(passed) if graph else passed
    passed(0, 1, 2)
    before = weights(model)
    error = tf.errors.OpError if graph else ConfigurationError
    with pytest.raises(error, match=rf"{model.trainable_variables[2].path}: no gradient in the last of the 2 backward"):
        passed(0, 1)
    np.testing.assert_array_equal(weights(model), before)
    for numbers in ((0, 1), (0, 1, 2)):
        passed(*numbers)
    moved = np.split(before - weights(model), np.cumsum([np.array(v).size for v in model.trainable_variables])[:-1])
    for one, expected in zip(moved, (2, 2, 1, 0), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5)


def test_gradients_of_what_is_frozen_within_a_group_of_passes_are_dropped():
    model, optimizer = build(), wrap(keras.optimizers.SGD(1.0), 50, backward_passes_per_step=2)
    variables = model.trainable_variables
    optimizer.build(variables)
    before = [np.array(v) for v in variables]
    for step in range(4):
        grads = [None if step and i == 0 else tf.ones(v.shape) for i, v in enumerate(variables)]
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        variables[0].trainable = False
    for i, (variable, old) in enumerate(zip(variables, before, strict=True)):
        np.testing.assert_allclose(old - np.array(variable), 0 if i == 0 else 4, rtol=1e-5)


@pytest.mark.parametrize("how", ["passes", "0/1"])
def test_plain_tf_variables_that_a_step_lacks_are_named(how):
    variables = [tf.Variable(np.zeros((64, 64), np.float32), name=name) for name in ("first", "second")]
    plain = keras.optimizers.Adam(1e-3)
    if how == "passes":
        optimizer, steps = wrap(plain, backward_passes_per_step=2), 1
    else:  # the third one is a local one
        optimizer, steps = onebit.DistributedOptimizer(plain, schedule=onebit.ZeroOne(1, 1, 1, 4)), 3
    grads = [tf.ones((64, 64)) for _ in variables]
    for _ in range(steps):
        optimizer.apply(grads, variables)
    with pytest.raises(ConfigurationError, match=r"second(:0: no gradient|:0', which local steps have moved)"):
        optimizer.apply([grads[0], None], variables)


def test_gradients_alone_want_an_optimizer_that_is_built():
    model, optimizer = build(), wrap(keras.optimizers.Adam())
    grads = [tf.ones(v.shape) for v in model.trainable_variables]
    with pytest.raises(ConfigurationError, match=r"call optimizer\.build\(model\.trainable_variables\) first"):
        optimizer.apply(grads)
    assert not optimizer.built
    optimizer.build(model.trainable_variables)
    optimizer.apply(grads)
    assert_replicas_equal(model)


def test_what_cannot_work_is_refused():
    class Own(keras.optimizers.Adam):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)

    rounds = {"schedule": onebit.Local(every=4, freeze=0), "warmup_steps": None}
    refused = [
        (UnsupportedError, "keras.optimizers.Adam, AdamW, Lamb, Lion, SGD", keras.optimizers.RMSprop(), {}),
        (UnsupportedError, "update_step", Own(), {}),
        (UnsupportedError, "amsgrad", keras.optimizers.Adam(amsgrad=True), {}),
        (UnsupportedError, "backward_passes", keras.optimizers.Adam(gradient_accumulation_steps=2), {}),
        (UnsupportedError, "not offered", keras.optimizers.Adam(), {"groups": 2}),
        (UnsupportedError, "fp16", keras.optimizers.Adam(), {"compression": "int8"}),
        (UnsupportedError, "expected Average", keras.optimizers.Adam(), {"op": hvd.Adasum}),
        (ConfigurationError, "optimizer='adam': expected an optimizer itself", "adam", {}),
        (ConfigurationError, "optimizer='adam': expected", "adam", rounds),
        (ConfigurationError, "not its name, its class", keras.optimizers.Adam, {}),
        (ConfigurationError, "already", wrap(keras.optimizers.Adam()), {}),
        (ConfigurationError, "recipe", keras.optimizers.Adam(), {"recipe": "fast"}),
        (ConfigurationError, "backward_passes", keras.optimizers.Adam(), {"backward_passes_per_step": 0}),
        (ConfigurationError, "predivide", keras.optimizers.Adam(), {"gradient_predivide_factor": -1.0}),
        (ConfigurationError, "warmup_steps", keras.optimizers.Adam(), {"warmup_steps": 0}),
        (ConfigurationError, "clipnorm=-1", keras.optimizers.Adam(clipnorm=-1), {}),
        (ConfigurationError, "sparse_as_dense='no'", keras.optimizers.Adam(), {"sparse_as_dense": "no"}),
        (ConfigurationError, "process_set=0", keras.optimizers.Adam(), {"process_set": 0}),
        (ConfigurationError, "not registered", keras.optimizers.Adam(), {"process_set": hvd.ProcessSet([0])}),
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
    with pytest.raises(UnsupportedError, match=r"LossScaleOptimizer\(optimizer"):
        model.fit(*batch(0), verbose=0)
    with pytest.raises(UnsupportedError, match="momentum_correction"):
        onebit.callbacks.LearningRateWarmupCallback(0.1, momentum_correction=True)
    bad_calls = [
        (lambda: onebit.broadcast_variables(5), "variables has int"),
        (lambda: onebit.broadcast_variables(model.variables, root_rank=SIZE), f"root_rank={SIZE}"),
        (lambda: onebit.callbacks.LearningRateScheduleCallback(0.1, "x"), "multiplier='x'"),
        (lambda: onebit.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=0), "warmup_epochs=0"),
        (lambda: onebit.save_checkpoint(3, model), "no model|optimizer is"),
        (lambda: wrap(keras.optimizers.Adam()).load_feedback_state_dict({"a": np.ones(3)}), "is not built"),
        (lambda: wrap(keras.optimizers.Adam()).apply([None], model.trainable_variables), "1 gradients for 4"),
        (lambda: elastic.KerasState(None), "NoneType"),
    ]
    for call, message in bad_calls:
        with pytest.raises(ConfigurationError, match=message):
            call()
    with pytest.raises(ConfigurationError, match="has a gradient"):
        wrap(keras.optimizers.Adam()).apply([None] * 4, build().trainable_variables)
    with pytest.raises(ConfigurationError, match=r"has shape \(10,\): expected \(128,\)"):
        wrap(keras.optimizers.Adam()).apply([tf.zeros((32, 128)), tf.zeros(10)], build().trainable_variables[:2])


@pytest.mark.parametrize("options", [{}, {"clipvalue": 1e-3}])
def test_loss_scale_factor(options):
    results = []
    for scale in (None, 128.0):
        model = build()
        optimizer = wrap(keras.optimizers.Adam(1e-3, loss_scale_factor=scale, **options), warmup_steps=3)
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
        onebit.callbacks.StatsCallback(jsonl=str(tmp_path / "run.jsonl"), every=2),
        onebit.callbacks.LearningRateScheduleCallback(1e-3, lambda epoch: 0.1**epoch),
    ]
    model.fit(*batch(0), epochs=2, verbose=0, callbacks=callbacks)
    assert path.exists() == (RANK == 0)
    assert (tmp_path / "logs").exists() == (tmp_path / "run.jsonl").exists() == (RANK == 0)
    if RANK == 0:
        rows = read(tmp_path / "run.jsonl")
        assert [row["step"] for row in rows] == [2]
        assert rows[0]["bytes_sent"] > 0
        assert rows[0]["loss"] > 0
    assert float(model.optimizer.learning_rate) == pytest.approx(1e-4)


def test_strategies_of_tensorflow_are_refused():
    plain, strategy = OPTIMIZERS["adam"](), tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        within = OPTIMIZERS["adam"]()
        for optimizer in (plain, within):
            with pytest.raises(UnsupportedError, match=r"tf\.distribute: .* one process for each GPU"):
                wrap(optimizer)
    with pytest.raises(UnsupportedError, match=r"tf\.distribute: .* one process for each GPU"):
        wrap(keras.optimizers.LossScaleOptimizer(within))
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = build()
        model.compile(optimizer=wrap(OPTIMIZERS["adam"]()), loss=LOSS, run_eagerly=True)
    model.fit(*batch(0), verbose=0)
    assert_replicas_equal(model)


def test_a_best_model_checkpoint_saves_the_best_alone():
    onebit.callbacks.BestModelCheckpoint("best.keras", save_best_only=True)
    with pytest.raises(ConfigurationError, match="saves the best model alone"):
        onebit.callbacks.BestModelCheckpoint("best.keras", save_best_only=False)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_before_the_optimizer_knows_its_variables_is_an_error(scaled):
    optimizer = OPTIMIZERS["adam"]()
    with pytest.raises(ConfigurationError, match=r"apply\(grads\) before the optimizer was built"):
        wrap(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer).apply([tf.ones(3)])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("what", ["warmup", "lr", "recipe", "shape", "steps"])
def test_ranks_that_disagree_are_told_at_once(what, graph):
    odd = RANK == SIZE - 1
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(48 if what == "shape" and odd else 40)])
    recipe = Recipe(scale="rms") if what == "recipe" and odd else "robust"
    warmup = 3 if what == "warmup" and odd else 4
    optimizer = wrap(keras.optimizers.Adam(0.1 if what == "lr" and odd else 0.01), warmup_steps=warmup, recipe=recipe)
    optimizer.build(model.trainable_variables)
    if what == "steps" and not odd:
        optimizer.iterations.assign(3)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(tf.ones((4, 32)))))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    kind = tf.errors.OpError if graph else DesyncError
    with pytest.raises(kind, match="differs between workers"):
        (tf.function(step) if graph else step)()


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("odd", [False, True])
def test_a_hierarchy_that_cannot_be_is_an_error_on_all(odd, graph):
    """On one host, or if one worker alone asks for it."""
    model = build()
    recipe = Recipe(exchange="hierarchical") if not odd or RANK == SIZE - 1 else "robust"
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=1, recipe=recipe)
    error = "differs between workers" if odd else "needs several hosts"
    # Of an OpError, or what TensorFlow makes of an error while it traces; eagerly it is ours.
    with pytest.raises(Exception if graph else (DesyncError, ConfigurationError), match=error):
        train(model, optimizer, 2, graph=graph)


def test_many_collectives_of_one_kind_at_once_keep_apart():
    collectives = onebit_collectives.HorovodCollectives()
    for turn in range(5):
        handles = []
        for i in range(12):
            array = np.full(1000, 10 * turn + i + RANK, np.float32)
            handles += [
                collectives.allreduce(array, f"many.{i}"),
                collectives.allgather(array.view(np.uint8), f"m.{i}"),
            ]
        for i in range(12):
            total, gathered = (handle.wait() for handle in handles[2 * i : 2 * i + 2])
            assert (total == sum(10 * turn + i + rank for rank in range(SIZE))).all()
            expected = np.repeat([10 * turn + i + rank for rank in range(SIZE)], 1000)
            np.testing.assert_array_equal(gathered.view(np.float32), expected)


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("graph", [True, False])
def test_a_model_of_many_buckets(exchange, graph):
    recipe = Recipe(exchange=exchange, bucket_size=512, block_size=64)
    model = build()
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=3, recipe=recipe)
    train(model, optimizer, 30, graph=graph)
    assert len(optimizer._compressor.engine.layout.buckets) > 8
    assert_replicas_equal(model)
    if exchange == "direct":
        whole = build()
        one_bucket = wrap(OPTIMIZERS["adam"](), warmup_steps=3, recipe=Recipe(exchange="direct", block_size=64))
        train(whole, one_bucket, 30, graph=graph)
        np.testing.assert_array_equal(weights(model), weights(whole))


class Centralized(keras.optimizers.AdamW):
    """What compressed steps would pass over."""

    def apply(self, grads, trainable_variables=None):
        super().apply([g - tf.reduce_mean(g) for g in grads], trainable_variables)


def test_a_subclass_with_an_apply_of_its_own_is_refused_unless_it_is_called():
    with pytest.raises(UnsupportedError, match="must not override update_step, apply"):
        wrap(Centralized(1e-3))
    model = build()
    train(model, onebit.DistributedOptimizer(Centralized(1e-3), recipe="exact"), 3)
    assert_replicas_equal(model)


@pytest.mark.parametrize(("first", "then"), [("auto", 3), (3, "exact"), ("exact", 3), (30, 20)])
@pytest.mark.parametrize("graph", [True, False])
def test_variables_of_a_run_with_other_arguments_are_refused(first, then, graph, tmp_path):
    """TensorFlow assigns them, and tells nobody."""

    def wrapped(steps):
        if steps == "exact":
            return onebit.DistributedOptimizer(keras.optimizers.Adam(1e-3), recipe="exact")
        return wrap(keras.optimizers.Adam(1e-3), warmup_steps=steps)

    path = broadcast_object(str(tmp_path / "state"), root_rank=0, name="path")
    model = build()
    optimizer = wrapped(first)
    train(model, optimizer, 6)
    if RANK == 0:
        tf.train.Checkpoint(model=model, optimizer=optimizer).write(path)
    broadcast_object(0, root_rank=0, name="written")
    again = build()
    other = wrapped(then)
    other.build(again.trainable_variables)
    tf.train.Checkpoint(model=again, optimizer=other).read(path).expect_partial()
    kind = tf.errors.OpError if graph else ConfigurationError
    with pytest.raises(kind, match=r"tf\.train\.Checkpoint restores variables and nothing else"):
        train(again, other, 2, graph=graph)


@pytest.mark.parametrize("where", ["eager", "graph", "host"])
def test_elastic_tells_errors_of_horovod_from_others(where):
    collectives = onebit_collectives.HorovodCollectives()

    def of_another_shape_on_each_rank(x):
        if where == "host":
            array = np.zeros(RANK + 1, np.float32)

            def work(_):
                yield collectives.allreduce(array, "unequal")

            return in_rounds(Errand(collectives, lambda call: call()), collectives, work, [x])
        return hvd.allreduce(tf.zeros([RANK + 1]) + x, name=f"unequal.{where}", op=hvd.Sum)

    def wrong_by_itself(x):
        return tf.py_function(lambda: tf.zeros([2]) + tf.zeros([3]), [], tf.float32) + x

    for call, ours in ((of_another_shape_on_each_rank, True), (wrong_by_itself, False)):
        with pytest.raises(tf.errors.OpError) as caught:
            (call if where == "eager" else tf.function(call))(tf.constant(0.0))
        assert elastic.of_horovod(caught.value) is ours
    assert not elastic.of_horovod(tf.errors.InternalError(None, None, 'File "/home/me/Horovod/train.py", line 3'))

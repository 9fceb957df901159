"""The Keras face on real ranks: several optimizers, workers that do different things, interrupted steps."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import copy
import dataclasses
import pickle
import threading
import weakref

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow.functions import allgather_object

import horovod_onebit.tf as onebit
from horovod_onebit import ConfigurationError, DesyncError, NonFiniteError, Recipe, UnsupportedError, face
from horovod_onebit.tf import elastic
from horovod_onebit.tf.collectives import Errand, HorovodCollectives
from horovod_onebit.tf.graph import in_rounds
from horovod_onebit.tf.meeting import announce
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

ODD = RANK == SIZE - 1
FAILURES = (DesyncError, tf.errors.OpError)


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    """Optimizers are told apart by the order in which they were built: the tests before built different ones."""
    face._named.clear()


def data(steps=6):
    return tuple(np.concatenate(arrays) for arrays in zip(*map(batch, range(steps)), strict=True))


def compiled(optimizer, model=None, **arguments):
    model = model or build()
    model.compile(optimizer=optimizer, loss=LOSS, **arguments)
    return model


def dense(units, **arguments):
    return keras.Sequential([keras.layers.Dense(units, activation="relu", **arguments), keras.layers.Dense(10)])


# -- several optimizers, and how steps are traced ----------------------------------------------------------------------


@pytest.mark.parametrize("branch", [False, True])
def test_two_optimizers_in_one_function(branch):
    """Their meetings have one name, and TensorFlow may run what is independent in any order."""
    models = [build(0), build(1)]
    optimizers = [wrap(OPTIMIZERS[kind](), warmup_steps=2) for kind in ("adam", "sgd")]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)

    def update(index, x, y):
        grads, _ = gradients(models[index], x, y)
        optimizers[index].apply_gradients(zip(grads, models[index].trainable_variables, strict=True))
        return tf.constant(0)

    @tf.function
    def step(number, x, y):
        for _ in range(2):  # the first optimizer takes two steps for one of the second
            update(0, x, y)
        if branch:
            tf.cond(number % 2 == 0, lambda: update(1, x, y), lambda: tf.constant(0))
        else:
            update(1, x, y)

    for number in range(6):
        step(tf.constant(number), *map(tf.constant, batch(number)))
    for model, optimizer, steps in zip(models, optimizers, (12, 3 if branch else 6), strict=True):
        assert optimizer.stats().step == steps
        assert optimizer.phase == "compressed"
        assert_replicas_equal(model)


def test_several_steps_in_one_execution():
    results = []
    for together in (1, 3):
        model = compiled(wrap(OPTIMIZERS["adamw"](), warmup_steps=2), steps_per_execution=together)
        model.fit(*data(), batch_size=16, verbose=0, shuffle=False)
        assert int(model.optimizer.iterations) == 6
        assert_replicas_equal(model)
        results.append(weights(model))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_step_of_a_built_model_is_traced_once(scaled):
    """Though its optimizer is not built."""
    calls = []

    def loss(y, found):
        calls.append(found)
        return LOSS(y, found)

    inner, model = OPTIMIZERS["adam"](), build()
    optimizer = wrap(keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0) if scaled else inner)
    model.compile(optimizer=optimizer, loss=loss)
    model.fit(*data(2), batch_size=16, verbose=0)
    assert len(calls) == 1
    assert optimizer.stats().step == 2


def test_one_worker_may_run_eagerly():
    """The names of collectives do not depend on where they are."""
    model = compiled(wrap(OPTIMIZERS["adamw"](clipnorm=1.0), warmup_steps=3), run_eagerly=ODD)
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0), onebit.callbacks.ReplicaCheckCallback(2)]
    model.fit(*data(), batch_size=16, verbose=0, callbacks=callbacks)
    assert model.optimizer.phase == "compressed"
    assert_replicas_equal(model)


def test_two_threads_that_train_two_models_are_an_error_and_no_hang():
    """Horovod refuses two meetings at once, or the workers learn that they do not meet for the same model."""
    pairs = [(build(seed), wrap(OPTIMIZERS["adam"](), warmup_steps=2)) for seed in (0, 1)]
    for model, optimizer in pairs:
        train(model, optimizer, 1, graph=True)
    barrier, caught = threading.Barrier(2), []

    def work(model, optimizer, number):
        barrier.wait()
        try:
            train(model, optimizer, 300, start=1000 * number, graph=True)
        except FAILURES as error:
            caught.append(error)

    threads = [threading.Thread(target=work, args=(*pair, k), daemon=True) for k, pair in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    # A thread that waits for workers whose threads have given up is told at their next meeting.
    waiting = allgather_object(any(thread.is_alive() for thread in threads), name="waiting")
    if any(waiting) and not waiting[RANK]:
        with pytest.raises(FAILURES):
            announce("the end of the threads")
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert any(allgather_object(bool(caught), name="caught"))


# -- workers that disagree ---------------------------------------------------------------------------------------------


def another_class():
    train(build(), wrap(OPTIMIZERS["adamw" if ODD else "adam"](weight_decay=0.01)), 1, graph=True)


def one_optimizer_more():
    if ODD:
        wrap(OPTIMIZERS["adam"]())
    train(build(), wrap(OPTIMIZERS["adam"]()), 1)


def one_step_of_another():
    first, second = build(), build()
    optimizers = [wrap(OPTIMIZERS["adam"]()), wrap(OPTIMIZERS["adam"]())]
    if ODD:
        train(second, optimizers[1], 1)
    train(first, optimizers[0], 2)


def another_order():
    pairs = [(build(), wrap(OPTIMIZERS["adam"]())) for _ in range(2)]
    for model, optimizer in reversed(pairs) if ODD else pairs:
        train(model, optimizer, 1)


def a_callback(callback, **arguments):
    def run():
        model = compiled(wrap(OPTIMIZERS["adam"]()), **arguments)
        model.fit(*data(2), batch_size=8, epochs=2, verbose=0, callbacks=[callback()] if ODD else [])

    return run


def excluded_from_decay():
    optimizer = OPTIMIZERS["adamw"]()
    if ODD:
        optimizer.exclude_from_weight_decay(var_names=["kernel"])
    train(build(), wrap(optimizer), 1)


def an_option(graph=False, **options):
    return lambda: train(build(), wrap(OPTIMIZERS["adam"](**(options if ODD else {}))), 1, graph=graph)


def an_argument(graph=False, **arguments):
    return lambda: train(build(), wrap(OPTIMIZERS["adam"](), **(arguments if ODD else {})), 1, graph=graph)


def state_loaded_by_one():
    model, optimizer = build(), wrap(OPTIMIZERS["adam"](), warmup_steps=3)
    optimizer.build(model.trainable_variables)
    if ODD:
        optimizer._warmup_steps.assign(0)
    train(model, optimizer, 1, graph=True)


def scaled_by_one():
    plain = OPTIMIZERS["adam"]()
    train(build(), wrap(keras.optimizers.LossScaleOptimizer(plain) if ODD else plain), 1, graph=True)


def broadcast_of_other_variables():
    onebit.broadcast_variables(build().variables[: 3 if ODD else None])


def saved_by_one():
    model = compiled(wrap(OPTIMIZERS["adam"]()))
    if ODD:
        onebit.save_checkpoint("nowhere", model)
    model.fit(*data(2), batch_size=16, verbose=0)


def fails_by_itself():
    optimizer = wrap(OPTIMIZERS["adam"]())
    if ODD:
        optimizer._agreement._record = lambda *_: 1 / 0
    train(build(), optimizer, 1, graph=True)


DISAGREEMENTS = {
    "another class": another_class,
    "one optimizer more": one_optimizer_more,
    "one step of another": one_step_of_another,
    "another order": another_order,
    "replica check": a_callback(lambda: onebit.callbacks.ReplicaCheckCallback(2)),
    "metric average": a_callback(onebit.callbacks.MetricAverageCallback, run_eagerly=True),
    "broadcast": a_callback(lambda: onebit.callbacks.BroadcastGlobalVariablesCallback(0), run_eagerly=True),
    "broadcast of other variables": broadcast_of_other_variables,
    "excluded from decay": excluded_from_decay,
    "ema": an_option(use_ema=True, graph=True),
    "clip": an_option(global_clipnorm=1.0),
    "exact": an_argument(exact=["*kernel"]),
    "fp16": an_argument(compression=hvd.Compression.fp16, graph=True),
    "predivide": an_argument(gradient_predivide_factor=2.0),
    "state loaded by one": state_loaded_by_one,
    "scaled by one": scaled_by_one,
    "saved by one": saved_by_one,
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_workers_that_do_different_things_are_told(what):
    with pytest.raises(FAILURES, match="differs between workers"):
        DISAGREEMENTS[what]()


def test_an_error_of_one_worker_alone_ends_the_step_of_all():
    with pytest.raises(tf.errors.OpError, match="ZeroDivisionError" if ODD else "differs between workers"):
        fails_by_itself()


def step_with(change):
    """A step whose gradients ``change`` spoils on one worker."""

    def run(graph):
        model, optimizer = build(), wrap(OPTIMIZERS["adam"]())

        def step(x, y):
            grads, _ = gradients(model, x, y)
            optimizer.apply(change(grads) if ODD else grads, model.trainable_variables)

        (tf.function(step) if graph else step)(*map(tf.constant, batch(0)))

    return run


def no_number(graph):
    onebit.callbacks.MetricAverageCallback().on_epoch_end(0, {"loss": "much" if ODD else 1.0})


def no_metrics(graph):
    onebit.callbacks.MetricAverageCallback().on_epoch_end(0, None if ODD else {"loss": 1.0})


def not_built(graph):
    model, optimizer = build(), wrap(OPTIMIZERS["adam"]())
    if not ODD:
        optimizer.build(model.trainable_variables)
    onebit.check_replicas(optimizer)


def no_variable(graph):
    onebit.broadcast_variables(["weight"] if ODD else build().variables)


ALONE = {
    "a gradient less": (step_with(lambda grads: grads[1:]), "3 gradients for 4 variables"),
    "no gradient": (step_with(lambda grads: [None] * len(grads)), "no variable has a gradient"),
    "another shape": (step_with(lambda grads: [grads[0][1:], *grads[1:]]), "has shape"),
    "a sparse one": (
        step_with(lambda grads: [tf.IndexedSlices(grads[0], tf.range(len(grads[0]))), *grads[1:]]),
        "sparse_as_dense=True",
    ),
    "a metric that is no number": (no_number, "could not convert"),
    "no metrics": (no_metrics, "differs between workers"),
    "not built": (not_built, "is not built"),
    "no variable": (no_variable, "variables has str"),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("what", ALONE)
def test_an_error_before_the_workers_meet_is_told_to_the_others(what, graph):
    call, text = ALONE[what]
    with pytest.raises(Exception, match=text if ODD else "differs between workers"):
        call(graph)


def test_a_users_loop_keeps_no_gradients():
    model, optimizer = build(), wrap(OPTIMIZERS["adam"]())
    optimizer.build(model.trainable_variables)
    grads, _ = gradients(model, *batch(0))
    kept = weakref.ref(grads[0])
    optimizer.apply(grads, model.trainable_variables)
    del grads
    assert kept() is None


def test_errors_keep_nothing_of_their_step():
    class Large:
        pass

    def work():
        large = Large()
        found.append(weakref.ref(large))
        raise DesyncError("as a step's")
        yield

    found = []
    with pytest.raises(DesyncError):
        Errand(HorovodCollectives(), lambda call: call()).start(work())
    assert found[0]() is None


def test_what_is_loaded_after_an_interrupted_step_stays():
    model, optimizer = build(), wrap(OPTIMIZERS["adam"](), warmup_steps=2)
    train(model, optimizer, 4)
    saved = optimizer.feedback_state_dict()
    collectives = optimizer._compressor.collectives
    collectives.fuse = lambda kinds: 1 / 0  # with messages encoded
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, 1, start=4)
    del collectives.fuse
    loaded = {name: np.full_like(value, 0.125) for name, value in saved.items()}
    optimizer._compressor.load_feedback({name: v for name, v in loaded.items() if v.size})
    optimizer._compressor.settle()
    for name, value in optimizer.feedback_state_dict().items():
        np.testing.assert_array_equal(value, loaded[name])


def test_a_state_that_is_restored_knows_how_far_the_warm_up_was():
    model = compiled(wrap(OPTIMIZERS["adam"](), warmup_steps="auto"))
    model.optimizer.build(model.trainable_variables)
    train(model, model.optimizer, 3)
    state, before = elastic.KerasState(model), copy.deepcopy(model.optimizer._compressor.counts())
    train(model, model.optimizer, 12, start=3)
    assert model.optimizer._compressor.counts() != before
    state.restore()
    assert model.optimizer._compressor.counts() == before


def test_a_model_that_one_worker_loads_to_read_it_is_no_disagreement(tmp_path):
    model = compiled(wrap(OPTIMIZERS["adam"](), warmup_steps=2))
    model.fit(*data(2), batch_size=16, verbose=0)
    if RANK == 0:
        model.save(tmp_path / "model.keras")
        keras.models.load_model(tmp_path / "model.keras")
    other, optimizer = build(), wrap(OPTIMIZERS["adam"](), warmup_steps=2)
    model.fit(*data(2), batch_size=16, verbose=0)
    train(other, optimizer, 4)
    assert_replicas_equal(model)
    assert_replicas_equal(other)


# -- NaN and overflow in warm-up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("what", ["nan", "fp16"])
def test_nan_in_warm_up_is_skipped_by_all(what, graph):
    compression = hvd.Compression.fp16 if what == "fp16" else hvd.Compression.none
    model, optimizer = build(), wrap(OPTIMIZERS["adamw"](), warmup_steps=5, compression=compression)
    train(model, optimizer, 2, graph=graph)
    before = [np.array(v) for v in [*model.variables, *optimizer.variables]]
    grads = [tf.ones(v.shape) for v in model.trainable_variables]
    if ODD:
        grads[2] = grads[2] * (np.nan if what == "nan" else 1e6)

    def step():
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    (tf.function(step) if graph else step)()
    for old, new in zip(before, [*model.variables, *optimizer.variables], strict=True):
        np.testing.assert_array_equal(old, np.array(new))
    assert optimizer.stats().skipped_steps == 1
    train(model, optimizer, 6, start=2, graph=graph)
    assert optimizer.phase == "compressed"
    assert optimizer.stats().step == 8
    assert_replicas_equal(model)


@pytest.mark.parametrize("warmup", [5, 1])
def test_nan_is_an_error_on_all_where_that_is_wanted(warmup):
    model, optimizer = build(), wrap(OPTIMIZERS["adam"](), warmup, recipe=Recipe(on_nonfinite="raise"))
    train(model, optimizer, 2)
    before = weights(model)
    grads = [tf.fill(v.shape, np.float32(np.nan if ODD else 1)) for v in model.trainable_variables]
    with pytest.raises(NonFiniteError, match="NaN or Inf"):
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    np.testing.assert_array_equal(weights(model), before)
    train(model, optimizer, 2, start=2)
    assert_replicas_equal(model)


# -- variables that stay exact -----------------------------------------------------------------------------------------


def test_variables_that_the_user_keeps_exact(tmp_path):
    model = compiled(wrap(OPTIMIZERS["adam"](), warmup_steps=2, exact=["*/kernel"]))
    model.fit(*data(4), batch_size=16, verbose=0)
    assert model.optimizer.stats().compressed_parameters == 0
    assert_replicas_equal(model)
    path = model.trainable_variables[0].path
    model = compiled(wrap(OPTIMIZERS["adam"](), 2, exact=[path]), keras.models.clone_model(build()))
    with pytest.raises(ConfigurationError, match=rf"exact: '{path}' matches no parameter; their names are .*kernel"):
        model.optimizer.build(model.trainable_variables)
    model = build()
    model = compiled(wrap(OPTIMIZERS["adam"](), 2, exact=(model.trainable_variables[0].path,)), model)
    model.fit(*data(4), batch_size=16, verbose=0)
    assert model.optimizer.stats().compressed_parameters == 128 * 10
    model.save(tmp_path / f"model-{RANK}.keras")
    again = keras.models.load_model(tmp_path / f"model-{RANK}.keras")
    assert again.optimizer.stats().compressed_parameters == 128 * 10
    for bad in ("kernel", 5, [3]):
        with pytest.raises(ConfigurationError, match="exact"):
            wrap(OPTIMIZERS["adam"](), exact=bad).build(model.trainable_variables)


def test_variables_that_stay_exact_are_looked_for_in_another_model(caplog):
    """In the same model under other names, as Keras loads it, they are known."""

    def kernels(*names):
        layers = [keras.layers.Dense(64, use_bias=False, name=name) for name in names]
        return keras.Sequential([keras.layers.Input((64,)), *layers]).trainable_variables

    def compressed(*names):
        other = type(optimizer).from_config(optimizer.get_config())
        other.build(kernels(*names))
        again = type(other).from_config(other.get_config())
        again.build(kernels(*names))
        for one in (other, again):
            yield [i for i in range(len(names)) if one._compressor.compressible(one._trainable_variables[i])]

    optimizer = wrap(OPTIMIZERS["adam"](), exact=["*head*"])
    optimizer.build(kernels("body", "head"))
    assert list(compressed("body", "head")) == list(compressed("a", "b")) == [[0], [0]]
    assert list(compressed("stem", "body", "head")) == [[0, 1], [0, 1]]
    caplog.clear()
    assert list(compressed("stem", "body", "last")) == [[0, 1, 2], [0, 1, 2]]
    assert ("matches none of the variables that are trained now" in caplog.text) == (RANK == 0)


@pytest.mark.parametrize("scaled", [False, True])
def test_copies_have_state_or_are_refused(scaled):
    plain = OPTIMIZERS["adamw"]()
    optimizer = wrap(keras.optimizers.LossScaleOptimizer(plain) if scaled else plain, warmup_steps=2, exact=["*bias"])
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        inner, other = (getattr(o, "inner_optimizer", o) for o in (optimizer, copied))
        assert type(copied) is type(optimizer)
        assert str(inner._wrapping) == str(other._wrapping)
    model = compiled(optimizer)
    model.fit(*data(4), batch_size=16, verbose=0)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="copy, pickle or save the model"):
            copying(optimizer)
    again = copy.deepcopy(model)
    assert again.optimizer.stats().step == 4
    assert again.optimizer.phase == "compressed"


# -- what is broadcast -------------------------------------------------------------------------------------------------


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = keras.layers.Dense(64), keras.layers.BatchNormalization(), dense(32)

    def call(self, x, training=False):
        return self.last(self.norm(self.first(x), training=training))


@pytest.mark.parametrize("kind", ["sequential", "subclassed", "loss scale", "eager", "built on one"])
def test_models_that_are_built_by_their_first_batch(kind):
    keras.utils.set_random_seed(RANK)
    model = Subclassed() if kind == "subclassed" else dense(64)
    optimizer = OPTIMIZERS["adamw"]()
    if kind == "loss scale":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)
    if kind == "built on one" and RANK == 0:
        model.build((None, 32))
    compiled(wrap(optimizer, warmup_steps=3), model, run_eagerly=kind == "eager")
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0), onebit.callbacks.MetricAverageCallback()]
    model.fit(*data(), batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
    assert model.optimizer.stats().step == 12
    assert model.optimizer.phase == "compressed"
    assert_replicas_equal(model)


class Unconnected(Subclassed):
    """One of its weights has no gradient."""

    def __init__(self):
        super().__init__()
        self.unused = self.add_weight(shape=(40, 40))


@pytest.fixture
def members():
    """A process set that worker 0 is not in."""
    found = hvd.add_process_set(range(1, SIZE))
    yield found
    hvd.allgather_object(0)  # the set must not go before its members have trained
    hvd.remove_process_set(found)


@pytest.mark.parametrize("what", ["broadcast", "no gradient", "statistics", "replica check"])
def test_workers_outside_of_the_process_set(what, members, tmp_path):
    """A broadcast is of all workers; of everything else they know nothing."""
    keras.utils.set_random_seed(RANK)
    model = {"broadcast": lambda: dense(64), "no gradient": Unconnected}.get(what, build)()
    callbacks = {
        "broadcast": lambda: onebit.callbacks.BroadcastGlobalVariablesCallback(0),
        "statistics": lambda: onebit.callbacks.StatsCallback(jsonl=tmp_path / "run.jsonl", every=1),
        "replica check": lambda: onebit.callbacks.ReplicaCheckCallback(2),
    }
    rate = 0.0 if what == "broadcast" else 1e-3  # the weights are those that were broadcast
    optimizer = wrap(keras.optimizers.SGD(rate), warmup_steps=1, process_set=members)
    compiled(optimizer, model, run_eagerly=what != "broadcast")
    model.fit(*data(3), batch_size=16, verbose=0, callbacks=[callbacks[what]()] if what in callbacks else [])
    assert int(optimizer.iterations) == 3
    assert (tmp_path / "run.jsonl").exists() == (what == "statistics" and RANK == 1)
    if what == "broadcast":
        assert_replicas_equal(model)


@pytest.mark.parametrize("how", ["callback", "elastic"])
def test_each_worker_drops_units_of_its_own(how):
    keras.utils.set_random_seed(RANK)
    drop = keras.layers.Dropout(0.5)
    model = compiled(wrap(OPTIMIZERS["adam"]()), keras.Sequential([keras.Input((64,)), drop, keras.layers.Dense(10)]))
    model.optimizer.build(model.trainable_variables)
    if how == "callback":
        callback = onebit.callbacks.BroadcastGlobalVariablesCallback(0)
        callback.set_model(model)
        callback.on_train_batch_begin(0)
    else:
        elastic.KerasState(model).sync()
    assert_replicas_equal(model)
    masks = hvd.allgather(drop(tf.ones((1, 64)), training=True), name="check.masks").numpy()
    assert len({mask.tobytes() for mask in masks}) == SIZE


def test_variables_that_stay_each_workers_own():
    model = compiled(wrap(OPTIMIZERS["adam"]()), build(RANK, hidden=(96, 48)))
    local = model.layers[0].kernel
    before = np.array(local)
    callback = onebit.callbacks.BroadcastGlobalVariablesCallback(0, "", local_variables=local)
    callback.register_local_var(model.layers[1].kernel.value)
    callback.set_model(model)
    other = np.array(model.layers[1].kernel)
    callback.on_train_batch_begin(0)
    np.testing.assert_array_equal(before, np.array(local))
    np.testing.assert_array_equal(other, np.array(model.layers[1].kernel))
    rows = hvd.allgather(np.array(model.layers[2].kernel)[None], name="check.local").numpy()
    assert (rows == rows[0]).all()
    with pytest.raises(ConfigurationError, match="local_variables has int"):
        onebit.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[3])


def test_broadcast_inside_a_function_and_of_every_type():
    types = ["float32", "bfloat16", "float16", "bool", "int64", "uint32", "uint16"]
    variables = [tf.Variable(tf.cast([RANK, 1, 0], kind)) for kind in types]
    last = tf.Variable([float(RANK)])

    @tf.function
    def work():
        last.assign_add([1.0])
        onebit.broadcast_variables([*variables, last], root_rank=SIZE - 1)
        last.assign(2 * last)
        onebit.broadcast_variables([last])

    work()
    for kind, variable in zip(types, variables, strict=True):
        assert [int(value) for value in tf.cast(variable, tf.int32)] == [
            int(bool(SIZE - 1)) if kind == "bool" else SIZE - 1,
            1,
            0,
        ]
    assert last.numpy() == [2.0 * SIZE]


# -- steps that are interrupted ----------------------------------------------------------------------------------------


def test_an_errand_goes_on_fails_and_is_given_up():
    collectives = HorovodCollectives(name="onebit.errands")
    errand, log = Errand(collectives, lambda call: call()), []

    def work():
        try:
            total = yield collectives.allreduce(np.float32([1, 2]), "one")
            log.append((total, (yield collectives.allreduce(np.float32([3]), "two"))))
        finally:
            log.append("over")

    def answer(asked):
        return [2 * np.asarray(asked.sums), *asked.arrays()[1:3]]

    asked = errand.start(work())
    asked = errand.resume(answer(asked))
    assert errand.resume(answer(asked)) is None
    assert [one.tolist() for one in log[0]] == [[2, 4], [6]]
    errand.start(work())
    errand.start(work())  # the one before is given up, and cleans up
    assert log[1:] == ["over", "over"]
    errand.close()
    assert log[1:] == ["over"] * 3
    errand.close()


@pytest.mark.parametrize("graph", [True, False])
def test_a_collective_that_fails_leaves_the_step_clean(graph):
    """The messages differ in size: Horovod refuses their sum on all workers."""
    model, optimizer = build(), wrap(OPTIMIZERS["adam"](), warmup_steps=2)
    train(model, optimizer, 4)
    residuals, before = optimizer.feedback_state_dict(), weights(model)
    collectives = optimizer._compressor.collectives
    fuse = collectives.fuse

    def longer(kinds):
        return dataclasses.replace(fuse(kinds), sums=np.zeros(1 + RANK, np.float32))

    collectives.fuse = longer
    with pytest.raises(tf.errors.OpError) as caught:
        train(model, optimizer, 1, start=4, graph=graph)
    assert elastic.of_horovod(caught.value)
    del collectives.fuse
    for name, value in optimizer.feedback_state_dict().items():
        np.testing.assert_allclose(value, residuals[name], atol=1e-5)
    np.testing.assert_array_equal(weights(model), before)
    train(model, optimizer, 4, start=4, graph=graph)
    assert_replicas_equal(model)


def test_more_than_a_round_holds(monkeypatch):
    monkeypatch.setattr("horovod_onebit.tf.collectives.ROUND_LIMIT", 300)
    collectives = HorovodCollectives(name="onebit.rounds")
    asked = []

    def work(_):
        handles = [collectives.allgather(np.full(100, 10 * i + RANK, np.uint8), "g") for i in range(8)]
        total = collectives.allreduce(np.full(500, RANK, np.float32), "s")
        spread = collectives.alltoall(np.arange(SIZE, dtype=np.uint8).repeat(8), "a")
        found = []
        for handle in (total, spread, *handles):
            found.append((yield handle))
        asked.append(found)

    @tf.function
    def run():
        return in_rounds(Errand(collectives, lambda call: call()), collectives, work, [tf.constant(0)])

    run()
    run()
    assert len(asked) == 2
    total, spread, *gathered = asked[1]
    assert (total == sum(range(SIZE))).all()
    assert (spread == RANK).all()
    for i, found in enumerate(gathered):
        np.testing.assert_array_equal(found, np.repeat([10 * i + rank for rank in range(SIZE)], 100))


@pytest.mark.parametrize("kind", ["plain", "scaled"])
def test_apply_in_a_function_of_the_users(kind):
    """AutoGraph, which converts whatever ``tf.function`` calls, leaves the host functions alone."""
    inner = keras.optimizers.Adam(1e-2)
    optimizer = wrap(keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0) if kind == "scaled" else inner)
    model = build()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(grads):
        optimizer.apply(grads, model.trainable_variables)

    for i in range(6):
        step(gradients(model, *batch(i))[0])
        assert_replicas_equal(model)
    assert optimizer.phase == "compressed"

"""Models, training options and callbacks that Keras's documentation shows, trained on real ranks.

Each worker has batches of its own. Exact steps are compared with those that plain Keras takes with the batches of all
workers together.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import re
import time
import weakref
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_onebit.tf as onebit
from horovod_onebit import ConfigurationError, DesyncError, UnsupportedError, face
from horovod_onebit.tf import elastic
from horovod_onebit.tools.monitor import read
from horovod_onebit.warmup import Phase
from tests.long import LONG
from tests.ranks.keras_common import LOSS, RANK, SIZE, assert_replicas_equal, batch, build, gradients, weights, wrap

layers = keras.layers
ROWS = 8  # of a batch
EXACT, STEPS = 3, 8


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    """Optimizers are told apart by the order in which they were built: the tests before built different ones."""
    face._named.clear()
    yield
    keras.backend.clear_session(free_memory=False)


def adamw(**options):
    return keras.optimizers.AdamW(3e-3, **options)


@dataclasses.dataclass
class Case:
    """A way to train: ``data`` gives what ``fit`` is called with, for so many rows of a random generator."""

    build: Callable[[], keras.Model]
    data: Callable[[np.random.Generator, int], dict[str, Any]]
    compile: dict[str, Any] = dataclasses.field(default_factory=lambda: {"loss": LOSS})
    optimizer: Callable[[], keras.optimizers.Optimizer] = adamw
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    wrap: dict[str, Any] = dataclasses.field(default_factory=dict)
    policy: str = "float32"
    plain: Callable[[], keras.optimizers.Optimizer] | None = None  # what plain Keras is to train with, if another


def features(random, rows):
    x = random.standard_normal((rows, 32)).astype(np.float32)
    return {"x": x, "y": x[:, :10].argmax(1)}


def images(random, rows):
    y = random.integers(0, 4, rows)
    x = random.uniform(0, 60, (rows, 32, 32, 3)) + 60 * y[:, None, None, None]
    return {"x": x.astype(np.float32), "y": y}


def sequences(random, rows):
    x = random.standard_normal((rows, 6, 8)).astype(np.float32)
    return {"x": x, "y": x.sum(1)[:, :4].argmax(1)}


def tokens(random, rows):
    x = random.integers(1, 40, (rows, 12))
    x[:, 8:] *= random.integers(0, 2, (rows, 1))  # 0 is masked
    return {"x": x, "y": (x[:, 0] > 20).astype(np.int64)}


def two_inputs_and_outputs(random, rows):
    title, tags = random.standard_normal((rows, 32)), random.standard_normal((rows, 8))
    y = {"priority": title[:, :1] + tags[:, :1], "department": tags[:, :4].argmax(1)}
    return {"x": {"title": title.astype(np.float32), "tags": tags.astype(np.float32)}, "y": y}


def weighted(random, rows):
    return features(random, rows) | {"sample_weight": random.uniform(0, 2, rows).astype(np.float32)}


def pairs(random, rows):
    left, right = random.standard_normal((2, rows, 32)).astype(np.float32)
    return {"x": [left, right], "y": (left[:, :1] * right[:, :1] > 0).astype(np.float32)}


def dense():
    return keras.Sequential([layers.Input((32,)), layers.Dense(64, activation="relu"), layers.Dense(10)])


def of_two_inputs_and_outputs():
    title, tags = layers.Input((32,), name="title"), layers.Input((8,), name="tags")
    both = layers.concatenate([layers.Dense(64, activation="relu")(title), tags])
    outputs = [layers.Dense(1, name="priority")(both), layers.Dense(4, name="department")(both)]
    return keras.Model([title, tags], outputs)


class OwnTrainStep(keras.Model):
    """As the guide "Customizing what happens in fit() with TensorFlow"."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = layers.Dense(64, activation="relu"), layers.Dense(10)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, x, training=False):
        return self.head(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        trainable_vars = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, trainable_vars), trainable_vars)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


def built(model, shape):
    model.build(shape)
    return model


def recurrent(layer):
    return lambda: keras.Sequential([layers.Input((6, 8)), layer(24), layers.Dense(4)])


def masked():
    return keras.Sequential(
        [layers.Input((12,)), layers.Embedding(40, 16, mask_zero=True), layers.LSTM(16), layers.Dense(2)]
    )


def transformer():
    """A block as in the example of text classification."""
    inputs = layers.Input((12,))
    x = layers.Embedding(40, 32)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, activation="relu")(x)))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def shared_layers():
    left, right = layers.Input((32,)), layers.Input((32,))
    tower = keras.Sequential([layers.Dense(48, activation="tanh"), layers.Dense(16)])
    return keras.Model([left, right], layers.Dense(1)(layers.multiply([tower(left), tower(right)])))


class Penalized(layers.Layer):
    """A layer with a loss of its own."""

    def call(self, x):
        self.add_loss(1e-3 * keras.ops.mean(x**2))
        return x


def penalized():
    hidden = layers.Dense(64, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-3))
    return keras.Sequential([layers.Input((32,)), hidden, Penalized(), layers.Dense(10)])


def convolutions():
    """Layers of ``keras.applications``, and dropout and augmentation, which differ between workers."""
    scale = layers.Normalization(mean=[1.0, 1.1, 1.2], variance=[1.0, 2.0, 3.0])
    before = [layers.RandomFlip("horizontal"), layers.Rescaling(1 / 64), scale, layers.ZeroPadding2D(1)]
    first = [layers.Conv2D(16, 3, strides=2), layers.BatchNormalization(), layers.ReLU(6.0)]
    second = [layers.DepthwiseConv2D(3), layers.BatchNormalization(), layers.Conv2D(24, 1), layers.Dropout(0.2)]
    return keras.Sequential(
        [layers.Input((32, 32, 3)), *before, *first, *second, layers.GlobalAveragePooling2D(), layers.Dense(4)]
    )


def scheduled():
    rate = keras.optimizers.schedules.CosineDecay(1e-4, 20, warmup_target=5e-3, warmup_steps=4)
    return keras.optimizers.AdamW(rate)


def scaled():
    return keras.optimizers.LossScaleOptimizer(adamw(), initial_scale=256.0)


class OfDenseGradients(keras.optimizers.AdamW):
    """Keras squares the entries of a sparse gradient one by one, before those of one row are added up."""

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.convert_to_tensor(grad) for grad in grads], trainable_variables)


def steady(**options):
    """Where gradients are nothing but rounding errors (an attention's bias of the keys), it takes small steps."""
    return adamw(epsilon=1e-3, **options)


DENSE = (dense, features)
TEXT = {
    "optimizer": steady,
    "wrap": {"sparse_as_dense": True},
    "plain": lambda: OfDenseGradients(3e-3, epsilon=1e-3),
}
CASES = {
    "two inputs and outputs": Case(
        of_two_inputs_and_outputs, two_inputs_and_outputs,
        {
            "loss": {"priority": "mse", "department": LOSS}, "loss_weights": {"priority": 0.5, "department": 1.0},
            "metrics": {"priority": ["mae"], "department": ["accuracy"]},
        },
    ),
    "own train_step": Case(lambda: built(OwnTrainStep(), (None, 32)), features),
    "steps_per_execution": Case(*DENSE, {"loss": LOSS, "steps_per_execution": 2, "metrics": ["accuracy"]}),
    "sample_weight": Case(dense, weighted, {"loss": LOSS, "weighted_metrics": ["accuracy"]}),
    "class_weight": Case(*DENSE, fit={"class_weight": {i: 1.0 + i / 4 for i in range(10)}}),
    "LSTM": Case(recurrent(layers.LSTM), sequences),
    "GRU": Case(recurrent(lambda units: layers.Bidirectional(layers.GRU(units))), sequences),
    "embedding with a mask": Case(masked, tokens, **TEXT),
    "attention": Case(transformer, tokens, **TEXT),
    "shared layers": Case(shared_layers, pairs, {"loss": keras.losses.BinaryCrossentropy(from_logits=True)}),
    "losses of layers": Case(penalized, features),
    "clipnorm": Case(*DENSE, optimizer=lambda: adamw(clipnorm=0.05)),
    "global_clipnorm": Case(*DENSE, optimizer=lambda: adamw(global_clipnorm=0.1)),
    "clipvalue": Case(*DENSE, optimizer=lambda: adamw(clipvalue=0.01)),
    "use_ema": Case(*DENSE, optimizer=lambda: adamw(use_ema=True, ema_momentum=0.5)),
    "ema_overwrite_frequency": Case(
        *DENSE, optimizer=lambda: adamw(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    ),
    "CosineDecay with a warm-up": Case(*DENSE, optimizer=scheduled),
    "mixed_float16": Case(*DENSE, optimizer=scaled, policy="mixed_float16"),
    "mixed_bfloat16": Case(*DENSE, optimizer=steady, policy="mixed_bfloat16"),
}  # fmt: skip

OF_ITS_OWN = {"convolutions": Case(convolutions, images, {"loss": LOSS, "metrics": ["accuracy"]})}
"""Their exact steps are not those of one process: each worker normalizes by its own batch and drops its own units."""


@contextlib.contextmanager
def policy_of(case):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(case.policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def of_worker(case, rank, steps):
    """What ``fit`` gets on a worker: so many batches."""
    return [case.data(np.random.default_rng([step, rank]), ROWS) for step in range(steps)]


def joined(parts):
    """One argument of ``fit`` from those of several batches."""
    return keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *parts)


def fit(model, batches, rows=ROWS, **options):
    return model.fit(**joined(batches), batch_size=rows, shuffle=False, verbose=0, **options)


def ours():
    return [onebit.callbacks.BroadcastGlobalVariablesCallback(0), onebit.callbacks.MetricAverageCallback()]


def model_of(case, optimizer):
    keras.utils.set_random_seed(0)
    with policy_of(case):
        model = case.build()
        model.compile(optimizer=optimizer, jit_compile=False, **case.compile)
    return model


@pytest.mark.parametrize("name", CASES)
def test_exact_steps_are_those_of_keras_with_the_batches_of_all(name):
    case, steps = CASES[name], 4
    model = model_of(case, wrap(case.optimizer(), warmup_steps=100, **case.wrap))
    fit(model, of_worker(case, RANK, steps), **case.fit)
    plain = model_of(case, (case.plain or case.optimizer)())
    others = [of_worker(case, rank, steps) for rank in range(SIZE)]
    fit(plain, [joined(parts) for parts in zip(*others, strict=True)], SIZE * ROWS, **case.fit)
    low = case.policy != "float32"
    np.testing.assert_allclose(weights(model), weights(plain), rtol=1e-3, atol=2e-3 if low else 3e-5)
    assert_replicas_equal(model)


@pytest.mark.parametrize("name", [*CASES, *OF_ITS_OWN])
def test_compressed_steps_leave_replicas_equal_and_the_loss_falls(name):
    case = (CASES | OF_ITS_OWN)[name]
    model = model_of(case, wrap(case.optimizer(), warmup_steps=EXACT, **case.wrap))
    history = fit(model, of_worker(case, RANK, STEPS), epochs=4, callbacks=ours(), **case.fit).history
    assert model.optimizer.phase is Phase.COMPRESSED
    assert model.optimizer.stats().step == 4 * STEPS
    assert history["loss"][-1] < history["loss"][0]
    assert_replicas_equal(model)
    onebit.check_replicas(model.optimizer)
    assert len({str(one) for one in hvd.allgather_object(history)}) == 1


APPLICATIONS = {
    "MobileNetV2": lambda **k: keras.applications.MobileNetV2(alpha=0.35, **k),
    "EfficientNetB0": keras.applications.EfficientNetB0,
    "ResNet50V2": keras.applications.ResNet50V2,
}


def application(name):
    """Without the weights that Keras would download; of four classes."""
    return APPLICATIONS[name](weights=None, input_shape=(32, 32, 3), classes=4, classifier_activation=None)


@LONG
@pytest.mark.parametrize("name", APPLICATIONS)
def test_a_model_of_keras_applications(name):
    case = Case(lambda: application(name), images, optimizer=lambda: keras.optimizers.AdamW(3e-4))
    model = model_of(case, wrap(case.optimizer(), warmup_steps=EXACT))
    history = fit(model, of_worker(case, RANK, 2), epochs=6, callbacks=ours()).history
    assert model.optimizer.phase is Phase.COMPRESSED
    assert history["loss"][-1] < history["loss"][0]
    assert_replicas_equal(model)


# -- training in parts, evaluation, what is refused --------------------------------------------------------------------


def test_a_frozen_base_is_trained_after_its_head():
    """As the guide "Transfer learning & fine-tuning"."""
    keras.utils.set_random_seed(RANK)
    base = keras.Sequential([layers.Input((32,)), layers.Dense(64, activation="relu"), layers.BatchNormalization()])
    inputs = layers.Input((32,))
    model = keras.Model(inputs, layers.Dense(10)(base(inputs, training=False)))
    batches, case = of_worker(CASES["clipnorm"], RANK, STEPS), CASES["clipnorm"]

    def stage(rate):
        model.compile(optimizer=wrap(keras.optimizers.Adam(rate), EXACT), jit_compile=False, **case.compile)
        losses = fit(model, batches, epochs=2, callbacks=ours()).history["loss"]
        assert model.optimizer.phase is Phase.COMPRESSED
        assert losses[-1] < losses[0]
        assert_replicas_equal(model)
        return [np.array(weight) for weight in base.weights]

    base.trainable = False
    frozen = stage(1e-2)
    base.trainable = True
    tuned = stage(1e-3)
    assert all((moving == start).all() for moving, start in zip(frozen[4:], (0, 1), strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(frozen[:4], tuned[:4], strict=True))


@pytest.mark.parametrize("averaged", [True, False])
def test_metrics_of_validation_are_the_mean_of_the_workers_or_each_ones_own(averaged):
    case = CASES["steps_per_execution"]
    model = model_of(case, wrap(adamw(), EXACT))
    part = joined(of_worker(case, SIZE + RANK, 2 + RANK))
    callbacks = ours()[: 2 if averaged else 1]
    validation = (part["x"], part["y"])
    history = fit(
        model, of_worker(case, RANK, STEPS), epochs=2, callbacks=callbacks, validation_data=validation
    ).history
    own = model.evaluate(*validation, batch_size=ROWS, verbose=0, return_dict=True)
    every = hvd.allgather_object(own)
    assert every[0] != every[1]
    for name in ("loss", "accuracy"):
        expected = np.mean([one[name] for one in every]) if averaged else own[name]
        assert history[f"val_{name}"][-1] == pytest.approx(expected, rel=1e-5)


def accumulating():
    wrap(adamw(gradient_accumulation_steps=2))


def compiled_by_xla():
    keras.utils.set_random_seed(0)
    model = dense()
    model.compile(optimizer=wrap(adamw()), loss=LOSS, jit_compile=True)
    fit(model, of_worker(CASES["clipnorm"], RANK, 2))


def scaled_by_keras():
    case = dataclasses.replace(CASES["mixed_float16"], optimizer=adamw)
    with policy_of(case):
        fit(model_of(case, wrap(adamw())), of_worker(case, RANK, 2))


def sparse():
    case = CASES["attention"]
    fit(model_of(case, wrap(adamw())), of_worker(case, RANK, 2))


def recompiled_without_a_new_optimizer():
    model, case = dense(), CASES["clipnorm"]
    model.layers[0].trainable = False
    optimizer = wrap(adamw())
    for frozen in (True, False):
        model.layers[0].trainable = not frozen
        model.compile(optimizer=optimizer, jit_compile=False, **case.compile)
        fit(model, of_worker(case, RANK, 2))


REFUSED = {
    "gradient_accumulation_steps": (accumulating, "backward_passes_per_step"),
    "jit_compile=True": (compiled_by_xla, "jit_compile=False"),
    "mixed_float16 without a scale": (scaled_by_keras, "LossScaleOptimizer"),
    "sparse gradients": (sparse, "sparse_as_dense=True"),
    "recompiled without a new optimizer": (recompiled_without_a_new_optimizer, "make a new optimizer"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_says_what_to_do(what):
    keras.utils.set_random_seed(0)  # the same weights on all workers
    call, text = REFUSED[what]
    with pytest.raises((UnsupportedError, ConfigurationError, tf.errors.OpError), match=text):
        call()


# -- callbacks ---------------------------------------------------------------------------------------------------------


class Metrics(keras.callbacks.Callback):
    """A metric of validation that each worker has its own values of."""

    def __init__(self, *of_workers):
        super().__init__()
        self.values = of_workers[RANK % len(of_workers)]

    def on_epoch_end(self, epoch, logs=None):
        logs["val_loss"] = self.values[epoch]


class Weights(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.of_epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.of_epochs.append(weights(self.model))


def trained(optimizer, callbacks, epochs=6, steps=2, batches=None, **options):
    case = CASES["clipnorm"]
    model = model_of(case, optimizer)
    fit(model, batches or of_worker(case, RANK, steps), epochs=epochs, callbacks=callbacks, **options)
    return model


def test_metrics_that_are_arrays_are_averaged_and_written_element_by_element(tmp_path):
    own = [np.array([[1.0, 2.0], [3.0, RANK]], np.float32), np.array([4.0 * RANK])]
    logs = {"f1": own[0], "one": own[1], "loss": 2.0 * RANK}
    onebit.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    mean = np.arange(SIZE).mean()
    np.testing.assert_allclose(logs["f1"], [[1, 2], [3, mean]])
    np.testing.assert_allclose(logs["one"], [4 * mean])
    assert isinstance(logs["loss"], float)
    assert logs["loss"] == pytest.approx(2 * mean)
    case, path = CASES["clipnorm"], tmp_path / "run.jsonl"
    model = model_of(case, wrap(adamw(), EXACT))
    each = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(f1=tf.constant(own[0])))
    writing = [onebit.callbacks.StatsCallback(str(tmp_path / "board")), onebit.callbacks.StatsCallback(jsonl=path)]
    fit(model, of_worker(case, RANK, 2), callbacks=[each, *writing])
    if RANK == 0:
        assert [row["f1"] for row in read(path)] == [[[1, 2], [3, 0]]]


def test_metrics_of_other_shapes_are_an_error_on_all():
    with pytest.raises(DesyncError, match="f1"):
        onebit.callbacks.MetricAverageCallback().on_epoch_end(0, {"f1": np.ones(2 + RANK)})


DECIDING = ("broadcast", "average", "stop", "reduce")


@pytest.mark.parametrize("order", itertools.permutations(DECIDING), ids="-".join)
def test_callbacks_that_decide_by_metrics_in_every_order(order):
    """Worker 0 alone would stop after its third epoch, worker 1 after its fourth."""
    callbacks = {
        "broadcast": onebit.callbacks.BroadcastGlobalVariablesCallback(0),
        "average": onebit.callbacks.MetricAverageCallback(),
        "stop": keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        "reduce": keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5, min_delta=0),
    }
    metrics, seen = Metrics([1.0, 2, 3, 4, 5, 6], [9.0, 6, 7, 8, 9, 9]), Weights()
    listed = [metrics, *(callbacks[name] for name in order), seen]
    first = next(name for name in order if name != "broadcast")
    if first != "average":
        with pytest.raises(ConfigurationError, match="put MetricAverageCallback before"):
            trained(wrap(adamw(), EXACT), listed)
        return
    model = trained(wrap(adamw(), EXACT), listed)
    assert len(seen.of_epochs) == 4
    assert float(model.optimizer.learning_rate) == pytest.approx(3e-3 / 4)
    np.testing.assert_array_equal(weights(model), seen.of_epochs[1])
    fit(model, of_worker(CASES["clipnorm"], RANK, STEPS))
    assert model.optimizer.phase is Phase.COMPRESSED
    assert_replicas_equal(model)


def callbacks_of_keras(folder, backup):
    """With those of this library. Files of the run are written by worker 0, the state to resume from by each."""
    own = [
        onebit.callbacks.BroadcastGlobalVariablesCallback(0),
        onebit.callbacks.MetricAverageCallback(),
        onebit.callbacks.ReplicaCheckCallback(3),
        onebit.callbacks.BestModelCheckpoint(str(folder / "ours.keras")),
    ]
    k = keras.callbacks
    everywhere = [
        k.LearningRateScheduler(lambda epoch, rate: 3e-3 / (1 + epoch)),
        k.TerminateOnNaN(),
        k.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        k.BackupAndRestore(str(backup)),
    ]
    writing = [
        k.ModelCheckpoint(str(folder / "best.keras"), save_best_only=True),
        k.ModelCheckpoint(str(folder / "last.keras")),
        k.ModelCheckpoint(str(folder / "{epoch}.weights.h5"), save_weights_only=True),
        k.CSVLogger(str(folder / "log.csv")),
        k.TensorBoard(str(folder / "tensorboard"), histogram_freq=1, update_freq="batch"),
    ]
    return [*((1, one) for one in own), *((1, one) for one in everywhere), *((RANK == 0, one) for one in writing)]


@pytest.mark.parametrize("seed", range(8))
def test_callbacks_that_write_and_schedule_in_any_order(seed, tmp_path):
    folder = tmp_path
    listed = callbacks_of_keras(folder, folder / "backup")
    listed = [listed[i][1] for i in np.random.default_rng(seed).permutation(len(listed)) if listed[i][0]]
    part = joined(of_worker(CASES["clipnorm"], SIZE + RANK, 2))
    model = trained(wrap(adamw(), EXACT), listed, epochs=3, steps=4, validation_data=(part["x"], part["y"]))
    assert model.optimizer.phase is Phase.COMPRESSED
    assert float(model.optimizer.learning_rate) == pytest.approx(1e-3)
    assert_replicas_equal(model)
    onebit.check_replicas(model.optimizer)
    if RANK == 0:
        assert len((folder / "log.csv").read_text().splitlines()) == 4
        assert list((folder / "tensorboard").rglob("events*"))
        for name in ("last.keras", "best.keras", "ours.keras"):
            keras.models.load_model(folder / name)
        again = keras.models.load_model(folder / "last.keras")
        np.testing.assert_array_equal(weights(again), weights(model))
        model.load_weights(folder / "3.weights.h5")
        np.testing.assert_array_equal(weights(again), weights(model))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("recipe", ["exact", "robust"])
def test_backup_and_restore_goes_on_where_a_run_was_interrupted(recipe, first, tmp_path):
    """In either order with the broadcast."""

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 3:
                raise InterruptedError

    def run(name, *more):
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / name))
        pair = [backup, onebit.callbacks.BroadcastGlobalVariablesCallback(0)]
        listed = [pair[first], pair[1 - first], onebit.callbacks.MetricAverageCallback(), *more]
        return trained(wrap(adamw(), EXACT, recipe=recipe), listed, epochs=5)

    with pytest.raises(InterruptedError):
        run("interrupted", Interrupt())
    again, whole = run("interrupted"), run("whole")
    assert int(again.optimizer.iterations) == int(whole.optimizer.iterations) == 10
    assert again.optimizer.phase is (Phase.WARMUP if recipe == "exact" else Phase.COMPRESSED)
    assert_replicas_equal(again)
    if recipe == "exact":  # otherwise the residuals are lost, which save_checkpoint keeps
        np.testing.assert_array_equal(weights(again), weights(whole))


def test_weights_are_swapped_with_their_average():
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    listed = [*ours(), swap, onebit.callbacks.ReplicaCheckCallback(1)]
    model = trained(wrap(adamw(use_ema=True), EXACT), listed, epochs=3)
    assert model.optimizer.phase is Phase.COMPRESSED
    assert_replicas_equal(model)


# -- what a worker decides alone ---------------------------------------------------------------------------------------


class StopAt(keras.callbacks.Callback):
    """As one that stops by the time of day."""

    def __init__(self, batch=None, epoch=None):
        super().__init__()
        self.batch, self.epoch = batch, epoch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training |= batch == self.batch

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training |= epoch == self.epoch


ALONE = RANK == SIZE - 1


def run_with(*callbacks, alone=(), own=ours, **options):
    return trained(wrap(adamw(), EXACT), [*callbacks, *own(), *(alone if ALONE else ())], **options)


def nothing():
    return []


def nan_of_one(folder):
    batches = of_worker(CASES["sample_weight"], RANK, 4)
    if ALONE:
        batches[1]["sample_weight"][0] = np.nan
    run_with(keras.callbacks.TerminateOnNaN(), batches=batches)


def backup_of_one(folder):
    backup = keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)
    run_with(alone=[backup], epochs=2)
    face._named.clear()
    run_with(alone=[keras.callbacks.BackupAndRestore(str(folder))], epochs=4)


FALLS_ON_ONE = ([1.0, 2, 3, 4, 5, 6], [9.0, 8, 7, 6, 5, 4])
STOPS = keras.callbacks.EarlyStopping


def best_epoch_of_one(folder):
    stop = STOPS("val_loss", patience=9, restore_best_weights=True)
    model = run_with(Metrics(*FALLS_ON_ONE), stop, own=nothing)
    fit(model, of_worker(CASES["clipnorm"], RANK, 2), epochs=1)


DECISIONS = {
    "EarlyStopping, metrics not averaged": (
        lambda _: run_with(Metrics(*FALLS_ON_ONE), STOPS("val_loss", patience=1), own=nothing),
        "the end of fit, after a callback has stopped",
    ),
    "EarlyStopping restores the best weights, metrics not averaged": (
        best_epoch_of_one, r"dense/kernel#0 of worker \d differs from that of worker 0"
    ),
    "EarlyStopping on one": (
        lambda _: run_with(Metrics([1.0] * 6), alone=[STOPS("val_loss", patience=1)]),
        "the end of fit, after a callback has stopped",
    ),
    "ReduceLROnPlateau, metrics not averaged": (
        lambda _: run_with(
            Metrics(*FALLS_ON_ONE), keras.callbacks.ReduceLROnPlateau("val_loss", patience=1), own=nothing
        ),
        "the learning rate differs",
    ),
    "LearningRateScheduler on one": (
        lambda _: run_with(alone=[keras.callbacks.LearningRateScheduler(lambda epoch: 1e-3)]),
        "the learning rate differs",
    ),
    "a stop between epochs": (lambda _: run_with(alone=[StopAt(epoch=1)]), "the end of fit, after a callback"),
    "a stop between batches": (
        lambda _: run_with(alone=[StopAt(batch=1)], steps=4), "average of metrics, after a callback has stopped"
    ),
    "TerminateOnNaN": (nan_of_one, "average of metrics, after a callback has stopped"),
    "fewer epochs": (lambda _: run_with(epochs=2 if ALONE else 3), "the end of fit on worker"),
    "fewer batches": (lambda _: run_with(steps=1 if ALONE else 2, own=nothing, epochs=1), "the end of fit on worker"),
    "initial_epoch": (
        lambda _: run_with(initial_epoch=2 if ALONE else 0), "fit from epoch 3, by initial_epoch"
    ),
    "BackupAndRestore on one": (backup_of_one, "BackupAndRestore, which must be the same"),
}  # fmt: skip


@pytest.mark.parametrize("what", DECISIONS)
def test_what_a_worker_decides_alone_is_an_error_on_all(what, tmp_path):
    call, text = DECISIONS[what]
    start = time.monotonic()
    with pytest.raises((DesyncError, tf.errors.OpError), match=text):
        call(tmp_path)
    assert time.monotonic() - start < 60


def of_unknown_length(batches):
    """Batches of so many steps; TensorFlow does not know how many, as of files, filters and generators. One worker
    sees late that there are no more."""

    def generate():
        yield from map(batch, range(batches))
        time.sleep(0.3 * ALONE)

    of_types = tf.TensorSpec((16, 32), tf.float32), tf.TensorSpec((16,), tf.int64)
    return tf.data.Dataset.from_generator(generate, output_signature=of_types)


class OneHead(keras.Model):
    """The gradients of its last variables need no batch."""

    def __init__(self):
        super().__init__()
        self.body, self.head = build(), layers.Dense(64)
        self.head.build((None, 10))

    def call(self, x):
        return self.body(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=data[1], y_pred=self(data[0]))
        variables = self.trainable_variables
        grads = zip(tape.gradient(loss, variables), variables, strict=True)
        self.optimizer.apply([keras.ops.zeros_like(v) if g is None else g for g, v in grads], variables)
        return {"loss": loss}


class OwnFunction(OneHead):
    """The function that ``fit`` calls is the user's."""

    def make_train_function(self, force=False):
        self.train_function = tf.function(lambda iterator: self.train_step(next(iterator)))
        return self.train_function


@pytest.mark.parametrize("make", [build, OneHead, OwnFunction])
@pytest.mark.parametrize(
    "options",
    [{"warmup_steps": 3}, {"recipe": "exact", "backward_passes_per_step": 2}, {"schedule": onebit.Local(4, freeze=4)}],
    ids=str,
)
def test_a_dataset_of_unknown_length_trains_as_one_of_known_length(options, make):
    def reached(known):
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(optimizer=onebit.DistributedOptimizer(adamw(), **options), loss=LOSS, jit_compile=False)
        data = of_unknown_length(3)
        model.fit(data.apply(tf.data.experimental.assert_cardinality(3)) if known else data, epochs=4, verbose=0)
        return model.get_weights()

    for found, expected in zip(reached(known=False), reached(known=True), strict=True):
        np.testing.assert_array_equal(found, expected)


def within(model, optimizer, how):
    """A loop's step that fetches its batch within ``tf.function``, as in TensorFlow's guides; the last gradient needs
    no batch."""

    def apply(grads):
        grads = [*grads[:-1], tf.zeros(10)]
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    def train(rate, x, y):
        grads, loss = gradients(model, x, y)
        apply([g * rate for g in grads])
        return loss

    nested, apply_nested = tf.function(train), tf.function(apply)

    def branch(iterator):
        batch = next(iterator)
        if optimizer.iterations < 99:
            train(1.0, *batch)

    def summed(iterator):
        grads = [tf.zeros_like(v) for v in model.trainable_variables]
        for _ in tf.range(3):
            more, _ = gradients(model, *next(iterator))
            grads = [g + m for g, m in zip(grads, more, strict=True)]
        apply(grads)

    return {
        "one function": lambda iterator: train(1.0, *next(iterator)),
        "a nested function": lambda iterator: nested(tf.constant(1.0), *next(iterator)),
        "gradients go to a nested function": lambda iterator: apply_nested(gradients(model, *next(iterator))[0]),
        "a branch": branch,
        "a sum over batches": summed,
    }[how]


@pytest.mark.parametrize(
    "how",
    ["one function", "a nested function", "gradients go to a nested function", "a branch", "a sum over batches"],
)
@pytest.mark.parametrize("options", [{"warmup_steps": 3}, {"schedule": onebit.Local(4, freeze=4)}], ids=str)
def test_a_loop_whose_function_fetches_the_batch(options, how):
    model = build()
    optimizer = onebit.DistributedOptimizer(adamw(), **options)
    optimizer.build(model.trainable_variables)
    step, count, steps = tf.function(within(model, optimizer, how)), 0, 1 if how == "a sum over batches" else 3
    for _ in range(4):
        iterator = iter(of_unknown_length(3))
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                step(iterator)
                count += 1
    optimizer.flush()
    assert count == int(optimizer.iterations) == optimizer.stats().step == 4 * steps
    assert_replicas_equal(model)


def test_datasets_of_unknown_and_other_lengths_are_an_error_on_all():
    model = build()
    model.compile(optimizer=wrap(adamw(), EXACT), loss=LOSS, jit_compile=False)
    with pytest.raises((DesyncError, tf.errors.OpError), match="the end of fit on worker"):
        model.fit(of_unknown_length(2 if ALONE else 3), verbose=0)


@pytest.mark.parametrize("options", [{}, {"schedule": onebit.Local(2)}], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_that_is_not_used_any_more_is_freed(options, scaled):
    model = build()
    plain = keras.optimizers.LossScaleOptimizer(adamw()) if scaled else adamw()
    model.compile(optimizer=onebit.DistributedOptimizer(plain, **options), loss=LOSS, jit_compile=False)
    model.fit(*batch(0), epochs=4, verbose=0, callbacks=ours())
    compressor = weakref.ref(model.optimizer._compressor)
    assert compressor() is not None
    del model, plain
    gc.collect()
    assert compressor() is None


class OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Without a configuration, as in many tutorials: that is needed only to save the whole model."""

    def __call__(self, step):
        return 1e-3 * tf.minimum(1.0, tf.cast(step + 1, tf.float32) / 10)


RATES = {
    "one bit": (OwnSchedule(), {"warmup_steps": 3}),
    "exact": (lambda: 1e-3, {"recipe": "exact"}),
    "local": (OwnSchedule(), {"schedule": onebit.Local(every=2)}),
}


@pytest.mark.parametrize(("rate", "options"), RATES.values(), ids=RATES)
def test_a_schedule_without_a_configuration(rate, options):
    model = build()
    model.compile(optimizer=onebit.DistributedOptimizer(keras.optimizers.AdamW(rate), **options), loss=LOSS)
    model.fit(*batch(0), epochs=6, verbose=0)
    assert int(model.optimizer.iterations) == 6
    assert_replicas_equal(model)
    plain = onebit.plain_optimizer(model.optimizer)
    assert float(plain.learning_rate) == float(model.optimizer.learning_rate)
    plain.apply([tf.ones_like(v) for v in model.trainable_variables], model.trainable_variables)


@pytest.mark.parametrize("autograph", [True, False])
def test_an_optimizer_that_is_built_within_a_function_of_tensorflow(autograph):
    model = build()
    optimizer = wrap(keras.optimizers.Adam(1e-3), warmup_steps=2)

    @tf.function(autograph=autograph)
    def step(x, y):
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        grads, _ = gradients(model, x, y)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    for number in range(4):
        step(*map(tf.constant, batch(number)))
    assert optimizer.phase is Phase.COMPRESSED
    assert_replicas_equal(model)


@pytest.mark.parametrize("how", ["callback", "elastic", "a loop"])
def test_what_worker_0_has_adapted_is_what_all_compute_with(how):
    x = np.random.default_rng(0).normal(3.0, 2.0, (64, 32)).astype(np.float32)
    keras.utils.set_random_seed(0)
    norm = layers.Normalization()
    model = keras.Sequential([layers.Input((32,)), norm, layers.Dense(64, activation="relu"), layers.Dense(10)])
    if RANK == 0:
        norm.adapt(x)
    model.compile(optimizer=wrap(keras.optimizers.Adam(1e-3)), loss=LOSS)
    if how == "callback":
        callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(x, x[:, :10].argmax(1), verbose=0, callbacks=callbacks)
    elif how == "a loop":
        model.optimizer.build(model.trainable_variables)
        onebit.broadcast_variables([*model.variables, *model.optimizer.variables], model=model)
    else:
        model.optimizer.build(model.trainable_variables)
        elastic.KerasState(model).sync()
    found = np.array(norm(x))
    assert abs(found.mean()) < 0.01
    assert found.std() == pytest.approx(1, rel=0.05)


def test_fit_is_traced_again_only_where_a_layer_has_adapted_to_other_data():
    keras.utils.set_random_seed(RANK)
    x = np.random.default_rng(0).normal(3.0, 2.0, (64, 32)).astype(np.float32)
    norm = layers.Normalization()
    norm.adapt(x)
    model = keras.Sequential([layers.Input((32,)), norm, layers.Dense(64, activation="relu"), layers.Dense(10)])
    model.compile(optimizer=wrap(adamw(), EXACT), loss=LOSS, jit_compile=False)

    def fit_again():
        before, made = model.train_function, len(model.optimizer._compressor.host_functions._works)
        model.fit(*batch(0), verbose=0, callbacks=ours(), validation_data=batch(1))
        return model.train_function is not before, len(model.optimizer._compressor.host_functions._works) > made

    assert fit_again() == (True, True)
    fit_again()
    tested = model.test_function
    assert fit_again() == (False, False)
    assert model.test_function is tested
    if RANK == 0:
        norm.adapt(10 * x)
    assert fit_again() == (True, True)
    assert model.test_function is not tested
    assert abs(np.array(norm(10 * x)).mean()) < 0.01
    assert_replicas_equal(model)


@pytest.mark.parametrize("kind", ["TextVectorization", "TF-IDF", "IntegerLookup", "Discretization"])
def test_layers_that_have_adapted_to_other_data_on_each_worker_are_an_error_on_all(kind):
    layer = {
        "TextVectorization": lambda: layers.TextVectorization(output_mode="multi_hot"),
        "TF-IDF": lambda: layers.TextVectorization(output_mode="tf_idf"),
        "IntegerLookup": lambda: layers.IntegerLookup(output_mode="multi_hot"),
        "Discretization": lambda: layers.Discretization(num_bins=4, output_mode="multi_hot"),
    }[kind]()
    text = kind in ("TextVectorization", "TF-IDF")
    if kind == "TF-IDF":  # the same words as often, in other documents
        layer.adapt(np.array(["word9 word8", "word9 word10"] if ALONE else ["word9 word9 word8", "word10"]))
    else:
        found = np.arange(8 if ALONE else 0, 64)
        words = np.array([f"word{i}" for i in found])
        layer.adapt(words if text else found.astype("float32" if kind == "Discretization" else "int64"))
    inputs = keras.Input((1,), dtype="string" if text else "int64")
    model = keras.Model(inputs, layers.Dense(10)(layer(inputs)))
    model.compile(optimizer=wrap(adamw()), loss=LOSS, jit_compile=False)
    x = tf.constant([["word9"]] * 8) if text else np.full((8, 1), 9)
    name = re.sub(r"_\d+$", "", layer.name)
    with pytest.raises(DesyncError, match=f"layer '{name}' has adapted to .* call adapt"):
        model.fit(x, np.zeros(8), verbose=0, callbacks=ours())


def test_layers_that_have_adapted_alike_and_have_other_numbers_in_their_names():
    if ALONE:
        layers.StringLookup()
    layer = layers.StringLookup(vocabulary=["a", "b"], output_mode="multi_hot")
    inputs = keras.Input((1,), dtype="string")
    model = keras.Model(inputs, layers.Dense(10)(layer(inputs)))
    model.compile(optimizer=wrap(adamw()), loss=LOSS, jit_compile=False)
    model.fit(tf.constant([["a"]] * 8), np.zeros(8), verbose=0, callbacks=ours())
    assert_replicas_equal(model)


def test_a_plain_optimizer_is_a_warning_on_worker_0(caplog):
    for optimizer in (keras.optimizers.Adam(1e-3), wrap(adamw())):
        caplog.clear()
        model = build()
        model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False)
        model.fit(*batch(0), epochs=2, verbose=0, callbacks=ours())
        said = [record.getMessage() for record in caplog.records if "plain Adam" in record.getMessage()]
        assert len(said) == (RANK == 0 and type(optimizer) is keras.optimizers.Adam)


def warned_of(model, caplog):
    caplog.clear()
    model.fit(*batch(0), verbose=0, callbacks=ours())
    said = " ".join(record.getMessage() for record in caplog.records)
    return re.findall(r"a plain ([A-Z]\w+(?: \([^)]*\))?)", said)


def test_a_multi_optimizer_with_a_plain_one_in_it_is_a_warning_on_worker_0(caplog):
    for bias, plain in ((wrap(adamw()), []), (keras.optimizers.SGD(0.1), ["SGD (optimizer.optimizers[1])"])):
        weight, model = wrap(adamw()), build()
        chosen = {"bias": bias, "kernel": weight}
        model.held = optimizer = keras.optimizers.MultiOptimizer(lambda v, chosen=chosen: chosen[v.name])
        model.compile(optimizer=optimizer, loss=LOSS, run_eagerly=True)
        assert warned_of(model, caplog) == (plain if RANK == 0 else [])


class Pair(keras.Model):
    """Two parts, each with an optimizer of its own, beside the one that ``compile`` makes."""

    def __init__(self, *optimizers):
        super().__init__()
        self.parts, self.optimizers = [build(), build(1)], dict(zip("ab", optimizers, strict=True))

    def train_step(self, data):
        x, y = data
        for part, optimizer in zip(self.parts, self.optimizers.values(), strict=True):
            grads, loss = gradients(part, x, y)
            optimizer.apply_gradients(zip(grads, part.trainable_variables, strict=True))
        return {"loss": loss}


def test_a_plain_optimizer_beside_wrapped_ones_is_a_warning_on_worker_0(caplog):
    for second, plain in ((wrap(adamw()), []), (keras.optimizers.SGD(0.1), ["SGD (optimizers['b'])"])):
        model = Pair(wrap(adamw()), second)
        model.base = build()
        model.base.compile("adam")  # as one that is loaded
        model.used = keras.optimizers.Adam(1e-3)
        model.wrapped = wrap(model.used)
        model.compile(run_eagerly=True)
        assert warned_of(model, caplog) == (plain if RANK == 0 else [])


def test_callbacks_count_batches_where_several_are_one_execution(tmp_path):
    model, x = build(), np.random.default_rng(RANK).standard_normal((96, 32)).astype(np.float32)
    model.compile(optimizer=wrap(keras.optimizers.Adam(0.1)), loss=LOSS, steps_per_execution=4)
    rise = onebit.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2)
    path = tmp_path / "run.jsonl"
    replicas = onebit.callbacks.ReplicaCheckCallback(6)
    stats = onebit.callbacks.StatsCallback(jsonl=str(path), every=6)
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0), rise, replicas, stats]
    model.fit(x, x[:, :10].argmax(1), batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    assert replicas.every.batches == 36
    if RANK == 0:
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == [8, 12, 20, 24, 32, 36]


def test_a_nan_that_all_workers_have_ends_the_run_of_all():
    batches = of_worker(CASES["sample_weight"], RANK, 4)
    batches[1]["sample_weight"][0] = np.nan
    seen = Weights()
    model = run_with(keras.callbacks.TerminateOnNaN(), seen, batches=batches)
    assert len(seen.of_epochs) == 1
    assert model.optimizer.stats().step == 1
    assert_replicas_equal(model)


class Apart(keras.Model):
    """Its parts are called, and never the model itself: Keras does not call it built."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = layers.Dense(64, activation="relu"), layers.Dense(10)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = LOSS(y, self.head(self.hidden(x)))
        trained = self.hidden.trainable_variables + self.head.trainable_variables
        self.optimizer.apply(tape.gradient(loss, trained), trained)
        return {"loss": loss}


@pytest.mark.parametrize("reused", [False, True])
def test_each_fit_broadcasts(reused):
    callback = onebit.callbacks.BroadcastGlobalVariablesCallback(0)
    keras.utils.set_random_seed(0)
    model = Apart()
    model.compile(optimizer=wrap(keras.optimizers.Adam(1e-3), warmup_steps=3))
    for fit_number in range(2):
        if fit_number and RANK:
            for v in model.trainable_variables:
                v.assign(keras.ops.zeros_like(v))
        again = callback if reused else onebit.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(*batch(0), verbose=0, callbacks=[again])
        assert_replicas_equal(model)
    assert np.abs(np.array(model.trainable_variables[0])).max() > 0.01


def dense_part(units, width=None):
    """A part of a model; without a ``width`` the first batch builds it."""
    first = [] if width is None else [layers.Input((width,))]
    return keras.Sequential([*first, layers.Dense(64, activation="relu"), layers.Dense(units)])


class Wgan(keras.Model):
    """As WGAN-GP of keras.io: the discriminator takes three steps to one of the generator, and nothing calls this model
    itself."""

    def __init__(self, generator, alone=False, late=False):
        super().__init__()
        self.discriminator, self.generator, self.alone, self.late = dense_part(1, 32), generator, alone, late

    def compile(self, d_optimizer, g_optimizer, **others):
        super().compile(**others)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def fake(self, x):
        return self.generator(tf.random.normal([tf.shape(x)[0], 8]), training=True)

    def discriminate(self, x, noise):
        with tf.GradientTape() as tape:
            fake = tf.random.normal(tf.shape(x)) if noise else self.fake(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                real = self.discriminator(x, training=True)
            slope = tf.norm(inner.gradient(real, x), axis=1)
            loss = tf.reduce_mean(self.discriminator(fake)) - tf.reduce_mean(real) + tf.reduce_mean((slope - 1) ** 2)
        variables = self.discriminator.trainable_variables
        self.d_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def train_step(self, x):
        for step in range(3):
            loss = self.discriminate(x, self.alone or (self.late and step == 0))
        if not self.alone:
            with tf.GradientTape() as tape:
                g_loss = -tf.reduce_mean(self.discriminator(self.fake(x)))
            variables = self.generator.trainable_variables
            self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, variables), variables, strict=True))
        self.alone = False
        return {"loss": loss}


GANS = {
    "one bit": {},
    "local": {"schedule": onebit.Local(4, doubling=0, freeze=6)},
    "a part without Input": {"width": None},
    "the discriminator first": {"width": None, "alone": True, "run_eagerly": True},
    "a generator that is built between two steps": {"width": None, "late": True},
    "loss scaling": {"width": None, "scaled": True},
    "compiled with a plain optimizer": {"width": None, "optimizer": "rmsprop"},
    "compiled with none": {"width": None, "optimizer": None, "schedule": onebit.Local(4, doubling=0, freeze=6)},
}


@pytest.mark.parametrize("case", GANS)
def test_whichever_optimizer_of_a_gan_steps_first_broadcasts(case):
    options = {"schedule": None, "width": 8, "alone": False, "late": False, "run_eagerly": False, "scaled": False}
    options |= GANS[case]
    keras.utils.set_random_seed(RANK)
    model = Wgan(dense_part(32, options["width"]), options["alone"], options["late"])
    schedule = options["schedule"]
    how = {"warmup_steps": 3} if schedule is None else {"schedule": schedule}
    plain = [keras.optimizers.Adam(1e-3) for _ in range(2)]
    plain = [keras.optimizers.LossScaleOptimizer(one) for one in plain] if options["scaled"] else plain
    both = [onebit.DistributedOptimizer(one, **how) for one in plain]
    compiled = options.get("optimizer", both[1])
    model.compile(*both, optimizer=compiled, run_eagerly=options["run_eagerly"], jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices(np.concatenate([batch(step)[0] for step in range(5)])).batch(16)
    broadcast = onebit.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(data, epochs=2, verbose=0, callbacks=[broadcast, onebit.callbacks.FlushCallback()])
    assert_replicas_equal(model)
    counts = [len(optimizer._trainable_variables) for optimizer in both]
    assert counts == [len(part.trainable_variables) for part in (model.discriminator, model.generator)]
    assert [int(optimizer.iterations) for optimizer in both] == [30, 9 if options["alone"] else 10]
    assert all(optimizer._compressor.before_step is None for optimizer in both)
    if schedule is None:
        assert [optimizer.phase for optimizer in both] == [Phase.COMPRESSED] * 2
    if compiled == "rmsprop":
        assert not model.optimizer.built


def test_the_moving_average_of_a_part_stays_in_that_part():
    keras.utils.set_random_seed(RANK)
    model = built(Adversary(), (None, 32))
    own = wrap(keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.5), warmup_steps=3)
    model.compile(optimizer=own, jit_compile=False)
    model.other = wrap(keras.optimizers.SGD(1e-2), warmup_steps=3)
    seen = Weights()
    model.fit(*batch(0), epochs=3, verbose=0, callbacks=[onebit.callbacks.BroadcastGlobalVariablesCallback(0), seen])
    assert_replicas_equal(model)
    size = weights(model.first).size
    np.testing.assert_array_equal(weights(model)[:size], seen.of_epochs[-1][:size])
    assert not np.array_equal(weights(model)[size:], seen.of_epochs[-1][size:])


class Adversary(keras.Model):
    """Two parts of one shape; the second one's optimizer is that which this is compiled with."""

    def __init__(self):
        super().__init__()
        self.first, self.second = dense_part(10, 32), dense_part(10, 32)

    def call(self, x):
        return self.second(x)

    def train_step(self, data):
        for part, optimizer in ((self.first, self.other), (self.second, self.optimizer)):
            grads, loss = gradients(part, *data)
            optimizer.apply(grads, part.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("how", ["eager", "graph", "one worker"])
def test_a_variable_that_is_given_twice_is_an_error_in_the_first_step(how):
    keras.utils.set_random_seed(0)
    body, heads = dense_part(16, 32), [built(layers.Dense(10), (None, 16)) for _ in range(2)]
    parts = [keras.Sequential([layers.Input((32,)), body, head]) for head in heads]
    both = [v for part in parts for v in part.trainable_variables]
    once = list({id(v): v for v in both}.values())
    optimizer = wrap(adamw(), EXACT)

    def step(variables):
        x, y = batch(0)
        with tf.GradientTape() as tape:
            loss = sum(LOSS(y, part(x)) for part in parts)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    alike = how == "one worker" and not ALONE
    error, text = (DesyncError, "an error") if alike else (ConfigurationError, r"kernel' is given twice in one step")
    call = functools.partial(step, once if alike else both)
    with pytest.raises(error, match=text):
        (tf.function(call, autograph=False) if how == "graph" else call)()
    for _ in range(EXACT + 2):
        step(once)
    assert optimizer.phase is Phase.COMPRESSED


def test_an_optimizer_that_was_set_after_the_step_was_traced_is_an_error_at_the_end_of_fit():
    keras.utils.set_random_seed(0)
    model = dense()
    model.compile(optimizer=adamw(), loss=LOSS, jit_compile=False)
    model.fit(*batch(0), verbose=0)
    model.optimizer = wrap(model.optimizer, EXACT)
    with pytest.raises(ConfigurationError, match=r"no step of this .* Call model\.compile\(optimizer=\.\.\.\)"):
        model.fit(*batch(1), verbose=0)
    model.compile(optimizer=model.optimizer, loss=LOSS, jit_compile=False)
    for step in range(EXACT + 1):
        model.fit(*batch(step), verbose=0, callbacks=ours())
    assert model.optimizer.phase is Phase.COMPRESSED
    assert_replicas_equal(model)


class Rates(keras.callbacks.Callback):
    """The learning rate of each batch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(float(self.model.optimizer.learning_rate))


def rates(*callbacks, epochs):
    model, seen = build(), Rates()
    model.compile(optimizer=wrap(keras.optimizers.Adam(0.1), warmup_steps=50), loss=LOSS)
    x, y = (np.concatenate([part] * 4) for part in batch(0))
    model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0, callbacks=[*callbacks, seen])
    return seen.found


def test_the_learning_rate_rises_from_that_of_one_worker():
    found = rates(onebit.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2), epochs=3)
    line = [0.1 / SIZE * ((i + 1) / 4 * (SIZE - 1) / 2 + 1) for i in range(8)]
    assert found == [pytest.approx(rate, rel=1e-5) for rate in [*line, *4 * [0.1]]]


def test_schedules_of_the_learning_rate():
    """As Horovod's: a number is a factor for each epoch since the first."""
    schedule = onebit.callbacks.LearningRateScheduleCallback
    found = rates(schedule(0.1, 0.5, start_epoch=1, end_epoch=3), epochs=4)[::4]
    assert found == [pytest.approx(rate, rel=1e-5) for rate in (0.1, 0.1, 0.05, 0.05)]
    found = rates(schedule(0.1, lambda epoch: 1 / (1 + epoch), start_epoch=1, end_epoch=2, staircase=False), epochs=3)
    within = [0.1 / (2 + i / 4) for i in range(4)]
    assert found == [pytest.approx(rate, rel=1e-5) for rate in [*4 * [0.1], *within, *4 * [within[-1]]]]


def test_an_average_over_the_passes_is_of_all_of_them():
    for averages in (False, True):
        x, before = np.ones((4, 32), np.float32), np.zeros((32, 1), np.float32)
        model = keras.Sequential([layers.Input((32,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        optimizer = wrap(
            keras.optimizers.SGD(1.0), warmup_steps=50, backward_passes_per_step=2,
            average_aggregated_gradients=averages,
        )  # fmt: skip
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        np.testing.assert_allclose(before - np.array(model.trainable_variables[0]), 1.0 if averages else 2.0, rtol=1e-6)


def test_what_of_horovods_does_not_synchronize_is_refused_once_installed():
    import horovod.keras
    import horovod.tensorflow.keras

    from horovod_onebit.install import install, uninstall

    install()
    try:
        for module in (horovod.keras, horovod.tensorflow.keras):
            with pytest.raises(UnsupportedError, match=r"keras\.models\.load_model"):
                module.load_model("there is none")
        with pytest.raises(UnsupportedError, match="keeps no layers local"):
            horovod.keras.PartialDistributedOptimizer(keras.optimizers.Adam())
    finally:
        uninstall()
    assert horovod.keras.load_model.__module__ == "horovod.keras"


def test_what_has_no_mean_or_would_lose_its_methods_is_refused():
    class Floor(keras.optimizers.LossScaleOptimizer):
        pass

    with pytest.raises(UnsupportedError, match="Floor overrides methods"):
        wrap(Floor(keras.optimizers.Adam()))
    model = build()
    model.layers[0].quantize("float8")
    with pytest.raises(UnsupportedError, match="float8"):
        wrap(keras.optimizers.Adam()).build(model.trainable_variables)


def test_a_class_of_the_same_name_as_one_of_keras_does_not_take_its_place(tmp_path):
    class Adam(keras.optimizers.Adam):
        pass

    def saved(optimizer, file):
        model = build()
        model.compile(optimizer=wrap(optimizer), loss=LOSS)
        model.fit(*batch(0), verbose=0)
        model.save(file)

    for number, kind in enumerate((keras.optimizers.Adam, Adam, keras.optimizers.Adam)):
        saved(kind(), file := tmp_path / f"{number}.keras")
        loaded = keras.models.load_model(file).optimizer
        assert isinstance(loaded, kind)
        assert isinstance(loaded, Adam) == (kind is Adam)


def test_norms_beyond_float16_are_clipped():
    dense = layers.Dense(2, use_bias=False, kernel_initializer="zeros", dtype="float16")
    model = keras.Sequential([layers.Input((8,)), dense])
    optimizer = wrap(keras.optimizers.SGD(1.0, clipnorm=1.0), warmup_steps=50)
    grad = tf.fill((8, 2), tf.constant(200.0, tf.float16))
    optimizer.apply([grad], model.trainable_variables)
    np.testing.assert_allclose(np.array(model.trainable_variables[0]), -0.25, rtol=1e-2)

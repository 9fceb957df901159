"""The Keras face with the CUDA kernels against the host's: on a GPU, or with NUMBA_ENABLE_CUDASIM=1 in the simulator.

One GPU serves all ranks. With ONEBIT_PTX and ONEBIT_DRIVER, see ``tests.cuda.test_kernels``: host memory is then that
of a GPU, TensorFlow's too.
"""

import dataclasses
import os

from tests.ranks.keras_common import (
    OPTIMIZERS,
    RANK,
    SIZE,
    assert_replicas_equal,
    batch,
    build,
    gradients,
    hvd,
    keras,
    train,
    weights,
    wrap,
)

# isort: split
import numpy as np
import pytest
import tensorflow as tf
from numba import config

from horovod_onebit import ConfigurationError, NonFiniteError, Recipe
from horovod_onebit.exchange import hierarchical
from horovod_onebit.kernels import has_gpu
from horovod_onebit.tf import place
from horovod_onebit.tf.collectives import HorovodCollectives
from tests.one_core import stay_on_one_core

if config.ENABLE_CUDASIM:
    stay_on_one_core(RANK)
DRIVEN = "ONEBIT_DRIVER" in os.environ
if "ONEBIT_PTX" in os.environ:
    from tests.cuda import machine

    if DRIVEN:
        machine.drive(os.environ["ONEBIT_PTX"], os.environ["ONEBIT_DRIVER"])
        place._on_gpu, place._number = lambda device: True, lambda device: 0
    else:
        machine.install(os.environ["ONEBIT_PTX"])
GPUS = tf.config.list_physical_devices("GPU")
THERE = config.ENABLE_CUDASIM or (has_gpu() and (GPUS or DRIVEN))
for gpu in GPUS:  # which all ranks share, and the kernels
    tf.config.experimental.set_memory_growth(gpu, True)
pytestmark = pytest.mark.skipif(not THERE, reason="no NVIDIA GPU in TensorFlow here, and Numba does not simulate")

RECIPE = Recipe(block_size=64, min_compressed_size=100)
SECTIONS = dataclasses.replace(RECIPE, bucket_size=512)


def small(seed=0):
    return build(seed, hidden=(20, 12))


def wrapped(kernels, kind="adamw", recipe=RECIPE, **options):
    return wrap(OPTIMIZERS[kind](**options), warmup_steps=2, recipe=recipe, kernels=kernels)


def uses_kernels(optimizer):
    """Whether all tensors are the kernels', and all messages theirs, too."""
    engine = optimizer._compressor.engine
    places = {not isinstance(array, np.ndarray) for t in engine.tensors for array in (t.weight, t.momentum, t.residual)}
    places |= {not isinstance(message.row, np.ndarray) for message in engine._messages}
    assert len(places) == 1
    return places.pop()


def step_with_nan(model, optimizer, step):
    grads, _ = gradients(model, *batch(step))
    if RANK == SIZE - 1:
        grads[0] *= np.nan
    optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))


@pytest.mark.parametrize(
    ("kind", "recipe", "options", "graph"),
    [
        *((kind, RECIPE, {}, False) for kind in OPTIMIZERS),
        ("adam", SECTIONS, {}, True),
        ("adam", dataclasses.replace(SECTIONS, exchange="two_stage"), {}, True),
        ("lamb", dataclasses.replace(RECIPE, space="momentum", clip=None, exchange="direct"), {}, True),
        ("adam", RECIPE, {"clipvalue": 0.01}, False),
        ("sgd", RECIPE, {"clipnorm": 0.1}, True),
        ("adam", RECIPE, {"global_clipnorm": 0.1}, False),
        ("adam", RECIPE, {"use_ema": True, "ema_momentum": 0.5}, False),
    ],
)
def test_both_kernels_train_alike(kind, recipe, options, graph):
    trained, residuals = [], []
    for kernels in ("cpu", "cuda"):
        model, optimizer = small(), wrapped(kernels, kind, recipe, **options)
        train(model, optimizer, 6, graph=graph)
        assert uses_kernels(optimizer) == (kernels == "cuda")
        assert_replicas_equal(model)
        stats = optimizer.stats()
        assert stats.error_norm > 0
        assert stats.momentum_norm > 0 or kind == "plain sgd"
        trained.append(weights(model))
        residuals.append(optimizer.feedback_state_dict())
    np.testing.assert_allclose(*trained, rtol=1e-4, atol=1e-5)
    assert residuals[0].keys() == residuals[1].keys()
    for name, value in residuals[0].items():
        np.testing.assert_allclose(residuals[1][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(SIZE != 4, reason="needs four ranks: two hosts of two")
@pytest.mark.parametrize("between", ["direct", "two_stage"])
def test_the_workers_of_a_host_share_the_work(between, monkeypatch):
    monkeypatch.setattr(HorovodCollectives, "host", lambda self: (RANK // 2, 2))
    monkeypatch.setattr(hierarchical.Exchange, "between", between)
    trained = []
    for kernels in ("cpu", "cuda"):
        recipe = dataclasses.replace(SECTIONS, exchange="hierarchical")
        model, optimizer = small(), wrapped(kernels, recipe=recipe)
        train(model, optimizer, 6)
        assert uses_kernels(optimizer) == (kernels == "cuda")
        assert optimizer._compressor.engine.exchange.name == "hierarchical"
        assert_replicas_equal(model)
        trained.append(weights(model))
    np.testing.assert_allclose(*trained, rtol=1e-4, atol=1e-5)


def test_nan_on_one_worker_is_skipped_by_all():
    model, optimizer = small(), wrapped("cuda", recipe=SECTIONS)
    train(model, optimizer, 4)
    before, residuals = weights(model), optimizer.feedback_state_dict()
    step_with_nan(model, optimizer, 4)
    assert np.array_equal(before, weights(model))
    assert optimizer.stats().skipped_steps == 1
    for name, value in optimizer.feedback_state_dict().items():
        np.testing.assert_allclose(value, residuals[name], atol=1e-5, rtol=0)
    train(model, optimizer, 2, start=5)
    assert_replicas_equal(model)


def test_clipping_by_value_leaves_nan_alone():
    model, optimizer = small(), wrapped("cuda", clipvalue=0.01)
    train(model, optimizer, 3)
    before = weights(model)
    step_with_nan(model, optimizer, 3)
    assert np.array_equal(before, weights(model))
    assert optimizer.stats().skipped_steps == 1


def test_a_step_that_raises_gives_all_back():
    """The gradients are still there when the kernels that take the messages back read them."""
    trained, residuals = [], []
    for kernels in ("cpu", "cuda"):
        model = small()
        optimizer = wrapped(kernels, recipe=dataclasses.replace(RECIPE, on_nonfinite="raise"), clipvalue=0.05)
        train(model, optimizer, 4)
        with pytest.raises(NonFiniteError):
            step_with_nan(model, optimizer, 4)
        train(model, optimizer, 2, start=5)
        trained.append(weights(model))
        residuals.append(optimizer.feedback_state_dict())
    np.testing.assert_allclose(*trained, rtol=1e-4, atol=1e-5)
    for name, value in residuals[0].items():
        np.testing.assert_allclose(residuals[1][name], value, rtol=1e-3, atol=1e-4)


def test_functions_of_other_variables_take_turns():
    """Each knows where its own are, whichever was traced last."""

    def step_of(chosen, model, optimizer):
        def step(x, y):
            grads, _ = gradients(model, x, y)
            pairs = list(zip(grads, model.trainable_variables, strict=True))
            optimizer.apply_gradients([pair for pair in pairs if chosen(pair[1])])

        return tf.function(step)

    trained = []
    for kernels in ("cpu", "cuda"):
        model, optimizer = small(), wrapped(kernels)
        optimizer.build(model.trainable_variables)
        both = step_of(lambda v: True, model, optimizer), step_of(lambda v: len(v.shape) == 1, model, optimizer)
        for number, which in enumerate([0, 0, 0, 0, 1, 0, 1, 0]):
            both[which](*map(tf.convert_to_tensor, batch(number)))
        assert_replicas_equal(model)
        trained.append(weights(model))
    np.testing.assert_allclose(*trained, rtol=1e-4, atol=1e-5)


def test_what_a_launch_needs_is_kept_from_step_to_step(monkeypatch):
    """Numba's and ours is kept by thread, and those of TensorFlow begin anew whenever they call Python."""
    from horovod_onebit.kernels.cuda.launch import Staging

    model, optimizer = small(), wrapped("cuda", recipe=SECTIONS)
    train(model, optimizer, 4, graph=True)
    made, make = [], Staging.__init__
    monkeypatch.setattr(Staging, "__init__", lambda self: (made.append(self), make(self))[1])
    train(model, optimizer, 4, start=4, graph=True)
    assert not made


@pytest.mark.skipif(not DRIVEN, reason="needs a GPU that is not the only one")
def test_a_part_of_a_gpu_is_refused_or_left(monkeypatch, caplog):
    monkeypatch.setattr(place, "_number", lambda device: -1)
    model, optimizer = small(), wrapped("auto")
    train(model, optimizer, 4)
    assert not uses_kernels(optimizer)
    assert "split into several logical devices" in caplog.text
    model, optimizer = small(), wrapped("cuda")
    with pytest.raises(ConfigurationError, match="split into several logical devices"):
        train(model, optimizer, 4)


def test_fit_and_several_steps_in_one_call():
    trained = []
    for kernels in ("cpu", "cuda"):
        model = small()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=wrapped(kernels, recipe=SECTIONS), loss=loss, jit_compile=False, steps_per_execution=4)
        x, y = (np.concatenate(parts) for parts in zip(*map(batch, range(8)), strict=True))
        model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
        assert uses_kernels(model.optimizer) == (kernels == "cuda")
        assert_replicas_equal(model)
        trained.append(weights(model))
    np.testing.assert_allclose(*trained, rtol=1e-4, atol=1e-5)


def test_a_resumed_run_goes_on_bit_for_bit_and_may_change_kernels(tmp_path):
    model, optimizer = small(), wrapped("cuda")
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    train(model, optimizer, 4)
    path = str(tmp_path / "model.keras")
    model.save(path)
    residuals = optimizer.feedback_state_dict()
    train(model, optimizer, 3, start=4)
    for kernels in ("cuda", "cpu"):
        again = keras.models.load_model(path)
        resumed = again.optimizer
        assert resumed.get_config()["horovod_onebit"]["kernels"] == "cuda"
        if kernels == "cpu":
            resumed._compressor.placement = wrapped("cpu")._compressor.placement
        resumed.load_feedback_state_dict(residuals)
        train(again, resumed, 3, start=4)
        assert uses_kernels(resumed) == (kernels == "cuda")
        if kernels == "cuda" and SIZE == 2:
            assert np.array_equal(weights(model), weights(again))
        np.testing.assert_allclose(weights(model), weights(again), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["zero_one", "local"])
def test_schedules_work_in_the_hosts_memory(schedule):
    import horovod_onebit.tf as onebit

    schedules = {"zero_one": onebit.ZeroOne(var_freeze_step=4, var_update_scaler=2), "local": onebit.Local(every=2)}
    arguments = {"schedule": schedules[schedule], "recipe": RECIPE, "kernels": "cuda"}
    model, optimizer = small(), onebit.DistributedOptimizer(keras.optimizers.Adam(1e-3), **arguments)
    train(model, optimizer, 8)
    optimizer.flush()
    assert not uses_kernels(optimizer)
    assert_replicas_equal(model)


def test_workers_may_differ_in_their_kernels():
    model, optimizer = small(), wrapped("cuda" if RANK else "cpu")
    train(model, optimizer, 5, graph=True)
    assert uses_kernels(optimizer) == bool(RANK)
    assert_replicas_equal(model)
    assert hvd.size() == SIZE


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigurationError, match="kernels='gpu'"):
        wrapped("gpu")

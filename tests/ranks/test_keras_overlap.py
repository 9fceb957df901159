"""The Keras face on real ranks: messages that leave section by section change nothing but the time."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import threading

import numpy as np
import pytest
import tensorflow as tf

from horovod_onebit import Recipe
from horovod_onebit.tf import step as step_module
from horovod_onebit.tf.sections import sections
from tests.ranks.keras_common import (
    OPTIMIZERS,
    RANK,
    SIZE,
    assert_replicas_equal,
    batch,
    build,
    gradients,
    train,
    wrap,
)

HIDDEN = (96, 64, 48)
SMALL = {"bucket_size": 2048, "block_size": 64}


def at_once(sizes, recipe):
    """One section: nothing leaves before all gradients are there."""
    return [tuple(range(len(sizes)))]


def state(model, optimizer):
    return [np.array(v) for v in [*model.variables, *optimizer.variables]] + list(feedback(optimizer))


def feedback(optimizer):
    return [value for _, value in sorted(optimizer.feedback_state_dict().items())]


RUNS = {
    "adamw": ("adamw", {}, {"recipe": Recipe(**SMALL)}),
    "two stages": ("sgd", {}, {"recipe": Recipe(exchange="two_stage", **SMALL)}),
    "a scale per tensor": ("adam", {}, {"recipe": Recipe(exchange="two_stage", bucket_size=2048, block_size=None)}),
    "lamb": ("lamb", {}, {"recipe": Recipe(bucket_size=2048)}),
    "without momentum": ("plain sgd", {}, {"recipe": Recipe(**SMALL)}),
    "clipnorm": ("adam", {"clipnorm": 0.05}, {"recipe": Recipe(**SMALL)}),
    "accumulation": ("adam", {"clipvalue": 0.01}, {"recipe": Recipe(**SMALL), "backward_passes_per_step": 2}),
}


@pytest.mark.parametrize("what", RUNS)
def test_overlap_changes_no_bit(what, monkeypatch):
    kind, options, arguments = RUNS[what]
    found = []
    for overlap in (True, False):
        if not overlap:
            monkeypatch.setattr(step_module, "sections", at_once)
        model = build(hidden=HIDDEN)
        optimizer = wrap(OPTIMIZERS[kind](**options), warmup_steps=2, **arguments)
        train(model, optimizer, 12, graph=True)
        assert optimizer.phase == "compressed"
        assert len(optimizer._compressor.engine.layout.buckets) > 1
        assert_replicas_equal(model)
        found.append(state(model, optimizer))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_workers_that_run_sections_in_another_order():
    """One worker runs eagerly, section by section."""
    model = build(hidden=HIDDEN)
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=2, recipe=Recipe(**SMALL))
    train(model, optimizer, 12, graph=RANK != SIZE - 1)
    assert optimizer.phase == "compressed"
    assert_replicas_equal(model)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("variable", [0, 1, 4])
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_nan_in_one_section_takes_back_all(exchange, variable, graph):
    """In the first variable, the last to leave; in an exact one; in the last, the first to leave."""
    model = build(hidden=HIDDEN)
    optimizer = wrap(OPTIMIZERS["adamw"](), warmup_steps=2, recipe=Recipe(exchange=exchange, **SMALL))
    train(model, optimizer, 6, graph=graph)
    before, residuals = [np.array(v) for v in [*model.variables, *optimizer.variables]], feedback(optimizer)

    def step(x, y):
        grads, _ = gradients(model, x, y)
        if RANK == SIZE - 1:
            grads[variable] *= np.nan
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    (tf.function(step) if graph else step)(*map(tf.constant, batch(6)))
    for old, new in zip(before, [*model.variables, *optimizer.variables], strict=True):
        np.testing.assert_array_equal(old, np.array(new))
    for old, new in zip(residuals, feedback(optimizer), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5)
    assert optimizer.stats().skipped_steps == 1
    train(model, optimizer, 4, start=7, graph=graph)
    assert_replicas_equal(model)


@pytest.mark.skipif(os.environ.get("TF_NUM_INTEROP_THREADS") == "1", reason="the backward pass waits on a thread")
def test_messages_leave_before_the_backward_pass_is_over():
    model = build(hidden=HIDDEN)
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=1, recipe=Recipe(**SMALL))
    optimizer.build(model.trainable_variables)
    engine, left, waited = optimizer._compressor.engine, threading.Event(), []
    send = engine.send
    engine.send = lambda *arguments: (send(*arguments), left.set())

    def wait(grad):
        waited.append(left.wait(0.0 if optimizer.phase == "warmup" else 60.0))
        return grad

    @tf.function
    def step(x, y):
        grads, _ = gradients(model, x, y)
        shape = grads[0].shape
        grads[0] = tf.numpy_function(wait, [grads[0]], tf.float32, stateful=False)  # there after a message has left
        grads[0].set_shape(shape)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    for number in range(3):
        left.clear()
        step(*map(tf.constant, batch(number)))
    assert waited == [False, True, True]
    assert_replicas_equal(model)


def test_sections_follow_from_sizes_alone():
    recipe = Recipe(bucket_size=1024, block_size=64)
    for sizes in ([], [8], [5000], [600, 600, 600], [8, 4096, 8, 4096, 8], [100] * 40, [3000, 100, 100, 3000]):
        found = sections(sizes, recipe)
        assert found[-1] == tuple(range(len(sizes)))
        assert len(set(found)) == len(found)
        assert len(found) <= 1 + sum(sizes) // 512
    assert sections([4096] * 3, recipe) == [(2,), (1,), (0, 1, 2)]
    assert len(sections([2**20] * 500, recipe)) < 70

"""The Keras face on real ranks: messages that leave section by section change nothing but the time."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import threading
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import tensorflow as tf

import horovod_onebit.tf as onebit
from horovod_onebit import Recipe
from horovod_onebit.tf import step as step_module
from horovod_onebit.tf.sections import sections
from horovod_onebit.warmup import EXACT_FIRST
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
THREE = Recipe(warmup="three_bit", **SMALL)


def at_once(sizes, recipe):
    """One section: nothing leaves before all gradients are there."""
    return [tuple(range(len(sizes)))]


def state(model, optimizer):
    return [np.array(v) for v in [*model.variables, *optimizer.variables]] + list(feedback(optimizer))


def feedback(optimizer):
    """Of one bit and of few."""
    learned = optimizer._compressor.residuals()["gradients"] or {"units": {}, "feedback": {}}
    parts = [optimizer.feedback_state_dict(), learned["units"], learned["feedback"]]
    return [value for part in parts for _, value in sorted(part.items())]


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


FEW = {
    "three bits": ("adamw", {}, {"recipe": THREE}),
    "two stages": ("lamb", {}, {"recipe": Recipe(warmup="two_bit", exchange="two_stage", **SMALL)}),
    "clipnorm": ("adam", {"global_clipnorm": 0.05}, {"recipe": THREE}),
    "accumulation": ("sgd", {}, {"recipe": THREE, "backward_passes_per_step": 2}),
    "in every step": ("adam", {}, {"recipe": Recipe(**SMALL), "schedule": onebit.Gradients("four_bit")}),
}


def change(model, optimizer, steps, passes):
    """Of two kernels the gradients are zeros at first, and other variables are trained from time to time."""
    functions = {}
    for number in range(steps * passes):
        first = 2 if number // passes % 9 == 8 else 0

        def step(x, y, late, first=first):
            grads, _ = gradients(model, x, y)
            grads[2], grads[6] = grads[2] * late, grads[6] * late
            optimizer.apply_gradients(list(zip(grads, model.trainable_variables, strict=True))[first:])

        if first not in functions:
            functions[first] = tf.function(step)
        functions[first](*map(tf.constant, batch(number)), tf.constant(float(number > 3)))


@pytest.mark.parametrize("what", FEW)
def test_gradients_in_few_bits_that_leave_early_change_no_bit(what, monkeypatch):
    kind, options, arguments = FEW[what]
    found, early = [], []
    for overlap in (True, False):
        if not overlap:
            monkeypatch.setattr(step_module, "sections", at_once)
        model = build(hidden=HIDDEN)
        optimizer = wrap(OPTIMIZERS[kind](**options), None if "schedule" in arguments else 100, **arguments)
        optimizer.build(model.trainable_variables)
        engine = optimizer._compressor.coded.engine
        travel, groups = engine.travel, []
        engine.travel = lambda buckets, *land, to=groups, do=travel: (to.append(len(buckets)), do(buckets, *land))[1]
        passes = arguments.get("backward_passes_per_step", 1)
        change(model, optimizer, EXACT_FIRST + 16, passes)
        assert_replicas_equal(model)
        found.append(state(model, optimizer))
        early.append(len(groups))
    assert early[0] > 1.5 * early[1]  # some steps go by sections
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


ONE_OR_FEW = {"one bit": (2, Recipe(**SMALL), 6), "few bits": (100, THREE, EXACT_FIRST + 3)}


@pytest.mark.parametrize("bits", ONE_OR_FEW)
def test_workers_that_run_sections_in_another_order(bits):
    """One worker runs eagerly, section by section."""
    warmup, recipe, steps = ONE_OR_FEW[bits]
    model = build(hidden=HIDDEN)
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=warmup, recipe=recipe)
    train(model, optimizer, steps + 6, graph=RANK != SIZE - 1)
    assert (optimizer.phase == "compressed") == (bits == "one bit")
    assert_replicas_equal(model)


SOME = [
    ("direct", 0, True),
    ("direct", 1, False),
    ("direct", 4, False),
    ("two_stage", 0, False),
    ("two_stage", 4, True),
]
EVERY = list(product(["direct", "two_stage"], [0, 1, 4], [False, True]))


@pytest.mark.parametrize(
    ("bits", "exchange", "variable", "graph"),
    [*(("one bit", *case) for case in EVERY), *(("few bits", *case) for case in SOME)],
)
def test_nan_in_one_section_takes_back_all(bits, exchange, variable, graph):
    """In the first variable, the last to leave; in an exact one; in the last, the first to leave."""
    warmup, recipe, steps = ONE_OR_FEW[bits]
    model = build(hidden=HIDDEN)
    optimizer = wrap(OPTIMIZERS["adamw"](), warmup_steps=warmup, recipe=replace(recipe, exchange=exchange))
    train(model, optimizer, steps, graph=graph)
    before, residuals = [np.array(v) for v in [*model.variables, *optimizer.variables]], feedback(optimizer)

    def step(x, y):
        grads, _ = gradients(model, x, y)
        if RANK == SIZE - 1:
            grads[variable] *= np.nan
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    (tf.function(step) if graph else step)(*map(tf.constant, batch(steps)))
    for old, new in zip(before, [*model.variables, *optimizer.variables], strict=True):
        np.testing.assert_array_equal(old, np.array(new))
    if (bits, variable) != ("few bits", 1):  # the others' mean was found, and is not used
        for old, new in zip(residuals, feedback(optimizer), strict=True):
            np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5)
    assert optimizer.stats().skipped_steps == 1
    train(model, optimizer, 4, start=steps + 1, graph=graph)
    assert_replicas_equal(model)


@pytest.mark.skipif(os.environ.get("TF_NUM_INTEROP_THREADS") == "1", reason="the backward pass waits on a thread")
@pytest.mark.parametrize(("bits", "first"), [("one bit", 1), ("few bits", EXACT_FIRST + 1)])
def test_messages_leave_before_the_backward_pass_is_over(bits, first):
    """From the step after the ``first`` ones on: before that, they are exact, or workers compare what they send."""
    model = build(hidden=HIDDEN)
    optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=1 if bits == "one bit" else 100, recipe=ONE_OR_FEW[bits][1])
    optimizer.build(model.trainable_variables)
    compressor, left, waited = optimizer._compressor, threading.Event(), []
    engine = compressor.engine if bits == "one bit" else compressor.coded.engine
    send = engine.send
    engine.send = lambda *arguments: (send(*arguments), left.set())

    def wait(grad):
        waited.append(left.wait(0.0 if len(waited) < first else 60.0))
        return grad

    @tf.function
    def step(x, y):
        grads, _ = gradients(model, x, y)
        shape = grads[0].shape
        grads[0] = tf.numpy_function(wait, [grads[0]], tf.float32, stateful=False)  # there after a message has left
        grads[0].set_shape(shape)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    for number in range(first + 2):
        left.clear()
        step(*map(tf.constant, batch(number)))
    assert waited == [False] * first + [True, True]
    assert_replicas_equal(model)


def test_sections_follow_from_sizes_alone():
    recipe = Recipe(bucket_size=1024, block_size=64)
    for sizes in ([], [8], [5000], [600, 600, 600], [8, 4096, 8, 4096, 8], [100] * 40, [3000, 100, 100, 3000]):
        found = sections(tuple(sizes), recipe)
        assert found[-1] == tuple(range(len(sizes)))
        assert len(set(found)) == len(found)
        assert len(found) <= 1 + sum(sizes) // 512
    assert sections((4096,) * 3, recipe) == ((2,), (1,), (0, 1, 2))
    assert len(sections((2**12,) * 500, recipe)) < 70

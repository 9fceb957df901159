"""The Keras face on four ranks: the hierarchical exchange, on hosts that are made up (tests/cluster has real ones)."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_onebit.tf as onebit
from horovod_onebit import Recipe
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam
from horovod_onebit.tf import elastic
from horovod_onebit.tf.collectives import HorovodCollectives
from horovod_onebit.warmup import EXACT_FIRST
from tests.long import LONG
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

pytestmark = pytest.mark.skipif(SIZE != 4, reason="needs four ranks: two hosts of two")

HOSTS = {"neighbours": [0, 0, 1, 1], "scattered": [0, 1, 1, 0]}
SLOW = Recipe(link=1e5, block_size=64, bucket_size=2048)  # "auto" finds bytes dear


@pytest.fixture(params=HOSTS, autouse=True)
def hosts(request, monkeypatch):
    monkeypatch.setattr(HorovodCollectives, "host", lambda self: (HOSTS[request.param][RANK], 2))
    return request.param


def exchange_of(optimizer):
    return optimizer._compressor.engine.exchange.name


@pytest.mark.parametrize("graph", [False, True])
def test_auto_takes_it_and_the_weights_are_those_of_numpy(graph):
    model = build()
    optimizer = wrap(keras.optimizers.Adam(1e-3, epsilon=1e-12), warmup_steps=3, recipe=SLOW)
    arrays = {str(i): np.array(v) for i, v in enumerate(model.trainable_variables)}
    other = NumpyOptimizer(
        arrays, Adam(lr=1e-3, eps=1e-12), collectives=HorovodCollectives(name="numpy"), recipe=SLOW, warmup_steps=3
    )
    grads_at = []
    for step in range(12):
        grads_at.append([np.array(g) for g in gradients(model, *batch(step))[0]])
        if graph:
            train(model, optimizer, 1, start=step, graph=True)
        else:
            optimizer.apply_gradients(zip(map(tf.constant, grads_at[-1]), model.trainable_variables, strict=True))
        other.step({str(i): g for i, g in enumerate(grads_at[-1])})
    assert exchange_of(optimizer) == other.engine.exchange.name == "hierarchical"
    assert_replicas_equal(model)
    for i, v in enumerate(model.trainable_variables):
        np.testing.assert_allclose(np.asarray(v), arrays[str(i)], atol=2e-5)
    assert optimizer.stats().step_bytes_sent == other.engine.traffic.step


@LONG
@pytest.mark.parametrize("graph", [False, True])
def test_gradients_in_few_bits_and_elastic_states(graph):
    model = build()
    recipe = Recipe(warmup="three_bit", exchange="hierarchical", block_size=64, bucket_size=2048)
    optimizer = wrap(OPTIMIZERS["adamw"](), 40, recipe=recipe)
    model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False)
    train(model, optimizer, EXACT_FIRST + 10, graph=graph)
    assert optimizer._compressor.coded.engine.exchange.name == "hierarchical"
    assert_replicas_equal(model)
    state = elastic.KerasState(model)
    saved = weights(model)
    train(model, optimizer, 3, start=20, graph=graph)
    state.restore()
    state.sync()
    np.testing.assert_array_equal(weights(model), saved)
    train(model, optimizer, 25, start=20, graph=graph)
    assert exchange_of(optimizer) == "hierarchical"
    assert_replicas_equal(model)


def test_workers_whose_steps_are_traced_at_different_times():
    """One traces before the others do anything; another model is trained meanwhile."""
    model, first = build(), build(seed=1)
    optimizer = wrap(OPTIMIZERS["adamw"](), warmup_steps=2, recipe=SLOW)
    other = wrap(OPTIMIZERS["sgd"](), warmup_steps=1, recipe=SLOW)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        grads, _ = gradients(model, x, y)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    data = [tuple(map(tf.constant, batch(number))) for number in range(8)]
    if RANK == 1:
        step.get_concrete_function(*data[0])
    train(first, other, 3, graph=RANK != 2)
    for x, y in data:
        step(x, y)
    assert exchange_of(optimizer) == exchange_of(other) == "hierarchical"
    assert_replicas_equal(model)
    assert_replicas_equal(first)


@pytest.mark.parametrize("built", [0, SIZE])
def test_models_that_are_built_by_their_first_batch_on_some_workers(built):
    """Those whose model is there broadcast it before they trace a step, the others within one."""
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.layers.Dense(96, activation="relu"), keras.layers.Dense(10)])
    if built == RANK:
        model.build((None, 32))
    model.compile(optimizer=wrap(OPTIMIZERS["adamw"](), warmup_steps=3, recipe=SLOW), loss=LOSS)
    x, y = (np.concatenate(arrays) for arrays in zip(*map(batch, range(8)), strict=True))
    callbacks = [onebit.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(x, y, batch_size=16, epochs=1, verbose=0, callbacks=callbacks)
    assert exchange_of(model.optimizer) == "hierarchical"
    assert_replicas_equal(model)


@LONG
def test_local_steps_and_elastic_states():
    schedule = onebit.Local(every=4, doubling=0)
    model = build()
    recipe = Recipe(exchange="hierarchical", block_size=64)
    model.compile(
        optimizer=onebit.DistributedOptimizer(OPTIMIZERS["adamw"](), schedule=schedule, recipe=recipe), loss=LOSS
    )
    for step in range(10):
        model.train_on_batch(*batch(step))
    state = elastic.KerasState(model, step=10)
    assert_replicas_equal(model)
    saved = weights(model)
    model.train_on_batch(*batch(10))
    state.restore()
    state.sync()
    np.testing.assert_array_equal(weights(model), saved)
    for step in range(10, 16):
        model.train_on_batch(*batch(step))
    assert_replicas_equal(model)
    assert exchange_of(model.optimizer) == "hierarchical"


def test_what_is_not_of_all_hosts_is_no_hierarchy():
    """A process set that a part of the hosts' workers are in."""
    members = hvd.add_process_set([0, 1, 2])
    if members.included():
        model = build()
        optimizer = wrap(OPTIMIZERS["adam"](), warmup_steps=1, recipe=SLOW, process_set=members)
        train(model, optimizer, 4)
        assert exchange_of(optimizer) != "hierarchical"
    hvd.remove_process_set(members)

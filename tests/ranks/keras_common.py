"""A Keras model, its batches and what every test of the Keras face needs; each rank imports it."""

import os
from functools import lru_cache
from importlib.util import find_spec

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tests.one_core import stay_on_one_core

if os.environ.get("ONEBIT_ONE_CORE"):  # before TensorFlow counts its threads
    stay_on_one_core(int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))))

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_onebit.tf as onebit

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build(seed=0, hidden=(128,)):
    """Layers whose kernels are compressed and whose biases are not; few, since TensorFlow traces each for long."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    dense = [layers.Dense(units, activation="relu") for units in hidden]
    return keras.Sequential([layers.Input((32,)), *dense, layers.Dense(10)])


def batch(step, rank=None):
    x = np.random.default_rng([step, RANK if rank is None else rank]).standard_normal((16, 32)).astype(np.float32)
    return x, x[:, :10].argmax(1)


def wrap(optimizer, warmup_steps=5, **arguments):
    return onebit.DistributedOptimizer(optimizer, warmup_steps=warmup_steps, **arguments)


def gradients(model, x, y):
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x, training=True))
    return tape.gradient(loss, model.trainable_variables), loss


def step_of(model, optimizer):
    def step(x, y):
        grads, loss = gradients(model, x, y)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    return step


@lru_cache(maxsize=4)
def graph_of(model, optimizer):
    """The step as a function of TensorFlow; it takes about a second to trace."""
    return tf.function(step_of(model, optimizer))


def train(model, optimizer, steps, start=0, graph=False):
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    step = graph_of(model, optimizer) if graph else step_of(model, optimizer)
    for number in range(start, start + steps):
        loss = step(*map(tf.convert_to_tensor, batch(number)))
    return float(loss)


def beside_pytorch(model, optimizer, kind, steps, arguments, after=lambda other: None, **options):
    """Both faces' optimizers take so many steps with the same gradients; returns PyTorch's and its parameters, and
    calls ``after`` with it after each. It is of the class named ``kind``, with ``options``, wrapped with
    ``arguments``."""
    if find_spec("triton") is not None:  # of PyTorch's builds for CUDA
        pytest.skip("Triton crashes in a process that has loaded TensorFlow")
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.nn")
    import horovod.torch as hvd_torch

    import horovod_onebit.torch as onebit_torch

    hvd_torch.init()
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.from_numpy(np.array(v))) for v in model.trainable_variables]
    plain = getattr(torch.optim, kind)(parameters, **options)
    named = [(str(i), p) for i, p in enumerate(parameters)]
    other = onebit_torch.DistributedOptimizer(plain, named, **arguments)
    for step in range(steps):
        grads, _ = gradients(model, *batch(step))
        other.zero_grad()
        for p, g in zip(parameters, grads, strict=True):
            p.grad = torch.from_numpy(np.array(g))
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        other.step()
        after(other)
    hvd_torch.shutdown()  # before TensorFlow's, which has begun MPI and ends it
    hvd.init()  # process sets belong to the framework whose Horovod was begun last
    return other, parameters


def scaled_step(model, optimizer, x, y):
    """A step of a loop with a ``LossScaleOptimizer``."""
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(LOSS(y, model(x)))
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))


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
    "lamb": lambda **k: keras.optimizers.Lamb(1e-2, **k),
    "lion": lambda **k: keras.optimizers.Lion(1e-3, **k),
    "plain sgd": lambda **k: keras.optimizers.SGD(0.05, **k),
}

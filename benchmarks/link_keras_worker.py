"""The same as `benchmarks/link_worker.py` in Keras 3: what every process of `benchmarks/link.py --framework tf` runs.

A loop is a `tf.function` with a `tf.GradientTape`, "fit" is the train function that `model.fit` calls for each batch.
Stock Horovod has no optimizer that works under Keras 3: its ways average the gradients of the variables' ``value``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import horovod_onebit.tf as onebit
from benchmarks.link_job import MODELS, finish, limited, parse, take_core
from benchmarks.measure import Way
from horovod_onebit.warmup import EXACT_FIRST

PORT = 29666


def build(model: str) -> keras.Model:
    layers, width, _ = MODELS[model]
    return keras.Sequential([keras.layers.Input((width,)), *(keras.layers.Dense(width) for _ in range(layers))])


def loss_of(_: Any, outputs: Any) -> Any:
    return tf.reduce_mean(tf.square(outputs))


def adamw() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(1e-4)


def ours() -> keras.optimizers.Optimizer:
    return onebit.DistributedOptimizer(adamw(), warmup_steps=1)


Make = Callable[[str, tf.Tensor, str], Way]
"""A way to train of the model's name, the data and the way's own name; its first steps are taken. Collective."""


def called(step: Callable[[], Any], *, first: int = 3) -> Way:
    """One call is a step; the ``first`` ones, of which one traces and one of ours is exact, are taken."""

    def run() -> None:
        float(step())  # a function has returned when all that it does is done

    for _ in range(first):
        run()
    return Way(run)


def loop(optimizer: Callable[[], Any], average: Callable[[Any, str], Any] | None = None, *, first: int = 3) -> Make:
    """A custom training loop; ``average`` is what happens to each gradient, under a name. See ``called``."""

    def make(name: str, data: tf.Tensor, way: str) -> Way:
        model, own = build(name), optimizer()
        own.build(model.trainable_variables)
        values = [v.value for v in model.trainable_variables]

        @tf.function
        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(None, model(data, training=True))
            grads = tape.gradient(loss, values)
            if average is not None:
                grads = [average(g, f"{way}.{i}".replace(" ", "_")) for i, g in enumerate(grads)]
            own.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            return loss

        return called(step, first=2 if average else first)

    return make


def horovod(compression: Any) -> Make:
    return loop(adamw, lambda grad, name: hvd.allreduce(grad, name=name, op=hvd.Average, compression=compression))


def fit(optimizer: Callable[[], Any]) -> Make:
    def make(name: str, data: tf.Tensor, way: str) -> Way:
        model = build(name)
        model.compile(optimizer=optimizer(), loss=loss_of, jit_compile=False)
        return called(lambda: model.train_on_batch(data, data))

    return make


def mirrored(name: str, data: tf.Tensor, way: str) -> Way:
    """TensorFlow's own: `model.fit` does not run in it under Keras 3 (TensorFlow 2.21, Keras 3.15), a loop does."""
    with STRATEGY[0].scope():
        model, own = build(name), adamw()
        own.build(model.trainable_variables)

    def replica() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(None, model(data, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        own.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    step = tf.function(lambda: STRATEGY[0].run(replica))
    return called(lambda: STRATEGY[0].experimental_local_results(step())[0], first=2)


STRATEGY: list[tf.distribute.Strategy] = []
WAYS: dict[str, Make] = {
    "no communication": loop(adamw),
    "no communication fit": fit(adamw),
    "horovod fp32": horovod(hvd.Compression.none),
    "horovod fp16": horovod(hvd.Compression.fp16),
    "mirrored fp32": mirrored,
    "onebit": loop(ours),
    "onebit fit": fit(ours),
    "gradients in three bits": loop(
        lambda: onebit.DistributedOptimizer(adamw(), schedule=onebit.Gradients()), first=EXACT_FIRST + 2
    ),
}


def main() -> None:
    options = parse(__doc__)
    hvd.init()
    keras.utils.set_random_seed(0)  # once: TensorFlow then forgets what it has made of functions, which takes time
    take_core(hvd.rank())
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if any(way.startswith("mirrored") for way in options.ways):
        hosts = options.hosts.split(",") if "," in options.hosts else [options.hosts] * hvd.size()
        addresses = [f"{host}:{PORT + i}" for i, host in enumerate(hosts)]
        task = {"type": "worker", "index": hvd.rank()}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        STRATEGY.append(tf.distribute.MultiWorkerMirroredStrategy())
    _, width, batch = MODELS[options.model]
    data = tf.random.stateless_normal((batch, width), seed=(hvd.rank(), 0))
    ways = {}
    for name, most in options.ways.items():
        ways[name] = limited(WAYS[name](options.model, data, name), most, options.steps)
    parameters = sum(v.numpy().size for v in build(options.model).trainable_variables)
    finish(options, hvd, ways, parameters=parameters)


if __name__ == "__main__":
    main()

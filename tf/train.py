"""Train a small network with Keras and Horovod, with or without 1-bit compression.

    horovodrun -np 2 python tf/train.py --task digits --compression onebit --warmup-steps 100 --steps 600

Horovod's own optimizer does not synchronise under Keras 3, so that ``--compression none`` and ``fp16`` are this
project's, with exact means in all steps.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from networks import build

sys.path.append(str(Path(__file__).resolve().parents[1]))

import horovod_onebit.tf as onebit
from horovod_onebit import ConfigurationError, OnebitError, UnsupportedError
from horovod_onebit.stats import allreduce_bytes
from jobs.data import Task, load
from jobs.metrics import Metrics
from jobs.options import Options, learning_rate, parse, recipe_of


def distributed_optimizer(options: Options) -> Any:
    arguments: dict[str, Any] = {"learning_rate": options.lr, "weight_decay": options.weight_decay}
    names = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "lamb": "Lamb"}
    if options.optimizer not in names:
        raise UnsupportedError(f"--optimizer {options.optimizer}: Keras has {', '.join(names)}")
    kind = getattr(keras.optimizers, names[options.optimizer])
    if options.optimizer == "sgd":
        arguments["momentum"] = options.momentum
    half = options.half if options.compression == "onebit" else options.compression == "fp16"
    return onebit.DistributedOptimizer(
        kind(**arguments),
        compression=hvd.Compression.fp16 if half else hvd.Compression.none,
        warmup_steps=options.warmup_steps,
        recipe=recipe_of(options),
    )


def choose_device(options: Options) -> None:
    """Let this worker see one GPU, or none."""
    gpus = tf.config.list_physical_devices("GPU")
    if options.device == "cuda" and not gpus:
        raise ConfigurationError("--device cuda: TensorFlow sees no GPU here: use --device cpu")
    own = gpus[hvd.local_rank() % len(gpus) :][:1] if gpus and options.device != "cpu" else []
    tf.config.set_visible_devices(own, "GPU")
    for gpu in own:
        tf.config.experimental.set_memory_growth(gpu, True)


def channels_last(x: np.ndarray) -> np.ndarray:
    return x.transpose(0, 2, 3, 1) if x.ndim == 4 else x


def evaluate(model: keras.Model, task: Task, loss: Any) -> tuple[float, float]:
    """Loss and accuracy on the test examples; the same on every worker, since the replicas are."""
    logits = model(channels_last(task.test_x), training=False)
    correct = tf.argmax(logits, -1) == task.test_y
    return float(loss(task.test_y, logits)), float(tf.reduce_mean(tf.cast(correct, tf.float32)))


def train(options: Options, task: Task) -> None:
    keras.utils.set_random_seed(options.seed)
    model = build(options.task, options.width, channels_last(task.train_x).shape[1:], task.classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = distributed_optimizer(options)
    optimizer.build(model.trainable_variables)
    onebit.broadcast_variables([*model.variables, *optimizer.variables])

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    parameters = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    dense = allreduce_bytes(4 * parameters, hvd.size())
    first = last = 0
    with Metrics(options, hvd.rank()) as metrics:
        for number in range(options.steps):
            optimizer.learning_rate.assign(learning_rate(options, number))
            x, y = task.batch(options, number, hvd.rank(), hvd.size())
            phase = optimizer.phase.value if options.compression == "onebit" else options.compression
            value = step(tf.convert_to_tensor(channels_last(x)), tf.convert_to_tensor(y))
            stats = optimizer.stats(norms=False)
            last = stats.step_bytes_sent
            first = first or last
            done = number + 1
            values: dict[str, Any] = {
                "phase": phase,
                "bytes_sent": stats.bytes_sent,
                "bytes_received": stats.bytes_sent,
            }
            if done % options.log_interval == 0 or done == options.steps:
                values["loss"] = float(hvd.allreduce(value, name="metrics.loss"))
                if done % options.eval_interval == 0 or done == options.steps:
                    values["test_loss"], values["accuracy"] = evaluate(model, task, loss)
                metrics.log(done, **values)
        metrics.final(
            loss=values["loss"],
            test_loss=values["test_loss"],
            accuracy=values["accuracy"],
            parameters=parameters,
            compressed_parameters=stats.compressed_parameters,
            workers=hvd.size(),
            first_step_bytes=first,
            last_step_bytes=last,
            fp32_step_bytes=dense,
            ratio=dense / last if last else 1.0,
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
        )
    if options.save_weights:
        weights = {f"{i}": v.numpy() for i, v in enumerate(model.trainable_variables)}
        np.savez(options.save_weights.format(rank=hvd.rank()), **weights)


def main() -> int:
    options = parse()
    hvd.init()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    try:
        choose_device(options)
        train(options, load(options))
    except OnebitError as error:
        # On every rank: the first to end ends the job, and it may be any of them.
        print(f"train.py: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

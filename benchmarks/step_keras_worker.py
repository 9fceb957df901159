"""What every process of `benchmarks/step.py --framework tf` runs; prints one line of JSON on rank 0."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from benchmarks.link_job import MODELS, limited
from benchmarks.link_keras_worker import WAYS, adamw, called, loss_of, ours
from benchmarks.measure import Loaded, Way, Workers, compare


class Small(keras.layers.Layer):
    """300 variables of 768 elements, which are not compressed, and one that is."""

    def build(self, _: Any) -> None:
        self.small = [self.add_weight(shape=(768,), name=f"small{i}") for i in range(300)]
        self.large = self.add_weight(shape=(768, 768), name="large")

    def call(self, x: Any) -> Any:
        return tf.matmul(x, self.large) + tf.add_n([tf.convert_to_tensor(v) for v in self.small])


def small(optimizer: Callable[[], Any], data: tf.Tensor) -> Way:
    """One call is a step of the train function that `fit` calls."""
    model = keras.Sequential([keras.layers.Input((768,)), Small()])
    model.compile(optimizer=optimizer(), loss=loss_of, jit_compile=False)
    return limited(called(lambda: model.train_on_batch(data, data)), 10**6, 20)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("step", "small"))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--anyway", action="store_true")
    options = parser.parse_args()
    hvd.init()
    keras.utils.set_random_seed(0)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if options.what == "step":
        _, width, batch = MODELS["25M"]
        data = tf.random.stateless_normal((batch, width), seed=(hvd.rank(), 0))
        names = ("no communication", "horovod fp32", "onebit", "onebit fit")
        ways = {name: limited(WAYS[name]("25M", data, name), 10**6, 2) for name in names}
        pairs = [(way, baseline) for way in names[2:] for baseline in names[:2]]
    else:
        data = tf.random.stateless_normal((8, 768), seed=(hvd.rank(), 0))
        ways, pairs = {"plain": small(adamw, data), "onebit": small(ours, data)}, [("onebit", "plain")]
    found: dict[str, Any]
    try:
        found = compare(ways, pairs, Workers(hvd), seconds=options.seconds, anyway=options.anyway)
    except Loaded as error:
        found = {"refused": str(error)}
    if hvd.rank() == 0:
        print("RESULT", json.dumps(found), flush=True)
    Workers(hvd).barrier()


if __name__ == "__main__":
    main()

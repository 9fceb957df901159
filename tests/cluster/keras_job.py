"""Run by each process of the cluster's tests: Keras, whose workers exchange hierarchically."""

import json
import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.functions import allgather_object

import horovod_onebit.tf as onebit
from horovod_onebit import Recipe


def train(eager, exchange):
    """Weights after some steps, and the exchange; the data are this worker's."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64) for _ in range(3))])
    # A slow link: "auto" finds bytes dear, even of so small a model.
    recipe = Recipe(exchange=exchange, min_compressed_size=256, bucket_size=4096, block_size=64, link=1e5)
    optimizer = onebit.DistributedOptimizer(keras.optimizers.Adam(1e-3), warmup_steps=2, recipe=recipe)
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=eager)
    start = model.get_weights()
    rng = np.random.default_rng(hvd.rank())
    for _ in range(6):
        model.train_on_batch(rng.standard_normal((8, 64)), rng.standard_normal((8, 64)))
    assert all((new != old).any() for new, old in zip(model.get_weights(), start, strict=True))
    return np.concatenate([np.array(w).reshape(-1) for w in model.trainable_variables]), optimizer


def main():
    hvd.init()
    tf.config.threading.set_inter_op_parallelism_threads(1)
    found = []
    for eager, exchange in ((False, "hierarchical"), (True, "hierarchical"), (False, "auto")):
        weights, optimizer = train(eager, exchange)
        replicas = allgather_object(weights, name="weights")
        found.append(
            {
                "exchange": optimizer._compressor.engine.exchange.name,
                "equal": all(np.array_equal(replica, weights) for replica in replicas),
            }
        )
        if exchange == "hierarchical":
            found[-1]["graph is eager"] = bool(np.allclose(weights, train(not eager, exchange)[0], atol=1e-5))
    everybody = allgather_object(found, name="results")
    if hvd.rank() == 0:
        sys.stdout.write("RESULT " + json.dumps(everybody) + "\n")


if __name__ == "__main__":
    main()

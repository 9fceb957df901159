"""The Keras face: ``DistributedOptimizer`` in place of Horovod's, working under Keras 3.

import horovod.tensorflow as hvd
import horovod_onebit.tf as onebit
import keras

hvd.init()
optimizer = onebit.DistributedOptimizer(keras.optimizers.AdamW(1e-3))
model.compile(optimizer=optimizer, loss=..., jit_compile=False)
model.fit(..., callbacks=[onebit.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from horovod_onebit.recipe import Recipe
from horovod_onebit.schedule import Gradients, Local, ZeroOne
from horovod_onebit.tf import callbacks
from horovod_onebit.tf.checkpoint import load_checkpoint, load_weights, save_checkpoint
from horovod_onebit.tf.functions import broadcast_variables
from horovod_onebit.tf.monitor import Monitor
from horovod_onebit.tf.optimizer import DistributedOptimizer
from horovod_onebit.tf.plain import plain_optimizer
from horovod_onebit.tf.replicas import check_replicas

__all__ = [
    "DistributedOptimizer",
    "Gradients",
    "Local",
    "Monitor",
    "Recipe",
    "ZeroOne",
    "broadcast_variables",
    "callbacks",
    "check_replicas",
    "load_checkpoint",
    "load_weights",
    "plain_optimizer",
    "save_checkpoint",
]

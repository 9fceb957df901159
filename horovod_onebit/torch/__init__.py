"""The PyTorch face: ``DistributedOptimizer`` in place of Horovod's.

import horovod.torch as hvd
import horovod_onebit.torch as onebit

optimizer = onebit.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""

from horovod_onebit.schedule import Gradients, Local, ZeroOne
from horovod_onebit.torch import elastic  # Horovod's own elastic state, too, must know these optimizers
from horovod_onebit.torch.checkpoint import load_checkpoint, load_weights, save_checkpoint
from horovod_onebit.torch.functions import broadcast_optimizer_state
from horovod_onebit.torch.lamb import LAMB
from horovod_onebit.torch.monitor import Monitor
from horovod_onebit.torch.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from horovod_onebit.torch.optimizer import DistributedOptimizer

__all__ = [
    "LAMB",
    "DistributedOptimizer",
    "Gradients",
    "Local",
    "Monitor",
    "OnebitAdam",
    "OnebitLamb",
    "ZeroOne",
    "ZeroOneAdam",
    "broadcast_optimizer_state",
    "elastic",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
]

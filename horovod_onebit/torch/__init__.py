"""The PyTorch face: ``DistributedOptimizer`` in place of Horovod's.

import horovod.torch as hvd
import horovod_onebit.torch as onebit

hvd.init()  # in a job of torchrun: torch.distributed.init_process_group("gloo"), and no Horovod
optimizer = onebit.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
onebit.broadcast_parameters(model.state_dict(), root_rank=0)
onebit.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from importlib import import_module
from typing import Any

from horovod_onebit.recipe import Recipe
from horovod_onebit.schedule import Gradients, Local, ZeroOne
from horovod_onebit.torch.checkpoint import load_checkpoint, load_weights, save_checkpoint
from horovod_onebit.torch.functions import broadcast_optimizer_state, broadcast_parameters
from horovod_onebit.torch.lamb import LAMB
from horovod_onebit.torch.monitor import Monitor
from horovod_onebit.torch.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from horovod_onebit.torch.optimizer import DistributedOptimizer
from horovod_onebit.torch.transport import Average, Compression, Sum

__all__ = [
    "LAMB",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Gradients",
    "Local",
    "Monitor",
    "OnebitAdam",
    "OnebitLamb",
    "Recipe",
    "Sum",
    "ZeroOne",
    "ZeroOneAdam",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    """``elastic``, which needs Horovod."""
    if name != "elastic":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.elastic")

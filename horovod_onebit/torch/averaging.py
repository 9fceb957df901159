"""``DistributedDataParallel`` around the model averages gradients by itself: that is switched off, or refused."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from horovod_onebit.errors import ConfigurationError


def switch_off(model: Any) -> None:
    """Let gradients stay each worker's own in every ``DistributedDataParallel`` that is ``model``, or in it. Local.

    Raises ``ConfigurationError`` for what is no module; None is accepted.
    """
    if model is None:
        return
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"model is {type(model).__name__}: expected the torch.nn.Module that is trained")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = False


def check(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ``ConfigurationError`` if a ``DistributedDataParallel`` averages gradients of ``parameters``. Local; looks
    at all objects of the program, since the hooks of that class do not show in Python."""
    own = set(map(id, parameters))
    for found in gc.get_objects():
        if not issubclass(type(found), DistributedDataParallel):
            continue
        if getattr(found, "require_backward_grad_sync", False) and not own.isdisjoint(map(id, found.parameters())):
            raise ConfigurationError(
                "the model is in DistributedDataParallel, which averages its gradients by itself, before they are "
                "compressed: set model.require_backward_grad_sync = False, or pass DistributedOptimizer(..., "
                "model=model), which does it"
            )

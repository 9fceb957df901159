"""``DistributedDataParallel`` around the model averages gradients by itself: that is switched off, or refused."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from horovod_onebit.errors import ConfigurationError


class _FirstForward:
    """In the first forward pass, a trainer has wrapped the model, and no gradient has been averaged yet."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._handle = model.register_forward_pre_hook(self)

    def __call__(self, model: torch.nn.Module, inputs: Any) -> None:
        self._handle.remove()
        for found in _averaging(model.parameters()):
            found.require_backward_grad_sync = False


def switch_off(model: Any) -> None:
    """Let gradients stay each worker's own in every ``DistributedDataParallel`` that is ``model``, is in it, or is put
    around it before its first forward pass. Local.

    Raises ``ConfigurationError`` for what is no module; None is accepted.
    """
    if model is None:
        return
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"model is {type(model).__name__}: expected the torch.nn.Module that is trained")
    for found in _averaging(model.parameters()):
        found.require_backward_grad_sync = False
    _FirstForward(model)


def check(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ``ConfigurationError`` if a ``DistributedDataParallel`` averages gradients of ``parameters``. Local."""
    for _ in _averaging(parameters):
        raise ConfigurationError(
            "the model is in DistributedDataParallel, which averages its gradients by itself, before they are "
            "compressed: set model.require_backward_grad_sync = False, or pass DistributedOptimizer(..., model=model), "
            "which does it"
        )


def _averaging(parameters: Iterable[torch.Tensor]) -> Iterator[DistributedDataParallel]:
    """Those that average gradients of ``parameters``, among all objects of the program: their hooks do not show in
    Python."""
    own = set(map(id, parameters))
    for found in gc.get_objects():
        averages = issubclass(type(found), DistributedDataParallel) and found.require_backward_grad_sync
        if averages and not own.isdisjoint(map(id, found.parameters())):
            yield found

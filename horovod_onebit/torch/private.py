"""Functions that PyTorch keeps to itself and this face needs, but for methods of what it subclasses;
``tests/unit/test_private.py`` looks for all of them.

``untraced`` keeps a function out of ``torch.compile``, as ``torch.optim`` does: ``torch.compiler.disable`` would import
the compiler at once. ``add_to_all`` adds a number to many tensors in one call. ``running_ddp`` says which
``DistributedDataParallel`` is in its forward pass, ``joins`` whether it is in ``join()``. And PyTorch asks an optimizer
what it is in ways that have no public form: only the caller tells who asks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from horovod_onebit.checks import check_version

check_version("torch", torch.__version__)
untraced: Callable[..., Any] = _disable_dynamo
add_to_all: Callable[[list[torch.Tensor], float], None] = torch._foreach_add_
running_ddp: Callable[[], Any] = DistributedDataParallel._get_active_ddp_module


def joins(model: DistributedDataParallel) -> bool:
    """Whether ``model`` trains within ``Join``, where workers may have other numbers of batches."""
    return bool(model._join_config.enable)


def asked_by_pytorch() -> bool:
    """Whether PyTorch itself has called the function that calls this."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith("torch.")


def called_by(modules: Collection[str], own: str) -> bool:
    """Whether a function of ``modules`` has called the function of ``own`` that calls this, PyTorch's own wrappers
    apart."""
    frame, name = sys._getframe(2), own
    while frame is not None and name not in modules and name.startswith(("torch.", own)):
        name = frame.f_globals.get("__name__", "")
        frame = frame.f_back  # type: ignore[assignment]
    return name in modules


def timeout_of(group: Any) -> Any:
    """How long a process group of ``torch.distributed`` waits, a ``timedelta``; None if its backends do not say."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None

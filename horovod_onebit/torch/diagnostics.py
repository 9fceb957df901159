"""Gradients of a PyTorch model for ``horovod_onebit.diagnostics``."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from horovod_onebit.tools.diagnostics import Collector, Report

__all__ = ["Collector", "Report", "gradients"]


def gradients(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> dict:
    """Name -> gradient, float32 in the shape of the parameter, for ``Collector.add`` after ``backward()``; parameters
    without a gradient are left out. Between ``backward()`` and ``step()`` these are this worker's own gradients, unless
    ``synchronize()`` or ``clip_grad_norm_()`` was called in the warm-up. Local."""
    return {
        name: p.grad.detach().to("cpu", torch.float32).numpy() for name, p in named_parameters if p.grad is not None
    }

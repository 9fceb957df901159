"""Gradients of a PyTorch model for ``horovod_onebit.diagnostics``."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from horovod_onebit.tools.diagnostics import Collector, Report

__all__ = ["Collector", "Report", "gradients"]


def gradients(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> dict:
    """What ``Collector.add`` takes, after ``backward()``; in the compressed stage these are this worker's own."""
    return {
        name: p.grad.detach().to("cpu", torch.float32).numpy() for name, p in named_parameters if p.grad is not None
    }

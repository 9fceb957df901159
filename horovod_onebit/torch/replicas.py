"""Weights and optimizer state of all workers, compared bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from horovod_onebit import replicas

if TYPE_CHECKING:
    from horovod_onebit.torch.compressor import Compressor


def check_replicas(compressor: Compressor) -> None:
    """Raise ``DesyncError`` on all workers if theirs are not the same. Collective."""
    checksums: dict[str, int] = {}
    for p in compressor.ordered():
        name = compressor.names.get(p, "")
        own = {name: p, **{f"{name} ({key})": value for key, value in compressor.optimizer.state[p].items()}}
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                checksums[f"{key}#{len(checksums)}" if key in checksums else key] = replicas.checksum(data.numpy())
    replicas.check(checksums, compressor.engine.collectives, f"{compressor.engine.name}.replicas")

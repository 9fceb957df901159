"""What an optimizer does when Horovod was started anew, with other workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from horovod_onebit import world

if TYPE_CHECKING:
    from horovod_onebit.torch.compressor import Compressor


def leave(compressor: Compressor) -> None:
    """Forget what is under way, remember what is owed. Local."""
    compressor.left = world.leave(compressor.engine, compressor.left)
    compressor.synchronizer.forget_world()
    compressor.agreement.reset()
    compressor.overlap.reset()
    compressor.changed()


def settle(compressor: Compressor) -> None:
    """Share out what was owed, if the workers have changed; all of them or none call this after ``leave``. Collective
    then."""
    if compressor.left is not None:
        sizes = {compressor.names[p]: p.numel() for p in compressor.bindings}
        world.share_out(compressor.engine, compressor.left, sizes)
        compressor.left = None

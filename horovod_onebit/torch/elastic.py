"""Horovod elastic with 1-bit optimizers: workers may die, leave and join, and the residuals are kept. ::

    import horovod_onebit.torch.elastic as elastic

    @elastic.run
    def train(state):
        while state.step < steps:
            ...
            state.optimizer.step()
            state.step += 1
            if state.step % 10 == 0:
                state.commit()

    train(elastic.TorchState(model=model, optimizer=optimizer, step=0))

Start it with ``horovodrun --gloo --min-np ... --max-np ... --host-discovery-script ...``. Everything else is as
in ``horovod.torch.elastic``. Its own ``TorchState`` and ``run`` work too, but the ``run`` of this module does not hang
when one worker leaves while another joins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import horovod.torch.elastic as hvd_elastic
import torch
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch.elastic import ElasticSampler
from horovod.torch.elastic import run as _run  # by name: `horovod_onebit.install` replaces it in Horovod's module
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from horovod_onebit import tasks
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.face import always_synchronizing, values_of_now
from horovod_onebit.torch.functions import broadcast_optimizer_state
from horovod_onebit.torch.optimizer import _DistributedOptimizer

__all__ = ["ElasticSampler", "TorchState", "run"]


class _OptimizerHandler(StateHandler):
    """Keeps, takes back and hands on the state of one optimizer, and what a checkpoint has of this worker alone."""

    value: _DistributedOptimizer

    def __init__(self, optimizer: _DistributedOptimizer) -> None:
        if optimizer._compressor.transport.number != 0:
            raise ConfigurationError("Horovod elastic has no process sets but the whole world's")
        super().__init__(optimizer)
        self.save()

    def save(self) -> None:
        self._state = copy.deepcopy(self.value.state_dict())
        self._residuals = self.value._compressor.residuals()

    def restore(self) -> None:
        self._drop_gradients()
        self.value.load_state_dict(self._state)
        self.value._compressor.load_residuals(self._residuals)

    def sync(self) -> None:
        """After Horovod was restarted: worker 0's state, and all residuals. Collective."""
        compressor = self.value._compressor
        self._drop_gradients()
        compressor.leave_world()
        broadcast_optimizer_state(self.value, root_rank=0)  # type: ignore[arg-type]
        tasks.run(compressor.redistribute())

    def _drop_gradients(self) -> None:
        """Those of a step that came to nothing: all passes of the next one begin anew, on new workers, too."""
        optimizer: Any = self.value
        torch.optim.Optimizer.zero_grad(optimizer, set_to_none=False)  # in place: a program may hold them


set_handler_registry([(_DistributedOptimizer, _OptimizerHandler), *get_handler_registry()])


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """``horovod.torch.elastic.run``: call ``function(state, ...)`` again whenever the workers have changed, each time
    after ``state.sync()``."""
    return _run(always_synchronizing(function, HostsUpdatedInterrupt))


class TorchState(hvd_elastic.TorchState):
    """``horovod.torch.elastic.TorchState``; workers whose weights differ between exchanges (0/1 Adam, ``Local``) are
    brought together before they are saved. If workers join or leave in the middle of a round, the changes that the
    others have made in it are kept. After ``sync``, ``restore`` goes back to what it gave, until the next
    ``commit``. Its arguments are Horovod's: ``model``, ``optimizer``, and any other values as keywords, which become
    attributes."""

    def _optimizers(self) -> list[_DistributedOptimizer]:
        return [handler.value for handler in self._handlers.values() if isinstance(handler, _OptimizerHandler)]

    def save(self) -> None:
        for optimizer in self._optimizers():
            optimizer.flush()
        super().save()

    def sync(self) -> None:
        for optimizer in self._optimizers():
            optimizer._compressor.fold()
        with values_of_now(self):
            super().sync()
        for handler in self._handlers.values():  # all at once, and a new worker's, too: Horovod keeps its first weights
            handler.save()

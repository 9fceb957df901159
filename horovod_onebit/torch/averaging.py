"""``DistributedDataParallel`` around the model averages gradients by itself: that is switched off, or refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.torch.private import joins, running_ddp, untraced

_off: Any = weakref.WeakSet()
"""Those in which averaging is switched off in every forward pass: leaving ``no_sync()`` would switch it on again."""


class _Nothing:
    """A hook that does nothing."""

    def __call__(self, model: torch.nn.Module, inputs: Any) -> None:
        pass


class _SwitchOff:
    """A hook before each forward pass of ``model``: by then, a trainer has wrapped it, and may do so again. Copies of
    the model, in a file, say, are nobody's."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._found: Any = weakref.WeakSet()
        self._others: Any = weakref.WeakSet()  # of other models
        self._looked = False
        model.register_forward_pre_hook(self)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Nothing, ()

    @untraced
    def __call__(self, model: torch.nn.Module, inputs: Any) -> None:
        if not self._looked:
            self._looked = True
            self._add(_around(model.parameters()))
        running = running_ddp()
        if running is not None and running not in self._found and running not in self._others:
            if set(map(id, model.parameters())).isdisjoint(map(id, running.parameters())):
                self._others.add(running)
            else:
                self._add([running])
        for found in self._found:
            found.require_backward_grad_sync = False
            _check_switched_off(found)

    def _add(self, found: Iterable[DistributedDataParallel]) -> None:
        self._found.update(found)
        _off.update(self._found)


def _check_switched_off(found: DistributedDataParallel) -> None:
    """Raise ``UnsupportedError`` for what does not work without averaging."""
    if found.static_graph:
        raise UnsupportedError(
            "DistributedDataParallel(static_graph=True) averages gradients in its first backward pass, whatever it is "
            "told: leave static_graph out"
        )
    if joins(found):
        raise UnsupportedError(
            "model.join(), or torch.distributed.algorithms.Join: a worker without batches answers only what "
            "DistributedDataParallel asks, and the others would wait for it: give all workers as many batches"
        )


def switch_off(model: Any) -> None:
    """Let gradients stay each worker's own in every ``DistributedDataParallel`` that is ``model``, is in it, or is put
    around it. Local.

    Raises ``ConfigurationError`` for what is no module; None is accepted.
    """
    if model is None:
        return
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"model is {type(model).__name__}: expected the torch.nn.Module that is trained")
    _off.update(_around(model.parameters()))
    _SwitchOff(model)


def check(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ``ConfigurationError`` if a ``DistributedDataParallel`` averages gradients of ``parameters``. Local."""
    if any(found.require_backward_grad_sync and found not in _off for found in _around(parameters)):
        raise ConfigurationError(
            "the model is in DistributedDataParallel, which averages its gradients by itself, before they are "
            "compressed: set model.require_backward_grad_sync = False, or pass DistributedOptimizer(..., model=model), "
            "which does it"
        )


def _around(parameters: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
    """Those that have some of ``parameters``, among all objects of the program: their hooks do not show in Python."""
    own, kinds = set(map(id, parameters)), set(_kinds(DistributedDataParallel))
    # An object refers to its class. To look at all objects in Python would take three times as long.
    all_of_them = [found for found in gc.get_referrers(*kinds) if type(found) in kinds]
    return [found for found in all_of_them if not own.isdisjoint(map(id, found.parameters()))]


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)

"""``DistributedDataParallel`` around the model averages gradients by itself: that is switched off, or refused."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.torch.private import joins, running_ddp, untraced

logger = logging.getLogger("horovod_onebit")

_switches: Any = weakref.WeakSet()
"""The ``_Switch`` of each optimizer that is alive and has a model."""
_trained: Any = weakref.WeakSet()
"""The ``Parameters`` of each optimizer that is alive."""


class _Nothing:
    """Takes the place of a ``_Switch`` where the model is copied or pickled: a hook that does nothing."""

    def __call__(self, model: torch.nn.Module, inputs: Any) -> None:
        pass


class _Switch:
    """Switches averages off: at once, and as a hook before each forward pass of ``model``, because a trainer may wrap
    it later, or anew, and leaving ``no_sync()`` switches them on. Copies of the model, in a file, say, are nobody's.

    Attributes:
        off: those whose averages it has switched off.
        ended: whether its optimizer is gone.
    """

    def __init__(self, model: torch.nn.Module, speaks: bool) -> None:
        self._speaks = speaks
        self.off: Any = weakref.WeakSet()
        self.ended = False
        self._others: Any = weakref.WeakSet()  # of other models
        self._looked = False
        self._handle = model.register_forward_pre_hook(self)
        _switches.add(self)
        self._switch_off(_of(model))

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Nothing, ()

    @untraced
    def __call__(self, model: torch.nn.Module, inputs: Any) -> None:
        if not self._looked:
            self._looked = True
            self._switch_off(_of(model))
        running = running_ddp()
        if running is not None and running not in self.off and running not in self._others:
            if set(map(id, model.parameters())).isdisjoint(map(id, running.parameters())):
                self._others.add(running)
            else:
                self._switch_off([running])
        for found in self.off:
            found.require_backward_grad_sync = False
            _check_switched_off(found)

    def _switch_off(self, found: Iterable[DistributedDataParallel]) -> None:
        for one in found:
            one.require_backward_grad_sync = False
            self.off.add(one)

    def end(self) -> None:
        """The optimizer is gone, on other workers perhaps not yet: nothing is switched on."""
        self._handle.remove()
        self.ended = True
        if any(not _is_off(found) for found in self.off):
            logger.log(
                logging.WARNING if self._speaks else logging.DEBUG,
                "the DistributedOptimizer of a model in DistributedDataParallel is gone, whose averages are still "
                "switched off: set model.require_backward_grad_sync = True on all workers, if it is to train with a "
                "plain optimizer",
            )


def _is_off(found: DistributedDataParallel) -> bool:
    return any(found in one.off for one in _switches if not one.ended)


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


def switch_off(model: torch.nn.Module | None, optimizer: Any, *, speaks: bool = True) -> None:
    """Let gradients stay each worker's own in every ``DistributedDataParallel`` that is ``model``, is in it, or is put
    around it, as long as the ``optimizer`` lives. Local; None is accepted. ``speaks``: this worker says so when the
    optimizer is gone."""
    if model is not None:
        weakref.finalize(optimizer, _Switch(model, speaks).end).atexit = False


def check(parameters: Iterable[torch.Tensor], model: Any = None) -> None:
    """Raise ``ConfigurationError`` if a ``DistributedDataParallel`` averages gradients of ``parameters``, other than
    one of the ``model``, which will be switched off; or if ``model`` is neither a module nor None. Local."""
    if not isinstance(model, torch.nn.Module | None):
        raise ConfigurationError(f"model is {type(model).__name__}: expected the torch.nn.Module that is trained")
    own = [] if model is None else _of(model)
    if any(one.require_backward_grad_sync and one not in own and not _is_off(one) for one in _around(parameters)):
        raise ConfigurationError(
            "the model is in DistributedDataParallel, which averages its gradients by itself, before they are "
            "compressed: set model.require_backward_grad_sync = False, or pass DistributedOptimizer(..., model=model), "
            "which does it"
        )


def know(parameters: Any) -> None:
    """These are the ``Parameters`` of an optimizer."""
    _trained.add(parameters)


def not_averaged() -> list[str]:
    """The names of parameters whose averages are switched off and which no optimizer of this library trains. Local."""
    known = {id(p) for parameters in _trained for p in parameters.ordered()}
    pairs = (pair for one in _switches if not one.ended for found in one.off for pair in found.named_parameters())
    return [name for name, p in pairs if p.requires_grad and id(p) not in known]


def _of(model: torch.nn.Module) -> list[DistributedDataParallel]:
    """Those that are ``model``, are in it, or have some of its parameters."""
    inside = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    return [*inside, *(one for one in _around(model.parameters()) if one not in inside)]


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

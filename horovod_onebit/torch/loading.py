"""Whether a saved state fits a model and an optimizer: checked on every worker before anything of it is used.

States are ``state_dict``s, whose tensors may be replaced by anything that has their ``shape`` and ``dtype``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import chain, repeat
from typing import Any

import torch

from horovod_onebit.checkpoints import check_same
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.torch.arguments import COMPILED, UNNAMED
from horovod_onebit.torch.arrays import has_bytes
from horovod_onebit.torch.parameters import STATE_KEY, Parameters
from horovod_onebit.torch.plain import entries_of
from horovod_onebit.torch.progress import Progress
from horovod_onebit.torch.rules import HYPERPARAMETERS


def named_as_in(model: torch.nn.Module, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """``saved`` by the names of the model's state, whichever of the two was compiled by ``torch.compile``."""
    names = {name.replace(COMPILED, ""): name for name in model.state_dict()}
    renamed = {names.get(name.replace(COMPILED, ""), name): value for name, value in saved.items()}
    return saved if renamed.keys() == saved.keys() else renamed


def is_extra(name: str) -> bool:
    """Whether that is the name in a state of what a module returns from ``get_extra_state``."""
    return name.rpartition(".")[2] == "_extra_state"


def check_model(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Raise ``ConfigurationError`` unless ``saved`` has the names, shapes and dtypes of the model's state.

    What modules return from ``get_extra_state`` may differ: that of a new model is often empty.
    """

    def described(state: Mapping[str, Any]) -> dict[str, str]:
        return {name: "" if is_extra(name) else _described(value) for name, value in state.items()}

    check_same("model", described(saved), described(model.state_dict()))


def check_optimizer(parameters: Parameters, saved: Mapping[str, Any], *, ordered: bool) -> None:
    """Raise ``ConfigurationError`` unless ``saved`` is the state of such an optimizer with such parameter groups; if it
    is to be ``ordered``, of parameters in the same order, as far as their names tell."""
    groups, own = saved["param_groups"], parameters.optimizer.param_groups
    found, expected = [len(group["params"]) for group in groups], [len(group["params"]) for group in own]
    if found != expected:
        raise ConfigurationError(f"the state has groups of {found} parameters, expected {expected}")
    for mine, group in zip(own, groups, strict=True):
        parameters.adapter.check(group)
        for what, names in (("has no", mine.keys() - group.keys()), ("has", group.keys() - mine.keys())):
            if names := names & HYPERPARAMETERS:
                raise ConfigurationError(f"the state {what} {', '.join(sorted(names))}: it is of another optimizer")
    progress = Progress.of(groups[0].get(STATE_KEY) if groups else None, sum(expected))
    if ordered:
        _check_order([parameters.names.get(p, "") for p in parameters.ordered()], list(progress.names))
    ids = [i for group in groups for i in group["params"]]
    counts = chain(progress.exact_steps, repeat(0))
    for i, p, count in zip(ids, parameters.ordered(), counts, strict=False):
        started = p.requires_grad and count > 0
        _check_state(parameters, p, saved["state"].get(i, {}), started=started)


def check_not_live(parameters: Parameters, saved: Mapping[str, Any], theirs: Container[int]) -> None:
    """Raise ``ConfigurationError`` if tensors of ``saved``, whose ids are ``theirs``, are those of the optimizer, which
    has taken steps since: its progress is that of before."""
    own = saved["param_groups"][0].get(STATE_KEY) if saved["param_groups"] else None
    taken = parameters.steps - (0 if own is None else Progress.of(own, len(parameters.ordered())).steps)
    tensors = (v for entries in entries_of(parameters.optimizer.state) for v in entries.values() if has_bytes(v))
    # Below 0, a later state was loaded in place (torch.distributed.checkpoint), or the plain optimizer wrapped again.
    if own is not None and taken > 0 and any(id(value) in theirs for value in tensors):
        raise ConfigurationError(
            f"this state has the running optimizer's own tensors, which have changed in the {taken} steps since "
            "state_dict() gave it: keep copy.deepcopy(optimizer.state_dict()), and load that"
        )


def _check_order(own: list[str], saved: list[str]) -> None:
    """States are by position. Of other names nothing is known, since layers may have been renamed; nor of parameters
    without one."""
    named = not any(name.startswith(UNNAMED) for name in own)
    if named and own != saved and sorted(own) == sorted(saved):
        where = next(i for i, (mine, other) in enumerate(zip(own, saved, strict=True)) if mine != other)
        raise ConfigurationError(
            f"the optimizer's parameters are in another order than those of the state: number {where} is {own[where]}, "
            f"expected {saved[where]}. Build the optimizer with its parameters in the order that they had"
        )


def _check_state(parameters: Parameters, p: torch.Tensor, state: Mapping[str, Any], *, started: bool) -> None:
    adapter, name = parameters.adapter, parameters.names.get(p, "a parameter")
    for key in filter(None, (adapter.momentum_key, adapter.variance_key, adapter.anchor_key)):
        value = state.get(key)
        if value is not None and tuple(value.shape) != tuple(p.shape):
            raise ConfigurationError(
                f"the state's {key} of {name} has shape {tuple(value.shape)}, expected {tuple(p.shape)}"
            )
        if value is None and started and adapter.variance_key is not None and key != adapter.anchor_key:
            raise ConfigurationError(f"the state has no {key} of {name}: it is of another optimizer")


def _described(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"{tuple(shape)} {dtype}" if shape is not None and dtype is not None else "no tensor"

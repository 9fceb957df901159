"""The arguments of ``DistributedOptimizer``, checked before anything is built."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from horovod_onebit import face
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.torch.transport import Op, Transport

COMPILED = "_orig_mod."
"""What ``torch.compile`` puts before the names of a module's parameters and state."""
UNNAMED = "allreduce.noname."
"""Begins the names of parameters that were given none, as in Horovod."""


@dataclass(frozen=True, kw_only=True)
class Arguments(face.Arguments):
    """Those of Horovod's own ``DistributedOptimizer``, checked; ``groups`` by the parameters' names."""

    constants = Op

    groups: int | list[list[str | None]] | None
    transport: Transport

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(callable(getattr(self.compression, name, None)) for name in ("compress", "decompress")):
            raise ConfigurationError(
                f"compression={self.compression!r}: expected Compression.none or Compression.fp16 (Horovod's, or those "
                "of horovod_onebit.torch), for exact steps"
            )

    def named(self) -> dict[str, object]:
        """What must be the same on all workers."""
        return {
            "compression": getattr(self.compression, "__name__", type(self.compression).__name__),
            "op": int(self.op),
            "gradient_predivide_factor": self.gradient_predivide_factor,
            "groups": self.groups,
            "sparse_as_dense": self.sparse_as_dense,
        }

    def __str__(self) -> str:
        return str(self.named())


def groups_of(groups: Any, num_groups: int, names: dict[torch.Tensor, str]) -> int | list[list[str | None]] | None:
    """Horovod's ``groups``, which may be called by its old name, with parameters by their names."""
    if num_groups:
        warnings.warn("num_groups is Horovod's old name for groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return groups
    if not isinstance(groups, list) or not all(isinstance(p, torch.Tensor) for group in groups for p in group):
        raise ConfigurationError("groups: expected a whole number >= 0, or a list of lists of torch.Tensor")
    members = [id(p) for group in groups for p in group]
    if len(set(members)) != len(members):
        raise ConfigurationError("groups: a parameter can only appear once")
    return [[names.get(p) for p in group] for group in groups]


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> tuple[dict[torch.Tensor, str], dict[torch.Tensor, str]]:
    """Parameter -> name, for the parameters of ``optimizer``, in the order of its groups; and for those that are named
    and not in it, which may be added later."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if not own:
        raise ConfigurationError("the optimizer has no parameters")
    if named_parameters is None:
        # PyTorch's optimizers keep names that they were given.
        given = [name for group in optimizer.param_groups for name in names_in(group)]
        if len(set(given)) == len(given) == len(own):
            return dict(zip(own, given, strict=True)), {}
        places = ((i, j) for i, group in enumerate(optimizer.param_groups) for j in range(len(group["params"])))
        return {p: f"{UNNAMED}{i}.{j}" for p, (i, j) in zip(own, places, strict=True)}, {}
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if not all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)
        for pair in pairs
    ):
        raise ConfigurationError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    duplicates = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if duplicates:
        raise ConfigurationError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    # A tied parameter may be listed under several names: the first in alphabetical order is the same everywhere.
    short = {name: name.replace(COMPILED, "") for name, _ in pairs}
    if len({(short[name], p) for name, p in pairs}) == len(set(short.values())):  # no two have one name then
        pairs = [(short[name], p) for name, p in pairs]
    by_parameter = {p: name for name, p in sorted(pairs, key=lambda pair: pair[0], reverse=True)}
    unnamed = [i for i, p in enumerate(own) if p not in by_parameter]
    if unnamed:
        raise ConfigurationError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"positions {unnamed} in the optimizer, shapes {[tuple(own[i].shape) for i in unnamed]}"
        )
    names = {p: by_parameter[p] for p in own}
    return names, {p: name for p, name in by_parameter.items() if p not in names}


def names_in(group: Mapping[str, Any]) -> list[str]:
    """Of the parameters of ``group``, if PyTorch was given any, as of a model that is not compiled."""
    names = group.get("param_names") or ()
    return [name.replace(COMPILED, "") for name in names] if len(names) == len(group["params"]) else []


def patterns_of(exact: Any) -> Any:
    """The patterns ``exact`` for such names, if they are patterns."""
    if not isinstance(exact, Iterable) or isinstance(exact, str):
        return exact
    return tuple(one.replace(COMPILED, "") if isinstance(one, str) else one for one in exact)

"""The arguments of ``DistributedOptimizer``, checked before anything is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch

from horovod_onebit.checks import positive, whole
from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.schedule import ZeroOne
from horovod_onebit.warmup import Warmup
from horovod_onebit.warmup import make as make_warmup


def warmup_of(steps: Any, total_steps: int | None, schedule: ZeroOne | None) -> Warmup:
    if schedule is None:
        if steps is None:
            raise ConfigurationError("warmup_steps is missing: a number of exact steps (20 to 100), or 'auto'")
        return make_warmup(steps, total_steps)
    if not isinstance(schedule, ZeroOne) or steps is not None:
        text = f"schedule={schedule!r}, warmup_steps={steps!r}: expected a ZeroOne, whose first steps are the warm-up"
        raise ConfigurationError(text)
    return make_warmup(schedule.var_update_scaler)


def check_arguments(passes: Any, op: Any, predivide: float, groups: Any, process_set: Any) -> None:
    if not hvd.is_initialized():
        raise ConfigurationError("call hvd.init() before DistributedOptimizer")
    whole("backward_passes_per_step", passes)
    if op not in (hvd.Average, hvd.Sum):
        raise UnsupportedError(f"op={op!r}: 1-bit compression averages signs; expected hvd.Average or hvd.Sum")
    if positive("gradient_predivide_factor", predivide) != 1.0 and op != hvd.Average:
        raise ConfigurationError("gradient_predivide_factor needs op=hvd.Average")
    if not isinstance(process_set, hvd.ProcessSet):
        raise ConfigurationError(f"process_set={process_set!r}: expected what hvd.add_process_set returned")
    if process_set.process_set_id is None:
        raise ConfigurationError("process_set is not registered: pass it to hvd.init or hvd.add_process_set first")
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return
    if not isinstance(groups, list) or not all(isinstance(p, torch.Tensor) for group in groups for p in group):
        raise ConfigurationError("groups: expected a whole number >= 0, or a list of lists of torch.Tensor")
    members = [id(p) for group in groups for p in group]
    if len(set(members)) != len(members):
        raise ConfigurationError("groups: a parameter can only appear once")


def check_interval(every: int | None, schedule: ZeroOne | None) -> None:
    """``check_replicas_every``."""
    if every is None:
        return
    whole("check_replicas_every", every, "None or a whole number of steps")
    if schedule is not None:
        raise UnsupportedError("0/1 Adam's workers differ between exchanges: call flush() and check_replicas() instead")


def check_compression(compression: Any) -> None:
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise ConfigurationError(
            f"compression={compression!r}: expected hvd.Compression.none or hvd.Compression.fp16, for the warm-up"
        )


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Parameter -> name, for the parameters of ``optimizer``, in the order of its groups."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if not own:
        raise ConfigurationError("the optimizer has no parameters")
    if named_parameters is None:
        return {
            p: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        }
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
    by_parameter = {p: name for name, p in sorted(pairs, key=lambda pair: pair[0], reverse=True)}
    unnamed = [i for i, p in enumerate(own) if p not in by_parameter]
    if unnamed:
        raise ConfigurationError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"positions {unnamed} in the optimizer, shapes {[tuple(own[i].shape) for i in unnamed]}"
        )
    return {p: by_parameter[p] for p in own}

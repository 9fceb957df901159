"""What both faces need of Horovod, whichever framework it serves. The core imports neither this nor Horovod."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet

from horovod_onebit.checks import flag, positive, whole
from horovod_onebit.errors import ConfigurationError, UnsupportedError


def check_arguments(
    hvd: Any,
    *,
    op: Any,
    gradient_predivide_factor: float,
    backward_passes_per_step: int,
    sparse_as_dense: bool,
    process_set: Any,
) -> None:
    """The arguments that Horovod's ``DistributedOptimizer`` has in both frameworks; ``hvd`` is its module."""
    whole("backward_passes_per_step", backward_passes_per_step)
    flag("sparse_as_dense", sparse_as_dense)
    if op not in (hvd.Average, hvd.Sum):
        raise UnsupportedError(f"op={op!r}: 1-bit compression averages signs; expected hvd.Average or hvd.Sum")
    if positive("gradient_predivide_factor", gradient_predivide_factor) != 1.0 and op != hvd.Average:
        raise ConfigurationError("gradient_predivide_factor needs op=hvd.Average")
    if not isinstance(process_set, ProcessSet):
        raise ConfigurationError(f"process_set={process_set!r}: expected what hvd.add_process_set returned")
    if process_set.process_set_id is None:
        raise ConfigurationError("process_set is not registered: pass it to hvd.init or hvd.add_process_set first")


def scaling(hvd: Any, op: Any, gradient_predivide_factor: float) -> dict[str, float]:
    """The factors before and after Horovod's own averages, as its operations call them."""
    factor = gradient_predivide_factor if op == hvd.Average else 1.0
    return {"prescale_factor": 1.0 / factor, "postscale_factor": factor}


_named: Counter[tuple] = Counter()


def next_name(process_set: Any, label: str | None = None, *, loaded: bool = False) -> str:
    """Begins the names of an optimizer's collectives: the same on all workers of the set.

    By the order in which optimizers are built, so that two models that one worker trains in another order are told
    apart. Loaded ones are counted apart: worker 0 may load a model alone, to read it, or to go on with it where the
    others build theirs.
    """
    # Counted by members: Horovod gives the id of a removed set to the next one, which may have other members.
    key = (tuple(process_set.ranks or ()), label, loaded)
    number = _named[key]
    _named[key] += 1
    return ".".join(str(part) for part in ("onebit", process_set.process_set_id, label, number) if part is not None)


def agreement_name(process_set: Any) -> str:
    """The one name of the agreements of ``process_set``, whatever optimizer they are of."""
    return f"onebit.{process_set.process_set_id}.agreement"


def always_synchronizing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(state, ...)`` for Horovod elastic's ``run``, so that all workers synchronize whenever hosts change.

    Horovod lets workers that were told of a removal skip ``state.sync()``; if another worker joins them in the same
    moment, it waits there for ever.
    """

    @functools.wraps(function)
    def in_step(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(state, *args, **kwargs)
        except HostsUpdatedInterrupt as interrupt:
            raise HostsUpdatedInterrupt(skip_sync=False) from interrupt

    return in_step

"""What the faces share: arguments, and what PyTorch and Keras need of Horovod, which they hand over. Nothing here
imports it, or a framework."""

from __future__ import annotations

import functools
import os
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from horovod_onebit.checks import flag, positive, whole
from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.recipe import Recipe
from horovod_onebit.schedule import EXACT, Gradients, Local, Schedule, check, resolve
from horovod_onebit.warmup import FOREVER, NEVER, AfterRise, Warmup
from horovod_onebit.warmup import make as make_warmup


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Those that Horovod's ``DistributedOptimizer`` has in both frameworks, checked.

    ``constants`` has ``Average`` and ``Sum``; a face's own class names it.
    """

    constants: ClassVar[Any]

    compression: Any
    backward_passes_per_step: int
    op: Any
    gradient_predivide_factor: float
    sparse_as_dense: bool

    def __post_init__(self) -> None:
        whole("backward_passes_per_step", self.backward_passes_per_step)
        flag("sparse_as_dense", self.sparse_as_dense)
        if self.op not in (self.constants.Average, self.constants.Sum):
            raise UnsupportedError(f"op={self.op!r}: 1-bit compression averages signs; expected Average or Sum")
        if positive("gradient_predivide_factor", self.gradient_predivide_factor) != 1.0 and self.sums:
            raise ConfigurationError("gradient_predivide_factor needs op=Average")

    @property
    def sums(self) -> bool:
        """Whether gradients are added up, and not averaged."""
        return self.op == self.constants.Sum

    def check_local(self) -> None:
        """Raise ``UnsupportedError`` for what concerns averaged gradients: workers that take steps alone have none."""
        if self.sums or self.gradient_predivide_factor != 1.0:
            raise UnsupportedError(
                f"op={self.op!r}, gradient_predivide_factor={self.gradient_predivide_factor!r}: with "
                "schedule=Local(...) gradients are not averaged, weights are; expected Average and 1.0"
            )

    @cached_property
    def reduction(self) -> dict[str, Any]:
        """The arguments of Horovod's allreduce, the workers apart."""
        factor = 1.0 if self.sums else self.gradient_predivide_factor
        return {"op": self.op, "prescale_factor": 1.0 / factor, "postscale_factor": factor}


def check_process_set(process_set: Any, kind: type) -> None:
    """Raise ``ConfigurationError`` unless it is one of ``kind``, Horovod's class, and registered."""
    if not isinstance(process_set, kind):
        raise ConfigurationError(f"process_set={process_set!r}: expected what hvd.add_process_set returned")
    if process_set.process_set_id is None:  # type: ignore[attr-defined]
        raise ConfigurationError("process_set is not registered: pass it to hvd.init or hvd.add_process_set first")


def warmup_of(steps: Any, total_steps: int | None, schedule: Schedule | None) -> Warmup:
    """What the arguments ``warmup_steps``, ``total_steps`` and ``schedule`` mean together."""
    if schedule is None:
        return make_warmup("auto" if steps is None else steps, total_steps)
    check(schedule)
    if steps is not None:
        raise ConfigurationError(
            f"schedule={schedule!r}, warmup_steps={steps!r}: expected no warmup_steps with a ZeroOne, whose first "
            "steps are the warm-up, a Gradients, which does not leave it, or a Local, which has none"
        )
    if total_steps is not None:
        raise ConfigurationError(
            f"total_steps={total_steps!r}, schedule={schedule!r}: leave total_steps out; it is only for a warmup_steps "
            "that is a share of it"
        )
    if isinstance(schedule, Gradients):
        return make_warmup(FOREVER)
    if isinstance(schedule, Local):
        return AfterRise(schedule.freeze if schedule.shares_moments else NEVER)
    return make_warmup(schedule.exact_steps)


def chosen(
    recipe: str | Recipe, schedule: Schedule | None, steps: Any, total_steps: int | None
) -> tuple[Recipe, Schedule | None, Warmup]:
    """What these arguments mean together. With ``recipe="exact"`` the warm-up does not end, however many ``steps``."""
    warmup = warmup_of(steps, total_steps, schedule)
    if isinstance(recipe, str) and recipe == EXACT:
        if schedule is not None:
            raise ConfigurationError(f"recipe='exact' never compresses, and schedule={schedule!r}: leave one out")
        recipe, schedule, warmup = Recipe(), Gradients(EXACT), make_warmup(FOREVER)
    return resolve(recipe, schedule), schedule, warmup


def host_number() -> int:
    """A number of 31 bits of this host's name, by which launchers tell hosts apart, too. Horovod's ``cross_rank`` is
    not the host's number where ranks are placed irregularly."""
    return zlib.crc32(os.environ.get("HOROVOD_HOSTNAME", socket.gethostname()).encode()) & 0x7FFFFFFF


_named: Counter[tuple] = Counter()


def next_name(number: int, ranks: Iterable[int], label: str | None = None, *, loaded: bool = False) -> str:
    """Begins the names of an optimizer's collectives: the same on all workers of a set, which has that ``number``.

    By the order in which optimizers are built, so that two models that one worker trains in another order are told
    apart. Loaded ones are counted apart: worker 0 may load a model alone, to read it, or to continue with it where the
    others build theirs.
    """
    # Counted by members: Horovod gives the id of a removed set to the next one, which may have other members. Those of
    # the whole world change in elastic jobs.
    key = (tuple(ranks) if number else None, label, loaded)
    count = _named[key]
    _named[key] += 1
    return ".".join(str(part) for part in ("onebit", number, label, count) if part is not None)


def agreement_name(number: int) -> str:
    """The one name of the agreements of the workers with that ``number``, whatever optimizer they are of."""
    return f"onebit.{number}.agreement"


@contextmanager
def values_of_now(state: Any) -> Iterator[None]:
    """While a ``state`` of Horovod elastic synchronizes weights as they are now, its other values are those of now,
    too, and not of the last commit. If a worker is lost meanwhile, ``restore`` goes back to the commit with all."""
    committed = state._saved_state
    state._saved_state = {name: getattr(state, name) for name in committed}
    try:
        yield
    except BaseException:
        state._saved_state = committed
        raise


def always_synchronizing(function: Callable[..., Any], hosts_updated: Any) -> Callable[..., Any]:
    """``function(state, ...)`` for Horovod elastic's ``run``, so that all workers synchronize whenever hosts change.

    ``hosts_updated`` is its ``HostsUpdatedInterrupt``. Horovod lets workers that were told of a removal skip
    ``state.sync()``; if another worker joins them in the same moment, it waits there for ever.
    """

    @functools.wraps(function)
    def in_step(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(state, *args, **kwargs)
        except hosts_updated as interrupt:
            raise hosts_updated(skip_sync=False) from interrupt

    return in_step

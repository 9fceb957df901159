"""What kind of step each one is, once warm-up is over: a function of how many were taken, the same on all workers.

Without a schedule, every step is of the kind ``ONEBIT``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from horovod_onebit import recipe as recipes
from horovod_onebit.checks import finite, one_of, whole
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.recipe import Recipe, WarmupName


class Kind(StrEnum):
    """``ONEBIT``: the rule's own contribution, one bit per parameter.

    0/1 Adam has other kinds. ``EXACT``: the mean gradient in float32; ``GRADIENT``: the gradient, one bit per
    parameter; ``LOCAL``: nothing is sent; ``SYNC``: what local steps have moved, one bit per parameter. ``Local`` needs
    none of them: its steps are the wrapped optimizer's, and its rounds end by one of kind ``ONEBIT``.
    """

    ONEBIT = "onebit"
    EXACT = "exact"
    GRADIENT = "gradient"
    LOCAL = "local"
    SYNC = "sync"


@dataclass(frozen=True)
class ZeroOne:
    """0/1 Adam's two policies (Lu et al. 2022, section 4.1; the names are DeepSpeed's).

    Args:
        var_freeze_step: the last optimizer step at which the second moment may be updated. Until then it is at steps
            that are multiples of an interval, which is 1 at first and doubles after every ``var_update_scaler``
            updates; the others send the gradient.
        var_update_scaler: kappa in the paper. The first so many steps are exact: they are the warm-up.
        local_step_scaler: after the freeze workers step alone and exchange what they moved at steps that are multiples
            of an interval, which is 1 at first and doubles after every so many steps.
        local_step_clipper: H in the paper, the largest such interval.
    """

    var_freeze_step: int = 100_000
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16

    def __post_init__(self) -> None:
        for name in ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"):
            whole(name, getattr(self, name))

    def kind(self, step: int) -> Kind:
        """The kind of step number ``step`` (from 1) after the ``var_update_scaler`` steps of warm-up."""
        k = step + self.var_update_scaler
        if k <= self.var_freeze_step:
            return Kind.EXACT if k % self._variance_interval(k) == 0 else Kind.GRADIENT
        return Kind.SYNC if k % self._local_interval(k) == 0 else Kind.LOCAL

    def starts_local(self, step: int) -> bool:
        """Whether ``step`` is the first one after the freeze, where the error feedback changes its unit."""
        return step + self.var_update_scaler == max(self.var_freeze_step, self.var_update_scaler) + 1

    def _variance_interval(self, k: int) -> int:
        """The interval at step ``k``: each lasts for ``var_update_scaler`` updates."""
        return next(interval for interval, last in _intervals(self.var_update_scaler) if k <= last)

    def _local_interval(self, k: int) -> int:
        doublings = (k - self.var_freeze_step - 1) // self.local_step_scaler
        return min(self.local_step_clipper, 2 ** min(doublings, 30))


FIRST = 4
"""Steps of a round, at most, until moments are frozen, if they will be."""


@dataclass(frozen=True)
class Local:
    """Local steps: each worker takes its own optimizer's steps; after some, they exchange the changes of the weights.

    A *round* is the steps between two exchanges. At its end each worker sends the change of its weights, one bit per
    parameter with error feedback, and all continue from the same weights (``rules.local``).

    Args:
        every: H, the number of steps of a round.
        doubling: rounds have 1 step at first, and twice as many after every ``doubling`` steps until they have
            ``every``. 0: ``every`` at once.
        momentum: Nesterov's momentum of the mean of the workers' changes (DiLoCo's outer momentum); 0 is none.
        delay: how many steps of the next round are taken while the exchange is under way, at most ``every``. Its result
            is then applied, and each worker keeps these steps. This hides the exchange behind the steps, needs one more
            copy of the weights, and costs quality: more with each step. 0 waits for the exchange.
        freeze: with Adam and AdamW, how many steps after the learning rate has last risen (with a constant one, after
            the start) the second moment is averaged over the workers, and then kept as it is. The momentum is common
            from then on, too: each round sets it by what the workers have moved on average (``rules.frozen``). Until
            then rounds have at most ``FIRST`` steps. 0: all moments stay each worker's own, as they do with
            ``momentum``, with ``delay`` and in any other optimizer.
    """

    every: int = 8
    doubling: int = 0
    momentum: float = 0.0
    delay: int = 0
    freeze: int = 400

    def __post_init__(self) -> None:
        whole("every", self.every)
        whole("doubling", self.doubling, least=0)
        whole("freeze", self.freeze, least=0)
        if whole("delay", self.delay, least=0) > self.every:
            raise ConfigurationError(f"delay={self.delay}: expected at most every={self.every}")
        if not finite("momentum", self.momentum) < 1:
            raise ConfigurationError(f"momentum={self.momentum}: expected 0 <= momentum < 1")

    def interval(self, step: int, *, first: bool = False) -> int:
        """How many steps the round of step number ``step`` (from 1) has; ``first``: before moments are frozen."""
        doublings = (step - 1) // self.doubling if self.doubling else 30
        return min(self.every, 2 ** min(doublings, 30), FIRST if first else self.every)

    def ends_round(self, step: int, *, first: bool = False) -> bool:
        """Whether the workers exchange after step number ``step`` (from 1). They do when moments are frozen, too."""
        return step % self.interval(step, first=first) == 0

    @property
    def shares_moments(self) -> bool:
        """Whether Adam's moments become those of all workers."""
        return self.freeze > 0 and not (self.momentum or self.delay)


EXACT: Final = "exact"
"""The recipe, by name, of a run that never compresses."""


@dataclass(frozen=True)
class Gradients:
    """Every step averages the gradients, in a few bits an element, and is then the wrapped optimizer's own, whatever
    optimizer that is: a warm-up (``Recipe.warmup``) that does not end.

    Args:
        codec: ``"two_bit"``, ``"three_bit"`` or ``"four_bit"``; ``"exact"`` is float32, which ``recipe="exact"`` means.
    """

    codec: WarmupName = "three_bit"

    def __post_init__(self) -> None:
        one_of("codec", self.codec, WarmupName)


Schedule = ZeroOne | Local | Gradients


def resolve(recipe: str | Recipe, schedule: Schedule | None) -> Recipe:
    """``recipe``, a preset's name or a value, as ``schedule`` uses it."""
    found = recipes.resolve(recipe)
    coded = found.warmup != "exact"
    if isinstance(schedule, Gradients) and not (coded and found.warmup != schedule.codec):
        return replace(found, warmup=schedule.codec)
    if coded and schedule is not None:
        raise ConfigurationError(f"Recipe(warmup={found.warmup!r}) and schedule={schedule!r}: leave one out")
    return found


def named(recipe: str | Recipe, schedule: Schedule | None) -> tuple[str | Recipe, Schedule | None]:
    """``recipe`` and ``schedule``; of the recipe ``"exact"``, what it means."""
    if not isinstance(recipe, str) or recipe != EXACT:
        return recipe, schedule
    if schedule is not None:
        raise ConfigurationError(f"recipe='exact' never compresses, and schedule={schedule!r}: leave one out")
    return Recipe(), Gradients(EXACT)


@functools.cache
def _intervals(scaler: int) -> tuple[tuple[int, int], ...]:
    """Interval and the last step that it is in force."""
    result, last = [], 0
    for doublings in range(60):
        interval = 2**doublings
        last = (last // interval + scaler) * interval
        result.append((interval, last))
    return tuple(result)


def kind_of(schedule: ZeroOne | None, step: int) -> Kind:
    """The kind of step number ``step`` (from 1) after warm-up."""
    return Kind.ONEBIT if schedule is None else schedule.kind(step)

"""What each step is, once warm-up is over: a function of how many were taken, the same on all workers.

Without a schedule, every step sends the rule's contribution. So does the end of a round of ``Local``, whose own steps
are the wrapped optimizer's.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, Final

from horovod_onebit import recipe as recipes
from horovod_onebit.checks import finite, one_of, whole
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.recipe import Bits, Recipe

DEFAULT_BITS: Final = "three_bit"
"""How gradients travel in the warm-up, unless the recipe or a schedule says otherwise."""
EXACT: Final = "exact"
"""A warm-up in float32; and the recipe, by name, of a run that never compresses."""


class Sends(StrEnum):
    """What a step is, by what travels.

    The workers move together, by what they have on average: of ``MEAN``, the gradient in float32, which renews the
    second moment; or, in one bit an element, of the rule's own ``CONTRIBUTION`` or of the ``GRADIENT``. Or each one
    moves ``alone``, by its own gradient: ``NOTHING`` travels, or, in one bit an element, the ``DISPLACEMENT`` since all
    had the same weights.
    """

    MEAN = "mean"
    CONTRIBUTION = "contribution"
    GRADIENT = "gradient"
    NOTHING = "nothing"
    DISPLACEMENT = "displacement"

    @property
    def alone(self) -> bool:
        """Whether each worker moves by its own gradient."""
        return self in (Sends.NOTHING, Sends.DISPLACEMENT)


class Stepwise(ABC):
    """A schedule of Adam's steps. One of your own is a frozen dataclass, the same on all workers; see "Extending" in
    the documentation.

    Attributes:
        exact_steps: how many steps the warm-up has, which come before number 1 of ``sends``.
        warmup: how their gradients travel; see ``Recipe.warmup``.
    """

    exact_steps: int
    warmup: Bits = EXACT

    @abstractmethod
    def sends(self, number: int) -> Sends:
        """What step ``number`` (from 1) after the warm-up is. After a step alone, all are."""


LEAVES = (Sends.CONTRIBUTION, Sends.GRADIENT, Sends.DISPLACEMENT)
"""Steps that leave residuals, each in a unit of its own: of updates; of gradients, of which less goes into an update;
of moved weights."""


def step_of(schedule: Stepwise | None, number: int) -> Sends:
    """What step ``number`` (from 1) after the warm-up is, the same on all workers."""
    if schedule is None:
        return Sends.CONTRIBUTION
    found = schedule.sends(number)
    if not isinstance(found, Sends):
        raise ConfigurationError(f"schedule={schedule!r}: sends({number}) gave {found!r}: expected one of Sends")
    if number > 1 and not found.alone and schedule.sends(number - 1).alone:
        raise ConfigurationError(
            f"schedule={schedule!r}: sends({number}) gave {found!r}, and workers move alone in the step before: "
            "expected NOTHING or DISPLACEMENT from there on, as weights may differ"
        )
    return found


def changes_unit(schedule: Stepwise | None, number: int) -> bool:
    """Whether residuals, before step ``number`` that will leave others, are of another unit."""
    if schedule is None or (now := schedule.sends(number)) not in LEAVES:
        return False
    before = (schedule.sends(earlier) for earlier in range(number - 1, 0, -1))
    return next((sends for sends in before if sends in LEAVES), now) is not now


@dataclass(frozen=True)
class ZeroOne(Stepwise):
    """0/1 Adam's two policies (Lu et al. 2022, section 4.1; the names are DeepSpeed's).

    Args:
        var_freeze_step: the last optimizer step at which the second moment may be updated. Until then it is at steps
            that are multiples of an interval, which is 1 at first and doubles after every ``var_update_scaler``
            updates; the others send the gradient.
        var_update_scaler: kappa in the paper. The first so many steps are exact: they are the warm-up.
        local_step_scaler: after the freeze workers step alone and exchange what they moved at steps that are multiples
            of an interval, which is 1 at first and doubles after every so many steps.
        local_step_clipper: H in the paper, the largest such interval.
        warmup: ``"exact"`` is the published algorithm. ``"two_bit"``, ``"three_bit"``, ``"four_bit"``: until
            ``var_freeze_step`` all steps are Adam's own, of mean gradients that travel in so many bits after the first
            ten, and each renews the second moment (``Recipe.warmup``). ``var_update_scaler`` is not used then. At
            equal bytes the loss is lower (study 17).
    """

    var_freeze_step: int = 100_000
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16
    warmup: Bits = EXACT

    def __post_init__(self) -> None:
        one_of("warmup", self.warmup, Bits)
        for name in ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"):
            whole(name, getattr(self, name))

    @property
    def exact_steps(self) -> int:  # type: ignore[override]
        return self.var_update_scaler if self.warmup == EXACT else self.var_freeze_step

    def sends(self, number: int) -> Sends:
        k = number + self.exact_steps
        if k <= self.var_freeze_step:
            return Sends.MEAN if k % self._variance_interval(k) == 0 else Sends.GRADIENT
        return Sends.DISPLACEMENT if k % self._local_interval(k) == 0 else Sends.NOTHING

    def _variance_interval(self, k: int) -> int:
        """The interval at step ``k``: each lasts for ``var_update_scaler`` updates."""
        return next(interval for interval, last in _intervals(self.var_update_scaler) if k <= last)

    def _local_interval(self, k: int) -> int:
        doublings = (k - self.var_freeze_step - 1) // self.local_step_scaler
        return min(self.local_step_clipper, 2 ** min(doublings, 30))


FIRST_ROUNDS = 4
"""Steps that a round has, at most, until moments are frozen, if they will be."""


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
            from then on, too: each round sets it by what the workers have moved on average (``rules.frozen``); with
            ``delay`` it stays each worker's own. Until then rounds have at most ``FIRST_ROUNDS`` steps. 0: all moments
            stay each worker's own, as they do with ``momentum`` and in any other optimizer.
    """

    every: int = 8
    doubling: int = 0
    momentum: float = 0.0
    delay: int = 0
    freeze: int = 400
    warmup: ClassVar[Bits] = EXACT

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
        return min(self.every, 2 ** min(doublings, 30), FIRST_ROUNDS if first else self.every)

    def ends_round(self, step: int, *, first: bool = False) -> bool:
        """Whether the workers exchange after step number ``step`` (from 1). They do when moments are frozen, too."""
        return step % self.interval(step, first=first) == 0

    @property
    def shares_moments(self) -> bool:
        """Whether Adam's moments become those of all workers."""
        return self.freeze > 0 and not self.momentum

    def is_young(self, seen: int) -> bool:
        """Whether a second moment that has seen so many gradients is trained since shortly before, too young to be
        frozen."""
        return 0 < 2 * seen < self.freeze


@dataclass(frozen=True)
class Gradients:
    """Every step averages the gradients, in a few bits an element, and is then the wrapped optimizer's own, whatever
    optimizer that is: a warm-up (``Recipe.warmup``) that does not end.

    Args:
        codec: ``"two_bit"``, ``"three_bit"`` or ``"four_bit"``; ``"exact"`` is float32, which ``recipe="exact"`` means.
    """

    codec: Bits = DEFAULT_BITS

    def __post_init__(self) -> None:
        one_of("codec", self.codec, Bits)

    @property
    def warmup(self) -> Bits:
        return self.codec


Schedule = Stepwise | Local | Gradients


def check(schedule: object) -> None:
    """Raise ``ConfigurationError`` unless it is one."""
    if not isinstance(schedule, Schedule):
        raise ConfigurationError(
            f"schedule={schedule!r}: expected a ZeroOne, another Stepwise, a Gradients, or a Local"
        )
    if not is_dataclass(schedule):
        raise ConfigurationError(
            f"schedule={schedule!r}: expected a dataclass, so that workers can compare it; write "
            f"@dataclass(frozen=True) above class {type(schedule).__name__}"
        )
    if isinstance(schedule, Stepwise):
        whole(f"exact_steps of {type(schedule).__name__}", getattr(schedule, "exact_steps", None))
        one_of(f"warmup of {type(schedule).__name__}", schedule.warmup, Bits)


def text_of(schedule: Any) -> str:
    """Its class, and the fields that are not their defaults, so that fields of later versions do not change it."""
    own = {field.name: getattr(schedule, field.name) for field in fields(schedule)}
    changed = (f"{field.name}={own[field.name]!r}" for field in fields(schedule) if own[field.name] != field.default)
    return f"{type(schedule).__name__}({', '.join(changed)})"


def resolve(recipe: str | Recipe, schedule: Schedule | None) -> Recipe:
    """``recipe``, a preset's name or a value, as ``schedule`` uses it."""
    found = recipes.resolve(recipe)
    if schedule is None:
        return replace(found, warmup=DEFAULT_BITS) if found.warmup == "auto" else found
    if found.warmup not in ("auto", EXACT, schedule.warmup):
        raise ConfigurationError(f"Recipe(warmup={found.warmup!r}) and schedule={schedule!r}: leave one out")
    return replace(found, warmup=schedule.warmup)


@functools.cache
def _intervals(scaler: int) -> tuple[tuple[int, int], ...]:
    """Interval and the last step that it is in force."""
    result, last = [], 0
    for doublings in range(60):
        interval = 2**doublings
        last = (last // interval + scaler) * interval
        result.append((interval, last))
    return tuple(result)

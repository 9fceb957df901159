"""When compression starts.

A phase is a value with a name. Every policy decides from what all workers have in common (steps taken, the learning
rate, the second moment), so that all decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from horovod_onebit.errors import ConfigurationError

NEVER = 2**62
"""Steps of a warm-up whose end is not known yet."""
FOREVER = NEVER + 1
"""Those of one that does not end."""
UNKNOWN = 1.0
"""The beta2 of a second moment of which that is not known: its bias is not corrected, and it is waited for longer."""
ROUNDING = 1e-9
"""A learning rate that is larger by less than this part of it has not risen. (At first, the cosine of a long schedule
rises by less than 1e-6 in ten steps.)"""
EXACT_FIRST = 10
"""Exact means of a tensor, zeros apart, before one in few bits: from them, ``rules.gradient`` learns its units."""


class Phase(StrEnum):
    """``WARMUP``: the wrapped optimizer's own steps. ``COMPRESSED``: one bit per parameter."""

    WARMUP = "warmup"
    COMPRESSED = "compressed"


def least(steps: int) -> int:
    """Gradients that a second moment has to have seen before it is frozen at the end of a warm-up of so many steps:
    one that has seen fewer belongs to a parameter that is trained since shortly before."""
    return max(1, min(AutoWarmup.least, steps) // 2)


class Warmup:
    """What all policies share."""

    steps: int

    def phase(self, exact_steps: int) -> Phase:
        """The phase of the next step of a parameter that has had ``exact_steps`` exact ones."""
        return Phase.COMPRESSED if exact_steps >= self.steps else Phase.WARMUP

    def wants(self, step: int) -> bool:
        """Whether ``observe`` is to be called after step number ``step``."""
        return False

    def observe(self, step: int, variance_norm: float | None, learning_rate: float, beta2: float) -> None:
        """Look at the run after step number ``step``; may set ``steps``."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave; nothing of another policy."""


@dataclass(frozen=True)
class FixedWarmup(Warmup):
    """``steps`` of the wrapped optimizer, then compression: step number ``steps + 1`` is the first compressed one."""

    steps: int


@dataclass
class AutoWarmup(Warmup):
    """Compression starts when the learning rate's own warm-up is over and the second moment is stable, or old enough.

    Stable (Tang et al. 2021, section 7.1, made two-sided and with the bias corrected): the norm of the second moment
    now and ``1 / (1 - beta2)`` steps ago differ by less than 4 %. In the first ``2 / (1 - beta2)`` steps the distance
    is half the steps taken, so that short runs get there too. Checked at every tenth step, from step 20 on. The
    learning rate is past its warm-up when its maximum is at least 10 steps back; compression starts at the latest
    ``most`` steps after that maximum was seen, because waiting longer for the second moment gains nothing (study 6).
    """

    threshold: ClassVar[float] = 0.96
    every: ClassVar[int] = 10
    least: ClassVar[int] = 20
    most: int = 200
    steps: int = NEVER
    norms: dict[int, float] = field(default_factory=dict, repr=False)
    peak: float = field(default=-math.inf, repr=False)
    peak_step: int = field(default=0, repr=False)

    def wants(self, step: int) -> bool:
        return self.steps == NEVER and step % self.every == 0

    def observe(self, step: int, variance_norm: float | None, learning_rate: float, beta2: float) -> None:
        """``variance_norm``: Euclidean, bias-corrected, over all compressed tensors; None for rules without one."""
        if learning_rate > self.peak * (1 + ROUNDING) or self.peak < 0:
            self.peak, self.peak_step = learning_rate, step
        stable = True
        if variance_norm is not None:
            self.norms[step] = variance_norm
            distance = min(1 / (1 - beta2), step / 2) if beta2 < 1 else step / 2
            before = self.norms.get(self.every * math.floor((step - distance) / self.every))
            smaller, larger = (0.0, 0.0) if before is None else sorted((before, variance_norm))
            stable = smaller >= self.threshold * larger > 0
            stable |= math.isfinite(variance_norm) and step - self.peak_step >= self.most
        rising = self.peak_step > step - self.every and step > self.every
        if stable and not rising and step >= self.least:
            self.steps = step
            self.norms.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "norms": dict(self.norms), "peak": self.peak, "peak_step": self.peak_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = state if "norms" in state else {}
        norms = state.get("norms", {})
        self.steps, self.norms = state.get("steps", NEVER), {int(step): norm for step, norm in norms.items()}  # of JSON
        self.peak, self.peak_step = state.get("peak", -math.inf), state.get("peak_step", 0)


@dataclass
class AfterRise(Warmup):
    """Local steps: Adam's second moments are frozen ``after`` steps after the last one at which the learning rate rose.

    Attributes:
        after: ``NEVER`` if there are none, or they are not shared.
        steps: the number of the step after which they are, once it was taken.
        since: the number of the step since which those that are not frozen are measured by each worker's own gradients.
    """

    after: int = field(repr=False)  # that of the schedule, which workers compare
    steps: int = field(default=NEVER, repr=False)
    peak: float = field(default=math.inf, repr=False)
    peak_step: int = field(default=0, repr=False)
    since: int = field(default=0, repr=False)

    def reached(self, step: int, learning_rate: float) -> bool:
        """Whether they are to be frozen, if they are not yet, after step number ``step``; to be asked after each."""
        if math.isinf(self.peak) or learning_rate > self.peak * (1 + ROUNDING):
            self.peak_step = step - 1 if math.isinf(self.peak) else step  # the run may have begun before
            self.peak = learning_rate
        if self.steps == NEVER and step - self.peak_step >= self.after:
            self.steps = step
        return step >= self.steps

    @property
    def happens(self) -> bool:
        """Whether they are ever frozen."""
        return self.after < NEVER

    def resume(self, step: int) -> None:
        """They are frozen, after step number ``step``; a state that was loaded may not say since when."""
        if self.steps == NEVER:
            self.steps = step

    def put_off(self) -> None:
        """They could not be frozen: they are to be after the next step."""
        self.steps = NEVER

    def restart(self, step: int) -> None:
        """Freeze what is not frozen ``after`` steps after step number ``step``."""
        self.steps, self.peak_step = NEVER, step

    def thaw(self, step: int) -> None:
        """Some that were frozen are not any more, after step number ``step``. The learning rate may begin anew."""
        self.restart(step)
        self.since, self.peak = step, math.inf

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "peak": self.peak, "peak_step": self.peak_step, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = {} if "norms" in state else state
        self.steps, self.peak = state.get("steps", NEVER), state.get("peak", math.inf)
        self.peak_step, self.since = state.get("peak_step", 0), state.get("since", 0)


def unbiased(norm: float, beta2: float, seen: int) -> float:
    """What ``observe`` wants: ``norm``, that of second moments after ``seen`` steps, with their bias corrected."""
    return norm if beta2 == UNKNOWN else norm / (1 - beta2 ** max(seen, 1))


def make(warmup_steps: int | float | str, total_steps: int | None = None) -> Warmup:
    """A policy from what a user gives: a number of steps, ``"auto"``, or a share of ``total_steps`` below 1."""
    if isinstance(warmup_steps, float) and 0 < warmup_steps < 1:
        if not isinstance(total_steps, int) or isinstance(total_steps, bool) or total_steps < 1:
            raise ConfigurationError(
                f"warmup_steps={warmup_steps!r} is a share of total_steps, and total_steps is {total_steps!r}: "
                "expected the number of optimizer steps of the whole run"
            )
        return FixedWarmup(max(1, math.ceil(round(warmup_steps * total_steps, 6))))  # 0.07 * 100 is more than 7
    if isinstance(warmup_steps, int) and not isinstance(warmup_steps, bool) and warmup_steps >= 1:
        found: Warmup = FixedWarmup(warmup_steps)
    elif warmup_steps == "auto":
        found = AutoWarmup()
    else:
        raise ConfigurationError(
            f"warmup_steps={warmup_steps!r}: expected a whole number of optimizer steps, at least 1 (the second moment "
            "has to be measured before it can be frozen), a share of total_steps, or 'auto'"
        )
    if total_steps is not None:
        raise ConfigurationError(
            f"total_steps={total_steps!r}, warmup_steps={warmup_steps!r}: leave total_steps out; it is only for a "
            "warmup_steps that is a share of it, such as 0.1"
        )
    return found

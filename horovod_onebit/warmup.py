"""When compression starts.

A phase is a value with a name; the policy looks at how many exact steps were taken and nothing else, so that
every worker decides alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from horovod_onebit.errors import ConfigurationError


class Phase(StrEnum):
    """``WARMUP``: the wrapped optimizer, exact. ``COMPRESSED``: one bit per parameter."""

    WARMUP = "warmup"
    COMPRESSED = "compressed"


@dataclass(frozen=True)
class FixedWarmup:
    """``steps`` exact optimizer steps, then compression: step number ``steps + 1`` is the first compressed one."""

    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise ConfigurationError(
                f"warmup_steps={self.steps!r}: expected a whole number of optimizer steps, at least 1 (the second "
                "moment has to be measured before it can be frozen; 100 is ample for most models)"
            )

    def phase(self, exact_steps: int) -> Phase:
        """The phase of the next step of a parameter that has had ``exact_steps`` exact ones."""
        return Phase.COMPRESSED if exact_steps >= self.steps else Phase.WARMUP

"""How far a run is, in plain numbers, and a part of what is saved. All but ``rates`` are the same on all workers; with
local steps, ``skipped``, ``taken``, ``common`` and ``awaited`` are each worker's own, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from horovod_onebit.errors import ConfigurationError

VERSION = 3
READABLE = (2, 3)  # 2, of version 0.1.0, has neither "rates" nor "common"


@dataclass(frozen=True)
class Progress:
    """Counts of steps, and by position of the parameter where they are lists.

    Attributes:
        version: of this format.
        steps: optimizer steps taken.
        skipped: steps that all workers skipped.
        exchanges: compressed steps.
        warmup: the state of the warm-up's policy.
        exact_steps: exact steps that each parameter has had.
        variance_steps: steps that its second moment has seen; 0 while it is not frozen.
        beta2: of these steps; 0 where there is none.
        taken: steps that its optimizer counts, where the second moment is frozen; else 0.
        unstarted: positions of parameters whose momentum buffer must be removed before their first step: with
            dampening, PyTorch treats a missing buffer differently from zeros.
        rates: of residuals, as ``ErrorFeedback`` has them.
        common: of the gradients that its second moment has seen, those that were the workers' mean.
        idle: of the exact steps, the first ones that had no gradient.
        names: of the parameters, empty where there is none.
        awaited: with local steps, the parameters for which this worker has put the freeze off.
    """

    version: int = VERSION
    steps: int = 0
    skipped: int = 0
    exchanges: int = 0
    warmup: Mapping[str, Any] = field(default_factory=dict)
    exact_steps: Sequence[int] = ()
    variance_steps: Sequence[int] = ()
    beta2: Sequence[float] = ()
    taken: Sequence[int] = ()
    unstarted: Sequence[int] = ()
    rates: Sequence[float] = ()
    common: Sequence[int] = ()
    idle: Sequence[int] = ()
    names: Sequence[str] = ()
    awaited: Sequence[int] = ()

    def state_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def of(cls, state: Any, parameters: int, *, added: bool = False) -> Progress:
        """What ``state_dict`` was called on, for so many parameters; None is the progress of a plain optimizer.

        ``added``: some of the parameters, the last ones, may have been added since. Raises ``ConfigurationError`` for
        anything else.
        """
        if state is None:
            return cls()
        version = state.get("version") if isinstance(state, Mapping) else None
        if version not in READABLE:
            raise ConfigurationError(f"this optimizer state has format {version!r}, expected {VERSION}")
        wrong = [name for name in ("steps", "skipped", "exchanges") if not _is_count(state.get(name))]
        for name in ("exact_steps", "variance_steps"):
            counts = state.get(name)
            fits = isinstance(counts, (list, tuple)) and (
                len(counts) == parameters or (added and len(counts) < parameters)
            )
            if not fits or not all(map(_is_count, counts)):
                wrong.append(name)
        if not isinstance(state.get("warmup"), Mapping):
            wrong.append("warmup")
        if wrong:
            raise ConfigurationError(
                f"the progress in this optimizer state is damaged, or of other parameters: {', '.join(wrong)}; "
                f"expected counts for {parameters} parameters"
            )
        return cls(**{name: state[name] for name in cls.__dataclass_fields__ if name in state})


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

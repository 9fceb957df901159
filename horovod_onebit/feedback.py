"""What compression lost, kept and given back: one float32 residual per compressed tensor and worker.

``c = u + error; send C(c); error <- c - C(c)``: nothing is lost; it is only delayed. The residual belongs to this
worker alone and is stored outside the optimizer's state, so that nothing that broadcasts the state overwrites it.

After local steps, momenta may be what was moved, divided by the sum of its learning rates (``rules.frozen``,
``rules.zero_one_adam``). A round may end early (``flush()``), or its rates be smaller than before: residuals are then
of longer moves, and all of them in one exchange would make its momentum many times too large. Of residuals of r_old
rates, an exchange of r sends at most the share ``PACE`` r / r_old, and keeps the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from horovod_onebit.checks import mapping
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels import reference
from horovod_onebit.kernels.reference import Array
from horovod_onebit.schedule import Local, Stepwise, text_of

T = TypeVar("T")

SERVER_PREFIX = "onebit.server."
"""Begins the names of residuals that belong to a server's share of a bucket rather than to a parameter."""

MARK = "onebit.residuals."
"""Begins the name of an empty entry that tells of what kind saved residuals are, and of how many workers."""


VELOCITY = "velocity"

PACE = 1.5
"""The largest share of residuals that is sent, as a multiple of what rates are of theirs."""
LESS = 0.2
"""An exchange of rates r that has not sent all residuals makes their rates less by 0.2 r. One bit loses some 0.6 of the
norm of what it is given, so that in rounds alike residuals are 1.5 times as large as a round's moves. Of the 2.25 r
that a shorter round sends of them, and of its own r, less comes back than was sent."""


def kind(space: str, *, divides: bool, schedule: Stepwise | Local | None = None, velocities: bool = False) -> str:
    """What the residuals of a run are of: of moved weights (``"local"``); of updates, or of momenta, which are smaller
    by orders of magnitude, or of ``velocities`` (``rules.sgd``); with a ``Stepwise``, of what its steps send: they
    belong to this very schedule.

    ``space`` is the recipe's; it matters where the rule ``divides`` by a second moment.
    """
    if isinstance(schedule, Local):
        return "local"
    if velocities:
        return VELOCITY
    found = "momentum" if divides and space == "momentum" else "step"
    return found if schedule is None else f"{text_of(schedule)} {found}"


def of_kind(kind: str) -> str:
    """``kind`` in words."""
    if kind == "local":
        return "with schedule=Local(...)"
    if kind == VELOCITY:
        return "with Keras's SGD, whose residuals are of velocities"
    space = "momentum" if kind.endswith("momentum") else "update"
    schedule = kind.rpartition(" ")[0]
    return f"with {f'schedule={schedule}' if schedule else 'no schedule'} and a recipe of space={space!r}"


def check_kind(saved: str, kind: str, what: str, instead: str) -> None:
    """Raise ``ConfigurationError`` unless ``what`` was ``saved`` with residuals of this ``kind``."""
    if saved != kind:
        raise ConfigurationError(
            f"{what} saved {of_kind(saved)}, and this optimizer is {of_kind(kind)}: build it as it was, or {instead}"
        )


def mark(kind: str, workers: int) -> str:
    """The name of the entry that tells what residuals are."""
    return f"{MARK}{kind}.{workers}"


def unmarked(state: Mapping[str, T], kind: str, workers: int) -> dict[str, T]:
    """``state`` without its mark. Raises ``ConfigurationError`` if it is that of other residuals; earlier versions
    wrote none."""
    residuals = {name: value for name, value in state.items() if not name.startswith(MARK)}
    for name in state.keys() - residuals.keys():
        saved, _, number = name.removeprefix(MARK).rpartition(".")
        check_kind(saved, kind, "these residuals were", "continue without them")
        if number != str(workers) and any(name.startswith(SERVER_PREFIX) for name in residuals):
            raise ConfigurationError(
                f"these residuals are those of one of {number} workers, and there are {workers}: use save_checkpoint "
                "and load_checkpoint, which redistribute them, or continue without them"
            )
    return residuals


@contextmanager
def held_back(residual: Any, share: float, kernels: ModuleType) -> Iterator[None]:
    """Within, ``residual`` is its ``share`` of what it was; what becomes of it then gets the rest. Not for a batch of
    the kernels, whose calls are not in order."""
    whole = np.array(kernels.host(residual))
    kernels.write(residual, np.float32(share) * whole)
    try:
        yield
    finally:
        kernels.write(residual, kernels.host(residual) + np.float32(1 - share) * whole)


class ErrorFeedback:
    """The residuals of this worker, by tensor name; flat float32 arrays that the kernels update in place.

    They are stored in host memory, or where ``kernels`` (a backend, see ``horovod_onebit.kernels``) can reach them.

    Attributes:
        rates: by name, the sum of the learning rates of the local steps that a residual was lost of, where it is known.
    """

    def __init__(self, kernels: ModuleType = reference) -> None:
        self.kernels = kernels
        self.rates: dict[str, float] = {}
        self._residuals: dict[str, Any] = {}

    def residual(self, name: str, size: int, zeros: Callable[[int], Any] | None = None) -> Any:
        """The residual of a tensor of ``size`` elements, zeros at first.

        ``zeros`` makes so many float32 zeros outside of host memory, where the residual is to be stored; a
        residual that is stored in the other place moves.
        """
        found = self._residuals.get(name)
        if found is not None and found.size != size:
            raise ConfigurationError(
                f"the error feedback of {name!r} has {found.size} elements and the tensor has {size}: "
                "reset it, or load the state of the same model"
            )
        if found is None or isinstance(found, np.ndarray) != (zeros is None):
            place = self._residuals[name] = (zeros or reference.zeros)(size)
            if found is not None:
                self.kernels.write(place, self.kernels.host(found))
            found = place
        return found

    def put(self, name: str, values: Array) -> None:
        """Let the residual of ``name`` be ``values``, wherever it is stored."""
        if name not in self._residuals:
            self.residual(name, len(values))
        self._write(self._residuals[name], values)

    def reset(self, names: Iterable[str] | None = None) -> None:
        """Forget the residuals: of the tensors ``names``, or of all."""
        if names is None:
            self.rates = {}
        for name in list(self._residuals) if names is None else names:
            self.rates.pop(name, None)
            self._clear(name)

    def _clear(self, name: str) -> None:
        if name in self._residuals:
            self._write(self._residuals[name], np.zeros(1, np.float32))

    def share(self, name: str, rates: float) -> float:
        """How much of a residual is sent with moves of these ``rates``, where these pace it."""
        lost_of = self.rates.get(name, 0.0)
        return min(1.0, PACE * rates / lost_of) if lost_of > 0 else 1.0

    def lose(self, name: str, rates: float, share: float) -> None:
        """A ``share`` of a residual was sent with moves of these ``rates``, and it is what was lost of them now."""
        kept = self.rates[name] - LESS * rates if share < 1 else 0.0
        self.rates[name] = max(rates, kept)

    def _write(self, residual: Any, values: Array) -> None:
        """Zeros that are there already are not written: see ``kernels.reference.zeros``."""
        if values.any() or not isinstance(residual, np.ndarray) or residual.any():
            self.kernels.write(residual, values)

    def discard(self, name: str) -> None:
        """Forget the tensor ``name`` itself."""
        self.rates.pop(name, None)
        self._residuals.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(list(self._residuals))

    def state_dict(self) -> dict[str, Array]:
        """A copy of the residuals. Each worker has its own: save one file per worker."""
        return {name: np.array(self.kernels.host(residual)) for name, residual in self._residuals.items()}

    def load_state_dict(
        self, state: Mapping[str, Array], sizes: Mapping[str, int] | None = None, what: str = "tensors"
    ) -> None:
        """Take over residuals that ``state_dict`` of the same worker gave; others become zero. Raises as ``check``."""
        self.check(state, sizes, what)
        for name in self:
            self._clear(name)
        for name, value in state.items():
            self.put(name, value)

    def check(self, state: Mapping[str, Array], sizes: Mapping[str, int] | None = None, what: str = "tensors") -> None:
        """Raise ``ConfigurationError`` unless ``load_state_dict`` can take over ``state``.

        ``sizes``: of all ``what`` that may have residuals, the number of elements; besides them, there are only those
        of servers.
        """
        names, known = mapping("state", state, "names to arrays").keys(), sizes or {}
        unknown = sorted(name for name in names - known.keys() if not name.startswith(SERVER_PREFIX))
        if sizes is not None and unknown:
            raise ConfigurationError(f"error feedback of {what} that this optimizer does not have: {unknown}")
        for name, value in state.items():
            value = np.asarray(value)
            if value.dtype != np.float32 or value.ndim != 1:
                raise ConfigurationError(
                    f"error feedback of {name!r}: got {value.dtype} of shape {value.shape}, expected flat float32"
                )
            if not np.isfinite(value).all():
                raise ConfigurationError(f"error feedback of {name!r} has NaN or Inf: it would go into the weights")
            found = self._residuals.get(name)
            expected = known.get(name, value.size if found is None else found.size)
            if value.size != expected:
                raise ConfigurationError(f"error feedback of {name!r}: got {value.size} elements, expected {expected}")

"""What compression lost, kept and given back: one float32 residual per compressed tensor and worker.

``c = u + error; send C(c); error <- c - C(c)``: nothing is lost, only late. The residual belongs to this worker
alone and lives outside the optimizer's state, so that nothing that broadcasts the state overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from horovod_onebit.checks import mapping
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels import reference
from horovod_onebit.kernels.reference import Array

SERVER_PREFIX = "onebit.server."
"""Begins the names of residuals that belong to a server's share of a bucket rather than to a parameter."""


class ErrorFeedback:
    """The residuals of this worker, by tensor name; flat float32 arrays that the kernels update in place.

    They lie in host memory, or where ``kernels`` (a backend, see ``horovod_onebit.kernels``) can reach them.
    """

    def __init__(self, kernels: ModuleType = reference) -> None:
        self.kernels = kernels
        self._residuals: dict[str, Any] = {}

    def residual(self, name: str, size: int, zeros: Callable[[int], Any] | None = None) -> Any:
        """The residual of a tensor of ``size`` elements, zeros at first.

        ``zeros`` makes so many float32 zeros outside of host memory, where the residual is to lie; it moves there or
        back if it was elsewhere.
        """
        found = self._residuals.get(name)
        if found is not None and found.size != size:
            raise ConfigurationError(
                f"the error feedback of {name!r} has {found.size} elements and the tensor has {size}: "
                "reset it, or load the state of the same model"
            )
        if found is None or isinstance(found, np.ndarray) != (zeros is None):
            place = self._residuals[name] = np.zeros(size, np.float32) if zeros is None else zeros(size)
            if found is not None:
                self.kernels.write(place, self.kernels.host(found))
            found = place
        return found

    def put(self, name: str, values: Array) -> None:
        """Let the residual of ``name`` be ``values``, wherever it lies."""
        if name not in self._residuals:
            self.residual(name, len(values))
        self.kernels.write(self._residuals[name], values)

    def norm(self) -> float:
        """The Euclidean norm of all residuals together."""
        return float(np.sqrt(sum(float(np.dot(r, r)) for r in map(self.kernels.host, self._residuals.values()))))

    def reset(self, names: Iterable[str] | None = None) -> None:
        """Forget the residuals: of the tensors ``names``, or of all."""
        for name in list(self._residuals) if names is None else names:
            if name in self._residuals:
                self.kernels.write(self._residuals[name], 0.0)

    def discard(self, name: str) -> None:
        """Forget the tensor ``name`` itself."""
        self._residuals.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(list(self._residuals))

    def state_dict(self) -> dict[str, Array]:
        """A copy of the residuals. Each worker has its own: save one file per worker."""
        return {name: np.array(self.kernels.host(residual)) for name, residual in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Take over residuals that ``state_dict`` of the same worker gave; others become zero."""
        self.check(state)
        self.reset()
        for name, value in state.items():
            self.put(name, value)

    def check(self, state: Mapping[str, Array]) -> None:
        """Raise ``ConfigurationError`` unless ``load_state_dict`` can take over ``state``."""
        for name, value in mapping("state", state, "names to arrays").items():
            value = np.asarray(value)
            if value.dtype != np.float32 or value.ndim != 1:
                raise ConfigurationError(
                    f"error feedback of {name!r}: got {value.dtype} of shape {value.shape}, expected flat float32"
                )
            if not np.isfinite(value).all():
                raise ConfigurationError(f"error feedback of {name!r} has NaN or Inf: it would go into the weights")
            known = self._residuals.get(name)
            if known is not None and known.size != value.size:
                raise ConfigurationError(
                    f"error feedback of {name!r}: got {value.size} elements, expected {known.size}"
                )

"""What ``studies.rates`` trains besides classifiers: a problem with its own loss, and its own measure of quality."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from numpy.typing import NDArray

from jobs.data import Task


class MissingError(RuntimeError):
    """A package that a study needs is not installed; the message says which, and how to install it."""


@dataclass(frozen=True)
class Problem:
    """How to learn, and to judge what was learned.

    Attributes:
        data: the examples; tests never see those of training.
        network: a new network for ``data``.
        loss: of a network, ``x`` and ``y`` of a batch, as a tensor of one element.
        quality: of a network, by the names of its measures.
    """

    data: Callable[[], Task]
    network: Callable[[], Any]
    loss: Callable[[Any, NDArray, NDArray], Any]
    quality: Callable[[Any, Task], dict[str, float]]


def need(*, programs: dict[str, str] | None = None, modules: tuple[str, ...] = ()) -> None:
    """Raise MissingError unless ``programs``, Debian's packages by command, and ``modules`` of Python are installed."""
    packages = {package for program, package in (programs or {}).items() if shutil.which(program) is None}
    if packages:
        raise MissingError(f"install Debian's packages first: apt-get install {' '.join(sorted(packages))}")
    if missing := [module for module in modules if find_spec(module) is None]:
        raise MissingError(f"{', '.join(missing)} missing: pip install -r requirements/studies.txt")

"""Arguments of public functions: each check returns the value, or raises ``ConfigurationError`` that names it."""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

from horovod_onebit.errors import ConfigurationError

LEAST = {"torch": "2.8", "keras": "3.12"}
"""The oldest versions that work: from PyTorch 2.8 on, Gloo's groups can be aborted and AdamW is a subclass of Adam;
from Keras 3.12 on, LossScaleOptimizer knows which variables are trained."""


def check_version(package: str, found: str) -> None:
    """Raise ``ImportError`` unless ``found``, the version of ``package``, is that of ``LEAST`` or later."""
    least = LEAST[package]
    ours, theirs = ([int(number) for number in re.findall(r"\d+", text)[:2]] for text in (least, found))
    if theirs < ours:
        raise ImportError(
            f"horovod_onebit needs {package} {least} or later; this is {found}: pip install '{package}>={least}'"
        )


def whole(name: str, value: Any, what: str = "a whole number", least: int = 1) -> int:
    """An int, not a bool, of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r}: expected {what}, at least {least}")
    return value


def replica_interval(value: Any) -> None:
    """``check_replicas_every``, which is None, False, or a number of steps."""
    if value is not None and value is not False:
        whole("check_replicas_every", value, "None, False or a whole number of steps")


def root_rank(value: Any, workers: int, ranks: Collection[int] | None = None) -> int:
    """A rank of ``workers``, and of a process set's ``ranks``, which are None if it is the whole world."""
    if whole("root_rank", value, "a rank", least=0) >= workers:
        raise ConfigurationError(f"root_rank={value}: expected 0 <= root_rank < {workers}")
    if ranks is not None and value not in ranks:
        raise ConfigurationError(f"root_rank={value}: expected a rank of the process set, {ranks}")
    return value


def number(name: str, value: Any) -> float:
    """Any real number, of Python or NumPy, but not a bool and not NaN."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        raise ConfigurationError(f"{name}={value!r}: expected a number")
    return value  # type: ignore[return-value]


def positive(name: str, value: Any) -> float:
    """A number above 0; it may be infinite."""
    if not number(name, value) > 0:
        raise ConfigurationError(f"{name}={value!r}: expected a positive number")
    return value


def finite(name: str, value: Any, what: str = "a number") -> float:
    """A finite number of 0 or more."""
    if not 0 <= number(name, value) < math.inf:
        raise ConfigurationError(f"{name}={value!r}: expected {what}, zero or more and finite")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r}: expected True or False")
    return value


def folder(value: Any) -> Path:
    """A path of a folder, which need not be there."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"folder={value!r}: expected a path")
    return Path(value)


def one_of(name: str, value: Any, choices: Any) -> None:
    """Raise unless ``value`` is one of ``choices``, a ``Literal`` or a tuple."""
    expected = get_args(choices) or choices
    if value not in expected:
        raise ConfigurationError(f"{name}={value!r}: expected one of {', '.join(map(repr, expected))}")


def matching(field: str, patterns: Any, names: Iterable[str], *, all_match: bool = True) -> set[str]:
    """Those of ``names`` that one of ``patterns`` matches: names, or patterns of ``fnmatch``. None is no pattern.

    A pattern that matches nothing is an error, unless ``all_match`` is False.
    """
    if patterns is None:
        return set()
    asked = list(patterns) if isinstance(patterns, Iterable) and not isinstance(patterns, (str, bytes)) else None
    if asked is None or not all(isinstance(pattern, str) for pattern in asked):
        raise ConfigurationError(f"{field}={patterns!r}: expected names or patterns, such as ['embedding.*']")
    known, found = list(dict.fromkeys(names)), set()
    for pattern in asked:
        stands_for = {name for name in known if name == pattern or fnmatchcase(name, pattern)}
        if not stands_for and all_match:
            some = ", ".join(known[:10]) + (", ..." if len(known) > 10 else "")
            raise ConfigurationError(f"{field}: {pattern!r} matches no parameter; their names are {some}")
        found |= stands_for
    return found


def mapping(name: str, value: Any, of: str) -> Mapping[str, Any]:
    """A mapping; ``of`` says of what."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} is {type(value).__name__}: expected a mapping of {of}")
    return value

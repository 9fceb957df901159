"""Arguments of public functions: each check returns the value, or raises ``ConfigurationError`` that names it."""

from __future__ import annotations

import fnmatch
import math
import numbers
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from horovod_onebit.errors import ConfigurationError


def whole(name: str, value: Any, what: str = "a whole number", least: int = 1) -> int:
    """An int, not a bool, of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r}: expected {what}, at least {least}")
    return value


def root_rank(value: Any, workers: int) -> int:
    """A rank of ``workers``."""
    if whole("root_rank", value, "a rank", least=0) >= workers:
        raise ConfigurationError(f"root_rank={value}: expected 0 <= root_rank < {workers}")
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
    """Raise unless ``value`` is one of the ``Literal`` called ``choices``."""
    if value not in get_args(choices):
        raise ConfigurationError(f"{name}={value!r}: expected one of {', '.join(map(repr, get_args(choices)))}")


def mapping(name: str, value: Any, of: str) -> Mapping[str, Any]:
    """A mapping; ``of`` says of what."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} is {type(value).__name__}: expected a mapping of {of}")
    return value


def matching(field: str, patterns: Any, names: Iterable[str]) -> set[str]:
    """The ``names`` that are, or match, one of ``patterns`` (as those of ``fnmatch``); each must match something."""
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise ConfigurationError(f"{field}={patterns!r}: expected a list of names or patterns")
    known, found = list(dict.fromkeys(names)), set[str]()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"{field} has {pattern!r}: expected names or patterns")
        matched = {name for name in known if name == pattern or fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            raise ConfigurationError(f"{field}: {pattern!r} matches none of the names, which are {', '.join(known)}")
        found |= matched
    return found

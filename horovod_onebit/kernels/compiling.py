"""Numba's compiler with its cache on disk, which must never be what a job fails of.

Workers of many hosts share a home on a network file system, where files go stale and are cut off while others write;
or there is no folder that can be written to. Then the kernels are compiled again, in seconds.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit

logger = logging.getLogger("horovod_onebit")


@cache
def _own() -> frozenset[str]:
    package = Path(__file__).parents[1]
    folders = (package / name for name in ("codecs", "kernels", "rules"))
    return frozenset(map(str, [package / "formulas.py", *(file for folder in folders for file in folder.glob("*.py"))]))


def _sources(function: Any) -> frozenset[str]:
    """The files that ``function`` is made of: ours, and those of others' formulas that it calls, themselves or not."""
    called = (function.__globals__.get(name) for name in function.__code__.co_names)
    return _own().union({function.__code__.co_filename}, *(getattr(value, "sources", ()) for value in called))


@cache
def _stamp(files: frozenset[str]) -> str:
    """Numba looks at the date of the called function's file only: a formula of another may have been changed, and a
    file that was installed again may be the same."""
    found = hashlib.sha256()
    for name in sorted(files):
        content = Path(name).read_bytes()
        found.update(f"{name} {len(content)} ".encode() + content)
    return found.hexdigest()


class _ForgivingCache:
    """Numba's cache of one function; what cannot be read is not there, what cannot be written is not kept."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, target: Any) -> Any:
        try:
            return self._cache.load_overload(signature, target)
        except Exception as error:
            logger.debug("a compiled kernel cannot be read from %s: %s", self._cache.cache_path, error)
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        try:
            self._cache.save_overload(signature, compiled)
        except Exception as error:
            logger.debug("a compiled kernel cannot be kept in %s: %s", self._cache.cache_path, error)


def _tell_apart(file: Any, stamp: str) -> None:
    """Give what is kept in Numba's cache ``file`` names of its own: of sources with this ``stamp``, and of one save.

    Numba numbers them, and writes the index before what it is about. A process that reads the index in between would
    get what was there before under the same number: code of an older version, or, where two processes compile, of other
    argument types.
    """
    base, folder, kept = file._index_name.removesuffix(".nbi"), Path(file._cache_path), stamp[:16]
    save = file.save

    def save_and_sweep(key: Any, data: Any) -> None:
        save(key, data)
        for path in folder.glob(f"{glob.escape(base)}.*.nbc"):
            if path.name.split(".")[-3] != kept:  # of other sources
                path.unlink(missing_ok=True)

    file._source_stamp, file.save = stamp, save_and_sweep
    file._data_name = lambda number: f"{base}.{kept}.{uuid.uuid4().hex[:16]}.nbc"


def cached(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit(**options)`` with a cache on disk where there is one that works."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(**options)(function)
        dispatcher.sources = _sources(function)
        try:
            stamp = _stamp(dispatcher.sources)
            dispatcher.enable_caching()
        except (RuntimeError, OSError) as error:  # no folder can be written to, or it is of a notebook, and in no file
            logger.debug("kernels are compiled again in every process: %s", error)
            return dispatcher
        with suppress(AttributeError):  # inside of Numba
            _tell_apart(dispatcher._cache._cache_file, stamp)
        dispatcher._cache = _ForgivingCache(dispatcher._cache)
        return dispatcher

    return decorate


# No "fast" arithmetic in elementwise code (it must round like the reference); only sums may be reordered.
exact: Callable[..., Any] = cached(nogil=True, error_model="numpy")
reordered: Callable[..., Any] = cached(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})

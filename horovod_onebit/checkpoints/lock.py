"""One job saves in a folder at a time: worker 0 holds a lock of the operating system while its process lives.

The system releases the lock however the process ends, so that a job which was killed is in nobody's way, and on file
systems such as NFS it is seen by other hosts. Where a file system has no locks, or does not show them to other hosts,
jobs still notice each other: none replaces a checkpoint that it neither saved nor loaded. That of a run that has ended
is set aside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from horovod_onebit.checkpoints import files

logger = logging.getLogger("horovod_onebit")

NAME = "in-use"


@dataclass
class _Folder:
    """What this process knows of a folder."""

    lock: int | None = None  # the locked file's descriptor
    last: str | None = None  # the key of the checkpoint that this job saved last, or found when it loaded
    saving: str | None = None  # of the one that it may have saved, if workers were lost meanwhile
    good: str | None = None  # of the one that it loaded or saved
    owner: weakref.ref | None = None  # the optimizer that saves here,
    model: str = ""  # and which parameters it has


_folders: dict[str, _Folder] = {}


def _known(place: Path) -> _Folder:
    return _folders.setdefault(os.path.realpath(place), _Folder())


def remember(place: Path, last: str, good: str) -> None:
    """This job continues from ``good``, in a folder whose last checkpoint is ``last``."""
    known = _known(place)
    known.last, known.saving, known.good = last, None, good


def saving(place: Path, key: str) -> None:
    """This job is about to complete the checkpoint ``key``."""
    _known(place).saving = key


def good(place: Path) -> str | None:
    """The key of the checkpoint that this job saved last in ``place``, or loaded from there."""
    return _known(place).good


def keys(place: Path) -> set[str]:
    """Of the checkpoints in ``place`` that this process knows to be its job's."""
    known = _known(place)
    return {key for key in (known.last, known.saving) if key is not None}


def acquire(place: Path, owner: object, model: str, job: Collection[str] = ()) -> bool:
    """Make ``place`` this job's; raises ``RuntimeError`` if it is another's. Worker 0 calls it before each save.
    Returns whether the checkpoints there are of another run, which has ended.

    Waits for a moment for a job that is about to end. ``owner`` is the optimizer, ``model`` says which parameters it
    has: a second model of this job must not replace the checkpoints of the first. ``job``: ``keys`` of its other
    workers, who may have been there before this one.
    """
    known = _known(place)
    path = place / NAME
    before = known.owner() if known.owner else None
    if before not in (None, owner) and known.model != model and (place / files.LATEST).exists():
        raise RuntimeError(f"this job saves another model in {place}: give each model a folder of its own")
    own = keys(place).union(job)
    _acquire(known, place, path, own)
    known.owner, known.model = weakref.ref(owner), model
    return not own and files.last_key(place) is not None


def _acquire(known: _Folder, place: Path, path: Path, own: Collection[str]) -> None:
    if known.lock is not None and _same_file(known.lock, path):
        _check_last(own, place)
        return
    release(place)
    descriptor = _open(path)
    try:
        locked = _lock(descriptor, path)
        _check_last(own, place)
    except BaseException:
        os.close(descriptor)
        raise
    known.lock = descriptor
    if not locked:
        return
    with contextlib.suppress(OSError):  # for messages only
        text = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": time.ctime()})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _check_last(own: Collection[str], place: Path) -> None:
    """Raise if this job has checkpoints of its ``own``, saved or found when it loaded, and the last one of ``place`` is
    none of them."""
    last = files.last_key(place)
    if last is not None and own and last not in own:
        raise RuntimeError(
            f"another job has saved a checkpoint in {place} since this one saved or loaded: its checkpoint is left as "
            "it is. Give each job a folder of its own"
        )


def release(place: Path) -> None:
    """Let another process of this job, or another job, save in ``place``; nothing if this one does not."""
    # In one go, for simulated workers are threads of one process: the attribute is then the class's, which is None.
    descriptor = vars(_known(place)).pop("lock", None)
    if descriptor is not None:
        os.close(descriptor)


def _open(path: Path) -> int:
    flags = os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDWR | flags, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags, 0o666)  # another user's of the same group


def _lock(descriptor: int, path: Path) -> bool:
    """Whether the file system has locks; raises ``RuntimeError`` if another process has this one."""
    end = time.monotonic() + files.PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                logger.info("%s cannot be locked: %s", path, error)
                return False
        if time.monotonic() > end:
            raise RuntimeError(
                f"another job, which is still running, saves its checkpoints in {path.parent}{_owner(path)}. Give each "
                "job a folder of its own, or end that job first"
            )
        time.sleep(0.1)


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text())
        return f" (process {owner['process']} on {owner['host']}, since {owner['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _same_file(descriptor: int, path: Path) -> bool:
    """Whether ``path`` still is the file that was locked: folders are removed and made again."""
    try:
        there, here = path.stat(), os.fstat(descriptor)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _forget_locks() -> None:
    """A forked process must not keep the locks of the one that it came from."""
    for known in _folders.values():
        if known.lock is not None:
            os.close(known.lock)
            known.lock = None


os.register_at_fork(after_in_child=_forget_locks)

"""The files of a checkpoint: which one is complete, digests, and what is removed when.

A folder holds

    latest.json            which checkpoint is complete, the one before it, and the digest of each of their files
    KEY.shared.npz         model, optimizer, and what else the caller keeps; written by worker 0
    KEY.worker-0003.npz    the error feedback of one worker
    previous/              the files of the checkpoint before
    of-KEY/                the same of a run before, which this one has not loaded
    in-use                 locked by the job that saves here

``latest.json`` is written last and in one go: a run that dies while it saves leaves the checkpoint before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from horovod_onebit.errors import CheckpointError

FORMAT = 2
LATEST = "latest.json"
PREVIOUS = "previous"
PATIENCE = 10.0
"""Seconds to wait for files that other hosts have written, and for the lock of a job that is about to end."""

KEY = re.compile("[0-9a-f]{16}")
OURS = re.compile(rf"(tmp\.)?({KEY.pattern})\.(shared|worker-\d+)\.npz")


@dataclass(frozen=True)
class Digest:
    """What a file must be: its size and its BLAKE2b digest (what ``b2sum`` prints)."""

    bytes: int
    blake2b: str

    @classmethod
    def of(cls, path: Path) -> Digest:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, hashlib.blake2b).hexdigest()
            return cls(file.tell(), digest)


@dataclass(frozen=True)
class Complete:
    """A complete checkpoint: of how many workers, after which step, the digests of its files by their names, and which
    framework's face saved it; "" if that is not known."""

    key: str
    workers: int
    step: int
    files: Mapping[str, Digest]
    framework: str = ""

    @classmethod
    def of(cls, found: Any, path: Path) -> Complete:
        """From an entry of ``latest.json``; raises ``ValueError`` that says what is wrong."""
        if not isinstance(found, dict):
            raise ValueError(f"{path} is damaged: {type(found).__name__}, expected an object")
        tests = {
            "key": lambda key: isinstance(key, str) and KEY.fullmatch(key),
            "workers": lambda workers: _whole(workers) and workers >= 1,
            "step": lambda step: _whole(step) and step >= 0,
            "files": lambda files: isinstance(files, dict),
        }
        for name, right in tests.items():
            if name not in found:
                raise ValueError(f"{path} is damaged: it has no {name!r}")
            if not right(found[name]):
                raise ValueError(f"{path} is damaged: {name} is {found[name]!r:.80}")
        files = found["files"]
        try:
            digests = {str(name): Digest(int(d["bytes"]), str(d["blake2b"])) for name, d in files.items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(f"{path} is damaged: files is {str(files)[:80]}") from None
        return cls(found["key"], found["workers"], found["step"], digests, str(found.get("framework", "")))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def worker_file(place: Path, key: str, rank: int) -> Path:
    """Where worker ``rank`` keeps what is its own."""
    return place / f"{key}.worker-{rank:04d}.npz"


def shared_file(place: Path, key: str) -> Path:
    """Where worker 0 keeps what is the same on all workers."""
    return place / f"{key}.shared.npz"


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Put a file in its place in one go, on the disk before it is there. If that fails, nothing of it is left."""
    temporary = path.with_name(f"tmp.{path.name}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def remove(paths: Iterable[Path]) -> None:
    """Remove what is there and can be removed."""
    for path in paths:
        for one in (path, path.with_name(f"tmp.{path.name}")):
            with contextlib.suppress(OSError):
                one.unlink()


def history(place: Path) -> list[Complete]:
    """The complete checkpoints of a folder, the last one first; none if there is no ``latest.json``.

    Raises ``ValueError`` if it is damaged or of something else, and ``CheckpointError`` if an earlier version of this
    library wrote it.
    """
    path = place / LATEST
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if isinstance(found, dict) and found.get("format") == 1:
        raise CheckpointError(
            f"{place} has a checkpoint of horovod-onebit 0.1, whose files this version does not read. Load the weights "
            "alone with horovod-onebit 0.1 (load_weights), save them by the framework's own means, and begin a new run "
            "from them, which saves to another folder"
        )
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is not of this library, or of another version of it")
    entries = [found] if found.get("previous") is None else [found, found["previous"]]
    return [Complete.of(entry, path) for entry in entries]


def find(place: Path, name: str) -> Path:
    """The path of a checkpoint's file, which is moved when another checkpoint is complete."""
    path = place / PREVIOUS / name
    return path if path.exists() and not (place / name).exists() else place / name


def check(path: Path, digest: Digest) -> None:
    """Raise ``ValueError`` unless the file is what it was when it was saved."""
    found = Digest.of(path)
    if found.bytes != digest.bytes:
        raise ValueError(f"{path} has {found.bytes} bytes and had {digest.bytes} when it was saved")
    if found != digest:
        raise ValueError(f"{path} is damaged: its digest is not the one that latest.json has")


def await_files(place: Path, files: Mapping[str, Digest]) -> None:
    """Wait until all ``files`` are seen in ``place``, in their full sizes; other hosts' may take a moment to appear.

    Raises ``FileNotFoundError`` if that does not happen.
    """
    end = time.monotonic() + PATIENCE
    missing = dict(files)
    while True:
        missing = {name: digest for name, digest in missing.items() if _size(place / name) != digest.bytes}
        if not missing:
            return
        if time.monotonic() > end:
            raise FileNotFoundError(
                f"{place} has no {', '.join(sorted(missing)[:3])}, which another worker has written: all workers must "
                "give the same folder, on a file system that all hosts share"
            )
        time.sleep(0.1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def complete(
    place: Path,
    key: str,
    workers: int,
    step: int,
    files: Mapping[str, Digest],
    good: str | None = None,
    framework: str = "",
) -> None:
    """All files of ``key`` are there: from now on it is the last checkpoint.

    Of those before, the last one is kept, or the one whose key is ``good``; its files move to ``previous/``, and what
    is older is removed. What else the folder has is the user's.
    """
    before = history(place)
    before = [one for one in before if one.key == good] or before
    kept = [one for one in before[:1] if one.key != key]
    entries = [asdict(Complete(key, workers, step, files, framework)), *map(asdict, kept)]
    text = json.dumps({"format": FORMAT, **entries[0], "previous": entries[1] if kept else None})
    _sync(place)  # the files' names, before the one that names them
    replace(place / LATEST, lambda path: path.write_text(text))
    _sync(place)
    with contextlib.suppress(OSError):  # the checkpoint is complete, whatever else is left
        sweep(place, key, kept[0].key if kept else None)


def sweep(place: Path, key: str | None, previous: str | None) -> None:
    """Remove the files of all checkpoints but ``key`` and ``previous``, whose files move to ``previous/``."""
    older = place / PREVIOUS
    for folder in (older, place):
        for path in list(folder.iterdir()) if folder.is_dir() else []:
            match = OURS.fullmatch(path.name)
            # A file that cannot be removed or moved is in nobody's way: it is tried again after the next checkpoint.
            with contextlib.suppress(OSError):
                if match and match[2] not in (key, previous):
                    path.unlink()
                elif match and match[2] == previous and folder is place:
                    older.mkdir(exist_ok=True)
                    path.replace(older / path.name)


def set_aside(place: Path) -> Path:
    """Move the checkpoints of ``place``, whose ``latest.json`` can be read, to a folder in it, from where they can be
    loaded; returns that. If the job is killed meanwhile, the next one that saves there ends the move."""
    found = history(place)
    apart = place / f"of-{found[0].key}"
    apart.mkdir(exist_ok=True)
    for name in (name for one in found for name in one.files):
        with contextlib.suppress(FileNotFoundError):  # moved before, by a job that was killed then; or lost
            find(place, name).replace(apart / name)
    (place / LATEST).replace(apart / LATEST)
    return apart


def last_key(place: Path) -> str | None:
    """The key of the last complete checkpoint, if there is one and it can be read."""
    try:
        found = history(place)
    except (OSError, ValueError):
        return None
    return found[0].key if found else None


def sweep_leftovers(place: Path) -> None:
    """Remove what saves that failed have left. Raises ``ValueError`` if ``latest.json`` cannot be read: what it names
    is unknown, and is not to be replaced."""
    try:
        key, previous, *_ = [*(one.key for one in history(place)), None, None]
    except ValueError as error:
        raise ValueError(
            f"{error}. Nothing is saved there, and what it names is left as it is: move it away, or give another folder"
        ) from None
    sweep(place, key, previous)


def _sync(folder: Path) -> None:
    """Put the names of a folder's files on the disk, where the file system offers that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

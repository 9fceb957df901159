"""The files of a checkpoint, whatever the framework: which one is complete, written in one go, an error for all.

A folder holds, for the last complete checkpoint,

    latest.json          which one is complete: written last, in one go
    KEY.shared.*         model, optimizer, and what else the caller keeps; by worker 0
    KEY.worker-0003.*    the error feedback of one worker

A run that dies while it saves leaves the one before.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from horovod_onebit.errors import CheckpointError

T = TypeVar("T")
FORMAT = 1
OTHER_WORKERS = "the checkpoint is of %d workers and there are %d: what their errors owe together is shared out anew"


def on_all(action: Callable[[], T], what: str, gather: Callable[[str], list[str]]) -> T:
    """Do ``action`` on every worker; if it fails on one, raise ``CheckpointError`` on all. Collective.

    ``gather`` gives every worker the texts of all; ``what`` is "save" or "load".
    """
    result, error = None, ""
    try:
        result = action()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    failed = [f"worker {rank}: {text}" for rank, text in enumerate(gather(error)) if text]
    if failed:
        raise CheckpointError(f"cannot {what} the checkpoint; {'; '.join(failed[:3])}")
    return result  # type: ignore[return-value]


def worker_file(place: Path, key: str, rank: int, suffix: str) -> Path:
    """Where worker ``rank`` keeps what is its own."""
    return place / f"{key}.worker-{rank:04d}.{suffix}"


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Put a file in its place in one go, on the disk before it is there."""
    # The end of the name stays: Keras and NumPy look at it.
    temporary = path.with_name(f"tmp.{path.name}")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def complete(place: Path, key: str, workers: int, step: int, suffixes: tuple[str, ...]) -> None:
    """All files of ``key`` are there: from now on it is the last one, and those before are removed.

    What else the folder has is the user's.
    """
    text = json.dumps({"format": FORMAT, "key": key, "workers": workers, "step": step})
    replace(place / "latest.json", lambda path: path.write_text(text))
    ours = re.compile(rf"(tmp\.)?[0-9a-f]{{16}}\.(shared|worker-\d+)\.({'|'.join(suffixes)})")
    for old in place.iterdir():
        if ours.fullmatch(old.name) and not old.name.startswith(key):
            old.unlink()


def latest(place: Path) -> dict[str, Any]:
    """What ``complete`` wrote; raises if there is none, or one of another kind."""
    path = place / "latest.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: there is no complete checkpoint")
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is not of this library, or of another version of it")
    return found

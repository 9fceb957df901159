"""The data that the paper used, in their usual formats: ``python -m studies networks --data-dir DIR``.

DIR may have ``cifar-10-batches-py`` (Krizhevsky's files for Python); ``wmt14`` with train.de, train.en, newstest2014.de
and newstest2014.en, a sentence a line (as preprocessed by Stanford's group); and ``LibriSpeech`` with train-clean-100
or other train-* folders, and test-clean. What it lacks is replaced by what comes with packages, as without DIR.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from studies.problem import MissingError, need

VARIABLES = {"data_dir": "ONEBIT_STUDIES_DATA_DIR", "steps": "ONEBIT_STUDIES_STEPS"}
"""Of the environment, by the option of the command line: runs have processes of their own."""
CIFAR, WMT, LIBRISPEECH = "cifar-10-batches-py", "wmt14", "LibriSpeech"
NAMES = {CIFAR: "CIFAR-10", WMT: "WMT-14, from German into English", LIBRISPEECH: "LibriSpeech"}
PAIRS = 200_000
"""Sentences to train on, at most, drawn from all."""
SECONDS, UTTERANCES, TESTS = 6.0, 10_000, 300
"""The longest recordings that are taken, how many to train on, at most, and to test with."""


def given(data_dir: Path | None, steps: int | None) -> None:
    """Let this process and those that it starts use ``data_dir``, and so many ``steps`` of each run.

    Raises MissingError if ``data_dir`` has none of the three.
    """
    if data_dir is not None:
        if not any((data_dir / name).is_dir() for name in NAMES):
            raise MissingError(f"{data_dir} has none of the folders {', '.join(NAMES)}")
        os.environ[VARIABLES["data_dir"]] = str(data_dir.resolve())
    if steps is not None:
        os.environ[VARIABLES["steps"]] = str(steps)


def folder(name: str) -> Path | None:
    """The folder of that ``name`` in ``--data-dir``, if there is one."""
    found = os.environ.get(VARIABLES["data_dir"])
    return Path(found) / name if found and (Path(found) / name).is_dir() else None


def steps() -> int | None:
    """Of a run, if they were given."""
    found = os.environ.get(VARIABLES["steps"])
    return int(found) if found else None


def apart() -> str:
    """The folder of runs that are kept: those with other data or steps are not those of the page. Empty for these."""
    told = [os.environ.get(variable, "") for variable in VARIABLES.values()]
    return f"own/{zlib.crc32(' '.join(told).encode()):08x}/" if any(told) else ""


def _sentences(path: Path, name: str) -> Iterator[tuple[str, str]]:
    """German and English of each line of a part of WMT-14; in small letters."""
    files = [path / f"{name}.{language}" for language in ("de", "en")]
    if missing := [str(file) for file in files if not file.exists()]:
        raise MissingError(f"{' and '.join(missing)} missing: expected a sentence a line, the same in both languages")
    with files[0].open(encoding="utf-8") as german, files[1].open(encoding="utf-8") as english:
        for one, other in zip_longest(german, english):
            if one is None or other is None:
                raise MissingError(f"{files[0]} and {files[1]} have different numbers of lines")
            yield " ".join(one.lower().split()), " ".join(other.lower().split())


def wmt(path: Path, words: int, tests: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs of sentences to train on, and to test with, neither of more than ``words`` words."""

    def short(name: str) -> Iterator[tuple[str, str]]:
        return (pair for pair in _sentences(path, name) if all(0 < len(text.split()) <= words for text in pair))

    draw, found = np.random.default_rng(0), list[tuple[str, str]]()
    for number, pair in enumerate(short("train")):  # Vitter's algorithm R: all are as likely
        if number < PAIRS:
            found.append(pair)
        elif (place := int(draw.integers(0, number + 1))) < PAIRS:
            found[place] = pair
    return found, list(dict.fromkeys(short("newstest2014")))[:tests]


def recordings(path: Path) -> tuple[list[tuple[str, NDArray, int]], list[tuple[str, NDArray, int]]]:
    """Text, sound (samples,) and samples a second of LibriSpeech's recordings to train on, and to test with."""
    need(modules=("soundfile",))
    training = sorted(folder for folder in path.glob("train-*") if folder.is_dir())
    tests = path / "test-clean"
    if not training or not tests.is_dir():
        raise MissingError(f"{path}: expected train-clean-100, or other folders train-*, and test-clean")
    return _some(training, UTTERANCES), _some([tests], TESTS)


def _some(folders: list[Path], count: int) -> list[tuple[str, NDArray, int]]:
    import soundfile

    transcripts = [file for folder in folders for file in sorted(folder.rglob("*.trans.txt"))]
    lines = [(file, line) for file in transcripts for line in file.read_text(encoding="utf-8").splitlines()]
    found = []
    for place in np.random.default_rng(0).permutation(len(lines)).tolist():
        file, line = lines[place]
        name, _, text = line.partition(" ")
        flac = file.with_name(f"{name}.flac")
        if soundfile.info(flac).duration <= SECONDS:
            sound, rate = soundfile.read(flac, dtype="float32")
            found.append((re.sub("[^a-z ]", "", text.lower()), sound, rate))
        if len(found) == count:
            break
    return found

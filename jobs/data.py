"""The tasks' data as NumPy arrays, and which examples a worker sees at a step.

Nothing is downloaded: digits come with scikit-learn, text with Python's own help, CIFAR-10 from ``--data-dir``.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jobs.options import Options

SEQUENCE = 64


@dataclass(frozen=True)
class Task:
    """Examples to train on and to test with.

    Images: ``x`` (n, channels, height, width) float32, ``y`` (n,) int64. Text: ``x`` (n, SEQUENCE) int64 and ``y``
    the same shifted by one.
    """

    train_x: NDArray
    train_y: NDArray
    test_x: NDArray
    test_y: NDArray
    classes: int

    def batch(self, options: Options, step: int, rank: int, size: int) -> tuple[NDArray, NDArray]:
        """What worker ``rank`` of ``size`` sees at ``step``: depends on these and the seed alone."""
        rng = np.random.default_rng([options.seed, step])
        everybody = rng.integers(0, len(self.train_x), options.batch_size * size)
        own = everybody[rank::size]
        return self.train_x[own], self.train_y[own]


def load(options: Options) -> Task:
    """The data of ``options.task``."""
    if options.task == "charlm":
        return _text()
    if options.task == "vgg" and options.data_dir is not None:
        return _cifar(options.data_dir / "cifar-10-batches-py")
    return _digits(enlarge=4 if options.task == "vgg" else 1)


def _digits(enlarge: int) -> Task:
    images, labels = _scikit_learn_digits()
    x = (images.reshape(-1, 1, 8, 8) / 8 - 1).astype(np.float32)
    x = x.repeat(enlarge, axis=2).repeat(enlarge, axis=3)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = np.ascontiguousarray(x[order]), labels[order].astype(np.int64)
    return Task(x[:1437], y[:1437], x[1437:], y[1437:], classes=10)


def _scikit_learn_digits() -> tuple[NDArray, NDArray]:
    """``sklearn.datasets.load_digits``, from its file: importing scikit-learn takes seconds of every process."""
    package = find_spec("sklearn")
    file = Path(package.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if package else None
    if file is None or not file.exists():
        from sklearn.datasets import load_digits

        return load_digits(return_X_y=True)
    rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)


def _cifar(folder: Path) -> Task:
    def read(name: str) -> tuple[NDArray, NDArray]:
        with open(folder / name, "rb") as file:
            batch = pickle.load(file, encoding="bytes")
        return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[b"labels"], np.int64)

    parts = [read(f"data_batch_{i}") for i in range(1, 6)]
    train_x, train_y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    test_x, test_y = read("test_batch")
    scaled = [((x / 255 - 0.47) / 0.25).astype(np.float32) for x in (train_x, test_x)]
    return Task(scaled[0], train_y, scaled[1], test_y, classes=10)


def _text() -> Task:
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    letters, ids = np.unique(np.frombuffer(text.encode("ascii", "replace"), np.uint8), return_inverse=True)
    return of_letters(ids, len(letters), test_rows=256)


def of_letters(ids: NDArray, classes: int, test_rows: int) -> Task:
    """Text of the letters ``ids`` (n,), each below ``classes``: to foretell the next one."""
    rows = (len(ids) - 1) // SEQUENCE
    x, y = (ids[at : at + rows * SEQUENCE].reshape(rows, SEQUENCE).astype(np.int64) for at in (0, 1))
    order = np.random.default_rng(0).permutation(rows)
    test, train = order[:test_rows], order[test_rows:]
    return Task(x[train], y[train], x[test], y[test], classes)

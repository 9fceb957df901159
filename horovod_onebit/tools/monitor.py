"""Writes what a run costs, step by step, as JSON lines and to what a face adds. Only worker 0 writes."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol

import numpy as np

from horovod_onebit.checks import whole
from horovod_onebit.errors import ConfigurationError, error_text
from horovod_onebit.tools import show

logger = logging.getLogger("horovod_onebit")

Value = float | int | str | list[Any] | None


class Sink(Protocol):
    """Where measurements go. After an ``OSError``, as of a full disk, nothing is written there any more."""

    def write(self, step: int, values: Mapping[str, Value]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Writes a JSON object a line to a new file, or with ``append`` to an old one, from which it drops a last line that
    was cut off; NaN and Inf become null."""

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        try:
            self._file = Path(path).open("a" if append else "w", encoding="utf-8")  # noqa: SIM115 - open for as long as the run
            if append:
                kept = _uncut(Path(path).read_bytes())
                self._file.truncate(len(kept))
                self._file.write("" if not kept or kept.endswith(b"\n") else "\n")
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written ({error.strerror}): expected a file's name") from error

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        self._file.write(json.dumps(show.finite({"step": step, **values})) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes numbers as scalars whose tags begin with ``horovod_onebit/``; the faces implement how. What fails is an
    ``OSError``: the writers of TensorFlow and tensorboard have errors of their own."""

    def add(self, tag: str, value: float, step: int) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """After each step."""

    def end(self) -> None:
        raise NotImplementedError

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        with _as_os_errors():
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self.add(f"horovod_onebit/{name}", value, step)
            self.flush()

    def close(self) -> None:
        with _as_os_errors():
            self.end()


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise OSError(error_text(error)) from error


class Monitor:
    """``with Monitor(optimizer, sinks) as monitor:``, then ``monitor.step(loss=...)`` after each ``optimizer.step()``.

    Every ``every`` steps the sinks get ``optimizer.stats()``, ``seconds`` since the start, ``step_seconds`` (the mean
    since the last time), and what ``step`` was given.
    """

    def __init__(self, optimizer: Any, sinks: Sequence[Sink], *, every: int = 10) -> None:
        self.optimizer, self.sinks = optimizer, list(sinks)
        self.every = whole("every", every, "a whole number of steps")
        self.calls = 0
        self._last_step = optimizer.stats(norms=False).step
        self._start = self._last = time.perf_counter()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(self, **values: Any) -> None:
        """Call it after each optimizer step. Local: it communicates with no other worker."""
        self.calls += 1
        if not self.sinks or self.calls % self.every:
            return
        now = time.perf_counter()
        stats: dict[str, Any] = self.optimizer.stats().as_dict()
        given = {name: _plain(value) for name, value in values.items()}
        step = stats.pop("step")
        taken = max(step - self._last_step, 1)
        times = {"seconds": now - self._start, "step_seconds": (now - self._last) / taken}
        for sink in list(self.sinks):
            with self._watched(sink):
                sink.write(step, {**given, **stats, **times})
        self._last, self._last_step = now, step

    def close(self) -> None:
        """Close the files."""
        for sink in list(self.sinks):
            with self._watched(sink):
                sink.close()
        self.sinks.clear()

    @contextmanager
    def _watched(self, sink: Sink) -> Iterator[None]:
        """A full disk must not end the training."""
        try:
            yield
        except OSError as error:
            logger.warning("%s is written no more: %s", type(sink).__name__.lstrip("_"), error)
            self.sinks.remove(sink)


class FaceMonitor(Monitor):
    """The ``Monitor`` of a face, which says how TensorBoard is written and ``check``s the optimizer. Its docstring
    explains the arguments."""

    board: ClassVar[type[Any]]

    def __init__(
        self,
        optimizer: Any,
        *,
        jsonl: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        every: int = 10,
        append: bool = False,
    ) -> None:
        optimizer = self.check(optimizer)
        compressor = optimizer._compressor
        first = compressor.workers > 0 and compressor.engine.collectives.rank == 0
        sinks: list[Sink] = []
        if first and jsonl is not None:
            sinks.append(JsonLines(jsonl, append=append))
        if first and tensorboard is not None:
            sinks.append(self.board(os.fspath(tensorboard)))
        super().__init__(optimizer, sinks, every=every)

    def check(self, optimizer: Any) -> Any:
        """``optimizer``, or the one inside its loss scaling, if the face made it; else ``ConfigurationError``."""
        raise NotImplementedError


def _plain(value: Any) -> Value:
    """A framework's number as a Python float, and its array of several as a list."""
    if isinstance(value, str) or value is None:
        return value
    array = np.asarray(value.tolist() if hasattr(value, "tolist") else value, np.float64)
    plain: Value = array.item() if array.size == 1 else array.tolist()
    return plain


def _uncut(file: bytes) -> bytes:
    """``file`` without a last line that was cut off: the job was killed, or writes it at present."""
    before, end, last = file.rpartition(b"\n")
    try:
        json.loads(last or b"null")
    except ValueError:
        return before + end
    return file


def _number(value: object) -> bool:
    return isinstance(value, (int, float))


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines that have a step, of a file that ``JsonLines`` or a training job wrote, without a last one that was cut
    off."""
    try:
        lines = [json.loads(line) for line in _uncut(Path(path).read_bytes()).splitlines() if line.strip()]
        return [line for line in lines if "step" in line and not line.get("final")]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path}: expected a file of JSON lines with steps ({error})") from error


PANELS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("loss", ("loss", "test_loss"), "log"),
    ("accuracy", ("accuracy", "val_accuracy"), "linear"),
    ("bytes sent in a step", ("step_bytes_sent",), "log"),
    ("bytes sent in all", ("bytes_sent",), "linear"),
    ("error / momentum", ("error_to_momentum",), "linear"),
    ("seconds of a step", ("step_seconds", "encode_seconds", "exchange_seconds", "decode_seconds"), "log"),
)
"""Title, values shown and axis of each part of the plot."""


def _names(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """What each run is called: its file's name, after as many folders as tell it from all others."""
    files = [Path(os.path.abspath(path)) for path in paths]
    parts = {file: (*file.parent.parts, file.stem) for file in files}

    def name(file: Path) -> str:
        others = [parts[other] for other in parts if other != file]
        for depth in range(1, len(parts[file]) + 1):
            own = parts[file][-depth:]
            if all(other[-depth:] != own for other in others):
                return "/".join(own)
        return str(file)

    return [name(file) for file in files]


def plot(paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> list[str]:
    """Draw those of ``PANELS`` for which the runs have values, over the steps; returns their titles."""
    runs = dict(zip(_names(paths), map(read, paths), strict=True))
    known = {name for rows in runs.values() for row in rows for name, value in row.items() if _number(value)}
    shown = [panel for panel in PANELS if known & set(panel[1])]
    if not shown:
        names = ", ".join(sorted({name for _, values, _ in PANELS for name in values}))
        raise ConfigurationError(f"{', '.join(map(str, paths))}: nothing to draw; expected lines with any of {names}")
    figure = show.figure(8, 2.6 * len(shown))
    parts = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for (title, values, scale), axes in zip(shown, parts, strict=True):
        for run, rows in runs.items():
            for name in values:
                points = [(row["step"], row[name]) for row in rows if _number(row.get(name))]
                if points:
                    label = run if len(values) == 1 else f"{run}: {name}"
                    axes.plot(*zip(*points, strict=True), label=label)
        axes.set(ylabel=title, yscale=scale)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    parts[-1].set_xlabel("step")
    show.save(figure, output)
    return [title for title, _, _ in shown]

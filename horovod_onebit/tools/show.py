"""Tables and progress (by rich on a terminal that has it, else as plain text), and figures by matplotlib."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod_onebit.errors import ConfigurationError

Advance = Callable[[int], None]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under ``headers``, the first to the left, the others to the right."""
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            return _rich_table(headers, rows)
    return plain(headers, rows)


def plain(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same without colours and lines, wherever it is written."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
    lines = []
    for first, *others in (headers, *rows):
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from rich.console import Console
    from rich.table import Table

    shown = Table()
    for i, header in enumerate(headers):
        shown.add_column(header, justify="left" if i == 0 else "right")
    for row in rows:
        shown.add_row(*row)
    console = Console()
    with console.capture() as capture:
        console.print(shown)
    return capture.get().rstrip("\n")


def finite(value: Any) -> Any:
    """Plain values for JSON, which has no NaN and no Inf: these become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return value


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """A function that takes the number of steps done so far; it shows them on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda done: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches; it needs no window system and changes no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("matplotlib is not installed: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure; the suffix of the name selects the format."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        text = f"{path} cannot be written ({error}): expected a name that ends in .png, .svg or .pdf"
        raise ConfigurationError(text) from error


def check(path: str | os.PathLike[str]) -> None:
    """Raise ``ConfigurationError`` if no figure can be written to ``path``, before the work whose result it shows."""
    place, formats = Path(path), figure(1, 1).canvas.get_supported_filetypes()
    if place.suffix.lstrip(".").lower() not in formats or not os.access(place.parent, os.W_OK):
        text = f"{path} cannot be written: expected a name that ends in .png, .svg or .pdf, in a folder that is there"
        raise ConfigurationError(text)

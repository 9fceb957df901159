"""Tables and progress: by rich on a terminal that has it, plain text elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

Advance = Callable[[int], None]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under ``headers``, the first to the left, the others to the right."""
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            return _rich_table(headers, rows)
    return plain(headers, rows)


def plain(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same without colours and lines, wherever it goes."""
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


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """What is called with the number of steps done so far; shows nothing but on a terminal."""
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

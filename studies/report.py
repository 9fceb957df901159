"""What all studies share: where results go, the name of the machine, tables in Markdown, figures."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"


def processor() -> str:
    """The name of the processor, as Linux has it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def machine() -> str:
    """What figures were taken on: "2 cores of an AMD EPYC"."""
    return f"{os.cpu_count()} cores of an {processor()}"


def system() -> str:
    """``machine`` and its kernel, which carries what is sent: "2 cores of an AMD EPYC, Linux 6.1"."""
    return f"{machine()}, Linux {platform.release().split('-')[0]}"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(x: float, digits: int = 2) -> str:
    """``digits`` digits; ``diverged`` for what is not finite or beyond 1e6."""
    return "diverged" if not math.isfinite(x) or x > 1e6 else f"{x:.{digits}g}"


def axes(**options: Any) -> Any:
    """A new figure and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(constrained_layout=True, **options)


def save(figure: Any, name: str) -> str:
    """Store a figure; the Markdown that shows it."""
    from matplotlib import pyplot, rc_context

    FIGURES.mkdir(parents=True, exist_ok=True)
    # Without the time of its making, and with the same identifiers: a figure that has not changed does not differ.
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
    return f"![{name}](figures/{name}.svg)"

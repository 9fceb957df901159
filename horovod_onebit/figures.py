"""Pictures, where matplotlib is installed; no window system and no global state."""

from __future__ import annotations

import os
from typing import Any

from horovod_onebit.errors import ConfigurationError


def new(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("matplotlib is not installed: pip install 'horovod-onebit[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write it; the end of the name says in which format."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        text = f"{path} cannot be written ({error}): expected a name that ends in .png, .svg or .pdf"
        raise ConfigurationError(text) from error

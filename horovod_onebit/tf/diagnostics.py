"""Gradients of a Keras model for ``horovod_onebit.diagnostics``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_onebit.tools.diagnostics import Collector, Report

__all__ = ["Collector", "Report", "gradients"]


def gradients(grads: Sequence[Any], variables: Sequence[Any]) -> dict:
    """``"number.path"`` of a variable -> gradient, in its shape and dtype, for ``Collector.add``; variables without a
    gradient are left out. ``grads`` is what ``tape.gradient`` has returned for ``variables``. Eager, local."""
    pairs = [(i, g, v) for i, (g, v) in enumerate(zip(grads, variables, strict=True)) if g is not None]
    return {f"{i}.{getattr(v, 'path', v.name)}": tf.convert_to_tensor(g).numpy() for i, g, v in pairs}

"""Errors of the project: one base, few kinds.

Every message says what was given, what was expected, and what to do about it.
"""

from collections.abc import Sequence


class OnebitError(Exception):
    """Base of every error that this library raises on purpose."""


class ConfigurationError(OnebitError, ValueError):
    """An argument, a recipe or a combination of them is not valid."""


class UnsupportedError(OnebitError, NotImplementedError):
    """The request is understood but not supported; the message names what to use instead."""


class WireError(OnebitError, RuntimeError):
    """A message that arrived is not one that this step can use."""


class DesyncError(OnebitError, RuntimeError):
    """The workers disagree about something they must share."""


class TransportError(OnebitError, RuntimeError):
    """``torch.distributed`` failed in a collective: a worker died, or does not answer within the group's timeout."""


class NonFiniteError(OnebitError, ArithmeticError):
    """A gradient held NaN or Inf on some worker and the recipe says to raise."""


class CheckpointError(OnebitError, RuntimeError):
    """A checkpoint cannot be written or read; what was there before is unchanged."""


class CheckpointArgumentError(CheckpointError, ConfigurationError):
    """The arguments of ``save_checkpoint`` or ``load_checkpoint`` are not valid on some worker; raised on all."""


def error_text(error: BaseException) -> str:
    """The error's kind and text, as other workers are told of it."""
    return f"{type(error).__name__}: {error}"


def some(names: Sequence[str]) -> str:
    """The first five of ``names``, for a text."""
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def workers(ranks: Sequence[int]) -> str:
    """``worker 1``, ``workers 0 and 2``, ``workers 0, 1, 2 and 5 more``."""
    listed = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        listed.append(f"{len(ranks) - 8} more")
    *first, last = listed
    return f"workers {', '.join(first)} and {last}" if first else f"worker {last}"


JOINED = (
    "{} called hvd.join(): 1-bit steps need every worker in every step. Give all workers the same number of "
    "batches (drop the rest, or sample some twice)"
)

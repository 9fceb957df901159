"""How far a run is, as plain numbers by position of the parameter: part of the optimizer's ``state_dict``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.feedback import SERVER_PREFIX
from horovod_onebit.kernels.reference import Array
from horovod_onebit.torch import plain
from horovod_onebit.warmup import Phase

if TYPE_CHECKING:
    from horovod_onebit.torch.compressor import Compressor

STATE_KEY = "horovod_onebit"
"""Where the progress is in a ``state_dict``: an option of the first group, so that Horovod broadcasts it too."""

VERSION = 2
READABLE = (1, 2)  # 1 has second moments as they are, and neither "taken" nor "unstarted"
SAMPLE = 16  # values of each tensor that a digest covers


def save(compressor: Compressor) -> dict[str, Any]:
    """The progress of ``compressor``, the same on all workers."""
    return {
        "version": VERSION,
        "steps": compressor.steps,
        "skipped": compressor.engine.skipped,
        "exchanges": compressor.engine.exchanges,
        "warmup": compressor.warmup.state_dict(),
        "exact_steps": [compressor.exact_steps.get(p, 0) for p in compressor.ordered()],
        "variance_steps": [compressor.variance_steps.get(p, 0) for p in compressor.ordered()],
        "taken": [compressor.taken(p) if p in compressor.variance_steps else 0 for p in compressor.ordered()],
        "unstarted": [i for i, p in enumerate(compressor.ordered()) if p in compressor.unstarted],
    }


def check(own: Any, parameters: int, *, added: bool = False) -> None:
    """Raise ``ConfigurationError`` unless ``own`` is None, or what ``save`` gives with so many parameters.

    ``added``: some of them may have been added since.
    """
    if own is None:
        return
    version = own.get("version") if isinstance(own, Mapping) else None
    if version not in READABLE:
        raise ConfigurationError(f"this optimizer state has format {version!r}, expected {VERSION}")
    wrong = [name for name in ("steps", "skipped", "exchanges") if not _count(own.get(name))]
    for name in ("exact_steps", "variance_steps"):
        counts = own.get(name)
        fits = isinstance(counts, (list, tuple)) and (len(counts) == parameters or (added and len(counts) < parameters))
        if not fits or not all(map(_count, counts)):
            wrong.append(name)
    if not isinstance(own.get("warmup"), Mapping):
        wrong.append("warmup")
    if wrong:
        raise ConfigurationError(
            f"the progress in this optimizer state is damaged, or of other parameters: {', '.join(wrong)}; expected "
            f"counts for {parameters} parameters"
        )


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def load(
    compressor: Compressor, own: Mapping[str, Any] | None, whole: Mapping[str, Any] | None, *, keep_feedback: bool
) -> None:
    """Take over ``own``, which ``save`` gave; None means a state of a plain optimizer, which warms up.

    ``whole`` is the wrapped optimizer's state that was loaded before, None if it is where it belongs.
    """
    check(own, len(compressor.ordered()), added=whole is None)
    compressor.variance_steps.clear()
    compressor.unstarted.clear()
    if not keep_feedback:
        compressor.engine.feedback.reset()
    compressor.steps = own["steps"] if own else 0
    compressor.warmup.load_state_dict(own["warmup"] if own else {})
    compressor.engine.skipped = own["skipped"] if own else 0
    compressor.engine.exchanges = own["exchanges"] if own else 0
    if whole is None:  # Horovod has received into what it got from ``state_dict``
        for p, value in compressor.exported.items():
            compressor.optimizer.state[p][compressor.adapter.variance_key] = value
    for group, _, p in compressor.enumerated():
        if p.requires_grad:
            compressor.init_state(group, p)
    counts = _by_position(compressor, own, "exact_steps")
    compressor.exact_steps.update({p: n for p, n in counts.items() if p in compressor.exact_steps})
    if whole is not None:
        _keep_float32(compressor, whole)
    if own:
        unstarted = set(own.get("unstarted", ()))
        compressor.unstarted |= {p for _, position, p in compressor.enumerated() if position in unstarted}
        _load_moments(compressor, own, counts)


def _by_position(compressor: Compressor, own: Mapping[str, Any] | None, name: str) -> dict[torch.Tensor, int]:
    """A number for each parameter; 0 for those that were added since."""
    numbers = own.get(name, ()) if own else ()
    return dict(zip(compressor.ordered(), chain(numbers, repeat(0)), strict=False))


def _load_moments(compressor: Compressor, own: Mapping[str, Any], counts: Mapping[torch.Tensor, int]) -> None:
    """Second moments as compressed steps, or exact ones, go on with; the state has them as in ``plain``."""
    adapter, key = compressor.adapter, compressor.adapter.variance_key
    taken, seen = (_by_position(compressor, own, name) for name in ("taken", "variance_steps"))
    for group, _, p in compressor.enumerated():
        steps = seen[p]
        if not steps:
            continue
        state = compressor.optimizer.state[p]
        if key is not None and key in state:
            now, by = int(state["step"]), 1.0
            if own["version"] > 1 and now == taken[p]:
                by = adapter.variance_factor(group, now, steps)
            elif own["version"] > 1:  # a plain optimizer has gone on from there
                steps = now
            state[key] = plain.restored(state[key], by)
        if compressor.warmup.phase(counts[p]) is Phase.COMPRESSED and compressor.compressible(p):
            compressor.variance_steps[p] = steps
        else:
            adapter.rewind(group, state, steps)


def _keep_float32(compressor: Compressor, whole: Mapping[str, Any]) -> None:
    """PyTorch casts loaded state to the parameter's dtype; compressed parameters keep theirs in float32."""
    ids = [i for group in whole["param_groups"] for i in group["params"]]
    for position, p in zip(ids, compressor.ordered(), strict=True):
        compressed = compressor.warmup.phase(compressor.exact_steps.get(p, 0)) is Phase.COMPRESSED
        if loaded := whole["state"].get(position):
            compressor.adapter.keep_float32(p, loaded, compressor.optimizer.state[p], compressed=compressed)


def digest(state_dict: Mapping[str, Any], compressor: Compressor) -> str:
    """A few values of each tensor of a state, and its progress: workers that loaded different states must not go on.

    With 0/1 Adam some of the state is each worker's own, and is left out.
    """
    found = hashlib.blake2b(digest_size=8)
    own = state_dict["param_groups"][0].get(STATE_KEY) if state_dict["param_groups"] else None
    found.update(repr(own).encode())
    for position, entries in sorted(state_dict["state"].items()):
        for key, value in sorted(entries.items()):
            if isinstance(value, torch.Tensor) and value.numel() and key not in compressor.adapter.local_keys:
                flat = value.detach().reshape(-1)
                sample = flat[:: max(1, flat.numel() // SAMPLE)].to("cpu", torch.float64)
                found.update(f"{position} {key}".encode() + sample.numpy().tobytes())
    return found.hexdigest()


def observe(compressor: Compressor) -> None:
    """Show the run to the automatic warm-up."""
    groups, squares, seen = compressor.optimizer.param_groups, 0.0, 0
    key = compressor.adapter.variance_key
    for p in compressor.exact() if key else []:
        if compressor.compressible(p):
            squares += float(compressor.optimizer.state[p][key].double().square().sum())
            seen = int(compressor.optimizer.state[p]["step"])
    beta2 = float(groups[0]["betas"][1]) if key else 0.0
    norm = math.sqrt(squares) / (1 - beta2 ** max(seen, 1)) if key else None
    compressor.warmup.observe(compressor.steps, norm, max(float(group["lr"]) for group in groups), beta2)


def load_feedback(compressor: Compressor, state: Mapping[str, Array]) -> None:
    """Take over this worker's residuals, which ``ErrorFeedback.state_dict`` gave."""
    check_feedback_names(compressor, state)
    compressor.engine.feedback.load_state_dict(state)


def check_feedback_names(compressor: Compressor, state: Mapping[str, Array]) -> None:
    """Raise ``ConfigurationError`` if ``state`` has residuals of parameters that the optimizer does not have."""
    unknown = sorted(n for n in set(state) - set(compressor.names.values()) if not n.startswith(SERVER_PREFIX))
    if unknown:
        raise ConfigurationError(f"error feedback of parameters that this optimizer does not have: {unknown}")

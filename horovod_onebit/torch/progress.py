"""How far a run is, as plain numbers by position of the parameter: part of the optimizer's ``state_dict``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.feedback import SERVER_PREFIX
from horovod_onebit.kernels.reference import Array
from horovod_onebit.warmup import Phase

if TYPE_CHECKING:
    from horovod_onebit.torch.compressor import Compressor

VERSION = 1


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
    }


def check(own: Any, parameters: int) -> None:
    """Raise ``ConfigurationError`` unless ``own`` is what ``save`` gives with so many parameters, or None."""
    if own is None:
        return
    version = own.get("version") if isinstance(own, Mapping) else None
    if version != VERSION:
        raise ConfigurationError(f"this optimizer state has format {version!r}, expected {VERSION}")
    wrong = [name for name in ("steps", "skipped", "exchanges") if not _count(own.get(name))]
    for name in ("exact_steps", "variance_steps"):
        counts = own.get(name)
        if not isinstance(counts, (list, tuple)) or len(counts) != parameters or not all(map(_count, counts)):
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
    check(own, len(compressor.ordered()))
    compressor.variance_steps.clear()
    if not keep_feedback:
        compressor.engine.feedback.reset()
    compressor.steps = own["steps"] if own else 0
    compressor.warmup.load_state_dict(own["warmup"] if own else {})
    compressor.engine.skipped = own["skipped"] if own else 0
    compressor.engine.exchanges = own["exchanges"] if own else 0
    for group in compressor.optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad:
                compressor.adapter.init_state(group, p, compressor.optimizer.state[p])
    _load_counts(compressor, own)
    if whole is not None:
        _keep_float32(compressor, whole)


def _load_counts(compressor: Compressor, own: Mapping[str, Any] | None) -> None:
    params = compressor.ordered()
    counts = list(own["exact_steps"]) if own else [0] * len(params)
    seen = list(own["variance_steps"]) if own else [0] * len(params)
    for position, p in enumerate(params):
        if p in compressor.exact_steps:
            compressor.exact_steps[p] = counts[position]
        if not seen[position]:
            continue
        if compressor.warmup.phase(counts[position]) is Phase.COMPRESSED:
            compressor.variance_steps[p] = seen[position]
        else:
            compressor.adapter.rewind(compressor.group_of(p), compressor.optimizer.state[p], seen[position])


def _keep_float32(compressor: Compressor, whole: Mapping[str, Any]) -> None:
    """PyTorch casts loaded state to the parameter's dtype; compressed parameters keep theirs in float32."""
    ids = [i for group in whole["param_groups"] for i in group["params"]]
    for position, p in zip(ids, compressor.ordered(), strict=True):
        compressed = compressor.warmup.phase(compressor.exact_steps.get(p, 0)) is Phase.COMPRESSED
        if loaded := whole["state"].get(position):
            compressor.adapter.keep_float32(p, loaded, compressor.optimizer.state[p], compressed=compressed)


def observe(compressor: Compressor) -> None:
    """Show the run to the automatic warm-up."""
    groups, squares, seen = compressor.optimizer.param_groups, 0.0, 0
    key = compressor.adapter.variance_key
    for p in compressor.exact() if key else []:
        if p.numel() >= compressor.engine.recipe.min_compressed_size:
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

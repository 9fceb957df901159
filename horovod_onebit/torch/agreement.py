"""Once a step, before anything else is waited for: do all workers mean the same?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horovod_onebit.exchange import Handle
from horovod_onebit.handshake import Finite, Verdict

if TYPE_CHECKING:
    from horovod_onebit.torch.compressor import Compressor


class Agreement:
    """Compares what this worker is about to do with what the others are; ``start`` and ``finish`` once a step.

    It rests on one rule: whatever a worker believes, it starts the agreement in every step, under the same name, and
    waits for it before it waits for any collective that depends on what it believes.
    """

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._handle: Handle | None = None
        self._started = False
        self._described: tuple[Any, str] = (None, "")

    def start(self, finite: Finite) -> None:
        """Tell the others; nothing if that was done in this step already. ``finite``: whether the gradients are."""
        if self._started:
            return
        compressor = self._compressor
        options = repr([compressor.adapter.rule(group, 1.0) for group in compressor.optimizer.param_groups])
        edited = compressor.overlap.edited()
        self._handle = compressor.engine.start_agreement(
            setup=self._setup(), options=options, finite=finite, edited=edited
        )
        self._started = True

    def finish(self) -> Verdict:
        """Wait for the answer, if it is not known yet; raise on all workers alike if they disagree."""
        handle, self._handle = self._handle, None
        return Verdict() if handle is None else self._compressor.engine.finish_agreement(handle)

    def reset(self) -> None:
        """The step is over."""
        self._handle, self._started = None, False

    def _setup(self) -> str:
        """What is trained and how far it is, in one text that is the same on all workers."""
        compressor = self._compressor
        known = [(p, compressor.names[p]) for p in compressor.ordered() if p in compressor.names]
        key = (compressor.version, *(p.requires_grad for p, _ in known))
        if key != self._described[0]:
            rows = [
                (name, tuple(p.shape), p.stride(), p.dtype, p.requires_grad, p in compressor.bindings)
                for p, name in known
            ]
            never = [name for p, name in known if p in compressor.never]
            how = f"{compressor.phase} {compressor.warmup} {compressor.schedule} {compressor.sum_gradients}"
            self._described = key, f"{how} {rows} {never}"
        return f"{self._described[1]} {sum(compressor.exact_steps.values())}"

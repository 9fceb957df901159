"""Local steps: the exchange at the end of a round, of what each worker's own optimizer has moved.

Between two exchanges nothing travels and workers' weights differ; after each, all have the same, bit by bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from horovod_onebit import replicas
from horovod_onebit.averages import all_finite, start_mean
from horovod_onebit.engine import Engine
from horovod_onebit.errors import DesyncError, NonFiniteError
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rules import Tensor, finish_step
from horovod_onebit.rules.local import Delta
from horovod_onebit.schedule import Kind, Local
from horovod_onebit.stats import allreduce_bytes

logger = logging.getLogger("horovod_onebit")


class Rounds:
    """The rounds of one worker.

    ``begin`` says which tensors there are; then, after each step that the worker has taken alone, ``stepped``, and
    ``exchange`` where it says that the round ends, or at any time.

    Attributes:
        large, small: the tensors; small ones are averaged exactly. Their ``anchor`` is what all workers had in common
            when the round began.
        length: steps of this round so far.
    """

    def __init__(self, engine: Engine, schedule: Local) -> None:
        self.engine = engine
        self.schedule = schedule
        self.rule = Delta(schedule.momentum)
        engine.sent = "weights after local steps"
        self.large: list[Tensor] = []
        self.small: list[Tensor] = []
        self.length = 0
        self._skipped = False  # a step of this round
        self._details: Sequence[str] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.large, *self.small]

    def begin(self, large: Sequence[Tensor], small: Sequence[Tensor], details: Sequence[str] | None = None) -> None:
        """Begin a round with the weights that these tensors have now. Collective.

        Raises ``DesyncError`` on all workers if they do not have the same. For ``details`` see ``Engine.prepare``.
        """
        self.large, self.small, self.length, self._skipped = [], [], 0, False  # until all is well
        self._details = details
        host, found = self.engine.context.kernels.host, {}
        for tensor in (*large, *small):
            self.engine.context.kernels.copy(tensor.weight, tensor.anchor)
            found[tensor.name] = replicas.checksum(host(tensor.anchor))
        try:
            replicas.check(found, self.engine.collectives, f"{self.engine.name}.begin")
        except DesyncError as error:
            text = "Local steps begin with the same weights on all workers; call flush() before you load or broadcast"
            raise DesyncError(f"{error}. {text} an optimizer's state in the middle of a round") from None
        self.replace(large, small)

    def replace(self, large: Sequence[Tensor], small: Sequence[Tensor]) -> None:
        """The same tensors in another memory. Local; collective when a round begins."""
        self.engine.prepare(large, [self.rule] * len(large), self._details)
        self.large, self.small = list(large), list(small)

    @property
    def under_way(self) -> bool:
        """Whether workers have taken steps that were not exchanged."""
        return bool(self.tensors) and self.length > 0

    def stepped(self, step: int) -> bool:
        """This worker has taken step number ``step`` (from 1) alone; whether the round ends with it."""
        self.length += 1
        if self.schedule.ends_round(step):
            return True
        elements = sum(tensor.weight.size for tensor in self.tensors)
        self.engine.traffic.add(0, allreduce_bytes(4 * elements, self.engine.collectives.size))
        return False

    def skip(self) -> None:
        """This worker has passed over a step, alone: its gradients were not finite. Local."""
        self._skipped = True
        self.engine.skipped += 1
        level = logging.WARNING if self.engine.speaks else logging.DEBUG
        text = "NaN or Inf in the gradients of worker %d: it skips a step (%d so far)"
        logger.log(level, text, self.engine.collectives.rank, self.engine.skipped)

    def exchange(self, agree: Callable[[], object] | None = None) -> bool:
        """End the round: all workers have the same weights afterwards. Collective.

        ``agree``, called when all is sent, may raise on all workers, and then nothing has changed. Returns False if the
        round was lost, because weights of some worker are NaN or Inf: all workers are then back at its beginning, and
        what the others have moved travels with the next one. Raises ``NonFiniteError`` instead if the recipe says so,
        and where a worker has skipped a step, too.
        """
        engine = self.engine
        plan = engine.plan(Kind.ONEBIT, [self.rule] * len(self.large))
        weights = {i: tensor.weight for i, tensor in enumerate(self.large)}
        engine.send_rest(weights, plan)
        try:
            if agree is not None:
                agree()
        except Exception:
            engine.withdraw()
            raise
        skipped, means, self.length = self._who_skipped(), self._means(), 0
        try:
            taken = engine.receive(weights, plan, finite=not skipped and all_finite(means))
        except NonFiniteError as error:
            self.fold()
            where = f"the gradients of worker {skipped}" if skipped else "the weights of some worker"
            raise NonFiniteError(
                f"NaN or Inf in {where} in this round; all workers are back at its beginning. Use on_nonfinite='skip' "
                "to pass over such steps"
            ) from error
        except BaseException:
            self.fold()
            raise
        if not taken:
            self.fold()
            return False
        for tensor, mean in zip(self.small, means, strict=True):
            engine.context.kernels.move(*self.rule.motion(tensor, engine.context), tensor.arrays(mean))
            engine.context.kernels.write(tensor.residual, 0.0)
        finish_step([self.rule] * len(self.small), self.small, engine.context)
        return True

    def _who_skipped(self) -> list[int]:
        """The workers that have skipped a step, where that is an error. Collective then."""
        skipped, self._skipped = self._skipped, False
        if self.engine.recipe.on_nonfinite != "raise":
            return []
        collectives = self.engine.collectives
        own = np.zeros(collectives.size, np.float32)
        own[collectives.rank] = skipped
        return np.flatnonzero(collectives.allreduce(own, f"{self.engine.name}.skipped").wait()).tolist()

    def _means(self) -> list[Array]:
        """The exact means of what small tensors have moved. Collective."""
        engine = self.engine
        return start_mean(self._owing(self.small), engine.collectives, f"{engine.name}.small", engine.traffic)()

    def _owing(self, tensors: Sequence[Tensor]) -> list[Array]:
        """What this worker has moved in this round, and what it owed before, in host memory."""
        host = self.engine.context.kernels.host
        with np.errstate(invalid="ignore", over="ignore"):
            return [host(t.anchor) - host(t.weight) + host(t.residual) for t in tensors]

    def fold(self) -> None:
        """Go back to the beginning of the round. What this worker has moved since, it owes, if it is finite; but not
        where its host compresses as one, whose other workers know nothing of it: there it is lost. Local."""
        host, write = self.engine.context.kernels.host, self.engine.context.kernels.write
        owing = self._owing(self.tensors)
        alone = self.engine.weighing is None or self.engine.weighing.encodes is None
        keeps = alone and all_finite(owing)
        for tensor, residual in zip(self.tensors, owing, strict=True):
            if keeps:
                write(tensor.residual, residual)
            write(tensor.weight, host(tensor.anchor))

"""What both kinds of steps have, those of ``Compressor`` and those of ``LocalSteps``, and the other workers need."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from horovod_onebit import replicas
from horovod_onebit.engine import Engine
from horovod_onebit.recipe import Recipe
from horovod_onebit.run_state import RunState
from horovod_onebit.stats import Stats
from horovod_onebit.tasks import run
from horovod_onebit.torch import averaging
from horovod_onebit.torch.agreement import Agreement
from horovod_onebit.torch.arguments import Arguments
from horovod_onebit.torch.parameters import Parameters
from horovod_onebit.warmup import Phase
from horovod_onebit.world import Residuals

logger = logging.getLogger("horovod_onebit")


class Steps(RunState):
    """Belongs to one ``DistributedOptimizer``; holds all that is not Horovod's or the wrapped optimizer's."""

    parameters: Parameters
    gradients: Any
    agreement: Agreement

    def __init__(self, arguments: Arguments, name: str, recipe: Recipe, check_replicas_every: int | None) -> None:
        self.transport = transport = arguments.transport
        self.included = transport.included  # asked once: Horovod may be shut down, or restarted
        if transport.size == 1:
            logger.warning("DistributedOptimizer runs on one worker: 1-bit compression saves nothing there")
        self.engine = Engine(recipe, transport.collectives(), name=name, lane=transport.lane())
        self._check_replicas_every = check_replicas_every
        self._apart = 0  # steps since the workers last had the same weights
        self._checked_averaging = False
        self.left: Residuals | None = None  # those of a world of other workers

    def _concern(self, parameters: Parameters, gradients: Any) -> None:
        self.parameters, self.gradients, self.coded = parameters, gradients, gradients.coded
        compared = str(self._check_replicas_every)
        self.agreement = Agreement(self.engine, parameters, gradients, self.transport, compared)

    def check_averaging(self) -> None:
        """In the first step, when the model is complete, raise if its gradients are averaged already. Local."""
        if not self._checked_averaging:
            averaging.check(self.parameters.names)
            self._checked_averaging = True

    @property
    def workers(self) -> int:
        """That train together; 0 on a worker that does not."""
        return self.engine.collectives.size if self.included else 0

    @property
    def steps(self) -> int:
        """Those taken, which the driver counts; of local ones, those that this worker has skipped, too."""
        return self.parameters.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._apart += steps - self.parameters.steps
        self.parameters.steps = steps

    @property
    def learning_rate(self) -> float:
        """The largest of the groups'."""
        return self.parameters.learning_rate

    @property
    def pending(self) -> bool:
        """Whether workers' weights differ, after local steps; alike on all."""
        raise NotImplementedError

    @property
    def phase(self) -> Phase:
        self.adopt()
        return self.parameters.phase

    def adopt(self) -> None:
        """Take over progress that Horovod has broadcast."""
        raise NotImplementedError

    def check_replicas(self) -> None:
        """Raise ``DesyncError`` on all workers if their weights and optimizer state are not the same. Collective."""
        run(replicas.check(self.parameters.checksums(), self.engine.collectives, f"{self.engine.name}.replicas"))

    def compare(self) -> None:
        """All workers have the same weights: compare them, if one of the steps since they last had was a multiple of
        ``check_replicas_every``. Collective then."""
        every, apart, self._apart = self._check_replicas_every, self._apart, 0
        if every and self.parameters.steps % every < apart:
            self.check_replicas()

    def stats(self, norms: bool) -> Stats:
        compressible = self.parameters.compressible
        return self.engine.stats(
            phase=self.phase.value,
            step=self.parameters.steps,
            parameters=sum(p.numel() for p in self.parameters.exact_steps),
            compressed=sum(p.numel() for p in self.parameters.bindings if compressible(p)),
            coded=0 if self.coded is None else self.coded.elements,
            norms=norms,
        )

    # -- what is saved of this worker alone -------------------------------------------------------------------------

    what = "parameters"

    def sizes(self) -> dict[str, int]:
        """Of all parameters that may have residuals, those that are gone included."""
        return {name: p.numel() for p, name in self.parameters.names.items()}

    def load_residuals(self, saved: Residuals) -> None:
        super().load_residuals(saved)
        self.left = None  # older than what was saved

    # -- other workers ------------------------------------------------------------------------------------------------

    def leave_world(self) -> None:
        """Horovod was restarted: forget what is under way, remember the residuals. Local."""
        self.left, self._apart = self.engine.leave_world(self.left), 0
        self.agreement.reset()

    def with_residuals(self) -> Iterable[torch.Tensor]:
        """The parameters that have error feedback."""
        return self.parameters.bindings

    def share_out(self) -> None:
        """Share out the residuals, if the workers have changed; all of them or none call this after ``leave_world``.
        Collective then."""
        if self.left is not None:
            run(self.engine.share_out(self.left, {self.parameters.names[p]: p.numel() for p in self.with_residuals()}))
            self.left = None

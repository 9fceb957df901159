"""What is saved of a run besides weights and moments, whatever the framework: counts, and what each worker has of its
own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_onebit.engine import Engine
from horovod_onebit.kernels.reference import Array
from horovod_onebit.tasks import Task
from horovod_onebit.warmup import Warmup
from horovod_onebit.world import ResidualLayout, Residuals


def counts(engine: Engine, warmup: Warmup) -> dict[str, Any]:
    """How far the run is, apart from what a framework's own state tells; for JSON."""
    return {
        "exchanges": engine.exchanges,
        "skipped": engine.skipped,
        "rates": dict(engine.feedback.rates),
        "warmup": warmup.state_dict(),
    }


def take_counts(engine: Engine, warmup: Warmup, saved: Mapping[str, Any]) -> None:
    """Continue from what ``counts`` gave."""
    engine.exchanges, engine.skipped = saved["exchanges"], saved["skipped"]
    engine.feedback.rates = dict(saved["rates"])
    warmup.load_state_dict(saved["warmup"])


class RunState:
    """What each worker has of its own: a part of what a framework's optimizer is made of.

    Attributes:
        kind: of the residuals, as ``horovod_onebit.feedback.kind`` says.
        coded: averages gradients of the warm-up in few bits, a ``CodedMean`` or what wraps it; None if they are
            averaged exactly.
        what: what the residuals belong to, as error messages call it ("parameters", "arrays", "variables").
        left: the residuals of a world of other workers, until they are redistributed.
    """

    engine: Engine
    kind: str
    coded: Any = None
    what = "tensors"
    left: Residuals | None = None

    @property
    def pending(self) -> bool:
        """Whether workers' weights differ now, after steps that each has taken alone; alike on all."""
        return False

    def sizes(self) -> Mapping[str, int]:
        """The number of elements of all that may have residuals, by name."""
        raise NotImplementedError

    def sizes_now(self) -> Mapping[str, int]:
        """The same of all that have residuals now, alike on all workers. Collective."""
        raise NotImplementedError

    def residuals(self) -> Residuals:
        """This worker's residuals, and what was learned of gradients in few bits. The arrays are copies. Local."""
        return {**self.engine.residuals(), "gradients": None if self.coded is None else self.coded.state()}

    def check_residuals(self, saved: Residuals) -> None:
        """Raise ``ConfigurationError`` unless ``load_residuals`` can take over ``saved``. Local."""
        self.engine.feedback.check(saved["feedback"], self.sizes(), self.what)
        if self.coded is not None:
            self.coded.check(saved["gradients"], self.sizes())

    def load_residuals(self, saved: Residuals) -> None:
        """Continue from what ``residuals`` gave, perhaps in a world of another size. Local; on all workers alike."""
        self.engine.discard_servers()
        self.load_feedback(saved["feedback"])
        self.residuals_replaced(ResidualLayout.saved(saved))
        if self.coded is not None:
            self.coded.load(saved["gradients"])
        self.left = None  # older than what was saved

    def leave_world(self) -> None:
        """There are other workers: forget what is under way, remember the residuals. Local."""
        self.left = self.engine.leave_world(self.left)
        if self.coded is not None:
            self.coded.forget_world()

    def redistribute(self) -> Task[None]:
        """Give all workers the mean of the residuals that were left, if the workers have changed: all of them or none
        call this after ``leave_world``. Collective then."""
        if self.left is not None:
            yield from self.engine.redistribute(self.left, self.sizes_now())
            self.left = None

    def load_feedback(self, feedback: Mapping[str, Array]) -> None:
        """Take over this worker's residuals, which ``ErrorFeedback.state_dict`` gave. Raises as its ``check``."""
        self.engine.feedback.load_state_dict(feedback, self.sizes(), self.what)

    def residuals_replaced(self, residual_layout: ResidualLayout | None) -> None:
        """The residuals were replaced: see ``Engine.residuals_replaced``."""
        self.engine.residuals_replaced(residual_layout)

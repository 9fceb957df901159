"""The steps of the PyTorch face, and all else that needs the other workers: what both kinds of steps have, those of
``Compressor`` and those of ``local.LocalSteps``, and the first kind."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from horovod_onebit import feedback, replicas
from horovod_onebit.ahead import compile_steps
from horovod_onebit.averages import mean_norms
from horovod_onebit.coded import codes, own_recipe
from horovod_onebit.driver import Driver
from horovod_onebit.engine import Engine, Plan
from horovod_onebit.errors import ConfigurationError, NonFiniteError, some
from horovod_onebit.handshake import Finite, Verdict
from horovod_onebit.kernels.reference import Array
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules.gradient import Gradient
from horovod_onebit.rules.local import COUNT
from horovod_onebit.run_state import RunState
from horovod_onebit.schedule import Sends
from horovod_onebit.stats import Stats
from horovod_onebit.tasks import Task, run
from horovod_onebit.torch import averaging
from horovod_onebit.torch.agreement import Agreement
from horovod_onebit.torch.arguments import Arguments
from horovod_onebit.torch.arrays import gradient_of
from horovod_onebit.torch.hooks import GradientHooks, Scaling, Where, gradients_finite, unscale
from horovod_onebit.torch.norms import sum_of_squares
from horovod_onebit.torch.parameters import Parameters
from horovod_onebit.torch.rules import AnyAdapter
from horovod_onebit.warmup import Phase

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
        self.loaded_at: int | None = None  # step count at which another state than the current one was last loaded
        self._gave_residuals: int | None = None  # step count at which residuals were last loaded
        self._plain: Callable[[], Any] = lambda: None  # the optimizer that was wrapped, while somebody has it
        self._plains_groups = 0  # the id of its groups
        self.scaler_values: dict[str, Any] = {}  # for the time of a step; see ``optimizer``

    def _concern(self, parameters: Parameters, gradients: Any) -> None:
        self.parameters, self.gradients, self.coded = parameters, gradients, gradients.coded
        averaging.know(parameters)
        self.agreement = Agreement(self.engine, parameters, gradients, self.transport, self._check_replicas_every)

    def wraps(self, plain: torch.optim.Optimizer) -> None:
        """``plain`` is what was wrapped: its groups and state are shared."""
        self._plain, self._plains_groups = weakref.ref(plain), id(vars(plain).get("param_groups"))

    @property
    def has_parted(self) -> bool:
        """Whether the plain optimizer has other groups now than it had, and than the wrapped one has."""
        plain = self._plain()
        known = self._plains_groups, id(self.parameters.optimizer.param_groups)
        return plain is not None and id(vars(plain).get("param_groups")) not in known

    def share(self) -> None:
        """A state was loaded: the plain optimizer has it, too, whatever it had."""
        if self.has_parted:
            plain, optimizer = self._plain(), self.parameters.optimizer
            plain.param_groups, plain.state = optimizer.param_groups, optimizer.state

    def check_averaging(self) -> None:
        """In the first step, when the model is complete, raise if its gradients are averaged already. Local."""
        if not self._checked_averaging:
            averaging.check(self.parameters.names)
            self._checked_averaging = True
            if names := averaging.not_averaged():
                text = "%s of the model in DistributedDataParallel, in no DistributedOptimizer: gradients not averaged"
                self.engine.say(logging.WARNING, text, some(names))

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
        """See ``Parameters.learning_rate``."""
        return self.parameters.learning_rate

    @property
    def phase(self) -> Phase:
        self.adopt()
        return self.parameters.phase

    def adopt(self) -> None:
        """Take over progress that Horovod has broadcast."""
        raise NotImplementedError

    def check_groups(self) -> Task[None]:
        """Take notice of parameters that are new, newly trained, or gone, and of other workers. Collective as
        ``end_apart`` is."""
        if self.has_parted:
            raise ConfigurationError(
                "the plain optimizer that was wrapped has loaded a state, or got other groups, by itself, and this one "
                "does not have them: load into what DistributedOptimizer returned, or wrap the plain one again"
            )
        if self.engine.workers_changed:
            self.fold()
            self.leave_world()
        if (fresh := self.parameters.find_new()) and self.included:
            self.gradients.add(fresh)
            self._checked_averaging = False  # DistributedDataParallel is made anew then
        self.adopt()
        yield from self.end_apart()
        self.forget_gone()

    def forget_gone(self) -> None:
        """Let go of parameters that are in no group any more. Local."""
        if gone := self.parameters.forget_gone():
            self.gradients.forget(gone)
            self.parameters.let_go(gone)

    def end_apart(self) -> Task[None]:
        """Bring all workers to the same weights, if steps were local and parameters are leaving that must not stay
        each worker's own. Collective then."""
        raise NotImplementedError

    def check_replicas(self) -> Task[None]:
        """Raise ``DesyncError`` on all workers if their weights and optimizer state are not the same. Collective."""
        return replicas.check(self.parameters.checksums(), self.engine.collectives, f"{self.engine.name}.replicas")

    def compare(self) -> Task[None]:
        """All workers have the same weights: compare them, if one of the steps since they last had was a multiple of
        ``check_replicas_every``. Collective then."""
        apart, self._apart = self._apart, 0
        if replicas.due(self._check_replicas_every, self.parameters.steps, apart):
            yield from self.check_replicas()

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
        return {name: p.numel() for p, name in self.parameters.all_names()}

    def load_feedback(self, feedback: Mapping[str, Array]) -> None:
        super().load_feedback(feedback)
        self._gave_residuals = self.parameters.steps

    @property
    def just_loaded(self) -> bool:
        """Whether a state was loaded since the last step."""
        return self.loaded_at == self.parameters.steps

    def residuals_fit(self, *, loaded: bool) -> bool:
        """Whether this worker may keep its residuals with the state that another worker sends; ``loaded``: that worker
        has loaded the state since its last step. Local."""
        return not loaded or self.just_loaded or self._gave_residuals == self.parameters.steps

    # -- other workers ------------------------------------------------------------------------------------------------

    def fold(self) -> None:
        """Before the workers change: what local steps have moved since the last exchange becomes residuals. Local."""

    def leave_world(self) -> None:
        super().leave_world()
        self._apart = 0
        self.agreement.reset()

    def with_residuals(self) -> Iterable[torch.Tensor]:
        """The parameters that have error feedback."""
        return self.parameters.bindings

    def sizes_now(self) -> Mapping[str, int]:
        sizes = {self.parameters.names[p]: p.numel() for p in self.with_residuals()}
        # A new worker's layers are frozen, or not, as they were when the job began.
        root = min(self.transport.ranks, default=0)
        found: Mapping[str, int] = self.transport.broadcast_object(sizes, root, f"{self.engine.name}.residuals")
        return found


NO_SCALING = Scaling()


@dataclass
class _Now:
    """What the step of now is given, and what it finds.

    Attributes:
        exact_step: the wrapped optimizer's own.
        scaling: by a GradScaler.
        settled: whether gradients were synchronized before.
        finite: whether this worker's gradients are, as far as it is known.
        question: what the agreement compares; ``asked``: whether it was started.
        compresses: whether gradients are sent in one bit.
        exact: the parameters that are averaged.
    """

    exact_step: Callable[[], None] | None = None
    scaling: Scaling = NO_SCALING
    settled: bool = False
    finite: bool = True
    question: tuple[Any, ...] = ()
    asked: bool = False
    compresses: bool = False
    exact: list[torch.Tensor] = field(default_factory=list)


class Compressor(Steps):
    """Steps whose gradients are averaged or compressed.

    ``options`` are those of ``Parameters``. Parameters are found by the first ``check_groups``.
    """

    gradients: GradientHooks

    def __init__(
        self,
        optimizer: Any,
        arguments: Arguments,
        *,
        name: str,
        recipe: Recipe,
        overlap: bool,
        check_replicas_every: int | None,
        **options: Any,
    ) -> None:
        super().__init__(arguments, name, recipe, check_replicas_every)
        parameters = Parameters(optimizer, engine=self.engine, sum_gradients=arguments.sums, **options)
        self._concern(parameters, GradientHooks(parameters, self.engine, arguments, overlap=overlap))
        self._stepwise = self.parameters.schedule is not None
        self.driver = Driver(self.engine, self, parameters.warmup, parameters.schedule)
        self._now = _Now()
        self._compares = True  # weights and state, in the next step
        self._compares_again = not parameters.adapter.reproducible  # after a step was taken
        divides = parameters.adapter.divides
        self.kind = feedback.kind(recipe.space, divides=divides, schedule=self.parameters.schedule)
        if self.workers > 1 and not self._stepwise:
            self._compile_ahead(optimizer.param_groups, divides=divides)

    def _compile_ahead(self, groups: Sequence[dict[str, Any]], *, divides: bool) -> None:
        """What steps will run in the host's memory, or the first compressed one would wait for it."""
        recipe, adapter = self.engine.recipe, self.parameters.adapter
        if codes(recipe, self.parameters.warmup):
            compile_steps(own_recipe(recipe), [Gradient(adapter.divides)], self.workers, divides=True)
        if not isinstance(adapter, AnyAdapter):
            place = self.parameters.placement.of
            here = [group for group in groups if any(place(p) is None for p in group["params"])]
            compile_steps(recipe, [adapter.rule(group, 1.0) for group in here], self.workers, divides=divides)

    @property
    def pending(self) -> bool:
        layers = [binding.tensor.layer for binding in self.parameters.bindings.values()] if self._stepwise else []
        return any(layer is not None and layer[COUNT] for layer in layers)

    def adopt(self) -> None:
        """Take over progress that Horovod has broadcast."""
        if self.parameters.adopt():
            self.gradients.cancel(by_all=False, restore=False)  # momenta are others already

    def end_apart(self) -> Task[None]:
        """Of 0/1 Adam: parameters that were frozen, taken out of the groups, or whose state was edited, between two
        exchanges must not stay each worker's own. Collective if there are some."""
        if self._stepwise and (self.parameters.leaving or self.parameters.edited()):
            with torch.no_grad():
                yield from self.flush()

    # -- before a step --------------------------------------------------------------------------------------------

    def synchronize(self, call: str = "synchronize", **options: object) -> None:
        """Average all gradients in warm-up; afterwards they stay local until ``step``.

        For ``call``, which has ``options`` that must be the same on all workers. Gradients that were synchronized
        before stay as they are: the workers only make sure that all of them make the call.
        """
        gradients, settled = self.gradients, self.gradients.where.settled
        with self.agreement.told(call):
            verdict = run(self._agree_to_synchronize(call, options, settled))
        if not settled:
            if verdict.early:
                self._recall()
            if not verdict.finite:
                self._spoil()
            if self.parameters.phase is Phase.COMPRESSED:
                gradients.drop()
            else:
                run(gradients.average(again=bool(verdict.edited)))
            gradients.forget_marks()
            self.parameters.forget_frozen()
        if not gradients.where.settled:
            gradients.where = Where.AGREED

    def _agree_to_synchronize(self, call: str, options: Mapping[str, object], settled: bool) -> Task[Verdict]:
        parameters = self.parameters
        yield from self.check_groups()
        parameters.check_trained()
        self.gradients.send_late("synchronize() or clip_grad_norm_() is used, or a GradScaler")
        parameters.refresh()
        compressed = parameters.phase is Phase.COMPRESSED
        looks = compressed and self.engine.recipe.on_nonfinite != "raise"
        finite = not looks or gradients_finite(list(parameters.exact_steps))
        values = self.gradients.fingerprint() if settled and not compressed else str(settled)
        self.gradients.leave()
        self.agreement.start(call, Finite.UNKNOWN if finite else Finite.NO, {"hyperparameters": options}, values)
        return (yield from self.agreement.answer())

    def _recall(self) -> None:
        """Take back what workers have sent: the gradients may change before ``step``. Collective."""
        with torch.no_grad():
            plan = run(self.prepare(Sends.CONTRIBUTION))
            run(self.engine.recall(self.own_gradients(), plan))

    def _spoil(self) -> None:
        """Another worker has NaN or Inf: this one's ``GradScaler`` must see it too, or their scales part."""
        p = next(iter(self.parameters.bindings))
        gradient_of(p)[(0,) * p.dim()] = math.inf

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients, which were synchronized, alike on all workers; returns their norm before."""
        grads = [p.grad for p in self.parameters.exact_steps if p.grad is not None]
        totals: dict[torch.device, Any] = {}
        for g in grads:
            totals[g.device] = totals.get(g.device, 0) + sum_of_squares(g)
        squares = float(sum(map(float, totals.values())))
        norm = math.sqrt(squares)
        if self.parameters.phase is Phase.COMPRESSED:
            collectives = self.engine.collectives
            norm = float(run(mean_norms(np.array([squares]), collectives, f"{self.engine.name}.norm"))[0])
            norm *= collectives.size if self.parameters.sum_gradients else 1
        if not norm <= max_norm:
            for g in grads:
                g.mul_(max_norm / (norm + 1e-6))
        return norm

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self, exact_step: Callable[[], None], scaling: Scaling) -> bool:
        """Take one step; whether it was taken, or skipped by all workers alike."""
        settled = self.gradients.where.settled  # before progress that was broadcast since is adopted
        self._now = _Now(exact_step, scaling, settled)
        try:
            return run(self.driver.step())
        except NonFiniteError:
            self.gradients.drop()  # the step is over for these gradients, on all workers
            raise
        finally:
            self._now = _Now()
            self.agreement.reset()
            self.gradients.forget_marks()

    # -- what the driver asks of a face: see ``driver.Together`` ------------------------------------------------------

    def announce(self) -> Task[None]:
        now = self._now
        yield from self.check_groups()
        self.parameters.check_trained()
        self.gradients.check_owned(self.parameters.names)
        self.check_averaging()
        self.parameters.refresh()
        # Of gradients before a step that cannot be taken back.
        checked = not self._stepwise or gradients_finite(list(self.parameters.exact_steps))
        now.finite = checked and not now.scaling.overflowed
        if now.scaling.used:
            self.gradients.send_late("a GradScaler is used")
        warm = self.parameters.phase is Phase.WARMUP
        # In warm-up the average has been taken of scaled gradients: the scales must be the same.
        options: dict[str, object] = {"whether a GradScaler is used": now.scaling.used}
        if warm:
            options["the GradScaler's scale"] = now.scaling.scale
        elif self._stepwise:
            options["what this step sends, by the schedule,"] = self.driver.sends
        values = ""
        if warm and now.settled:
            values = self.gradients.fingerprint()
        elif warm and not self.gradients.automatic:
            values = "not averaged"
        now.question = {"hyperparameters": options}, values, self._compared()
        # When all is encoded, it is known whether all gradients are finite.
        now.asked = not self.parameters.prepared or warm or self._stepwise
        if now.asked:
            self.gradients.leave()
            sent = self.gradients.sent_finite if warm else Finite.UNKNOWN
            self.agreement.start("step", sent if now.finite else Finite.NO, *now.question)

    def agreed(self) -> Task[Verdict]:
        now = self._now
        if not now.asked:
            self.agreement.start("step", self.engine.sent_finite if now.finite else Finite.NO, *now.question)
        verdict = yield from self.agreement.answer()
        self._compares = self.parameters.just_started = False  # or what was refused is compared again
        # After synchronize() the answer is known, and a worker that was finite has taken over the others' Inf.
        return verdict if now.finite else replace(verdict, finite=False)

    def average(self, verdict: Verdict) -> Task[bool]:
        if self.gradients.automatic and not self._now.settled:
            yield from self.gradients.average(again=bool(verdict.edited), certain=verdict.certain)
        exact = self._exact()
        if self._now.scaling.scale is not None:
            unscale(exact, self._now.scaling.scale)
        return verdict.finite and gradients_finite(exact)  # of averages, so that all workers see the same

    def _exact(self) -> list[torch.Tensor]:
        """What is averaged in this step."""
        exact = self._now.exact = self.parameters.exact()
        self.parameters.forget_frozen()
        return exact

    def skip(self) -> None:
        if self._now.scaling.used:
            self.engine.skipped += 1
        else:
            self.engine.say_skipped("the mean gradient")

    def prepare(self, sends: Sends) -> Task[Plan]:
        parameters = self.parameters
        plan = parameters.plan(sends, self._now.scaling.scale or 1.0)
        if not parameters.prepared:
            yield from self.agreement.answer()  # before a handshake of those only who believe that it is due
            bindings = parameters.bindings.values()
            details = [b.detail() for b in bindings]
            yield from self.engine.prepare([b.tensor for b in bindings], plan.rules, details)
            parameters.prepared_for = parameters.version
            yield from self.redistribute()
        return plan

    def start_exact(self) -> Task[bool]:
        self._now.compresses = True
        means, now = self.gradients.means, self._now
        # Unscaled before: scales may differ. The gradients themselves are not, in case the workers refuse the step.
        return means.fused(self._exact(), now.scaling.scale, whole=now.scaling.used)

    def own_gradients(self) -> Mapping[int, Array]:
        return self.parameters.gradients()

    def moved(self, sends: Sends) -> None:
        self.gradients.drop()
        self.parameters.moved(sends)

    def exact_step(self) -> None:
        assert self._now.exact_step is not None
        self.parameters.exact_step_alone(self._now.exact_step, self._now.exact)

    def awakened(self, seconds: Mapping[int, Array]) -> None:
        # A whole parameter has its warm-up now, unless weights differ, as they may with 0/1 Adam.
        late = () if self.pending else self.engine.first_gradients
        self.engine.take_second_moments({number: one for number, one in seconds.items() if number not in late})
        bound = list(self.parameters.bindings)
        self.parameters.warm_up([bound[number] for number in late])

    def power(self) -> tuple[float, float] | None:
        return self.parameters.power()

    def start_compression(self) -> None:
        self.parameters.start_compression()
        if self.parameters.just_started:
            self.gradients.end_averages(self.parameters.bindings)

    def over(self, *, taken: bool) -> Task[None]:
        if self._now.compresses and not taken:
            self.gradients.drop()
        if taken and self._compares_again:
            self._compares, self._compares_again = True, False
        self.parameters.remember()
        if not self.pending:
            yield from self.compare()

    def _compared(self) -> dict[str, int]:
        """Checksums of what all workers must have alike, in the first step and in the one that starts compression; in
        the second step, too, where equal gradients and states may make steps that differ."""
        parameters = self.parameters
        due = self._compares or parameters.just_started
        due &= not (self._stepwise and self.engine.exchanges > 0)  # weights may differ then
        return parameters.checksums() if due and self._check_replicas_every is not False and self.workers > 1 else {}

    # -- other calls ----------------------------------------------------------------------------------------------

    def flush(self) -> Task[None]:
        """After local steps, bring all workers to the same weights. Collective."""
        parameters = self.parameters
        if self.included and self._stepwise and parameters.bindings:
            yield from self.agreement.meet("flush")
            self.adopt()
            edited = parameters.edited()
            parameters.follow_memory(edited)
            parameters.pull()
            pending = self.pending
            yield from self.driver.flush()
            if pending:
                parameters.push()
            parameters.begin_again(edited)
            parameters.remember()

    def cancel(self) -> None:
        """All workers together drop what is under way: they will have another state. Local."""
        self.gradients.cancel(by_all=True)

    def load(self, own: Any, whole: Mapping[str, Any], *, keep_feedback: bool) -> None:
        """Take over the progress ``own`` of a state, ``whole``, which the wrapped optimizer has loaded."""
        self.gradients.cancel(by_all=False)
        self.parameters.load(own, whole, keep_feedback=keep_feedback)

    def own_state(self) -> Any:
        """What the wrapped optimizer keeps and no other worker has: nothing."""
        return None

    # -- other workers --------------------------------------------------------------------------------------------

    def leave_world(self) -> None:
        super().leave_world()
        self._compares = True
        self._compares_again = not self.parameters.adapter.reproducible
        self.gradients.forget_world()

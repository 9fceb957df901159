"""One step of the PyTorch face: which parameters are exact, which compressed, and how both are done.

A parameter is *exact* while it is small or has had fewer than ``warmup_steps`` exact steps; the wrapped optimizer
takes its steps with the averaged gradient. All others are *compressed*: the engine takes their steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from horovod_onebit.checks import flag, matching
from horovod_onebit.engine import Engine
from horovod_onebit.errors import ConfigurationError, NonFiniteError
from horovod_onebit.handshake import Finite, Verdict
from horovod_onebit.kernels.reference import Array
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Rule, zero_one_adam
from horovod_onebit.schedule import Kind, ZeroOne, kind_of
from horovod_onebit.stats import Stats
from horovod_onebit.torch import plain, progress, world
from horovod_onebit.torch.agreement import Agreement
from horovod_onebit.torch.binding import Binding, Placement
from horovod_onebit.torch.collectives import HorovodCollectives, next_name
from horovod_onebit.torch.overlap import Overlap
from horovod_onebit.torch.replicas import check_replicas
from horovod_onebit.torch.rules import Adapter, check_parameter
from horovod_onebit.torch.synchronizer import Synchronizer, all_finite, unscale
from horovod_onebit.warmup import Phase, Warmup
from horovod_onebit.world import workers_changed


class Compressor:
    """Belongs to one ``DistributedOptimizer``; holds all that is not Horovod's or the wrapped optimizer's."""

    synchronizer: Synchronizer

    def __init__(
        self,
        optimizer: Any,
        adapter: Adapter,
        names: dict[torch.Tensor, str],
        *,
        recipe: Recipe,
        warmup: Warmup,
        schedule: ZeroOne | None,
        process_set: Any,
        sum_gradients: bool,
        overlap: bool,
        placement: Placement,
        exact: Sequence[str] = (),
    ) -> None:
        self.optimizer = optimizer
        self.adapter = adapter
        self.names = names
        self.warmup = warmup
        self.schedule = schedule
        self.placement = placement
        self._finite = True
        self._late = False  # tell the others when all is encoded
        self._said = ("", "")  # what the agreement of this step compares: options, gradients
        self.process_set = process_set
        self.engine = Engine(recipe, HorovodCollectives(process_set), name=next_name(process_set))
        self.sum_gradients = sum_gradients
        self.steps = 0
        self.exact_steps: dict[torch.Tensor, int] = {}
        self.variance_steps: dict[torch.Tensor, int] = {}
        self.bindings: dict[torch.Tensor, Binding] = {}
        self.patterns = exact  # of the names of parameters that are never compressed
        self.never: set[torch.Tensor] = set()  # these parameters, and those whose group says so
        self.unstarted: set[torch.Tensor] = set()  # have a momentum that the wrapped optimizer would not have yet
        self.exported: dict[torch.Tensor, torch.Tensor] = {}  # see ``plain.export``
        self.prepared = False
        self.version = 0  # how often what is trained, or how, has changed
        self.lineage = ""  # of the state that was loaded, or taken over when the optimizer was wrapped
        self.agreement = Agreement(self)
        self.overlap = Overlap(self, overlap)
        self.check_replicas_every: int | None = None
        self.left: dict[str, Any] | None = None  # what was owed in a world of other workers

    # -- which parameters -----------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        self.adopt()
        return Phase.COMPRESSED if self.bindings else Phase.WARMUP

    def adopt(self) -> None:
        """Take over the progress that is in the first group: ``hvd.broadcast_optimizer_state`` puts it there, and a
        plain optimizer that has loaded a state of ours and is wrapped now has it there."""
        own = self.optimizer.param_groups[0].pop(progress.STATE_KEY, None) if self.optimizer.param_groups else None
        if own is not None:
            self.load_state_dict(own, None, keep_feedback=True)
            self.lineage = progress.digest(self.optimizer.state_dict(), self)
        self.exported = {}

    def check_groups(self) -> None:
        """Take notice of parameters that are new, newly trained, or gone; new ones warm up first."""
        if workers_changed(self.engine):
            world.leave(self)
        fresh: list[torch.Tensor] = []
        for index, group in enumerate(self.optimizer.param_groups):
            names: set[str] | None = None
            for position, p in enumerate(group["params"]):
                if not p.requires_grad or p in self.exact_steps:
                    continue
                if p not in self.names:
                    names = {self.names[p] for p in self.exact_steps} if names is None else names
                    self.names[p] = self._new_name(group, index, position, names)
                    names.add(self.names[p])
                self.adapter.check(group)
                check_parameter(self.names[p], p)
                self.init_state(group, p)
                self.exact_steps[p] = 0
                fresh.append(p)
        if fresh:
            self.find_exact()
            if self.optimizer._participates:
                self.synchronizer.add(fresh)
        self.adopt()
        if gone := self.exact_steps.keys() - set(self.ordered()):
            self._forget(gone)

    def _forget(self, gone: set[torch.Tensor]) -> None:
        """Parameters were taken out of the groups."""
        self.synchronizer.forget(gone)
        for p in gone:
            self.bindings.pop(p, None)
            self.variance_steps.pop(p, None)
            self.unstarted.discard(p)
            del self.exact_steps[p]
            self.engine.feedback.discard(self.names[p])
        self.changed()

    def changed(self) -> None:
        self.prepared = False
        self.version += 1

    def init_state(self, group: dict[str, Any], p: torch.Tensor) -> None:
        """Give ``p`` the state that its first step would make, so that all workers have the same."""
        if self.adapter.init_state(group, p, self.optimizer.state[p]):
            self.unstarted.add(p)

    def find_exact(self) -> None:
        """Which parameters are never compressed: those named so, and groups with the option ``exact``."""
        groups = self.optimizer.param_groups
        never = {p for g in groups if flag("exact", g.get("exact", False)) for p in g["params"]}
        if self.patterns:
            known = {p: self.names[p] for p in self.ordered() if p in self.names}
            found = matching("exact", self.patterns, known.values(), all_match=False)
            never |= {p for p, name in known.items() if name in found}
        if never != self.never:
            self.never = never
            self.changed()

    def _new_name(self, group: Mapping[str, Any], index: int, position: int, taken: set[str]) -> str:
        names = group.get("param_names")
        name = names[position] if names else f"allreduce.noname.{index}.{position}"
        if name in taken:
            raise ConfigurationError(f"add_param_group: the name {name!r} is taken by another parameter")
        return name

    def _mature(self) -> None:
        """Compress, from the next step on, every parameter whose warm-up is over."""
        version = self.version
        for group, _, p in self.enumerated():
            if p not in self.exact_steps or p in self.bindings or not p.requires_grad or not self.compressible(p):
                continue
            count = self.exact_steps[p]
            if self.warmup.phase(count) is Phase.COMPRESSED:
                seen = self.optimizer.state[p].get("step", count)
                fresh = p not in self.variance_steps
                self.variance_steps.setdefault(p, int(seen))
                self._bind(p)
                if fresh:
                    self.adapter.rule(group, 1.0).begin(self.bindings[p].tensor, self.engine.context)
                    self.bindings[p].coarsen(self.adapter.variance_key)
        if version != self.version:
            self._order()

    def compressible(self, p: torch.Tensor) -> bool:
        """Whether ``p`` is compressed once its warm-up is over."""
        return p.numel() >= self.engine.recipe.min_compressed_size and p not in self.never

    def _bind(self, p: torch.Tensor) -> None:
        """``_order`` is to be called afterwards, once for all."""
        place = self.placement.of(p)
        if place is not None:
            self.engine.use_kernels("cuda")
        binding = Binding(self.names[p], p, self.optimizer.state[p], self.adapter, self.engine.feedback, place)
        binding.tensor.variance_steps = self.variance_steps[p]
        binding.tensor.step = int(self.optimizer.state[p].get("step", self.exact_steps[p]))
        self.bindings[p] = binding
        self.changed()

    def _order(self) -> None:
        """In the order of the groups, however they came: the layout must not depend on history."""
        self.bindings = {p: self.bindings[p] for p in self.ordered() if p in self.bindings}

    def _unbind(self, group: dict[str, Any], p: torch.Tensor, binding: Binding) -> None:
        """``p`` was frozen; should it be trained again, it has a whole new warm-up."""
        binding.release()
        self.adapter.rewind(group, binding.state, self.variance_steps[p])
        p.grad = None
        self.engine.feedback.reset([self.names[p]])
        del self.bindings[p], self.variance_steps[p]
        self.exact_steps[p] = 0
        self.changed()

    def refresh_bindings(self) -> None:
        """Follow parameters that were frozen, or whose memory was replaced (``p.data = ...``, a loaded state)."""
        version = self.version
        for group, _, p in self.enumerated():
            binding = self.bindings.get(p)
            if binding is None:
                continue
            if not p.requires_grad:
                self._unbind(group, p, binding)
            elif binding.state is not self.optimizer.state.get(p) or not binding.is_current():
                self._bind(p)
        if version != self.version:
            self._order()

    # -- one step -------------------------------------------------------------------------------------------------

    def synchronize(self, call: str = "synchronize", options: str = "", *, settled: bool) -> None:
        """Average all gradients in warm-up; afterwards they stay local until ``step``.

        For ``call``, which has ``options`` that must be the same on all workers. ``settled``: these gradients were
        synchronized before, so that the workers only make sure that all of them make the call.
        """
        with self.agreement.told(call):
            verdict = self._agree_to_synchronize(call, options, settled)
        if settled:
            return
        if verdict.early:
            self._recall()
        self.overlap.reset()
        if not verdict.finite:
            self._spoil()
        if self.phase is Phase.COMPRESSED:
            self.synchronizer.reset()
        else:
            self.synchronizer.wait(again=bool(verdict.edited))

    def _agree_to_synchronize(self, call: str, options: str, settled: bool) -> Verdict:
        self.check_groups()
        self.overlap.disable("synchronize() or clip_grad_norm_() is used, or a GradScaler")
        compressed = self.phase is Phase.COMPRESSED
        finite = not compressed or self.engine.recipe.on_nonfinite == "raise" or all_finite(list(self.exact_steps))
        self.refresh_bindings()
        gradients = self.overlap.fingerprint() if settled and not compressed else str(settled)
        self.agreement.start(call, Finite.UNKNOWN if finite else Finite.NO, options, gradients)
        return self.agreement.finish()

    def _recall(self) -> None:
        """Take back what workers have sent: the gradients may change before ``step``. Collective."""
        with torch.no_grad():
            rules = self.rules(1.0, Kind.ONEBIT)
            self._prepare(rules)
            self.engine.recall(self._gradients(), rules)

    def _gradients(self) -> dict[int, Array]:
        """The compressed parameters' gradients; their weights are put where the engine works on them."""
        for binding in self.bindings.values():
            binding.pull()
        return {i: binding.grad() for i, binding in enumerate(self.bindings.values())}

    def _prepare(self, rules: list[Rule]) -> None:
        if not self.prepared:
            self.agreement.finish()  # before a handshake that only those take part in who believe that it is due
            # With NCCL, a message that one worker has on a GPU and another has not cannot be gathered.
            places = self.engine.collectives.gathers_on_device
            details = [
                f"{tuple(b.p.shape)} {b.strides} {b.p.dtype} {b.device.type if places else ''}"
                for b in self.bindings.values()
            ]
            self.engine.prepare([b.tensor for b in self.bindings.values()], rules, details)
            self.prepared = True
            world.settle(self)

    def _spoil(self) -> None:
        """Another worker has NaN or Inf: this one's ``GradScaler`` must see it too, or their scales part."""
        p = next(iter(self.bindings))
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad[(0,) * p.dim()] = math.inf

    def exact(self) -> list[torch.Tensor]:
        return [p for p in self.exact_steps if p not in self.bindings and p.requires_grad]

    def step(
        self,
        exact_step: Callable[[], None],
        *,
        synchronize: bool,
        averaged: bool = False,
        loss_scale: float | None = None,
        scaled: bool = False,
    ) -> bool:
        """Take one step; whether it was taken, or skipped by all workers alike.

        ``synchronize`` False: in warm-up, do not average the gradients; ``averaged``: since they are already.
        ``loss_scale``: what gradients still have to be divided by. ``scaled``: by a GradScaler, which lives with Inf.
        """
        try:
            self.check_groups()
            self.synchronizer.check_owned()
            self.refresh_bindings()
            self._finite = not self._is_zero_one() or all_finite(list(self.exact_steps))
            if scaled:
                self.overlap.disable("a GradScaler is used")
            warm = self.phase is Phase.WARMUP
            # In warm-up the average has been taken of scaled gradients: the scales must be the same.
            self._said = (f"{loss_scale if warm else ''} {scaled}", "")
            if warm and not synchronize:
                self._said = (self._said[0], self.overlap.fingerprint() if averaged else "not averaged")
            self._late = self._agrees_late()
            if not self._late:
                self.agreement.start("step", Finite.UNKNOWN if self._finite else Finite.NO, *self._said)
            if warm:
                taken = self._warmup_step(exact_step, synchronize, loss_scale, scaled)
            else:
                taken = self._compressed_step(exact_step, loss_scale)
            if taken:
                self.steps += 1
                if self.warmup.wants(self.steps) and self.phase is Phase.WARMUP:
                    progress.observe(self)
                self._mature()
                if self.check_replicas_every and self.steps % self.check_replicas_every == 0:
                    check_replicas(self)
            return taken
        except NonFiniteError:
            self.synchronizer.reset()  # the step is over for these gradients, on all workers
            raise
        finally:
            self.agreement.reset()
            self._finite = True
            self.overlap.reset()
            self.engine.end_step()

    def abandon_step(self) -> None:
        """All workers refuse the step that was begun: what is under way is dropped, gradients stay as they are."""
        with torch.no_grad():
            self.engine.abandon_step()
        self.overlap.settle()
        self.synchronizer.abandon(on_all=True)
        self.overlap.reset()

    def flush(self) -> None:
        """After local steps, bring all workers to the same weights."""
        bindings = list(self.bindings.values())
        if self.prepared and self._is_zero_one():
            self.agreement.meet("flush")
            for binding in bindings:
                binding.pull()
            self.engine.flush(self.rules(1.0, Kind.SYNC))
            for binding in bindings:
                binding.push()

    def _is_zero_one(self) -> bool:
        return self.schedule is not None

    def _agrees_late(self) -> bool:
        """Whether to tell the others only when all is encoded, and so whether all gradients are finite."""
        return self.schedule is None and self.prepared and self.phase is Phase.COMPRESSED

    def _agreed(self) -> Verdict:
        if self._late:
            self.agreement.start("step", self.engine.sent_finite, *self._said)
        verdict = self.agreement.finish()
        # After synchronize() the answer is known, and a worker that was finite has taken over the others' Inf.
        return verdict if self._finite else replace(verdict, finite=False)

    def _warmup_step(
        self, exact_step: Callable[[], None], synchronize: bool, loss_scale: float | None, scaled: bool
    ) -> bool:
        verdict = self.agreement.finish()
        if synchronize:
            self.synchronizer.wait(again=bool(verdict.edited))
        exact = self.exact()
        if loss_scale is not None:
            unscale(exact, loss_scale)
        if not all_finite(exact):  # of averages, so that all workers see the same
            if scaled:
                self.engine.skipped += 1
            else:
                self.engine.say_skipped("the mean gradient")
            return False
        exact_step()
        self._count(exact)
        return True

    def _compressed_step(self, exact_step: Callable[[], None], loss_scale: float | None) -> bool:
        bindings = list(self.bindings.values())
        step = self.engine.exchanges + 1
        kind = kind_of(self.schedule, step)
        if self.schedule is not None and self.schedule.starts_local(step):
            self.engine.feedback.reset()
        rules = self.rules(loss_scale or 1.0, kind)
        self._prepare(rules)
        exact = self.exact()
        for p in self.exact_steps:
            if not p.requires_grad:  # frozen since its backward pass: that gradient is this worker's alone
                p.grad = None
        if loss_scale is not None:
            unscale(exact, loss_scale)  # before they are averaged: workers may have different scales
        finish = self.synchronizer.average_fused(exact, f"{self.engine.name}.exact.{self.synchronizer.generation}")
        taken = self.engine.step(kind, self._gradients(), rules, agreed=self._agreed, others=finish)
        self.synchronizer.reset()
        if not taken:
            return False
        if kind is Kind.EXACT:
            self.variance_steps.update({b.p: b.tensor.variance_steps for b in bindings})
            for binding in bindings:
                binding.coarsen(self.adapter.variance_key)
        for binding in bindings:
            binding.push()
        counters = [binding.state["step"] for binding in bindings if "step" in binding.state]
        if counters:
            torch._foreach_add_(counters, 1)
        self._exact_step_alone(exact_step, bindings)
        self._count(exact)
        return True

    def _exact_step_alone(self, exact_step: Callable[[], None], bindings: list[Binding]) -> None:
        """The wrapped optimizer's step for exact parameters: it passes over those without a gradient."""
        grads = [binding.p.grad for binding in bindings]
        for binding in bindings:
            binding.p.grad = None
        try:
            exact_step()
        finally:
            for binding, grad in zip(bindings, grads, strict=True):
                binding.p.grad = grad

    def rules(self, loss_scale: float, kind: Kind) -> list[Rule]:
        """The rule of each compressed parameter, with its group's hyperparameters of now."""
        workers = self.engine.collectives.size
        grad_scale = (workers if self.sum_gradients else 1.0) / loss_scale
        of: dict[torch.Tensor, Rule] = {}
        for group in self.optimizer.param_groups:
            rule = self.adapter.rule(group, grad_scale)
            if self.schedule is not None:
                rule = zero_one_adam.of(rule, kind)  # type: ignore[arg-type]
            of.update(dict.fromkeys(group["params"], rule))
        return [of[p] for p in self.bindings]

    def _count(self, exact: list[torch.Tensor]) -> None:
        for p in exact:
            self.exact_steps[p] += 1

    # -- state ----------------------------------------------------------------------------------------------------

    def stats(self, norms: bool) -> Stats:
        return self.engine.stats(
            phase=self.phase.value,
            step=self.steps,
            parameters=sum(p.numel() for p in self.exact_steps),
            compressed=sum(p.numel() for p in self.bindings),
            norms=norms,
        )

    def taken(self, p: torch.Tensor) -> int:
        """Optimizer steps that ``p`` has had."""
        binding = self.bindings.get(p)
        return int(self.optimizer.state[p].get("step", 0)) if binding is None else binding.tensor.step

    def start_momentum(self) -> None:
        """Before an exact step: the wrapped optimizer's first step treats no momentum and zeros differently."""
        for p in [p for p in self.unstarted if p.grad is not None]:
            self.optimizer.state[p][self.adapter.momentum_key] = None
            self.unstarted.discard(p)

    def enumerated(self) -> Iterator[tuple[dict[str, Any], int, torch.Tensor]]:
        """Each parameter, its group, and its position among all."""
        position = 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                yield group, position, p
                position += 1

    def ordered(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def export(self, state: dict[str, Any]) -> None:
        """Complete the wrapped optimizer's ``state``: as a plain optimizer can go on with, and how far the run is."""
        self.exported = plain.export(self, state["state"])
        state["param_groups"][0][progress.STATE_KEY] = progress.save(self)

    def load_state_dict(
        self, own: Mapping[str, Any] | None, whole: Mapping[str, Any] | None, *, keep_feedback: bool
    ) -> None:
        """Take over ``own``, which ``progress.save`` gave; see ``progress.load``."""
        self.synchronizer.abandon()
        self.overlap.reset()
        self.engine.forget_sent()
        self.bindings.clear()
        self.find_exact()
        self.changed()
        progress.load(self, own, whole, keep_feedback=keep_feedback)
        self._mature()

"""``schedule=Local(...)`` for PyTorch: any optimizer takes its own steps, and what rounds of them move is exchanged.

Adam's second moment is frozen after some steps (``rules.frozen``); the steps are then taken here, by its rule.
"""

from __future__ import annotations

import atexit
import hashlib
import time
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from horovod_onebit import feedback
from horovod_onebit.checks import whole
from horovod_onebit.driver import Driver, Frozen, Moment
from horovod_onebit.engine import Engine
from horovod_onebit.errors import UnsupportedError
from horovod_onebit.kernels.reference import Array
from horovod_onebit.recipe import Recipe
from horovod_onebit.rounds import Rounds
from horovod_onebit.rules import Tensor, Wraps
from horovod_onebit.rules.frozen import FrozenAdam
from horovod_onebit.rules.local import Delta, forget_steps, no_steps
from horovod_onebit.schedule import Local
from horovod_onebit.tasks import Task, run
from horovod_onebit.torch import plain
from horovod_onebit.torch.arguments import Arguments
from horovod_onebit.torch.arrays import Binding, has_bytes
from horovod_onebit.torch.compressor import Steps
from horovod_onebit.torch.hooks import Scaling, Watches, Where, densify, gradients_finite, take, unscale
from horovod_onebit.torch.parameters import STATE_KEY, Parameters, without_gradients
from horovod_onebit.torch.plain import COMMON_STEPS, VARIANCE_BETA2, VARIANCE_STEPS
from horovod_onebit.torch.private import add_to_all, untraced
from horovod_onebit.torch.progress import Progress
from horovod_onebit.torch.rules import AdamAdapter, Adapter, AnyAdapter, adapter_for
from horovod_onebit.warmup import NEVER, AfterRise, Phase, Warmup
from horovod_onebit.world import ResidualLayout

MOMENTUM, ANCHOR, SENT = "onebit_momentum", "onebit_anchor", "onebit_sent"
"""What rounds keep of a parameter; in a ``state_dict``, the momentum is beside the wrapped optimizer's own state."""


class LocalAdapter(AnyAdapter):
    """What rounds keep is stored apart from the optimizer's state.

    Attributes:
        adam: how ``optimizer`` keeps its moments, if it is Adam or AdamW and the ``schedule`` freezes its second ones.
    """

    anchor_key = ANCHOR

    def __init__(self, schedule: Local, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, Wraps("Local", Delta, momentum=MOMENTUM))
        self.sent_key = SENT if schedule.delay else None
        self.adam = _adam(optimizer) if schedule.shares_moments else None

    def first_state(self, group: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
        """What Adam keeps of a parameter that has had no gradient on this worker, to be saved: it takes an entry that
        is there for a whole one. Of other optimizers nothing, see ``complete_entries``."""
        state: dict[str, Any] = {}
        if (adam := _adam(self._optimizer)) is not None:
            adam.init_state(group, p, state)
        return state

    def check(self, options: Mapping[str, Any]) -> None:
        super().check(options)
        if self.adam is not None:  # or a group that is added later could not be frozen
            self.adam.check(options)


class FrozenAdapter(Adapter):
    """Adam with a second moment that is frozen: its moments are those that the steps and rounds look at."""

    anchor_key = ANCHOR

    def __init__(self, wraps: Wraps, sent_key: str | None) -> None:
        super().__init__(wraps)
        self.sent_key = sent_key


class _Both(ChainMap[str, Any]):
    """The state of a parameter whose second moment is frozen: the wrapped optimizer's, and what is ``kept`` besides."""

    def __setitem__(self, key: str, value: Any) -> None:
        next(one for one in self.maps if key in one)[key] = value


def _adam(optimizer: torch.optim.Optimizer) -> AdamAdapter | None:
    """How ``optimizer`` keeps its moments, if it is Adam or AdamW, as its rule has it."""
    try:
        adapter = adapter_for(optimizer)
        for group in optimizer.param_groups:
            adapter.check(group)
    except UnsupportedError:
        return None
    return adapter if type(adapter) is AdamAdapter else None


class LocalParameters(Parameters):
    """All trained parameters are bound, the small ones, too. What the wrapped optimizer keeps is each worker's own."""

    adapter: LocalAdapter

    def __init__(
        self,
        optimizer: Any,
        adapter: LocalAdapter,
        names: dict[torch.Tensor, str],
        engine: Engine,
        local: Local,
        **options: Any,
    ) -> None:
        super().__init__(optimizer, adapter, names, engine, schedule=None, sum_gradients=False, **options)
        self.local = local
        self.kept: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # by parameter: the beginning of the round, ...
        self._kept_keys = [ANCHOR, *([MOMENTUM] if local.momentum else []), *([SENT] if local.delay else [])]
        self.adam = adapter.adam
        self._frozen_adapter = FrozenAdapter(self.adam.wraps, adapter.sent_key) if self.adam is not None else None
        self.moments = adapter.adam or adapter
        self.awaited: set[torch.Tensor] = set()  # see ``waits``
        self.thawed = False  # whether some second moments were frozen, and have to be again
        for p in self.ordered():  # what a plain optimizer has seen is taken to be of the mean gradient
            if COMMON_STEPS not in optimizer.state.get(p, {}):
                self._set_common(p, self.taken(p))

    @property
    def phase(self) -> Phase:
        return Phase.COMPRESSED

    def trained(self) -> list[torch.Tensor]:
        return list({id(p): p for p in self.ordered() if p.requires_grad}.values())  # a group may have one twice

    def lost(self) -> bool:
        """Whether parameters that are bound were taken out of the groups."""
        here = {id(p) for p in self.ordered()}
        return any(id(p) not in here for p in self.bindings)

    def forget_gone(self) -> set[torch.Tensor]:
        gone = super().forget_gone()
        for p in gone:
            self.kept.pop(p, None)
            self.awaited.discard(p)
        return gone

    def bind_all(self) -> None:
        """Those that are trained now, where they are now."""
        self.unbind()
        for p in self.trained():
            self._bind_one(p)

    def unbind(self) -> None:
        """The next step begins a round."""
        self.bindings = {}
        self.changed()

    def rebind(self) -> bool:
        """Follow parameters whose memory was replaced (``p.data = ...``); whether there are any."""
        moved = [p for p, b in self.bindings.items() if not b.is_current() or self._has_other_state(p, b)]
        for p in moved:
            self._bind_one(p)
        return bool(moved)

    def _has_other_state(self, p: torch.Tensor, binding: Binding) -> bool:
        """Whether the wrapped optimizer's state of ``p`` is another dict than that of the round, with moved moments."""
        both = binding.state
        return isinstance(both, _Both) and self._takes_frozen(p) and both.maps[0] is not self.optimizer.state.get(p)

    def bound(self) -> tuple[list[Binding], list[Binding]]:
        """Those that are compressed, and those that are not."""
        large, small = list[Binding](), list[Binding]()
        for p, binding in self.bindings.items():
            (large if self.compressible(p) else small).append(binding)
        return large, small

    def _bind_one(self, p: torch.Tensor) -> None:
        kept = self.kept.setdefault(p, {})
        for key in self._kept_keys:
            if key not in kept:
                kept[key] = torch.zeros_like(p, memory_format=torch.preserve_format, requires_grad=False)
        place = self.placement.of(p)
        if place is not None:
            self.engine.use_kernels("cuda")
        before, own = self.bindings.get(p), self._frozen_state(p)
        state: MutableMapping[str, Any] = kept
        adapter: Adapter = self.adapter
        if own is not None and self._frozen_adapter is not None:
            state, adapter = _Both(own, kept), self._frozen_adapter
        binding = Binding(self.names[p], p, state, adapter, self.engine.feedback, place)
        again = before is not None and _is_frozen(before) == _is_frozen(binding)
        binding.tensor.layer = before.tensor.layer if before is not None and again else no_steps()
        if own is not None and _is_frozen(binding):
            binding.tensor.variance_steps, binding.tensor.step = own[VARIANCE_STEPS], self.steps
            binding.tensor.beta2 = own.get(VARIANCE_BETA2)
        self._put_binding(p, binding)

    def _frozen_state(self, p: torch.Tensor) -> dict[str, Any] | None:
        """The wrapped optimizer's state of ``p``, if its second moment is frozen: it was there at the freeze. A round
        ends as it has begun: where the state was edited since, with the moments that the round has had."""
        before = self.bindings.get(p)
        if before is not None and not self._takes_frozen(p):
            moments = {key: value for key, value in before.shared.items() if key not in self.kept[p]}
            frozen = {VARIANCE_STEPS: before.tensor.variance_steps, VARIANCE_BETA2: before.tensor.beta2}
            return moments | frozen if _is_frozen(before) else None
        if self.adam is None or self.seen(p) is None:
            return None
        state: dict[str, Any] = self.optimizer.state.get(p, {})
        return state if self.adam.variance_key in state else None

    @property
    def any_frozen(self) -> bool:
        """Whether some second moments of this round are."""
        return any(map(_is_frozen, self.bindings.values()))

    def _take_back(self, group: dict[str, Any], p: torch.Tensor) -> None:
        super()._take_back(group, p)
        self._set_common(p, self.taken(p))
        self.thawed = True

    def common_steps(self, p: torch.Tensor) -> int:
        if self.seen(p) is not None:
            return super().common_steps(p)
        return int(self.optimizer.state.get(p, {}).get(COMMON_STEPS, 0))

    def _set_common(self, p: torch.Tensor, steps: int) -> None:
        if self.adam is not None and (state := self.optimizer.state.get(p)):
            state[COMMON_STEPS] = steps

    def _takes_frozen(self, p: torch.Tensor) -> bool:
        binding = self.bindings.get(p)
        return self.seen(p) is not None and (binding is None or _is_frozen(binding))

    def _has_taken_steps(self, p: torch.Tensor) -> bool:
        return self.steps > 0

    def _watched_keys(self, p: torch.Tensor) -> set[str]:
        if self.adam is None:
            return set()
        momentum, variance = str(self.adam.momentum_key), str(self.adam.variance_key)
        return {momentum, variance, "step"} if self._takes_frozen(p) else {variance}

    def _begin_again(self, group: dict[str, Any], p: torch.Tensor) -> None:
        binding = self.bindings.get(p)
        super()._begin_again(group, p)
        if binding is not None:  # the round ends for it, too, without a momentum of the steps so far
            self.bindings[p] = binding
            forget_steps(binding.tensor)
        self._set_common(p, min(self.common_steps(p), self.taken(p)))
        self.thawed |= self.steps >= self.warmup.steps
        self.awaited.discard(p)

    def waits(self) -> bool:
        """See ``driver.Alone``. A parameter is waited for once: it may have gradients on this worker now and then."""
        young = {p for p in self.trained() if self.local.is_young(self.taken(p))} - self.awaited
        self.awaited |= young
        return bool(young)

    def rules(self) -> Frozen:
        """Of those whose second moment is frozen, with the groups' hyperparameters of now."""
        found = dict[str, FrozenAdam]()
        self.say_overruled()
        for group in self.optimizer.param_groups if self.any_frozen else ():
            members = [p for p in group["params"] if p in self.bindings and self._takes_frozen(p)]
            if members and self.adam is not None:
                self.adam.check(group)
                adam: Any = self.adam.rule(group, 1.0)
                rule = FrozenAdam(delay=self.local.delay, adam=adam)
                found |= dict.fromkeys([self.names[p] for p in members], rule)
        return found

    def learning_rates(self) -> dict[str, float]:
        """By name; those of groups that have none are left out."""
        groups = [group for group in self.optimizer.param_groups if group.get("lr") is not None]
        return {self.names[p]: float(group["lr"]) for group in groups for p in group["params"] if p in self.bindings}

    def step_frozen(self, rules: Frozen) -> None:
        """Take a step by these rules, without a gradient by one of zeros: the mean momentum of a round is that of all
        its steps (``FrozenAdam.count_step``)."""
        context = self.engine.context
        trained = [b for b in self.bindings.values() if b.tensor.name in rules]
        without = [b.p for b in trained if b.p.grad is None]
        for binding in trained:
            if not binding.in_place:
                binding.pull()
                rules[binding.tensor.name].local_step(binding.tensor, binding.grad(), context)
                binding.push()
        grads = [(binding.tensor, binding.grad()) for binding in trained if binding.in_place]
        with context.kernels.batch():  # a GPU's kernels run when it ends
            for tensor, grad in grads:
                rules[tensor.name].local_step(tensor, grad, context)
        if trained:
            add_to_all([binding.state["step"] for binding in trained], 1)
            torch.autograd.graph.increment_version([binding.p for binding in trained if binding.in_place])
        for p in without:
            p.grad = None

    def second_moments(self) -> list[Moment]:
        """Those that are not frozen yet."""
        assert self.adam is not None
        moments = list[Moment]()
        for group, _, p in self.enumerated():
            if not p.requires_grad or self.seen(p) is not None:
                continue
            state = self.optimizer.state[p]
            self.adam.init_state(group, p, state)  # on a worker whose gradients never reached it
            steps, beta2 = int(state["step"]), float(group["betas"][1])
            rule: Any = self.adam.rule(group, 1.0)
            last = rule.decayed(_on_host(torch.zeros_like(p) if p.grad is None else p.grad), _on_host(p))
            variance, own = _on_host(state[str(self.adam.variance_key)]), steps - self.common_steps(p)
            moments.append(Moment((group, p), variance, last, beta2, steps, own, self.steps))
        return moments

    def freeze(self, of: tuple[dict[str, Any], torch.Tensor], second: Array) -> None:
        """Keep ``second`` as that of the parameter ``of`` a group."""
        group, p = of
        if self.adam is not None and second.any():  # or it has had no gradient yet, on any worker, and is not frozen
            value = plain.coarsen(torch.from_numpy(second))
            state = self.optimizer.state[p]
            state[str(self.adam.variance_key)] = value.view(p.shape).to(p.device)
            if not int(state["step"]):  # gradients have never reached it on this worker
                state["step"].fill_(self.steps)
            self.set_seen(group, p, self.steps)

    def taken(self, p: torch.Tensor) -> int:
        """Optimizer steps that ``p`` has had on this worker, which may have skipped others."""
        return int(self.optimizer.state.get(p, {}).get("step", 0))

    def _init_state(self, group: dict[str, Any], p: torch.Tensor) -> None:
        """Nothing, not even an empty entry, which the wrapped optimizer might take for its own."""

    def round(self) -> None:
        """No exchange is under way: what is common to all is the weights as they are kept, in bfloat16 say."""
        self.push()
        for p, binding in self.bindings.items():
            self._set_common(p, self.common_steps(p))  # for who wraps the optimizer again
            if not binding.in_place:
                binding.pull()
                binding.state[ANCHOR].copy_(binding.p.detach())

    def moved_since(self) -> bool:
        """Whether somebody has set weights since the last exchange."""
        return any(not torch.equal(p, b.state[ANCHOR].to(p.device, p.dtype)) for p, b in self.bindings.items())

    def describe(self) -> str:
        return f"{super().describe()} {self.local}"

    def _compared(self, p: torch.Tensor) -> Mapping[str, Any]:
        return {}

    def digest(self, state_dict: Mapping[str, Any]) -> str:
        """Of its progress alone, without the steps that it has skipped: the rest is each worker's own."""
        own = dict(state_dict["param_groups"][0].get(STATE_KEY) or {}) if state_dict["param_groups"] else {}
        for name in ("skipped", "taken", "rates", "common", "awaited"):
            own.pop(name, None)
        return hashlib.blake2b(repr(own).encode(), digest_size=8).hexdigest()

    def progress(self) -> Progress:
        awaited = [i for i, p in enumerate(self.ordered()) if p in self.awaited]
        return replace(super().progress(), awaited=awaited)

    def export(self, state: dict[str, Any]) -> None:
        super().export(state)
        packed = state["state"]
        for group, position, p in self.enumerated():
            momentum = self.kept.get(p, {}).get(MOMENTUM)
            if momentum is not None and bool(momentum.any()):
                own = packed.get(position) or self.adapter.first_state(group, p)
                packed[position] = {**own, MOMENTUM: momentum}

    def _load_states(self, progress: Progress, whole: Mapping[str, Any] | None, *, is_plain: bool) -> None:
        self.thawed, awaited = False, set(progress.awaited)
        self.awaited = {p for i, p in enumerate(self.ordered()) if i in awaited}
        if whole is not None:
            self.kept.clear()
        saved = {} if whole is None else dict(self._saved(whole))
        if self.adam is not None:
            self._load_frozen(self.adam, progress, saved)
        common, frozen = self._by_position(progress.common), self._by_position(progress.variance_steps)
        for p in self.ordered():
            own = is_plain or (frozen[p] > 0 and self.seen(p) is None)
            self._set_common(p, self.taken(p) if own else common[p])
            momentum = self.optimizer.state.get(p, {}).pop(MOMENTUM, None)
            # In float32: PyTorch casts loaded state to the parameter's dtype.
            if (momentum := saved.get(p, {}).get(MOMENTUM, momentum)) is not None:
                self.kept[p] = {MOMENTUM: momentum.detach().to(p.device, torch.float32, copy=True)}

    def _load_frozen(self, adam: AdamAdapter, progress: Progress, saved: Mapping[torch.Tensor, Any]) -> None:
        """Second moments that are frozen; the state has them as in ``plain``, what was ``saved`` in float32."""
        key = str(adam.variance_key)
        seen, taken = self._by_position(progress.variance_steps), self._by_position(progress.taken)
        beta2 = self._by_position(progress.beta2)
        for group, _, p in self.enumerated():
            state = self.optimizer.state.get(p, {})
            # A plain optimizer that has gone on from there has taken more steps.
            if not seen[p] or key not in state or self.taken(p) > max(taken[p], progress.steps):
                continue
            if p in saved:
                adam.keep_float32(p, saved[p], state, compressed=True)
            before = beta2[p] or None
            state[key] = plain.restored(state[key], adam.variance_factor(group, self.taken(p), seen[p], before))
            self.set_seen(group, p, seen[p], before)


def complete_entries(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Those of a saved ``state`` that have something of the wrapped optimizer, which takes each for a whole one. Others
    have the momentum of ``Local`` alone: of parameters that have had no gradient on the worker that saved."""
    return {key: entry for key, entry in state.items() if not isinstance(entry, dict) or entry.keys() != {MOMENTUM}}


def _on_host(tensor: torch.Tensor) -> Array:
    """``tensor``, flat float32, in host memory."""
    found: Array = tensor.detach().to("cpu", torch.float32).reshape(-1).numpy()
    return found


def _is_frozen(binding: Binding) -> bool:
    return isinstance(binding.state, _Both)


class OwnGradients(Watches):
    """Gradients that stay this worker's own: what ``Agreement`` and others ask of those that travel."""

    coded = None
    where = Where.NOWHERE
    automatic = True

    def __init__(self, rounds: Rounds, arguments: Arguments) -> None:
        super().__init__()
        self._rounds = rounds
        self._arguments = arguments
        self.passes = arguments.backward_passes_per_step

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Another DistributedOptimizer that had ``parameters`` lets go of them. Their gradients are looked at only to
        make them dense."""
        for p in parameters:
            take(p, self, hooks=self._arguments.sparse_as_dense)
            if self._arguments.sparse_as_dense:
                self.computed(p)

    @untraced
    def computed(self, p: torch.Tensor) -> None:
        """See ``hooks.Watches``."""
        densify([p])

    @property
    def recallable(self) -> bool:
        return not self._rounds.engine.under_way

    def edited(self) -> bool:
        return False

    def describe(self) -> str:
        return f"{self._arguments}"

    def arguments(self) -> dict[str, object]:
        return self._arguments.named()

    def progress(self) -> dict[str, object]:
        return {}

    def set_passes(self, passes: int) -> None:
        self.passes = whole("backward_passes_per_step", passes)

    def send_late(self, reason: str, *, averages: bool = False) -> None:
        """Nothing is sent early."""

    def cancel(self, *, by_all: bool) -> None:
        """The exchange that was begun is not ended; what it was to bring goes with the next one."""
        self._rounds.cancel(by_all=by_all)


PATIENCE = 30.0
"""Seconds that a program which ends waits for an exchange that is under way."""


def _let_arrive(steps: weakref.ref[LocalSteps]) -> None:
    """Before Horovod is shut down: a worker that ends would end the others, which still send what this one has sent."""
    found, until = steps(), time.monotonic() + PATIENCE
    with suppress(Exception):  # of a job that has failed
        while found is not None and found.rounds.hidden and found.transport.ends_together and time.monotonic() < until:
            if found.engine.progress():
                break
            time.sleep(0.01)


class _NotFinite(Exception):
    """Gradients are not finite."""


class _Stopped(Exception):
    """A closure has raised ``error``, a ``StopIteration``."""

    def __init__(self, error: StopIteration) -> None:
        super().__init__(error)
        self.error = error


class _Step:
    """One step of the wrapped optimizer, ``own_step``; ``result`` is what it has returned."""

    def __init__(
        self, parameters: LocalParameters, own_step: Callable[..., Any], closure: Callable[[], Any] | None,
        scaling: Scaling,
    ) -> None:  # fmt: skip
        self._parameters, self._own_step, self._closure, self._scaling = parameters, own_step, closure, scaling
        self.result: Any = None
        self._before: dict[torch.Tensor, torch.Tensor] = {}  # the weights, of optimizers that move them and look again

    def take(self, rules: Frozen) -> bool:
        """See ``Driver.local_step``."""
        parameters = self._parameters
        self._trained = parameters.trained()
        parameters.forget_frozen()
        if self._scaling.overflowed:
            return False
        if self._scaling.scale is not None:
            unscale(self._trained, self._scaling.scale)
        if self._closure is not None and not rules and _moves_first(parameters.optimizer):
            self._before = {p: p.detach().clone() for p in parameters.bindings}
        try:
            if self._closure is None or rules:
                self.result = self._compute()
            if not rules:
                self.result = self._own_step(self._closure and self._compute)
                return True
            parameters.step_frozen(rules)
            if any(b.tensor.name not in rules for b in parameters.bindings.values()):
                with without_gradients([p for p, b in parameters.bindings.items() if b.tensor.name in rules]):
                    self._own_step(None)
        except _NotFinite:
            self._take_back()
            return False
        return True

    def _compute(self) -> Any:
        """The closure, if there is one; raises ``_NotFinite`` if gradients are not finite then."""
        if self._closure is not None:
            with torch.enable_grad():
                self.result = self._closure()
        if not gradients_finite(self._trained):
            raise _NotFinite
        return self.result

    @torch.no_grad()
    def _take_back(self) -> None:
        """Undo what was moved in this step; LBFGS's memory of the curvature is cleared."""
        moved = [p for p, before in self._before.items() if not torch.equal(p, before)]
        for p in moved:
            p.copy_(self._before[p])
        if moved and isinstance(self._parameters.optimizer, torch.optim.LBFGS):
            self._parameters.optimizer.state.clear()


def _moves_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step may move weights and then call its closure, as those of LBFGS and SAM do. PyTorch's others, and
    LAMB's, call it first."""
    ours = "horovod_onebit.torch."
    step = next(c for c in type(optimizer).__mro__ if "step" in vars(c) and c.__module__ != f"{ours}optimizer")
    return isinstance(optimizer, torch.optim.LBFGS) or not step.__module__.startswith(("torch.optim.", ours))


class LocalSteps(Steps):
    """Steps of each worker alone, in rounds."""

    parameters: LocalParameters

    def __init__(
        self,
        optimizer: Any,
        arguments: Arguments,
        *,
        name: str,
        recipe: Recipe,
        schedule: Local,
        adapter: LocalAdapter,
        warmup: Warmup,
        names: dict[torch.Tensor, str],
        check_replicas_every: int | None,
        **options: Any,
    ) -> None:
        super().__init__(arguments, name, recipe, check_replicas_every)
        warmup = warmup if adapter.adam is not None else AfterRise(NEVER)
        self.driver = Driver(self.engine, self, warmup, schedule)
        self.rounds: Rounds = self.driver.rounds
        self.kind = feedback.kind(recipe.space, divides=adapter.divides, schedule=schedule)
        parameters = LocalParameters(optimizer, adapter, names, self.engine, schedule, warmup=warmup, **options)
        self._concern(parameters, OwnGradients(self.rounds, arguments))
        if schedule.delay:
            atexit.register(_let_arrive, weakref.ref(self))

    @property
    def pending(self) -> bool:
        return bool(self.parameters.bindings) and self.rounds.under_way

    def adopt(self) -> None:
        """Take over progress that Horovod has broadcast."""
        self.parameters.adopt()

    def end_apart(self) -> Task[None]:
        """Parameters that are gone end the round. Collective if there are some in the middle of one."""
        if self.parameters.lost():  # the others, and this one, end their round together
            if self.rounds.under_way:
                self.parameters.begin_again(self.parameters.edited())
                yield from self.driver.end_round("step", flush=True)
                self.parameters.remember()
            self.parameters.unbind()

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self, own_step: Callable[..., Any], closure: Callable[[], Any] | None, scaling: Scaling) -> Any:
        """Take one step alone, ``own_step`` with ``closure`` if there is one, and end the round if it is its last one;
        returns what ``own_step`` does.

        It is passed over if gradients are not finite.
        """
        step, reached = _Step(self.parameters, own_step, closure, scaling), False

        def take(rules: Frozen) -> bool:
            nonlocal reached
            reached = True
            with self.agreement.told("step"):  # others may have gone on since the round began
                try:
                    return step.take(rules)
                except StopIteration as error:  # of the closure: it would end the task
                    raise _Stopped(error) from None

        try:
            run(self.driver.local_step(take))
        except _Stopped as stopped:
            raise stopped.error from None
        finally:
            self.agreement.reset()
            if reached:  # or edits that were not looked at would be forgotten
                self.parameters.remember()
        return step.result

    # -- what the driver asks of a face: see ``driver.Alone`` ---------------------------------------------------------

    def waits(self) -> bool:
        return self.parameters.waits()

    def follow(self) -> Task[bool]:
        yield from self.check_groups()
        with self.agreement.told("step"):
            self.parameters.check_trained()
        self.gradients.check_owned(self.parameters.names)
        self.check_averaging()
        parameters = self.parameters
        parameters.begin_again(parameters.edited())
        bound = parameters.bindings
        if [id(p) for p in bound] == [id(p) for p in parameters.trained()] and not self._other_sizes():
            if parameters.any_frozen:  # or the wrapped optimizer's steps follow by themselves
                yield from self._rebind()
            if self.rounds.under_way or not parameters.moved_since():
                return False
        elif bound and self.rounds.under_way:
            yield from self.driver.end_round("step", flush=True)
        for name in {parameters.names[p] for p in bound if not p.requires_grad}:
            self.engine.feedback.discard(name)
        self._thaw()
        return True

    def _other_sizes(self) -> bool:
        """Whether other parameters are to be compressed than in this round."""
        now = [binding.tensor.name for binding in self.parameters.bound()[0]]
        return now != [tensor.name for tensor in self.rounds.large]

    def agree(self, call: str, what: Mapping[str, object]) -> Task[None]:
        changed = {"whether an optimizer's state was changed by hand": self.parameters.thawed}
        self.agreement.start(call, options={"trained": changed, "steps": what})
        yield from self.agreement.answer()

    def bind(self) -> tuple[list[Tensor], list[Tensor]]:
        parameters = self.parameters
        parameters.bind_all()
        parameters.remember()
        parameters.pull()
        return self._tensors()

    def _tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        large, small = self.parameters.bound()
        return [b.tensor for b in large], [b.tensor for b in small]

    def began(self) -> Task[None]:
        return self.redistribute()

    def unbind(self) -> None:
        self.parameters.unbind()

    def details(self) -> list[str]:
        return [binding.detail() for binding in self.parameters.bound()[0]]

    def learning_rates(self) -> Mapping[str, float]:
        return self.parameters.learning_rates()

    def frozen_rules(self) -> Frozen:
        return self.parameters.rules()

    def pull(self) -> Task[None]:
        yield from self._rebind()
        self.parameters.pull()

    def push(self, *, together: bool, usable: bool) -> None:
        if together:
            self.parameters.round()
        else:
            self.parameters.push()
        if not usable:
            self._heal()

    def ended(self) -> Task[None]:
        if self.parameters.thawed:  # the next round has other rules
            self._thaw()
            self.parameters.unbind()
        yield from self.compare()

    def second_moments(self) -> list[Moment]:
        return self.parameters.second_moments()

    def freeze(self, of: Any, second: Array) -> None:
        self.parameters.freeze(of, second)

    def _thaw(self) -> None:
        if self.parameters.thawed:
            self.rounds.freezing.thaw(self.parameters.steps)
            self.parameters.thawed = False

    def _rebind(self) -> Task[None]:
        """Follow parameters whose memory was replaced. Local."""
        if self.parameters.rebind():
            yield from self.rounds.replace(*self._tensors())

    def _heal(self) -> None:
        """After a lost round: what the wrapped optimizer keeps must not carry NaN into the next one."""
        for state in plain.entries_of(self.parameters.optimizer.state):
            for value in state.values():
                if has_bytes(value) and value.is_floating_point():
                    value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    # -- other calls ----------------------------------------------------------------------------------------------

    def flush(self) -> Task[None]:
        """End the round now: all workers have the same weights then. Collective."""
        if not self.included or self.engine.layout is None:
            return
        if not self.pending:  # as all workers, or some have taken other steps
            yield from self.agree("flush", self.driver.round_facts(begins=False) | {"steps of this round": 0})
        else:
            self.adopt()
            self.parameters.begin_again(self.parameters.edited())
            yield from self.driver.flush()
            self.parameters.remember()

    def check_replicas(self) -> Task[None]:
        """Raise ``DesyncError`` on all workers if their weights are not the same, or what they have in common while an
        exchange is under way. Collective."""
        if self.pending and self.rounds.hidden:
            yield from self.rounds.check_replicas()
        else:
            yield from super().check_replicas()

    def cancel(self) -> None:
        """All workers together continue from other weights, or another state: the next step begins a round. Local."""
        self.engine.cancel(by_all=True)
        self._thaw()
        self.parameters.unbind()

    def load(self, own: Any, whole: Mapping[str, Any], *, keep_feedback: bool) -> None:
        """Take over the progress ``own`` of a state, ``whole``, which the wrapped optimizer has loaded."""
        self.engine.cancel(restore=False)
        self.parameters.load(own, whole, keep_feedback=keep_feedback)

    def own_state(self) -> Any:
        """What the wrapped optimizer keeps, and how far it is: each worker's is its own."""
        return self.parameters.optimizer.state_dict()

    # -- other workers --------------------------------------------------------------------------------------------

    def residuals_replaced(self, residual_layout: ResidualLayout | None) -> None:
        super().residuals_replaced(residual_layout)
        self.parameters.unbind()

    def fold(self) -> None:
        """Go back to the beginning of the round; what was moved since becomes residuals. Local."""
        if self.parameters.bindings and self.rounds.under_way:
            self.parameters.pull()
            self.rounds.fold()
            self.parameters.push()

    def leave_world(self) -> None:
        super().leave_world()
        self.parameters.unbind()

    def with_residuals(self) -> list[torch.Tensor]:
        return self.parameters.trained()

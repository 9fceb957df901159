"""The parameters of one optimizer: which are exact, which compressed, and how far each of them is.

A parameter is *exact* while it is small or has had fewer than ``warmup_steps`` exact steps; the wrapped optimizer
takes its steps with the averaged gradient. All others are *compressed*: the engine takes their steps.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from itertools import count as numbers_from
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_onebit import replicas
from horovod_onebit.checks import flag, matching
from horovod_onebit.engine import Engine, Plan
from horovod_onebit.errors import ConfigurationError, some
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rules import Rule, zero_one_adam
from horovod_onebit.run_state import counts
from horovod_onebit.schedule import EXACT, Sends, Stepwise
from horovod_onebit.torch import plain
from horovod_onebit.torch.arguments import UNNAMED, names_in
from horovod_onebit.torch.arrays import Binding, Placement, has_bytes, nonzero
from horovod_onebit.torch.norms import sum_of_squares
from horovod_onebit.torch.plain import COMMON_STEPS, FROZEN_KEYS, OWN_KEYS, VARIANCE_BETA2, VARIANCE_STEPS, Marks
from horovod_onebit.torch.private import add_to_all
from horovod_onebit.torch.progress import Progress
from horovod_onebit.torch.rules import Adapter, check_parameter
from horovod_onebit.warmup import FOREVER, UNKNOWN, Phase, Warmup, least, unbiased

STATE_KEY = "horovod_onebit"
"""Where the progress is in a ``state_dict``: an option of the first group, so that Horovod broadcasts it too."""
COMPARED = (
    "the shape of {}", "the dtype of {}", "the memory order of {}", "whether {} is frozen",
    "whether {} is never compressed", "the place of {} among the optimizer's parameters",
)  # fmt: skip
"""Of each parameter, what must be the same on all workers, in words."""
WORDS = {"lr": "learning rate", "weight_decay": "weight decay", "grad_scale": "the factor of gradients (maximize, op)"}
SAMPLE = 16  # values of each tensor that a digest covers

Group = dict[str, Any]
Number = TypeVar("Number", int, float)


class Parameters:
    """Belongs to one ``DistributedOptimizer``, whose ``state`` and ``param_groups`` it reads.

    Attributes:
        names: of all parameters that have been seen.
        moments: how the wrapped optimizer keeps its moments.
        exact_steps: the trained parameters, and how many exact steps each has had.
        idle: of these, those of the first steps that have had no gradient but zeros, where there are such steps and a
            second moment that will be frozen.
        bindings: the compressed ones, in the order of the groups.
        never: those that are never compressed.
        unstarted: those with a momentum that the wrapped optimizer would not have yet.
        version: how often what is trained, or how, has changed.
        prepared_for: the version that the engine is prepared for.
        lineage: a digest of the state that was loaded, or taken over when the optimizer was wrapped.
        steps: optimizer steps taken.
    """

    def __init__(
        self,
        optimizer: Any,
        adapter: Adapter,
        names: dict[torch.Tensor, str],
        engine: Engine,
        *,
        warmup: Warmup,
        schedule: Stepwise | None,
        placement: Placement,
        sum_gradients: bool,
        exact: Sequence[str],
    ) -> None:
        self.optimizer = optimizer
        self.adapter = self.moments = adapter
        self.names = names
        self.engine = engine
        self.warmup = warmup
        self.schedule = schedule
        self.placement = placement
        self.sum_gradients = sum_gradients
        self.steps = 0
        self.exact_steps: dict[torch.Tensor, int] = {}
        self.idle: dict[torch.Tensor, int] = {}
        self.bindings: dict[torch.Tensor, Binding] = {}
        self.never: set[torch.Tensor] = set()
        self._exact_groups: list[bool] = []  # by group, whether it has the option ``exact``
        self.unstarted: set[torch.Tensor] = set()
        self.version = 0
        self.made_state = False  # whether there is one that was made to be shown, perhaps on this worker alone
        self.lineage = ""
        self.just_started = False  # whether compression has started with the last step, for some of them
        self._marks: dict[torch.Tensor, Marks] = {}  # of their states, as the last step left them
        self._strides = WeakTensorKeyDictionary()  # of those that were bound: the order of their residuals
        self._gone = WeakTensorKeyDictionary()  # names of those that are, or may still come, while somebody has them
        self._zeros: dict[torch.Tensor, int] = {}  # elements of a frozen second moment that are zero
        self._watching: tuple[Any, list[tuple[torch.Tensor, set[str]]]] = (None, [])  # see ``remember``
        self._overruled: tuple[Any, int] = (None, 0)  # see ``say_overruled``
        self.prepared_for = -1
        self._patterns = exact
        self._exported: dict[torch.Tensor, torch.Tensor] = {}  # see ``export``
        self._described: tuple[Any, str] = (None, "")

    # -- which there are ------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """``COMPRESSED`` as soon as any parameter is."""
        return Phase.COMPRESSED if self.bindings else Phase.WARMUP

    def enumerated(self) -> Iterator[tuple[Group, int, torch.Tensor]]:
        """Each parameter, its group, and its position among all."""
        position = 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                yield group, position, p
                position += 1

    def ordered(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def exact(self) -> list[torch.Tensor]:
        compressed = set(map(id, self.bindings))  # PyTorch hashes tensors in Python
        return [p for p in self.exact_steps if id(p) not in compressed and p.requires_grad]

    def compressible(self, p: torch.Tensor) -> bool:
        """Whether ``p`` is compressed once its warm-up is over."""
        return p.numel() >= self.engine.recipe.min_compressed_size and p not in self.never

    def changed(self) -> None:
        self.version += 1

    @property
    def prepared(self) -> bool:
        """Whether the engine is prepared, and nothing has changed since."""
        return self.engine.layout is not None and self.prepared_for == self.version

    def seen(self, p: torch.Tensor) -> int | None:
        """The steps that the second moment of ``p`` has seen, if it is frozen; it is in the state, and goes with it."""
        found: int | None = self.optimizer.state.get(p, {}).get(VARIANCE_STEPS)
        return found

    def set_seen(self, group: Group, p: torch.Tensor, steps: int, before: float | None = None) -> None:
        """The second moment of ``p`` has seen so many steps, by the beta2 of now or of ``before``, and is frozen."""
        state = self.optimizer.state[p]
        state[VARIANCE_STEPS] = steps
        if "betas" in group and self.moments.variance_key is not None:
            state[VARIANCE_BETA2] = float(group["betas"][1]) if before is None else before

    def beta2(self, p: torch.Tensor) -> float | None:
        """That of the steps that the second moment of ``p`` has seen, if it is frozen."""
        found: float | None = self.optimizer.state.get(p, {}).get(VARIANCE_BETA2)
        return found

    def say_overruled(self) -> None:
        """Warn if a group's beta2 was changed: second moments that are frozen do not follow it."""
        groups = self.optimizer.param_groups
        betas = [None if (pair := group.get("betas")) is None else float(pair[1]) for group in groups]
        key = self.version, betas
        if key != self._overruled[0]:
            pairs = zip(groups, betas, strict=True)
            count = sum(self.beta2(p) not in (None, now) for group, now in pairs for p in group["params"])
            if count and not self._overruled[1]:
                text = "betas[1] was changed, and %d second moments are frozen: they stay what they are"
                self.engine.say(logging.WARNING, text, count)
            self._overruled = key, count

    def find_new(self) -> list[torch.Tensor]:
        """Take notice of parameters that are new or newly trained; they warm up first. Of all of them, or, if one is
        refused, of none."""
        self.placement.look(group["params"][0].device for group in self.optimizer.param_groups if group["params"])
        fresh: list[tuple[Group, torch.Tensor, str]] = []
        known = set(map(id, self.exact_steps))
        names: set[str] | None = None  # that are taken
        for index, group in enumerate(self.optimizer.param_groups):
            for position, p in enumerate(group["params"]):
                if id(p) in known or not p.requires_grad:
                    continue
                if names is None:  # one that is gone leaves its name to who comes in its place
                    here = set(map(id, self.ordered()))
                    names = {self.names[p] for p in self.exact_steps if id(p) in here}
                name = self.names.get(p) or self._gone.get(p)
                if name is None or name in names:  # another one has got its name since it was taken out
                    name = _new_name(group, index, position, names)
                names.add(name)
                self.adapter.check(group)
                flag("exact", group.get("exact", False))
                check_parameter(name, p)
                fresh.append((group, p, name))
                known.add(id(p))  # a group may have it twice
        if not self.steps:
            self._follow_model()
        for group, p, name in fresh:
            self.names[p] = name
            self._gone.pop(p, None)
            if self.seen(p) is not None:
                self._take_back(group, p)
            self._init_state(group, p)
            self._begin_warmup(p)
        if fresh:
            self.exact_steps = self.in_order(self.exact_steps)
        if fresh or self.reclassified():
            self._find_never()
        return [p for _, p, _ in fresh]

    def _asked_to_be_exact(self) -> list[bool]:
        return [flag("exact", group.get("exact", False)) for group in self.optimizer.param_groups]

    def reclassified(self) -> bool:
        """Whether a group's option ``exact`` was changed since this was looked at."""
        return self._asked_to_be_exact() != self._exact_groups

    def in_order(self, counts: Mapping[torch.Tensor, int]) -> dict[torch.Tensor, int]:
        """``counts`` in the order of the groups, whichever parameter came first: gradients that travel together must
        be in one order on all workers."""
        return {p: counts[p] for p in dict.fromkeys((*self.ordered(), *counts)) if p in counts}

    def _follow_model(self) -> None:
        """Before the first step, the model may be moved, or converted: so is the state, which was made before."""
        for group, _, p in self.enumerated():
            state = self.optimizer.state.get(p, {}) if p in self.exact_steps and self.adapter.makes_state else {}
            kept = [state.get(key) for key in (self.adapter.momentum_key, self.adapter.variance_key) if key]
            found = [value for value in kept if isinstance(value, torch.Tensor)]
            other = any((value.device, value.dtype) != (p.device, p.dtype) for value in found)
            if other and self.seen(p) is None and not any(value.any() for value in found):
                state.clear()
                self._init_state(group, p)

    def _take_back(self, group: Group, p: torch.Tensor) -> None:
        """``p`` was compressed before, in this optimizer or another: its state is for exact steps now."""
        self.moments.to_plain(group, p, self.optimizer.state[p])

    def forget_gone(self) -> set[torch.Tensor]:
        """Forget parameters that were taken out of the groups."""
        here = set(map(id, self.ordered()))
        gone = {p for p in self.exact_steps if id(p) not in here}
        for p in gone:
            self.bindings.pop(p, None)
            self._marks.pop(p, None)
            self._zeros.pop(p, None)
            self.unstarted.discard(p)
            del self.exact_steps[p]
            self.idle.pop(p, None)
            self.engine.feedback.discard(self.names[p])
        if gone:
            self.changed()
        return gone

    def let_go(self, gone: Iterable[torch.Tensor]) -> None:
        """Everybody has forgotten the parameters ``gone``: keep none of them in memory. One that comes back has its
        name again."""
        for p in gone:
            self._gone[p] = self.names.pop(p)

    def expect(self, names: Mapping[torch.Tensor, str]) -> None:
        """Parameters that may be added later have these ``names``."""
        for p, name in names.items():
            self._gone[p] = name

    def all_names(self) -> list[tuple[torch.Tensor, str]]:
        """Of all parameters; first those that are somewhere and not in the groups, whose names others may have now."""
        return [*self._gone.items(), *self.names.items()]

    def _init_state(self, group: Group, p: torch.Tensor) -> None:
        """Give ``p`` the state that its first step would make, so that all workers have the same."""
        self.optimizer.state.get(p, {}).pop(COMMON_STEPS, None)  # all gradients are the workers' mean from now on
        if self.adapter.makes_state and self.adapter.init_state(group, p, self.optimizer.state[p]):
            self.unstarted.add(p)

    def _find_never(self) -> None:
        """Which parameters are never compressed: those named so, and groups with the option ``exact``."""
        self._exact_groups = self._asked_to_be_exact()
        pairs = zip(self.optimizer.param_groups, self._exact_groups, strict=True)
        never = {p for group, exact in pairs if exact for p in group["params"]}
        if self._patterns:
            known = {p: self.names[p] for p in self.ordered() if p in self.names}
            found = matching("exact", self._patterns, known.values(), all_match=False)
            never |= {p for p, name in known.items() if name in found}
        if never != self.never:
            self.never = never
            self.changed()

    # -- compressed ones ------------------------------------------------------------------------------------------

    def start_compression(self) -> None:
        """Compress, from the next step on, every parameter whose warm-up is over."""
        ready = {id(p) for p in self.exact() if self.compressible(p) and self._is_ready(p)}
        found = [(group, p) for group, _, p in self.enumerated() if id(p) in ready] if ready else []
        for group, p in found:
            self._start_compressing(group, p)
        if found:
            self._order()
            self.remember()
        self.just_started = bool(found)

    def _is_ready(self, p: torch.Tensor) -> bool:
        """Whether the warm-up of ``p`` is over."""
        return self.warmup.phase(self.exact_steps[p]) is Phase.COMPRESSED and not self._is_young(p)

    def _start_compressing(self, group: Group, p: torch.Tensor) -> None:
        self._init_state(group, p)  # what was cleared before the first step, and exact steps have not made
        fresh, unmet = self.seen(p) is None, self._is_unmet(p)
        if fresh:
            self.set_seen(group, p, self._gradients_seen(p))
            self.idle.pop(p, None)
        self.bind(p)
        if fresh:
            rule = self.adapter.rule(group, 1.0)
            if unmet and rule.rests(self.bindings[p].tensor, self.engine.context):  # whatever weight decay has left
                self.adapter.restart(self.optimizer.state[p])
            if not self.bindings[p].in_place:
                self.bindings[p].pull()
            rule.begin(self.bindings[p].tensor, self.engine.context)
            self.bindings[p].coarsen(self.adapter.variance_key)

    def bind(self, p: torch.Tensor) -> None:
        """Compress ``p``, where it is now; ``_order`` is to be called afterwards, once for all."""
        place = self.placement.of(p)
        if place is not None:
            self.engine.use_kernels("cuda")
        state = self.optimizer.state[p]
        binding = Binding(self.names[p], p, state, self.adapter, self.engine.feedback, place)
        binding.tensor.variance_steps, binding.tensor.beta2 = state[VARIANCE_STEPS], self.beta2(p)
        binding.tensor.step = int(state.get("step", self.exact_steps[p]))
        self._put_binding(p, binding)

    def _put_binding(self, p: torch.Tensor, binding: Binding) -> None:
        if self._strides.setdefault(p, binding.strides) != binding.strides:  # of ``model.to(memory_format=...)``
            self.engine.forget_order(self.names[p])
            self._strides[p] = binding.strides
        self.bindings[p] = binding
        self.changed()

    def _order(self) -> None:
        """In the order of the groups, however they came: the layout must not depend on history."""
        self.bindings = {p: self.bindings[p] for p in self.ordered() if p in self.bindings}

    def _groups(self) -> dict[torch.Tensor, Group]:
        return {p: group for group, _, p in self.enumerated()}

    def _unbind(self, group: Group, p: torch.Tensor) -> None:
        """``p`` is compressed no more; should it be trained again, it has a whole new warm-up."""
        state = self.optimizer.state[p]
        if VARIANCE_STEPS in state:
            self._take_back(group, p)
        name = self.names[p]
        self.bindings.pop(p, None)
        if self.bindings:
            self.engine.feedback.reset([name])  # the engine has the array until the next layout
        else:  # that may be the same, without a redistribution: what servers owe goes at once
            self.engine.forget_order(name)
        self.engine.feedback.discard(name)  # what servers owe of it is then not redistributed
        self._marks.pop(p, None)
        self._begin_warmup(p)
        self.changed()

    def _begin_warmup(self, p: torch.Tensor) -> None:
        self.exact_steps[p] = 0
        self.idle.pop(p, None)

    def refresh(self) -> None:
        """Follow parameters that were frozen, or are never compressed any more, whose state was edited, or whose memory
        was replaced (``p.data = ...``, a loaded state); and a momentum that is not 0 any more."""
        ended = [p for p in self.bindings if not p.requires_grad or p in self.never]
        if ended:
            groups = self._groups()
            for p in ended:
                self._unbind(groups[p], p)
                if not p.requires_grad:
                    p.grad = None
        self.begin_again(self.edited())
        for group, p in self._without_momentum():
            self.adapter.init_state(group, p, self.optimizer.state[p])
            self.bind(p)
        self.follow_memory()

    def _without_momentum(self) -> list[tuple[Group, torch.Tensor]]:
        """The compressed parameters, and their groups, whose momentum was 0, and is not any more."""
        if not self.adapter.momentum_may_be_missing:
            return []
        key, bound = self.adapter.momentum_key, self.bindings
        having = [(group, p) for group, _, p in self.enumerated() if group["momentum"] and p in bound]
        return [(group, p) for group, p in having if key not in bound[p].shared]

    def begin_again(self, edited: Sequence[torch.Tensor]) -> None:
        """The states of these parameters were edited: they have a whole new warm-up."""
        if not edited:
            return
        groups = self._groups()
        for p in (p for p in edited if p in groups):
            self._begin_again(groups[p], p)
        self._order()
        self._say("the state of %s was changed between two steps: the warm-up begins again", edited)

    def warm_up(self, late: Sequence[torch.Tensor]) -> None:
        """These parameters, which are compressed, have got their first gradient: they have a whole warm-up first."""
        if not late:
            return
        groups = self._groups()
        for p in late:
            self.optimizer.state[p].clear()
            self._unbind(groups[p], p)
            self._init_state(groups[p], p)
        self._say("%s: the first gradients since compression started; the warm-up begins for them", late)

    def _say(self, text: str, parameters: Sequence[torch.Tensor]) -> None:
        """Log ``text`` of the first of these ``parameters``, by name."""
        self.engine.say(logging.INFO, text, some([self.names[p] for p in parameters]))

    def follow_memory(self, edited: Iterable[torch.Tensor] = ()) -> None:
        """Follow parameters whose memory was replaced, but for those whose state was ``edited``."""
        other = set(map(id, edited))
        moved = [p for p in self._moved() if id(p) not in other]
        for p in moved:
            self.bind(p)
        if moved:
            self._order()
            self.remember(other)

    # -- states that somebody else has changed --------------------------------------------------------------------

    def remember(self, but: Collection[int] = ()) -> None:
        """What is in the states now is what a step has left there, ``but`` for parameters of these ids."""
        key = (self.version, len(self.exact_steps))
        if key != self._watching[0]:
            self._watching = key, [(p, keys) for p in self.exact_steps if (keys := self._watched_keys(p))]
        for p, keys in self._watching[1] if not but else [one for one in self._watching[1] if id(one[0]) not in but]:
            state, marks = self.optimizer.state.get(p, {}), self._marks.get(p)
            if marks is None or not marks.renew(state, keys):
                self._marks[p] = Marks(state, keys)
                self._zeros[p] = self._count_zeros(state) if self._takes_frozen(p) else p.numel() - 1

    def _watched_keys(self, p: torch.Tensor) -> set[str]:
        """What of the state of ``p`` has to be as a step has left it: all, once the second moment is frozen; before,
        the second moment that will be."""
        if (binding := self.bindings.get(p)) is not None:
            return {*binding.shared, "step"} if "step" in binding.state else set(binding.shared)
        key = self.moments.variance_key
        return {key} if key is not None and self.compressible(p) else set()

    def edited(self) -> list[torch.Tensor]:
        """The parameters whose state is not what the last step has left, and that cannot continue with it."""
        states, found = self.optimizer.state, []
        for p, marks in self._marks.items():
            if p.requires_grad and (keys := marks.edited(states.get(p, {}))) and self._begins_again(p, keys):
                found.append(p)
        return found

    def _begins_again(self, p: torch.Tensor, edited: Sequence[str]) -> bool:
        """Whether ``p`` cannot continue with what is under the ``edited`` keys."""
        state, marks = self.optimizer.state.get(p, {}), self._marks[p]
        changed = not all(marks.moved(key, state) for key in edited)
        if not changed or self._takes_frozen(p):
            return changed
        # Exact steps follow all edits. But a second moment that was set to zeros has seen less than its count says.
        return self._has_taken_steps(p) and (not self.moments.complete(p, state) or self._was_reset(p, state))

    def _takes_frozen(self, p: torch.Tensor) -> bool:
        """Whether the next step takes the second moment of ``p`` as it is."""
        return p in self.bindings

    def _has_taken_steps(self, p: torch.Tensor) -> bool:
        return self.exact_steps[p] > 0

    def _was_reset(self, p: torch.Tensor, state: Mapping[str, Any]) -> bool:
        """Whether the second moment of ``p`` has more zeros than before; in exact steps, nothing else."""
        return self._count_zeros(state) > self._zeros.get(p, p.numel() - 1)

    def _count_zeros(self, state: Mapping[str, Any]) -> int:
        value = state.get(self.moments.variance_key or "")
        return -1 if value is None else value.numel() - int(value.count_nonzero())

    def _begin_again(self, group: Group, p: torch.Tensor) -> None:
        # From an empty state where the second moment was set to zeros, or something is missing.
        state, key = self.optimizer.state[p], self.moments.variance_key
        marks = self._marks[p]
        reset = key in marks.edited(state) and not marks.moved(str(key), state)
        if not self.moments.complete(p, state) or (reset and self._was_reset(p, state)):
            state.clear()
        self._unbind(group, p)
        self._init_state(group, p)

    @property
    def leaving(self) -> bool:
        """Whether parameters that are bound were frozen, taken out of the groups, or are never compressed any more."""
        return not (self._trained().issuperset(map(id, self.bindings)) and self.never.isdisjoint(self.bindings))

    def _trained(self) -> set[int]:
        return {id(p) for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad}

    @property
    def all_known(self) -> bool:
        """Whether ``find_new`` would find nothing."""
        return self._trained().issubset(map(id, self.exact_steps))

    @property
    def all_current(self) -> bool:
        """Whether groups are as they were, the engine is prepared for them, and ``refresh`` would change nothing."""
        if not self.prepared:
            return False
        trained, known = self._trained(), set(map(id, self.exact_steps))
        same = trained.issuperset(map(id, self.bindings)) and known.issuperset(trained)
        same = same and known.issubset(map(id, self.ordered()))
        return same and not (self.reclassified() or self._moved() or self.edited() or self._without_momentum())

    def _moved(self) -> list[torch.Tensor]:
        """The compressed parameters that have other memory than the engine, or another state."""
        states = self.optimizer.state
        return [p for p, b in self.bindings.items() if b.state is not states.get(p) or not b.is_current()]

    # -- one step -------------------------------------------------------------------------------------------------

    def plan(self, sends: Sends = Sends.CONTRIBUTION, loss_scale: float = 1.0) -> Plan:
        """The next compressed step, with the groups' hyperparameters of now."""
        grad_scale = (self.engine.collectives.size if self.sum_gradients else 1.0) / loss_scale
        groups = self.optimizer.param_groups or [{**self.optimizer.defaults, "params": []}]
        of = dict[int, Rule]()
        self.say_overruled()
        for group in groups:
            rule = self.adapter.rule(group, grad_scale)
            if self.schedule is not None:
                rule = zero_one_adam.of(rule, sends)  # type: ignore[arg-type]
            if len(groups) > 1:
                of.update(dict.fromkeys(map(id, group["params"]), rule))
        # What was taken out of the groups is flushed, which is the same by any rule.
        return self.engine.plan(
            sends, [of.get(id(p), rule) for p in self.bindings] if of else [rule] * len(self.bindings)
        )

    def gradients(self) -> Mapping[int, Array]:
        """The compressed parameters' gradients, by their number; their weights are where the engine works on them."""
        self.pull()
        return _Gradients(list(self.bindings.values()))

    def pull(self) -> None:
        """Put the compressed parameters' weights where the engine works on them."""
        for binding in self.bindings.values():
            if not binding.in_place:
                binding.pull()

    def push(self) -> None:
        """Take them back from there; those that were worked on in place have changed, which PyTorch has to know."""
        for binding in self.bindings.values():
            if not binding.in_place:
                binding.push()
        torch.autograd.graph.increment_version([b.p for b in self.bindings.values() if b.in_place])

    def forget_frozen(self) -> None:
        """Gradients of parameters that were frozen since the backward pass: they are this worker's alone."""
        for p in self.ordered():
            if not p.requires_grad:
                p.grad = None

    def check_trained(self) -> None:
        """Raise if nothing is trained in this step, and there are gradients: the plain optimizer would step. Local."""
        here = self.ordered()
        if not any(p.requires_grad for p in here) and any(nonzero([p.grad for p in here])):
            raise ConfigurationError(
                "all parameters are frozen when step() or synchronize() is called, and have gradients, which would "
                "neither be averaged nor taken: call requires_grad_(False) after step()"
            )

    def start_momentum(self) -> None:
        """Before an exact step: the wrapped optimizer's first step treats no momentum and zeros differently."""
        for p in [p for p in self.unstarted if p.grad is not None]:
            self.optimizer.state[p][self.adapter.momentum_key] = None
            self.unstarted.discard(p)

    def exact_step_alone(self, exact_step: Callable[[], None], exact: Sequence[torch.Tensor]) -> None:
        """The wrapped optimizer's step of ``exact``, which is counted: it passes over those without a gradient."""
        idle = self._idle(exact)
        with without_gradients(self.bindings):
            exact_step()
        begun = self.steps < self.warmup.steps
        for p in exact:
            if id(p) not in idle:
                self.exact_steps[p] += 1
            elif begun:
                self.exact_steps[p] += 1
                self.idle[p] = self.exact_steps[p]
                self.adapter.forget_layer(self.optimizer.state[p])
            else:  # what comes later has its warm-up from its first gradient on, which may be one of few
                self.adapter.restart(self.optimizer.state[p], 0)
                self._begin_warmup(p)

    def _idle(self, exact: Sequence[torch.Tensor]) -> set[int]:
        """Of the parameters ``exact``, by id, those that have no gradient in this step and have had none before, where
        a second moment will be frozen; alike on all workers."""
        key = self.adapter.variance_key
        if key is None or self.warmup.steps >= FOREVER:
            return set()
        unmet = [p for p in exact if self.compressible(p) and self._is_unmet(p)]
        # A second moment may have seen gradients of a plain optimizer, or of an earlier warm-up.
        before = [None if self.exact_steps[p] else self.optimizer.state.get(p, {}).get(key) for p in unmet]
        known = nonzero([*before, *(p.grad for p in unmet)])
        return {id(p) for p, *found in zip(unmet, known, known[len(unmet) :], strict=False) if not any(found)}

    def _is_unmet(self, p: torch.Tensor) -> bool:
        """Whether ``p`` has had no gradient in its exact steps, if it has had such steps."""
        return self.idle.get(p, 0) == self.exact_steps[p]

    def _is_young(self, p: torch.Tensor) -> bool:
        """Whether the second moment of ``p`` has seen gradients, and too few to be frozen."""
        seen = self.exact_steps[p] - self.idle.get(p, 0)
        return 0 < seen < least(self.warmup.steps)

    def _gradients_seen(self, p: torch.Tensor) -> int:
        """Steps that the second moment of ``p`` has seen since its first gradient; all, if it has had none."""
        if 0 < (idle := self.idle.get(p, 0)) < self.exact_steps[p]:
            return self.exact_steps[p] - idle
        return int(self.optimizer.state[p].get("step", self.exact_steps[p]))

    def moved(self, sends: Sends) -> None:
        """The engine has taken a step that ``sends`` this: so have the framework's tensors."""
        if sends is Sends.MEAN:
            for binding in self.bindings.values():
                binding.state[VARIANCE_STEPS] = binding.tensor.variance_steps
                binding.coarsen(self.adapter.variance_key)
        self.push()
        counters = [b.state["step"] for b in self.bindings.values() if "step" in b.state]
        if counters:
            add_to_all(counters, 1)

    @property
    def learning_rate(self) -> float:
        """The mean of those of the groups, each of which may have a schedule of its own: it rises as long as one does
        and the others stay. Groups in which nothing is compressed count if there are no others."""
        groups = [group for group in self.optimizer.param_groups if group.get("lr") is not None]
        sent = [group for group in groups if any(map(self.compressible, group["params"]))]
        rates = [float(group["lr"]) for group in sent or groups]
        return sum(rates) / len(rates) if rates else 0.0

    def power(self) -> tuple[float, float] | None:
        """See ``driver.Together``."""
        if not (key := self.adapter.variance_key):
            return None
        found = [p for p in self.exact() if self.compressible(p) and not self._is_unmet(p)]
        betas = self.optimizer.param_groups[0].get("betas")
        beta2 = UNKNOWN if betas is None else float(betas[1])
        norms = [math.sqrt(float(sum_of_squares(self.optimizer.state[p][key]))) for p in found]
        pairs = zip(norms, map(self._gradients_seen, found), strict=True)
        return math.hypot(*(unbiased(norm, beta2, seen) for norm, seen in pairs)), beta2

    # -- what all workers compare ---------------------------------------------------------------------------------

    def describe(self) -> str:
        """What is trained and how far it is, in one text that is the same on all workers."""
        key = (self.version, len(self.names), [(p.requires_grad, p.dtype, p.shape) for p in self.ordered()])
        if key != self._described[0]:
            bound = [self.names[p] for p in self.ordered() if p in self.bindings]
            text = f"{self.phase} {self.warmup} {self.schedule} {self._rows()} {bound}"
            self._described = key, hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return f"{self._described[1]} {self.lineage} {sum(self.exact_steps.values())}"

    def _rows(self) -> dict[str, tuple[object, ...]]:
        """By name of the parameter, what ``COMPARED`` says."""
        known = [(p, self.names[p]) for p in self.ordered() if p in self.names]
        return {
            name: (tuple(p.shape), p.dtype, p.stride(), not p.requires_grad, p in self.never, place)
            for place, (p, name) in enumerate(known)
        }

    def hyperparameters(self) -> str:
        """Those of all groups, as a text that is the same on all workers."""
        return repr([self.adapter.hyperparameters(group) for group in self.optimizer.param_groups])

    def facts(self) -> dict[str, dict[str, object]]:
        """What ``describe`` and ``hyperparameters`` are made of, in words."""
        counts, compared = dict[str, object](), self._rows().items()
        trained = {
            text.format(name): value for name, row in compared for text, value in zip(COMPARED, row, strict=True)
        }
        for p, name in ((p, self.names[p]) for p in self.ordered() if p in self.names):
            counts |= {
                f"the number of warm-up steps of {name}": self.exact_steps.get(p, 0),
                f"whether {name} is compressed by now": p in self.bindings,
            }
        return {
            "arguments": {
                "whether the recipe is 'exact'": self.warmup.steps == FOREVER and self.engine.recipe.warmup == EXACT,
                "warmup_steps": type(self.warmup).__name__,
                "schedule": self.schedule,
            },
            "trained": {"the number of parameters": len(self.ordered()), **trained},
            "progress": {"which state was loaded": self.lineage or "none", "the warm-up": self.warmup, **counts},
            "hyperparameters": {
                f"{WORDS.get(key, key)} of group {number}": value
                for number, group in enumerate(self.optimizer.param_groups)
                for key, value in self.adapter.hyperparameters(group).items()
            },
        }

    def checksums(self) -> dict[str, int]:
        """CRC-32 of the bytes of every parameter and of its optimizer state."""
        found: dict[str, int] = {}
        for p in self.ordered():
            name = self.names.get(p, "")
            own = {name: p, **{f"{name} ({key})": value for key, value in self._compared(p).items()}}
            for key, value in own.items():
                if isinstance(value, int):
                    found[key] = value
                elif has_bytes(value):
                    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                    found[f"{key}#{len(found)}" if key in found else key] = replicas.checksum(data.numpy())
        return found

    def _compared(self, p: torch.Tensor) -> Mapping[str, Any]:
        """What of the state of ``p`` is the same on all workers."""
        found: Mapping[str, Any] = self.optimizer.state.get(p, {})
        return found

    def digest(self, state_dict: Mapping[str, Any]) -> str:
        """A few values of each tensor of a state, and its progress: workers that loaded different states must not go
        on. With 0/1 Adam some of the state is each worker's own, and is left out."""
        found = hashlib.blake2b(digest_size=8)
        own = state_dict["param_groups"][0].get(STATE_KEY) if state_dict["param_groups"] else None
        found.update(repr(own).encode())
        for position, kept in sorted(state_dict["state"].items(), key=lambda item: str(item[0])):
            for key, value in sorted(kept.items()) if isinstance(kept, dict) else [("", kept)]:
                if has_bytes(value) and value.numel() and key not in self.adapter.local_keys:
                    flat = value.detach().reshape(-1)
                    sample = flat[:: max(1, flat.numel() // SAMPLE)].to("cpu", torch.float64)
                    found.update(f"{position} {key}".encode() + sample.numpy().tobytes())
        return found.hexdigest()

    # -- state ----------------------------------------------------------------------------------------------------

    def taken(self, p: torch.Tensor) -> int:
        """Optimizer steps that ``p`` has had."""
        binding = self.bindings.get(p)
        return int(self.optimizer.state.get(p, {}).get("step", 0)) if binding is None else binding.tensor.step

    def common_steps(self, p: torch.Tensor) -> int:
        """Of the gradients that the second moment of ``p`` has seen, those that were the workers' mean."""
        seen = self.seen(p)
        return self.taken(p) if seen is None else seen

    def progress(self) -> Progress:
        """How far the run is."""
        parameters, known = self.ordered(), self.engine.feedback.rates
        rates = [known.get(self.names.get(p, ""), 0.0) for p in parameters]
        return Progress(
            steps=self.steps,
            **{**counts(self.engine, self.warmup), "rates": rates},
            exact_steps=[self.exact_steps.get(p, 0) for p in parameters],
            variance_steps=[self.seen(p) or 0 for p in parameters],
            beta2=[self.beta2(p) or 0.0 for p in parameters],
            taken=[self.taken(p) if self.seen(p) else 0 for p in parameters],
            unstarted=[i for i, p in enumerate(parameters) if p in self.unstarted],
            common=[self.common_steps(p) for p in parameters],
            idle=[self.idle.get(p, 0) for p in parameters],
            names=[self.names.get(p, "") for p in parameters],
        )

    def export(self, state: dict[str, Any]) -> None:
        """Complete the wrapped optimizer's ``state``: a plain optimizer can continue from it; with the run's progress.

        Second moments are then new tensors, where they are others: those of the running optimizer stay what they are.
        """
        key, packed = self.moments.variance_key, state["state"]
        self._exported = {}
        for group, position, p in self.enumerated():
            seen, entries = self.seen(p), packed.get(position, {})
            if not OWN_KEYS.isdisjoint(entries):
                packed[position] = {k: value for k, value in entries.items() if k not in OWN_KEYS}
            if seen is None or key is None or key not in entries:
                continue
            by = self.moments.variance_factor(group, self.taken(p), seen, self.beta2(p))
            if by != 1.0:
                self._exported[p] = packed[position][key] * by
                packed[position][key] = self._exported[p]
        state["param_groups"][0][STATE_KEY] = self.progress().state_dict()

    def adopt(self) -> bool:
        """Take over the progress that is in the first group: ``hvd.broadcast_optimizer_state`` puts it there, and a
        plain optimizer that has loaded a state of ours and is wrapped now has it there. Whether there was any."""
        groups = self.optimizer.param_groups
        own = groups[0].pop(STATE_KEY, None) if groups else None
        if own is not None:
            self.load(own, None, keep_feedback=True)
            self.lineage = self.digest(self.optimizer.state_dict())
        self._exported = {}
        return own is not None

    def drop_made_state(self) -> None:
        """Before the state counts: one that was made to be shown, unless Horovod has broadcast into it since."""
        if self.made_state and STATE_KEY not in self.optimizer.param_groups[0]:
            self.optimizer.state.clear()
        self.made_state = False

    def _take_rates(self, progress: Progress) -> None:
        rates = self._by_position(progress.rates)  # parameters that were never trained have no name
        self.engine.feedback.rates = {self.names[p]: rate for p, rate in rates.items() if p in self.names}

    def load(self, own: Any, whole: Mapping[str, Any] | None, *, keep_feedback: bool) -> None:
        """Take over ``own``, the ``Progress`` of a state; None means a state of a plain optimizer, which warms up.

        ``whole`` is the wrapped optimizer's state that was loaded before, None if it is where it belongs.
        """
        progress = Progress.of(own, len(self.ordered()), added=whole is None)
        self.made_state = False
        self.bindings = {}
        self._marks.clear()
        self._find_never()
        self.changed()
        if own is None:  # the wrapped optimizer has saved it, perhaps as it is within ours
            for group, _, p in self.enumerated():
                if self.seen(p) is not None:
                    self._take_back(group, p)
        for state in plain.entries_of(self.optimizer.state):
            for key in FROZEN_KEYS:
                state.pop(key, None)
        for group, _, p in self.enumerated() if self.adapter.makes_state else ():
            state = self.optimizer.state.get(p, {})
            if isinstance(step := state.get("step"), torch.Tensor):  # accelerate moves it to the GPU
                state["step"] = step.to(self.adapter.counter(group, p).device)
        if not keep_feedback:
            self.engine.feedback.reset()
        self.steps = progress.steps
        self.warmup.load_state_dict(progress.warmup)
        self.engine.skipped, self.engine.exchanges = progress.skipped, progress.exchanges
        if whole is None:  # Horovod has received into what it got from ``state_dict``
            for p, value in self._exported.items():
                self.optimizer.state[p][self.moments.variance_key] = value
        else:
            self._take_rates(progress)
        self._load_states(progress, whole, is_plain=own is None)
        self.just_started = False
        self.remember()

    def _load_states(self, progress: Progress, whole: Mapping[str, Any] | None, *, is_plain: bool) -> None:
        """Each parameter's part of ``load``; ``is_plain`` if the state is one of a plain optimizer."""
        self.unstarted.clear()
        for group, _, p in self.enumerated():
            if p.requires_grad:
                self._init_state(group, p)
        counts, seen = self._by_position(progress.exact_steps), self._by_position(progress.variance_steps)
        for p, count in counts.items():
            if p in self.exact_steps:  # what was compressed and is frozen now will have a whole new warm-up
                self.exact_steps[p] = count if p.requires_grad or not seen[p] else 0
        idle = self._by_position(progress.idle)
        self.idle = {p: steps for p, steps in idle.items() if 0 < steps <= self.exact_steps.get(p, 0)}
        if whole is not None:
            self._keep_float32(whole)
        unstarted = set(progress.unstarted)
        self.unstarted |= {p for _, position, p in self.enumerated() if position in unstarted}
        self._load_moments(progress, seen)
        self.start_compression()

    def _by_position(self, numbers: Sequence[Number]) -> dict[torch.Tensor, Number]:
        """A number for each parameter; 0 for those that were added since."""
        zero: Number = 0
        return dict(zip(self.ordered(), chain(numbers, repeat(zero)), strict=False))

    def _load_moments(self, progress: Progress, seen: Mapping[torch.Tensor, int]) -> None:
        """Second moments from which compressed steps, or exact ones, continue; the state has them as in ``plain``."""
        key = self.adapter.variance_key
        taken, beta2 = self._by_position(progress.taken), self._by_position(progress.beta2)
        for group, _, p in self.enumerated():
            steps = seen[p]
            if not steps:
                continue
            state, before = self.optimizer.state[p], None
            if key is not None and key in state:
                now, by = int(state["step"]), 1.0
                if now == taken[p]:
                    before = beta2[p] or None
                    by = self.adapter.variance_factor(group, now, steps, before)
                else:  # a plain optimizer has gone on from there
                    steps = now
                state[key] = plain.restored(state[key], by)
            if self.warmup.phase(self.exact_steps.get(p, 0)) is Phase.COMPRESSED and self.compressible(p):
                self.set_seen(group, p, steps, before)
            elif key is None or key in state:  # of one that is frozen by now, the state may have been left out
                self.adapter.rewind(group, state, steps, before)

    def _saved(self, whole: Mapping[str, Any]) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """Each parameter, and its entries in the state ``whole``."""
        numbers = (number for group in whole["param_groups"] for number in group["params"])
        return [(p, whole["state"].get(number, {})) for number, p in zip(numbers, self.ordered(), strict=True)]

    def _keep_float32(self, whole: Mapping[str, Any]) -> None:
        """PyTorch casts loaded state to the parameter's dtype; compressed parameters keep theirs in float32."""
        for p, loaded in self._saved(whole):
            compressed = self.warmup.phase(self.exact_steps.get(p, 0)) is Phase.COMPRESSED
            if loaded:
                self.adapter.keep_float32(p, loaded, self.optimizer.state[p], compressed=compressed)


@contextmanager
def without_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """The wrapped optimizer passes over ``parameters``."""
    grads = {p: p.grad for p in parameters}
    for p in grads:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in grads.items():
            p.grad = grad


class _Gradients(dict[int, Any]):
    """Made when they are looked at: of buckets that were sent during backward, nobody does."""

    def __init__(self, bindings: Sequence[Binding]) -> None:
        super().__init__()
        self._bindings = bindings

    def __missing__(self, number: int) -> Any:
        grad = self[number] = self._bindings[number].grad()
        return grad


def _new_name(group: Mapping[str, Any], index: int, position: int, taken: set[str]) -> str:
    names = names_in(group)
    if not names:  # a group that was removed may have taken this group's number
        made = (f"{UNNAMED}{number}.{position}" for number in numbers_from(index))
        return next(name for name in made if name not in taken)
    name: str = names[position]
    if name in taken:
        raise ConfigurationError(f"add_param_group: the name {name!r} is taken by another parameter")
    return name

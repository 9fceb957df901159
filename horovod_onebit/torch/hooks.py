"""The gradients of one optimizer, from the hook that sees them to where they are averaged or sent.

In exact steps this is what ``hvd.DistributedOptimizer`` does: a hook for each parameter lets its gradient leave when it
is final (``exact``). Unlike there, ``p.grad`` keeps this worker's own gradient until ``step``, ``synchronize`` or
``clip_grad_norm_``, so that it can be changed in between. Afterwards the hook counts down to buckets, which are encoded
and sent when their last gradient is there.

When to send is each worker's own affair: a message that leaves during backward and one that leaves in ``step`` are the
same collective. What must not happen is that something changes after it was sent. So every gradient
is remembered as it was when it was final; ``step`` compares, and tells all workers.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_onebit.checks import whole
from horovod_onebit.coded import codes
from horovod_onebit.engine import Engine, Plan
from horovod_onebit.errors import ConfigurationError, UnsupportedError, some
from horovod_onebit.handshake import Finite
from horovod_onebit.rules import Rule
from horovod_onebit.tasks import Task
from horovod_onebit.torch import exact
from horovod_onebit.torch.arguments import Arguments
from horovod_onebit.torch.arrays import Binding, gradient_of, is_dense
from horovod_onebit.torch.coded import Coded
from horovod_onebit.torch.early import Early
from horovod_onebit.torch.parameters import Parameters
from horovod_onebit.torch.private import untraced
from horovod_onebit.warmup import Phase

logger = logging.getLogger("horovod_onebit")

SAMPLE = 16
"""Elements of each gradient whose bits are remembered; of the others, the sum."""
_owners: Any = WeakTensorKeyDictionary()
"""Parameter -> (its hook or None, whose it is): a hook lives as long as its parameter, and there may be only one."""


class Scaling(NamedTuple):
    """What a step is told by a ``GradScaler``.

    Attributes:
        used: whether there is one, which lives with Inf.
        scale: by what gradients still have to be divided; None if by nothing.
        overflowed: whether it has found Inf or NaN in this worker's gradients; they may have been clipped since.
    """

    used: bool = False
    scale: float | None = None
    overflowed: bool = False


class Where(Enum):
    """Where the gradients of the next step are."""

    NOWHERE = "none was computed since the last step"
    LOCAL = "computed, averages or messages perhaps on their way"
    AGREED = "averaged in warm-up, or local by agreement of all workers: for clipping, or a GradScaler"
    SYNCHRONIZED = "the same, because the user called synchronize()"

    @property
    def settled(self) -> bool:
        return self in (Where.AGREED, Where.SYNCHRONIZED)


@dataclass(frozen=True)
class _Mark:
    """A gradient when it was final. Changes by way of ``.data`` do not show in its version, but in its checksum."""

    grad: torch.Tensor
    version: int
    checksum: tuple[int, bytes]

    @classmethod
    def of(cls, grad: torch.Tensor) -> _Mark:
        return cls(grad, grad._version, _checksum(grad))

    def differs(self, grad: torch.Tensor | None) -> bool:
        return grad is not self.grad or grad._version != self.version or _checksum(grad) != self.checksum


class Watches:
    """What is hooked to the gradients of one ``DistributedOptimizer``; each parameter has one at a time."""

    def __init__(self) -> None:
        self._lost: set[torch.Tensor] = set()  # parameters that another one has taken over

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """``take`` the ``parameters``."""
        raise NotImplementedError

    def computed(self, p: torch.Tensor) -> None:
        """A backward pass has added to the gradient of ``p``."""
        raise NotImplementedError

    def taken_over(self, p: torch.Tensor) -> None:
        """Another DistributedOptimizer was built over ``p``."""
        self._lost.add(p)

    def forget(self, parameters: set[torch.Tensor]) -> None:
        """``parameters`` were taken out of the optimizer."""
        self._lost -= parameters
        for p in parameters:
            release(p, self)

    def check_owned(self, names: Mapping[torch.Tensor, str]) -> None:
        """Take back the parameters whose other DistributedOptimizer is gone. Raise ``ConfigurationError`` if there are
        others that were taken over; they have ``names``. Local."""
        if free := [p for p in self._lost if owner(p) in (None, self)]:
            self._lost.difference_update(free)
            self.add(free)
        if self._lost:
            raise ConfigurationError(
                f"parameter {some(sorted(names[p] for p in self._lost))} belongs to a DistributedOptimizer that was "
                "built later: use that one, and one optimizer for each parameter"
            )


class GradientHooks(Watches):
    """Belongs to one ``DistributedOptimizer``.

    Attributes:
        automatic: ``step()`` synchronizes.
        passes: backward passes that make a step.
        recallable: see ``agreement.Compared``.
        means: the exact averages of the warm-up, and of what is not compressed after it.
        coded: averages gradients of the warm-up in few bits; None if they are averaged exactly.
    """

    recallable = True

    def __init__(self, parameters: Parameters, engine: Engine, arguments: Arguments, *, overlap: bool) -> None:
        super().__init__()
        self._parameters = parameters
        self._engine = engine
        self._arguments, self._described = arguments, str(arguments)
        self.where = Where.NOWHERE
        self.automatic = True
        self.passes = arguments.backward_passes_per_step
        self._lock = threading.Lock()
        self._watched: dict[torch.Tensor, int] = {}  # the passes that are left
        self.means = exact.means(arguments, engine, parameters.names)
        self._sends_early = overlap
        self._averages_early = overlap
        self._marks: dict[torch.Tensor, _Mark] = {}
        self._proven = False  # a step has been seen whose gradients did not change between backward() and step()
        self._complete = False  # whether, in the warm-up, all that is trained was known at this step's first gradient
        self._warm = True  # whether this step is one of the warm-up, by its first gradient
        # See ``_surroundings``; in warm-up, of the first gradient of this step.
        self._noticed: tuple[list[object], dict[int, int]] | None = None
        self._early = Early(engine)  # of compressed steps
        self._stream: torch.cuda.Stream | None = None  # of the last hook of this step
        self._version = -1  # of the parameters, when the first message of this step was sent
        self.coded: Coded | None = None
        if codes(engine.recipe, parameters.warmup):
            self.coded = Coded(parameters, engine, sums=arguments.sums, lane=arguments.transport.lane())

    # -- the hook -------------------------------------------------------------------------------------------------

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Watch ``parameters`` from now on."""
        for p in parameters:
            self._watched[p] = self.passes
            take(p, self)
        self._watched = self._parameters.in_order(self._watched)
        if len({p.device for p in self._watched if p.is_cuda}) > 1:  # a hook may run for another GPU than a kernel
            self.send_late("parameters are on several GPUs", averages=True)
        for p in parameters:  # one that was unfrozen has had a backward pass without the hook
            self._densify(p)

    def forget(self, parameters: set[torch.Tensor]) -> None:
        """Stop watching ``parameters``, which were taken out of the optimizer."""
        super().forget(parameters)
        self._forget_coded(parameters)
        for p in parameters:
            self._watched.pop(p, None)
            self._marks.pop(p, None)
            self.means.forget(p)

    @untraced
    def computed(self, p: torch.Tensor) -> None:
        """The hook: a backward pass has added to the gradient of ``p``. Those of several GPUs call it at once."""
        with self._lock:
            self._computed(p)

    def _computed(self, p: torch.Tensor) -> None:
        if p.is_cuda:
            if torch.cuda.is_current_stream_capturing():  # nothing is computed yet
                self.send_late("backward() is captured in a CUDA graph", averages=True)
                return
            self._follow_stream(p.device)
        left = self._watched[p] - 1
        if left < 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally. If another optimizer takes the "
                "steps now, delete this one before: del optimizer; gc.collect()"
            )
        self._densify(p)
        self._watched[p] = left
        if self.where is not Where.LOCAL:
            if self._parameters.adopt() and self.coded is not None:
                self.coded.forget()
            self.where = Where.LOCAL
            self._warm = self._parameters.phase is Phase.WARMUP
            self._noticed = self._surroundings() if self._sends_early and self._warm else None
            self._complete = self._warm and self._parameters.all_known
        if p.grad is None or left:
            return
        if self._warm:
            if self._averages_early:
                self._marks[p] = _Mark.of(p.grad)
                self._leave(p)
        elif self._sends_early and p in self._parameters.bindings:
            self._marks[p] = _Mark.of(p.grad)
            self._early.computed(p, self._begin, _gradient)

    def _follow_stream(self, device: torch.device) -> None:
        """Order this hook's stream after that of the hook before: a message may have gradients of both."""
        now = torch.cuda.current_stream(device)
        if self._stream is not None and self._stream != now:
            now.wait_stream(self._stream)
        self._stream = now

    def _leave(self, p: torch.Tensor) -> None:
        """In the warm-up the gradient of ``p`` is final. Beside messages in few bits, exact means that are paired by
        order wait for ``step``: NCCL wants what two groups carry in one order on all workers. So do all in a step in
        which a parameter is new, with whose mean others travel."""
        if not self._complete:
            return
        if self._takes_coded(p):
            if self.coded is not None and self._proven:
                self.coded.computed(p, self._in_few_bits)
        elif self._means_leave:
            self.means.begin(self._exact)
            self.means.computed(p)

    @property
    def _means_leave(self) -> bool:
        """Whether exact means of the warm-up may leave before ``step``."""
        return self.coded is None or not self._arguments.transport.in_order

    def _densify(self, p: torch.Tensor) -> None:
        if p.grad is None or not p.grad.is_sparse:
            return
        if not self._arguments.sparse_as_dense:
            raise UnsupportedError(
                f"parameter {self._parameters.names[p]!r} has a sparse gradient: pass sparse_as_dense=True to "
                "DistributedOptimizer, or build the embedding with sparse=False"
            )
        densify([p])

    # -- messages that leave during backward ----------------------------------------------------------------------

    def _begin(self) -> tuple[Plan | None, Mapping[torch.Tensor, Binding]]:
        """At the first gradient of a step: the step whose messages may leave before ``step()``, if they may."""
        parameters, engine = self._parameters, self._engine
        if not self._proven or engine.workers_changed or parameters.schedule is not None:
            return None, {}
        if not parameters.all_current:
            return None, {}
        self._version = parameters.version
        return parameters.plan(), parameters.bindings

    def leave(self) -> None:
        """Let leave what may, gradients that are missing as zeros, before this worker waits for the others: their GPUs
        may wait for its messages. Local."""
        if self.coded is not None:
            self.coded.leave()
        if self.where is Where.LOCAL and self._warm and self._averages_early and self._means_leave:
            self.means.leave(self._exact)
        self._early.leave()

    def _surroundings(self) -> tuple[list[object], dict[int, int]]:
        """What messages depend on besides gradients: hyperparameters, and the memory of parameters, by their ids."""
        groups, rule = self._parameters.optimizer.param_groups, self._parameters.adapter.rule
        return [_coding(rule(group, 1.0)) for group in groups], {id(p): p.data_ptr() for p in self._watched}

    def _has_other_surroundings(self) -> bool:
        """Than those that were noticed; parameters that are watched since do not count."""
        if self._noticed is None:
            return False
        (codings, places), (codings_now, places_now) = self._noticed, self._surroundings()
        return codings != codings_now or any(places_now.get(i, place) != place for i, place in places.items())

    def edited(self) -> bool:
        """Whether anything has changed that was sent already; learns to send later where it can."""
        parameters, plan = self._parameters, self._early.plan
        changed = [p for p, mark in self._marks.items() if mark.differs(p.grad)]
        self._proven |= bool(self._marks) and not changed
        if parameters.phase is Phase.WARMUP:
            if plan is not None:  # by the first gradient it was a compressed step, whose messages have left
                return True
            if self._has_other_surroundings():
                self.send_late("hyperparameters or parameters change between backward() and step()")
            stale = self.means.stale(self._exact)
            return bool(changed) or stale or (self.coded is not None and self.coded.stale(self._in_few_bits))
        if plan is None:
            if changed:
                self.send_late("gradients change between backward() and step()")
            return False
        if changed:
            logger.error("gradients changed after they were sent: %s", some([parameters.names[p] for p in changed]))
        if changed or self._version != parameters.version:
            return True
        both = zip(plan.rules, parameters.plan().rules, strict=True)
        return any(sent is not now and _coding(sent) != _coding(now) for sent, now in both)

    def send_late(self, reason: str, *, averages: bool = False) -> None:
        """From the next step on, send in ``step``: the gradients are not final during backward.

        ``averages``: those of warm-up, too.
        """
        if self._sends_early or (averages and self._averages_early):
            self._sends_early, self._averages_early = False, self._averages_early and not averages
            self._engine.say(logging.INFO, "gradients are sent in step() and not during backward(): %s", reason)

    # -- exact averages -------------------------------------------------------------------------------------------

    @property
    def sent_finite(self) -> Finite:
        """Whether all that is averaged in few bits was sent, and was finite."""
        return Finite.UNKNOWN if self.coded is None else self.coded.sent_finite

    def average(self, *, again: bool = False, certain: bool = False) -> Task[None]:
        """Start what the hooks did not, wait for everything; the gradients are then the average (or the sum).

        ``again``: on some worker gradients were changed after their averages had left. What left is dropped, and the
        gradients of now are averaged. ``certain``: otherwise ``sent_finite`` is so on all workers.
        """
        exact, in_few_bits = self._exact(), self._in_few_bits()
        if again:
            yield from self.means.recall(exact)
            if self.coded is not None:
                yield from self.coded.recall(self._overwritten())
        arrive = self._mean(exact)
        if (coded := self.coded) is None:
            yield from arrive
        else:
            certain = certain and not again
            yield from coded.average(in_few_bits, arrive, certain=certain) if in_few_bits else arrive
            learning = [p for p in exact if coded.learns(p)]
            if learning and gradients_finite(learning):
                coded.observe(learning)
        self.drop()

    def _mean(self, exact: Sequence[torch.Tensor]) -> Task[bool]:
        """Start the means of ``exact`` when this is waited for: after messages in few bits, on all workers. Whether
        they are finite when they have arrived, where somebody asks."""
        yield from self.means.start(exact)
        return self.coded is None or gradients_finite(exact)

    def _exact(self) -> list[torch.Tensor]:
        """What is averaged as it is."""
        return [p for p in self._watched if p.requires_grad and not self._takes_coded(p)]

    def _in_few_bits(self) -> list[torch.Tensor]:
        """What is averaged so."""
        return [p for p in self._watched if p.requires_grad and self._takes_coded(p)]

    def _takes_coded(self, p: torch.Tensor) -> bool:
        return self.coded is not None and self.coded.takes(p)

    # -- what all workers compare ---------------------------------------------------------------------------------

    def describe(self) -> str:
        """Arguments that must be the same on all workers."""
        coded = "" if self.coded is None else f"{self.coded.describe()} {self.coded.generation}"
        return f"{self._described} {self.passes} {coded}"

    def arguments(self) -> dict[str, object]:
        """Arguments that ``describe`` is made of, by name."""
        return {**self._arguments.named(), "backward_passes_per_step": self.passes}

    def progress(self) -> dict[str, object]:
        """What else ``describe`` is made of."""
        coded = {} if self.coded is None else self.coded.describe()
        seen = {f"averages of the gradient of {name} before": count for name, count in coded.items() if count}
        return {"steps given up": self._engine.generation, **seen}

    def fingerprint(self) -> str:
        """Of every averaged gradient: they must be the same on all workers."""
        sums = [None if p.grad is None else _checksum(p.grad) for p in self._parameters.exact()]
        return hashlib.blake2b(repr(sums).encode(), digest_size=8).hexdigest()

    # -- the end --------------------------------------------------------------------------------------------------

    def set_passes(self, passes: int) -> None:
        self.passes = whole("backward_passes_per_step", passes)
        self._cancel(by_all=False, restore=True)  # the gradients stay, and are sent in ``step``
        self.drop()
        self.forget_marks()

    def used(self) -> None:
        """A step was taken with the gradients, or passed over."""
        if self.where.settled:
            self.where = Where.NOWHERE

    def drop(self) -> None:
        """Forget gradients that were computed and not yet used."""
        self.means.drop()
        self._watched = dict.fromkeys(self._watched, self.passes)
        if self.where is Where.LOCAL:
            self.where = Where.NOWHERE

    def forget_marks(self) -> None:
        """Forget what gradients were like when they became final: the step is over, or they may change from now on."""
        self._marks.clear()
        self._noticed = self._stream = None
        self._early.over()

    def cancel(self, *, by_all: bool, restore: bool = True) -> None:
        """Drop what is under way: all workers do, which refuse the step that was begun and keep their gradients; or
        this one alone, which has loaded another state. For ``restore`` see ``Engine.cancel``. Local."""
        self._cancel(by_all=by_all, restore=restore)
        if by_all:  # of what was sent, those whose states were edited since have no residuals
            gone = [b.tensor.name for b in self._early.parts if b.p not in self._parameters.bindings]
            self._engine.feedback.reset(gone)
        elif self.coded is not None:
            self.coded.forget()
        self._clear(settled=by_all)

    @torch.no_grad()
    def _cancel(self, *, by_all: bool, restore: bool) -> None:
        self._engine.cancel(by_all=by_all, restore=restore, averages=self.means.begun)
        if self.coded is not None:
            self.coded.cancel(by_all=by_all)
        self._lose_overwritten()

    def _overwritten(self) -> list[torch.Tensor]:
        """The parameters whose gradients have changed in place since they were final."""
        changed = [p for p, mark in self._marks.items() if p.grad is mark.grad and mark.differs(p.grad)]
        return [p for p in changed if p in self._parameters.names]

    def _lose_overwritten(self) -> None:
        """What was sent has been taken back. Where a gradient was changed in place since, so that its residual was not
        restored, that is zero."""
        lost = self._overwritten()
        self._engine.feedback.reset([self._parameters.names[p] for p in lost])
        if self.coded is not None:
            self.coded.reset_residuals(lost)

    def forget_world(self) -> None:
        """Horovod was restarted: nothing is under way."""
        self._clear()

    def end_averages(self, parameters: Iterable[torch.Tensor]) -> None:
        """The gradients of ``parameters`` are averaged no more."""
        self.means.end()
        self._forget_coded(parameters)

    def _forget_coded(self, parameters: Iterable[torch.Tensor]) -> None:
        if self.coded is not None:
            self.coded.forget([self._parameters.names[p] for p in parameters])

    def _clear(self, *, settled: bool = False) -> None:
        """Nothing is under way; ``settled`` gradients stay so: they are not to be averaged twice."""
        self.drop()
        self.forget_marks()
        if not (settled and self.where.settled and self._warm):  # after it, they are each worker's own
            self.where = Where.NOWHERE


def _gradient(binding: Binding) -> Any:
    """That of a parameter, flat, as the core sees it."""
    if not binding.in_place:
        binding.pull()
    return binding.grad()


def take(p: torch.Tensor, gradients: Watches, *, hooks: bool = True) -> None:
    """``p`` is trained by the DistributedOptimizer of ``gradients``, which with ``hooks`` watches its gradient; another
    one that had it before lets go of it."""
    let_go(p, gradients)
    own = weakref.ref(gradients)

    def hook(parameter: torch.Tensor) -> None:
        gradients = own()
        if gradients is not None:
            gradients.computed(parameter)

    _owners[p] = (p.register_post_accumulate_grad_hook(hook) if hooks else None, own)


def release(p: torch.Tensor, gradients: Watches) -> None:
    """Remove the hook of ``p``, if it is that of ``gradients``."""
    if owner(p) is gradients:
        let_go(p, gradients)


def owner(p: torch.Tensor) -> Watches | None:
    """That of the DistributedOptimizer that has ``p``; None if none has, or it is gone."""
    found: Watches | None = _owners[p][1]() if p in _owners else None
    return found


def let_go(p: torch.Tensor, successor: Watches) -> None:
    """Take ``p`` from the DistributedOptimizer that has it, if it is not the ``successor``'s."""
    if p in _owners:
        before = owner(p)
        handle, _ = _owners.pop(p)
        if handle is not None:
            handle.remove()
        if before is not None and before is not successor:
            before.taken_over(p)


def _checksum(grad: torch.Tensor) -> tuple[int, bytes]:
    """The sum of the bits of all elements, as whole numbers of 64 bits without carry, and the bits of some: hardly ever
    the same after a change. Nothing of a GPU's, which would have to be waited for."""
    if grad.device.type != "cpu" or grad.layout is not torch.strided or not grad.numel():
        return 0, b""
    grad = grad.detach()
    flat = grad.as_strided((grad.numel(),), (1,)) if is_dense(grad) else grad.contiguous().reshape(-1)
    sample: NDArray[Any] = flat[:: max(1, flat.numel() // SAMPLE)].contiguous().view(torch.uint8).numpy()
    raw: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    whole = len(raw) // 8 * 8
    words = raw[:whole].view(np.uint64)
    return int(words.sum(dtype=np.uint64)), sample.tobytes() + raw[whole:].tobytes()


def _coding(rule: Rule) -> dict[str, object]:
    """Of ``rule``, what a message depends on."""
    return {key: value for key, value in vars(rule).items() if key != "lr"}


@torch.no_grad()
def gradients_finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether all gradients of ``parameters`` are finite."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return exact.finite([g._values() if g.is_sparse else g for g in grads])


def densify(parameters: Iterable[torch.Tensor]) -> None:
    """Make the sparse gradients of ``parameters`` dense."""
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()


def unscale(parameters: Sequence[torch.Tensor], loss_scale: float) -> None:
    """Divide the gradients of ``parameters`` by ``loss_scale``."""
    for p in parameters:
        if p.grad is not None:
            gradient_of(p).mul_(1.0 / loss_scale)

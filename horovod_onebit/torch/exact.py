"""Exact means of gradients, most of which leave during the backward pass.

Horovod pairs allreduces by name: that of each gradient is started as soon as it is final (``ByName``).
``torch.distributed`` pairs them by order (``InOrder``): gradients travel together, those of the last layers first, as
soon as all of them are final and all before them have left. They have a group of their own, a ``Lane``, since they
leave before the workers have agreed on the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from horovod_onebit.engine import Engine
from horovod_onebit.exchange import Lane
from horovod_onebit.stats import allreduce_bytes
from horovod_onebit.tasks import Handle, Task, start
from horovod_onebit.torch.arguments import Arguments
from horovod_onebit.torch.arrays import gradient_of

FUSED = 25 * 2**20
"""Bytes of gradients that travel together, where they have to leave in one order."""
Started = tuple[Handle, Callable[[torch.Tensor], torch.Tensor]]
"""An allreduce, and what makes of its result what was given."""


class ByName:
    """The exact means of one ``DistributedOptimizer``, as Horovod's own takes them.

    A step is ``begin`` at the first gradient, ``computed`` for each one that is final, and ``start`` for all when the
    workers have agreed. ``exact`` are the parameters that it is about. The engine's generation, in names of
    collectives, is another one after what has left was dropped.
    """

    def __init__(self, arguments: Arguments, engine: Engine, names: dict[torch.Tensor, str]) -> None:
        self._arguments, self._engine, self._names = arguments, engine, names
        self._started: dict[Any, Started] = {}

    @property
    def begun(self) -> bool:
        """Whether something has left, and has not arrived or been dropped."""
        return bool(self._started)

    def stale(self, exact: Callable[[], Sequence[torch.Tensor]]) -> bool:
        """Whether something has left that is not of use for the means of ``exact``."""
        return False

    def begin(self, exact: Callable[[], Sequence[torch.Tensor]]) -> None:
        """A gradient of a step is there, perhaps the first. Local."""

    def computed(self, p: torch.Tensor) -> None:
        """The gradient of ``p`` is final: let it leave, if it may. Local."""
        self._start(p, in_place=False)

    def leave(self, exact: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Let all leave that may, as ``start`` does, before the workers have agreed: those that are missing as zeros.
        Local. (Horovod negotiates what is sent: nobody waits for what is missing.)"""

    def recall(self, exact: Sequence[torch.Tensor]) -> Task[None]:
        """Drop what some workers have let leave. Collective."""
        for p in exact:
            self._start(p, in_place=False)
        for handle, _ in self._started.values():
            yield handle
        self.drop()

    def start(self, exact: Sequence[torch.Tensor]) -> Task[None]:
        """Let all leave that has not. The task waits, and the gradients are then means, or sums. Collective."""
        for p in exact:
            self._start(p, in_place=True)
        return self._arrive()

    def _start(self, p: torch.Tensor, *, in_place: bool) -> None:
        if p not in self._started:
            name = f"{self._engine.generation}.{self._names[p]}"
            self._started[p] = self.allreduce(gradient_of(p).contiguous(), name, in_place=in_place)

    def _arrive(self) -> Task[None]:
        for p, (handle, decompress) in self._started.items():
            result = decompress((yield handle))
            assert p.grad is not None
            if result.data_ptr() != p.grad.data_ptr():
                p.grad.copy_(result)

    def fused(
        self, exact: Sequence[torch.Tensor], loss_scale: float | None = None, *, whole: bool = False
    ) -> Task[bool]:
        """Start one allreduce for each dtype and device of ``exact``, which stay so after the warm-up, of gradients
        that are divided by ``loss_scale``. The task waits; their gradients are then means, or sums. Returns whether all
        are finite. ``whole``: not in float16, for which gradients without their scale may be too small. Collective."""
        groups: dict[Any, list[torch.Tensor]] = {}
        for p in exact:
            groups.setdefault((p.dtype, p.device), []).append(p)
        started = []
        for number, group in enumerate(groups.values()):
            flat = _flat(group)
            if loss_scale is not None:
                flat *= 1.0 / loss_scale
            started.append((group, self.allreduce(flat, f"exact.{self._engine.generation}.{number}", whole=whole)))
        return self._store(started)

    def _store(self, started: Sequence[tuple[Sequence[torch.Tensor], Started]]) -> Task[bool]:
        found = []
        for group, (handle, decompress) in started:
            found.append(decompress((yield handle)).to(group[0].dtype))
            for p, part in _parts(found[-1], group):
                assert p.grad is not None
                p.grad.copy_(part)  # others may hold it
        return finite(found)

    def drop(self) -> None:
        """The step is over, or given up. Local."""
        self._started = {}

    def forget(self, p: torch.Tensor) -> None:
        """``p`` was taken out of the optimizer. Local."""
        self._started.pop(p, None)

    def end(self) -> None:
        """There will be no means in the next steps. Local."""

    def allreduce(
        self, values: torch.Tensor, name: str, *, in_place: bool = True, lane: Lane | None = None, whole: bool = False
    ) -> Started:
        """Start it, by Horovod's arguments, but for its compression if ``whole``."""
        arguments, transport = self._arguments, self._arguments.transport
        workers = transport.size
        # Horovod reduces no bfloat16.
        known = values.float() if values.dtype is torch.bfloat16 else values
        tensor, context = (known, None) if whole else arguments.compression.compress(known)
        sent = allreduce_bytes(tensor.numel() * tensor.element_size(), workers)
        self._engine.traffic.add(sent, allreduce_bytes(4 * values.numel(), workers))
        name = f"{self._engine.name}.{name}"
        handle = transport.allreduce(tensor, name, in_place=in_place, lane=lane, **arguments.reduction)
        return handle, lambda found: found if whole else arguments.compression.decompress(found, context)


class InOrder(ByName):
    """Where collectives pair by their order. Gradients leave before ``start`` if the last means were of the same
    parameters: then all workers have the same groups of them, of the same sizes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lane = self._arguments.transport.lane()
        self._last: list[object] = []  # what decides how the parameters of the last means travel
        self._groups: list[list[torch.Tensor]] = []  # of these, in the order in which they leave
        self._of: dict[torch.Tensor, int] = {}  # the number of each one's group
        self._missing: list[int] | None = None  # gradients that each group waits for; none if nothing may leave

    def stale(self, exact: Callable[[], Sequence[torch.Tensor]]) -> bool:
        return self.begun and _layout(exact()) != self._last

    def begin(self, exact: Callable[[], Sequence[torch.Tensor]]) -> None:
        if self._missing is None:
            ready = self._lane is not None and self._lane.generation == self._engine.generation
            may = ready and _layout(exact()) == self._last
            self._missing = [len(group) for group in self._groups] if may else []

    def computed(self, p: torch.Tensor) -> None:
        if self._missing and p in self._of:
            self._missing[self._of[p]] -= 1
            while len(self._started) < len(self._groups) and not self._missing[len(self._started)]:
                self._leave()

    def leave(self, exact: Callable[[], Sequence[torch.Tensor]]) -> None:
        self.begin(exact)
        while self._missing and len(self._started) < len(self._groups):
            self._leave()

    def recall(self, exact: Sequence[torch.Tensor]) -> Task[None]:
        self.drop()
        if self._lane is not None:
            self._lane.generation = None  # ``start`` gives it new groups, in which nothing is under way
        yield from ()

    def start(self, exact: Sequence[torch.Tensor]) -> Task[None]:
        if self._lane is not None:
            self._lane.renew(self._engine.generation)
        if not self.begun:
            self._last, self._groups = _layout(exact), list(_fused(exact))[::-1]
            self._of = {p: number for number, group in enumerate(self._groups) for p in group}
        while len(self._started) < len(self._groups):
            self._leave()
        return self._arrive()

    @torch.no_grad()
    def _leave(self) -> None:
        """The next group does."""
        number = len(self._started)
        flat = _flat(self._groups[number])
        self._started[number] = self.allreduce(flat, f"means.{self._engine.generation}.{number}", lane=self._lane)
        start(self._started[number][0])

    def _arrive(self) -> Task[None]:
        for number, (handle, decompress) in self._started.items():
            for p, part in _parts(decompress((yield handle)), self._groups[number]):
                assert p.grad is not None
                p.grad.copy_(part)

    def drop(self) -> None:
        super().drop()
        self._missing = None

    def forget(self, p: torch.Tensor) -> None:
        """The groups are made anew by the next ``start``; while some are under way, ``stale`` reports them instead.
        Local."""
        if not self.begun:
            self._last, self._groups, self._of = [], [], {}

    def end(self) -> None:
        self._lane = self._arguments.transport.lane()  # nothing is open for the new one


def means(arguments: Arguments, *more: Any) -> ByName:
    """As the transport of ``arguments`` pairs collectives."""
    return (InOrder if arguments.transport.in_order else ByName)(arguments, *more)


def finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all elements of ``tensors`` are."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        sums.setdefault(tensor.device, []).append(tensor.sum(dtype=torch.float32))
    # NaN and Inf show in a sum. A sum of finite numbers may overflow: only then does every element count.
    if all(bool(torch.isfinite(torch.stack(each)).all()) for each in sums.values()):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _flat(group: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of the gradients of ``group``, one after the other."""
    return torch.cat([gradient_of(p).flatten() for p in group])


def _parts(flat: torch.Tensor, group: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each of ``group``, and what ``flat`` has of it: views, in its shape."""
    parts = flat.split([p.numel() for p in group])
    return ((p, part if p.dim() == 1 else part.view(p.shape)) for p, part in zip(group, parts, strict=True))


def _layout(exact: Sequence[torch.Tensor]) -> list[Any]:
    return [(id(p), p.shape, p.dtype, p.device) for p in exact]


def _fused(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """``parameters`` in groups of one dtype and device, whose gradients have at most ``FUSED`` bytes or are one."""
    group: list[torch.Tensor] = []
    size = 0
    for p in parameters:
        own = p.numel() * p.element_size()
        if group and (size + own > FUSED or (p.dtype, p.device) != (group[0].dtype, group[0].device)):
            yield group
            group, size = [], 0
        group.append(p)
        size += own
    if group:
        yield group

"""The transport over ``torch.distributed``, which pairs collectives by the order of calls in a process group.

So what is started before the workers have agreed is held until they have (``tasks.Held``): workers that disagree are
told so by the agreement, which has a group of its own, and no collective of theirs meets another one. An optimizer's
messages have a group, too (``exchange.Lane``), where they leave earlier, in one order, and which is made anew when some
were taken back. Groups are made for this library alone, with the members and the timeout of the group that is given:
what else a program sends does not come in between. With NCCL, what is in the host's memory travels over Gloo.
"""

from __future__ import annotations

import atexit
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from horovod_onebit.errors import ConfigurationError, TransportError
from horovod_onebit.face import host_number
from horovod_onebit.torch.collectives import Gathered, moved, reader, tensor_of
from horovod_onebit.torch.private import timeout_of
from horovod_onebit.torch.transport import Op

AT_THE_END = 0.1
"""Seconds that a process waits at its end for Gloo's threads. To let go of the last tensors they need the interpreter,
and one that asks for it when it is gone ends the process by SIGABRT (seen with PyTorch 2.13)."""


@functools.cache
def _wait_at_the_end() -> None:
    atexit.register(time.sleep, AT_THE_END)


@contextmanager
def _named(call: str) -> Iterator[None]:
    """Say of which ``call`` an error of PyTorch's is."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(
            f"{call}: {error}. Another worker has ended, does not answer or does something else: look for the first "
            "error in the logs of all workers. This job cannot continue; start it again from a checkpoint"
        ) from error


Begin = Callable[[], tuple[Any, Any]]


class _Held:
    """A collective that ``begin`` starts, which returns its work and its result; ``finish`` makes of that what ``wait``
    gives. PyTorch pairs by order: whether a worker continues must not depend on when messages arrive."""

    def __init__(self, name: str, begin: Begin, finish: Callable[[Any], Any] = lambda result: result) -> None:
        self._name, self._finish = name, finish
        self._begin: Begin | None = begin

    def ready(self) -> bool:
        return False

    def start(self) -> None:
        if self._begin is not None:
            with _named(self._name):
                self._work, self._result = self._begin()
            self._begin = None

    def wait(self) -> Any:
        self.start()
        with _named(self._name):
            self._work.wait()
        if isinstance(self._result, torch.Tensor) and self._result.is_cuda:  # made on the stream of a hook, perhaps
            self._result.record_stream(torch.cuda.current_stream(self._result.device))
        return self._finish(self._result)


@dataclass(frozen=True)
class _Groups:
    """The same workers twice: for what is in the host's memory, and for what is in that of GPUs.

    Attributes:
        ranks: those of the world.
        nccl: whether what is in the memory of GPUs travels from there.
    """

    ranks: Sequence[int]
    host: Any
    device: Any
    nccl: bool

    @classmethod
    def given(cls, group: Any) -> _Groups:
        """For the workers of ``group``. Collective: the whole world's are made; other ranks would have to call this,
        too, to make groups of a part of it, so that this part shares ``group``."""
        _wait_at_the_end()
        ranks, backends = dist.get_process_group_ranks(group), str(dist.get_backend_config(group))
        shared = cls(ranks, group, group, "cuda:nccl" in backends)
        if len(ranks) == dist.get_world_size():
            return shared.others([ranks])
        if "cpu:gloo" not in backends:
            raise ConfigurationError(
                f"process_group is a part of all workers, over {backends}; what is in the host's memory needs Gloo: "
                "make it by torch.distributed.new_group(ranks, backend='cpu:gloo,cuda:nccl')"
            )
        return shared

    def others(self, all_ranks: Sequence[Sequence[int]], *, nccl: bool = True) -> _Groups:
        """New ones with this timeout: those of ``all_ranks`` which this worker is in; with ``nccl`` if these have it.
        Collective: all workers of the world make the same."""
        timeout, nccl = timeout_of(self.host), nccl and self.nccl

        def made(backend: str) -> Any:
            with _named(f"new groups over {backend}"):
                all_of_them = [dist.new_group(sorted(r), timeout=timeout, backend=backend) for r in all_ranks]
            return next(one for one in all_of_them if one != dist.GroupMember.NON_GROUP_MEMBER)

        own = next(sorted(ranks) for ranks in all_ranks if dist.get_rank() in ranks)
        host = made("gloo")
        return _Groups(own, host, made("nccl") if nccl else host, nccl)

    def of(self, tensor: torch.Tensor) -> Any:
        """The one that carries ``tensor``."""
        return self.device if tensor.is_cuda else self.host

    def destroy(self) -> None:
        """Drop what is under way: another worker would wait for what this one will not start. Local."""
        for group in {self.host, self.device}:
            group.abort()
            dist.destroy_process_group(group)


class DistributedCollectives:
    """One process's view of the workers of ``groups``; what they exchange is started when it is released or waited for,
    or at once if it is ``eager``: what every worker starts, whatever it believes. ``host``: see ``Collectives``."""

    def __init__(self, groups: _Groups, host: tuple[int, int] = (0, 1), *, eager: bool = False) -> None:
        self.groups, self._host, self._eager = groups, host, eager
        self._by_host: dict[str, tuple[DistributedCollectives, DistributedCollectives]] = {}
        self.rank, self.size = dist.get_rank(groups.host), len(groups.ranks)

    @property
    def takes_device_memory(self) -> bool:
        return self.groups.nccl

    def allgather(self, array: Any, name: str) -> _Held:
        def begin() -> tuple[Any, Any]:
            tensor = tensor_of(array)
            result = tensor.new_empty(self.size * tensor.numel())
            group = self.groups.of(tensor)
            if tensor.is_cuda:  # NCCL would receive the parts in memory of its own
                return dist.all_gather_into_tensor(result, tensor, group=group, async_op=True), result
            parts = list(result.split(tensor.numel())) if tensor.numel() else [result] * self.size
            return dist.all_gather(parts, tensor, group=group, async_op=True), result

        return self._held(name, begin, reader(array, Gathered))

    def alltoall(self, array: Any, name: str) -> _Held:
        def begin() -> tuple[Any, Any]:
            tensor = tensor_of(array)
            result = torch.empty_like(tensor)
            return dist.all_to_all_single(result, tensor, group=self.groups.of(tensor), async_op=True), result

        return self._held(name, begin, reader(array, moved))

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> _Held:
        def begin() -> tuple[Any, Any]:
            result = torch.from_numpy(array.copy())
            return dist.all_reduce(result, group=self.groups.host, async_op=True), result

        return self._held(name, begin, torch.Tensor.numpy)

    def _held(self, name: str, begin: Begin, finish: Callable[[Any], Any]) -> _Held:
        handle = _Held(name, begin, finish)
        if self._eager:
            handle.start()
        return handle

    def host(self) -> tuple[int, int]:
        return self._host

    def hosts(self, places: Sequence[Sequence[int]]) -> tuple[DistributedCollectives, DistributedCollectives] | None:
        if self.size != dist.get_world_size():
            return None
        key = str(places)
        if key not in self._by_host:
            own, cross = (self.groups.others(ranks) for ranks in (places, list(zip(*places, strict=True))))
            self._by_host[key] = DistributedCollectives(own), DistributedCollectives(cross)
        return self._by_host[key]


class DistributedTransport:
    """A ``Transport``: the workers of a process group. Create it on all of them; collective."""

    in_order = True
    included = True
    ends_together = False

    def __init__(self, group: Any) -> None:
        self.world = dist.get_rank(), dist.get_world_size()
        self._groups = _Groups.given(group)
        self.ranks = self._groups.ranks
        self._whole = len(self.ranks) == self.world[1]
        self._control = self._groups.others([self.ranks], nccl=False) if self._whole else self._groups
        self.number = 0 if self._whole else 1 + sum(2**rank for rank in self.ranks)
        self.size = len(self.ranks)
        hosts = self.allgather_object(host_number(), "the workers' hosts")
        own = hosts[dist.get_rank(self._groups.host)]
        self._collectives = DistributedCollectives(self._groups, (own, hosts.count(own)))
        self._agreement = DistributedCollectives(self._control, eager=True)
        self._lanes: dict[int, tuple[weakref.ref[_Lane], _Groups]] = {}  # by number, alike on all workers
        self._numbers = count()

    def collectives(self) -> DistributedCollectives:
        return self._collectives

    def lane(self) -> _Lane | None:
        return _Lane(self) if self._whole else None

    def agreement(self) -> DistributedCollectives:
        return self._agreement

    def groups_for(self, lane: _Lane) -> _Groups:
        """New ones, in which nothing is under way. Those of before, and those of lanes that no worker has any more, are
        destroyed: workers collect garbage at different times. Collective."""
        unused = [number for number, (other, _) in self._lanes.items() if other() in (None, lane)]
        everywhere = set(unused).intersection(*self.allgather_object(unused, "lanes that are not used any more"))
        for number in sorted(everywhere):
            self._lanes.pop(number)[1].destroy()
        groups = self._groups.others([self.ranks])
        self._lanes[next(self._numbers)] = weakref.ref(lane), groups
        return groups

    def allreduce(
        self, tensor: torch.Tensor, name: str, *, in_place: bool, lane: _Lane | None = None, **reduction: Any
    ) -> _Held:
        divisor = self.size if reduction["op"] == Op.Average else 1
        factor, groups = reduction["postscale_factor"] / divisor, self._groups if lane is None else lane.groups

        def begin() -> tuple[Any, Any]:
            result = tensor if in_place else tensor.clone()
            if reduction["prescale_factor"] != 1.0:
                result.mul_(reduction["prescale_factor"])
            return dist.all_reduce(result, group=groups.of(tensor), async_op=True), result

        return _Held(name, begin, lambda result: result if factor == 1.0 else result.mul_(factor))

    def broadcast(self, tensor: torch.Tensor, root_rank: int, name: str) -> _Held:
        group = self._groups.of(tensor)
        handle = _Held(name, lambda: (dist.broadcast(tensor, root_rank, group=group, async_op=True), tensor))
        handle.start()
        return handle

    def broadcast_object(self, value: Any, root_rank: int, name: str) -> Any:
        box = [value]
        with _named(name):
            dist.broadcast_object_list(box, src=root_rank, group=self._control.host)
        return box[0]

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        found: list[Any] = [None] * self.size
        with _named(name):
            dist.all_gather_object(found, value, group=self._control.host)
        return found


class _Lane(DistributedCollectives):
    """A ``Lane``; its groups are made by the first ``renew``."""

    generation: str | None = None

    def __init__(self, transport: DistributedTransport) -> None:
        super().__init__(transport.collectives().groups)
        self._transport = transport

    def renew(self, generation: str) -> None:
        if generation != self.generation:
            self.groups, self.generation = self._transport.groups_for(self), generation


class Outside:
    """A ``Transport`` for a worker that is not in the process group: it takes its steps alone."""

    number, ranks, included, rank, size = -1, (), False, -1, 0
    in_order = True
    ends_together = False

    def __init__(self) -> None:
        self.world = dist.get_rank(), dist.get_world_size()

    def collectives(self) -> Any:
        return self

    def lane(self) -> None:
        return None

    agreement = collectives
    takes_device_memory = False


_known: dict[Any, tuple[Any, DistributedTransport]] = {}
"""By process group, with the world of then; that of all workers by the world, since its groups are made here."""


def of(process_group: Any) -> Any:
    """The ``Transport`` of a ``ProcessGroup`` or a ``DeviceMesh`` of one dimension; None is all workers. Collective
    among them the first time. Raises ``ConfigurationError`` for anything else, or if nothing is initialised."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group('gloo'), or 'nccl', in a "
            "job of torchrun"
        )
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        return Outside()
    group: Any = dist.group.WORLD if process_group is None else process_group
    if hasattr(group, "mesh_dim_names"):
        if group.ndim != 1:
            raise ConfigurationError(
                f"process_group={group!r}: expected a DeviceMesh of one dimension, that of data parallelism; index it "
                "by name, as mesh['dp']"
            )
        if group.get_coordinate() is None:
            return Outside()
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            f"process_group={process_group!r}: expected None, a ProcessGroup of torch.distributed or a DeviceMesh"
        )
    whole = dist.get_world_size(group) == dist.get_world_size()
    key = (dist.group.WORLD, dist.get_backend_config(group), timeout_of(group)) if whole else group
    if key not in _known:
        for old in [old for old, (world, _) in _known.items() if world != dist.group.WORLD]:
            del _known[old]  # they keep the groups of a world that was destroyed
        _known[key] = dist.group.WORLD, DistributedTransport(group)
    return _known[key][1]

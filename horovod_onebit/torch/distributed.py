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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from horovod_onebit.errors import ConfigurationError, TransportError
from horovod_onebit.face import host_number
from horovod_onebit.torch.collectives import Gathered, moved, tensor_of
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


class _Held:
    """A collective that ``begin`` starts, which returns its work and its result. PyTorch pairs by order: whether a
    worker continues must not depend on when messages arrive."""

    def __init__(self, name: str, begin: Callable[[], tuple[Any, Any]]) -> None:
        self._name = name
        self._begin: Callable[[], tuple[Any, Any]] | None = begin

    def ready(self) -> bool:
        return False

    def start(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            with _named(self._name):
                self._work, self._result = begin()

    def wait(self) -> Any:
        self.start()
        with _named(self._name):
            self._work.wait()
        return self._finish(self._result)

    def _finish(self, result: Any) -> Any:
        return result


class _Array(_Held):
    def _finish(self, result: torch.Tensor) -> Any:
        return result.numpy()


class _Gathering(_Held):
    def _finish(self, result: torch.Tensor) -> Any:
        return Gathered(result)


class _Moving(_Held):
    def _finish(self, result: torch.Tensor) -> Any:
        return moved(result)


class _Scaled(_Held):
    """A sum that is multiplied by ``factor``."""

    def __init__(self, name: str, begin: Callable[[], tuple[Any, Any]], factor: float) -> None:
        super().__init__(name, begin)
        self._factor = factor

    def _finish(self, result: torch.Tensor) -> torch.Tensor:
        return result if self._factor == 1.0 else result.mul_(self._factor)


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
    def of(cls, group: Any) -> _Groups:
        """For the workers of ``group``. Collective: the whole world's are made; other ranks would have to call this,
        too, to make groups of a part of it, so that this part shares ``group``."""
        _wait_at_the_end()
        ranks, backends = dist.get_process_group_ranks(group), str(dist.get_backend_config(group))
        nccl = "cuda:nccl" in backends
        if len(ranks) == dist.get_world_size():
            return cls.make([ranks], timeout_of(group), nccl=nccl)
        if "cpu:gloo" not in backends:
            raise ConfigurationError(
                f"process_group is a part of all workers, over {backends}; what is in the host's memory needs Gloo: "
                "make it by torch.distributed.new_group(ranks, backend='cpu:gloo,cuda:nccl')"
            )
        return cls(ranks, group, group, nccl)

    @classmethod
    def make(cls, all_ranks: Sequence[Sequence[int]], timeout: Any, *, nccl: bool) -> _Groups:
        """That of ``all_ranks`` which this worker is in; all workers of the world make the same. Collective."""

        def group(backend: str) -> Any:
            with _named(f"new groups over {backend}"):
                made = [dist.new_group(sorted(ranks), timeout=timeout, backend=backend) for ranks in all_ranks]
            return next(one for one in made if one != dist.GroupMember.NON_GROUP_MEMBER)

        own = next(sorted(ranks) for ranks in all_ranks if dist.get_rank() in ranks)
        host = group("gloo")
        return cls(own, host, group("nccl") if nccl else host, nccl)


class DistributedCollectives:
    """One process's view of the workers of ``groups``; what they exchange is started when it is released or waited for.

    ``own`` is the group that carries what is in the host's memory; ``number`` and ``many``: see ``host``.
    """

    def __init__(self, groups: _Groups, own: Any, number: int = 0, many: int = 1) -> None:
        self._groups, self._own, self._host = groups, own, (number, many)
        self._by_host: dict[str, tuple[DistributedCollectives, DistributedCollectives]] = {}
        self.rank, self.size = dist.get_rank(own), dist.get_world_size(own)

    @property
    def takes_device_memory(self) -> bool:
        return self._groups.nccl

    def _group(self, array: Any) -> Any:
        return self._own if isinstance(array, np.ndarray) else self._groups.device

    def allgather(self, array: Any, name: str) -> _Held:
        def begin() -> tuple[Any, Any]:
            tensor = tensor_of(array)
            result = tensor.new_empty(self.size * tensor.numel())
            parts = list(result.split(tensor.numel())) if tensor.numel() else [result] * self.size
            return dist.all_gather(parts, tensor, group=self._group(array), async_op=True), result

        return (_Array if isinstance(array, np.ndarray) else _Gathering)(name, begin)

    def alltoall(self, array: Any, name: str) -> _Held:
        def begin() -> tuple[Any, Any]:
            tensor = tensor_of(array)
            result = torch.empty_like(tensor)
            return dist.all_to_all_single(result, tensor, group=self._group(array), async_op=True), result

        return (_Array if isinstance(array, np.ndarray) else _Moving)(name, begin)

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> _Held:
        def begin() -> tuple[Any, Any]:
            result = torch.from_numpy(array.copy())
            return dist.all_reduce(result, group=self._own, async_op=True), result

        return _Array(name, begin)

    def host(self) -> tuple[int, int]:
        return self._host

    def hosts(self, places: Sequence[Sequence[int]]) -> tuple[DistributedCollectives, DistributedCollectives] | None:
        if self.size != dist.get_world_size():
            return None
        key = str(places)
        if key not in self._by_host:
            timeout, nccl = timeout_of(self._own), self._groups.nccl
            own = _Groups.make(places, timeout, nccl=nccl)
            cross = _Groups.make(list(zip(*places, strict=True)), timeout, nccl=nccl)
            self._by_host[key] = DistributedCollectives(own, own.host), DistributedCollectives(cross, cross.host)
        return self._by_host[key]


class DistributedTransport:
    """A ``Transport``: the workers of a process group. Create it on all of them; collective."""

    in_order = True
    included = True
    ends_together = False

    def __init__(self, group: Any) -> None:
        self.world = dist.get_rank(), dist.get_world_size()
        self._groups = _Groups.of(group)
        self.ranks = self._groups.ranks
        self._whole = len(self.ranks) == self.world[1]
        self._control = self._groups
        if self._whole:
            self._control = _Groups.make([self.ranks], timeout_of(self._groups.host), nccl=False)
        self.number = 0 if self._whole else 1 + sum(2**rank for rank in self.ranks)
        self.rank, self.size = dist.get_rank(self._groups.host), len(self.ranks)
        hosts = self.allgather_object(host_number(), "the workers' hosts")
        self._collectives = DistributedCollectives(
            self._groups, self._groups.host, hosts[self.rank], hosts.count(hosts[self.rank])
        )
        self._agreement = _Eager(self._control, self._control.host)

    def collectives(self) -> DistributedCollectives:
        return self._collectives

    def lane(self) -> _Lane | None:
        return _Lane(self._groups) if self._whole else None

    def agreement(self) -> DistributedCollectives:
        return self._agreement

    def allreduce(self, tensor: torch.Tensor, name: str, *, in_place: bool, **reduction: Any) -> _Held:
        divisor = self.size if reduction["op"] == Op.Average else 1

        def begin() -> tuple[Any, Any]:
            result = tensor if in_place else tensor.clone()
            if reduction["prescale_factor"] != 1.0:
                result.mul_(reduction["prescale_factor"])
            return dist.all_reduce(result, group=self._of(tensor), async_op=True), result

        return _Scaled(name, begin, reduction["postscale_factor"] / divisor)

    def broadcast(self, tensor: torch.Tensor, root_rank: int, name: str) -> _Held:
        group = self._of(tensor)
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

    def _of(self, tensor: torch.Tensor) -> Any:
        return self._groups.device if tensor.is_cuda else self._groups.host


class _Eager(DistributedCollectives):
    """For agreements: what every worker starts, whatever it believes, need not be held."""

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> _Held:
        handle = super().allreduce(array, name)
        handle.start()
        return handle


class _Lane(DistributedCollectives):
    """A ``Lane``; its groups are made by the first ``renew``."""

    def __init__(self, groups: _Groups) -> None:
        super().__init__(groups, groups.host)
        self._ranks, self._timeout = groups.ranks, timeout_of(groups.host)
        self._renewed = False

    def renew(self) -> None:
        if self._renewed:
            for group in {self._groups.host, self._groups.device}:
                group.abort()  # or another worker would wait for what this one will not start
                dist.destroy_process_group(group)
        self._groups = _Groups.make([self._ranks], self._timeout, nccl=self._groups.nccl)
        self._own, self._renewed = self._groups.host, True


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


_known: dict[Any, DistributedTransport] = {}
"""By process group; that of all workers by the world, since its groups are made here."""


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
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            f"process_group={process_group!r}: expected None, a ProcessGroup of torch.distributed or a DeviceMesh"
        )
    whole = dist.get_world_size(group) == dist.get_world_size()
    key = (dist.group.WORLD, dist.get_backend_config(group)) if whole else group
    if key not in _known:
        _known[key] = DistributedTransport(group)
    return _known[key]

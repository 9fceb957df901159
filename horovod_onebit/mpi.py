"""The collectives over mpi4py: the core on real MPI ranks, with NumPy arrays and no framework.

    mpirun -np 3 python -m mpi4py program.py

    from horovod_onebit.mpi import MPICollectives
    optimizer = NumpyOptimizer(weights, Adam(lr=1e-3), collectives=MPICollectives(), warmup_steps=100)

Install with ``pip install '.[mpi]'`` in a clone. Without ``-m mpi4py``, a worker that ends with an error leaves the
others waiting forever. MPI pairs collectives by the order of calls and not by name, so all ranks must make the same
calls in the same order; the engine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray


class _Handle:
    def __init__(self, request: Any, source: Any, result: Any) -> None:
        self.request, self.source, self.result = request, source, result

    def ready(self) -> bool:
        self.request.Test()  # MPI works on messages in its own calls only
        return False  # it pairs by order: whether a worker continues must not depend on when its messages come

    def wait(self) -> NDArray:
        self.request.Wait()
        result, self.result, self.source = self.result, None, None
        return result


class _Sum(_Handle):
    """A reduction to rank 0, then a broadcast: MPI's own allreduce may round differently on different ranks."""

    def __init__(self, comm: Any, request: Any, source: NDArray, result: NDArray) -> None:
        super().__init__(request, source, result)
        self.comm = comm

    def wait(self) -> NDArray:
        result = super().wait()
        self.comm.Bcast(result, root=0)
        return result


_H = TypeVar("_H", bound=_Handle)


class MPICollectives:
    """One rank's view of ``comm``, a communicator of mpi4py (all ranks by default). It makes a copy of that: build it
    on all of them, and once for all optimizers. Collective."""

    takes_device_memory = False

    def __init__(self, comm: Any = None) -> None:
        self.comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self._open: list[_Handle] = []  # MPI writes into their arrays, whoever has given them up
        self._host: tuple[int, int] | None = None
        self._hosts: tuple[MPICollectives, MPICollectives] | None = None

    @property
    def rank(self) -> int:
        return self.comm.Get_rank()

    @property
    def size(self) -> int:
        return self.comm.Get_size()

    def allgather(self, array: NDArray[np.uint8], name: str) -> _Handle:
        result = np.empty(self.size * array.size, array.dtype)
        return self._kept(_Handle(self.comm.Iallgather(array, result), array, result))

    def alltoall(self, array: NDArray, name: str) -> _Handle:
        result = np.empty_like(array)
        return self._kept(_Handle(self.comm.Ialltoall(array, result), array, result))

    def host(self) -> tuple[int, int]:
        if self._host is None:
            local = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
            self._host = local.bcast(self.rank), local.Get_size()
            local.Free()
        return self._host

    def hosts(self, places: Sequence[Sequence[int]]) -> tuple[MPICollectives, MPICollectives] | None:
        if self._hosts is None:
            number = next(i for i, ranks in enumerate(places) if self.rank in ranks)
            groups = [self.comm.Split(color) for color in (number, places[number].index(self.rank))]
            self._hosts = MPICollectives(groups[0]), MPICollectives(groups[1])
        return self._hosts

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> _Sum:
        result = np.empty_like(array)
        return self._kept(_Sum(self.comm, self.comm.Ireduce(array, result, op=MPI.SUM, root=0), array, result))

    def _kept(self, handle: _H) -> _H:
        self._open = [*(other for other in self._open if not other.request.Test()), handle]
        return handle

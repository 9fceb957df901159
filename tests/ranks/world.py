"""What the PyTorch tests need of the other ranks, by Horovod's names: Horovod itself under horovodrun and mpirun, or
over ``torch.distributed`` under torchrun, with the backend ONEBIT_BACKEND or Gloo.
"""

import os
from datetime import timedelta

import pytest
import torch

import horovod_onebit.torch as onebit
from horovod_onebit.torch import transport

OVER_TORCH = "TORCHELASTIC_RUN_ID" in os.environ
needs_horovod = pytest.mark.skipif(OVER_TORCH, reason="is about Horovod itself")


class Distributed:
    """``horovod.torch``, as far as tests use it, over ``torch.distributed``."""

    Average, Sum, Compression = onebit.Average, onebit.Sum, onebit.Compression
    broadcast_parameters = staticmethod(onebit.broadcast_parameters)
    broadcast_optimizer_state = staticmethod(onebit.broadcast_optimizer_state)

    def __init__(self):
        import torch.distributed

        self._dist = torch.distributed

    def init(self):
        if not self._dist.is_initialized():
            backend = os.environ.get("ONEBIT_BACKEND", "gloo")
            self._dist.init_process_group(backend, timeout=timedelta(seconds=120))

    def rank(self):
        return self._dist.get_rank()

    def size(self):
        return self._dist.get_world_size()

    def barrier(self):
        self._dist.barrier()

    def allgather_object(self, value, name=None):
        found = [None] * self.size()
        self._dist.all_gather_object(found, value)
        return found

    def broadcast_object(self, value, root_rank=0, name=None):
        box = [value]
        self._dist.broadcast_object_list(box, src=root_rank)
        return box[0]

    def allgather(self, tensor, name=None):
        return torch.cat(self.allgather_object(tensor.detach()))

    def allreduce(self, tensor, name=None, compression=onebit.Compression.none):
        sent, context = compression.compress(tensor.clone())
        self._dist.all_reduce(sent)
        return compression.decompress(sent.mul_(1 / self.size()), context)

    def broadcast_(self, tensor, root_rank, name=None):
        self._dist.broadcast(tensor, root_rank)


if OVER_TORCH:
    world = Distributed()
else:
    import horovod.torch as world  # noqa: F401


def collectives():
    """Those of all ranks, for a test's own optimizer."""
    return transport.choose(call="a test").collectives()


def end():
    """At the end of a program: PyTorch may crash while its groups still have threads."""
    if OVER_TORCH:
        torch.distributed.destroy_process_group()

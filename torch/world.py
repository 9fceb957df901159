"""What a job needs of its launcher, by Horovod's names: ``world`` is that of torchrun or of Horovod.

Nothing here imports Horovod in a job of torchrun.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


class Horovod:
    """The workers that horovodrun, or mpirun, has started."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        self.init, self.rank, self.size = hvd.init, hvd.rank, hvd.size
        self.local_rank, self.local_size = hvd.local_rank, hvd.local_size
        self.allreduce = hvd.allreduce

    @property
    def carries_gpus(self) -> bool:
        """Whether tensors on GPUs can be exchanged: built where no CUDA toolkit is, Horovod knows nothing of them."""
        return bool(self._hvd.cuda_built() or self._hvd.rocm_built())

    def averaged(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, half: bool
    ) -> tuple[torch.nn.Module, Any]:
        """``model`` and ``optimizer`` such that gradients are averaged, as float32 or as float16."""
        compression = self._hvd.Compression.fp16 if half else self._hvd.Compression.none
        named = model.named_parameters()
        return model, self._hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)


class Torchrun:
    """The workers that torchrun has started."""

    carries_gpus = True

    def init(self) -> None:
        a_gpu_each = torch.cuda.device_count() >= self.local_size()
        dist.init_process_group("cpu:gloo,cuda:nccl" if a_gpu_each else "gloo")
        atexit.register(dist.destroy_process_group)

    def rank(self) -> int:
        return dist.get_rank()

    def size(self) -> int:
        return dist.get_world_size()

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def local_size(self) -> int:
        return int(os.environ["LOCAL_WORLD_SIZE"])

    def allreduce(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total / self.size()

    def averaged(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, half: bool
    ) -> tuple[torch.nn.Module, Any]:
        """``model`` and ``optimizer`` such that gradients are averaged, as float32 or as float16."""
        model = DistributedDataParallel(model, broadcast_buffers=False)  # as over Horovod
        if half:
            model.register_comm_hook(None, fp16_compress_hook)
        return model, optimizer


world = Torchrun() if "TORCHELASTIC_RUN_ID" in os.environ else Horovod()

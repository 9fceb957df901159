"""A job whose ranks are split by mpi4py: two jobs of two in one mpirun. Run by tests/test_horovodrun.py."""

import faulthandler
import sys

import horovod.torch as hvd
import torch
from mpi4py import MPI

import horovod_onebit.torch as onebit

faulthandler.dump_traceback_later(240, exit=True)
world = MPI.COMM_WORLD
hvd.init(comm=world.Split(world.rank // 2, world.rank))
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = onebit.DistributedOptimizer(optimizer, model.named_parameters(), warmup_steps=3)
generator = torch.Generator().manual_seed(world.rank)
for _ in range(12):
    optimizer.zero_grad()
    x = torch.randn(8, 64, generator=generator)
    (model(x) - x).square().mean().backward()
    optimizer.step()
rows = world.allgather(model.weight.detach().numpy())
assert hvd.size() == 2
assert (rows[0] == rows[1]).all()
assert (rows[2] == rows[3]).all()
assert not (rows[0] == rows[2]).all()
sys.stdout.write(f"rank {world.rank} agrees\n")

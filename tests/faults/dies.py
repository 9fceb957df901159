"""A job whose worker 1 is killed in its 20th step."""

import os
import signal
import sys

import horovod.torch as hvd
import torch

import horovod_onebit.torch as onebit

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = onebit.DistributedOptimizer(
    torch.optim.Adam(model.parameters()), named_parameters=model.named_parameters(), warmup_steps=3
)
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    if step == 20 and hvd.rank() == 1:
        print("dies", sys.argv[1], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()

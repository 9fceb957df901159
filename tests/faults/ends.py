"""A job that ends while the exchange of its last round is under way, which worker 0 sends a second late."""

import sys
import time

import horovod.torch as hvd
import torch

import horovod_onebit.torch as onebit
from horovod_onebit import Recipe
from horovod_onebit.engine import Engine

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = onebit.DistributedOptimizer(
    torch.optim.Adam(model.parameters()),
    named_parameters=model.named_parameters(),
    schedule=onebit.Local(every=2, doubling=0, delay=1),
    recipe=Recipe(exchange=sys.argv[1]),
)
send = Engine.send


def send_late(*arguments):
    time.sleep(1)
    send(*arguments)


for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    if step == 3 and hvd.rank() == 0:
        Engine.send = send_late
    optimizer.step()
print("the last step was taken", flush=True)

"""A very slow link: each worker takes eight steps alone, then the workers exchange what they have moved:

horovodrun -np 2 python examples/local_steps.py
"""

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit


def main():
    hvd.init()
    torch.manual_seed(0)
    x = torch.randn(8192, 64)
    y = (x @ torch.randn(64, 10)).argmax(1)
    x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]  # this worker's share

    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = onebit.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        schedule=onebit.Local(every=8),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for _ in range(200):
        chosen = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        loss = cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
    optimizer.flush()  # all workers have the same weights now: before saving and evaluation
    if hvd.rank() == 0:
        print(f"loss {float(loss.detach()):.3f}")
        print(optimizer.stats())


if __name__ == "__main__":
    main()

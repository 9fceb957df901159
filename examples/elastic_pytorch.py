"""Workers that come and go (Horovod elastic). discover.sh is an executable script of your own: it prints the hosts that
there are now, one on a line, as "host1:2"; docs/cluster.md has one. (Horovod begins when there are two hosts; on one,
add ``--network-interfaces lo``.)

horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./discover.sh python examples/elastic_pytorch.py
"""

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit.torch import elastic

STEPS = 400


def main():
    hvd.init()
    torch.manual_seed(0)
    x = torch.randn(8192, 64)
    y = (x @ torch.randn(64, 10)).argmax(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = onebit.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), named_parameters=model.named_parameters(), warmup_steps=20
    )

    @elastic.run  # which broadcasts the state, and residuals are redistributed whenever the workers change
    def train(state):
        while state.step < STEPS:
            generator = torch.Generator().manual_seed(state.step * 1000 + hvd.rank())
            chosen = torch.randint(len(x), (64,), generator=generator)
            optimizer.zero_grad()
            loss = cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
            state.step += 1
            if state.step % 10 == 0:
                state.commit()  # what a worker that is lost takes the others back to
            if hvd.rank() == 0 and state.step % 100 == 0:
                print(f"step {state.step}: {hvd.size()} workers, loss {float(loss.detach()):.3f}", flush=True)

    train(elastic.TorchState(model=model, optimizer=optimizer, step=0))


if __name__ == "__main__":
    main()

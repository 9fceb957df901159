"""A PyTorch loop with Horovod:

horovodrun -np 2 python examples/pytorch_loop.py
"""

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horovod_onebit.torch as onebit


def make_data(examples):
    torch.manual_seed(0)  # the same on all workers, as files would be
    x = torch.randn(examples, 64)
    return TensorDataset(x, (x @ torch.randn(64, 10)).argmax(1))


def main():
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = make_data(8192)
    share = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True)
    loader = DataLoader(data, batch_size=64, sampler=share, drop_last=True)

    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = onebit.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        warmup_steps=20,  # leave it out in a run of thousands of steps
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    onebit.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(3):
        share.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {float(mean):.3f}", flush=True)
    if hvd.rank() == 0:
        print(optimizer.stats())


if __name__ == "__main__":
    main()

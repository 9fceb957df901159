"""A PyTorch loop without Horovod:

torchrun --standalone --nproc-per-node 2 examples/pytorch_torchrun.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horovod_onebit.torch as onebit


def make_data(examples):
    torch.manual_seed(0)  # the same on all workers, as files would be
    x = torch.randn(examples, 64)
    return TensorDataset(x, (x @ torch.randn(64, 10)).argmax(1))


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    device = "cuda" if cuda else "cpu"
    data = make_data(8192)
    share = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=64, sampler=share, drop_last=True)

    # Not in DistributedDataParallel: the optimizer averages.
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = onebit.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        warmup_steps=20,  # leave it out in a run of thousands of steps
    )
    onebit.broadcast_parameters(model.state_dict(), root_rank=0)
    onebit.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(3):
        share.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {float(loss):.3f}", flush=True)
    if dist.get_rank() == 0:
        print(optimizer.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

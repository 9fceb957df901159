"""A job on a Ray cluster, or on this machine:  python examples/ray_train.py --workers 2

Ray starts the workers and connects them (pip install ray); what each of them does is the same as under horovodrun.
"""

from __future__ import annotations

import argparse

import ray
from horovod.ray import RayExecutor


def train(steps: int) -> tuple[float, str]:
    """What every worker does: fit a teacher's outputs. Returns the last loss, and the optimizer's stats."""
    import horovod.torch as hvd
    import torch

    import horovod_onebit.torch as onebit

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 16))
    teacher = torch.randn(64, 16) / 8
    optimizer = onebit.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3), named_parameters=model.named_parameters(), warmup_steps=20
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    onebit.broadcast_optimizer_state(optimizer, root_rank=0)
    samples = torch.Generator().manual_seed(1 + hvd.rank())
    loss = torch.tensor(0.0)
    for _ in range(steps):
        x = torch.randn(32, 64, generator=samples)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), x @ teacher)
        loss.backward()
        optimizer.step()
    optimizer.check_replicas()
    return float(loss.detach()), str(optimizer.stats())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--address", help="of a Ray cluster; this machine if it is left out")
    args = parser.parse_args()
    ray.init(address=args.address)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=args.workers, cpus_per_worker=1)
    executor.start()
    try:
        for rank, (loss, stats) in enumerate(executor.run(train, args=[args.steps])):
            print(f"worker {rank}: loss {loss:.4f}; {stats}")
    finally:
        executor.shutdown()


if __name__ == "__main__":
    main()

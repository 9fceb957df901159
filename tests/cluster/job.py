"""Run by each process of the cluster's tests: exact steps, then 1-bit steps, and the bytes of its host's interface."""

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

import horovod_onebit.torch as onebit
from horovod_onebit import Recipe

WARMUP, STEPS = 3, 8
RX = Path("/sys/class/net/e0/statistics/rx_bytes")


def received():
    hvd.barrier()
    return int(RX.read_text())


def main():
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    recipe = Recipe(exchange=sys.argv[1])
    optimizer = onebit.DistributedOptimizer(optimizer, model.named_parameters(), warmup_steps=WARMUP, recipe=recipe)
    generator = torch.Generator().manual_seed(hvd.rank())

    def train(steps):
        before = received()
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 1024, generator=generator)).square().mean().backward()
            optimizer.step()
        return (received() - before) / steps

    exact = train(WARMUP)
    train(1)  # the first compressed step shakes hands
    compressed = train(STEPS)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    replicas = hvd.allgather(weights[None], name="weights")
    equal = all(torch.equal(replica, replicas[0]) for replica in replicas)
    engine = optimizer._compressor.engine
    own = {"exact": exact, "compressed": compressed, "equal": equal, "claimed": optimizer.stats().step_bytes_received}
    own |= {"exchange": engine.exchange.name, "parameters": engine.layout.size}
    found = hvd.allgather_object(own, name="results")
    if hvd.rank() == 0:
        sys.stdout.write("RESULT " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

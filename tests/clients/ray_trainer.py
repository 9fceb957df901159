"""Ray's TorchTrainer, which starts the workers and initialises ``torch.distributed`` in each of them."""

import os
import sys

os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # a line of each worker counts

import ray.train
import ray.train.torch
import torch
from torch.nn.functional import cross_entropy


def train(config):
    os.environ["TORCHELASTIC_RUN_ID"] = "ray"  # tests/ranks/world.py goes by it
    from common import RANK, STEPS, Watch, optimizer_of

    torch.manual_seed(RANK)
    model = inner = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = optimizer_of(inner)
    watch = Watch(inner, optimizer)
    if config["case"] == "prepared":
        model = ray.train.torch.prepare_model(inner)
    for _ in range(STEPS):
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
    watch.finish(averages={False} if config["case"] == "prepared" else set())


def main(case):
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"case": case},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])

"""One process of study 19: torchrun --nproc-per-node 2 studies/large_worker.py WAY SEED"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from benchmarks.peers import DiLoCo
from jobs.options import parse
from studies import large, report
from studies.magnitudes import networks
from studies.rates import of_cosine


def average(tensors: Sequence[torch.Tensor]) -> None:
    """By ``torch.distributed``."""
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    for tensor in tensors:
        tensor /= dist.get_world_size()


def made(way: large.Way, module: torch.nn.Module) -> Any:
    """What takes the steps. Collective."""
    optimizer: Any = torch.optim.AdamW(module.parameters(), lr=way.rate, weight_decay=0.1)
    if way.options is not None:
        return onebit.DistributedOptimizer(optimizer, module.named_parameters(), **way.options)
    if way.every:
        return DiLoCo(optimizer, way.every, average, lr=way.outer[0], momentum=way.outer[1])
    return optimizer


@torch.no_grad()
def look(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """The test loss, and the share of tokens that are right."""
    loss = right = 0.0
    for rows, wanted in zip(x.split(64), y.split(64), strict=True):
        logits = module(rows).flatten(0, -2)
        loss += float(cross_entropy(logits, wanted.flatten(), reduction="sum"))
        right += float((logits.argmax(1) == wanted.flatten()).sum())
    return loss / y.numel(), right / y.numel()


def equal(module: torch.nn.Module) -> bool:
    """Whether all workers have the same weights, bit for bit. Collective."""
    own = torch.cat([p.detach().flatten().cpu() for p in module.parameters()])
    first = own.clone()
    dist.broadcast(first, 0)
    same = torch.tensor(float(torch.equal(own, first)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def train(way: large.Way, seed: int, device: str) -> dict[str, Any]:
    """What worker 0 finds. Collective."""
    rank, workers, task = dist.get_rank(), dist.get_world_size(), large.data()
    torch.manual_seed(seed)
    module = networks().CharacterModel(large.TOKENS, large.WIDTH, large.LAYERS, large.HEADS, large.LENGTH).to(device)
    optimizer = made(way, module)
    options = parse(["--seed", str(seed), "--batch-size", str(large.ROWS // workers)])
    test = [torch.from_numpy(a).to(device) for a in (task.test_x, task.test_y)]
    losses, sent, seconds = [], [], 0.0
    start = time.perf_counter()
    for step in range(large.STEPS):
        for group in optimizer.param_groups:
            group["lr"] = of_cosine(way.rate, step, large.STEPS, large.RISE)
        x, y = (torch.from_numpy(a).to(device) for a in task.batch(options, step, rank, workers))
        optimizer.zero_grad()
        cross_entropy(module(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
        if (step + 1) % large.LOOK == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            seconds += time.perf_counter() - start
            losses.append(look(module, *test)[0])
            if way.options is not None:
                stats = optimizer.stats(norms=False)
                sent.append(stats.bytes_sent / stats.parameters)
            start = time.perf_counter()
    loss, right = look(module, *test)
    parameters = sum(p.numel() for p in module.parameters())
    found = {"loss": loss, "accuracy": right, "losses": losses, "parameters": parameters, "seconds": seconds}
    found |= {"tokens": task.train_x.size, "replicas equal": equal(module)}
    found["device"] = torch.cuda.get_device_name() if device == "cuda" else report.machine()
    if sent:
        found |= {"sent": sent, "bits": 8 * sent[-1] / large.STEPS}
    return found


def main() -> None:
    name, seed = sys.argv[1:]
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("gloo")
    found = train(large.WAYS[name], int(seed), "cuda" if torch.cuda.is_available() else "cpu")
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

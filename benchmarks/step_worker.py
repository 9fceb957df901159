"""What every process of `benchmarks/step.py` runs; prints one line of JSON on rank 0."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from typing import Any

import horovod.torch as hvd
import torch

import horovod_onebit.torch as onebit


def large() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6)))


class Small(torch.nn.Module):
    """300 tensors, small ones (norms and biases of 768) unless ``size`` is larger, and one that is compressed."""

    def __init__(self, size: int = 768) -> None:
        super().__init__()
        self.small = torch.nn.ParameterList(torch.randn(size // 768, 768) for _ in range(300))
        self.large = torch.nn.Linear(768, 768, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(x) + torch.cat(list(self.small)).sum(0)


def optimizer_of(way: str, model: torch.nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if way == "horovod fp32":
        return hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if way == "onebit":
        return onebit.DistributedOptimizer(optimizer, model.named_parameters(), warmup_steps=1)
    return optimizer


def step_times(way: str, model: torch.nn.Module, data: torch.Tensor, steps: int) -> tuple[float, float]:
    """Median seconds of a whole step, and of this thread's own work in ``optimizer.step()``."""
    optimizer = optimizer_of(way, model)
    whole, own = [], []
    for step in range(steps + 3):
        hvd.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        before = time.thread_time()
        optimizer.step()
        if step >= 3:
            own.append(time.thread_time() - before)
            whole.append(time.perf_counter() - start)
    return statistics.median(whole), statistics.median(own)


def calls(way: str, model: torch.nn.Module, data: torch.Tensor) -> int:
    """Calls of functions, Python's and built-in ones, in a backward pass and a step: the same on any machine."""
    optimizer, found = optimizer_of(way, model), 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    for step in range(5):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        sys.setprofile(note if step == 4 else None)
        loss.backward()
        optimizer.step()
        sys.setprofile(None)
    return found


def peak(way: str) -> int:
    """Peak bytes of this process after a few steps."""
    model = large()
    optimizer = optimizer_of(way, model)
    data = torch.randn(8, 2048)
    for _ in range(4):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("step", "small", "memory"))
    parser.add_argument("--way", default="onebit")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    found: dict[str, Any] = {}
    if options.what == "memory":
        found = {"peak": peak(options.way), "parameters": sum(p.numel() for p in large().parameters())}
    elif options.what == "step":
        data = torch.randn(128, 2048)
        times: dict[str, list[float]] = {"horovod fp32": [], "onebit": []}
        for _ in range(options.rounds):
            for way, seconds in times.items():
                seconds.append(step_times(way, large(), data, 8)[0])
        found = {way: statistics.median(seconds) for way, seconds in times.items()}
    else:
        data = torch.randn(8, 768)
        own: dict[str, list[float]] = {"plain": [], "onebit": []}
        for _ in range(options.rounds):
            for way, seconds in own.items():
                seconds.append(step_times(way, Small(), data, 50)[1])
        found = {way: statistics.median(seconds) for way, seconds in own.items()}
        found["calls"] = calls("onebit", Small(), data)
        found["calls compressed"] = calls("onebit", Small(2 * 768), data)
    if hvd.rank() == 0:
        print("RESULT", json.dumps(found), flush=True)
    hvd.barrier()


if __name__ == "__main__":
    main()

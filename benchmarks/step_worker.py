"""What every process of `benchmarks/step.py` runs; prints one line of JSON on rank 0."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

import horovod_onebit.torch as onebit
from benchmarks.measure import Loaded, Way, Workers, compare
from horovod_onebit.warmup import EXACT_FIRST


def large() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6)))


class Small(torch.nn.Module):
    """300 tensors, small ones (norms and biases of 768) unless ``size`` is larger, and one that is compressed."""

    def __init__(self, size: int = 768) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small = torch.nn.ParameterList(torch.randn(size // 768, 768) for _ in range(300))
        self.large = torch.nn.Linear(768, 768, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(x) + torch.cat(list(self.small)).sum(0)


def optimizer_of(way: str, model: torch.nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    named = [(f"{way}.{name}", p) for name, p in model.named_parameters()]
    if way == "horovod fp32":
        return hvd.DistributedOptimizer(optimizer, named)
    if way == "onebit":
        return onebit.DistributedOptimizer(optimizer, named, warmup_steps=1)
    if way == "onebit warm-up":
        return onebit.DistributedOptimizer(optimizer, named, warmup_steps=10**6)
    return optimizer


def step_of(way: str, model: torch.nn.Module, data: torch.Tensor) -> Callable[[], float]:
    """A step, which returns the seconds of this thread's own work in ``optimizer.step()``; the first ones are taken."""
    optimizer = optimizer_of(way, model)

    def step() -> float:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        before = time.thread_time()
        optimizer.step()
        return time.thread_time() - before

    for _ in range(3):
        step()
    return step


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
    for _ in range(EXACT_FIRST + 4):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def whole_step(**options: Any) -> dict[str, Any]:
    """A step of 25 M parameters."""
    data = torch.randn(128, 2048)

    def way(name: str) -> Way:
        step = step_of(name, large(), data)
        return Way(lambda: (step(), None)[1], calls=2)

    names = ("plain", "horovod fp32", "onebit")
    pairs = [("onebit", "horovod fp32"), ("onebit", "plain")]
    return compare({name: way(name) for name in names}, pairs, Workers(hvd), **options)


def small_tensors(**options: Any) -> dict[str, Any]:
    """Python's own work in a step with 300 small tensors."""
    data = torch.randn(8, 768)
    ways = {name: Way(step_of(name, Small(), data), calls=20) for name in ("plain", "onebit")}
    found = compare(ways, [("onebit", "plain")], Workers(hvd), **options)
    found["calls"] = calls("onebit", Small(), data)
    found["calls compressed"] = calls("onebit", Small(2 * 768), data)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("step", "small", "memory"))
    parser.add_argument("--way", default="onebit")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--anyway", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    try:
        if options.what == "memory":
            found = {"peak": peak(options.way), "parameters": sum(p.numel() for p in large().parameters())}
        else:
            run = {"step": whole_step, "small": small_tensors}[options.what]
            found = run(seconds=options.seconds, anyway=options.anyway)
    except Loaded as error:
        found = {"refused": str(error)}
    if hvd.rank() == 0:
        print("RESULT", json.dumps(found), flush=True)
    hvd.barrier()


if __name__ == "__main__":
    main()

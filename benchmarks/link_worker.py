"""What every process of `benchmarks/link.py` runs: all ways of exchanging gradients, one after the other, in turns.

Prints one line of JSON on rank 0. Times are wall time between barriers; bytes are what this host's network interface
counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_onebit.torch as onebit
from horovod_onebit import wire
from horovod_onebit.layout import TensorSpec, plan
from horovod_onebit.recipe import Recipe
from horovod_onebit.torch.collectives import HorovodCollectives

WARM = 3
RX = Path("/sys/class/net/e0/statistics/rx_bytes")

# Parameters: layers, width, batch size
MODELS = {"1M": (4, 512, 256), "25M": (6, 2048, 128), "110M": (7, 4000, 32)}


def received() -> int:
    return int(RX.read_text()) if RX.exists() else 0


def build(model: str) -> torch.nn.Module:
    torch.manual_seed(0)
    layers, width, _ = MODELS[model]
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


Step = Callable[[], None]


def stepper(model: Any, optimizer: Any, data: torch.Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


def alone(name: str, data: torch.Tensor) -> Step:
    model = build(name)
    return stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-4), data)


def horovod(compression: Any) -> Callable[[str, torch.Tensor], Step]:
    def make(name: str, data: torch.Tensor) -> Step:
        model = build(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        named = model.named_parameters()
        return stepper(model, hvd.DistributedOptimizer(optimizer, named, compression=compression), data)

    return make


def ours(**options: Any) -> Callable[[str, torch.Tensor], Step]:
    def make(name: str, data: torch.Tensor) -> Step:
        model = build(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        named, arguments = model.named_parameters(), {"exchange": "auto", "warmup_steps": 1} | options
        recipe = Recipe(exchange=arguments.pop("exchange"))
        return stepper(model, onebit.DistributedOptimizer(optimizer, named, recipe=recipe, **arguments), data)

    return make


def local(every: int, **options: Any) -> Callable[[str, torch.Tensor], Step]:
    """A whole round."""
    schedule = onebit.Local(every=every, doubling=0)

    def make(name: str, data: torch.Tensor) -> Step:
        step = ours(schedule=schedule, warmup_steps=None, **options)(name, data)

        def whole_round() -> None:
            for _ in range(every):
                step()

        return whole_round

    return make


def ddp(hook: str | None, rank: int = 0) -> Callable[[str, torch.Tensor], Step]:
    def make(name: str, data: torch.Tensor) -> Step:
        module = build(name)
        # PowerSGD over Gloo crashes with more than one bucket.
        model = DistributedDataParallel(module, bucket_cap_mb=1000 if hook == "powersgd" else 25)
        if hook == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return stepper(model, torch.optim.AdamW(module.parameters(), lr=1e-4), data)

    return make


WAYS: dict[str, Callable[[str, torch.Tensor], Step]] = {
    "no communication": alone,
    "horovod fp32": horovod(hvd.Compression.none),
    "horovod fp16": horovod(hvd.Compression.fp16),
    "ddp fp32": ddp(None),
    "ddp fp16": ddp("fp16"),
    "ddp powersgd 1": ddp("powersgd", 1),
    "ddp powersgd 4": ddp("powersgd", 4),
    "onebit": ours(exchange="auto"),
    "onebit direct": ours(exchange="direct"),
    "onebit two-stage": ours(exchange="two_stage"),
    "onebit no overlap": ours(exchange="auto", overlap=False),
    "onebit local 8": local(8),
    "onebit local 16": local(16),
    "onebit local 64": local(64),
    "float32 local 16": local(16, exact=["*"]),
}


def steps_of(way: str) -> int:
    """How many steps one call of ``way`` takes."""
    return int(way.split()[-1]) if "local" in way else 1


def training(name: str, ways: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Seconds and received bytes of a step, each way, in turns."""
    _, width, batch = MODELS[name]
    data = torch.randn(batch, width, generator=torch.Generator().manual_seed(hvd.rank()))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    nbytes: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            step, each = WAYS[way](name, data), steps_of(way)
            for _ in range(WARM if each == 1 else 1):
                step()
            for _ in range(max(1, steps // each)):
                hvd.barrier()
                before, start = received(), time.perf_counter()
                step()
                seconds[way].append((time.perf_counter() - start) / each)
                hvd.barrier()
                nbytes[way].append((received() - before) / each)
            del step
    return {way: {"seconds": spread(seconds[way]), "received": statistics.median(nbytes[way])} for way in ways}


def exchange(name: str, rounds: int) -> dict[str, Any]:
    """Seconds and received bytes of the exchange alone: gradients as float32, as float16, as 1-bit messages."""
    tensors = [p.detach().clone() for p in build(name).parameters() if p.numel() >= 1024]
    halves = [t.half() for t in tensors]
    collectives = HorovodCollectives()
    layout = plan([TensorSpec(str(i), t.numel()) for i, t in enumerate(tensors)], Recipe(), hvd.size())
    messages = [np.zeros(wire.message_size(bucket), np.uint8) for bucket in layout.buckets]

    def allreduce(values: list[torch.Tensor], prefix: str) -> None:
        for handle in [hvd.allreduce_async_(t, name=f"{prefix}.{i}") for i, t in enumerate(values)]:
            hvd.synchronize(handle)

    def gather() -> None:
        for handle in [collectives.allgather(m, f"message.{i}") for i, m in enumerate(messages)]:
            handle.wait()

    kinds = {
        "float32": lambda: allreduce(tensors, "fp32"),
        "float16": lambda: allreduce(halves, "fp16"),
        "1 bit": gather,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    nbytes: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for kind, run in kinds.items():
            hvd.barrier()
            before, start = received(), time.perf_counter()
            run()
            spent = time.perf_counter() - start
            hvd.barrier()
            if turn:
                seconds[kind].append(spent)
                nbytes[kind].append(received() - before)
    return {kind: {"seconds": spread(seconds[kind]), "received": statistics.median(nbytes[kind])} for kind in kinds}


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, [10, 50, 90])
    return {"median": float(middle), "p10": float(low), "p90": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="25M")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated, with _ for spaces")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps of each way in a round")
    parser.add_argument("--exchange-rounds", type=int, default=0)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--master", default="127.0.0.1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[hvd.rank() % len(os.sched_getaffinity(0))]})
    ways = [way.replace("_", " ") for way in options.ways.split(",")]
    if any(way.startswith("ddp") for way in ways):
        if RX.exists():
            os.environ["GLOO_SOCKET_IFNAME"] = "e0"
        address = f"tcp://{options.master}:29555"
        dist.init_process_group("gloo", init_method=address, rank=hvd.rank(), world_size=hvd.size())
    if options.batch:
        MODELS[options.model] = (*MODELS[options.model][:2], options.batch)
    result: dict[str, Any] = {"model": options.model, "workers": hvd.size(), "parameters": 0}
    result["parameters"] = sum(p.numel() for p in build(options.model).parameters())
    if options.exchange_rounds:
        result["exchange"] = exchange(options.model, options.exchange_rounds)
    if options.rounds:
        result["training"] = training(options.model, ways, options.rounds, options.steps)
    if hvd.rank() == 0:
        print("RESULT", json.dumps(result), flush=True)
    hvd.barrier()


if __name__ == "__main__":
    main()

"""What every process of `benchmarks/link.py` runs: all ways of exchanging gradients, in turns.

Prints one line of JSON on rank 0. Times are wall time between barriers, of the slowest host; bytes are what this host's
network interface counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import horovod_onebit.torch as onebit
from benchmarks.link_job import MODELS, RX, finish, limited, parse, take_core
from benchmarks.measure import Way
from benchmarks.peers import DiLoCo, over_horovod, powersgd
from horovod_onebit import wire
from horovod_onebit.layout import TensorSpec, plan
from horovod_onebit.recipe import Recipe
from horovod_onebit.torch.horovod import HorovodCollectives
from horovod_onebit.warmup import EXACT_FIRST


def build(model: str) -> torch.nn.Module:
    torch.manual_seed(0)
    layers, width, _ = MODELS[model]
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


AUTO = Recipe(exchange="auto")

Make = Callable[[str, torch.Tensor, str], Way]
"""A way to train of the model's name, the data and the way's own name; its first steps are taken. Collective."""


def named(way: str, model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Names of its own for each way: Horovod keeps what it has negotiated by name."""
    return [(f"{way}.{name}", p) for name, p in model.named_parameters()]


def stepper(model: Any, optimizer: Any, data: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


def every_step(model: Any, optimizer: Any, data: torch.Tensor, *, first: int = 2) -> Way:
    """One call is a step; the ``first`` ones are taken."""
    step = stepper(model, optimizer, data)
    for _ in range(first):
        step()
    return Way(step, rest=optimizer.zero_grad)


def whole_rounds(model: Any, optimizer: Any, data: torch.Tensor, every: int) -> Way:
    """One call is ``every`` steps, wherever in a round it begins: one exchange is among them."""
    step = stepper(model, optimizer, data)
    for _ in range(2):
        step()

    def run() -> None:
        for _ in range(every):
            step()

    return Way(run, steps=every, rest=optimizer.zero_grad)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """PyTorch's fastest."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def alone(name: str, data: torch.Tensor, way: str) -> Way:
    model = build(name)
    return every_step(model, adamw(model), data)


def horovod(compression: Any) -> Make:
    def make(name: str, data: torch.Tensor, way: str) -> Way:
        model = build(name)
        optimizer = hvd.DistributedOptimizer(adamw(model), named(way, model), compression=compression)
        return every_step(model, optimizer, data)

    return make


def ours(*, over_torch: bool = False, recipe: str | Recipe = AUTO, **options: Any) -> Make:
    def make(name: str, data: torch.Tensor, way: str) -> Way:
        model = build(name)
        arguments = {"warmup_steps": 1} | options
        over = {"process_group": dist.group.WORLD} if over_torch else {"process_set": hvd.global_process_set}
        optimizer = onebit.DistributedOptimizer(adamw(model), named(way, model), recipe=recipe, **over, **arguments)
        return every_step(model, optimizer, data, first=3)  # of which one is exact

    return make


def gradients(schedule: onebit.Gradients) -> Make:
    """As it is after the first steps, which are exact."""

    def make(name: str, data: torch.Tensor, way: str) -> Way:
        model = build(name)
        optimizer = onebit.DistributedOptimizer(
            adamw(model), named(way, model), schedule=schedule, process_set=hvd.global_process_set
        )
        return every_step(model, optimizer, data, first=EXACT_FIRST + 1)

    return make


def local(every: int, *, exact: Any = None, **options: Any) -> Make:
    """As it is after the second moments were frozen, which is here after the first step; they travel before it ends."""

    def make(name: str, data: torch.Tensor, way: str) -> Way:
        model = build(name)
        schedule = onebit.Local(every=every, freeze=1, **options)
        optimizer = onebit.DistributedOptimizer(
            adamw(model), named(way, model), schedule=schedule, exact=exact, process_set=hvd.global_process_set
        )
        found = whole_rounds(model, optimizer, data, every)
        optimizer.flush()
        return found

    return make


def diloco(every: int) -> Make:
    def make(name: str, data: torch.Tensor, way: str) -> Way:
        model = build(name)
        return whole_rounds(model, DiLoCo(adamw(model), every, over_horovod(way)), data, every)

    return make


def start_gloo(hosts: str) -> None:
    """What ``DistributedDataParallel`` needs; ``hosts`` are the addresses of all workers, comma-separated."""
    if RX.exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "e0"
    address = f"tcp://{hosts.split(',')[0]}:29555"
    dist.init_process_group("gloo", init_method=address, rank=hvd.rank(), world_size=hvd.size())


HOOKS: dict[str | None, Any] = {
    "fp16": default_hooks.fp16_compress_hook,
    # Without NCCL, DistributedDataParallel refuses this hook by its name, although Gloo sums bfloat16.
    "bf16": lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket),
}


def ddp(hook: str | None, rank: int = 0) -> Make:
    def make(name: str, data: torch.Tensor, way: str) -> Way:
        module = build(name)
        model = (
            powersgd(module, rank, start=2) if hook == "powersgd" else DistributedDataParallel(module, bucket_cap_mb=25)
        )
        if hook in HOOKS:
            model.register_comm_hook(None, HOOKS[hook])
        return every_step(model, adamw(module), data, first=3)  # PowerSGD begins with the third

    return make


OVER_TORCH = "torch.distributed"

WAYS: dict[str, Make] = {
    "no communication": alone,
    "horovod fp32": horovod(hvd.Compression.none),
    "horovod fp16": horovod(hvd.Compression.fp16),
    "ddp fp32": ddp(None),
    "ddp fp16": ddp("fp16"),
    "ddp bf16": ddp("bf16"),
    "ddp powersgd 1": ddp("powersgd", 1),
    "ddp powersgd 4": ddp("powersgd", 4),
    "onebit": ours(),
    "onebit direct": ours(recipe=Recipe(exchange="direct")),
    "onebit two-stage": ours(recipe=Recipe(exchange="two_stage")),
    "onebit no overlap": ours(overlap=False),
    f"onebit {OVER_TORCH}": ours(over_torch=True),
    f"exact {OVER_TORCH}": ours(over_torch=True, recipe="exact"),
    "gradients in three bits": gradients(onebit.Gradients()),
    "gradients in two bits": gradients(onebit.Gradients("two_bit")),
    "onebit local 8": local(8),
    "onebit local 16": local(16),
    "onebit local 16 hidden": local(16, delay=4),
    "onebit local 64": local(64),
    "float32 local 16": local(16, exact=["*"]),
    "diloco 16": diloco(16),
    "diloco 64": diloco(64),
}


def exchange(name: str, calls: int) -> dict[str, Way]:
    """The exchange alone: gradients as float32, as float16, as 1-bit messages; so many ``calls`` in a turn."""
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
    for run in kinds.values():
        run()
    return {kind: Way(run, calls=calls) for kind, run in kinds.items()}


def main() -> None:
    options = parse(__doc__)
    torch.set_num_threads(1)
    hvd.init()
    take_core(hvd.rank())
    if any(way.startswith("ddp") or way.endswith(OVER_TORCH) for way in options.ways):
        start_gloo(options.hosts)
    _, width, batch = MODELS[options.model]
    data = torch.randn(batch, width, generator=torch.Generator().manual_seed(hvd.rank()))
    ways = {}
    if options.seconds:
        for name, most in options.ways.items():
            ways[name] = limited(WAYS[name](options.model, data, name), most, options.steps)
    parameters = sum(p.numel() for p in build(options.model).parameters())
    finish(options, hvd, ways, parameters=parameters, exchange=lambda: exchange(options.model, options.steps))


if __name__ == "__main__":
    main()

"""The CUDA kernels on a GPU: their share of the bandwidth of a copy, and against Adam and separate operations.

    python -m benchmarks.gpu            writes benchmarks/results/gpu.json

Medians by CUDA events over inputs larger than the second-level cache. Each byte is counted once: encode reads gradient,
momentum and residual, and the second moment in update space, and writes the residual and a bit; decode and Adam read a
bit of each worker, second moment and weight, and write weight and momentum. Then whole steps of one worker, backward
pass apart, of a network of 24 layers of a Transformer (302 million parameters in 288 tensors), beside AdamW's alone:
messages travel by ``torch.distributed``, and there is nobody to send them to. Without a GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from horovod_onebit import Recipe, codecs
from horovod_onebit.warmup import EXACT_FIRST

RESULTS = Path(__file__).parent / "results" / "gpu.json"
BLOCK = 1024


def milliseconds(torch: Any, work: Callable[[], object], rounds: int = 30) -> float:
    """The median time of ``work`` on the device."""
    times = []
    for i in range(rounds + 5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        if i >= 5:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def host_microseconds(torch: Any, work: Callable[[], object], rounds: int = 200) -> float:
    """The median time that the host spends in ``work``."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


class Bench:
    """``size`` parameters and the messages of ``workers``, all on the device."""

    def __init__(self, torch: Any, size: int, workers: int) -> None:
        from horovod_onebit.kernels import cuda as kernels
        from horovod_onebit.kernels.reference import Arrays, Coding
        from horovod_onebit.rules import adam, scalars

        self.torch, self.kernels, self.size = torch, kernels, size
        kernels.use_stream(lambda: torch.cuda.current_stream().cuda_stream)
        self.g, self.m, self.e, self.w = (torch.randn(size, device="cuda") for _ in range(4))
        self.v = torch.rand(size, device="cuda")
        self.coding = Coding(codecs.find("sign"), BLOCK, codecs.GUARD)
        length = self.coding.codec.size(size, BLOCK)
        self.messages = torch.randint(0, 256, (workers, length), device="cuda", dtype=torch.uint8)
        self.messages.view(torch.float32)[:, :: self.coding.codec.record_size(BLOCK) // 4] = 1
        self.rows = kernels.Rows(self.messages.data_ptr(), workers, length, self.messages)
        self.row = kernels.Buffer(self.messages.data_ptr(), length, "uint8", self.messages)
        self.arrays, self.adam = Arrays(self.g, self.m, self.v, self.w), adam
        values = {"beta1": 0.9, "grad": 0.1, "l2": 0, "correction": 1, "eps_inside": 0, "eps": 1e-8, "clip": 3}
        self.scalars = scalars(adam.Scalars, **values, decay=1, step=1e-9)

    def encode(self, update_space: bool) -> None:
        formula = self.adam.update if update_space else self.adam.momentum
        self.kernels.encode(formula, self.scalars, self.arrays, self.e, self.row, 0, self.coding)

    def apply(self) -> None:
        self.kernels.apply(self.adam.move_by_update, self.scalars, self.arrays, self.rows, 0, self.coding)

    def separate(self) -> None:
        """The same compression and step as operations of PyTorch, one after the other."""
        torch, n = self.torch, self.size // BLOCK * BLOCK
        u = ((0.9 * self.m + 0.1 * self.g) / (self.v.sqrt() + 1e-8)).clamp(-3, 3) + self.e
        x = u[:n].view(-1, BLOCK)
        size = x.abs()
        scale = torch.minimum((x * x).mean(1).sqrt(), 1.5 * size.mean(1))
        negative = x < 0
        self.e[:n] = (x - torch.where(negative, -scale[:, None], scale[:, None])).view(-1)
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], device="cuda", dtype=torch.uint8)
        (negative.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)
        mean = torch.zeros(n, device="cuda")
        for message in self.messages:
            records = message[: n // BLOCK * self.coding.codec.record_size(BLOCK)].view(-1, 4 + BLOCK // 8)
            bits = (records[:, 4:].reshape(-1, 1) & weights) != 0
            share = (records[:, :4].contiguous().view(torch.float32) / len(self.messages)).repeat_interleave(BLOCK)
            mean += torch.where(bits.view(-1), -share, share)
        self.m[:n] = mean * (self.v[:n].sqrt() + 1e-8)
        self.w[:n] -= 1e-9 * mean


def measure(torch: Any, size: int, workers: int) -> dict[str, Any]:
    bench, target = Bench(torch, size, workers), torch.empty(size, device="cuda")
    copy = milliseconds(torch, lambda: target.copy_(bench.g))
    bandwidth = 8 * size / copy
    found: dict[str, Any] = {"parameters": size, "workers": workers, "copy": {"ms": copy, "TB/s": bandwidth / 1e9}}
    parts = {
        "encode, momentum space": (lambda: bench.encode(False), 16 + 1 / 8),
        "encode, update space": (lambda: bench.encode(True), 20 + 1 / 8),
        "decode and Adam": (bench.apply, 16 + workers / 8),
    }
    for name, (work, counted) in parts.items():
        ms = milliseconds(torch, work)
        found[name] = {"ms": ms, "share of the copy's bandwidth": counted * size / ms / bandwidth}
    parameter = torch.nn.Parameter(bench.w)
    parameter.grad = bench.g
    adam = torch.optim.Adam([parameter], lr=1e-9, fused=True)
    own = found["encode, update space"]["ms"] + found["decode and Adam"]["ms"]
    fused, separate = milliseconds(torch, adam.step), milliseconds(torch, bench.separate)
    found["both, as a multiple of fused Adam"] = own / fused
    found["separate operations, as a multiple of both"] = separate / own
    small = Bench(torch, BLOCK, workers)
    found["host microseconds a launch"] = {
        "encode": host_microseconds(torch, lambda: small.encode(True)),
        "decode and Adam": host_microseconds(torch, small.apply),
    }
    return found


def profiled(work: Callable[[], object], rounds: int = 10, lines: int = 30) -> None:
    """Print where the host spends its time in ``work``."""
    with cProfile.Profile() as profile:
        for _ in range(rounds):
            work()
    pstats.Stats(profile).sort_stats("tottime").print_stats(lines)


def steps(torch: Any, *, profile: bool, layers: int = 24, width: int = 1024) -> dict[str, float]:
    """The median milliseconds of a step, from the end of one to that of the next, of AdamW and of ours around it.

    ``profile`` prints what the host does in a step with one bit.
    """
    import horovod_onebit.torch as onebit

    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    found = {}
    three = Recipe(warmup="three_bit")
    kinds = {
        "AdamW": None,
        "AdamW, fused": None,
        "exact": ("cuda", 10**6, Recipe(warmup="exact")),
        "gradients in three bits": ("cuda", 10**6, three),
        "one bit": ("cuda", 2, "robust"),
        "one bit, compressed by the host": ("cpu", 2, "robust"),
    }
    for name, ours in kinds.items():
        torch.manual_seed(0)
        one = [torch.nn.TransformerEncoderLayer(width, 16, 4 * width, device="cuda") for _ in range(layers)]
        model = torch.nn.ModuleList(one)
        gradients = [torch.randn_like(p) for p in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused="fused" in name)
        if ours:
            kernels, warmup, recipe = ours
            optimizer = onebit.DistributedOptimizer(
                optimizer, model.named_parameters(), warmup_steps=warmup, kernels=kernels, recipe=recipe
            )

        def step(model: Any = model, optimizer: Any = optimizer, gradients: Any = gradients) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(list(model.parameters()), gradients)
            optimizer.step()
            torch.cuda.synchronize()

        times = []
        for i in range(8 if ours and ours[0] == "cpu" else 25):
            start = time.perf_counter()
            step()
            if i >= (5 if ours is None or ours[2] != three else EXACT_FIRST + 3):
                times.append(1e3 * (time.perf_counter() - start))
        found[name] = statistics.median(times)
        if profile and name == "one bit":
            profiled(step)
    torch.distributed.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="print what the host does in a step with one bit")
    options, console = parser.parse_args(), Console()
    import torch

    from horovod_onebit.kernels import has_gpu

    if not (torch.cuda.is_available() and has_gpu()):
        console.print("benchmarks.gpu: skipped, for want of an NVIDIA GPU, of PyTorch's CUDA build or of numba-cuda")
        return
    found = {"card": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__}
    found |= measure(torch, options.parameters, options.workers)
    found["milliseconds of a step of 302 M parameters"] = steps(torch, profile=options.profile)
    table = Table("", "", title=f"{options.parameters:,} parameters, {found['card']}")
    for name, value in found.items():
        table.add_row(name, json.dumps(value))
    console.print(table)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

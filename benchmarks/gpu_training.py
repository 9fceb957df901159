"""Training `charlm` with the CUDA kernels against the CPU's: the same loss within noise, replicas bit for bit equal.

    python -m benchmarks.gpu_training       writes benchmarks/results/gpu_training.json

By horovodrun, or with `--launcher torchrun`. One process, and two on one card over Gloo, each on the CPU
and on the GPU; noise is what another seed makes of the run on the CPU. Then a large network, in one
process. Without a GPU it says so and ends; `--device cpu` goes through it all the same, to try this program.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jobs.demo import LAUNCHERS, parse, run

RESULTS = Path(__file__).parent / "results" / "gpu_training.json"


def train(
    launcher: str, processes: int, device: str, steps: int, width: int, seed: int = 0, batch: int = 0
) -> dict[str, Any]:
    """One job: its losses, the last line of its metrics, and whether the replicas were equal."""
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder, "{rank}.npz"))
        job = ["--device", device, "--width", str(width), "--batch-size", str(batch)]
        job += ["--save-weights", weights] if processes > 1 else []
        own = ["--task", "charlm", "--steps", str(steps), "--warmup-steps", "50", "--warmup", "exact"]
        options = parse([*own, "--launcher", launcher, "--output", folder, *job])
        options.np = processes
        done = run(options, "onebit", seed, launcher=launcher)
        ranks = [np.load(weights.format(rank=rank)) for rank in range(processes)] if processes > 1 else []
        equal = all(np.array_equal(ranks[0][name], other[name]) for other in ranks[1:] for name in other.files)
        return {
            "losses": [line["loss"] for line in done.steps],
            "seconds": [line["seconds"] for line in done.steps],
            "last": done.final,
            "replicas equal": equal,
        }


def width_for(memory: int) -> int:
    """The largest width up to 4096 for which weights, gradients, moments, residuals and one more copy fit into 0.7 of
    so many bytes; 1024 at least."""
    width = 4096
    while width > 1024 and 6 * 4 * 2.4e9 * (width / 8192) ** 2 > 0.7 * memory:
        width //= 2
    return width


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The root mean square of the relative difference between two loss curves."""
    x, y = np.array(a["losses"]), np.array(b["losses"])
    return float(np.sqrt(np.mean((x / y - 1) ** 2)))


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kinds = {"cpu": ("cpu", 0), "noise": ("cpu", 1), "gpu": (options.device, 0)}

    def small(job: tuple[int, str]) -> dict[str, Any]:
        processes, kind = job
        device, seed = kinds[kind]
        return train(options.launcher, processes, device, options.steps, options.width, seed)

    jobs = list(product((1, 2), kinds))
    with (
        console.status(f"charlm, {len(jobs)} jobs ..."),
        ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 3)) as pool,
    ):
        done = dict(zip(jobs, pool.map(small, jobs), strict=True))
    for processes in (1, 2):
        runs = {kind: done[processes, kind] for kind in kinds}
        found[f"{processes} processes"] = {
            "test loss": {name: run["last"]["test_loss"] for name, run in runs.items()},
            "distance of the loss curves, GPU to CPU": distance(runs["gpu"], runs["cpu"]),
            "distance of the loss curves, seed to seed": distance(runs["noise"], runs["cpu"]),
            "replicas equal": all(run["replicas equal"] for run in runs.values()),
        }
    with console.status("a large network ..."):
        steps, width = options.large_steps, options.large_width
        large = train(options.launcher, 1, options.device, steps, width, batch=options.large_batch)
    found["large"] = {
        "parameters": large["last"]["parameters"],
        "loss, first and last": [large["losses"][0], large["last"]["loss"]],
        "milliseconds a step with one bit": 1e3 * float(np.median(np.diff(large["seconds"][-10:]))),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="horovodrun")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=119)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--large-width", type=int, help="4096, 0.6 billion parameters, if the GPU's memory is enough")
    parser.add_argument("--large-steps", type=int, default=60)
    parser.add_argument("--large-batch", type=int, default=64)
    options, console = parser.parse_args(), Console()
    import torch

    from horovod_onebit.kernels import has_gpu

    if options.device == "cuda" and not (torch.cuda.is_available() and has_gpu()):
        console.print("benchmarks.gpu_training: skipped, for want of an NVIDIA GPU, PyTorch's CUDA build or numba-cuda")
        return
    if options.large_width is None:
        options.large_width = width_for(torch.cuda.mem_get_info()[0] if options.device == "cuda" else 0)
    found = measure(options, console)
    if options.device == "cuda":
        card = {"card": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__}
        card["launcher"] = options.launcher
        RESULTS.write_text(json.dumps(card | found, indent=1) + "\n")
    table = Table("", "", title="charlm on a GPU and on the CPU")
    for name, value in found.items():
        table.add_row(name, json.dumps(value, indent=1))
    console.print(table)


if __name__ == "__main__":
    main()

"""Train a small network on several processes, with or without 1-bit compression.

horovodrun -np 2 python torch/train.py --task digits --compression onebit --warmup-steps 100 --steps 600
torchrun --standalone --nproc-per-node 2 torch/train.py --task digits --compression onebit --warmup-steps 100
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from networks import build
from torch.nn.functional import cross_entropy
from world import world

sys.path.append(str(Path(__file__).resolve().parents[1]))

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError, OnebitError
from horovod_onebit.stats import allreduce_bytes
from jobs.data import Task, load
from jobs.metrics import Metrics
from jobs.options import Options, learning_rate, parse, recipe_of


def plain_optimizer(options: Options, model: torch.nn.Module) -> torch.optim.Optimizer:
    if options.optimizer == "sgd":
        arguments = {"momentum": options.momentum, "weight_decay": options.weight_decay}
        return torch.optim.SGD(model.parameters(), lr=options.lr, **arguments)
    kind = {"adam": torch.optim.Adam, "lamb": onebit.LAMB}.get(options.optimizer, torch.optim.AdamW)
    return kind(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)


def distributed(options: Options, model: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    """The model for forward passes, and its optimizer."""
    optimizer = plain_optimizer(options, model)
    if options.compression == "onebit":
        start: dict[str, Any] = {"warmup_steps": options.warmup_steps}
        if options.optimizer == "zero_one_adam":
            warmup = "exact" if options.warmup == "auto" else options.warmup
            schedule = onebit.ZeroOne(options.warmup_steps, 4, max(options.steps // 10, 1), 16, warmup)
            start = {"schedule": schedule}
        start["compression"] = onebit.Compression.fp16 if options.half else onebit.Compression.none
        optimizer = onebit.DistributedOptimizer(optimizer, model.named_parameters(), recipe=recipe_of(options), **start)
        replica = model
    else:
        replica, optimizer = world.averaged(model, optimizer, half=options.compression == "fp16")
    onebit.broadcast_parameters(model.state_dict(), root_rank=0)
    onebit.broadcast_optimizer_state(optimizer, root_rank=0)
    return replica, optimizer


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(x).flatten(0, -2)
    return cross_entropy(logits, y.flatten()), logits


def device_for(options: Options) -> torch.device:
    """This worker's: a GPU each, or shared if there are fewer of them than workers on a host."""
    usable = torch.cuda.is_available() and world.carries_gpus
    if options.device == "cpu" or (options.device == "auto" and not usable):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "--device cuda: PyTorch sees no GPU here (nvidia-smi; torch.version.cuda): use --device cpu"
        )
    torch.cuda.set_device(world.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


@torch.no_grad()
def evaluate(model: torch.nn.Module, task: Task, device: torch.device) -> tuple[float, float]:
    """Loss and accuracy on the test examples; the same on every worker, since the replicas are."""
    model.eval()
    x, y = (torch.from_numpy(a).to(device) for a in (task.test_x, task.test_y))
    loss, logits = loss_of(model, x, y)
    model.train()
    return float(loss), float((logits.argmax(1) == y.flatten()).float().mean())


def train(options: Options, task: Task) -> None:
    device = device_for(options)
    torch.manual_seed(options.seed)
    model = build(options.task, options.width, task.train_x.shape[1], task.classes).to(device)
    replica, optimizer = distributed(options, model)
    parameters = sum(p.numel() for p in model.parameters())
    dense = allreduce_bytes(4 * parameters, world.size())
    first = last = total = 0
    with Metrics(options, world.rank()) as metrics:
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, step)
            x, y = (torch.from_numpy(a).to(device) for a in task.batch(options, step, world.rank(), world.size()))
            optimizer.zero_grad()
            loss, _ = loss_of(replica, x, y)
            phase = optimizer.phase.value if options.compression == "onebit" else options.compression
            loss.backward()
            optimizer.step()
            done = step + 1
            if options.compression == "onebit" and (done % options.eval_interval == 0 or done == options.steps):
                optimizer.flush()
            if options.compression == "onebit":
                last = optimizer.stats(norms=False).step_bytes_sent
            else:
                last = dense if options.compression == "none" else dense // 2
            first = first or last
            total += last
            values: dict[str, Any] = {"phase": phase, "bytes_sent": total, "bytes_received": total}
            if done % options.log_interval == 0 or done == options.steps:
                values["loss"] = float(world.allreduce(loss.detach(), name="metrics.loss"))
                if done % options.eval_interval == 0 or done == options.steps:
                    values["test_loss"], values["accuracy"] = evaluate(model, task, device)
                metrics.log(done, **values)
        compressed = optimizer.stats(norms=False).compressed_parameters if options.compression == "onebit" else 0
        metrics.final(
            loss=values["loss"],
            test_loss=values["test_loss"],
            accuracy=values["accuracy"],
            parameters=parameters,
            compressed_parameters=compressed,
            workers=world.size(),
            first_step_bytes=first,
            last_step_bytes=last,
            fp32_step_bytes=dense,
            ratio=dense / last if last else 1.0,
            bytes_sent=total,
            bytes_received=total,
        )
    if options.save_weights:
        weights = {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}
        np.savez(options.save_weights.format(rank=world.rank()), **weights)


def main() -> int:
    options = parse()
    world.init()
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // world.local_size()))
    try:
        train(options, load(options))
    except OnebitError as error:
        # On every rank: the first to end ends the job, and it may be any of them.
        print(f"train.py: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

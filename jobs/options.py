"""The command line of the training jobs, the same in every framework."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from horovod_onebit.recipe import Recipe, WarmupName, resolve
from horovod_onebit.schedule import EXACT


@dataclass(frozen=True)
class Defaults:
    """What a task trains well with."""

    lr: float
    batch_size: int
    width: int


TASKS = {
    "digits": Defaults(lr=1e-3, batch_size=32, width=32),
    "vgg": Defaults(lr=5e-4, batch_size=32, width=8),
    "charlm": Defaults(lr=1e-3, batch_size=16, width=128),
    "mlp": Defaults(lr=1e-3, batch_size=32, width=448),
}


OPTIMIZERS = ("adamw", "adam", "sgd", "lamb", "zero_one_adam")
LR_FACTORS = {"sgd": 50, "lamb": 10}
"""The tasks' own learning rates are Adam's; others' are so many times that."""


@dataclass(frozen=True)
class Options:
    """One run. ``batch_size`` is for each worker; ``width`` is channels (digits, vgg) or features (charlm, mlp)."""

    task: str
    optimizer: str
    compression: str
    recipe: str
    warmup_steps: int
    warmup: str
    half: bool
    steps: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    lr_schedule: str
    width: int
    device: str
    seed: int
    log_interval: int
    eval_interval: int
    data_dir: Path | None
    metrics: Path | None
    save_weights: str | None


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options from the command line. Exits with status 2 and a message where they make no sense.

    Every worker parses the same line, so that all of them stop before the first collective.
    """
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--task", choices=TASKS, default="digits")
    add("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    add("--compression", choices=("none", "fp16", "onebit"), default="onebit")
    add("--fp16-allreduce", action="store_true", help="Horovod's name for --compression fp16")
    add("--recipe", default="robust", help="for onebit: robust, paper or fixed")
    add(
        "--warmup-steps",
        type=int,
        default=100,
        help="for onebit: steps before it; for zero_one_adam: var_freeze_step",
    )
    add("--warmup", choices=get_args(WarmupName), default="auto", help="for onebit: how their gradients travel")
    add("--half", action="store_true", help="for onebit: exact averages travel in float16")
    add("--steps", type=int, default=600)
    add("--batch-size", type=int, default=0, help="for each worker; 0 is the task's own")
    add("--lr", type=float, default=0.0, help="0 is the task's and optimizer's own")
    add("--momentum", type=float, default=0.9, help="for sgd")
    add("--weight-decay", type=float, default=0.01)
    add("--lr-schedule", choices=("constant", "cosine"), default="cosine")
    add("--width", type=int, default=0, help="size of the network; 0 is the task's own")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto is a GPU where there is one")
    add("--seed", type=int, default=0)
    add("--log-interval", type=int, default=10)
    add("--eval-interval", type=int, default=100)
    add("--data-dir", type=Path, help="holds cifar-10-batches-py, for vgg")
    add("--metrics", type=Path, help="write a JSON object a line to this file")
    add("--save-weights", help="write each worker's final weights; {rank} in the name becomes its rank")
    args = vars(parser.parse_args(argv))
    if args.pop("fp16_allreduce"):
        args["compression"] = "fp16"
    task = TASKS[args["task"]]
    args["lr"] = args["lr"] or task.lr * LR_FACTORS.get(args["optimizer"], 1)
    for name in ("batch_size", "width"):
        args[name] = args[name] or getattr(task, name)
    for name in ("steps", "warmup_steps", "batch_size", "log_interval", "eval_interval", "width", "lr"):
        if not args[name] > 0:
            parser.error(f"--{name.replace('_', '-')} {args[name]}: expected a positive number")
    for name in ("momentum", "weight_decay", "seed"):
        if args[name] < 0:
            parser.error(f"--{name.replace('_', '-')} {args[name]}: expected zero or more")
    if args["data_dir"] is not None and not (args["data_dir"] / "cifar-10-batches-py").is_dir():
        parser.error(f"--data-dir {args['data_dir']}: expected a folder that holds cifar-10-batches-py")
    if args["metrics"] is not None and not args["metrics"].absolute().parent.is_dir():
        parser.error(f"--metrics {args['metrics']}: there is no folder {args['metrics'].absolute().parent}")
    if args["save_weights"] and "{rank}" not in args["save_weights"]:
        parser.error(f"--save-weights {args['save_weights']}: expected {{rank}} in the name, one file for each worker")
    if args["save_weights"] and not (folder := Path(args["save_weights"]).absolute().parent).is_dir():
        parser.error(f"--save-weights {args['save_weights']}: there is no folder {folder}")
    return Options(**args)


def recipe_of(options: Options) -> str | Recipe:
    """``"exact"`` unless gradients travel as one bit; else the recipe, with its warm-up."""
    if options.compression != "onebit":
        return EXACT
    return warmed_up(options.recipe, options.warmup)


def warmed_up(recipe: str, warmup: Any) -> Recipe:
    """``recipe`` with another ``warmup``, unless that is ``"auto"``."""
    found = resolve(recipe)
    return found if warmup == "auto" else replace(found, warmup=warmup)


def learning_rate(options: Options, step: int) -> float:
    """The learning rate of ``step`` (from 0)."""
    if options.lr_schedule == "constant":
        return options.lr
    return options.lr * 0.5 * (1 + math.cos(math.pi * step / options.steps))

"""One process of study 2: all runs of a task one after the other, as torch/train.py does them.

horovodrun -np 2 python -m studies.early_worker TASK FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.torch as hvd

from studies import early, report

sys.path.insert(0, str(report.ROOT / "torch"))

import train  # type: ignore[import-not-found]

from jobs.data import load
from jobs.options import parse


def main() -> None:
    task, folder = sys.argv[1:]
    hvd.init()
    for recipe, start, seeds in early.plan():
        for seed in seeds:
            arguments = ["--task", task, "--steps", early.STEPS, "--eval-interval", early.STEPS, "--seed", seed]
            arguments += ["--warmup-steps", start, "--metrics", early.metrics(Path(folder), recipe, start, seed)]
            arguments += ["--warmup", "exact"]
            arguments += ["--width", early.WIDTHS[task]] if task in early.WIDTHS else []
            arguments += ["--compression", "none"] if recipe == "none" else ["--recipe", recipe]
            options = parse([str(argument) for argument in arguments])
            train.train(options, load(options))


if __name__ == "__main__":
    main()

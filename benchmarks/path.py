"""The way of a gradient from PyTorch's hook to the weights, through this package's files: two processes here.

    python -m benchmarks.path [--package FOLDER]

Four tensors, two of them compressed, in one compressed step: how many files its functions are in, and how often one
calls a function of another. ``--package`` is the root of another clone, to compare with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def follow() -> None:
    """One rank: warm-up, two compressed steps, and one that is followed."""
    import horovod.torch as hvd
    import torch

    import horovod_onebit.torch as onebit

    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    optimizer = onebit.DistributedOptimizer(optimizer, model.named_parameters(), warmup_steps=2)
    package = str(Path(onebit.__file__).parents[1])
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event != "call" or not frame.f_code.co_filename.startswith(package):
            return
        while caller is not None and not caller.f_code.co_filename.startswith(package):
            caller = caller.f_back
        source = "" if caller is None else caller.f_code.co_filename[len(package) + 1 :]
        calls[source, frame.f_code.co_filename[len(package) + 1 :]] += 1

    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 64)).square().mean()
        sys.setprofile(note if step == 4 else None)
        loss.backward()
        optimizer.step()
        sys.setprofile(None)
    if hvd.rank() == 0:
        files = sorted({callee for _, callee in calls})
        changes = sum(count for (source, callee), count in calls.items() if source != callee)
        sys.stdout.write("RESULT " + json.dumps({"files": files, "calls": calls.total(), "changes": changes}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=ROOT)
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.follow:
        follow()
        return
    from jobs.processes import horovodrun  # of this clone: the other one may lack it

    path = f"{options.package.resolve()}:{ROOT}"
    found = horovodrun(2, Path(__file__).resolve(), "--follow", timeout=300, PYTHONPATH=path)
    print(f"{len(found['files'])} files, {found['changes']} calls from one file into another, {found['calls']} in all")
    print("\n".join(found["files"]))


if __name__ == "__main__":
    main()

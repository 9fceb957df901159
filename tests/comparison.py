"""Does another version of the library compute the same numbers? Simulated runs of both, compared bit by bit.

    python -m tests.comparison COMMIT      # the working tree against COMMIT

Each configuration is run by the library of both; weights, residuals and traffic of all workers are hashed. A change
that only moves code keeps every hash; one that changes bytes on the wire may change the traffic and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"scalar": 1, "nine": 9, "odd": 1025, "even": 2048, "long": 5003}
STEPS, WARMUP = 24, 5


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name -> what differs from ``robust`` Adam of 4 workers with the CPU kernels."""
    from horovod_onebit import PRESETS, Recipe
    from horovod_onebit.rules.adam import Adam
    from horovod_onebit.rules.lamb import LAMB
    from horovod_onebit.rules.sgd import SGD
    from horovod_onebit.schedule import ZeroOne

    small = Recipe(block_size=16, min_compressed_size=8, bucket_size=700)
    rules = {
        "adam": Adam(lr=0.01),
        "adamw": Adam(lr=0.01, weight_decay=0.1),
        "adam l2": Adam(lr=0.01, weight_decay=0.1, decoupled=False),
        "sgd": SGD(lr=0.05, momentum=0.9),
        "nesterov": SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        "lamb": LAMB(lr=0.01, weight_decay=0.01),
    }
    for name, rule in rules.items():
        for exchange in ("direct", "two_stage", "hierarchical"):
            apart = {"per_host": 2} if exchange == "hierarchical" else {}
            yield (
                f"{name}, {exchange}",
                {"rule": rule, "recipe": dataclasses.replace(small, exchange=exchange), **apart},
            )
    for preset in ("paper", "fixed"):
        for name in ("adam", "sgd", "lamb"):
            recipe = dataclasses.replace(PRESETS[preset], min_compressed_size=8)
            yield f"{preset}, {name}", {"rule": rules[name], "recipe": recipe}
    for exchange in ("direct", "two_stage", "hierarchical"):
        apart = {"per_host": 2} if exchange == "hierarchical" else {}
        recipe = dataclasses.replace(small, exchange=exchange)
        yield f"NaN, {exchange}", {"recipe": recipe, "nan": True, **apart}
    for exchange in ("direct", "two_stage"):
        schedule = ZeroOne(var_freeze_step=12, var_update_scaler=5, local_step_scaler=6, local_step_clipper=4)
        recipe = dataclasses.replace(small, exchange=exchange)
        yield f"0/1 Adam, {exchange}", {"recipe": recipe, "schedule": schedule}
    for workers in (1, 2, 3, 7):
        yield f"{workers} workers", {"recipe": dataclasses.replace(small, exchange="auto"), "workers": workers}
    yield "one block a tensor", {"recipe": dataclasses.replace(small, block_size=None)}
    yield "default blocks", {"recipe": Recipe(min_compressed_size=1)}
    yield "no clip", {"recipe": dataclasses.replace(small, clip=None)}
    yield "reference kernels", {"recipe": small, "kernels": "reference"}
    yield "automatic warm-up", {"recipe": small, "warmup": "auto", "steps": 60}


def run(
    *,
    rule: Any = None,
    recipe: Any,
    workers: int = 4,
    per_host: int = 1,
    nan: bool = False,
    kernels: str = "cpu",
    warmup: int | str = WARMUP,
    steps: int = STEPS,
    schedule: Any = None,
) -> dict[str, str]:
    """Train in the simulator; hashes of what came out."""
    from horovod_onebit import simulation
    from horovod_onebit.optimizer import NumpyOptimizer
    from horovod_onebit.rules.adam import Adam

    def worker(collectives: Any) -> tuple[list[bytes], list[bytes], int]:
        rng = np.random.default_rng(collectives.rank)
        weights = {name: np.full(size, 0.5, np.float32) for name, size in SIZES.items()}
        how = {"collectives": collectives, "recipe": recipe, "kernels": kernels}
        how |= {"warmup_steps": warmup} if schedule is None else {}
        optimizer = NumpyOptimizer(weights, rule or Adam(lr=0.01), schedule=schedule, **how)
        for step in range(steps):
            noise = {name: 0.3 * rng.standard_normal(w.size) for name, w in weights.items()}
            grads = {name: (w - 1 + noise[name]).astype(np.float32) for name, w in weights.items()}
            if nan and step in (3, 12) and collectives.rank == workers - 1:
                grads["long"][17] = np.nan
            optimizer.step(grads)
        feedback = optimizer.engine.feedback.state_dict()
        # Names of servers' residuals hold a digest of the layout.
        residuals = [feedback[name].tobytes() for name in sorted(feedback, key=lambda n: (n.split(".")[-1], n))]
        return [w.tobytes() for w in weights.values()], residuals, optimizer.engine.traffic.total

    results = simulation.run(worker, workers, workers_per_host=per_host)
    columns = dict(zip(("weights", "residuals", "traffic"), zip(*results, strict=True), strict=True))
    return {name: hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest() for name, value in columns.items()}


def hashes(library: Path) -> dict[str, dict[str, str]]:
    """Run all configurations with the library in the folder ``library``."""
    env = os.environ | {"PYTHONPATH": str(library)}
    command = [sys.executable, __file__, "--hashes"]
    return json.loads(subprocess.run(command, cwd=library, env=env, stdout=subprocess.PIPE, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", default="HEAD", help="what to compare the working tree with (HEAD)")
    parser.add_argument("--hashes", action="store_true", help="print those of the library that is imported, as JSON")
    options = parser.parse_args()
    if options.hashes:
        json.dump({name: run(**how) for name, how in configurations()}, sys.stdout)
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = ["git", "archive", options.commit, "horovod_onebit"]
        packed = subprocess.run(archive, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        before = hashes(Path(folder))
    now, differ = hashes(ROOT), 0
    for name in before:
        parts = [part for part in before[name] if now[name][part] != before[name][part]]
        differ += bool(parts)
        print(f"{name:24} {'differs in ' + ', '.join(parts) if parts else 'the same'}")
    print(f"{len(before) - differ} of {len(before)} configurations give the same bits as {options.commit}")
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()

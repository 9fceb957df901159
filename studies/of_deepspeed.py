"""Study 14: DeepSpeed's own optimizers, unmodified, beside this library's recipes; the tasks are those of study 6.

Each run of DeepSpeed is two processes over Gloo (``studies.of_deepspeed_worker``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.recipe import Recipe
from horovod_onebit.schedule import ZeroOne
from jobs import processes
from studies import pool, report
from studies.rates import SEEDS, Cell, Result, kept, measured, train
from studies.recipes import PRESETS

WORKERS = 2
VERSION = "0.19.6"
"""As in requirements/studies.txt. 0.19.7 has no 1-bit optimizers any more."""
TITLE = "## 14. DeepSpeed's own optimizers"
MISSING = f"Skipped: it needs DeepSpeed {VERSION} (`pip install -r requirements/studies.txt`)."
INTRODUCTION = (
    f"DeepSpeed {VERSION}, unmodified, in its own engine, beside this library's recipes: {WORKERS} workers, the tasks, "
    "batches and rates of study 6, from the same weights. DeepSpeed runs as two processes over Gloo, on the CPU. Its "
    "exchange lacks two things there, which `studies/of_deepspeed_worker.py` adds and which change no value: the "
    "packing of signs to bytes, and an allgather of single numbers. `paper` and `fixed` exchange in two stages, as "
    "DeepSpeed does, `robust` directly. DeepSpeed's optimizers do not correct the bias of the moments, hence the row "
    "of its own that never compresses. The mask that DeepSpeed's users can make for elements without gradients (study "
    "3) was not used."
)


@dataclass(frozen=True)
class Setting:
    """A task at a rate, compressed after ``warmup`` exact steps."""

    task: str
    rate: float
    warmup: int
    seeds: tuple[int, ...]
    zero_one: ZeroOne | None = None


SETTINGS = [
    Setting("vgg", 1e-3, 60, SEEDS[:2], ZeroOne(var_freeze_step=60, var_update_scaler=16, local_step_scaler=30)),
]


@dataclass(frozen=True)
class Way:
    """A row of the table: an optimizer of DeepSpeed's with ``options``, or a ``recipe`` of ours."""

    text: str
    optimizer: str = ""
    compressed: bool = True
    recipe: Recipe | None = None

    def options(self, setting: Setting) -> dict[str, Any]:
        """What DeepSpeed's optimizer is given besides the learning rate."""
        if self.optimizer == "ZeroOneAdam":
            assert setting.zero_one is not None
            return asdict(setting.zero_one)
        return {
            "freeze_step": setting.warmup if self.compressed else Cell(setting.task, 1, 0.0, None, 0).kind.steps + 1
        }


EXACT = Way("exact Adam", compressed=False)
WAYS = [
    EXACT,
    Way("DeepSpeed's `OneBitAdam`, never compressed", "OneBitAdam", compressed=False),
    Way("DeepSpeed's `OneBitAdam`", "OneBitAdam"),
    *(Way(f"`{name}`", recipe=PRESETS[name]) for name in ("paper", "fixed", "robust")),
]
ZERO_ONE = [
    Way("DeepSpeed's `ZeroOneAdam`", "ZeroOneAdam"),
    Way("`robust`, `schedule=ZeroOne(...)`", recipe=PRESETS["robust"]),
]


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    setting: Setting
    way: Way
    seed: int

    @property
    def name(self) -> str:
        """Of the file that keeps its result."""
        way = "".join(letter for letter in self.way.text if letter.isalnum())
        return (
            f"of_deepspeed/{VERSION}/{self.setting.task}-{self.setting.rate:g}-{self.setting.warmup}-{way}-{self.seed}"
        )


def ways(setting: Setting) -> list[Way]:
    """The rows of the table of ``setting``."""
    return [*WAYS, *(ZERO_ONE if setting.zero_one else [])]


def packed(values: NDArray) -> NDArray[np.uint8]:
    """The signs of float32 ``values`` as DeepSpeed's ``csrc/xpu/packbits`` has them: the first is the highest bit."""
    return np.packbits(~np.signbit(values))


def unpacked(signs: NDArray[np.uint8]) -> NDArray[np.float32]:
    """1 and -1, from what ``packed`` gives."""
    return np.unpackbits(signs).astype(np.float32) * 2 - 1


def available() -> bool:
    """Whether the DeepSpeed that this study is of is installed."""
    try:
        return version("deepspeed") == VERSION
    except PackageNotFoundError:
        return False


def result_of_ours(run: Run) -> Result:
    """The result of ``run`` by simulated workers of this library."""
    setting, recipe = run.setting, run.way.recipe
    cell = Cell(setting.task, WORKERS, setting.rate, setting.warmup, run.seed)
    if recipe is None:
        return measured(replace(cell, workers=4, warmup=None))
    schedule = setting.zero_one if run.way in ZERO_ONE else None
    recipe = replace(recipe, exchange="two_stage" if recipe.exchange == "two_stage" else "direct")
    return kept(run.name, lambda: train(cell, recipe, schedule=schedule))


def result_of_deepspeed(run: Run) -> Result:
    """The result of ``run`` by two processes of torchrun's."""
    options = run.way.options(run.setting)
    script = Path(__file__).with_name("of_deepspeed_worker.py")
    arguments = [run.setting.task, str(run.setting.rate), str(run.seed), run.way.optimizer, json.dumps(options)]
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", str(WORKERS)]
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": processes.packages()}

    def started() -> Result:
        return dict(processes.result(processes.run([*torchrun, str(script), *arguments], os.environ | env, 1800)))

    return kept(run.name, started)


def _rows(setting: Setting, found: dict[Run, Result]) -> Iterator[list[str]]:
    for way in ways(setting):
        results = [found[Run(setting, way, seed)] for seed in setting.seeds]
        right = 100 * mean(one["accuracy"] for one in results)
        yield [way.text, *(report.number(one["loss"], digits=4) for one in results), f"{right:.1f} %"]


def run() -> str:
    """The section of the page."""
    if not available():
        return f"{TITLE}\n\n{MISSING}\n"
    runs = [Run(setting, way, seed) for setting in SETTINGS for way in ways(setting) for seed in setting.seeds]
    found = pool.results(result_of_ours, [run for run in runs if not run.way.optimizer])
    for one in runs:  # one after the other: each has a process for each core
        if one.way.optimizer:
            found[one] = result_of_deepspeed(one)
    text = [TITLE, INTRODUCTION]
    for setting in SETTINGS:
        steps = Cell(setting.task, 1, 0.0, None, 0).kind.steps
        heading = f"### {setting.task}, rate {setting.rate:g}, compressed after {setting.warmup} of {steps} steps"
        if (zero_one := setting.zero_one) is not None:
            heading += f"; 0/1 Adam: `{zero_one!r}`"
        head = ["", *(f"test loss, seed {seed}" for seed in setting.seeds), "right"]
        text += [heading, report.table(head, _rows(setting, found))]
    return "\n\n".join(text) + "\n"

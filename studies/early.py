"""Study 2: the paper's figures 2 and 7. How early may compression start? Real horovodrun jobs on two processes."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean

from jobs.processes import environment, launch
from jobs.processes import run as run_job
from jobs.report import read
from studies import report

STEPS = 300
TASKS = ("digits", "vgg", "charlm")
WIDTHS = {"charlm": 64}  # half the task's own: 15 runs of it take long
SEEDS = (0, 1, 2)
STARTS = (3, 24, 60, 100)  # 60 is 20 % of the steps, the middle of what the paper recommends
PAPER = (
    "The paper compresses ResNet after 3, 24 and 100 steps with little loss of quality (its fig. 2). VGG16 diverges "
    "there, and trains with epsilon under the root (fig. 7). The paper recommends a warm-up of 15 to 25 % of all steps."
)


def metrics(folder: Path, recipe: str, start: int, seed: int) -> Path:
    """The file of one run."""
    return folder / f"{recipe}-{start}-{seed}.jsonl"


def train(task: str, folder: Path) -> None:
    """All runs of ``task`` in one job."""
    folder.mkdir(parents=True, exist_ok=True)
    worker = [sys.executable, "-m", "studies.early_worker", task, str(folder)]
    run_job([*launch(2, "gloo"), *worker], environment(), timeout=3600)


def plan() -> list[tuple[str, int, tuple[int, ...]]]:
    """Recipe, first compressed step, seeds; recipe "none" is uncompressed."""
    robust = [("robust", start, SEEDS if start in (24, 60) else SEEDS[:1]) for start in STARTS]
    others = [(name, start, SEEDS[:1]) for name in ("paper", "fixed") for start in (24, 100)]
    return [("none", STEPS, SEEDS), *robust, *others]


def run() -> str:
    """The section of the page."""
    text = [
        "## 2. How early may compression start?",
        PAPER,
        f"AdamW, {STEPS} steps, two processes over Gloo, means of the seeds in the table. `digits` is a small CNN on "
        "images of 8x8 pixels, `vgg` a VGG16 of width 8 on the same images, enlarged to 32x32; `charlm` is a small "
        "GPT. `after 24`: compression starts after 24 exact steps. `python -m studies early`.",
    ]
    figure, panels = report.axes(ncols=len(TASKS), figsize=(12, 3.8))
    for panel, task in zip(panels, TASKS, strict=True):
        folder = report.ROOT / "build" / "studies" / task
        train(task, folder)
        rows = []
        for recipe, start, seeds in plan():
            runs = [read(metrics(folder, recipe, start, seed)) for seed in seeds]
            finals = [r.final for r in runs]
            label = recipe if recipe == "none" else f"{recipe}, after {start}"
            style = {"none": "k-", "robust": "C0-", "paper": "C3:", "fixed": "C1--"}[recipe]
            steps = runs[0].steps
            panel.plot([s["step"] for s in steps], [s["loss"] for s in steps], style, lw=1, label=label)
            dense = finals[0]["fp32_step_bytes"] * STEPS / finals[0]["bytes_sent"]
            rows.append(
                [
                    label,
                    ", ".join(map(str, seeds)),
                    f"{100 * mean(f['accuracy'] for f in finals):.2f} %",
                    report.number(mean(f["test_loss"] for f in finals), digits=3),
                    f"{dense:.1f}",
                ]
            )
        panel.set(yscale="log", title=task, xlabel="step", ylabel="training loss", ylim=(1e-4, 1e2))
        heading = ["recipe", "seeds", "test accuracy", "test loss", "times fewer bytes, warm-up included"]
        text += [f"### {task}", report.table(heading, rows)]
    panels[0].legend(fontsize=6)
    text.insert(3, report.save(figure, "early"))
    return "\n\n".join(text) + "\n"

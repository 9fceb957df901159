"""Study 3: the paper's figures 3 to 5. Magnitudes of gradients by layer, in a ResNet, a VGG and a Transformer."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

from horovod_onebit.diagnostics import Collector, Report
from jobs import data
from jobs.options import Options, parse
from studies import report

STEPS, LAST = 120, 20
PAPER = (
    "The paper finds that mean and median magnitudes of a ResNet's layers differ by a factor of 100, those of VGG16 by "
    "1e8 (figs. 3 and 4), and that the medians of a Transformer differ widely (fig. 5). The networks and data here are "
    "small, so the spread *between* layers is smaller. But there is a spread *within* a tensor, and there are elements "
    "that have had no gradient. These two make 1-bit Adam diverge, as the last columns show."
)


def networks() -> ModuleType:
    """torch/networks.py, whose folder is not a package."""
    spec = importlib.util.spec_from_file_location("networks", report.ROOT / "torch" / "networks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def resnet(width: int, classes: int) -> Any:
    """Residual blocks with BatchNorm for 8x8 images, after He et al. 2016."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, channels: int, out: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(channels, out, 3, padding=1, bias=False)
            self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
            self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(2))
            self.skip = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1, bias=False)

        def forward(self, x: Any) -> Any:
            h = self.norms[0](self.first(x)).relu()
            return (self.norms[1](self.second(h)) + self.skip(x)).relu()

    blocks = [
        Block(1, width),
        Block(width, width),
        nn.MaxPool2d(2),
        Block(width, 2 * width),
        Block(2 * width, 2 * width),
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes))


def diagnose(name: str) -> Report:
    """Train for STEPS steps in one process and look at the LAST ones."""
    import torch
    from torch.nn.functional import cross_entropy

    options: Options = parse(["--task", "digits" if name == "ResNet" else name])
    task = data.load(options)
    torch.manual_seed(0)
    channels, classes = task.train_x.shape[1], task.classes
    if name == "ResNet":
        model = resnet(options.width, classes)
    else:
        model = networks().build(options.task, options.width, channels, classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    collector = Collector()
    for step in range(STEPS):
        x, y = (torch.from_numpy(a) for a in task.batch(options, step, 0, 1))
        optimizer.zero_grad()
        cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        if step >= STEPS - LAST:
            collector.add({n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return collector.report()


def run() -> str:
    """The section of the page."""
    names = {"ResNet": "ResNet", "vgg": "VGG16", "charlm": "Transformer"}
    figure, panels = report.axes(ncols=len(names), figsize=(12, 3.8), sharey=True)
    rows = []
    for panel, (name, title) in zip(panels, names.items(), strict=True):
        found = diagnose(name)
        layers = found.layers
        for what in ("mean", "median"):
            values = [getattr(layer, what) or float("nan") for layer in layers]
            panel.plot(values, "o-", ms=3, lw=1, label=what)
        panel.set(yscale="log", title=title, xlabel="layer")
        unseen = sum(layer.unseen * layer.size for layer in layers) / sum(layer.size for layer in layers)
        rows.append(
            [
                title,
                str(len(layers)),
                f"{found.spread:.0f}",
                f"{max(layer.spread for layer in layers):.1e}",
                f"{100 * unseen:.1f} %",
                *(f"{found.worst(r):.1e}: {found.verdict(r)}" for r in ("paper", "fixed", "robust")),
            ]
        )
    panels[0].set(ylabel="magnitude of the gradient")
    panels[0].legend()
    heading = ["network", "tensors", "spread between layers", "largest within one", "elements unseen"]
    heading += ["paper", "fixed", "robust"]
    return "\n\n".join(
        [
            "## 3. Magnitudes of gradients",
            PAPER,
            report.save(figure, "magnitudes"),
            f"Steps {STEPS - LAST} to {STEPS} of AdamW, one process. `unseen`: the gradient was 0 in all of them. The "
            "last columns give the longest step of any element, as a multiple of Adam's, if compression started then.",
            report.table(heading, rows) + "\n",
        ]
    )

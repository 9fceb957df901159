"""Of study 12: other optimizers of PyTorch, whose own steps take mean gradients in few bits; simulated workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.averages import all_finite
from horovod_onebit.coded import CodedMean
from horovod_onebit.driver import Frozen
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules import Rule, Tensor
from horovod_onebit.schedule import Gradients, Local
from studies import pool, report
from studies.local import ROBUST
from studies.rates import SEEDS, Cell, Result, beside, kept, train

TASK, WORKERS = "text", 4
Make = Callable[[str, Any], Any]
"""An optimizer of one parameter, given its name and itself."""


class Wrapped(NumpyOptimizer):
    """Steps of PyTorch's optimizers, at the rate of ``rule``, where ``NumpyOptimizer`` takes those of ``rule``.

    Args:
        weights, rule, options: ``NumpyOptimizer``'s; a ``Local`` schedule freezes nothing.
        of: makes the optimizer of a parameter, which must not look at others.
    """

    def __init__(self, weights: Mapping[str, NDArray], rule: Rule, *, of: Make, **options: Any) -> None:
        import torch

        super().__init__(weights, rule, **options)
        parameters = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in weights.items()}
        self.coded = None if self.coded is None else CodedMean(self.engine)  # nobody knows whether they divide
        self._own = {name: (p, of(name, p)) for name, p in parameters.items()}

    def _take(self, tensor: Tensor, grad: NDArray[np.float32]) -> None:
        import torch

        parameter, optimizer = self._own[tensor.name]
        parameter.grad = torch.from_numpy(grad).view(parameter.shape)
        optimizer.param_groups[0]["lr"] = self.rule.lr
        optimizer.step()

    def exact_step(self) -> None:
        for tensor, found in self._means:
            self._take(tensor, found)

    def _step_alone(self, rules: Frozen) -> bool:
        if not all_finite(self._grads.values()):
            return False
        for tensor in self._tensors:
            self._take(tensor, self._grads[tensor.name])
        return True


def muon(name: str, parameter: Any) -> Any:
    """Muon for the matrices of the blocks; AdamW, at the same rate, for embeddings, biases and norms."""
    from torch.optim import AdamW, Muon

    if parameter.ndim == 2 and name.startswith("blocks."):
        return Muon([parameter], adjust_lr_fn="match_rms_adamw")
    return AdamW([parameter])


def of_torch(kind: str, _name: str, parameter: Any) -> Any:
    """PyTorch's optimizer ``kind``."""
    import torch

    return getattr(torch.optim, kind)([parameter])


OPTIMIZERS: dict[str, tuple[Make, tuple[float, ...]]] = {
    "Muon": (muon, (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)),
    "RMSprop": (partial(of_torch, "RMSprop"), (1e-3, 2e-3, 4e-3, 8e-3)),
    "Adafactor": (partial(of_torch, "Adafactor"), (2e-2, 5e-2, 1e-1)),
}
"""How each is made, and the rates of the sweep, by its name."""
ROWS = (("Muon", 1.6e-2), ("RMSprop", 2e-3), ("RMSprop", 4e-3), ("Adafactor", 5e-2))
"""What is run with all seeds. With three of them, RMSprop's best rate is not that of the first one."""
WAYS: dict[str, Gradients | Local] = {
    "exact": Gradients("exact"),
    "three_bit": Gradients(),
    "every step alone": Local(every=1, freeze=0),
}


@dataclass(frozen=True)
class Run:
    """One run."""

    optimizer: str
    way: str
    rate: float
    seed: int


def result(run: Run) -> Result:
    """The result of ``run``."""
    cell = Cell(TASK, WORKERS, run.rate, None, run.seed)
    make = partial(Wrapped, of=OPTIMIZERS[run.optimizer][0])
    name = f"few_bits/{run.optimizer}-{run.way.replace(' ', '-')}-{run.rate:g}-{run.seed}"
    return kept(name, lambda: train(cell, ROBUST, schedule=WAYS[run.way], make=make))


def _sweep_rows(found: Mapping[Run, Result]) -> Iterator[list[str]]:
    for name, (_, rates) in OPTIMIZERS.items():
        losses = [found[Run(name, "exact", rate, SEEDS[0])]["loss"] for rate in rates]
        yield [name, ", ".join(f"{loss:.3f} at {rate:g}" for loss, rate in zip(losses, rates, strict=True))]


def _rows(found: Mapping[Run, Result]) -> Iterator[list[str]]:
    for name, rate in ROWS:
        of = {way: [found[Run(name, way, rate, seed)] for seed in SEEDS] for way in WAYS}
        losses = {way: [one["loss"] for one in runs] for way, runs in of.items()}
        loss = {way: mean(each) for way, each in losses.items()}
        row = [name, f"{rate:g}", f"{loss['exact']:.3f} ({min(losses['exact']):.3f} to {max(losses['exact']):.3f})"]
        for way in list(WAYS)[1:]:
            times = of["exact"][0]["bits"] / of[way][0]["bits"]
            row.append(f"{beside(loss[way], loss['exact'])}, {times:.1f}")
        yield row


def section() -> str:
    """This part of the page."""
    swept = [Run(name, "exact", rate, SEEDS[0]) for name, (_, rates) in OPTIMIZERS.items() for rate in rates]
    rows = [Run(name, way, rate, seed) for (name, rate), way, seed in product(ROWS, WAYS, SEEDS)]
    found = pool.results(result, [*swept, *rows])
    head = ["", "rate", "exact means (least to most)", "`Gradients()`, beside these", "`Local(every=1)`, beside these"]
    text = [
        "Other optimizers of PyTorch in the same task, with their default settings but for the rate. Muon steps the "
        "matrices of the blocks (`torch.optim.Muon`, with PyTorch's `match_rms_adamw`), and AdamW at the same rate the "
        "rest, as PyTorch's documentation has it. Test loss with exact means, first seed:",
        report.table(["", "test loss at a rate"], _sweep_rows(found)),
        "Mean test loss of all seeds, in brackets beside that with exact means, and how many times fewer bits. With "
        "`Local(every=1)` each worker takes its own step, and what it has moved is exchanged in one bit. RMSprop's "
        "best rate of the first seed is too high for the others; Muon's best one may be higher than that shown.",
        report.table(head, _rows(found)),
    ]
    return "\n\n".join(text)

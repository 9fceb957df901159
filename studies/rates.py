"""Study 6: learning rates and warm-ups, exact Adam beside ``robust``; simulated workers, real text and images.

Each run is kept in build/studies, so that a study that was stopped continues where it was.
"""

from __future__ import annotations

import ast
import copy
import json
import math
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit import simulation
from horovod_onebit.exchange import Collectives
from horovod_onebit.kernels import cpu
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules.adam import Adam
from horovod_onebit.schedule import Schedule
from jobs.data import SEQUENCE, Task, load, of_letters
from jobs.options import Options, parse
from studies import own_data, pool, report, speech, translation
from studies.library import LIBRARY
from studies.magnitudes import networks
from studies.problem import Problem
from studies.recipes import PRESETS

RUNS = report.ROOT / "build" / "studies"
SHIPPED = report.ROOT / "studies" / "results"
"""Of runs that take hours; others are kept in ``RUNS`` alone."""
WORKERS = (4, 16)
SEEDS = (0, 1, 2)
EXCHANGES = {4: "direct", 16: "two_stage"}
"""By the number of workers: what ``"auto"`` takes for larger models."""
RISE = 20
WARMUPS: tuple[int | str | None, ...] = (None, 20, 60, 200, "auto")  # None is exact
LETTERS = 96  # printable ASCII and the newline
Result = dict[str, float]


@dataclass(frozen=True)
class Kind:
    """A task: how long, at which rates, and how many examples a step has, of all workers together."""

    steps: int
    batch: int
    rates: tuple[float, ...]


TASKS = {
    "text": Kind(1000, 32, (1e-3, 2e-3, 4e-3, 8e-3)),
    "vgg": Kind(300, 32, (2.5e-4, 5e-4, 1e-3, 2e-3)),
}


OTHERS = {
    "long text": Kind(2000, 32, (4e-3,)),
    "digits": Kind(600, 64, (1e-3, 2e-3)),
    "language": Kind(2000, 32, (2e-3,)),
    "resnet": Kind(300, 32, (2e-3,)),
    "vit": Kind(600, 32, (5e-4,)),
    "source": Kind(500, 32, (4e-3,)),
    "translation": Kind(600, 32, (8e-3,)),
    "translation apart": Kind(600, 32, (8e-3,)),
    "speech": Kind(300, 32, (1.6e-2,)),
}
"""Of other studies."""
PROBLEMS: dict[str, Problem] = {
    "translation": translation.PROBLEM,
    "translation apart": translation.PROBLEM_APART,
    "speech": speech.PROBLEM,
}
"""Tasks that are not classification, by name."""


@dataclass(frozen=True)
class Cell:
    """One run of the study."""

    task: str
    workers: int
    rate: float
    warmup: int | str | None
    seed: int

    @property
    def kind(self) -> Kind:
        return kind_of(self.task)


def kind_of(task: str) -> Kind:
    """How ``task`` is trained; with the steps of the command line, if it has some."""
    kind, steps = TASKS.get(task) or OTHERS[task], own_data.steps()
    return kind if steps is None else replace(kind, steps=steps)


def cells() -> Iterator[Cell]:
    """All cells. Exact runs are the same for any number of workers, whose batches add up to the same."""
    for task, workers, seed in product(TASKS, WORKERS, SEEDS):
        for rate in TASKS[task].rates:
            for warmup in WARMUPS if workers == WORKERS[0] else WARMUPS[1:]:
                yield Cell(task, workers, rate, warmup, seed)


def docstrings(folder: Path, apart: Collection[str] = ()) -> Iterator[str]:
    """Those of the modules in ``folder``, but for the ones in folders of the names ``apart``."""
    for file in sorted(folder.rglob("*.py")):
        if not set(apart).isdisjoint(file.relative_to(folder).parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
        yield from (text for text in texts if text)


def documentation() -> str:
    """The documentation that comes with Python: of its help, and of the modules of its standard library."""
    from pydoc_data.topics import topics

    found = [topics[name] for name in sorted(topics)]
    apart = ("site-packages", "dist-packages", "test", "tests", "idlelib")
    return "\n\n".join([*found, *docstrings(Path(sysconfig.get_path("stdlib")), apart)])


def source() -> str:
    """NumPy's source code in Python, tests apart."""
    package = Path(np.__file__).parent
    files = [file for file in sorted(package.rglob("*.py")) if "tests" not in file.parts]
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


@cache
def examples(task: str) -> Task:
    """The data of ``task``."""
    if task in PROBLEMS:
        return PROBLEMS[task].data()
    if task in ("vgg", "digits", *LIBRARY):
        cifar = own_data.folder(own_data.CIFAR) if task != "digits" else None
        where = [] if cifar is None else ["--data-dir", str(cifar.parent)]
        return load(parse(["--task", "digits" if task == "digits" else "vgg", *where]))
    text = source() if task == "source" else documentation()
    raw = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
    return of_letters(np.where((raw >= 32) & (raw < 127), raw - 31, 0), LETTERS, test_rows=512)


def network(task: str) -> Any:
    """A new network for ``task``."""
    if task in PROBLEMS:
        return PROBLEMS[task].network()
    if task in LIBRARY:
        return LIBRARY[task](examples(task).train_x.shape[1])
    found = networks()
    if task in ("language", "source"):
        return found.CharacterModel(LETTERS, width=104, layers=3, length=SEQUENCE)
    if task not in ("vgg", "digits"):
        return found.CharacterModel(LETTERS, width=64, layers=2, length=SEQUENCE)
    data = examples(task)
    return found.build(task, 8, data.train_x.shape[1], data.classes)


def rate_at(cell: Cell, step: int) -> float:
    """The learning rate of ``step`` (from 0): up to ``cell.rate`` in RISE steps, then down along a cosine."""
    return of_cosine(cell.rate, step, cell.kind.steps, RISE)


def of_cosine(rate: float, step: int, steps: int, rise: int) -> float:
    """The learning rate of ``step`` (from 0) of ``steps``: up to ``rate`` in ``rise`` ones, then along a cosine."""
    if step < rise:
        return rate * (step + 1) / rise
    return rate * 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))


def losses(model: Any, x: NDArray, y: NDArray) -> tuple[Any, Any]:
    """Mean cross entropy, and the logits."""
    import torch
    from torch.nn.functional import cross_entropy

    logits = model(torch.from_numpy(x)).flatten(0, -2)
    return cross_entropy(logits, torch.from_numpy(y).flatten()), logits


def loss_of(task: str, model: Any, x: NDArray, y: NDArray) -> Any:
    """The loss that ``task`` is trained by."""
    return PROBLEMS[task].loss(model, x, y) if task in PROBLEMS else losses(model, x, y)[0]


Hook = Callable[[NumpyOptimizer, dict[str, NDArray]], None]
"""What a worker does before each step, with its own gradients."""


def train(
    cell: Cell,
    recipe: str | Recipe,
    hook: Callable[[], Hook] | None = None,
    schedule: Schedule | None = None,
    exact: Sequence[str] | None = None,
    look: int = 0,
    start: Mapping[str, Any] | None = None,
    make: Callable[..., NumpyOptimizer] = NumpyOptimizer,
    rule: Callable[..., Adam] = Adam,
) -> Result:
    """Test loss and quality of one run, how many of its steps were exact, and the bits that a worker has sent for a
    parameter in a step. The quality is the accuracy (a share), or what the task has in its place.

    A run that diverges has an infinite loss. Every worker calls ``hook`` once, and what it gives before each step;
    ``schedule`` and ``exact`` are ``NumpyOptimizer``'s. With ``look``, the result also has the test loss after each so
    many steps, as ``"loss at 200"``, and the bits sent for a parameter until then, as ``"bits at 200"``. ``start`` is
    the state of the network that the run begins with, a new one if it is not given. ``make`` makes each worker's
    optimizer, of what ``NumpyOptimizer`` takes, and ``rule`` its rule.
    """
    import torch

    kind, of_rate = cell.kind, rule(lr=cell.rate)
    models, data, options = begin(cell)
    for model in models if start is not None else ():
        model.load_state_dict(start)
    seen: Result = {}

    def worker(collectives: Collectives) -> tuple[int, float]:
        rank, n = collectives.rank, collectives.size
        named = dict(models[rank].named_parameters())
        weights = {name: p.detach().numpy() for name, p in named.items()}
        warmup = None if schedule is not None else kind.steps if cell.warmup is None else cell.warmup
        given = {"warmup_steps": warmup, "recipe": recipe, "schedule": schedule, "exact": exact}
        optimizer = make(weights, of_rate, collectives=collectives, **given)
        before = hook() if hook is not None else None
        parameters = sum(array.size for array in weights.values())
        for step in range(kind.steps):
            optimizer.rule = replace(of_rate, lr=rate_at(cell, step))
            loss = loss_of(cell.task, models[rank], *data.batch(options, step, rank, n))
            found = torch.autograd.grad(loss, list(named.values()))
            grads = {name: g.numpy() for name, g in zip(named, found, strict=True)}
            if before is not None:
                before(optimizer, grads)
            optimizer.step(grads)
            if look and rank == 0 and (step + 1) % look == 0:
                seen[f"loss at {step + 1}"] = test_loss(cell.task, models[rank], data)
                seen[f"bits at {step + 1}"] = 8 * optimizer.engine.traffic.total / parameters
        optimizer.flush()
        warm = min(optimizer.driver.warmup.steps, kind.steps)
        return warm, 8 * optimizer.engine.traffic.total / parameters / kind.steps

    with np.errstate(all="ignore"):
        exact_steps, bits = simulation.run(worker, cell.workers, timeout=600)[0]
        return {**outcome(cell.task, models[0], data, exact_steps=exact_steps, bits=bits), **seen}


def begin(cell: Cell) -> tuple[list[Any], Task, Options]:
    """What a run of ``cell`` begins with: each worker's network, the data, and what decides on its batches."""
    import torch

    torch.manual_seed(cell.seed)
    torch.set_num_threads(1)
    cpu.set_num_threads(1)
    data, first = examples(cell.task), network(cell.task)
    options = replace(parse([]), seed=cell.seed, batch_size=cell.kind.batch // cell.workers)
    return [copy.deepcopy(first) for _ in range(cell.workers)], data, options


def result_of(model: Any, data: Task, **more: float) -> Result:
    """The test loss, infinite if the run has diverged, and accuracy of ``model``; and ``more``."""
    import torch

    training = model.training
    with torch.no_grad():
        loss, logits = losses(model.eval(), data.test_x, data.test_y)
    model.train(training)
    right = float((logits.argmax(1).numpy() == data.test_y.reshape(-1)).mean())
    return {"loss": float(loss) if math.isfinite(float(loss)) else math.inf, "accuracy": right, **more}


def test_loss(task: str, model: Any, data: Task) -> float:
    """The loss that ``model`` has in the tests of ``task``, infinite if the run has diverged."""
    import torch

    training = model.training
    with torch.no_grad():
        loss = float(loss_of(task, model.eval(), data.test_x, data.test_y))
    model.train(training)
    return loss if math.isfinite(loss) else math.inf


def outcome(task: str, model: Any, data: Task, **more: float) -> Result:
    """``result_of``, where ``task`` has a quality of its own with that in place of accuracy."""
    if task not in PROBLEMS:
        return result_of(model, data, **more)
    return {"loss": test_loss(task, model, data), **PROBLEMS[task].quality(model.eval(), data), **more}


def in_a_name(text: str) -> str:
    """``text`` as a part of a file's name."""
    return "".join(letter for letter in text if letter.isalnum() or letter == " ").replace(" ", "-")


def kept(name: str, run: Callable[[], Result]) -> Result:
    """What ``run`` gives, or gave when the study was run before; ``name`` is that of the study, and of the run."""
    file = RUNS / f"{own_data.apart()}{name}.json"
    shipped = SHIPPED / f"{own_data.apart()}{name}.json"
    if shipped.exists() and not file.exists():
        file = shipped
    if not file.exists():
        result = run()
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.replace(file)
    found: Result = json.loads(file.read_text())
    return found


def measured(cell: Cell) -> Result:
    """The result of ``cell``."""
    recipe = replace(PRESETS["robust"], exchange=EXCHANGES[cell.workers])
    name = f"rates/{cell.task}-{cell.workers}-{cell.rate:g}-{cell.warmup or 'exact'}-{cell.seed}"
    return kept(name, lambda: train(cell, recipe))


def means(found: dict[Cell, Result], key: str, cell: Cell) -> float:
    """The mean of ``key`` over the seeds."""
    workers = WORKERS[0] if cell.warmup is None else cell.workers
    return mean(found[replace(cell, seed=seed, workers=workers)][key] for seed in SEEDS)


def beside(loss: float, exact: float, digits: int = 3) -> str:
    """``loss``, and how far above ``exact`` it is."""
    return f"{loss:.{digits}f} ({100 * (loss / exact - 1):+.1f} %)" if math.isfinite(loss) else "diverged"


def _rows(found: dict[Cell, Result], task: str, workers: int) -> Iterator[list[str]]:
    for rate in TASKS[task].rates:
        cell = Cell(task, workers, rate, None, 0)
        exact, row = means(found, "loss", cell), [f"{rate:g}"]
        for warmup in WARMUPS[1:]:
            of_warmup = replace(cell, warmup=warmup)
            text = beside(means(found, "loss", of_warmup), exact)
            row.append(text if warmup != "auto" else f"{text}, {means(found, 'exact_steps', of_warmup):.0f} exact")
        yield [row[0], f"{exact:.3f}", *row[1:]]


def best(found: dict[Cell, Result], task: str, workers: int, warmup: int | str | None) -> Cell:
    """The cell of the rate with the least loss."""
    of_rates = [Cell(task, workers, rate, warmup, 0) for rate in TASKS[task].rates]
    return min(of_rates, key=lambda cell: means(found, "loss", cell))


def _best_rows(found: dict[Cell, Result]) -> Iterator[list[str]]:
    for task in TASKS:
        for workers in WORKERS:
            exact, row = means(found, "loss", best(found, task, workers, None)), [task, str(workers)]
            for warmup in WARMUPS:
                cell = best(found, task, workers, warmup)
                loss, accuracy = means(found, "loss", cell), 100 * means(found, "accuracy", cell)
                text = f"{loss:.3f}" if warmup is None else beside(loss, exact)
                row.append(f"{text}, {accuracy:.1f} % right, at {cell.rate:g}")
            yield row


def run() -> str:
    """The section of the page."""
    found = pool.results(measured, cells())
    names = ["exact", *(f"{w} exact steps" if isinstance(w, int) else f'`"{w}"`' for w in WARMUPS[1:])]
    text = [
        "## 6. Learning rates and warm-ups",
        "Adam. The tables show the test loss, and in brackets how far it is above exact Adam's at the same rate. The "
        f"rate rises for {RISE} steps and then falls along a cosine. `text` is a GPT of 0.1 M parameters on the "
        f"documentation that comes with Python, {TASKS['text'].steps} steps; `vgg` is VGG16 of width 8 on digits, "
        f"{TASKS['vgg'].steps} steps. The global batch is the same for any number of workers. 4 workers exchange "
        "directly, 16 in two stages.",
    ]
    for task in TASKS:
        for workers in WORKERS:
            text += [
                f"### {task}, {workers} workers, means of {len(SEEDS)} seeds",
                report.table(["rate", *names], _rows(found, task, workers)),
            ]
    text += ["### Each at its own best rate", report.table(["task", "workers", *names], _best_rows(found))]
    return "\n\n".join(text) + "\n"

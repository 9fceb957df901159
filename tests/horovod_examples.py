"""``python -m tests.horovod_examples``: Horovod's own examples on two processes, with the lines that the docs name.

Each example is read from a checkout of Horovod's repository (see ``tests.horovod_suite``), and the lines below are
replaced, each of which must be there once; data are made up (``tests/example_stubs.py``). Afterwards all workers'
weights must be equal, and the last steps must have been compressed.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.processes import run
from tests.horovod_suite import CHECKOUT, environment, fetch

Edits = tuple[tuple[str, str], ...]

IMPORT_TORCH = ("import horovod.torch as hvd\n", "import horovod.torch as hvd\nimport horovod_onebit.torch as onebit\n")


@dataclass(frozen=True)
class Example:
    """One of Horovod's examples."""

    path: str
    ours: Edits
    """What a user changes."""
    keras: Edits = ()
    """What Keras 3 wants changed, whoever averages the gradients."""
    short: Edits = ()
    """Fewer steps, where no option says so."""
    runs: tuple[tuple[str, ...], ...] = ((),)
    """Arguments of each run, one after the other in the same folder."""

    @property
    def framework(self) -> str:
        return "torch" if self.path.startswith("pytorch") else "tf"


EXAMPLES = {
    "pytorch_mnist": Example(
        "pytorch/pytorch_mnist.py",
        ours=(
            IMPORT_TORCH,
            ("optimizer = hvd.DistributedOptimizer(optimizer,", "optimizer = onebit.DistributedOptimizer(optimizer,"),
            ("gradient_predivide_factor=args.gradient_predivide_factor)", "warmup_steps=5)"),
        ),
        runs=(("--epochs", "3", "--batch-size", "32"),),
    ),
    "pytorch_imagenet_resnet50": Example(
        "pytorch/pytorch_imagenet_resnet50.py",
        ours=(
            IMPORT_TORCH,
            ("optimizer = hvd.DistributedOptimizer(", "optimizer = onebit.DistributedOptimizer("),
            ("factor=args.gradient_predivide_factor)", "factor=args.gradient_predivide_factor, warmup_steps=5)"),
        ),
        # The second run resumes from the checkpoint of the first.
        runs=tuple(
            ("--epochs", epochs, "--batch-size", "16", "--batches-per-allreduce", "2", "--warmup-epochs", "1")
            for epochs in ("1", "2")
        ),
    ),
    "tensorflow2_keras_mnist": Example(
        "tensorflow2/tensorflow2_keras_mnist.py",
        ours=(
            (
                "import horovod.tensorflow.keras as hvd\n",
                "import horovod.tensorflow as hvd\nimport horovod_onebit.tf as onebit\n",
            ),
            ("opt = hvd.DistributedOptimizer(\n        opt, ", "opt = onebit.DistributedOptimizer(\n        opt, "),
            ("average_aggregated_gradients=True)", "average_aggregated_gradients=True, warmup_steps=5)"),
            ("hvd.callbacks.BroadcastGlobalVariablesCallback", "onebit.callbacks.BroadcastGlobalVariablesCallback"),
            ("hvd.callbacks.MetricAverageCallback", "onebit.callbacks.MetricAverageCallback"),
            ("hvd.callbacks.LearningRateWarmupCallback", "onebit.callbacks.LearningRateWarmupCallback"),
        ),
        keras=(
            (
                "metrics=['accuracy'],\n                        experimental_run_tf_function=False)",
                "metrics=['accuracy'])",
            ),
        ),
        short=(
            (
                "steps_per_epoch=500 // hvd.size(), callbacks=callbacks, epochs=24",
                "steps_per_epoch=5, callbacks=callbacks, epochs=4",
            ),
        ),
    ),
    "tensorflow2_mnist": Example(
        "tensorflow2/tensorflow2_mnist.py",
        ours=(
            (
                "import horovod.tensorflow as hvd\n",
                "import horovod.tensorflow as hvd\nimport horovod_onebit.tf as onebit\n",
            ),
            (
                "opt = tf.optimizers.Adam(0.001 * hvd.size())",
                "opt = onebit.DistributedOptimizer(tf.optimizers.Adam(0.001 * hvd.size()), warmup_steps=5)",
            ),
            ("        tape = hvd.DistributedGradientTape(tape)\n", ""),
            (
                "hvd.broadcast_variables(mnist_model.variables, root_rank=0)",
                "onebit.broadcast_variables(mnist_model.variables)",
            ),
            ("hvd.broadcast_variables(opt.variables(), root_rank=0)", "onebit.broadcast_variables(opt.variables)"),
        ),
        short=(("dataset.take(10000 // hvd.size())", "dataset.take(20)"),),
    ),
}


def changed(text: str, edits: Sequence[tuple[str, str]]) -> str:
    """``text`` with each line replaced, which must be there once."""
    for old, new in edits:
        if text.count(old) != 1:
            raise RuntimeError(f"the example has {old!r} {text.count(old)} times, expected once: mend EXAMPLES")
        text = text.replace(old, new)
    return text


def on_rank(name: str, source: Path, number: int) -> None:
    """Run the example in this process, and look at what has become of it."""
    from tests import example_stubs

    example = EXAMPLES[name]
    example_stubs.install(example.framework)
    module = __import__(f"horovod_onebit.{example.framework}", fromlist=["DistributedOptimizer"])
    made = []
    wrap = module.DistributedOptimizer
    module.DistributedOptimizer = lambda *args, **kwargs: made.append(wrap(*args, **kwargs)) or made[-1]
    path = source / "examples" / example.path
    text = changed(path.read_text(encoding="utf-8"), example.ours + example.keras + example.short)
    sys.argv = [str(path), *example.runs[number]]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:  # tf.function reads the source from its file
        file.write(text)
        file.flush()
        runpy.run_path(file.name, run_name="__main__")
    (optimizer,) = made
    if example.framework == "torch":
        optimizer.check_replicas()
    else:
        module.check_replicas(optimizer)
    print(f"{name} done: {optimizer.stats()}", flush=True)
    if optimizer.phase != "compressed":
        raise AssertionError(f"{name} ended in {optimizer.phase}")


def run_example(name: str, source: Path, backend: str = "gloo") -> str:
    """Run one example on two processes, as often as it wants; the output."""
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    launcher = [horovodrun, "-np", "2", f"--{backend}", sys.executable, "-m", "tests.horovod_examples"]
    output = ""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(len(EXAMPLES[name].runs)):
            arguments = ["--source", str(source), "--on-rank", name, str(number), folder]
            output = run([*launcher, *arguments], environment(), 300)
            if output.count(f"{name} done") != 2:
                raise RuntimeError(f"{name} did not end as it should\n{output[-6000:]}")
    return output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help=f"a checkout of Horovod, default: {CHECKOUT}")
    parser.add_argument("--only", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--backend", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument("--on-rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    source = (args.source or fetch()).absolute()
    if args.on_rank:
        name, number, folder = args.on_rank
        os.chdir(folder)
        on_rank(name, source, int(number))
        return 0
    for name in args.only:
        output = run_example(name, source, args.backend)
        print(next(line for line in output.splitlines() if f"{name} done" in line))
    return 0


if __name__ == "__main__":
    sys.exit(main())

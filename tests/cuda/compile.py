"""What the CUDA kernels compile to, in PTX, for ``machine`` to run: python -m tests.cuda.compile FOLDER."""

import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numba import cuda, types
from numba.cuda import dispatcher

from horovod_onebit import Recipe, codecs, rest
from horovod_onebit.coded import CODECS as FEW
from horovod_onebit.formulas import label, of_innovation, remainder
from horovod_onebit.kernels import compiling, reference
from horovod_onebit.kernels import cuda as kernels
from horovod_onebit.kernels.cuda.loops import Program
from horovod_onebit.rules import Context, Tensor, gradient, zero_one_adam
from horovod_onebit.rules.adam import Adam, kept_update, move_by_update, update
from horovod_onebit.rules.frozen import FrozenAdam
from horovod_onebit.rules.lamb import LAMB
from horovod_onebit.rules.lion import Lion
from horovod_onebit.rules.local import Delta
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.schedule import Sends

CODECS = [codecs.find(name) for name in ("sign", "two_bit")]
THREE = codecs.find("logistic_three")
"""Stands for the codecs whose levels are those of a logistic distribution: all are made of the same operations."""


class _Recording:
    """A backend that computes nothing, and remembers what it was to compute."""

    def __init__(self):
        self.found = []

    def __getattr__(self, loop):
        def record(formula, p, *_):
            self.found.append((loop, formula, type(p)))

        return record

    def sums(self, formula, p, arrays, out):
        self.found.append(("sums", formula, type(p)))
        out[:] = 1

    def copy(self, source, target):
        pass

    batch = staticmethod(reference.batch)


def uses():
    """All loops and formulas that the rules ask for: (loop, formula, type of its scalars)."""
    backend = _Recording()
    adam = [Adam(lr=0.1), Adam(lr=0.1, weight_decay=0.1, decoupled=False)]
    rules = [*adam, *(zero_one_adam.of(rule, kind) for rule in adam for kind in (Sends.GRADIENT, Sends.DISPLACEMENT)),
             SGD(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1), LAMB(lr=0.1), Lion(lr=0.1)]  # fmt: skip
    numbers, sent = np.ones(8, np.float32), np.zeros(16, np.uint8)
    for rule, space in product(rules, ("update", "momentum")):
        clip = 3.0 if space == "update" else None
        context = Context(backend, Recipe(space=space, clip=clip), 2)
        tensor = Tensor("x", numbers, numbers, numbers, numbers, 1, 1)
        rule.init(tensor)
        rule.exact_step(tensor, numbers, context)
        rule.encode(tensor, numbers, sent, 0, 8, context)
        rule.restore(tensor, numbers, sent, 0, 8, context)
        rule.apply(tensor, sent[None], 0, context.coding(8), context)
        if (predict := rule.prediction(context)) is not None:
            rule.apply(tensor, sent[None], 0, context.coding(8), context, innovation=True)
            backend.move(remainder(predict), rule.motion(tensor, context).p, tensor.arrays())
        if (lengths := rule.lengths(tensor, context)) is not None:
            backend.sums(*lengths, tensor.arrays(), np.zeros((1, 2)))
        rule.finish(tensor, np.ones(2), context)
        if isinstance(rule, zero_one_adam.ZeroOneAdam):
            rule.local_step(tensor, numbers, context)
            rule.settle(tensor, numbers, context)
    for rule in (Delta(), Delta(0.3, delay=1), *(FrozenAdam(adam=one) for one in adam)):
        context, tensor = Context(backend, Recipe(), 2), Tensor("x", numbers, numbers, numbers, numbers, 1, 1)
        rule.init(tensor)
        rule.encode(tensor, numbers, sent, 0, 8, context)
        rule.restore(tensor, numbers, sent, 0, 8, context)
        rule.apply(tensor, sent[None], 0, context.coding(8), context)
        backend.move(*rule.motion(tensor, context), tensor.arrays(numbers))
        backend.move(*rule.catch_up(), tensor.arrays(numbers))
        if isinstance(rule, FrozenAdam):
            rule.local_step(tensor, numbers, context)
    for rule in (gradient.Gradient(), gradient.Gradient(divides=True)):
        context, tensor = Context(backend, Recipe(), 2), Tensor("x", numbers, numbers, numbers, numbers, 1, 1)
        rule.init(tensor)
        rule.observe([tensor], [numbers], context)
        rule.encode(tensor, numbers, sent, 0, 8, context)
        rule.restore(tensor, numbers, sent, 0, 8, context)
        rule.apply(tensor, sent[None], 0, context.coding(8), context)
        if not rule.divides:
            backend.move(*rule.rescale(tensor), tensor.arrays())
    backend.sums(*rest.COUNTS, tensor.arrays(numbers), np.zeros((1, 2)))
    return sorted(set(backend.found), key=lambda use: (use[0], label(use[1]), use[2].__name__))


def programs():
    """Each formula with the codec of one bit, the default rule's with all, those of gradients with theirs; and what
    needs no formula."""
    found = []
    for loop, formula, kind in uses():
        default = formula in (update, move_by_update, of_innovation(move_by_update, kept_update))
        coded = loop in ("encode", "restore", "apply")
        kinds = [None] if not coded else [*CODECS, THREE] if default else [codecs.find("sign")]
        if coded and formula.__module__ == gradient.__name__:
            kinds = [codecs.find(name) for name in FEW.values()]
        found += [Program(loop, formula, kind, codec) for codec in kinds]
    found += [Program("encode", kernels._contributed, kernels._Scalars, codecs.find("sign"))]  # of ``fault``
    found += [Program("move", kernels._widened, kernels._Scalars), Program("mean")]
    found += [Program("apply", kernels._moved, kernels._Scalars, codecs.find("sign"))]
    return [*found, Program("pick")]


@cache
def _folder():
    """Where kernels are kept between processes: compiling all takes a minute."""
    sources = compiling._own().union(map(str, Path(kernels.__file__).parent.glob("*.py")))
    versions = f"{version('numba')}-{version('numba-cuda')}"
    caches = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parents[2] / "build") / "ptx"
    folder = caches / f"{versions}-{compiling._stamp(sources)[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    for other in caches.iterdir():  # of another source
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


@cache
def ptx(program, capability):
    """One kernel for GPUs of a compute capability, such as (9, 0); no GPU is needed."""
    kept = _folder() / f"{program.name}-{capability[0]}{capability[1]}.ptx"
    if not kept.exists():
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(_compile(program, capability))
        partial.replace(kept)
    return kept.read_text()


def _compile(program, capability):
    # Numba asks the driver which GPU a device function is for.
    known = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        return cuda.compile_ptx(program.function(), (types.int64, types.int64), cc=capability)[0]
    finally:
        dispatcher.get_current_device = known


def write(folder, capability=(9, 0)):
    """All kernels, a file each."""
    for program in programs():
        Path(folder, f"{program.name}.ptx").write_text(ptx(program, capability))


def driven(folder):
    """The environment of a process where Numba finds a GPU: ``driver.c``, which this compiles, with the kernels."""
    write(folder)
    driver, source = Path(folder) / "libcuda.so.1", Path(__file__).with_name("driver.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", driver, source, "-ldl"], check=True)
    kernels = {"LD_LIBRARY_PATH": str(folder), "ONEBIT_PTX": str(folder), "ONEBIT_DRIVER": str(driver)}
    return kernels | {"MALLOC_PERTURB_": "165"}  # glibc overwrites what is freed


if __name__ == "__main__":
    write(sys.argv[1])

"""This library where a program, or a framework, asks Horovod for a ``DistributedOptimizer``.

    from horovod_onebit.install import install
    install(warmup_steps=500)  # before others take names out of Horovod's modules

or, without a change of the program,

    horovodrun -np 2 python -m horovod_onebit.install --warmup-steps 500 train.py ...
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from horovod_onebit.errors import ConfigurationError

logger = logging.getLogger("horovod_onebit")

CALLBACKS = (
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
)
REFUSED = "horovod_onebit.tf.refused"
KERAS = (
    ("", "horovod_onebit.tf", ("DistributedOptimizer",)),
    ("", REFUSED, ("PartialDistributedOptimizer", "load_model")),
    (".callbacks", "horovod_onebit.tf.callbacks", CALLBACKS),
    (".elastic", "horovod_onebit.tf.elastic", ("KerasState", "run")),
)
PLACES: dict[str, Sequence[tuple[str, str, tuple[str, ...]]]] = {
    "horovod.torch": (
        ("", "horovod_onebit.torch", ("DistributedOptimizer", "broadcast_optimizer_state")),
        (".elastic", "horovod_onebit.torch.elastic", ("TorchState", "run")),
    ),
    "horovod.tensorflow.keras": KERAS,
    "horovod.keras": KERAS,
}
"""Horovod's modules, and for submodules of theirs what module of this library takes the place of which names."""

VARIABLES = {"recipe": "HOROVOD_ONEBIT_RECIPE", "warmup_steps": "HOROVOD_ONEBIT_WARMUP_STEPS"}
"""Environment variables for options that ``install`` is not given."""

_replaced: list[tuple[ModuleType, str, Any]] = []
_options: dict[str, Any] = {}


def install(**options: Any) -> None:
    """Let Horovod's ``DistributedOptimizer`` be this library's, in PyTorch and in Keras, with what belongs to it:
    ``broadcast_optimizer_state``, the callbacks, the states of elastic runs.

    Horovod's modules that are imported later are changed when they are, so that no framework is imported here. A name
    that was taken out of one before (``from horovod.torch import DistributedOptimizer``) stays what it was. Local; call
    it on all workers, with the same options.

    Args:
        options: arguments of ``DistributedOptimizer`` that Horovod's has not, such as ``recipe`` and ``warmup_steps``;
            for those two, the variables ``HOROVOD_ONEBIT_RECIPE`` and ``HOROVOD_ONEBIT_WARMUP_STEPS`` of the
            environment count where they are left out.
    """
    uninstall()
    found = {key: _number(os.environ[name]) for key, name in VARIABLES.items() if os.environ.get(name)}
    _options.update(found | options)
    sys.meta_path.insert(0, _Finder)
    for name in PLACES:
        if name in sys.modules:
            _replace(name)


def uninstall() -> None:
    """Give Horovod its own back. Optimizers that are wrapped already stay wrapped."""
    while _Finder in sys.meta_path:
        sys.meta_path.remove(_Finder)
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)
    _options.clear()


class _Finder:
    """Finds Horovod's modules as ever, and changes them once they are imported."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in PLACES else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if cls in sys.meta_path:
                    _replace(name)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace(place: str) -> None:
    for submodule, ours, names in PLACES[place]:
        module, source = import_module(f"{place}{submodule}"), import_module(ours)
        # Not all of Horovod's modules for Keras have what is refused.
        for name in (name for name in names if ours != REFUSED or hasattr(module, name)):
            value = getattr(source, name)
            _replaced.append((module, name, getattr(module, name)))
            setattr(module, name, _with_options(value) if name == "DistributedOptimizer" else value)
    logger.debug("%s.DistributedOptimizer is horovod_onebit's", place)


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    options = dict(_options)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **(options | kwargs))

    return called


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a Python program with this library installed in Horovod's place."""
    parser = argparse.ArgumentParser(prog="python -m horovod_onebit.install", description=main.__doc__)
    parser.add_argument("--recipe", help="as DistributedOptimizer's")
    parser.add_argument("--warmup-steps", type=_number, help="as DistributedOptimizer's")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as of python -m")
    parser.add_argument("program", help="a file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")
    given = parser.parse_args(arguments)
    if not given.module and not Path(given.program).exists():
        parser.error(f"{given.program}: there is no such file")
    if importlib.util.find_spec("horovod") is None:
        raise ConfigurationError("horovod_onebit.install: Horovod is not installed, and there is nothing to replace")
    options = {"recipe": given.recipe, "warmup_steps": given.warmup_steps}
    # This file is __main__ here: what is installed has to be the module of the package.
    import_module("horovod_onebit.install").install(
        **{key: value for key, value in options.items() if value is not None}
    )
    sys.argv = [given.program, *given.arguments]
    if given.module:
        runpy.run_module(given.program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(given.program).resolve().parent)
        runpy.run_path(os.path.abspath(given.program), run_name="__main__")  # as Python's own ``__file__``


if __name__ == "__main__":
    main()

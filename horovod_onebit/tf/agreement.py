"""Once a step, before anything else is waited for, all workers compare what they are about to do."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_onebit import handshake, replicas
from horovod_onebit.errors import ConfigurationError, DesyncError
from horovod_onebit.handshake import Facts
from horovod_onebit.schedule import EXACT, Gradients
from horovod_onebit.tf.compressor import Compressor
from horovod_onebit.tf.graph import path_of
from horovod_onebit.tf.lineage import check_last
from horovod_onebit.tf.meeting import meet
from horovod_onebit.warmup import AutoWarmup

ACCUMULATED = "onebit_accumulated"
"""In the names of variables with gradients that wait for the next step, each worker's own."""
COUNTERS = {
    "steps": "the number of optimizer steps (iterations)",
    "exact": "the number of warm-up steps that were taken",
    "local": "local steps taken",
    "wanted": "the number of steps that the warm-up has",
    "compressed": "the number of compressed steps since the warm-up ended",
    "passes": "the number of backward passes",
}


def unnumbered(path: str) -> str:
    """``path`` without the numbers that Keras gives by how many layers there were before in this process."""
    return re.sub(r"_\d+(?=/|$)", "", path)


def role(variable: Any) -> str:
    """A variable's path, ``unnumbered``."""
    return unnumbered(getattr(variable, "path", variable.name))


def _plain_name(variable: Any) -> str:
    """An optimizer's variable, whose name begins with the path of the one that it is for, without such numbers."""
    return re.sub(r"_\d+(?=_|$)", "", variable.name)


def checksums(optimizer: Any, *, state: bool) -> dict[str, int]:
    """Those of the trained weights, and of the optimizer's ``state`` that all workers have alike, by name."""
    weights = {f"{role(v)}#{i}": v for i, v in enumerate(optimizer._trainable_variables)}
    if state:
        weights |= {f"{_plain_name(v)}#{i}": v for i, v in enumerate(optimizer.variables) if ACCUMULATED not in v.name}
    # A view of bytes: NumPy's buffers have no bfloat16.
    return {name: replicas.checksum(np.array(v, ndmin=1).view(np.uint8)) for name, v in weights.items()}


@dataclass(frozen=True)
class _Compared:
    """What a worker has compared last.

    Attributes:
        local: of local steps, in words.
    """

    trained: tuple[int, ...]
    rate: float
    counts: Mapping[str, int]
    local: Mapping[str, object]
    checksums: Mapping[str, int]


class Agreement:
    """Compares the step that this worker is about to take with those of the others."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._wrapping = str(compressor.optimizer._wrapping)
        self._rows: dict[tuple[int, ...], str] = {}
        self.fit_ended = False  # since the last step, for all workers; callbacks may have set weights

    def reach(
        self, trained: Sequence[int], now: Mapping[str, Any], local: Callable[[], Mapping[str, object]] = dict
    ) -> Any:
        """True, or ``DesyncError`` on every worker. Collective.

        ``trained`` are the numbers of the variables; ``now`` has the learning rate, ``"rate"``, and by their names in
        ``COUNTERS`` those that decide what kind of step it is. ``local`` gives what else must be the same where local
        steps begin or end, in words.
        """
        compressor, wrapping = self._compressor, self._compressor.optimizer._wrapping
        options = compressor.options_now() if wrapping.local is None else None  # which knows them since its step began
        names = [name for name in now if name != "rate"]
        last: list[_Compared] = []

        def record(rate: Any, *counters: Any) -> Any:
            counts = {name: int(counter) for name, counter in zip(names, counters, strict=True)}
            compressor.options = options or compressor.options
            compressor.apart += 1  # on all workers, whatever one of them finds
            self._check(trained)
            words, found = local(), self._count_and_compare(counts)
            last[:] = [_Compared(tuple(trained), float(rate), counts, words, found)]
            return self._record(last[0])

        inputs = [now["rate"], *(now[name] for name in names)]
        call = f"a step of {compressor.engine.name}"

        def facts() -> Facts:
            return self._facts(call, last[0])

        def heard(verdict: handshake.Verdict) -> None:
            compressor.heard(verdict)
            if wrapping.local is None:
                compressor.check_recipe(*(last[0].counts[name] for name in ("exact", "wanted", "compressed")))

        return meet(compressor.collectives, record, inputs, call, facts, heard)

    def _check_passes(self, trained: Collection[int]) -> None:
        """Raise if the step, which is of the variables ``trained``, leaves out gradients of backward passes before the
        last one. Those of variables that are not trained any more are dropped."""
        optimizer = self._compressor.optimizer
        lacking = []
        for i, total in enumerate(getattr(optimizer, "_accumulated", [])):
            if i not in trained and np.asarray(total.value).any():
                total.assign(tf.zeros_like(total.value))
                lacking.append(optimizer._trainable_variables[i])
        names = ", ".join(path_of(variable) for variable in lacking if variable.trainable)
        if names:
            raise ConfigurationError(
                f"{names}: no gradient in the last of the {optimizer._wrapping.backward_passes_per_step} backward "
                "passes of a step, and one in a pass before; expected the last pass to have all. Pass zeros where "
                "there is no gradient, keras.ops.zeros_like(variable); this gradient is "
                "dropped"
            )

    def _check(self, trained: Collection[int]) -> None:
        """Raise what this worker finds by itself."""
        compressor, engine = self._compressor, self._compressor.engine
        check_last(compressor.optimizer)
        self._check_passes(trained)
        if engine.workers_changed:
            raise DesyncError(
                f"there were {engine.context.workers} workers and there are {engine.collectives.size}: "
                "horovod_onebit.tf.elastic.KerasState and run tell the optimizer"
            )

    def _count_and_compare(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Checksums of weights and state, if they are to be compared before this step, which all workers know alike.

        That is before the second step, because some programs broadcast after the first; when compression starts; after
        the end of ``fit``; and after every so many steps that the user wants, or once workers have the same weights
        again. With local steps, the driver of rounds compares the weights.
        """
        compressor, optimizer = self._compressor, self._compressor.optimizer
        every = optimizer._wrapping.check_replicas_every
        if optimizer._wrapping.local is not None:
            return {}
        warm = counts["exact"] < counts["wanted"]
        if isinstance(policy := optimizer._wrapping.warmup, AutoWarmup) and policy.steps != counts["wanted"]:
            policy.load_state_dict({"steps": counts["wanted"], "norms": {}})  # worker 0 has loaded it, and broadcast it
        compressor.moments.count(counts["steps"], counts["exact"] + counts["compressed"], warm=warm)
        if every is False:
            return {}
        starts = not warm and not counts["compressed"] and counts["steps"] > 0
        if compressor.pending:
            return {}
        apart, compressor.apart = compressor.apart, 0
        ended, self.fit_ended = self.fit_ended, False
        due = starts or replicas.due(every, counts["steps"], apart)
        return checksums(optimizer, state=due) if due or ended or (warm and counts["exact"] == 1) else {}

    def _record(self, now: _Compared) -> Any:
        compressor = self._compressor
        known = compressor.moments.overrule(compressor.options)
        rule = compressor.adapter.rule(known, now.rate, 0.0, now.counts.get("exact", 0), 1.0)
        counts = f"{list(now.counts.values())} {list(now.local.values())}"
        setup = f"{counts} {self._wrapping} {self._variables(now.trained)}"
        options, sums = f"{rule} {list(self._options().values())}", list(now.checksums.values())
        fresh = compressor.coded is not None and compressor.coded.fresh
        said: dict[str, Any] = {"replicas": str(sums) if sums else 0, "fresh": fresh, "loaded": compressor.loaded}
        return compressor.engine.record(setup=setup, options=options, **said)

    def _options(self) -> dict[str, object]:
        """The wrapped optimizer's options in this step."""
        simple = (str, numbers.Number, type(None))  # what else there is may be written with its address
        values = self._compressor.options.known
        return {key: value if isinstance(value, simple) else type(value).__name__ for key, value in values.items()}

    def _variables(self, trained: tuple[int, ...]) -> str:
        """What is trained, and how each variable is treated."""
        if trained not in self._rows:
            self._rows[trained] = str([(i, self._described(i)) for i in trained])
        return self._rows[trained]

    def _described(self, index: int) -> dict[str, object]:
        compressor = self._compressor
        variable = compressor.optimizer._trainable_variables[index]
        return {
            "name": role(variable),
            "shape": tuple(variable.shape),
            "dtype": str(variable.dtype),
            "weight decay": "decayed" if compressor.decays(variable) else "not decayed",
            "compression": "compressed" if compressor.is_compressed(variable) else "exact",
            "constraint": type(getattr(variable, "constraint", None)).__name__,
        }

    def _facts(self, call: str, now: _Compared) -> Facts:
        compressor, wrapping = self._compressor, self._compressor.optimizer._wrapping
        config = {"whether the recipe is 'exact'": wrapping.schedule == Gradients(EXACT)} | wrapping.compared()
        if not wrapping.compresses:
            config |= {"warmup_steps": "none that ends", "schedule": None}
        recipe = {f"recipe.{name}": value for name, value in config.pop("recipe").items()}
        count = len(compressor.optimizer._trainable_variables)
        rows = {i: self._described(i) for i in range(count)}
        trained: dict[str, object] = {"the number of variables": count}
        trained |= {f"the name of variable {i}": row.pop("name") for i, row in rows.items()}
        for i, row in rows.items():
            name = trained[f"the name of variable {i}"]
            trained |= {f"the {what} of variable {i}, {name}": value for what, value in row.items()}
            gradient = "there" if i in now.trained else "none"
            trained[f"the gradient of variable {i}, {name}"] = gradient
        progress: dict[str, object] = {COUNTERS[name]: value for name, value in now.counts.items()}
        progress |= {**now.local, "the number of compressed steps tried": compressor.engine.exchanges}
        hyperparameters = {"the learning rate": np.float32(now.rate), **self._options()}
        sums = {name: f"{value:08x}" for name, value in now.checksums.items()}
        return handshake.facts_of(
            call,
            arguments=config | recipe,
            trained=trained,
            progress=progress,
            hyperparameters=hyperparameters,
            replicas=sums,
        )

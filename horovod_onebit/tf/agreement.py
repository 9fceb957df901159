"""Once a step, before anything else is waited for: do all workers mean the same?"""

from __future__ import annotations

import functools
import numbers
import re
from collections.abc import Sequence
from typing import Any

from horovod_onebit.errors import DesyncError
from horovod_onebit.tf.compressor import Compressor
from horovod_onebit.tf.meeting import meet

NOT_COMPARED = {"name", "learning_rate"}
"""Of an optimizer's configuration: what Keras makes up, and what is compared by the value it has in a step."""


def role(variable: Any) -> str:
    """A variable's path without the numbers that Keras gives by how many layers there were before in this process."""
    return re.sub(r"_\d+(?=/|$)", "", getattr(variable, "path", variable.name))


class Agreement:
    """Compares the step that this worker is about to take with those of the others."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._wrapping = str(compressor.optimizer._wrapping)
        self._keys: list[str] | None = None
        self._rows: dict[tuple[int, ...], str] = {}

    def reach(self, trained: Sequence[int], now: Sequence[Any]) -> Any:
        """True, or ``DesyncError`` on every worker. Collective.

        ``trained`` are the numbers of the variables; ``now`` has the learning rate, and the counters that decide what
        kind of step it is: steps taken, exact ones, exact ones wanted, and passes, if several make a step.
        """
        compressor, optimizer = self._compressor, self._compressor.optimizer
        clips = str([optimizer.clipnorm, optimizer.global_clipnorm])  # as a graph knows them, from its tracing
        record = functools.partial(self._record, tuple(trained), clips)
        return meet(compressor.collectives, record, now, f"a step of {compressor.engine.name}")

    def _record(self, trained: tuple[int, ...], clips: str, learning_rate: Any, *counters: Any) -> Any:
        compressor = self._compressor
        engine, optimizer = compressor.engine, compressor.optimizer
        if engine.workers_changed:
            raise DesyncError(
                f"there were {engine.context.workers} workers and there are {engine.collectives.size}: "
                "horovod_onebit.tf.elastic.KerasState and run tell the optimizer"
            )
        counts = [int(counter) for counter in counters]
        rule = compressor.adapter.rule(optimizer, float(learning_rate), 0.0, counts[1], 1.0)
        setup = f"{counts} {self._wrapping} {clips} {self._variables(trained)}"
        return engine.record(setup=setup, options=f"{rule} {self._options()}")

    def _options(self) -> str:
        """The wrapped optimizer's options as they are now."""
        optimizer = self._compressor.optimizer
        if self._keys is None:
            self._keys = sorted(optimizer.wrapped_config().keys() - NOT_COMPARED)
        values = [getattr(optimizer, key, None) for key in self._keys]
        simple = (str, numbers.Number, type(None))  # what else there is may be written with its address
        return str([v if isinstance(v, simple) else type(v).__name__ for v in values])

    def _variables(self, trained: tuple[int, ...]) -> str:
        """What is trained, and how each variable is treated."""
        if trained not in self._rows:
            compressor, optimizer = self._compressor, self._compressor.optimizer
            rows = []
            for i in trained:
                v = optimizer._trainable_variables[i]
                decays = compressor.decays(v)
                constraint = type(getattr(v, "constraint", None)).__name__
                rows.append((i, role(v), tuple(v.shape), str(v.dtype), decays, compressor.is_compressed(v), constraint))
            self._rows[trained] = str(rows)
        return self._rows[trained]

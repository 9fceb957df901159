"""Horovod elastic for Keras 3: workers may die, leave and join, and the residuals are kept. ::

    import horovod_onebit.tf.elastic as elastic

    model.compile(optimizer=onebit.DistributedOptimizer(...), ...)
    model.optimizer.build(model.trainable_variables)

    @elastic.run
    def train(state):
        while state.step < steps:
            model.train_on_batch(x, y)
            state.step += 1
            if state.step % 10 == 0:
                state.commit()

    train(elastic.KerasState(model, step=0))

Horovod's own ``KerasState`` fails under Keras 3.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.functions import broadcast_object

from horovod_onebit import tasks
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.face import always_synchronizing, values_of_now
from horovod_onebit.tf.functions import broadcast_variables, follow_variables
from horovod_onebit.tf.meeting import told
from horovod_onebit.tf.optimizer import check_averages, check_one, check_ours, optimizers_of

__all__ = ["KerasState", "run"]

logger = logging.getLogger("horovod_onebit")

OPERATION = re.compile("Horovod(Grouped)?(All(gather|reduce|toall)|Broadcast|Reducescatter|Join)|Horovod has been")
"""What messages have of Horovod's operations; folders may be called Horovod, too."""


class KerasState(ObjectState):
    """A built Keras model, its ``DistributedOptimizer``, and any other values as keywords, which become attributes.

    ``commit`` saves them in memory, ``restore`` restores them, ``sync`` gives all workers those of worker 0 and
    redistributes the residuals. ``optimizer`` is the model's own unless it is given.
    """

    def __init__(self, model: Any, optimizer: Any = None, **values: Any) -> None:
        self.model = model
        self.optimizer: Any = optimizer
        if optimizer is None:
            self.optimizer = getattr(model, "optimizer", None)
        given = {"optimizer": check_ours(self.optimizer)}
        found = {
            f"{one.name}.{name}": its for one in model._flatten_layers() for name, its in optimizers_of(one).items()
        }
        check_one(given | {where: its for where, its in found.items() if its is not given["optimizer"]})
        if not model.built or not self.optimizer.built:
            raise ConfigurationError(
                "build the model and the optimizer first: model.build(shape), "
                "optimizer.build(model.trainable_variables)"
            )
        if self.optimizer._wrapping.process_set.process_set_id != 0:
            raise ConfigurationError("Horovod elastic has no process sets but the whole world's")
        super().__init__(bcast_object=broadcast_object, get_rank=hvd.rank, **values)
        self._save()

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables]

    def _save(self) -> None:
        compressor = self.optimizer._compressor
        compressor.settle()
        self.optimizer.flush()
        self._values = [np.array(variable) for variable in self._variables()]
        self._residuals, self._counts = compressor.residuals(), compressor.counts()

    def save(self) -> None:
        with told(hvd.global_process_set):
            check_averages(self.optimizer)
        self._save()
        super().save()

    def restore(self) -> None:
        compressor = self.optimizer._compressor
        compressor.settle()
        for variable, value in zip(self._variables(), self._values, strict=True):
            variable.assign(value)
        follow_variables(self.model)
        compressor.take_counts(self._counts)
        compressor.load_residuals(self._residuals)
        super().restore()

    def sync(self) -> None:
        with _lost_workers():
            self._sync()
            with values_of_now(self):
                super().sync()
                self._save()

    def _sync(self) -> None:
        compressor = self.optimizer._compressor
        compressor.settle()
        compressor.fold()
        with compressor.here():
            compressor.leave_world()
        waiting = getattr(compressor.optimizer, "_accumulated", [])
        sums = [np.array(total, np.float32) for total in waiting]
        here = float(bool(waiting) and int(compressor.optimizer._passes) > 0)  # before workers came
        counts = broadcast_object(compressor.counts(), root_rank=0, name="onebit.counts")
        broadcast_variables(self._variables())
        follow_variables(self.model)
        if waiting:  # all have the mean of those that have some
            count = max(1.0, float(hvd.allreduce(tf.constant(here), op=hvd.Sum, name="onebit.waiting")))
            for i, (total, own) in enumerate(zip(waiting, sums, strict=True)):
                found = hvd.allreduce(tf.constant(own), op=hvd.Sum, name=f"onebit.waiting.{i}") / count
                total.assign(tf.cast(found, total.dtype))
        compressor.take_counts(counts)
        with compressor.here():
            tasks.run(compressor.redistribute())
        compressor.loaded = False  # by a worker that has come: all have the others' state now


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``function(state, ...)`` again whenever the workers have changed, each time after ``state.sync()``."""

    return run_fn(always_synchronizing(_lost_workers()(function), HostsUpdatedInterrupt), _reset)


@contextlib.contextmanager
def _lost_workers() -> Iterator[None]:
    """What an operation of Horovod raises when a worker is lost, as the error that Horovod elastic waits for."""
    try:
        yield
    except tf.errors.OpError as error:
        if of_horovod(error):
            logger.warning("an operation of Horovod failed; the state of the last commit is restored: %s", error)
            raise HorovodInternalError(str(error)) from error
        raise


def of_horovod(error: tf.errors.OpError) -> bool:
    """Whether an operation of Horovod failed. The message has the kind of an eager operation; one of a graph has the
    name that we gave it, and tells where it was made."""
    return OPERATION.search(str(error)) is not None or mpi_ops.__file__ in str(error)


def _reset() -> None:
    hvd.shutdown()
    hvd.init()

"""Weights and optimizer state of all workers, compared bit by bit."""

from __future__ import annotations

from typing import Any

from horovod_onebit import replicas
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.tasks import run
from horovod_onebit.tf.agreement import checksums
from horovod_onebit.tf.meeting import announce, told
from horovod_onebit.tf.optimizer import check_ours


def check_replicas(optimizer: Any) -> None:
    """Raise ``DesyncError`` on all workers if their trained weights or optimizer state are not the same. Collective;
    workers outside of the optimizer's process set do nothing.

    ``optimizer`` is built, and what ``DistributedOptimizer`` returned. Variables that are not trained (moving averages
    of BatchNormalization, seeds) are each worker's own and are not compared; with ``schedule=Local(...)`` the
    optimizer's state neither. With ``Local`` and 0/1 Adam, call ``optimizer.flush()`` before: a ``ConfigurationError``
    on all workers says so, if there is something to flush.
    """
    check_ours(optimizer)
    if not optimizer._wrapping.process_set.included():
        return
    with told(optimizer._wrapping.process_set):
        optimizer._compressor.check_built()
    compressor, wrapping = optimizer._compressor, optimizer._wrapping
    engine, pending = compressor.engine, compressor.pending
    announce("check of replicas", wrapping.process_set, f"{engine.name} {pending}")
    if pending:
        raise ConfigurationError(
            "replicas were to be compared after a local step, when workers' weights differ: call optimizer.flush() "
            "before, on all workers"
        )
    found = checksums(optimizer, state=wrapping.local is None)
    run(replicas.check(found, engine.collectives, f"{engine.name}.replicas"))

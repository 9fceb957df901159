"""Weights and optimizer state of all workers, compared bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_onebit import replicas
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.tf.meeting import announce, told
from horovod_onebit.tf.optimizer import ACCUMULATED, check_ours


def check_replicas(optimizer: Any) -> None:
    """Raise ``DesyncError`` on all workers if their trained weights or optimizer state are not the same. Collective;
    workers outside of the optimizer's process set do nothing.

    ``optimizer`` is built, and what ``DistributedOptimizer`` returned. Variables that are not trained (moving averages
    of BatchNormalization, seeds) are each worker's own and are not compared; with ``schedule=Local(...)`` the
    optimizer's state neither. With ``Local`` and 0/1 Adam, call ``optimizer.flush()`` before.
    """
    check_ours(optimizer)
    if not optimizer._wrapping.process_set.included():
        return
    with told(optimizer._wrapping.process_set):
        optimizer._compressor.check_built()
    compressor, wrapping = optimizer._compressor, optimizer._wrapping
    engine, together = compressor.engine, compressor.together
    announce("check of replicas", wrapping.process_set, f"{engine.name} {together}")
    if not together:
        raise ConfigurationError(
            "replicas were to be compared after a local step, when workers' weights differ: call optimizer.flush() "
            "before, on all workers"
        )
    variables = [*optimizer._trainable_variables, *(optimizer.variables if wrapping.local is None else [])]
    checksums: dict[str, int] = {}
    for index, variable in enumerate(variables):
        if ACCUMULATED not in variable.name:
            checksums[f"{variable.name}#{index}"] = replicas.checksum(np.asarray(variable))
    replicas.check(checksums, engine.collectives, f"{engine.name}.replicas")

"""Where all workers of a process set meet before they do anything together.

Everything that this face does with the others begins with an agreement, under one name, whatever follows. So workers
that are about to do different things (a step and a check of replicas, steps of different optimizers) are all told, and
none waits for a collective that the others will never start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_onebit import handshake
from horovod_onebit.errors import DesyncError
from horovod_onebit.face import agreement_name
from horovod_onebit.handshake import Finite, Verdict
from horovod_onebit.tf.collectives import Handle, HorovodCollectives, view
from horovod_onebit.tf.graph import host_value


def meet(
    collectives: HorovodCollectives,
    start: Callable[..., Handle],
    finish: Callable[[Handle], Any],
    inputs: Sequence[Any],
    dtype: Any,
    call: str,
) -> Any:
    """``start`` with the values of ``inputs`` gives what to tell the others; what ``finish`` makes of all is returned.

    An error of ``start`` is raised when the others have been told, who then get a ``DesyncError``. In a graph, the
    caller sees to it that meetings are ``in_order``.
    """
    begun: dict[str, Any] = {}

    def say(*values: Any) -> Any:
        begun["error"] = None
        try:
            begun["handle"] = start(*values)
        except Exception as error:
            begun["error"] = error
            begun["handle"] = _start(collectives, "failed", f"{type(error).__name__}: {error}", Finite.NO)
        return tf.constant(begun["handle"].array)

    def hear(total: Any) -> Any:
        handle, error = begun.pop("handle"), begun.pop("error")
        if error is not None:
            raise error
        handle.result = view(total)
        try:
            return finish(handle)
        except DesyncError as error:
            raise DesyncError(f"{error}. This worker was about to do this: {call}") from None

    gather = collectives.sum_integers(agreement_name(collectives.process_set))
    if tf.executing_eagerly():
        return hear(gather(say(*inputs)))
    with tf.device("/CPU:0"):
        record = tf.py_function(say, list(inputs), tf.int32)
    record.set_shape([None])
    return host_value(hear, [gather(record)], dtype)


def announce(call: str, process_set: Any = hvd.global_process_set, setup: str = "") -> Any:
    """Make sure that all workers of ``process_set`` are about to do ``call``, with the same ``setup``. Collective.

    Returns true when that is known, in a graph a tensor. Raises ``DesyncError`` on all of them if not.
    """
    return all_finite(True, HorovodCollectives(process_set), call, setup)


def all_finite(finite: Any, collectives: HorovodCollectives, call: str, setup: str) -> Any:
    """Whether ``finite``, a scalar, is true on all workers. Collective; raises as ``announce``."""

    def start(value: Any) -> Handle:
        return _start(collectives, call, setup, Finite.YES if bool(value) else Finite.NO)

    return meet(collectives, start, lambda handle: _read(handle).finite, [finite], tf.bool, call)


def _start(collectives: HorovodCollectives, call: str, setup: str, finite: Finite) -> Handle:
    record = handshake.agreement(
        collectives.rank,
        collectives.size,
        call=call,
        setup=setup,
        options="",
        step=0,
        finite=finite,
        early=False,
        edited=False,
    )
    return collectives.allreduce(record, agreement_name(collectives.process_set))


def _read(handle: Handle) -> Verdict:
    return handshake.read_agreement(handle.wait(), handle.collectives.size)

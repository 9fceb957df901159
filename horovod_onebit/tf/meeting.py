"""Where all workers of a process set meet before they do anything together.

Everything that this face does with the others begins with an agreement, under one name, whatever follows. So workers
that are about to do different things (a step and a check of replicas, steps of different optimizers) are all told, and
none waits for a collective that the others will never start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_onebit import handshake
from horovod_onebit.errors import DesyncError, error_text
from horovod_onebit.face import agreement_name
from horovod_onebit.handshake import Facts, Finite, Mismatch, Verdict
from horovod_onebit.tf.collectives import HorovodCollectives, view
from horovod_onebit.tf.graph import host_function, host_value, outside

FAILED = "an error"
"""What a worker does that has found one by itself."""


def meet(
    collectives: HorovodCollectives,
    record: Callable[..., Any],
    inputs: Sequence[Any],
    call: str,
    facts: Callable[[], Facts],
    heard: Callable[[Verdict], None] = lambda verdict: None,
) -> Any:
    """Tell the others the ``record`` (``handshake.agreement``) of the values of ``inputs``; returns whether no worker
    has said that something is not finite, in a graph as a tensor.

    An error of ``record`` is raised when the others have been told, who then get a ``DesyncError``. ``facts`` are those
    behind the last record: they are exchanged if the records differ, and the error names those that do. ``heard`` is
    called with what all workers know then. In a graph, the caller sees to it that meetings are ``in_order``.
    """
    failed: list[Exception] = []  # emptied before it is raised, or a frame and the error would keep each other

    def say(*values: Any) -> Any:
        failed.clear()
        try:
            return tf.constant(record(*values))
        except Exception as error:
            failed.append(error)
            return tf.constant(_record(collectives, FAILED, error_text(error), Finite.NO))

    def hear(total: Any) -> bool:
        error = failed.pop() if failed else None
        try:
            found = handshake.read_agreement(view(total), collectives.size)
        except DesyncError as desync:
            text = str(desync)
            if isinstance(desync, Mismatch):
                own = facts() if error is None else handshake.facts_of(FAILED, error_text(error))
                text = handshake.differences(text, _gathered(handshake.packed(own, collectives.size), collectives))
            if error is None:
                raise DesyncError(f"{text}. This worker was about to do this: {call}") from None
        if error is not None:
            raise error
        heard(found)
        return found.finite

    process_set = collectives.process_set
    gather = _shared(process_set).sum_integers(agreement_name(process_set.process_set_id))
    if tf.executing_eagerly():
        return hear(gather(say(*inputs)))
    with tf.device("/CPU:0"):
        said = host_function(say, inputs, tf.int32)
    said.set_shape([None])
    return host_value(hear, [gather(said)], tf.bool)


def _gathered(own: bytes, collectives: HorovodCollectives) -> list[bytes]:
    """The texts of all workers, which have no zeros in them, when all of them ask for them. Collective.

    It runs in a host function: an eager operation waits on Horovod's thread, and needs none of TensorFlow's.
    """
    with tf.device("/CPU:0"):
        text = tf.constant(np.frombuffer(own + b"\0", np.uint8))
        process_set = collectives.process_set
        rows = hvd.allgather(text, name=f"{agreement_name(process_set.process_set_id)}.facts", process_set=process_set)
    return view(rows).tobytes().split(b"\0")[:-1]


def announce(
    call: str,
    process_set: Any = hvd.global_process_set,
    setup: str = "",
    *,
    remark: str = "",
    **facts: Mapping[str, object],
) -> Any:
    """Make sure that all workers of ``process_set`` are about to do ``call``, with the same ``setup`` and ``facts``.
    Collective.

    Returns true when that is known, in a graph a tensor. Raises ``DesyncError`` on all of them if not, which has this
    worker's ``remark``, too; remarks may differ.
    """
    return agree(True, _shared(process_set), call, setup, remark, facts)


def _shared(process_set: Any) -> HorovodCollectives:
    """Those of a process set whose graph of an agreement all have in common."""
    return _collectives(process_set, process_set.process_set_id, process_set.size())


@lru_cache
def _collectives(process_set: Any, number: int, size: int) -> HorovodCollectives:
    """Those of a process set while it has this ``number`` and ``size``, with the graphs that they have made."""
    return HorovodCollectives(process_set)


def agree(
    finite: Any, collectives: HorovodCollectives, call: str, setup: str, remark: str = "", facts: Facts | None = None
) -> Any:
    """Whether ``finite``, a scalar, is true on all workers. Collective; raises as ``announce``."""
    more = facts or {}
    compared = f"{setup} {handshake.packed(more).decode()}"

    def record(value: Any) -> Any:
        return _record(collectives, call, compared, Finite.YES if bool(value) else Finite.NO)

    return meet(collectives, record, [finite], call, lambda: handshake.facts_of(call + remark, setup, **more))


@contextlib.contextmanager
def told(process_set: Any) -> Iterator[None]:
    """What is raised in this block, before this worker has met the others, is told to those of ``process_set``: they
    get a ``DesyncError``, and do not wait for what this worker will not start."""
    try:
        yield
    except Exception as error:
        if process_set.included():
            # What this meeting raises is less than what is raised here.
            with outside(), contextlib.suppress(Exception):
                announce(FAILED, process_set, error_text(error))
        raise


def _record(collectives: HorovodCollectives, call: str, setup: str, finite: Finite) -> Any:
    return handshake.agreement(collectives.rank, collectives.size, call=call, setup=setup, finite=finite)

"""What the step needs to run alike in a TensorFlow graph and eagerly.

Nothing that runs on the host waits for a collective: a host function occupies one of TensorFlow's threads, perhaps the
only one. Host functions compute; Horovod's operations between them are asynchronous kernels, which need no thread.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from horovod_onebit.checks import check_version
from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.tasks import Task
from horovod_onebit.tf.collectives import NOTHING, Errand, HorovodCollectives, Round, view
from horovod_onebit.tf.place import Place

check_version("keras", keras.__version__)

MULTI = tuple(kind for kind in (getattr(keras.optimizers, "MultiOptimizer", None),) if kind)  # since Keras 3.13


def flat_view(variable: Any) -> np.ndarray:
    """The values of ``variable``, flat, in its own memory if they are float32 there; not to be written to."""
    with tf.device("/CPU:0"):
        return view(tf.identity(tf.cast(tf.convert_to_tensor(variable), tf.float32))).reshape(-1)


def assign(variable: Any, array: Any) -> None:
    """Let ``variable`` be ``array``, which nobody will write to again."""
    variable.assign(tf.reshape(adopt(array), variable.shape))


def path_of(variable: Any) -> str:
    """Keras's path of a variable; of one of TensorFlow's, its name."""
    return str(getattr(variable, "path", variable.name))


def cond(
    condition: Any, then: Callable[[], None], otherwise: Callable[[], None] = lambda: None, *, whole: bool = False
) -> Any:
    """``tf.cond`` for branches that return nothing; a plain ``if`` outside of graphs. In a graph, return an operation
    that is complete when the branch is.

    TensorFlow inlines both branches: their operations may start before all inputs are ready, and those of the branch
    not taken cost time. With ``whole``, where there is no GPU, the branch starts when all its inputs are ready, and the
    other one costs nothing.
    """

    def branch(work: Callable[[], None]) -> Callable[[], Any]:
        def run() -> Any:
            work()
            return tf.constant(0)

        return run

    result = either(condition, branch(then), branch(otherwise))
    if tf.executing_eagerly():
        return None
    done = _operation(result)
    if whole and not tf.config.list_logical_devices("GPU"):  # a whole branch could be on one device only
        done._set_attr("_lower_using_switch_merge", AttrValue(b=False))
    return done


def either(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """``tf.cond``; a plain ``if`` outside of graphs."""
    if tf.executing_eagerly():
        return (then if condition else otherwise)()
    return tf.cond(condition, then, otherwise)


def adopt(array: np.ndarray) -> Any:
    """A tensor that shares the memory of ``array``, which must not be written to any more."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__()) if array.size else tf.constant(array)


class HostFunctions:
    """What host functions do; they work as long as this lives.

    TensorFlow keeps a host function when the graph that calls it is gone, until its session is cleared or the program
    ends. It would keep an optimizer with its state, too, if the function, and not the optimizer, kept what it does.
    """

    current: ClassVar[ContextVar[HostFunctions | None]] = ContextVar("current", default=None)

    def __init__(self) -> None:
        self._works: list[Callable[..., Any]] = []

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """Those that are made in here are kept by this."""
        before = self.current.set(self)
        try:
            yield
        finally:
            self.current.reset(before)

    def made(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """What calls ``work``, and does not keep it."""
        self._works.append(work)
        number, me = len(self._works) - 1, weakref.ref(self)

        def call(*values: Any) -> Any:
            if (keeper := me()) is None:
                raise ConfigurationError(
                    "this function of TensorFlow was traced with an optimizer that is gone: trace it anew with the one "
                    "that is used now, or keep the other"
                )
            return keeper._works[number](*values)

        return call


def host_function(work: Callable[..., Any], inputs: Sequence[Any], dtypes: Any) -> Any:
    """``tf.py_function``; ``work`` is kept by the ``HostFunctions`` of now, if there are any."""
    keeper = HostFunctions.current.get()
    return tf.py_function(work if keeper is None else keeper.made(work), list(inputs), dtypes)


def host_call(work: Callable[..., None], *inputs: Any) -> None:
    """Run ``work`` with the values of ``inputs`` whenever the step runs, and not only when it is traced."""
    if tf.executing_eagerly():
        work(*inputs)
    else:
        with tf.device("/CPU:0"):
            host_function(work, inputs, [])


def host_value(work: Callable[..., Any], inputs: Sequence[Any], dtype: Any) -> Any:
    """The scalar that ``work`` returns for the values of ``inputs`` whenever the step runs."""
    if tf.executing_eagerly():
        return work(*inputs)
    with tf.device("/CPU:0"):
        value = host_function(work, inputs, dtype)
    value.set_shape([])
    return value


def host_values(work: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """The tensors that ``work`` returns for the values of ``inputs``; of unknown shape, if in a graph."""
    with tf.device("/CPU:0"):  # variables on a GPU travel to the host and back
        if tf.executing_eagerly():  # or what it raises would become an error of TensorFlow's
            values = work(*[tf.identity(i) for i in inputs])
            return [tf.convert_to_tensor(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]
        return list(host_function(work, inputs, list(dtypes)))


def on_device(place: Place, work: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """``host_values`` whose tensors are, and stay, in the memory of ``place``."""
    with tf.device(place.device):
        if tf.executing_eagerly():
            return list(work(*[tf.identity(i) for i in inputs]))  # which brings them there
        return list(host_function(work, inputs, list(dtypes)))


def handed(place: Place | None, tensors: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """How a host function gets ``tensors``, float32: what is to be among its inputs, and what makes flat arrays of the
    values of these, in the host's memory or in that of ``place``."""
    if place is None:
        return list(tensors), lambda values: [view(value).reshape(-1) for value in values]
    arrays: list[Any] = []

    def keep(*values: Any) -> list[Any]:
        arrays[:] = [place.array(value) for value in values]
        return [tf.constant(True)]

    def take(_: Any) -> list[Any]:
        taken, arrays[:] = arrays[:], []
        return taken

    done = on_device(place, keep, tensors, [tf.bool])
    run_independently(done[0])
    return done, take


def in_rounds(
    errand: Errand,
    collectives: HorovodCollectives,
    work: Callable[..., Task[Any]],
    inputs: Sequence[Any],
    label: str = "",
) -> Any:
    """Carry out the task that ``work`` makes of the values of ``inputs``, round by round.

    Returns a tensor that is there when it is done. What has a ``label``, alike on all workers, waits for its ``inputs``
    only, and not for other host functions that come before it in the program.
    """
    dtypes = [tf.bool, *Round.DTYPES]

    def flat(asked: Round | None) -> list[Any]:
        return [np.bool_(asked is not None), *(NOTHING if asked is None else asked.arrays())]

    def begin(*values: Any) -> list[Any]:
        with collectives.lock:
            return flat(errand.start(work(*values)))

    def proceed(*received: Any) -> list[Any]:
        with collectives.lock:
            return flat(errand.resume([view(tensor) for tensor in received]))

    if tf.executing_eagerly():
        more, *sent = begin(*inputs)
        while more:
            more, *sent = proceed(*collectives.perform(label)(*map(tf.constant, sent)))
        return tf.constant(False)

    def shaped(tensors: Sequence[Any]) -> list[Any]:
        for tensor, shape in zip(tensors, [[], *([[None]] * len(Round.DTYPES))], strict=True):
            tensor.set_shape(shape)
        return list(tensors)

    def turn(_: Any, *sent: Any) -> list[Any]:
        return shaped(host_values(proceed, collectives.perform(label)(*sent), dtypes))

    # A loop, and not a chain: how many rounds there are depends on the options, and is more at the first step.
    asked = shaped(host_values(begin, inputs, dtypes))
    with tf.device("/CPU:0"):  # or TensorFlow carries what travels over the GPU in each round
        done = tf.while_loop(lambda more, *sent: more, turn, asked, parallel_iterations=1)[0]
    if label:
        run_independently(asked[0])
        run_independently(done)
    return done


def run_independently(tensor: Any) -> None:
    """In a graph, take the operation of ``tensor`` out of the program's order, in which TensorFlow runs those with side
    effects."""
    if tf.executing_eagerly():
        return
    manager = getattr(tensor.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(_operation(tensor))


def _operation(tensor: Any) -> Any:
    """What ``tensor`` is a result of."""
    operation = tensor.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    return operation


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Make variables eagerly, whatever graph is being traced: TensorFlow would trace its function once more."""

    def at_once(make: Callable[..., Any], **options: Any) -> Any:
        return make(**options | {"experimental_enable_variable_lifting": False})

    with tf.init_scope(), tf.variable_creator_scope(at_once):
        yield


_order: list[Any] = []


FETCHES = {"IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue"}
"""Operations that fail where there is no batch."""
CALLS = {"PartitionedCall", "StatefulPartitionedCall", "While", "If", "Case"}
BRANCHES = {"CondBranchFuncGraph", "WhileBodyFuncGraph"}


@contextlib.contextmanager
def with_a_batch() -> Iterator[None]:
    """In a graph, what is in here begins when there is a batch.

    When a dataset has ended that is read within ``tf.function``, the step runs once more, without a batch: in ``fit``,
    if the length is unknown, and in loops that call ``next(iterator)`` there. TensorFlow then does all in it that needs
    none: it would count a step, and meet workers that have a batch.
    """
    fetch, found = ([], []) if tf.executing_eagerly() else _batches()
    # TensorFlow passes no control dependencies into branches: what is waited for there comes in as a value.
    values = [tf.identity(t) for t in found if t.dtype not in (tf.resource, tf.variant)]
    with tf.control_dependencies([*fetch, *values]):
        yield


def _batches() -> tuple[list[Any], list[Any]]:
    """What is there only with a batch: operations of this graph that fetch one; and results of those of the graphs
    around a branch, and the arguments of the function being traced, each of which could be it. (Where gradients are
    its arguments, as in a function of a user's own, messages wait for all of them.)"""
    graph = tf.compat.v1.get_default_graph()
    fetch, found = [operation for operation in graph.get_operations() if _fetches(operation, graph)], list[Any]()
    while type(graph).__name__ in BRANCHES:
        graph = graph.outer_graph
        found += [t for operation in graph.get_operations() if _fetches(operation, graph) for t in operation.outputs]
    return fetch, found + list(getattr(graph, "inputs", ()))


def _fetches(operation: Any, graph: Any) -> bool:
    """Whether ``operation``, or one in a function that it calls, fetches a batch."""
    kinds, nodes, seen = {operation.type}, [operation.node_def] if operation.type in CALLS else [], set[str]()
    while nodes:
        for name in {f.name for a in nodes.pop().attr.values() for f in (a.func, *a.list.func)} - seen - {""}:
            seen.add(name)
            body = getattr(graph._get_function(name), "cached_definition", None)
            inner = [] if body is None else list(body.node_def)
            kinds |= {node.op for node in inner}
            nodes += [node for node in inner if node.op in CALLS]
    return bool(kinds & FETCHES)


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """What is in here begins when everything before it, in the program's order, is over: on all workers alike.

    TensorFlow runs what does not depend on each other in any order, but the uses of one variable in the program's.
    """
    if tf.executing_eagerly():
        yield
        return
    if not _order:
        with outside(), tf.device("/CPU:0"):
            _order.append(tf.Variable(0, trainable=False, dtype=tf.int64, name="onebit_order"))
    graph = tf.compat.v1.get_default_graph()
    with tf.control_dependencies([_order[0].assign_add(1, read_value=False)]):
        before = len(graph.get_operations())
        yield
    with tf.control_dependencies(graph.get_operations()[before:]):
        _order[0].assign_add(1, read_value=False)


def keras_callers() -> Iterator[tuple[str, Any]]:
    """The names of Keras's functions on the stack, the innermost first, and their ``self``; and what is ``callbacks``
    there, as in ``fit``."""
    frame = sys._getframe(1)
    while frame is not None:
        # Of Keras's own frames only: reading a frame's variables keeps them, a user's gradients too, until it returns.
        if frame.f_globals.get("__name__", "").startswith("keras."):
            yield frame.f_code.co_name, frame.f_locals.get("self")
            yield frame.f_code.co_name, frame.f_locals.get("callbacks")
        frame = frame.f_back  # type: ignore[assignment]


def callback_lists() -> Iterator[Sequence[Any]]:
    """The callbacks of each ``fit`` and the like that runs now, in their order; those of the innermost first."""
    return (caller.callbacks for _, caller in keras_callers() if isinstance(caller, keras.callbacks.CallbackList))


def check_callers() -> None:
    """Refuse callers that cannot work, found on the stack: while the step is traced, or at the first eager one."""
    for _, caller in keras_callers():
        if isinstance(caller, keras.Model) and getattr(caller, "jit_compile", False) is True:
            raise UnsupportedError(
                "this model is compiled with jit_compile=True, and XLA can neither gather nor call the host: "
                "model.compile(..., jit_compile=False)"
            )
        scaling = isinstance(caller, keras.optimizers.LossScaleOptimizer)
        if scaling and not getattr(caller, "distributed", False):
            instead = "wrap it, onebit.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), ...)"
            if isinstance(caller.inner_optimizer, MULTI):
                instead = (
                    "around a MultiOptimizer it cannot be wrapped. Multiply the loss by a constant instead: "
                    "keras.optimizers.MultiOptimizer(..., loss_scale_factor=1024.0) and "
                    "model.compile(..., auto_scale_loss=False)"
                )
            raise UnsupportedError(
                "Keras's LossScaleOptimizer (which compile() adds under the mixed_float16 policy) lets each worker "
                f"decide alone whether it takes a step, and the others would wait for ever: {instead}"
            )

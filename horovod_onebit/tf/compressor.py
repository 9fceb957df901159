"""The compressed step of the Keras face: one host call, whatever the number of variables.

Variables are *exact* while they are small (or not float32): their gradients are averaged in one allreduce and the
wrapped optimizer updates them in the graph. All others are *compressed*: the engine updates them here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_onebit.checks import mapping
from horovod_onebit.engine import Engine
from horovod_onebit.errors import ConfigurationError, DesyncError
from horovod_onebit.feedback import SERVER_PREFIX
from horovod_onebit.handshake import Verdict
from horovod_onebit.kernels.reference import Array
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Rule, Tensor
from horovod_onebit.schedule import Kind
from horovod_onebit.stats import Stats, allreduce_bytes
from horovod_onebit.tf.collectives import HorovodCollectives
from horovod_onebit.tf.rules import Adapter
from horovod_onebit.warmup import AutoWarmup, Phase
from horovod_onebit.world import workers_changed

_used = itertools.count()


@dataclass(frozen=True)
class Values:
    """What a compressed step reads, in the order of the variables: flat float32 arrays, or None where there is none.

    They share memory with TensorFlow's tensors, which are values that others may hold: they are never written to.
    """

    grads: Sequence[Array]
    weights: Sequence[Array]
    momenta: Sequence[Array | None]
    variances: Sequence[Array | None]


class Compressor:
    """Belongs to one Keras ``DistributedOptimizer``; made when the optimizer is built."""

    def __init__(
        self, optimizer: Any, adapter: Adapter, recipe: Recipe, process_set: Any, sum_gradients: bool, name: str | None
    ) -> None:
        self.optimizer = optimizer
        self.adapter = adapter
        self.process_set = process_set
        self.sum_gradients = sum_gradients
        self.engine = Engine(recipe, HorovodCollectives(process_set), name=name or "")
        self.tensors: list[Tensor] = []
        self.indices: tuple[int, ...] = ()

    def take_name(self) -> None:
        """Name the collectives, before the first one: by the optimizers used before in this process.

        Used, not made: worker 0 may load a model alone, to read it.
        """
        if not self.engine.name:
            self.engine.name = f"onebit.{type(self.optimizer).__name__}.{next(_used)}"

    def is_compressed(self, variable: Any) -> bool:
        """Whether ``variable`` travels as one bit after warm-up."""
        size = math.prod(variable.shape)
        plain = variable.dtype == "float32" and not getattr(variable, "overwrite_with_gradient", False)
        return plain and size >= self.engine.recipe.min_compressed_size

    def name_of(self, index: int, variable: Any) -> str:
        """Not its path: Keras numbers layers by how many there were before in this process."""
        return f"{index}.{variable.name}"

    def agree(self, trained: Sequence[int], steps: Any, exact_steps: Any, learning_rate: Any) -> bool:
        """Raise ``DesyncError`` on every worker if they do not mean the same by the step that begins, else True."""
        optimizer, wrapping = self.optimizer, self.optimizer._wrapping
        if workers_changed(self.engine):
            raise DesyncError(
                f"there were {self.engine.context.workers} workers and there are {self.engine.collectives.size}: "
                "horovod_onebit.tf.elastic.KerasState and run tell the optimizer"
            )
        variables = [optimizer._trainable_variables[i] for i in trained]
        rows = [(i, v.name, tuple(v.shape), str(v.dtype)) for i, v in zip(trained, variables, strict=True)]
        rule = self.adapter.rule(optimizer, float(learning_rate), optimizer.weight_decay or 0.0, int(exact_steps), 1.0)
        clipping = (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm, optimizer.loss_scale_factor)
        counts = (int(steps), int(exact_steps), wrapping.warmup, wrapping.backward_passes_per_step)
        setup = f"{counts} {self.sum_gradients} {rows}"
        self.engine.finish_agreement(self.engine.start_agreement(setup=setup, options=f"{rule} {clipping}"))
        return True

    def observe(self, warmup: AutoWarmup, steps: Any, learning_rate: Any, norm: Any = None) -> int:
        """Show the run to the automatic warm-up; the number of exact steps that it wants now."""
        beta2, step = getattr(self.optimizer, "beta_2", 0.0), int(steps)
        if warmup.wants(step):
            warmup.observe(step, None if norm is None else float(norm) / (1 - beta2**step), float(learning_rate), beta2)
        return warmup.steps

    def count_warmup(self, sizes: Sequence[int], bytes_each: int) -> None:
        """Account for one exact step over tensors of ``sizes`` elements."""
        workers, total = self.engine.collectives.size, sum(sizes)
        self.engine.traffic.add(allreduce_bytes(bytes_each * total, workers), allreduce_bytes(4 * total, workers))
        self.engine.end_step()

    def _bind(self, indices: tuple[int, ...]) -> None:
        """Name the variables that are compressed; again only when the set of them changes."""
        if indices == self.indices:
            return
        self.indices, self.tensors = indices, []
        empty = np.empty(0, np.float32)
        for i in indices:
            variable = self.optimizer._trainable_variables[i]
            name = self.name_of(i, variable)
            residual = self.engine.feedback.residual(name, math.prod(variable.shape))
            tensor = Tensor(name, empty, empty, None, residual)
            self.adapter.init(tensor)
            self.tensors.append(tensor)

    def _load(self, values: Values, rules: Sequence[Rule], learning_rate: float, step: int, exact_steps: int) -> None:
        """Point the tensors at the values, and give them new memory for what the step will change.

        At the first compressed step, the exact steps' momentum becomes the rule's.
        """
        first, in_place = step == exact_steps, self.adapter.in_place
        for i, tensor in enumerate(self.tensors):
            weight, momentum, tensor.variance = values.weights[i], values.momenta[i], values.variances[i]
            if momentum is None:  # SGD without momentum: nobody looks at it again
                momentum = tensor.momentum if tensor.momentum.size == weight.size else np.zeros_like(weight)
            elif first:
                momentum = self.adapter.first_momentum(momentum, learning_rate)
            tensor.weight = _aligned_copy(weight) if in_place else weight
            tensor.momentum = _aligned_copy(momentum) if in_place else momentum
            tensor.new_weight = None if in_place else _aligned(weight.size)
            tensor.new_momentum = None if in_place else _aligned(weight.size)
            tensor.step, tensor.variance_steps = step, exact_steps
        self.adapter.keep(self.optimizer, self.tensors, self.indices, rules, first=first)

    def step(self, indices: tuple[int, ...], values: Values, exact: Sequence[Array]) -> tuple[bool, list[Array]]:
        """Update the compressed variables; whether the step was taken, and the means of the exact gradients.

        If it was, the new weights and momenta are in ``tensors``, in arrays that nobody will write to again.
        """
        optimizer, grads = self.optimizer, values.grads
        learning_rate = float(optimizer.learning_rate)
        taken_before = int(optimizer.iterations)
        exact_steps = taken_before - int(optimizer._compressed_steps.value.numpy())
        self._bind(indices)
        factors = self._clip_factors([*grads, *exact])
        if optimizer.clipvalue is not None:
            grads, exact = (
                [np.clip(g, -optimizer.clipvalue, optimizer.clipvalue) for g in gs] for gs in (grads, exact)
            )
        rules = [
            self._rule(optimizer._trainable_variables[i], learning_rate, exact_steps, factor)
            for i, factor in zip(indices, factors, strict=False)
        ]
        self._load(values, rules, learning_rate, taken_before, exact_steps)
        self.engine.prepare(self.tensors, rules)
        arrive, means = self._average(exact, factors[len(grads) :]), []

        def others() -> bool:
            means.extend(arrive())
            return all(np.isfinite(mean).all() for mean in means)

        by_number = dict(enumerate(grads))
        try:
            taken = self.engine.step(Kind.ONEBIT, by_number, rules, agreed=Verdict, others=others)
        finally:
            self.engine.end_step()
        for tensor in self.tensors:
            if taken and tensor.new_weight is not None and tensor.new_momentum is not None:
                tensor.weight, tensor.momentum = tensor.new_weight, tensor.new_momentum
            tensor.new_weight = tensor.new_momentum = None
        return taken, means

    def _rule(self, variable: Any, learning_rate: float, exact_steps: int, factor: float) -> Rule:
        optimizer = self.optimizer
        decay = optimizer.weight_decay if optimizer.weight_decay and optimizer._use_weight_decay(variable) else 0.0
        scale = factor * (self.engine.collectives.size if self.sum_gradients else 1)
        return self.adapter.rule(optimizer, learning_rate, decay, exact_steps, scale)

    def _clip_factors(self, grads: Sequence[Array]) -> list[float]:
        """What each gradient is multiplied by, the same on all workers: clipping by the root mean square, over the
        workers, of the norms of their own gradients."""
        optimizer = self.optimizer
        limit = optimizer.clipnorm or optimizer.global_clipnorm
        factor = 1.0 / optimizer.loss_scale_factor if optimizer.loss_scale_factor else 1.0
        if not limit:
            return [factor] * len(grads)
        squares = np.array([np.dot(g.reshape(-1), g.reshape(-1)) for g in grads], np.float64) * factor**2
        if optimizer.global_clipnorm:
            squares = squares.sum(keepdims=True)
        total = self.engine.collectives.allreduce(squares.astype(np.float32), f"{self.engine.name}.norms").wait()
        norms = np.sqrt(total / self.engine.collectives.size)
        scales = factor * np.minimum(1.0, limit / np.maximum(norms, 1e-30))
        return [float(s) for s in np.broadcast_to(scales, len(grads))]

    def _average(self, grads: Sequence[Array], factors: Sequence[float]) -> Callable[[], list[Array]]:
        """Start one allreduce of exact gradients, in float32; the result waits for their means (or sums)."""
        if not grads:
            return list
        scaled = [np.float32(f) * g.reshape(-1).astype(np.float32) for g, f in zip(grads, factors, strict=True)]
        fused = np.concatenate(scaled)
        handle = self.engine.collectives.allreduce(fused, f"{self.engine.name}.exact")
        sent = allreduce_bytes(fused.nbytes, self.engine.collectives.size)
        self.engine.traffic.add(sent, sent)

        def arrive() -> list[Array]:
            total = handle.wait()
            mean = total if self.sum_gradients else total / np.float32(self.engine.collectives.size)
            parts = np.split(mean, np.cumsum([g.size for g in grads])[:-1])
            return [part.reshape(g.shape).astype(g.dtype) for part, g in zip(parts, grads, strict=True)]

        return arrive

    def stats(self, norms: bool) -> Stats:
        optimizer = self.optimizer
        variables = optimizer._trainable_variables
        compressed = [v for v in variables if self.is_compressed(v)] if optimizer.phase is Phase.COMPRESSED else []
        return self.engine.stats(
            phase=optimizer.phase.value,
            step=int(optimizer.iterations),
            parameters=sum(math.prod(v.shape) for v in variables),
            compressed=sum(math.prod(v.shape) for v in compressed),
            norms=norms,
        )

    def load_feedback(self, state: Mapping[str, Array]) -> None:
        self.check_feedback(state)
        self.engine.feedback.load_state_dict(state)

    def check_feedback(self, state: Mapping[str, Array]) -> None:
        """Raise ``ConfigurationError`` unless ``load_feedback`` can take over ``state``."""
        known = {self.name_of(i, v): math.prod(v.shape) for i, v in enumerate(self.optimizer._trainable_variables)}
        given = set(mapping("state", state, "names to arrays"))
        unknown = sorted(n for n in given - known.keys() if not n.startswith(SERVER_PREFIX))
        if unknown:
            raise ConfigurationError(
                f"error feedback of variables that this optimizer does not have: {unknown}. Build it first: "
                "optimizer.build(model.trainable_variables)"
            )
        self.engine.feedback.check(state)
        for name, value in state.items():
            if value.size != known.get(name, value.size):
                raise ConfigurationError(
                    f"error feedback of {name!r}: got {value.size} elements, expected {known[name]}"
                )


def _aligned(size: int) -> Array:
    """Memory for ``size`` float32 that TensorFlow can adopt: it wants tensors to start at multiples of 64 bytes."""
    memory = np.empty(4 * size + 64, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64
    return memory[start : start + 4 * size].view(np.float32)


def _aligned_copy(array: Array) -> Array:
    copy = _aligned(array.size)
    copy[:] = array
    return copy


def average(
    grads: Sequence[Any], *, prefix: str, op: Any, compression: Any, predivide: float, process_set: Any
) -> list:
    """The exact gradients' averages by Horovod's own operations, in the graph or eagerly."""
    factors = {"prescale_factor": 1.0 / predivide, "postscale_factor": predivide} if op == hvd.Average else {}
    return [
        hvd.allreduce(
            tf.convert_to_tensor(g),
            name=f"{prefix}.{i}",
            op=op,
            compression=compression,
            process_set=process_set,
            **factors,
        )
        for i, g in enumerate(grads)
    ]

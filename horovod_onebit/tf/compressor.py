"""The compressed step of the Keras face: one host call, whatever the number of variables.

Variables are *exact* while they are small (or not float32): their gradients are averaged in one allreduce and the
wrapped optimizer updates them in the graph. All others are *compressed*: the engine updates them here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_onebit.engine import Engine
from horovod_onebit.kernels.reference import Array
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules import Rule, Tensor
from horovod_onebit.stats import Stats, allreduce_bytes
from horovod_onebit.tf.collectives import HorovodCollectives, view
from horovod_onebit.tf.rules import Adapter
from horovod_onebit.warmup import Phase


class _Slot:
    """One Keras variable and the array that the core works on in its place.

    TensorFlow's tensors are values that may be shared, so they are never written to: the core works on a copy, which
    becomes the variable's new tensor. A variable that nobody else assigned is not read again.
    """

    def __init__(self, variable: Any) -> None:
        self.variable = variable
        self.array = np.empty(0, np.float32)
        self.address = 0

    def read(self) -> Array:
        """The variable's value in an array of our own, flat float32, that may be written to."""
        current = view(self.variable.value.read_value()).reshape(-1)
        self.array = current.copy()
        return self.array

    def look(self) -> Array:
        """The variable's value, shared; not to be written to."""
        return view(self.variable.value.read_value()).reshape(-1)

    def write(self) -> None:
        """Make the array the variable's value."""
        self.variable.value.assign(self.array.reshape(self.variable.shape))


class Compressor:
    """Belongs to one Keras ``DistributedOptimizer``; made when the optimizer is built."""

    def __init__(
        self, optimizer: Any, adapter: Adapter, recipe: Recipe, process_set: Any, sum_gradients: bool, name: str
    ) -> None:
        self.optimizer = optimizer
        self.adapter = adapter
        self.process_set = process_set
        self.sum_gradients = sum_gradients
        self.engine = Engine(recipe, HorovodCollectives(process_set), name=name)
        self.tensors: list[Tensor] = []
        self.slots: list[tuple[_Slot, _Slot | None, _Slot | None]] = []
        self.indices: tuple[int, ...] = ()

    def is_compressed(self, variable: Any) -> bool:
        """Whether ``variable`` travels as one bit after warm-up."""
        size = math.prod(variable.shape)
        plain = variable.dtype == "float32" and not getattr(variable, "overwrite_with_gradient", False)
        return plain and size >= self.engine.recipe.min_compressed_size

    def count_warmup(self, sizes: Sequence[int], bytes_each: int) -> None:
        """Account for one exact step over tensors of ``sizes`` elements."""
        workers, total = self.engine.collectives.size, sum(sizes)
        self.engine.traffic.add(allreduce_bytes(bytes_each * total, workers), allreduce_bytes(4 * total, workers))
        self.engine.end_step()

    def _bind(self, indices: tuple[int, ...]) -> None:
        """Make the arrays of the variables that are compressed; again only when the set of them changes."""
        if indices == self.indices:
            return
        optimizer, self.indices = self.optimizer, indices
        self.tensors, self.slots = [], []
        empty = np.empty(0, np.float32)
        for i in indices:
            variable = optimizer._trainable_variables[i]
            momentum = self.adapter.momentum(optimizer, i)
            variance = self.adapter.variance(optimizer, i)
            name = f"{i}.{getattr(variable, 'path', variable.name)}"
            residual = self.engine.feedback.residual(name, math.prod(variable.shape))
            self.tensors.append(Tensor(name, empty, empty, None, residual))
            slots = (_Slot(variable), *(None if v is None else _Slot(v) for v in (momentum, variance)))
            self.slots.append(slots)  # type: ignore[arg-type]

    def _pull(self, learning_rate: float, exact_steps: int, step: int) -> None:
        """Take the variables' values; at the first compressed step, the exact steps' momentum becomes the rule's."""
        first = int(self.optimizer._compressed_steps.value.numpy()) == 0
        for tensor, (weight, momentum, variance) in zip(self.tensors, self.slots, strict=True):
            tensor.weight = weight.read()
            if momentum is None:
                if tensor.momentum.size != tensor.weight.size:
                    tensor.momentum = np.zeros_like(tensor.weight)
            else:
                tensor.momentum = momentum.read()
                if first:
                    tensor.momentum[:] = self.adapter.first_momentum(tensor.momentum, learning_rate)
            tensor.variance = None if variance is None else variance.look()
            tensor.step, tensor.variance_steps = step, exact_steps

    def _push(self) -> None:
        for weight, momentum, _ in self.slots:
            weight.write()
            if momentum is not None:
                momentum.write()

    def step(
        self, indices: tuple[int, ...], exact: Sequence[Array], grads: Sequence[Array]
    ) -> tuple[bool, list[Array]]:
        """Update the compressed variables; whether the step was taken, and the means of the exact gradients."""
        optimizer = self.optimizer
        learning_rate = float(optimizer.learning_rate)
        exact_steps = int(optimizer._exact_steps.value.numpy())
        iterations = int(optimizer.iterations)
        self._bind(indices)
        factors = self._clip_factors([*grads, *exact])
        if optimizer.clipvalue is not None:
            grads = [np.clip(g, -optimizer.clipvalue, optimizer.clipvalue) for g in grads]
            exact = [np.clip(g, -optimizer.clipvalue, optimizer.clipvalue) for g in exact]
        rules = [
            self._rule(tensor_slots[0].variable, learning_rate, exact_steps, factor)
            for tensor_slots, factor in zip(self.slots, factors, strict=False)
        ]
        self._pull(learning_rate, exact_steps, iterations)
        self.engine.prepare(self.tensors, rules, [str(slots[0].variable.shape) for slots in self.slots])
        assert self.engine.layout is not None
        by_number = dict(enumerate(grads))
        for bucket in self.engine.layout.buckets:
            self.engine.send(bucket.index, by_number, rules)
        means = self._average(exact, factors[len(grads) :])
        taken = self.engine.receive(finite=all(np.isfinite(mean).all() for mean in means))
        if taken:
            self._push()
        self.engine.end_step()
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

    def _average(self, grads: Sequence[Array], factors: Sequence[float]) -> list[Array]:
        """Means (or sums) of exact gradients in one allreduce, in float32."""
        if not grads:
            return []
        scaled = [np.float32(f) * g.reshape(-1).astype(np.float32) for g, f in zip(grads, factors, strict=True)]
        fused = np.concatenate(scaled)
        total = self.engine.collectives.allreduce(fused, f"{self.engine.name}.exact").wait()
        sent = allreduce_bytes(fused.nbytes, self.engine.collectives.size)
        self.engine.traffic.add(sent, sent)
        mean = total if self.sum_gradients else total / np.float32(self.engine.collectives.size)
        parts = np.split(mean, np.cumsum([g.size for g in grads])[:-1])
        return [part.reshape(g.shape).astype(g.dtype) for part, g in zip(parts, grads, strict=True)]

    def stats(self, norms: bool) -> Stats:
        engine, optimizer = self.engine, self.optimizer
        error, momentum = engine.norms() if norms else (math.nan, math.nan)
        traffic, times = engine.traffic, engine.times
        variables = optimizer._trainable_variables
        compressed = [v for v in variables if self.is_compressed(v)] if optimizer.phase is Phase.COMPRESSED else []
        return Stats(
            phase=optimizer.phase.value,
            step=int(optimizer.iterations),
            skipped_steps=engine.skipped,
            parameters=sum(math.prod(v.shape) for v in variables),
            compressed_parameters=sum(math.prod(v.shape) for v in compressed),
            bytes_sent=traffic.total,
            bytes_received=traffic.total,
            step_bytes_sent=traffic.step,
            step_bytes_received=traffic.step,
            ratio_to_fp32=traffic.fp32_step / traffic.step if traffic.step else 1.0,
            encode_seconds=times.encode,
            exchange_seconds=times.exchange,
            decode_seconds=times.decode,
            error_norm=error,
            momentum_norm=momentum,
        )

    def load_feedback(self, state: Mapping[str, Array]) -> None:
        self.engine.feedback.load_state_dict(state)


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

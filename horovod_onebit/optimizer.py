"""The whole algorithm over NumPy arrays and any ``Collectives``: no framework and no Horovod.

The simulation and plain MPI programs use it; the faces do the same with their framework's own optimizer as the
exact part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from horovod_onebit import warmup as warmups
from horovod_onebit.averages import all_finite, second_moments, start_mean
from horovod_onebit.checks import mapping, matching
from horovod_onebit.engine import Engine
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.exchange import Collectives
from horovod_onebit.kernels.reference import Array
from horovod_onebit.recipe import Recipe, resolve
from horovod_onebit.rounds import Rounds
from horovod_onebit.rules import Rule, Tensor, zero_one_adam
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.frozen import FrozenAdam
from horovod_onebit.schedule import Kind, Local, ZeroOne, kind_of
from horovod_onebit.warmup import Phase


class NumpyOptimizer:
    """1-bit training of ``weights``, float32 arrays of any shape that are updated in place.

    Args:
        weights: name -> C-contiguous float32 array, the same on every worker at the start.
        rule: one of ``horovod_onebit.rules``, such as ``rules.adam.Adam``; assign ``optimizer.rule`` to change the
            learning rate.
        warmup_steps: exact steps before compression starts; a share of ``total_steps`` below 1; or ``"auto"``.
        total_steps: optimizer steps of the whole run, where ``warmup_steps`` is a share of them.
        recipe: a preset's name or a ``Recipe``.
        collectives: how this worker talks to the others.
        schedule: ``ZeroOne`` makes the rule, an ``Adam``, 0/1 Adam; with ``Local`` each worker takes the steps of any
            rule alone, and the changes of the weights are exchanged. ``warmup_steps`` then has no effect.
        exact: names, or patterns as ``"*.embedding"``, of arrays that are never compressed: those with elements whose
            gradient is always zero, which must not move.
        kernels: ``"cpu"``, ``"reference"`` or, in Numba's simulator, ``"cuda"``.
    """

    def __init__(
        self,
        weights: Mapping[str, Array],
        rule: Rule,
        *,
        collectives: Collectives,
        warmup_steps: int | float | str = "auto",
        total_steps: int | None = None,
        recipe: str | Recipe = "robust",
        schedule: ZeroOne | Local | None = None,
        kernels: str = "cpu",
        exact: Iterable[str] | None = None,
    ) -> None:
        if not isinstance(rule, Rule):
            raise ConfigurationError(f"rule={rule!r}: expected one of horovod_onebit.rules, such as adam.Adam(1e-3)")
        if not mapping("weights", weights, "names to arrays"):
            raise ConfigurationError("weights is empty: expected at least one named array")
        for name, array in weights.items():
            if not isinstance(array, np.ndarray):
                raise ConfigurationError(f"weights[{name!r}] is {type(array).__name__}: expected a NumPy array")
            if array.dtype != np.float32 or not array.flags.c_contiguous or not array.flags.writeable:
                raise ConfigurationError(
                    f"weights[{name!r}]: expected a writable C-contiguous float32 array, got {array.dtype}"
                )
        if schedule is not None and not isinstance(schedule, (ZeroOne, Local)):
            raise ConfigurationError(f"schedule={schedule!r}: expected a ZeroOne or a Local")
        self.rule = rule
        self.engine = Engine(resolve(recipe), collectives, kernels=kernels)
        self.schedule = schedule if isinstance(schedule, ZeroOne) else None
        self.rounds: Rounds | None = None
        if isinstance(schedule, Local):
            freezes = schedule.shares_moments and type(rule) is Adam
            self.rounds = Rounds(self.engine, schedule, warmups.AfterRise(schedule.freeze) if freezes else None)
        if schedule is not None:
            warmup_steps = schedule.var_update_scaler if isinstance(schedule, ZeroOne) else 1
        self.warmup = warmups.make(warmup_steps, total_steps)
        self.step_count = 0
        self._frozen = False  # the second moments, which all workers have in common then
        self._shapes = {name: array.shape for name, array in weights.items()}
        self._tensors = [self._tensor(name, array) for name, array in weights.items()]
        smallest = self.engine.recipe.min_compressed_size
        never = matching("exact", exact, weights)
        large = {t.name for t in self._tensors if t.weight.size >= smallest} - never
        self._large = [t for t in self._tensors if t.name in large]
        self._small = [t for t in self._tensors if t.name not in large]

    def _tensor(self, name: str, array: Array) -> Tensor:
        size = array.size
        residual = self.engine.feedback.residual(name, size)
        tensor = Tensor(name, array.reshape(-1), np.zeros(size, np.float32), np.zeros(size, np.float32), residual)
        self._rule(Kind.EXACT).init(tensor)
        return tensor

    def _rule(self, kind: Kind) -> Rule:
        if self.schedule is None:
            return self.rule
        if type(self.rule) is not Adam:
            raise ConfigurationError(f"0/1 Adam is Adam, and the rule is {self.rule.name}")
        return zero_one_adam.of(self.rule, kind)

    def _all_finite(self, flat: Mapping[str, Array]) -> bool:
        """Before a step that cannot be taken back. Collective."""
        if self.schedule is None:
            return True
        bad = np.array([not all_finite(flat.values())], np.int32)
        return not self.engine.collectives.allreduce(bad, f"{self.engine.name}.finite").wait().any()

    @property
    def phase(self) -> Phase:
        """The phase of the next step; rounds of local steps have no warm-up."""
        return Phase.COMPRESSED if self.rounds is not None else self.warmup.phase(self.step_count)

    def step(self, grads: Mapping[str, Array]) -> bool:
        """Take one step with this worker's gradients (shapes as the weights'); collective.

        Returns False if all workers skipped it because one had NaN or Inf; with local steps, if this worker alone
        skipped it, or if the round that ended with it was lost.
        """
        flat = self._flat(grads)
        try:
            if self.rounds is not None:
                taken = self._local_step(self.rounds, flat)
            else:
                taken = self._warmup_step(flat) if self.phase is Phase.WARMUP else self._compressed_step(flat)
        finally:
            self.engine.end_step()
        self.step_count += taken and self.rounds is None
        return taken

    def _flat(self, grads: Mapping[str, Array]) -> dict[str, Array]:
        expected = sorted(self._shapes)
        if sorted(mapping("grads", grads, "names to arrays")) != expected:
            raise ConfigurationError(f"grads are of {sorted(grads)}: expected one for each of {expected}")
        for name, shape in self._shapes.items():
            if np.shape(grads[name]) != shape:
                raise ConfigurationError(f"grads[{name!r}] has shape {np.shape(grads[name])}: expected {shape}")
        return {t.name: np.ascontiguousarray(grads[t.name], np.float32).reshape(-1) for t in self._tensors}

    def flush(self) -> None:
        """After local steps, bring all workers to the same weights. Collective."""
        if self.rounds is not None:
            if self.rounds.under_way:
                self.rounds.exchange(flush=True)
            return
        self.engine.flush([self._rule(Kind.SYNC)] * len(self.engine.tensors))

    def _start_mean(self, tensors: list[Tensor], flat: Mapping[str, Array]) -> Callable[[], dict[str, Array]]:
        """Start averaging the gradients of ``tensors``, exactly, in one allreduce; what is returned waits for it."""
        engine, grads = self.engine, [flat[t.name] for t in tensors]
        arrive = start_mean(grads, engine.collectives, f"{engine.name}.exact", engine.traffic)
        return lambda: {t.name: mean for t, mean in zip(tensors, arrive(), strict=True)}

    def _warmup_step(self, flat: Mapping[str, Array]) -> bool:
        means = self._start_mean(self._tensors, flat)()
        if not all_finite(means.values()):
            self.engine.say_skipped("the mean gradient")
            return False
        for tensor in self._tensors:
            self.rule.exact_step(tensor, means[tensor.name], self.engine.context)
        step = self.step_count + 1
        if self.warmup.wants(step):
            self.warmup.observe(step, self._variance_norm(step), self.rule.lr, getattr(self.rule, "beta2", 0.0))
        if self.warmup.phase(step) is Phase.COMPRESSED:
            for tensor in self._large:
                self.rule.begin(tensor, self.engine.context)
        return True

    def _variance_norm(self, step: int) -> float | None:
        beta2 = getattr(self.rule, "beta2", None)
        if beta2 is None:
            return None
        variances = [t.variance for t in self._large if t.variance is not None]
        squares = sum(float(np.square(v, dtype=np.float64).sum()) for v in variances)
        return warmups.unbiased(math.sqrt(squares), beta2, step)

    def _local_step(self, rounds: Rounds, flat: Mapping[str, Array]) -> bool:
        """A step of this worker alone; then, at the end of a round, the exchange."""
        if not rounds.tensors:
            outer = {t.name: Tensor(t.name, t.weight, np.zeros_like(t.weight), None, t.residual) for t in self._tensors}
            for tensor in outer.values():
                rounds.rule.init(tensor)
            rounds.begin([outer[t.name] for t in self._large], [outer[t.name] for t in self._small])
        taken, context = all_finite(flat.values()), self.engine.context
        frozen = FrozenAdam(adam=self._adam()) if self._frozen else None
        if taken:
            step = self.rule.exact_step if frozen is None else frozen.local_step
            for tensor in self._tensors:
                step(tensor, flat[tensor.name], context)
        else:
            rounds.skip()
        if frozen is not None:
            for tensor in self._tensors:
                frozen.count_step(tensor)
        self.step_count += 1
        if rounds.stepped(self.step_count, self.rule.lr):
            taken = rounds.exchange() and taken
            if rounds.freezes:
                self._freeze(rounds, flat, usable=taken)
            return taken
        return rounds.take_over() and taken if rounds.due else taken

    def _adam(self) -> Adam:
        if type(self.rule) is not Adam:
            raise ConfigurationError(f"the second moment of Adam is frozen, and the rule is {self.rule.name}")
        return self.rule

    def _freeze(self, rounds: Rounds, flat: Mapping[str, Array], *, usable: bool) -> None:
        """The second moments become those of all workers, and stay so; or nothing, if those of some worker are not
        ``usable``. Collective."""
        engine, adam, own = self.engine, self._adam(), list[Array]()
        for tensor in self._tensors:
            assert tensor.variance is not None
            own.append(tensor.variance * np.float32(adam.correction(tensor)))
        grads = [flat[tensor.name] for tensor in self._tensors]
        name, size = f"{engine.name}.second", engine.recipe.block_size_for
        found = second_moments(own, grads, size, engine.collectives, name, engine.traffic, usable=usable)
        if found is None:
            return
        for tensor, variance in zip(self._tensors, found, strict=True):
            tensor.step = tensor.variance_steps = self.step_count
            tensor.variance = variance / np.float32(adam.correction(tensor))
            FrozenAdam(adam=adam).init(tensor)
        self._frozen = True
        rounds.begin(self._large, self._small, rules=[FrozenAdam(adam=adam)] * len(self._tensors))

    def _compressed_step(self, flat: Mapping[str, Array]) -> bool:
        engine, step = self.engine, self.engine.exchanges + 1
        kind = kind_of(self.schedule, step)
        if self.schedule is not None and self.schedule.starts_local(step):
            engine.feedback.reset()
        plan = engine.plan(kind, [self._rule(kind)] * len(self._large))
        engine.prepare(self._large, plan.rules)
        grads = {i: flat[t.name] for i, t in enumerate(self._large)}
        engine.send_rest(grads, plan)
        finite = self._all_finite(flat)
        means = self._start_mean(self._small, flat)()
        if not engine.receive(grads, plan, finite=finite and all_finite(means.values())):
            return False
        for tensor in self._small:
            self.rule.exact_step(tensor, means[tensor.name], engine.context)
        return True

"""What each second moment has seen, and whether the moments are still those that the last step left.

A second moment v that began with zeros and has seen V gradients is corrected by 1 - beta2^V. Keras's optimizers correct
by the count T of ``iterations``, and in the warm-up v is as they need it: the *plain form*. Once v is frozen, T goes on
and V does not. V is therefore kept for each variable, in a variable of the optimizer, so that it is saved and loaded
with v. In plain form v is (1 - beta2^T) / (1 - beta2^V) times as much, and has "seen" T. The beta2 of its V steps is
kept in the same way: a frozen v does not follow ``optimizer.beta_2``, nor must its correction.

A user may assign to the moments between two steps. A frozen v is written by nobody else: this module holds the memory
in which v was found last, and TensorFlow then writes new values elsewhere. An address that is still the same costs
nothing and is certain. If it is another, the values are compared, and then their checksum with the one that was saved
when v was frozen, so that a state that was loaded whole is known from one that was changed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from horovod_onebit.errors import ConfigurationError, some
from horovod_onebit.kernels.checksum import checksums
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rules.adam import plain_factor
from horovod_onebit.tf.graph import cond, host_call, path_of
from horovod_onebit.tf.rules import Options
from horovod_onebit.warmup import NEVER, least

_live: weakref.WeakSet[Moments] = weakref.WeakSet()
PROBES = 64
"""Elements of each second moment that are looked at in the warm-up."""
NO_SECOND_MOMENT, OF_VERSION_0_1 = -1, 1
"""The mark of a variable that has none: now, and in version 0.1."""
EVERY = 8
"""Steps of the warm-up from one look to the next, at most."""


class Owner(Protocol):
    """The ``Compressor`` of the optimizer whose moments these are."""

    optimizer: Any
    adapter: Any
    options: Any
    engine: Any

    def compressible(self, variable: Any) -> bool: ...

    def is_compressed(self, variable: Any) -> bool: ...

    def warm_up_again(self) -> None: ...

    def follow_broadcast(self) -> None: ...


class Moments:
    """The moments of one Keras ``DistributedOptimizer``.

    What it adds to the optimizer: ``_seen``, (variables,) int64, how many gradients each second moment has seen since
    the first that was not zero; in the warm-up, while all were zero, minus their number; and ``_marks``, (variables,)
    int64, which is 0 for a variable that has taken no compressed step, else the checksum of its frozen second moment,
    or ``NO_SECOND_MOMENT``; and ``_frozen_beta2``, a float64, the ``beta_2`` by which second moments were frozen, 0
    while none is.
    """

    def __init__(self, compressor: Owner) -> None:
        self._compressor = compressor
        _live.add(self)
        self._held: dict[int, Any] = {}  # by number of the variable, its frozen second moment
        self._probes: dict[int, tuple[int, Array]] = {}  # and some elements of it in the warm-up, after which step
        self._overruled: float | None = None  # the last ``beta_2`` that frozen second moments do not follow
        self.moved: int | None = None  # what ``iterations`` was before somebody has set it

    @property
    def _optimizer(self) -> Any:
        return self._compressor.optimizer

    def build(self) -> None:
        """Add the variables but ``_frozen_beta2``. Moments that are there already are those of a plain optimizer,
        unless what they have seen is restored by TensorFlow with them, as the variables are made."""
        optimizer = self._optimizer
        shape = (len(optimizer._trainable_variables),)
        optimizer._seen = optimizer.add_variable(shape, dtype="int64", name="onebit_seen")
        optimizer._marks = optimizer.add_variable(shape, dtype="int64", name="onebit_marks")
        with tf.init_scope():  # Keras's LossScaleOptimizer builds what it wraps within a graph
            if not np.array(optimizer._seen.value).any():
                optimizer._seen.assign(self._of_plain())

    def build_last(self) -> None:
        """Add the variable that files of version 0.1 have not, after all others."""
        self._optimizer._frozen_beta2 = self._optimizer.add_variable((), dtype="float64", name="onebit_frozen_beta2")

    @property
    def beta2(self) -> float | None:
        """By which second moments were frozen; None while none is, or if the optimizer has none."""
        return float(self._optimizer._frozen_beta2.value) or None

    def freeze(self, marks: Mapping[int, int]) -> None:
        """The second moments of these variables, by number, are frozen now, as their ``marks`` say; gradients of zeros
        count from now on."""
        optimizer, all_marks = self._optimizer, np.array(self._optimizer._marks.value)
        for i, mark in marks.items():
            all_marks[i] = mark
        optimizer._marks.assign(all_marks)
        seen = np.array(optimizer._seen.value)
        if (seen < 0).any():
            optimizer._seen.assign(np.where(all_marks != 0, np.abs(seen), seen))
        if self.beta2 is None and self._compressor.adapter.moments is not None:
            optimizer._frozen_beta2.assign(getattr(self._compressor.options, "beta_2", 0.0))

    def overrule(self, options: Options) -> Options:
        """``options`` of a step, but with the ``beta_2`` by which second moments were frozen."""
        beta2, now = self.beta2, getattr(options, "beta_2", None)
        if beta2 in (None, now):
            return options
        if self._overruled != now:
            text = "optimizer.beta_2 is %g, and %g when second moments were frozen: they stay what they are"
            self._compressor.engine.say(logging.WARNING, text, now, beta2)
            self._overruled = now
        return options.replaced(beta_2=beta2)

    def variance(self, index: int) -> Any:
        """The Keras variable that holds the second moment of variable number ``index``; None if there is none."""
        moments = self._compressor.adapter.moments
        return None if moments is None else moments.variance(self._optimizer, index)

    @property
    def _taken(self) -> int:
        """Steps of the optimizer, by which its moments are corrected; before somebody has set their number."""
        return int(self._optimizer.iterations) if self.moved is None else self.moved

    def _of_plain(self, only: Collection[int] | None = None) -> NDArray[np.int64]:
        """What second moments in plain form have seen; 0 if they are zeros. ``only``: those that are looked at."""
        optimizer, taken = self._optimizer, self._taken
        seen = np.zeros(len(optimizer._trainable_variables), np.int64)
        if taken:
            for i in range(len(seen)) if only is None else only:
                variance = self.variance(i)
                seen[i] = taken if variance is not None and np.asarray(variance).any() else 0
        return seen

    # -- the plain form -----------------------------------------------------------------------------------------------

    def check_form(self) -> None:
        """Raise if SGD's momenta are of version 0.1, which kept no velocities after its warm-up. Local; alike on all
        workers that have the same state."""
        optimizer, adapter = self._optimizer, self._compressor.adapter
        velocities = adapter.velocities and optimizer.momentum
        if velocities and (np.array(optimizer._marks.value) == OF_VERSION_0_1).any():
            raise ConfigurationError(
                "the state of SGD was saved by horovod-onebit 0.1 after compression had started, when its momentum was "
                "not Keras's: load the weights alone, and begin with a new optimizer"
            )

    def in_plain_form(
        self, edited: Collection[int] = (), only: Collection[int] | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """The moments that are not in plain form: their Keras variables, and what their values are then.

        Those of the variables ``edited`` were assigned by somebody, who knows the plain form alone. ``only``: those
        that are looked at.
        """
        self.check_form()
        compressor, optimizer = self._compressor, self._optimizer
        taken, frozen_by, beta2 = self._taken, self.beta2, getattr(compressor.options, "beta_2", None)
        seen, marks = np.array(optimizer._seen.value), np.array(optimizer._marks.value)
        for i, variable in enumerate(optimizer._trainable_variables):
            alone = optimizer._wrapping.local is not None
            by_hand = i in edited and (marks[i] or not seen[i])  # and not one that has seen too little
            if by_hand or not (marks[i] or (seen[i] and (alone or compressor.compressible(variable)))):
                continue
            if only is not None and i not in only:
                continue
            variance = self.variance(i)
            if variance is None or beta2 is None or not taken or seen[i] <= 0:
                continue
            if (factor := plain_factor(beta2, taken, int(seen[i]), frozen_by)) != 1.0:
                yield variance, tf.convert_to_tensor(variance) * tf.cast(factor, variance.dtype)

    def make_plain(self, edited: Collection[int] = ()) -> None:
        """Bring all moments into plain form. Local; on all workers alike."""
        optimizer = self._optimizer
        before = np.array(optimizer._seen.value)
        for variable, value in list(self.in_plain_form(edited)):
            variable.assign(value)
        known = np.flatnonzero(before).tolist()
        optimizer._seen.assign(self._of_plain({*known, *edited}))
        self._thaw()

    def release(self) -> None:
        """Second moments that were frozen, of variables that are not compressed any more, get the plain form. Local; on
        all workers alike."""
        compressor, optimizer = self._compressor, self._optimizer
        marks, seen = np.array(optimizer._marks.value), np.array(optimizer._seen.value)
        variables = enumerate(optimizer._trainable_variables)
        others = [i for i, v in variables if marks[i] and not compressor.is_compressed(v)]
        if not others:
            return
        for variance, value in list(self.in_plain_form(only=others)):
            variance.assign(value)
        marks[others], seen[others] = 0, self._of_plain(others)[others]
        optimizer._marks.assign(marks)
        optimizer._seen.assign(seen)

    def take_plain(self) -> None:
        """A plain optimizer's state was assigned to the wrapped optimizer's variables."""
        self._thaw()
        self._optimizer._seen.assign(self._of_plain())

    def _thaw(self) -> None:
        """No second moment is frozen."""
        optimizer = self._optimizer
        optimizer._marks.assign(np.zeros(len(optimizer._trainable_variables), np.int64))
        optimizer._frozen_beta2.assign(0.0)
        self.forget()

    # -- edits ----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """The state was replaced as a whole: what the last step left is no longer there."""
        self._held, self._probes, self.moved = {}, {}, None

    def count(self, steps: int, since: int, *, warm: bool) -> None:
        """The optimizer has taken so many ``steps``, ``since`` so many of them since the warm-up began: more or fewer
        if somebody has set ``iterations``.

        The wrapped optimizer corrects the bias of its moments by it. ``warm``: in the warm-up its steps follow, and the
        second moments have seen what they have seen; afterwards the next step finds that the state was ``moved``."""
        optimizer = self._optimizer
        by = steps - since - int(optimizer._begun.value)
        if not by or self._compressor.adapter.moments is None:
            return
        if not warm:
            self.moved = steps - by
            return
        optimizer._begun.assign(steps - since)

    def edited(
        self,
        indices: Sequence[int],
        variances: Sequence[Any],
        seen: NDArray[np.int64],
        marks: NDArray[np.int64],
    ) -> list[int]:
        """Of the variables ``indices``, those whose second moment is not the one that was frozen, or was replaced just
        before that, or has seen nothing, or less than half of a short warm-up: they were trained late. Those that have
        had gradients of zeros alone are no such. With ``Local``, those of which none was frozen.

        ``variances`` are arrays in the host's memory or on the GPU.
        """
        found, seen_by, marked = [], seen.tolist(), marks.tolist()
        enough = 1 if all(marked[i] for i in indices) else self._enough
        for i, variance in zip(indices, variances, strict=True):
            if variance is None:
                continue
            held = self._held.get(i)
            if not marked[i]:
                rests = seen_by[i] < 0 and enough < NEVER
                wrong = not rests and (seen_by[i] < enough or self._was_replaced(i, variance))
            else:
                changed = held is None or not same(held, variance)
                wrong = seen_by[i] < 1 or (changed and not self._is_known(i, variance, marked[i]))
            if wrong:
                found.append(i)
        return found

    def _was_replaced(self, index: int, variance: Any) -> bool:
        """Whether a second moment that will be frozen is not the one of the last look, with what was added since."""
        if index not in self._probes:
            return False
        now = np.asarray(self._compressor.engine.context.kernels.host(variance), np.float32).reshape(-1)[:PROBES]
        steps = int(self._optimizer._exact_steps.value)
        return self._shrunk(index, steps, now, float(self._compressor.options.beta_2)) is not None

    @property
    def _enough(self) -> int:
        """Gradients that one which is not frozen has to have seen; with ``Local`` all are frozen by then."""
        local = self._optimizer._wrapping.local is not None
        return NEVER if local else least(int(self._optimizer._warmup_steps.value))

    def _is_known(self, index: int, variance: Any, mark: int) -> bool:
        """Whether a second moment in other memory has the values of before, or those that the ``mark`` is of."""
        held, host = self._held.get(index), self._compressor.engine.context.kernels.host
        if (held is None or not np.array_equal(host(held), host(variance))) and self.mark(variance) != mark:
            return False
        self._held[index] = variance
        return True

    def mark(self, variance: Any) -> int:
        """The checksum of a second moment, not 0; ``NO_SECOND_MOMENT`` if there is none."""
        if variance is None:
            return NO_SECOND_MOMENT
        words = np.ascontiguousarray(self._compressor.engine.context.kernels.host(variance), np.float32)
        return 2 + int(checksums(words.view(np.uint8)[None])[0])

    def hold(self, index: int, variance: Any) -> None:
        """The second moment of variable number ``index`` is frozen as it is."""
        if variance is not None:
            self._held[index] = variance

    def held(self, index: int) -> Any:
        """The frozen second moment of variable number ``index``, if it is known."""
        return self._held.get(index)

    def look(self, variables: Sequence[Any], steps: Any, *, last: Any) -> None:
        """After exact step number ``steps``, a tensor, which is the ``last`` one of the warm-up perhaps: see whether
        the second moments of ``variables`` are those of the last look, with what was added since.

        A second moment shrinks by beta2 in a step at most. One that has shrunk by more was replaced, and has seen only
        what came since the last look, or less; the warm-up begins again.
        """
        optimizer, moments = self._optimizer, self._compressor.adapter.moments
        if moments is None or not variables:
            return
        indices = [optimizer._get_variable_index(v) for v in variables]
        beta2 = float(optimizer.beta_2)
        power_of_two = tf.equal(tf.bitwise.bitwise_and(steps, steps - 1), 0)
        due = tf.logical_or(tf.logical_or(power_of_two, steps % EVERY == 0), last)

        def probe() -> None:
            parts = [tf.reshape(tf.convert_to_tensor(self.variance(i)), [-1])[:PROBES] for i in indices]
            values = [tf.cast(part, tf.float32) for part in parts]

            def work(number: Any, probes: Any) -> None:
                self._compare(indices, int(number), np.array(probes), beta2)

            host_call(work, steps, tf.concat(values, 0))

        cond(due, probe, whole=True)

    def _compare(self, indices: Sequence[int], number: int, values: Array, beta2: float) -> None:
        optimizer, at, replaced = self._optimizer, 0, []
        for i in indices:
            size = min(PROBES, int(np.prod(optimizer._trainable_variables[i].shape, dtype=np.int64)))
            now, at = values[at : at + size], at + size
            looked = self._probes.get(i, (None,))[0] == number  # before the state was restored, which is no edit
            if not looked and (since := self._shrunk(i, number, now, beta2)) is not None:
                replaced.append((i, since))
            self._probes[i] = number, now
        if replaced:
            seen = np.array(optimizer._seen.value)
            for i, since in replaced:
                seen[i] = min(seen[i], since)
            optimizer._seen.assign(seen)
            self.say([i for i, _ in replaced])
            self._compressor.warm_up_again()
            self._probes = {i: (0, value) for i, (_, value) in self._probes.items()}

    def _shrunk(self, index: int, number: int, now: Array, beta2: float) -> int | None:
        """The steps since the last look, if the elements ``now``, after step ``number``, are less than they leave."""
        before, last = self._probes.get(index, (0, None))
        if last is None or before > number:
            return None
        since, dtype = number - before, self._optimizer._trainable_variables[index].dtype
        # Each step may round down, and what is tiny to nothing.
        smallest, rounding = 1e-4 if dtype == "float16" else 1e-30, 8e-3 if dtype == "bfloat16" else 2e-3
        least = last * np.float32((beta2 * (1 - rounding)) ** since)
        return since if (np.isfinite(last) & (last > smallest) & (now < least)).any() else None

    def say(self, edited: Sequence[int]) -> None:
        """Log that the warm-up begins again."""
        names = some([path_of(self._optimizer._trainable_variables[i]) for i in edited])
        text = "the optimizer's state of %s was set or reset, or begins with a first gradient: the warm-up begins again"
        self._compressor.engine.say(logging.WARNING, text, names)


def broadcast(variables: Iterable[Any]) -> None:
    """All workers get ``variables`` of one of them: moments among these were not edited. Local; on all alike."""
    sent = {id(v) for v in variables}
    for moments in list(_live):
        if any(id(v) in sent for v in moments._optimizer._variables):
            moments.forget()
            moments._compressor.follow_broadcast()


def same(held: Any, array: Any) -> bool:
    """Whether two arrays of one size are in the same memory, in the host's or on the GPU."""
    if isinstance(held, np.ndarray) and isinstance(array, np.ndarray):
        return np.may_share_memory(held, array)
    return isinstance(held, np.ndarray) == isinstance(array, np.ndarray) and bool(held.address == array.address)

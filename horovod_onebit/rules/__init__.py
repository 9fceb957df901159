"""One optimizer algorithm per file. A rule is a frozen value: the hyperparameters of one step.

A rule brings formulas of one element, which the backends run over tensors (see ``horovod_onebit.formulas``), and their
scalars. It sees one tensor at a time and says what to send (``contribution``), what to do with the workers' mean
(``motion``, then ``finish``), and what the exact, uncompressed step is (``exact``). All formulas take the scalars
``p``, then gradient ``g``, momentum ``m``, second moment ``v``, weight ``w`` and anchor ``a``; those that move return
momentum, second moment and weight, None for what stays.

Its file says besides, in ``TORCH`` and ``KERAS``, which optimizer of a framework takes these steps (see ``Wraps``):
that is all that the frameworks' packages need in order to wrap it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from horovod_onebit import codecs
from horovod_onebit.codecs import NO_GUARD, Codec
from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.formulas import TINY, Formula, of_innovation, resting
from horovod_onebit.kernels.reference import CHUNK, Array, Arrays, Bytes, Coding, num_blocks
from horovod_onebit.recipe import Recipe

HEADROOM = 1024.0
"""See ``Rule.largest_scale``."""

REMEMBERED = 64
"""Scalars that a ``Context`` keeps."""

P = TypeVar("P", bound=tuple[Any, ...])


@dataclass
class Tensor:
    """One parameter of this worker and what the rules keep for it: flat float32 arrays of one length.

    Attributes:
        weight, momentum: updated in place, alike on every worker.
        variance: the second moment, frozen once compression starts; None for rules that have none.
        residual: the error feedback, this worker's own.
        step: optimizer steps taken so far.
        variance_steps: steps that the second moment has seen; its bias is corrected by that many.
        beta2: of these steps, where the second moment is frozen: it does not follow another one. None if it is the
            rule's.
        anchor: the weights at the last exchange, for rules with local steps; else None.
        sent: this worker's weights when the exchange that is under way began, where steps are taken meanwhile; else
            None.
        layer: a few numbers that a rule keeps for the whole parameter; else None.
    """

    name: str
    weight: Array
    momentum: Array
    variance: Array | None
    residual: Array
    step: int = 0
    variance_steps: int = 0
    anchor: Array | None = None
    layer: Array | None = None
    sent: Array | None = None
    beta2: float | None = None

    def part(self, start: int, stop: int) -> Tensor:
        """Elements ``start:stop``, as views."""
        piece = slice(start, stop)
        return replace(
            self,
            weight=self.weight[piece],
            momentum=self.momentum[piece],
            variance=None if self.variance is None else self.variance[piece],
            residual=self.residual[piece],
            anchor=None if self.anchor is None else self.anchor[piece],
            sent=None,
        )

    def arrays(self, gradient: Array | None = None) -> Arrays:
        """What formulas look at."""
        return Arrays(gradient, self.momentum, self.variance, self.weight, self.anchor)


@dataclass(frozen=True)
class Context:
    """What a rule needs to know besides the tensor. ``codec`` is what the workers send."""

    kernels: ModuleType
    recipe: Recipe
    workers: int

    @cached_property
    def codec(self) -> Codec:
        return codecs.find(self.recipe.codec)

    @cached_property
    def clip(self) -> float:
        """The most that a worker contributes of an update."""
        return self.recipe.clip_for(self.workers)

    @cached_property
    def scalars(self) -> dict[tuple[Hashable, ...], tuple[Rule, Any]]:
        """Those of the last steps, which are the same for all tensors of a rule that have taken the same steps; and
        the rule, which has its ``id`` as long as it is here."""
        return {}

    def remember(self, key: tuple[Hashable, ...], rule: Rule, scalars: P) -> P:
        """Keep ``scalars``, and return them."""
        if len(self.scalars) >= REMEMBERED:
            self.scalars.clear()
        self.scalars[key] = rule, scalars
        return scalars

    def coding(self, block_size: int, codec: Codec | None = None) -> Coding:
        """How blocks become records of this worker's ``codec``, or of another."""
        guard = codecs.GUARD if self.recipe.scale == "guarded" else NO_GUARD
        return _coding(codec or self.codec, block_size, guard)


_coding = cache(Coding)


class Use(NamedTuple):
    """A formula and its scalars, a NamedTuple of float32."""

    formula: Formula
    p: Any


def scalars(kind: type[P], **values: float) -> P:
    """``kind``, a NamedTuple, of ``values`` as float32."""
    return kind(**{name: np.float32(value) for name, value in values.items()})


class Rule:
    """What all rules share; a rule fills in ``contribution``, ``motion`` and ``exact``."""

    name: str
    lr: float
    encodes_gradients: ClassVar[bool] = True
    """Whether a message of several workers' mean gradient is as good as a message of each."""
    has_variance: ClassVar[bool] = False
    """Whether the optimizer divides by a second moment of each element."""

    @property
    def paced(self) -> bool:
        """Whether the momentum becomes what was moved, divided by ``local_rates``: see ``ErrorFeedback.share``."""
        return False

    def local_rates(self, tensor: Tensor) -> float:
        """The sum of the learning rates of those steps whose moves are sent, as far as that is counted."""
        return 0.0

    @property
    def owes_resting(self) -> bool:
        """Whether what residuals hold of elements that have rested is sent when these begin to move. It is not where it
        was divided by epsilon alone, nor where no errors are kept."""
        return False

    def first_variance(self, tensor: Tensor) -> float:
        """The second moment of an element that has rested and moves from the next step on."""
        return float(TINY)

    def contribution(self, tensor: Tensor, context: Context) -> Use:
        """What this worker sends, before the residual is added; one number an element."""
        raise NotImplementedError

    def motion(self, tensor: Tensor, context: Context) -> Use:
        """What the mean of all messages, which comes as the gradient, does in step number ``tensor.step + 1``."""
        raise NotImplementedError

    def prediction(self, context: Context) -> Formula | None:
        """What all workers know of the mean before it is there: what they would contribute if all gradients were 0, one
        number an element, by the scalars of ``motion``. None if they know nothing."""
        return None

    def exact(self, tensor: Tensor) -> Use:
        """What the exact mean gradient does in step number ``tensor.step``, which counts already."""
        raise NotImplementedError

    def bound(self, tensor: Tensor, context: Context) -> float:
        """The most that ``contribution`` can be, infinity where there is no bound."""
        return math.inf

    def largest_scale(self, tensor: Tensor, block_size: int, context: Context) -> float:
        """A bound on the scales of any message, infinity where there is none.

        The contribution u is within [-k, k], so that a block of n elements has |u| <= k sqrt(n). With guarded scales a
        message loses at most the share q = sqrt(1 - 3 / (4 n)) of c = u + error, so that |error| <= q (|u| + |error|)
        stays below k sqrt(n) / (1 - q), and a scale, at most 2.2 |c| / sqrt(n), below 2.2 k / (1 - q), and that below
        2.2 k (8 n / 3). What a server of a two-stage exchange compresses is made of such scales, so that its own are
        below k (2.2 * 8 n / 3)^2. ``HEADROOM`` is for residuals that began elsewhere: with the clip of more workers, or
        handed over when the workers changed.
        """
        if context.recipe.scale == "rms":
            return math.inf
        return HEADROOM * self.bound(tensor, context) * (2.2 * 8 * block_size / 3) ** 2

    def direction(self, tensor: Tensor, context: Context) -> Array:
        """The momentum in the space that is compressed, in host memory."""
        return np.asarray(context.kernels.host(tensor.momentum))

    def init(self, tensor: Tensor) -> None:
        """Give a new ``tensor`` what this rule keeps besides momentum and second moment."""

    def begin(self, tensor: Tensor, context: Context) -> None:
        """The last exact step of ``tensor`` was taken; what follows is compressed."""

    def lengths(self, tensor: Tensor, context: Context) -> Use | None:
        """Two numbers an element whose sums of squares ``finish`` must know, of all parts of ``tensor``."""
        return None

    def finish(self, tensor: Tensor, sums: NDArray[np.float64] | None, context: Context) -> None:
        """All parts of ``tensor`` have moved: do what needs the whole of it. ``sums``: (2,), of ``lengths``."""

    def local_step(self, tensor: Tensor, grad: Array, context: Context) -> None:
        """A step of this worker alone, for rules that have such steps."""
        raise NotImplementedError

    def moved_alone(self, tensor: Tensor, context: Context) -> Array | None:
        """What local steps have moved since the last exchange, in host memory. Returns None, on every worker, if there
        were no local steps."""
        return None

    def settle(self, tensor: Tensor, mean: Array, context: Context) -> None:
        """Take over the ``mean`` of what all workers have ``moved_alone``."""

    def exact_step(self, tensor: Tensor, grad: Array, context: Context) -> None:
        """Take step number ``tensor.step + 1`` with the exact mean gradient, and count it."""
        tensor.step += 1
        tensor.variance_steps += 1
        context.kernels.move(*self.exact(tensor), tensor.arrays(grad))

    def rests(self, tensor: Tensor, context: Context) -> bool:
        """Whether elements of ``tensor`` rest that have never had a gradient: see ``rest``."""
        return resting(self.contribution(tensor, context).formula)

    def encode(self, tensor: Tensor, grad: Array, row: Bytes, at: int, block_size: int, context: Context) -> None:
        """Compress this worker's contribution to records at ``at`` of ``row``, and update the residual."""
        how = self.contribution(tensor, context)
        context.kernels.encode(*how, tensor.arrays(grad), tensor.residual, row, at, context.coding(block_size))

    def restore(self, tensor: Tensor, grad: Array, row: Bytes, at: int, block_size: int, context: Context) -> None:
        """Undo ``encode`` of the same arguments."""
        how = self.contribution(tensor, context)
        context.kernels.restore(*how, tensor.arrays(grad), tensor.residual, row, at, context.coding(block_size))

    def apply(
        self,
        tensor: Tensor,
        rows: Bytes,
        at: int,
        coding: Coding,
        context: Context,
        before: Tensor | None = None,
        *,
        innovation: bool = False,
    ) -> None:
        """Take step number ``tensor.step + 1`` with the mean of all messages, (k, bytes).

        From the momentum and the weight of ``before``, which stay as they are, if it is given. ``innovation``: the
        messages are of the mean less the ``prediction``.
        """
        old = None if before is None else before.arrays()
        formula, p = self.motion(tensor, context)
        predict = self.prediction(context) if innovation else None
        how = formula if predict is None else of_innovation(formula, predict)
        context.kernels.apply(how, p, tensor.arrays(), rows, at, coding, old)


@dataclass(frozen=True)
class Wraps:
    """An optimizer of a framework whose steps a rule takes, and where it keeps what the rule needs.

    Attributes:
        optimizer: the class, such as ``"torch.optim.Adam"``; a name without a module is any class of that name.
        rule: the rule's class.
        momentum, variance: keys of the state in PyTorch, attributes that list variables in Keras; None if it has none.
            A PyTorch state with a second moment counts its steps under ``"step"``.
        options: by field of the rule, the option that it is: ``"betas.0"`` is the first of ``betas``. Keras's learning
            rate and weight decay, which differ between steps and variables, are not among them.
        fixed: fields of the rule that no option changes.
        requires: options that have a 1-bit form with this value only.
        also: subclasses that take the same steps.
    """

    optimizer: str
    rule: type[Rule]
    momentum: str
    variance: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rule.has_variance != (self.variance is not None):
            raise ConfigurationError(
                f"{self.rule.__name__}.has_variance is {self.rule.has_variance}, and variance={self.variance!r}: "
                "expected the key of the second moment where the rule divides by one, and None elsewhere"
            )

    def check(self, kind: str, option: Callable[[str, Any], Any]) -> None:
        """Raise ``UnsupportedError`` for an optimizer of class ``kind`` if an option has no 1-bit form; ``option``
        gives one by its name, or else the default that it is given."""
        for name, value in self.requires.items():
            if (found := option(name, value)) != value:
                instead = f"without {name}" if value is False else f"with {name}={value!r}"
                raise UnsupportedError(f"{kind}({name}={found!r}) has no 1-bit form: build the optimizer {instead}")

    @property
    def module(self) -> str:
        """That of ``optimizer`` and ``also``; empty if any will do."""
        return self.optimizer.rpartition(".")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes, without their module."""
        return (self.optimizer.rpartition(".")[2], *self.also)


@cache
def wrapped(framework: str) -> tuple[Wraps, ...]:
    """The optimizers of ``"torch"`` or ``"keras"`` that have a rule."""
    files = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return tuple(getattr(file, framework.upper()) for file in files if hasattr(file, framework.upper()))


def listed(framework: str) -> str:
    """Their names, for users: ``"torch.optim.Adam, AdamW, SGD; classes named Lion"``."""
    by_module: dict[str, list[str]] = {}
    for wraps in wrapped(framework):
        by_module.setdefault(f"{wraps.module}." if wraps.module else "classes named ", []).extend(wraps.names)
    return "; ".join(module + ", ".join(names) for module, names in by_module.items())


def sums(uses: Sequence[Use | None], arrays: Sequence[Arrays], context: Context) -> list[NDArray[np.float64] | None]:
    """The sums of squares that each of ``uses`` asks for of its ``arrays``, (2,), in one batch."""
    chunks: list[NDArray[np.float64] | None] = []
    with context.kernels.batch():
        for use, each in zip(uses, arrays, strict=True):
            out = None if use is None else np.empty((num_blocks(each.weight.size, CHUNK), 2))
            if use is not None:
                context.kernels.sums(*use, each, out)
            chunks.append(out)
    return [None if out is None else out.sum(axis=0) for out in chunks]


def finish_step(rules: Sequence[Rule], tensors: Sequence[Tensor], context: Context) -> None:
    """All parts of ``tensors`` have moved: ``finish`` each, and count the step. ``rules`` are by tensor."""
    uses = [rule.lengths(tensor, context) for rule, tensor in zip(rules, tensors, strict=True)]
    lengths = sums(uses, [tensor.arrays() for tensor in tensors], context) if any(uses) else [None] * len(uses)
    with context.kernels.batch():
        for rule, tensor, found in zip(rules, tensors, lengths, strict=True):
            rule.finish(tensor, found, context)
            tensor.step += 1


def largest_scale(parts: Sequence[tuple[Rule, Tensor, int]], context: Context) -> float:
    """The bound on the scales of a message of ``parts``: rule, tensor, block size."""
    different = {(id(rule), block_size): (rule, tensor, block_size) for rule, tensor, block_size in parts}
    return max((rule.largest_scale(tensor, size, context) for rule, tensor, size in different.values()), default=0.0)


def norms_of(tensors: Sequence[Tensor], rules: Sequence[Rule], context: Context) -> tuple[float, float]:
    """Euclidean norms of this worker's error feedback and of the momentum, in the space that is compressed.

    Over all ``tensors``; a full pass over memory, so for reports rather than for every step.
    """
    error = momentum = 0.0
    host = context.kernels.host
    for tensor, rule in zip(tensors, rules, strict=True):
        m, residual = rule.direction(tensor, context), host(tensor.residual)
        momentum += float(np.dot(m, m))
        error += float(np.dot(residual, residual))
    return float(np.sqrt(error)), float(np.sqrt(momentum))

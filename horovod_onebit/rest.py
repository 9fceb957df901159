"""Elements that have never had a gradient: the row of a ``padding_idx``, masked weights, words not met yet.

Their second moment is 0, the same on all workers, and while it is, compressed steps do not move them
(``formulas.rests``): what a worker would send of them stays in its residual. After the steps of which ``looks`` is true
the workers tell each other which of these elements some residual holds anything of, one bit each. Those get a second
moment and move from then on, that of ``Rule.first_variance``: the least that there is, where a floor of what is divided
by bounds their steps, or a clip does (with ``clip=None`` nothing does, for Adam and LAMB). They are learned as fast as
others (tests/unit/test_rest.py). Of a tensor in which all elements have rested, a face may begin the warm-up in place
of that (``Engine.first_gradients``). An exact step among compressed ones, of 0/1 Adam, gives them one without being
asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.exchange import Collectives
from horovod_onebit.formulas import TINY, Number, absolute, alive, f32, sign, where
from horovod_onebit.handshake import ask
from horovod_onebit.kernels.reference import Array, Bytes
from horovod_onebit.rules import Context, Rule, Tensor, Use, scalars, sums
from horovod_onebit.stats import Traffic
from horovod_onebit.tasks import Task

LONGEST = 64
"""Steps between two looks, at most."""
RESTING = {"resting": "which elements have had a gradient, by the optimizer's second moment"}


def looks(steps: int) -> bool:
    """Whether the workers look after so many compressed steps: after each of the first 32, then 16 times until their
    number has doubled, and once in ``LONGEST``."""
    return steps > 0 and steps % min(LONGEST, 1 << max(0, steps.bit_length() - 5)) == 0


class Scalars(NamedTuple):
    zero: Number


def counts(p: Scalars, e: Number, _m: Number, v: Number, _w: Number, _a: Number) -> Any:
    """Whether an element rests, and whether the residual ``e`` holds anything of it."""
    return where(alive(v), p.zero, f32(1)), where(alive(v), p.zero, absolute(sign(e)))


COUNTS = Use(counts, scalars(Scalars, zero=0.0))


class Resting(NamedTuple):
    """How many elements of a tensor rest, and of which of them, a bit each, its residual holds anything."""

    resting: int
    bits: Bytes


def held(tensors: Mapping[int, Tensor], context: Context) -> dict[int, Resting]:
    """Of those of ``tensors``, by number, in which elements rest. Local."""
    found, host = {}, context.kernels.host
    counted = sums([COUNTS] * len(tensors), [tensor.arrays(tensor.residual) for tensor in tensors.values()], context)
    for (number, tensor), both in zip(tensors.items(), counted, strict=True):
        resting, wanted = (0, 0) if both is None else map(int, both)
        if wanted:
            of_resting = host(tensor.residual)[~alive(host(tensor.variance))]
            found[number] = Resting(resting, np.packbits(of_resting != 0))
        elif resting:
            found[number] = Resting(resting, np.zeros(-(-resting // 8), np.uint8))
    return found


PIECE = 2**26
"""Bytes of bits that arrive together, from all workers, at most: Horovod counts them in 32 bits."""
Moves = dict[int, NDArray[np.intp]]
"""By number of the tensor, elements that have rested and are wanted."""


def wanted(
    own: Mapping[int, Resting], tensors: Sequence[Tensor], context: Context, collectives: Collectives, name: str,
    traffic: Traffic, *, refuses: bool = False,
) -> Task[Moves]:  # fmt: skip
    """What residuals of any worker hold, if this one's hold ``own`` of ``tensors``. Collective.

    Nothing is found if some worker ``refuses`` the step that is under way, because its second moments were edited.
    Raises ``DesyncError`` on all workers if second moments differ.
    """
    resting = {number: one.resting for number, one in own.items()}
    holds = any(one.bits.any() for one in own.values())
    answers = yield from ask(collectives, f"{name}.rest", resting=repr(resting), holds=holds, refuses=refuses)
    if answers.any("refuses"):
        return {}
    answers.compare(RESTING)
    if not answers.any("holds"):
        return {}
    found: Moves = {}
    which = np.packbits([one.bits.any() for one in own.values()])
    which = np.unpackbits((yield from _of_any(which, collectives, f"{name}.rest.held", traffic)), count=len(own))
    of_any = {number: one for (number, one), some in zip(own.items(), which, strict=True) if some}
    bits = np.concatenate([one.bits for one in of_any.values()])
    bits = yield from _of_any(bits, collectives, f"{name}.rest.bits", traffic)
    ends = np.cumsum([one.bits.size for one in of_any.values()])
    for (number, one), own_bits in zip(of_any.items(), np.split(bits, ends[:-1]), strict=True):
        elements = np.flatnonzero(~alive(context.kernels.host(tensors[number].variance)))
        found[number] = elements[np.unpackbits(own_bits, count=one.resting).astype(bool)]
    return found


def _of_any(bits: Bytes, collectives: Collectives, name: str, traffic: Traffic) -> Task[Bytes]:
    """Those that are set on some worker. Collective."""
    traffic.add((collectives.size - 1) * bits.size, 0)
    found, length = np.zeros_like(bits), max(1, PIECE // collectives.size)
    for start in range(0, bits.size, length):
        piece = bits[start : start + length]
        rows = yield collectives.allgather(piece, f"{name}.{start}")
        found[start : start + length] = np.bitwise_or.reduce(np.reshape(rows, (collectives.size, -1)), axis=0)
    return found


def resting(tensor: Tensor, rule: Rule, context: Context) -> NDArray[np.bool_] | None:
    """Which elements rest, before an exact step by ``rule``; None if none does. Local."""
    if tensor.variance is None or not rule.rests(tensor, context):
        return None
    (both,) = sums([COUNTS], [tensor.arrays(tensor.residual)], context)
    if both is None or not int(both[0]):
        return None
    return ~np.asarray(alive(context.kernels.host(tensor.variance)))


def woken(tensor: Tensor, rule: Rule, rested: NDArray[np.bool_] | None, mean: Array, context: Context) -> bool:
    """After an exact step by the ``mean`` gradient, in host memory: of the elements that have ``rested``, those with a
    gradient move from now on, and the others rest, whatever weight decay has left there. Whether the first ones of the
    whole tensor move. Local; on all workers alike.

    Nothing is owed of what has waited of those that move, in units of the least second moment there is, unless the
    ``rule`` says so.
    """
    if rested is None:
        return False
    alive_now, met = np.asarray(alive(context.kernels.host(tensor.variance))), mean != 0
    moving, still = rested & alive_now & met, rested & alive_now & ~met
    if still.any():
        _clear(tensor.variance, still, context)
        _clear(tensor.momentum, still, context)
    if moving.any() and not rule.owes_resting:
        _clear(tensor.residual, moving, context)
    return bool(moving.any() and rested.all())


def _clear(array: Any, elements: NDArray[Any], context: Context) -> None:
    """Make these ``elements``, numbers or flags, of ``array`` zeros, wherever it is."""
    values = np.array(context.kernels.host(array))
    values[elements] = 0
    context.kernels.write(array, values)


def awaken(moves: Moves, tensors: Sequence[Tensor], rules: Sequence[Rule], context: Context) -> dict[int, Array]:
    """The second moments of ``tensors`` in which elements move from now on, by number, in host memory: the framework
    has to take them over. Local; on all workers alike."""
    found, host = {}, context.kernels.host
    for number, elements in moves.items():
        second = found[number] = np.array(host(tensors[number].variance))
        first = max(TINY, f32(rules[number].first_variance(tensors[number])))
        second[elements] = np.maximum(second[elements], first)  # an exact step may have made it more
        if not rules[number].owes_resting:
            _clear(tensors[number].residual, elements, context)
    return found

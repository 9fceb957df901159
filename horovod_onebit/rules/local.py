"""Local steps with 1-bit weight deltas: what workers exchange at the end of a round, whatever optimizer they use.

With a the weights that all workers had in common when the round began, w_i what worker i's own steps made of them, and
mu the momentum of ``schedule.Local``:

    c_i = a - w_i + error_i;   C_i = 1bit(c_i);   error_i <- c_i - C_i
    x   = sum_i C_i / n
    m   <- mu m + x                          Nesterov's momentum of Douillard et al. 2023 (DiLoCo, Algorithm 1), if any
    w, a <- a - (x + mu m),  or a - x

The wrapped optimizer's state stays each worker's own. Small tensors, which are not compressed, have x exactly.

With a delay, steps are taken while the sum is under way, and w_i has become w_i' when it arrives. Streaming DiLoCo
(Douillard et al. 2025, section 2.3) then mixes w_i' with what all have in common; here the whole move since is kept,
and sent when its own round ends:

    a    <- a - x
    w_i  <- a + (w_i' - w_i)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.formulas import Number, f32
from horovod_onebit.kernels.reference import Array
from horovod_onebit.rules import Context, Rule, Tensor, Use, scalars

RATES, DECAY, COUNT = range(3)
"""What ``Tensor.layer`` holds of local steps since the last exchange: sum of step sizes, product of decays, number."""


def no_steps() -> Array:
    return np.array([0, 1, 0], f32)


def count(tensor: Tensor, rate: float, decay: float) -> None:
    """A step of the size ``rate`` was taken, which has left the share ``decay`` of a weight."""
    assert tensor.layer is not None
    tensor.layer[RATES] += f32(rate)
    tensor.layer[DECAY] *= f32(decay)
    tensor.layer[COUNT] += 1


def forget_steps(tensor: Tensor) -> None:
    """A round begins, or was lost."""
    if tensor.layer is not None:
        tensor.layer[:] = no_steps()


class Scalars(NamedTuple):
    momentum: Number


def displacement(_p: Scalars, g: Number, _m: Number, _v: Number, _w: Number, a: Number) -> Number:
    return a - g  # g is w_i, or the mean of those of a host


def take_over(_p: Scalars, x: Number, _m: Number, _v: Number, _w: Number, a: Number) -> Any:
    return None, None, a - x


def take_over_with_momentum(p: Scalars, x: Number, m: Number, _v: Number, _w: Number, a: Number) -> Any:
    new_m = p.momentum * m + x
    return new_m, None, a - (x + p.momentum * new_m)


def go_on(_p: Scalars, sent: Number, _m: Number, _v: Number, w: Number, a: Number) -> Any:
    return None, None, a + (w - sent)


@dataclass(frozen=True)
class Delta(Rule):
    """The end of a round, which moves the anchor: it is the weight of the tensors that this rule sees. The "gradient"
    that is encoded is this worker's weights."""

    momentum: float = 0.0
    lr: float = 1.0
    name: str = "local"
    delay: int = 0

    def init(self, tensor: Tensor) -> None:
        tensor.anchor = np.zeros_like(tensor.weight)
        tensor.sent = np.zeros_like(tensor.weight) if self.delay else None
        tensor.layer = no_steps()

    def local_rates(self, tensor: Tensor) -> float:
        return 0.0 if tensor.layer is None else float(tensor.layer[RATES])

    def finish(self, tensor: Tensor, sums: NDArray[np.float64] | None, context: Context) -> None:
        forget_steps(tensor)

    def contribution(self, tensor: Tensor, context: Context) -> Use:
        return Use(displacement, scalars(Scalars, momentum=self.momentum))

    def motion(self, tensor: Tensor, context: Context) -> Use:
        return Use(take_over_with_momentum if self.momentum else take_over, scalars(Scalars, momentum=self.momentum))

    def catch_up(self) -> Use:
        """What a worker does with the weights that it has now when what it sent, the "gradient", has arrived."""
        return Use(go_on, scalars(Scalars, momentum=self.momentum))

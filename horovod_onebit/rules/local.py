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

from horovod_onebit.formulas import Number
from horovod_onebit.rules import Context, Rule, Tensor, Use, scalars


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

    def contribution(self, tensor: Tensor, context: Context) -> Use:
        return Use(displacement, scalars(Scalars, momentum=self.momentum))

    def motion(self, tensor: Tensor, context: Context) -> Use:
        return Use(take_over_with_momentum if self.momentum else take_over, scalars(Scalars, momentum=self.momentum))

    def catch_up(self) -> Use:
        """What a worker does with the weights that it has now when what it sent, the "gradient", has arrived."""
        return Use(go_on, scalars(Scalars, momentum=self.momentum))

"""Local steps of Adam with one second moment for all workers, and one momentum (``schedule.Local(freeze=...)``).

Adam divides by the size of the gradients. Of the gradients of one worker's few examples much is noise, so that workers
which divide by their own second moments take shorter steps than Adam with all examples, and not in its direction. Once
the second moment is that of the workers' mean gradient (``averages.second_moments``) and frozen, a step is linear in
the gradient, as in 1-bit Adam: the mean of the workers' moves is Adam's move of the mean gradient, but for what they
move apart within a round. With D = sqrt(v) + eps, worker i steps alone,

    m_i <- beta1 m_i + (1 - beta1) g_i;   w_i <- w_i - lr clip(m_i / D, -k, k)            0/1 Adam's lines 4 to 6

and the end of the round is that of ``rules.local``, with x the mean of what the workers have moved:

    m   <- x D / (sum of lr)                  the mean momentum of the round, as in 0/1 Adam's line 8
    w, a <- a - x

A round may end early (``flush()``), or its learning rate be smaller than before. Residuals are of longer moves then,
and x with all of them, divided by few rates, would be a momentum that is many times too large. Not all of them is sent
then: see ``feedback``. Without any learning rate, nothing is known of m, and it is 0.

With a delay, steps have been taken since x was sent, and m is not theirs: it stays each worker's own.

Decoupled weight decay is part of x, and no part of m. Small tensors, which are not compressed, do the same with x
exactly. Elements of which nothing was known at the freeze have v = 0, and move by k at most: without a clip in the
recipe, k is the default one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod_onebit.formulas import ZERO, Number, f32, multiplier, where
from horovod_onebit.kernels.reference import Array
from horovod_onebit.recipe import PRESETS
from horovod_onebit.rules import Context, Tensor, Use, scalars
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.local import DECAY, RATES, Delta, count
from horovod_onebit.rules.zero_one_adam import Sync, common, local


def take_over(p: Sync, x: Number, m: Number, v: Number, _w: Number, a: Number) -> Any:
    moved = x - (f32(1) - p.decay) * a
    return where(p.rates > ZERO, moved * multiplier(p, v) / p.rates, where(p.common > ZERO, m, ZERO)), None, a - x


NO_STEP = Adam(lr=0.0)


@dataclass(frozen=True)
class FrozenAdam(Delta):
    """The end of a round, as ``Delta``, and the steps in it.

    A tensor's momentum and second moment are Adam's; its ``layer`` counts what the steps since the last exchange were,
    its ``step`` those of the run, and its ``variance_steps`` by how many the bias of the second moment is corrected.
    Steps that a worker skips count, too: momenta are the same on all workers only if their counts are.
    """

    name: str = "local_adam"
    adam: Adam = NO_STEP

    @property
    def paced(self) -> bool:
        return not self.delay

    def motion(self, tensor: Tensor, context: Context) -> Use:
        if self.delay:
            return super().motion(tensor, context)
        assert tensor.layer is not None
        values = {"correction": self.adam.correction(tensor), **self.adam.epsilons(context)}
        rates, decay = float(tensor.layer[RATES]), float(tensor.layer[DECAY])
        return Use(take_over, scalars(Sync, decay=decay, rates=rates, common=common(tensor), **values))

    def local_step(self, tensor: Tensor, grad: Array, context: Context) -> None:
        p = self.adam.scalars(tensor, context, clip=clip_of(context))
        context.kernels.move(local, p, tensor.arrays(grad))

    def count_step(self, tensor: Tensor) -> None:
        """A step was taken or skipped."""
        count(tensor, self.adam.step_size(tensor), self.adam.decay)
        tensor.step += 1


def clip_of(context: Context) -> float:
    """The bound on a step in units of its size."""
    return context.clip if context.recipe.clip is not None else PRESETS["robust"].clip_for(context.workers)

"""Runs whose residuals are of different kinds, by the arguments of ``DistributedOptimizer``, in either face, and a
schedule that is none of the library's."""

from dataclasses import dataclass

from horovod_onebit.schedule import Local, Sends, Stepwise, ZeroOne

ZERO_ONE = ZeroOne(var_freeze_step=4, var_update_scaler=2)
KINDS = {
    "update": {"warmup_steps": 2},
    "momentum": {"warmup_steps": 2, "recipe": "paper"},
    "0/1": {"schedule": ZERO_ONE},
    "0/1, momentum": {"schedule": ZERO_ONE, "recipe": "paper"},
    "local": {"schedule": Local(every=4, doubling=0)},
}


@dataclass(frozen=True)
class Renewed(Stepwise):
    """docs/extending.md's."""

    exact_steps: int = 4
    every: int = 5

    def sends(self, number):
        return Sends.MEAN if number % self.every == 0 else Sends.CONTRIBUTION

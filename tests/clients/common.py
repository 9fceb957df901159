"""What the clients share: an optimizer to hand to a trainer, and a look at the replicas after each of its steps."""

import time

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_onebit.torch as onebit
from horovod_onebit import Recipe
from tests.ranks.world import OVER_TORCH, world

world.init()
torch.set_num_threads(1)
RANK, SIZE = world.rank(), world.size()
WARMUP, STEPS = 4, 10
SHARES = SIZE if OVER_TORCH else 1
"""Of the data, of which trainers give each worker one under torchrun."""
PLAIN = {name: getattr(torch.nn.utils, name) for name in ("clip_grad_norm_", "clip_grad_value_")}


def optimizer_of(model, passes=1, kind=torch.optim.AdamW, **options):
    """Our optimizer over ``model``, which starts alike on all workers."""
    world.broadcast_parameters(model.state_dict(), root_rank=0)
    return onebit.DistributedOptimizer(
        kind(model.parameters(), **({"lr": 1e-2} | options)),
        named_parameters=model.named_parameters(),
        warmup_steps=WARMUP,
        recipe=Recipe(min_compressed_size=32),
        backward_passes_per_step=passes,
        model=model,  # which trainers put into DistributedDataParallel under torchrun
    )


def shared(folder):
    """Worker 0's under torchrun, where trainers write by one worker; else each worker's own."""
    return world.broadcast_object(folder, root_rank=0, name="folder") if OVER_TORCH else folder


class Watch:
    """Compares the replicas of all workers after every step of ``optimizer``, whoever takes it.

    Under torchrun, trainers put the model into ``DistributedDataParallel``: it must not average in any forward pass.
    """

    def __init__(self, model, optimizer):
        self.model, self.steps, self.apart, self.averaging = model, [], [], []
        optimizer.register_step_post_hook(self._after)
        register_module_forward_hook(self._after_forward)
        if RANK == 1:
            # Worker 0 clips before Horovod can have averaged anything, worker 1 when all is averaged: whatever
            # depends on which of the two comes first shows.
            model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
            for name, function in PLAIN.items():
                setattr(torch.nn.utils, name, _late(function))

    def _after(self, optimizer, args, kwargs):
        weights = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        rows = world.allgather(weights[None], name="weights")
        self.steps.append(optimizer.phase.value)
        if not torch.isfinite(weights).all() or not all(torch.equal(row, rows[0]) for row in rows):
            self.apart.append(len(self.steps))

    def _after_forward(self, module, inputs, output):
        if isinstance(module, DistributedDataParallel):
            self.averaging.append(module.require_backward_grad_sync)

    def finish(self, steps=STEPS, averages=frozenset({False} if OVER_TORCH else ())):
        """Raise unless ``steps`` steps were taken, some of them compressed, and the replicas were equal after each.
        ``averages``: whether ``DistributedDataParallel`` averaged, if it was there, in any forward pass."""
        if self.apart:
            raise AssertionError(f"the replicas differ after steps {self.apart} of {len(self.steps)}")
        if len(self.steps) != steps or self.steps[-1] != "compressed":
            raise AssertionError(f"{steps} steps were expected, compressed in the end, but they were {self.steps}")
        if set(self.averaging) != averages:
            raise AssertionError(f"DistributedDataParallel averages, by forward pass: {self.averaging}")
        print(f"worker {RANK}: {len(self.steps)} steps, replicas equal", flush=True)


def _late(function):
    def late(*args, **kwargs):
        time.sleep(0.05)
        return function(*args, **kwargs)

    return late

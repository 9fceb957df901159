"""A model, its batches and what every test of the PyTorch face needs; each rank imports it."""

import hashlib
import os

import pytest
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from tests.ranks.world import world

world.init()
torch.set_num_threads(1)
RANK, SIZE = world.rank(), world.size()
DEVICE = os.environ.get("ONEBIT_DEVICE", "cpu")  # where models and batches are; one GPU serves all ranks
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)
# In which order Horovod adds more than two values depends on what it fuses, and that on timing, unless fusion is off.
REPEATABLE = SIZE == 2 or os.environ.get("HOROVOD_FUSION_THRESHOLD") == "0"
two_ranks_only = pytest.mark.skipif(SIZE != 2, reason="float32 sums of more than two depend on how they are sent")
repeatable_sums_only = pytest.mark.skipif(not REPEATABLE, reason="float32 sums depend on what Horovod fuses")


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, Algorithm 2, with the options and the state of the packages that have it; PyTorch has none."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, **more):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **more})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure else None
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                momentum = self.state[p]["exp_avg"]
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(lr * torch.sign(beta1 * momentum + (1 - beta1) * p.grad))
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


OPTIMIZERS = [
    (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 1e-3, "maximize": False, "foreach": True}),
    (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {"lr": 0.1}),
    (onebit.LAMB, {"lr": 1e-2, "weight_decay": 0.01}),
    (Lion, {"lr": 3e-4, "weight_decay": 0.01}),
]


class Net(torch.nn.Module):
    """Compressed and small parameters, one that is never used, one that is frozen, two that are tied."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(32, 128)
        self.norm = torch.nn.LayerNorm(128)
        self.second = torch.nn.Linear(128, 128)
        self.tied = torch.nn.Linear(128, 128, bias=False)
        self.tied.weight = self.second.weight
        self.last = torch.nn.Linear(128, 10)
        self.unused = torch.nn.Parameter(torch.ones(40, 40))
        self.frozen = torch.nn.Parameter(torch.ones(40, 40), requires_grad=False)

    def forward(self, x):
        h = self.tied(torch.relu(self.norm(self.first(x)))) + 0.1 * self.frozen.mean()
        return self.last(torch.relu(self.second(torch.tanh(h))))


def batch(step, rank=None):
    generator = torch.Generator().manual_seed(1000 * step + (RANK if rank is None else rank))
    x = torch.randn(16, 32, generator=generator, device="cpu").to(DEVICE)
    return x, x[:, :10].argmax(1)


def spoil(p, value):
    """Put ``value`` into the next gradient of ``p``."""

    def hook(grad):
        handle.remove()
        grad = grad.clone()
        grad[0, 0] = float(value)
        return grad

    handle = p.register_hook(hook)


def train(model, optimizer, steps, start=0, passes=1, scheduler=None, set_to_none=True):
    loss = None
    for step in range(start, start + steps):
        optimizer.zero_grad() if set_to_none is None else optimizer.zero_grad(set_to_none=set_to_none)
        for k in range(passes):
            x, y = batch(7919 * k + step)
            loss = cross_entropy(model(x), y) / passes
            loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
    return float(loss.detach()) * passes


def weights(model):
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def digest(model, optimizer):
    """Of weights, the optimizer's state and the residuals of all workers."""
    found = hashlib.blake2b(digest_size=8)
    for p in model.parameters():
        values = [value for _, value in sorted(optimizer.state[p].items()) if isinstance(value, torch.Tensor)]
        for value in (p, *values):
            found.update(value.detach().contiguous().cpu().numpy().tobytes())
    for _, value in sorted(optimizer.feedback_state_dict().items()):
        found.update(value.numpy().tobytes())
    return "".join(world.allgather_object(found.hexdigest(), name="digests"))


def assert_replicas_equal(model):
    w = weights(model)
    gathered = world.allgather(w[None], name="weights")
    assert torch.isfinite(w).all()
    assert all(torch.equal(row, gathered[0]) for row in gathered)


def wrap(model, kind=torch.optim.AdamW, warmup_steps=5, recipe="robust", wrapping=None, **arguments):
    optimizer = kind(model.parameters(), **({"lr": 1e-3} | arguments))
    named = list(model.named_parameters())
    return onebit.DistributedOptimizer(
        optimizer, named_parameters=named, warmup_steps=warmup_steps, recipe=recipe, **(wrapping or {})
    )

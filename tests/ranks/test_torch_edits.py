"""Whatever a user does to an optimizer's state, groups or wrapping between two steps: the library follows, or all
workers get one clear error. How far weights move in a step tells a stale second moment: it is compared with what the
plain optimizer does with the mean gradients and the same edits."""

import collections
import gc

import horovod.torch as hvd
import pytest
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from tests.ranks.torch_common import RANK, SIZE, Lion, assert_replicas_equal, batch

ODD = RANK == SIZE - 1
LR = 1e-5
"""So small that weights hardly change, and labels are drawn: gradients stay what they are, and so do moves."""
KINDS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=LR),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "lamb": lambda parameters: onebit.LAMB(parameters, lr=LR),
    "lion": lambda parameters: Lion(parameters, lr=LR / 3),
}
MODES = {
    "warm-up": {"warmup_steps": 500},
    "compressed": {"warmup_steps": 20},
    "local": {"schedule": onebit.Local(every=4, freeze=500)},
    "frozen": {"schedule": onebit.Local(every=4, freeze=20)},
    "zero_one": {"schedule": onebit.ZeroOne(var_freeze_step=30, var_update_scaler=16, local_step_scaler=64)},
}


class Net(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(32, 64)
        self.second = torch.nn.Linear(64, 64)
        self.last = torch.nn.Linear(64, 10)

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


def wrap(model, plain, mode):
    return onebit.DistributedOptimizer(plain, list(model.named_parameters()), **MODES[mode])


class Run:
    """A model with our optimizer, and its twin with the plain one, which sees the mean gradients."""

    def __init__(self, kind, mode):
        self.kind, self.mode, self.steps = kind, mode, 0
        self.model, self.twin = Net(), Net()
        self.plain = KINDS[kind](self.model.parameters())
        self.twins = KINDS[kind](self.twin.parameters())
        self.optimizer = wrap(self.model, self.plain, mode)

    @property
    def both(self):
        return (self.model, self.optimizer), (self.twin, self.twins)

    def train(self, steps):
        """Take so many steps; how far the middle layer moves on the way, in learning rates a step: ours, the twin's."""
        self.optimizer.flush()
        before = self._middle()
        for _ in range(steps):
            self._backward(self.twin)
            grads = [p.grad for p in self.twin.parameters()]
            mean = hvd.allreduce(torch.cat([g.reshape(-1) for g in grads]), name="twin")
            for grad, part in zip(grads, mean.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))
            self.twins.step()
            self.optimizer.zero_grad()
            self._backward(self.model)
            self.optimizer.step()
            self.steps += 1
        self.optimizer.flush()
        both = zip(self._middle(), before, strict=True)
        return [float((now - then).square().mean().sqrt()) / steps / LR for now, then in both]

    def _middle(self):
        return [model.second.weight.detach().clone() for model in (self.model, self.twin)]

    def _backward(self, model):
        model.zero_grad()
        x, _ = batch(self.steps)
        y = torch.randint(10, (len(x),), generator=torch.Generator().manual_seed(2 * self.steps + RANK))
        cross_entropy(model(x), y).backward()

    def check(self, steps=24):
        """``steps`` more move ours as far as the plain optimizer's; all workers have the same."""
        ours, plain = self.train(steps)
        shortest = 0.6 if self.mode == "local" else 0.8  # of own moments, much is noise, and steps are shorter
        assert shortest * plain <= ours <= 1.2 * plain, (ours, plain)
        assert_replicas_equal(self.model)
        self.optimizer.check_replicas()


# -- groups and wrapping ----------------------------------------------------------------------------------------------


def rebuild_groups(model, optimizer):
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    optimizer.param_groups.clear()
    for p in model.parameters():
        optimizer.add_param_group({**options, "params": [p]})


def take_out_and_put_back(model, optimizer):
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not model.second.weight]
    step_without(model, optimizer)
    group["params"].append(model.second.weight)


def step_without(model, optimizer):
    model.zero_grad(set_to_none=True)
    optimizer.zero_grad()
    x, y = batch(0)
    cross_entropy(model(x), y).backward()
    model.second.weight.grad = None
    optimizer.step()


def replace_parameter(model, optimizer):
    """As Gaussian splatting does: a new Parameter, with the old one's state."""
    old, new = model.second.weight, torch.nn.Parameter(model.second.weight.detach().clone())
    group = next(g for g in optimizer.param_groups if any(p is old for p in g["params"]))
    group["params"] = [new if p is old else p for p in group["params"]]
    optimizer.state[new] = optimizer.state.pop(old)
    model.second.weight = new


EDITS = {
    "groups": rebuild_groups,
    "out and in": take_out_and_put_back,
    "replaced": replace_parameter,
    "clear": lambda model, optimizer: optimizer.state.clear(),
    "del": lambda model, optimizer: optimizer.state.pop(model.second.weight, None),
    "defaultdict": lambda model, optimizer: setattr(optimizer, "state", collections.defaultdict(dict)),
}


def zeros_in_place(model, optimizer, data=False, keys=("exp_avg", "exp_avg_sq", "momentum_buffer", "step")):
    for state in optimizer.state.values():
        for key in keys:
            if isinstance(state.get(key), torch.Tensor):
                (state[key].data if data else state[key]).zero_()


def new_zeros(model, optimizer):
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "step"):
            if isinstance(state.get(key), torch.Tensor):
                state[key] = torch.zeros_like(state[key])


EDITS |= {
    "zeros": zeros_in_place,
    "zeros of data": lambda model, optimizer: zeros_in_place(model, optimizer, data=True),
    "new zeros": new_zeros,
    "no momentum": lambda model, optimizer: zeros_in_place(model, optimizer, keys=("exp_avg", "momentum_buffer")),
    "moved": lambda model, optimizer: [
        state.update({k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)})
        for state in optimizer.state.values()
    ],
    "rate": lambda model, optimizer: [g.update(lr=g["lr"] * 0.5) for g in optimizer.param_groups],
}
NO_STATE_YET = ("local", "frozen")  # the wrapped optimizer's is made by its first step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_adams_state_or_groups(edit, mode):
    run = Run("adam", mode)
    run.train(44)
    for model, optimizer in run.both:
        EDITS[edit](model, optimizer)
    run.train(48)
    run.check()


@pytest.mark.parametrize("kind", ["sgd", "lamb", "lion"])
@pytest.mark.parametrize("edit", ["groups", "replaced", "clear", "new zeros", "zeros of data"])
def test_an_edit_of_another_optimizers_state(edit, kind):
    run = Run(kind, "compressed")
    run.train(32)
    for model, optimizer in run.both:
        EDITS[edit](model, optimizer)
    run.train(40)
    run.check(40)


@pytest.mark.parametrize("mode", ["compressed", "frozen", "zero_one"])
def test_the_same_plain_optimizer_wrapped_again_in_each_stage(mode):
    run = Run("adam", mode)
    for _ in range(4):
        run.train(28)
        run.check()
        run.optimizer = wrap(run.model, run.plain, mode)
        gc.collect()
        assert len(run.plain.state[run.model.second.weight]) <= 6

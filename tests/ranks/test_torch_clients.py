"""The loops of transformers' Trainer, of accelerate and of Lightning, written out: they edit gradients before step().

``python -m tests.clients`` runs the libraries themselves. Worker 1 is late in its forward passes and before it clips,
so that worker 0 has clipped before anything can have been averaged, and worker 1 clips what has been averaged already
if averages are written over gradients.
"""

import copy
import dataclasses
import itertools
import time

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError
from horovod_onebit.recipe import PRESETS
from horovod_onebit.warmup import Phase
from tests.ranks.torch_common import RANK, Net, assert_replicas_equal, batch, weights, wrap
from tests.ranks.world import OVER_TORCH, needs_horovod, world

TINY = dataclasses.replace(PRESETS["robust"], min_compressed_size=64, bucket_size=4096)
WARMUP, STEPS = 4, 9


def late():
    if RANK == 1:
        time.sleep(0.02)


def backward(model, step, passes=1):
    for k in range(passes):
        late()
        x, y = batch(31 * k + step)
        (cross_entropy(model(x), y) / passes).backward()
    late()


def clip_all(model):
    clip_grad_norm_(model.parameters(), 0.05)


def clip_to_infinity(model):
    """As a trainer that only wants to know the norm: everything is multiplied by one."""
    clip_grad_norm_(model.parameters(), float("inf"))


def clip_values(model):
    clip_grad_value_(model.parameters(), 1e-3)


def noise(model):
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.grad += 1e-3 * torch.randn(p.shape)


def replace(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


EDITS = [clip_all, clip_to_infinity, clip_values, noise, replace]


def hugging_face(model, optimizer, edit, passes):
    """Gradients are reset by the model, never by the optimizer; step(None)."""
    prepared(optimizer)
    model.zero_grad()
    for step in range(STEPS):
        # The last step of an epoch has fewer passes.
        backward(model, step, 1 if step % 3 == 2 else passes)
        edit(model)
        optimizer.step(None)
        model.zero_grad()
        yield


def accelerate(model, optimizer, edit, passes):
    prepared(optimizer)
    for step in range(STEPS):
        backward(model, step, passes)
        edit(model)
        optimizer.step(None)
        optimizer.zero_grad(set_to_none=True)
        yield


def lightning(model, optimizer, edit, passes):
    """The last pass, the edit and, without accumulation, zero_grad() are inside the closure."""
    for step in range(STEPS):
        if passes > 1:
            optimizer.zero_grad()
            backward(model, step, passes - 1)

        def closure(step=step):
            x, y = batch(step)
            late()
            loss = cross_entropy(model(x), y)
            if passes == 1:
                optimizer.zero_grad()
            loss.backward()
            late()
            edit(model)
            return loss

        optimizer.step(closure=closure)
        yield


def prepared(optimizer):
    """What accelerate does with every optimizer."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


LOOPS = [hugging_face, accelerate, lightning]
CASES = [*itertools.product(LOOPS, EDITS, [1]), *itertools.product(LOOPS, [clip_all], [2])]


@pytest.mark.parametrize(("loop", "edit", "passes"), CASES)
def test_replicas_stay_equal_where_trainers_edit_gradients(loop, edit, passes):
    torch.manual_seed(RANK)
    model = Net()
    optimizer = wrap(model, recipe=TINY, warmup_steps=WARMUP, wrapping={"backward_passes_per_step": passes})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in loop(model, optimizer, edit, passes):
        scheduler.step()
        assert_replicas_equal(model)
    assert optimizer.phase == "compressed"


@pytest.mark.parametrize("edit", EDITS)
def test_in_warmup_what_was_left_in_the_gradients_is_averaged(edit):
    """From the second step on by all means: in the first one nobody knows yet that gradients are edited."""
    model = Net()
    optimizer = wrap(model, torch.optim.SGD, warmup_steps=100, lr=0.5)
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        backward(model, step)
        torch.manual_seed(100 * step + RANK)
        edit(model)
        twin = Net()
        for p, w in zip(twin.parameters(), before, strict=True):
            p.data.copy_(w)
        backward(twin, step)
        torch.manual_seed(100 * step + RANK)
        edit(twin)
        optimizer.step()
        assert_replicas_equal(model)
        if step == 0:
            continue
        for (name, p), q, w in zip(model.named_parameters(), twin.parameters(), before, strict=True):
            if p.requires_grad:
                gradient = world.allreduce(torch.zeros_like(q) if q.grad is None else q.grad, name=f"twin.{name}")
                torch.testing.assert_close(p.detach(), w - 0.5 * gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("phase", ["warmup", "compressed"])
def test_a_worker_that_clips_alone(phase):
    """As in ``if norm > limit: clip``: harmless, or an error on all workers, never a hang or a drift."""
    model = Net()
    optimizer = wrap(model, recipe=TINY, warmup_steps=2 if phase == "compressed" else 100)
    refused = 0
    for step in range(6):
        optimizer.zero_grad()
        backward(model, step)
        if step >= 3 and step % 2 == RANK:
            clip_all(model)
        try:
            optimizer.step()
        except Exception:
            refused += 1
            model.zero_grad()
            break
        assert_replicas_equal(model)
    assert len(set(world.allgather_object(refused, name="refused"))) == 1


@needs_horovod
def test_a_program_that_knows_horovod_alone(monkeypatch):
    import horovod.torch as hvd

    from horovod_onebit.install import install, uninstall

    monkeypatch.setenv("HOROVOD_ONEBIT_RECIPE", "paper")
    monkeypatch.setenv("HOROVOD_ONEBIT_WARMUP_STEPS", "900")
    before = hvd.DistributedOptimizer, hvd.broadcast_optimizer_state, hvd.elastic.TorchState
    install(warmup_steps=WARMUP)
    install(warmup_steps=WARMUP)  # again: nothing is wrapped twice
    try:
        model = Net()
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
        hvd.broadcast_optimizer_state(optimizer, 0, model)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        assert optimizer.recipe == PRESETS["paper"]
        assert optimizer.phase == "compressed"
        assert_replicas_equal(model)
        assert hvd.elastic.TorchState.__module__ == "horovod_onebit.torch.elastic"
        assert callable(hvd.elastic.run(lambda state: None))
    finally:
        uninstall()
    assert before == (hvd.DistributedOptimizer, hvd.broadcast_optimizer_state, hvd.elastic.TorchState)


class Around(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: what it does not know of, it has not."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        self.optimizer.step(closure)


def test_an_optimizer_around_ours(tmp_path):
    folder = world.broadcast_object(str(tmp_path), root_rank=0, name="folder")
    model = Net()
    inner = onebit.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), list(model.named_parameters()), warmup_steps=WARMUP
    )
    optimizer = Around(inner)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    onebit.broadcast_optimizer_state(optimizer)
    onebit.save_checkpoint(folder, model, optimizer)
    assert onebit.load_checkpoint(folder, model, optimizer) == {}
    with onebit.Monitor(optimizer, jsonl=tmp_path / "run.jsonl", every=1) as monitor:
        monitor.step()
    assert (tmp_path / "run.jsonl").exists() == (RANK == 0)
    backward(model, STEPS)
    optimizer.step()
    assert_replicas_equal(model)


class Copying:
    """As Lightning's LightningOptimizer: of the class of what is in it, with a copy of its attributes."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.__class__ = type("Copying", (self.__class__, type(optimizer)), {})
        self.__dict__.update(vars(optimizer))

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Asking:
    """As Fabric's _FabricOptimizer: of the class of what is in it, which it asks for its attributes."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.__class__ = type("Asking", (self.__class__, type(optimizer)), {})

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def step(self, closure=None):
        return self.optimizer.step(closure)


@pytest.mark.parametrize("proxy", [Copying, Asking])
@pytest.mark.parametrize("schedule", [None, onebit.Local(every=2, doubling=0)])
def test_a_grad_scaler_steps_an_optimizer_that_imitates_ours(schedule, proxy):
    found = []
    for around in (lambda optimizer: optimizer, proxy):
        model = Net()
        plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        arguments = {"warmup_steps": WARMUP, "recipe": TINY} if schedule is None else {"schedule": schedule}
        ours = onebit.DistributedOptimizer(plain, list(model.named_parameters()), **arguments)
        optimizer, scaler = around(ours), torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            x, y = batch(step)
            loss = scaler.scale(cross_entropy(model(x), y))
            (loss * float("inf") if step in (2, 8) and RANK == 1 else loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert not hasattr(ours, "grad_scale")
            assert not hasattr(optimizer, "found_inf")
        found.append((weights(model), scaler.get_scale(), ours.stats().skipped_steps))
        assert_replicas_equal(model)
    (expected, *more), (got, *same) = found
    assert more == same
    assert schedule is not None or more == [64.0, 2]
    assert torch.equal(expected, got)


# -- optimizers and loops of other libraries, written out -------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """As that of timm: the optimizer within takes the steps, and makes the groups anew where it loads."""

    def __init__(self, base):
        self._base_optimizer, self.defaults = base, base.defaults
        self.param_groups, self.state = base.param_groups, base.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def step(self, closure=None):
        return self._base_optimizer.step(closure)

    def state_dict(self):
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self._base_optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self._base_optimizer.param_groups, self._base_optimizer.state


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as its users write it: two calls, or ``step`` with a closure."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["before"] = p.detach().clone()
            p.add_(0.05 * p.grad)

    @torch.no_grad()
    def second_step(self):
        for p in (p for group in self.param_groups for p in group["params"] if "before" in self.state[p]):
            p.copy_(self.state[p].pop("before"))
        self.base_optimizer.step()

    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        self.first_step()
        self.zero_grad()
        with torch.enable_grad():
            closure()
        self.second_step()


EXACT, LOCAL = {"recipe": "exact"}, {"schedule": onebit.Local(every=2, doubling=0)}


def twice(model, optimizer, step, between=lambda: None):
    """A step by two calls."""
    optimizer.zero_grad()
    for part in (optimizer.first_step, optimizer.second_step):
        backward(model, step)
        between()
        part()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", [EXACT, LOCAL, {"schedule": onebit.Gradients()}])
@pytest.mark.parametrize("where", ["broadcast", "loaded"])
def test_an_optimizer_within_another_one_follows_the_groups_that_are_shown(how, where):
    model = Net(seed=RANK)
    optimizer = onebit.DistributedOptimizer(Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-2)), **how)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
    if where == "broadcast":
        onebit.broadcast_optimizer_state(optimizer, root_rank=0)
    else:
        optimizer.load_state_dict(optimizer.state_dict())
    world.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(8):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    optimizer.flush()
    within = optimizer._base_optimizer
    assert within.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.7**8)
    assert within.state is optimizer.state
    assert_replicas_equal(model)


@pytest.mark.parametrize("how", [EXACT, LOCAL])
def test_steps_of_an_optimizer_within_another_one_are_not_taken_alone(how):
    model = Net()
    optimizer = onebit.DistributedOptimizer(SAM(model.parameters(), lr=0.05, momentum=0.9), **how)
    if not OVER_TORCH:
        world.broadcast_optimizer_state(optimizer.base_optimizer, root_rank=0)  # which makes its state by a step
    if how is EXACT:
        twice(model, optimizer, 0, optimizer.synchronize)
    else:

        def closure():
            optimizer.zero_grad()
            loss = cross_entropy(model(batch(0)[0]), batch(0)[1])
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert_replicas_equal(model)
    optimizer.zero_grad()
    backward(model, 1)
    with pytest.raises(ConfigurationError, match="SGD, which SAM has within, took a step of its own"):
        optimizer.second_step()
    again = onebit.DistributedOptimizer(SAM(Net().parameters(), lr=0.05), **EXACT)
    again.zero_grad()


class Clipped(torch.optim.AdamW):
    """As detectron2 makes them of any class: ``super`` of the instance's own class."""

    def step(self, closure=None):
        clip_grad_value_([p for group in self.param_groups for p in group["params"]], 1e-3)
        return super(type(self), self).step(closure)


@pytest.mark.parametrize("how", [EXACT, LOCAL])
def test_a_step_that_calls_that_of_the_class_above_its_own(how):
    model, plain_model = Net(), Net()
    optimizer = onebit.DistributedOptimizer(Clipped(model.parameters(), lr=1e-3, weight_decay=0.0), **how)
    plain = Clipped(plain_model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(4):
        for one, steps in ((model, optimizer), (plain_model, plain)):
            x, y = batch(step, rank=0)  # the same on all workers
            cross_entropy(one(x), y).backward()
            steps.step()
            steps.zero_grad()
    optimizer.flush()
    assert_replicas_equal(model)
    if how is EXACT:
        torch.testing.assert_close(weights(model), weights(plain_model), rtol=1e-6, atol=1e-7)


def test_a_module_that_is_frozen_when_gradients_are_synchronized_is_an_error():
    for warmup_steps in (50, 1):
        model = Net()
        optimizer = wrap(model, warmup_steps=warmup_steps)
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        backward(model, 2)
        model.requires_grad_(False)
        for call in (optimizer.synchronize, lambda optimizer=optimizer: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(ConfigurationError, match=r"frozen when step\(\) or synchronize\(\) is called"):
                call()
        model.requires_grad_(True)
        optimizer.step()
        assert_replicas_equal(model)


@pytest.mark.parametrize("frozen_at_first", [True, False])
@pytest.mark.parametrize("how", [{}, EXACT, LOCAL])
def test_a_module_that_is_frozen_when_step_is_called_is_an_error(how, frozen_at_first):
    """As in the loops of StyleGAN2 and 3: a module wants gradients for its own losses alone."""
    model = Net().requires_grad_(not frozen_at_first)
    optimizer = onebit.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3), **how)
    before = weights(model)
    model.requires_grad_(True)
    backward(model, 0)
    model.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"frozen when step\(\) .* call requires_grad_\(False\) after"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    model.requires_grad_(True)
    optimizer.step()
    model.requires_grad_(False)
    assert not torch.equal(weights(model), before)
    optimizer.zero_grad()
    optimizer.step()  # there is nothing to do
    optimizer.flush()
    assert_replicas_equal(model)


def test_the_warmup_ends_when_no_groups_rate_rises():
    """The rate of new layers stays, and is the largest one; that of the others rises."""
    model = Net()
    head = list(model.last.parameters())
    body = [p for p in model.parameters() if id(p) not in set(map(id, head))]
    groups = [{"params": head, "lr": 1e-2}, {"params": body, "lr": 1e-5}]
    optimizer = onebit.DistributedOptimizer(torch.optim.SGD(groups, lr=1e-2, momentum=0.9), recipe=TINY)
    for step in range(60):
        optimizer.param_groups[1]["lr"] = 1e-5 * min(step + 1, 40)
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        assert step >= 40 or optimizer.phase is Phase.WARMUP, step
    assert optimizer.phase is Phase.COMPRESSED

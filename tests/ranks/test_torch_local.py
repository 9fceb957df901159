"""The PyTorch face on real ranks: local steps of any optimizer, and the exchange of what rounds of them have moved."""

import copy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError, DesyncError, NonFiniteError, Recipe, UnsupportedError
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam
from tests.ranks.torch_common import (
    DEVICE,
    RANK,
    REPEATABLE,
    SIZE,
    Lion,
    Net,
    assert_replicas_equal,
    batch,
    spoil,
    train,
    weights,
)
from tests.ranks.world import collectives, world

GROWING = onebit.Local(every=4, doubling=8, freeze=10)
HIDDEN = onebit.Local(every=4, doubling=0, delay=2)
FOURS = [onebit.Local(every=4, doubling=0, freeze=8), HIDDEN]


class Own(torch.optim.Optimizer):
    """A user's own: normalized gradients, and a state that is no tensor."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state["calls"] = self.state.get("calls", 0) + 1  # of no parameter
                    if p not in self.state:
                        self.state[p] = {"count": 0, "momentum": 0.5}
                    self.state[p]["count"] += 1
                    p.sub_(p.grad / (p.grad.norm() + 1e-6), alpha=group["lr"])


def local(model, kind=torch.optim.AdamW, schedule=GROWING, recipe="robust", wrapping=None, **arguments):
    optimizer = kind(model.parameters(), **({"lr": 3e-3} | arguments))
    named = list(model.named_parameters())
    return onebit.DistributedOptimizer(optimizer, named, schedule=schedule, recipe=recipe, **(wrapping or {}))


def closure_of(model, optimizer, step):
    def closure():
        optimizer.zero_grad()
        x, y = batch(step)
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def matrices(model):
    return [p for p in model.parameters() if p.ndim == 2 and p.requires_grad]


@pytest.fixture
def folder(tmp_path):
    return Path(world.broadcast_object(str(tmp_path), root_rank=0, name="folder"))


@pytest.mark.parametrize("bad", [0, 5])
def test_a_step_whose_closure_finds_nan_late_is_taken_back(bad):
    """LBFGS has moved the weights by then."""
    model = Net()
    optimizer = local(model, torch.optim.LBFGS, schedule=onebit.Local(every=4), lr=0.02, max_iter=3)
    for step in range(8):
        x, y = batch(step)
        calls, before = 0, weights(model)

        def closure(x=x, y=y, step=step):
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            if step == bad and calls == 2:
                model.first.weight.grad.fill_(torch.nan)
            return loss

        optimizer.step(closure)
        if step == bad:
            assert calls == 2
            assert torch.equal(before, weights(model))
    assert_replicas_equal(model)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.RMSprop, {"lr": 1e-3}),
        (torch.optim.Adafactor, {"lr": 0.05}),
        (torch.optim.Adagrad, {"lr": 0.02}),
        (onebit.LAMB, {"lr": 1e-2}),
        (Lion, {"lr": 1e-3}),
        (Own, {"lr": 0.15}),
    ],
)
def test_any_optimizer_trains_and_all_are_equal_after_each_round(kind, arguments):
    model = Net()
    optimizer = local(model, kind, **arguments)
    assert isinstance(optimizer, kind)
    start = train(model, optimizer, 1)
    apart = 0
    for step in range(1, 60):
        loss = train(model, optimizer, 1, start=step)
        if GROWING.ends_round(step + 1):
            assert_replicas_equal(model)
            assert optimizer.stats(norms=False).step_bytes_sent
        else:
            assert not optimizer.stats(norms=False).step_bytes_sent
            gathered = world.allgather(weights(model)[None], name="weights.local")
            apart += not torch.equal(gathered[0], gathered[-1])
    assert apart == sum(not GROWING.ends_round(step + 1) for step in range(1, 60))
    assert loss < 0.9 * start


def moments(model, optimizer):
    """Adam's, of all parameters that are trained, as all workers have them."""
    own = [optimizer.state[p][key].float() for key in MOMENTS for p in model.parameters() if p in optimizer.state]
    return world.allgather(torch.cat([one.reshape(-1) for one in own])[None], name="moments")


MOMENTS = ("exp_avg_sq", "exp_avg")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [(), (9,), (13, 14)])
def test_moments_are_those_of_all_workers_after_the_freeze(bad, dtype):
    """After each round; the second ones do not change any more. One worker skips the steps ``bad`` (from 0); if it
    skips that of the freeze, the next one has it."""
    last = 10 if 9 in bad else 9
    model = Net().to(dtype)
    optimizer = local(model, weight_decay=0.1)
    frozen = None
    for step in range(32):
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x.to(dtype)).float(), y).backward()
        if RANK == 0 and step in bad:
            model.second.weight.grad[0, 0] = float("nan")
        optimizer.step()
        every, half = moments(model, optimizer), len(moments(model, optimizer)[0]) // 2
        if step == 8:
            assert not torch.equal(every[0, :half], every[-1, :half])
        if step == last:
            frozen = every[0, :half]
        if step >= last:
            assert all(torch.equal(one[:half], frozen) for one in every)
        if step > last and GROWING.ends_round(step + 1):
            assert all(torch.equal(one, every[0]) for one in every)
    assert float(optimizer.state[model.second.weight]["step"]) == 32 - (RANK == 0) * len(bad)
    assert optimizer.stats().skipped_steps == (RANK == 0) * len(bad)


@pytest.mark.parametrize("arguments", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"eps": 1e-3, "fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_weights_are_those_of_numpy(kind, arguments):
    """Adam with frozen moments; messages are exact, so that rounding is not magnified."""
    schedule = onebit.Local(every=4, doubling=0, freeze=6)
    model = Net()
    optimizer = local(model, kind, schedule, wrapping={"exact": ["*"]}, **arguments)
    cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    named = {name: p for name, p in model.named_parameters() if p.grad is not None}
    arrays = {name: p.detach().cpu().clone().numpy() for name, p in named.items()}
    options = dict(arguments)
    options.pop("fused", None)
    scale = -1.0 if options.pop("maximize", False) else 1.0
    decay = options.pop("weight_decay", 0.01 if kind is torch.optim.AdamW else 0.0)
    decoupled = kind is torch.optim.AdamW
    rule = Adam(lr=3e-3, weight_decay=decay, decoupled=decoupled, grad_scale=scale, **options)
    other = NumpyOptimizer(arrays, rule, collectives=collectives(), schedule=schedule, exact=["*"])
    for step in range(24):
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        grads = {name: p.grad.cpu().clone().numpy() for name, p in named.items()}
        optimizer.step()
        other.step(grads)
    for name, p in named.items():
        torch.testing.assert_close(p.detach().cpu(), torch.from_numpy(arrays[name]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("when", [12, 14])
def test_parameters_whose_memory_was_replaced_after_the_freeze_go_on(when):
    model, other = Net(), Net()
    two = [local(one) for one in (model, other)]
    for step in range(24):
        for one, optimizer in zip((model, other), two, strict=True):
            train(one, optimizer, 1, start=step)
            if step == when and one is model:
                for p in one.parameters():
                    p.data = p.data.clone()
    assert torch.equal(weights(model), weights(other)) or not REPEATABLE


@pytest.mark.parametrize("edit", ["popped", "replaced"])
@pytest.mark.parametrize("when", [13, 14])
def test_memory_that_is_replaced_in_the_round_of_an_edited_state_is_followed(when, edit):
    model = Net()
    optimizer = local(model, schedule=onebit.Local(every=4, doubling=0, freeze=8))
    weight = model.second.weight
    for step in range(24):
        if step == 13:
            if edit == "popped":
                optimizer.state.pop(weight)
            else:
                optimizer.state[weight]["exp_avg"] = torch.ones_like(weight)
        if step == when:
            weight.data = weight.data.clone()
        train(model, optimizer, 1, start=step)
        if step % 4 == 3:
            assert_replicas_equal(model)


def train_with(late, model, optimizer, steps):
    """Train ``model``, and ``late`` towards 0."""
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(step)
        (cross_entropy(model(x), y) + (late * x.mean()).square().sum()).backward()
        optimizer.step()


@pytest.mark.parametrize("recipe", ["robust", "paper"])
def test_a_parameter_without_gradients_before_the_freeze_is_trained_later(recipe):
    model = Net()
    late = torch.nn.Parameter(torch.ones(64, 64))
    model.register_parameter("late", late)
    optimizer = local(model, recipe=recipe)
    train(model, optimizer, 13)
    assert "exp_avg" in optimizer.state[late]  # as on workers that had gradients
    train_with(late, model, optimizer, range(13, 60))
    optimizer.flush()
    assert_replicas_equal(model)
    assert 0.5 < float(late.detach().mean()) < 0.95


@pytest.mark.parametrize("how", ["plain", "ours", "rewrapped"])
def test_a_state_with_frozen_moments_has_the_second_moment_that_adam_corrects(how):
    model = Net()
    optimizer = local(model, lr=1e-4)
    train(model, optimizer, 24)
    state = copy.deepcopy(optimizer.state_dict())
    p = model.second.weight
    corrected = optimizer.state[p]["exp_avg_sq"] / (1 - 0.999**10)
    again = Net()
    again.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(again.parameters(), lr=1e-4)
    if how == "ours":
        plain = local(again, lr=1e-4)
    plain.load_state_dict(state)
    own = plain.state[again.second.weight]
    if how == "ours":
        assert torch.equal(own["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"])
        return
    torch.testing.assert_close(own["exp_avg_sq"] / (1 - 0.999**24), corrected, rtol=1e-5, atol=0)
    if how == "rewrapped":  # and what a plain optimizer has gone on with is averaged again
        for step in range(24, 60):
            plain.zero_grad()
            x, y = batch(step)
            cross_entropy(again(x), y).backward()
            plain.step()
        world.broadcast_parameters(again.state_dict(), root_rank=0)
        optimizer = onebit.DistributedOptimizer(plain, list(again.named_parameters()), schedule=GROWING)
        train(again, optimizer, 2)
        every = moments(again, optimizer)
        half = len(every[0]) // 2
        assert torch.equal(every[0, :half], every[-1, :half])
        seen = optimizer.state[again.second.weight]["onebit_variance_steps"]
        assert seen == optimizer._parameters.steps - 1 or seen == optimizer._parameters.steps
        found = optimizer.state[again.second.weight]["exp_avg_sq"] / (1 - 0.999**seen)
        assert 0.2 < float(found.mean() / corrected.mean()) < 5


def test_workers_that_disagree_about_the_freeze_are_told():
    model = Net()
    optimizer = local(model, schedule=onebit.Local(every=4, freeze=8))

    def trained():
        for step in range(20):
            optimizer.param_groups[0]["lr"] = 1.5e-3 if RANK == 1 and step == 2 else 1e-3
            train(model, optimizer, 1, start=step)

    with pytest.raises(DesyncError):
        trained()


def test_a_parameter_that_comes_after_the_freeze_keeps_moments_of_its_own():
    model = Net()
    optimizer = local(model)
    train(model, optimizer, 12)
    late = torch.nn.Parameter(torch.ones(64, 64))
    optimizer.add_param_group({"params": [late]})
    train_with(late, model, optimizer, range(12, 40))
    optimizer.flush()
    assert_replicas_equal(torch.nn.ParameterList([*model.parameters(), late]))
    assert float(late.detach().mean()) < 0.97
    assert float(optimizer.state[late]["step"]) == 28
    second = world.allgather(optimizer.state[late]["exp_avg_sq"][None], name="second")
    assert not torch.equal(second[0], second[-1])


@pytest.mark.parametrize("how", ["unfrozen", "added", "trained before"])
def test_the_freeze_waits_for_a_parameter_that_has_seen_little(how):
    """Its second moment would stay that of two gradients for the rest of the run."""
    model, late = Net(), torch.nn.Parameter(torch.ones(64, 64))
    if how != "added":
        model.register_parameter("late", late)
    late.requires_grad_(how == "trained before")
    optimizer = local(model, schedule=onebit.Local(every=2, doubling=0, freeze=16))
    first = 2 if how == "trained before" else 0
    train_with(late, model, optimizer, range(first))
    late.requires_grad_(how == "added")
    train(model, optimizer, 14 - first, start=first)
    late.requires_grad_()
    if how == "added":
        optimizer.add_param_group({"params": [late]})
    train_with(late, model, optimizer, range(14, 15))
    optimizer.flush()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_with(late, model, optimizer, range(15, 30))
    assert optimizer._parameters.seen(late) is None
    assert optimizer._parameters.seen(model.second.weight) is None
    train_with(late, model, optimizer, range(30, 34))
    assert optimizer._parameters.seen(late) == optimizer._parameters.seen(model.second.weight) == 32
    optimizer.flush()
    assert_replicas_equal(torch.nn.ParameterList([*model.parameters(), late]))


def test_the_freeze_waits_once_for_a_parameter_that_is_used_no_more():
    model, late = Net(), torch.nn.Parameter(torch.ones(64, 64))
    optimizer = local(model, schedule=onebit.Local(every=2, doubling=0, freeze=16))
    train(model, optimizer, 10)
    optimizer.add_param_group({"params": [late]})
    train_with(late, model, optimizer, range(10, 13))
    train(model, optimizer, 7, start=13)
    assert optimizer._parameters.seen(model.second.weight) is None
    train(model, optimizer, 14, start=20)
    assert optimizer._parameters.seen(model.second.weight) == 32


def test_a_parameter_without_gradients_at_the_freeze_begins_with_its_first_step():
    model, late = Net(), torch.nn.Parameter(torch.ones(64, 64))
    model.register_parameter("late", late)
    optimizer = local(model, schedule=onebit.Local(every=2, doubling=0, freeze=16), lr=1e-3, weight_decay=0.0)
    train(model, optimizer, 20)
    for step in range(20, 26):
        optimizer.zero_grad()
        x, y = batch(step)
        (cross_entropy(model(x), y) + late.sum()).backward()
        optimizer.step()
    assert float(late.detach().mean()) == pytest.approx(1 - 6e-3, abs=5e-4)


def test_a_state_that_one_worker_has_edited_is_saved_and_loaded(folder):
    model = Net()
    optimizer = local(model, schedule=onebit.Local(every=4, doubling=0, freeze=64))
    train(model, optimizer, 12)
    if RANK == 1:
        for state in optimizer.state.values():
            state["exp_avg_sq"].zero_()
    train(model, optimizer, 8, start=12)
    onebit.save_checkpoint(folder, model, optimizer)
    model = Net()
    optimizer = local(model, schedule=onebit.Local(every=4, doubling=0, freeze=64))
    onebit.load_checkpoint(folder, model, optimizer)
    train(model, optimizer, 8, start=20)
    assert_replicas_equal(model)


def test_optimizers_with_moments_that_the_rule_does_not_know_keep_their_own():
    model = Net()
    optimizer = local(model, amsgrad=True)
    train(model, optimizer, 24)
    every = moments(model, optimizer)
    assert not torch.equal(every[0], every[-1])
    assert_replicas_equal(model)


def test_a_learning_rate_that_rises_puts_the_freeze_off(folder):
    model = Net()
    optimizer = local(model, schedule=onebit.Local(every=1, freeze=4))
    for step in range(12):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(step + 1, 6)
        train(model, optimizer, 1, start=step)
        every = moments(model, optimizer)
        assert torch.equal(every[0], every[-1]) == (step >= 10)
        if step == 7:  # what was seen of the rate goes along
            onebit.save_checkpoint(folder, model, optimizer)
            optimizer = local(model, schedule=onebit.Local(every=1, freeze=4))
            onebit.load_checkpoint(folder, model, optimizer)


def test_muon_on_the_matrices_and_adam_on_the_rest():
    model = Net()
    rest = [p for p in model.parameters() if p.ndim != 2 and p.requires_grad]
    names = {p: name for name, p in model.named_parameters()}
    two = [
        onebit.DistributedOptimizer(kind(own, lr=lr), [(names[p], p) for p in own], schedule=GROWING)
        for kind, own, lr in ((torch.optim.Muon, matrices(model), 0.02), (torch.optim.Adam, rest, 3e-3))
    ]
    losses = []
    for step in range(60):
        x, y = batch(step)
        for optimizer in two:
            optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        for optimizer in two:
            optimizer.step()
        losses.append(float(loss.detach()))
    assert_replicas_equal(model)
    assert losses[-1] < 0.8 * losses[0]


def test_an_optimizer_that_calls_its_closure():
    model = Net()
    optimizer = local(model, torch.optim.LBFGS, lr=0.02, max_iter=3)

    def loss_of_all():
        with torch.no_grad():
            return float(sum(cross_entropy(model(x), y) for x, y in map(batch, range(12))))

    start = loss_of_all()
    for step in range(12):
        optimizer.step(closure_of(model, optimizer, step))
    assert_replicas_equal(model)
    assert loss_of_all() < start


def test_second_moments_are_common_with_a_delay_too():
    """The freeze ends the exchange that is under way; messages are hidden again after it, and momenta are own."""
    model = Net()
    optimizer = local(model, schedule=onebit.Local(every=4, delay=2, freeze=10))
    train(model, optimizer, 9)
    assert optimizer._compressor.rounds.hidden
    train(model, optimizer, 1, start=9)
    assert optimizer._parameters.seen(model.first.weight) == 10
    assert not optimizer._compressor.rounds.hidden
    assert_replicas_equal(model)
    train(model, optimizer, 9, start=10)
    train(model, optimizer, 1, start=19)
    assert optimizer._compressor.rounds.hidden
    state = optimizer.state[model.first.weight]
    for key, alike in (("exp_avg_sq", True), ("exp_avg", False)):
        found = world.allgather(state[key].reshape(1, -1), name=key)
        assert torch.equal(found[0], found[-1]) == alike
    optimizer.flush()
    assert_replicas_equal(model)


@pytest.mark.parametrize(
    "recipe", ["robust", Recipe(exchange="two_stage", block_size=64), Recipe(codec="two_bit"), Recipe(bucket_size=4096)]
)
@pytest.mark.parametrize(("momentum", "delay"), [(0.0, 1), (0.3, 4)])
def test_a_hidden_exchange_arrives_later(recipe, momentum, delay):
    model = Net()
    schedule = onebit.Local(every=4, doubling=8, momentum=momentum, delay=delay)
    optimizer = local(model, recipe=recipe, schedule=schedule, wrapping={"check_replicas_every": 8})
    start = train(model, optimizer, 1)
    for step in range(1, 60):
        loss = train(model, optimizer, 1, start=step)
        assert bool(optimizer.stats(norms=False).step_bytes_sent) == schedule.ends_round(step + 1)
    gathered = world.allgather(weights(model)[None], name="weights.hidden")
    assert SIZE == 1 or not torch.equal(gathered[0], gathered[-1])
    optimizer.check_replicas()
    optimizer.flush()
    assert_replicas_equal(model)
    assert loss < 0.9 * start


@pytest.mark.parametrize("recipe", [Recipe(exchange="two_stage", block_size=64), "paper", Recipe(codec="two_bit")])
def test_every_recipe(recipe):
    model = Net()
    optimizer = local(model, recipe=recipe, schedule=onebit.Local(every=3, doubling=0, momentum=0.3))
    start, end = train(model, optimizer, 1), train(model, optimizer, 59, start=1)
    assert_replicas_equal(model)
    assert end < 0.9 * start


def train_narrow(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x.to(torch.bfloat16)).float(), y).backward()
        optimizer.step()


@pytest.mark.parametrize("schedule", [GROWING, HIDDEN])
def test_weights_of_half_precision(schedule):
    model = Net().to(torch.bfloat16)
    optimizer = local(model, schedule=schedule)
    train_narrow(model, optimizer, 24)
    optimizer.flush()
    assert_replicas_equal(model)


@pytest.mark.parametrize("how", ["state", "broadcast", "checkpoint"])
def test_the_momentum_of_rounds_stays_float32(folder, how):
    schedule = onebit.Local(every=2, doubling=0, momentum=0.6)
    trained = []
    for interrupted in (False, True):
        model = Net().to(torch.bfloat16)
        optimizer = local(model, torch.optim.SGD, schedule, lr=0.05)
        train_narrow(model, optimizer, 6)
        if interrupted and how == "checkpoint":
            onebit.save_checkpoint(folder, model, optimizer)
            model = Net(seed=5).to(torch.bfloat16)
            optimizer = local(model, torch.optim.SGD, schedule, lr=0.05)
            onebit.load_checkpoint(folder, model, optimizer)
        elif interrupted and how == "broadcast":
            onebit.broadcast_optimizer_state(optimizer, root_rank=0)
        elif interrupted:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train_narrow(model, optimizer, 12, start=6)
        assert_replicas_equal(model)
        trained.append(weights(model))
    assert torch.equal(*trained) or not REPEATABLE


@pytest.mark.parametrize("delay", [0, 2, 8])
@pytest.mark.parametrize("steps", [5, 13, 16])
def test_flush_ends_a_round_and_then_costs_nothing(steps, delay):
    model = Net()
    optimizer = local(model, schedule=onebit.Local(every=8, doubling=0, delay=delay))
    train(model, optimizer, steps)
    before = weights(model)
    optimizer.flush()
    assert_replicas_equal(model)
    assert steps == 16 or not torch.equal(before, weights(model))
    sent = optimizer.stats(norms=False).bytes_sent
    optimizer.flush()
    optimizer.check_replicas()
    assert optimizer.stats(norms=False).bytes_sent == sent > 0


@pytest.mark.parametrize("what", ["every", "rate", "tensor rate", "weights", "delay"])
def test_workers_that_disagree_are_told(what):
    model = Net(seed=RANK if what == "weights" else 0)
    every, delay = 4 if what == "every" and RANK == 0 else 8, int(what == "delay" and RANK == 0)
    optimizer = local(model, schedule=onebit.Local(every=every, doubling=0, delay=delay))
    if what == "rate":
        train(model, optimizer, 5)
        optimizer.param_groups[0]["lr"] = 1e-3 * (RANK + 1)
    if what == "tensor rate":  # PyTorch prints four digits of it
        train(model, optimizer, 5)
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3 + 1e-8 * RANK)
    texts = {"rate": "learning rate", "tensor rate": "learning rate", "weights": "differs from that of worker 0"}
    with pytest.raises(DesyncError, match=texts.get(what, "argument")):
        train(model, optimizer, 8)


@pytest.mark.skipif(SIZE == 1, reason="one worker agrees with itself")
def test_an_exchange_that_was_hidden_when_a_flush_was_refused_is_not_lost():
    model = Net()
    optimizer = local(model, schedule=HIDDEN)
    train(model, optimizer, 4)
    before = weights(model)
    optimizer.param_groups[0]["lr"] = 1e-3 * (RANK + 1)
    with pytest.raises(DesyncError, match="learning rate"):
        optimizer.flush()
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.flush()
    assert_replicas_equal(model)
    assert not torch.equal(before, weights(model))


def test_training_goes_on_when_workers_agree_again_while_an_exchange_is_under_way():
    model = Net()
    optimizer = local(model, schedule=HIDDEN)
    train(model, optimizer, 6)
    optimizer.param_groups[0]["lr"] = 1e-3 * (RANK + 1)
    if SIZE > 1:
        with pytest.raises(DesyncError, match="learning rate"):
            train(model, optimizer, 2, start=6)
    optimizer.param_groups[0]["lr"] = 1e-3
    train(model, optimizer, 10, start=8)
    optimizer.flush()
    assert_replicas_equal(model)


def test_an_error_on_all_workers_loses_nothing_of_a_round_under_way():
    found = []
    for fails in (False, True):
        model = Net()
        optimizer = local(model, torch.optim.SGD, schedule=HIDDEN, lr=0.1)
        before = weights(model)
        train(model, optimizer, 4)
        if fails:

            def closure():
                raise OSError("no batch")

            with pytest.raises(OSError, match="no batch"):
                optimizer.step(closure)
        optimizer.flush()
        assert_replicas_equal(model)
        found.append(weights(model))
    assert torch.equal(*found)
    assert not torch.equal(found[0], before)


def test_training_goes_on_when_the_weights_were_made_equal():
    model = Net(seed=RANK)
    optimizer = local(model, schedule=onebit.Local(every=4, doubling=0))
    with pytest.raises(DesyncError, match="begin with the same weights"):
        train(model, optimizer, 1)
    world.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, 4)
    assert_replicas_equal(model)


@pytest.mark.parametrize("schedule", FOURS)
def test_a_worker_that_misses_a_step_is_told(schedule):
    model = Net()
    optimizer = local(model, schedule=schedule)

    def steps_and_flush():
        train(model, optimizer, 6 if RANK == 0 else 5)
        optimizer.flush()

    with pytest.raises(
        DesyncError, match=r"local steps taken differs between workers: 6 on worker 0|different methods"
    ):
        steps_and_flush()


def test_a_flush_after_other_numbers_of_steps_is_an_error_on_all():
    """Worker 0 is at the end of a round, where it has nothing to bring together."""
    model = Net()
    optimizer = local(model, schedule=onebit.Local(every=4, doubling=0))
    train(model, optimizer, 4)
    optimizer.flush()
    if RANK:
        train(model, optimizer, 1, start=4)
    with pytest.raises(DesyncError, match="steps of this round differs between workers: 0 on worker 0, 1 on worker 1"):
        optimizer.flush()
    if RANK == 0:
        train(model, optimizer, 1, start=4)
    optimizer.flush()
    assert_replicas_equal(model)


def test_weights_that_were_set_between_rounds_are_where_the_next_one_begins():
    model = Net()
    optimizer = local(model, schedule=onebit.Local(every=4, doubling=0), lr=0.0, weight_decay=0.0)
    train(model, optimizer, 4)
    saved = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(saved)
    train(model, optimizer, 4)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_horovods_own_broadcast_of_a_state_that_only_one_worker_has():
    torch.manual_seed(RANK)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 10))
    optimizer = local(model)
    if RANK == 0:
        plain = torch.optim.AdamW(model.parameters(), lr=3e-3)
        cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        plain.step()
        optimizer.load_state_dict(plain.state_dict())
    world.broadcast_parameters(model.state_dict(), root_rank=0)
    before = weights(model)
    world.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(before, weights(model))
    assert float(optimizer.state[model[0].weight]["step"]) == 1
    train(model, optimizer, 16)
    assert_replicas_equal(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_on_one_worker_skips_its_own_step(value):
    model = Net()
    optimizer = local(model)
    for step in range(40):
        if RANK == 0 and step == 33:
            spoil(model.second.weight, value)
        train(model, optimizer, 1, start=step)
    assert_replicas_equal(model)
    assert optimizer.stats().skipped_steps == (RANK == 0)


def test_nan_in_a_closure_skips_the_step():
    model = Net()
    optimizer = local(model)
    for step in range(16):
        x, y = batch(step)

        def closure(x=x, y=y, bad=RANK == 0 and step == 9):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            if bad:
                model.second.weight.grad[0, 0] = float("nan")
            return loss

        assert torch.isfinite(optimizer.step(closure))
    assert_replicas_equal(model)
    assert optimizer.stats().skipped_steps == (RANK == 0)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 8, start=16)
    assert_replicas_equal(model)


def test_nan_in_a_sparse_gradient_skips_the_step():
    torch.manual_seed(0)
    model = torch.nn.Embedding(100, 30, sparse=True)
    optimizer = local(model, torch.optim.SparseAdam, onebit.Local(every=4, doubling=0))
    for step in range(8):
        optimizer.zero_grad()
        model(torch.tensor([1, 2, 2, 3 + RANK])).square().sum().backward()
        if RANK == 0 and step == 5:
            model.weight.grad._values()[1, 2] = float("nan")
        optimizer.step()
    assert_replicas_equal(model)
    assert optimizer.stats(norms=False).skipped_steps == (RANK == 0)


@pytest.mark.parametrize("with_closure", [False, True])
def test_sparse_gradients_become_dense_before_the_own_step(with_closure):
    models = [torch.nn.Embedding(100, 30, sparse=sparse) for sparse in (True, False)]
    for model in models:
        torch.manual_seed(0)
        model.reset_parameters()
    for model, wrapping in zip(models, ({"sparse_as_dense": True}, {}), strict=True):
        optimizer = local(model, torch.optim.Adam, onebit.Local(every=4, doubling=0, freeze=8), wrapping=wrapping)
        for step in range(16):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = model(torch.tensor([1, 2, 2, step + RANK])).square().sum()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                return loss

            optimizer.step(closure) if with_closure else (closure(), optimizer.step())
        assert_replicas_equal(model)
    torch.testing.assert_close(weights(models[0]), weights(models[1]))


def test_nan_on_one_worker_is_raised_on_all_at_the_end_of_the_round():
    model = Net()
    optimizer = local(model, recipe=Recipe(on_nonfinite="raise"), schedule=onebit.Local(every=4, doubling=0))
    train(model, optimizer, 4)
    before = weights(model)
    if RANK == 0:
        spoil(model.second.weight, float("nan"))
    train(model, optimizer, 3, start=4)
    with pytest.raises(NonFiniteError):
        train(model, optimizer, 1, start=7)
    assert torch.equal(before, weights(model))
    train(model, optimizer, 8, start=8)
    assert_replicas_equal(model)


@pytest.mark.parametrize("schedule", FOURS)
def test_a_round_with_damaged_weights_is_lost_and_training_goes_on(schedule):
    model = Net()
    optimizer = local(model, schedule=schedule)
    train(model, optimizer, 6)
    if RANK == SIZE - 1:
        with torch.no_grad():
            model.second.weight[0, 0] = float("nan")
        optimizer.state[model.second.weight]["exp_avg"][0, 0] = float("nan")
    train(model, optimizer, 10, start=6)
    optimizer.flush()
    assert_replicas_equal(model)
    assert torch.isfinite(weights(model)).all()
    assert optimizer.stats().skipped_steps >= 1


def test_after_a_lost_round_each_worker_resumes_with_what_it_knows_of_its_residuals(folder):
    """The worker whose weights were damaged has no residuals of that round; the others send theirs in shares."""
    trained = []
    for resumes in (False, True):
        model = Net()
        optimizer = local(model, schedule=onebit.Local(every=4, doubling=0, freeze=4))
        train(model, optimizer, 10)
        if RANK == SIZE - 1:
            with torch.no_grad():
                model.second.weight[0, 0] = float("nan")
        train(model, optimizer, 2, start=10)
        skipped = optimizer.stats().skipped_steps
        rates = world.allgather_object(max(optimizer._compressor.engine.feedback.rates.values()), name="rates")
        assert SIZE == 1 or rates[0] > 1.5 * rates[-1] > 0
        if resumes:
            onebit.save_checkpoint(folder, model, optimizer)
            model = Net(seed=5)
            optimizer = local(model, schedule=onebit.Local(every=4, doubling=0, freeze=4))
            onebit.load_checkpoint(folder, model, optimizer)
            assert optimizer.stats().skipped_steps == skipped
        train(model, optimizer, 8, start=12)
        assert_replicas_equal(model)
        trained.append(weights(model))
    assert torch.equal(*trained) or not REPEATABLE


ZERO_ONE = onebit.ZeroOne(var_freeze_step=16, var_update_scaler=8, local_step_scaler=8, local_step_clipper=4)


def in_groups(model, schedule, recipe="robust"):
    """Two groups, each with one of the two large layers."""
    first = list(model.first.parameters())
    rest = [p for p in model.parameters() if all(p is not one for one in first)]
    optimizer = torch.optim.AdamW([{"params": first}, {"params": rest}], lr=3e-3)
    return onebit.DistributedOptimizer(optimizer, list(model.named_parameters()), schedule=schedule, recipe=recipe)


def set_rates(optimizer, *rates):
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def rms(optimizer, p):
    return float(optimizer.state[p]["exp_avg"].square().mean().sqrt())


@pytest.mark.parametrize("recipe", ["robust", "paper", Recipe(exchange="two_stage", block_size=64)])
@pytest.mark.parametrize("falls", [(1, 1e-3), (1e-3, 1), (1e-3, 1e-3)])
@pytest.mark.parametrize("schedule", [FOURS[0], ZERO_ONE])
def test_a_fall_of_one_groups_rate_leaves_its_momentum_as_large_as_it_was(schedule, falls, recipe):
    model = Net()
    optimizer = in_groups(model, schedule, recipe)
    both, sizes = (model.first.weight, model.second.weight), []
    for step in range(64):
        if step == 40:
            set_rates(optimizer, *(3e-3 * fall for fall in falls))
        train(model, optimizer, 1, start=step)
        sizes.append([rms(optimizer, p) for p in both])
    before, after = torch.tensor(sizes[24:40]), torch.tensor(sizes[40:])
    assert (after.amax(0) < 6 * before.amax(0)).all()
    optimizer.flush()
    assert_replicas_equal(model)


@pytest.mark.parametrize("schedule", [FOURS[0], ZERO_ONE])
@pytest.mark.parametrize("zero", ["always", "at the end", "for some steps"])
def test_where_a_groups_rate_is_0_all_workers_have_one_momentum(schedule, zero):
    model = Net()
    optimizer = in_groups(model, schedule)
    for step in range(64):
        rests = zero == "always" or (step >= 40 and (zero == "at the end" or step < 49))
        set_rates(optimizer, 0.0 if rests else 3e-3, 3e-3)
        train(model, optimizer, 1, start=step)
        if step >= 40 and step % 4 == 3:
            assert_replicas_equal(model)
            every = moments(model, optimizer)
            assert torch.isfinite(every).all()
            assert (every == every[:1]).all()
    optimizer.check_replicas()
    if zero == "always":
        assert torch.equal(model.first.weight, Net().first.weight)


@pytest.mark.parametrize("schedule", [FOURS[0], ZERO_ONE])
def test_a_resumed_run_knows_of_what_rates_its_residuals_are(folder, schedule):
    model, again = Net(), Net(seed=5)
    optimizer, resumed = in_groups(model, schedule), in_groups(again, schedule)
    train(model, optimizer, 40)
    onebit.save_checkpoint(folder, model, optimizer)
    train(again, resumed, 3)
    onebit.load_checkpoint(folder, again, resumed)
    for one, its_own in ((model, optimizer), (again, resumed)):
        set_rates(its_own, 3e-3, 3e-6)
        train(one, its_own, 16, start=40)
    if REPEATABLE:
        assert torch.equal(weights(model), weights(again))
    assert torch.equal(moments(model, optimizer), moments(again, resumed)) or not REPEATABLE


@pytest.mark.parametrize(("momentum", "delay"), [(0.0, 0), (0.3, 0), (0.3, 5), (0.0, 5)])
@pytest.mark.parametrize("steps", [3, 13, 16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_resumed_run_goes_on_bit_for_bit(folder, kind, steps, momentum, delay):
    schedule = onebit.Local(every=8, doubling=4, momentum=momentum, delay=delay, freeze=6)
    arguments = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    model = Net()
    optimizer = local(model, kind, schedule, **arguments)
    train(model, optimizer, steps)
    onebit.save_checkpoint(folder, model, optimizer, extra={"epoch": 3})
    train(model, optimizer, 16, start=steps)

    again = Net(seed=5)
    resumed = local(again, kind, schedule, **arguments)
    train(again, resumed, 1)
    assert onebit.load_checkpoint(folder, again, resumed) == {"epoch": 3}
    train(again, resumed, 16, start=steps)
    if REPEATABLE:
        assert torch.equal(weights(model), weights(again))
    optimizer.flush()
    resumed.flush()
    assert_replicas_equal(again)


def test_a_state_dict_goes_to_another_optimizer_and_to_a_plain_one():
    model = Net()
    optimizer = local(model, schedule=onebit.Local(every=4, doubling=0, momentum=0.3))
    train(model, optimizer, 8)
    state, saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    again = Net(seed=7)
    resumed = local(again, schedule=onebit.Local(every=4, doubling=0, momentum=0.3))
    again.load_state_dict(saved)
    resumed.load_state_dict(state)
    residuals = optimizer.feedback_state_dict()
    resumed.load_feedback_state_dict(residuals)
    train(model, optimizer, 8, start=8)
    train(again, resumed, 8, start=8)
    if REPEATABLE:
        assert torch.equal(weights(model), weights(again))
    torch.optim.AdamW(again.parameters()).load_state_dict(state)


@pytest.mark.parametrize("broadcast", [world.broadcast_optimizer_state, onebit.broadcast_optimizer_state])
def test_broadcasts_in_the_beginning(broadcast):
    model = Net(seed=RANK)
    optimizer = local(model)
    world.broadcast_parameters(model.state_dict(), root_rank=0)
    before = weights(model)
    broadcast(optimizer, root_rank=0)
    assert torch.equal(before, weights(model))
    assert optimizer.stats(norms=False).step == 0
    assert not any(float(state["step"]) for state in optimizer.state.values())
    train(model, optimizer, 16)
    assert float(optimizer.state[model.first.weight]["step"]) == 16
    assert_replicas_equal(model)


def test_a_grad_scaler_and_clipping():
    model = Net()
    optimizer = local(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(24):
        x, y = batch(step)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        if RANK == 0 and step == 9:
            model.second.weight.grad[0, 0] = float("inf")
        if step % 2:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
    assert_replicas_equal(model)
    assert optimizer.stats().skipped_steps == (RANK == 0)
    assert (scaler.get_scale() < 2.0**12) == (RANK == 0)


@pytest.mark.parametrize("schedule", FOURS)
def test_parameters_that_come_and_go_and_move(schedule):
    model = Net()
    optimizer = local(model, schedule=schedule)
    train(model, optimizer, 6)
    added = torch.nn.Parameter(torch.ones(64, 64))
    optimizer.add_param_group({"params": [added], "lr": 1e-2})
    model.frozen.requires_grad_(True)
    model.first.weight.requires_grad_(False)
    for step in range(6, 14):
        x, y = batch(step)
        optimizer.zero_grad()
        (cross_entropy(model(x), y) + added.mean() * (1 + RANK)).backward()
        optimizer.step()
    frozen = model.first.weight.clone()
    model.second.weight.data = model.second.weight.data.clone()
    train(model, optimizer, 4, start=14)
    optimizer.flush()
    assert torch.equal(frozen, model.first.weight)
    assert_replicas_equal(torch.nn.ParameterList([*model.parameters(), added]))


@pytest.mark.parametrize("schedule", FOURS)
def test_a_parameter_that_is_taken_out_in_the_middle_of_a_round(schedule):
    model = Net()
    optimizer = local(model, schedule=schedule)
    train(model, optimizer, 1)
    without = optimizer.stats(norms=False)
    late = torch.nn.Parameter(torch.ones(64, 64))
    optimizer.add_param_group({"params": [late]})
    for step in range(1, 6):
        optimizer.zero_grad()
        x, y = batch(step)
        (cross_entropy(model(x), y) + (late * x.mean()).sum()).backward()
        optimizer.step()
    optimizer.param_groups.pop()
    train(model, optimizer, 1, start=6)
    kept = late.detach().clone()
    assert not torch.equal(kept, torch.ones(64, 64))
    train(model, optimizer, 8, start=7)
    optimizer.flush()
    assert torch.equal(kept, late)
    assert_replicas_equal(torch.nn.ParameterList([*model.parameters(), late]))
    stats = optimizer.stats(norms=False)
    assert stats.parameters == without.parameters
    assert stats.compressed_parameters == without.compressed_parameters


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_a_group_lists_twice_has_rounds_as_others_do():
    sent = []
    for twice in (False, True):
        model = Net()
        plain = torch.optim.SGD([*model.parameters(), *([model.first.weight] if twice else [])], lr=1e-3)
        schedule, named = onebit.Local(every=4, doubling=0), list(model.named_parameters())
        optimizer = onebit.DistributedOptimizer(plain, named, schedule=schedule)
        train(model, optimizer, 16)
        sent.append(optimizer.stats().bytes_sent)
        assert_replicas_equal(model)
    assert sent[0] == sent[1] > 0


def test_replicas_are_checked_after_rounds():
    model = Net()
    optimizer = local(model, schedule=onebit.Local(every=4, doubling=0), wrapping={"check_replicas_every": 6})
    train(model, optimizer, 24)
    if RANK == 0:
        model.frozen.data[0, 0] = 3.0
    with pytest.raises(DesyncError, match="frozen of worker"):
        optimizer.check_replicas()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"warmup_steps": 10}, ConfigurationError, "Local, which has none"),
        ({"op": world.Sum}, UnsupportedError, "gradients are not averaged"),
        ({"gradient_predivide_factor": 2.0}, UnsupportedError, "gradients are not averaged"),
        ({"schedule": "local"}, ConfigurationError, "expected a ZeroOne"),
    ],
)
def test_bad_arguments(arguments, error, text):
    model = Net()
    with pytest.raises(error, match=text):
        onebit.DistributedOptimizer(
            torch.optim.AdamW(model.parameters()), **({"schedule": onebit.Local(every=4)} | arguments)
        )


def test_optimizers_without_a_rule_are_told_of_local_steps():
    with pytest.raises(
        UnsupportedError,
        match=r"torch.Gradients\(\), or schedule=horovod_onebit.torch.Local\(...\), any optimizer works",
    ):
        onebit.DistributedOptimizer(torch.optim.RMSprop(Net().parameters()))


def test_a_parameter_that_few_steps_use_moves_as_far_after_the_freeze():
    """A head for each of 8 tasks, say: its gradient is there in one of 8 steps, and is a whole gradient of Adam's."""
    torch.manual_seed(0)
    used, always = (torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    plain = torch.optim.AdamW([used, always], lr=1e-3, weight_decay=0.0)
    optimizer = onebit.DistributedOptimizer(
        plain, [("used", used), ("always", always)], schedule=onebit.Local(every=8, doubling=0, freeze=16)
    )
    moved = []
    for step in range(96):
        optimizer.zero_grad()
        always.grad = torch.ones_like(always)
        if step % 8 == 3:
            used.grad = torch.ones_like(used)
        optimizer.step()
        assert (used.grad is None) == (step % 8 != 3)
        moved.append(-float(used.mean()))
    assert optimizer._compressor.parameters.seen(used) is not None
    first, last = moved[15] - moved[7], moved[95] - moved[87]  # a round before the freeze, and one after
    assert last == pytest.approx(first, rel=0.2)


@pytest.mark.parametrize("maximize", [False, True])
def test_weight_decay_in_the_gradient_is_no_noise_at_the_freeze(maximize):
    """Of all workers alike, while their gradients are opposite: the mean gradient is the decay's."""
    p = torch.nn.Parameter(torch.full((64, 64), 0.5))
    plain = torch.optim.Adam([p], lr=1e-6, weight_decay=0.1, maximize=maximize)
    optimizer = onebit.DistributedOptimizer(plain, [("p", p)], schedule=onebit.Local(every=4, doubling=0, freeze=16))
    generator = torch.Generator().manual_seed(0)
    for _ in range(24):
        optimizer.zero_grad()
        noise = 0.01 * torch.randn(64, 64, generator=generator, device="cpu").to(DEVICE)
        p.grad = noise if RANK % 2 else -noise
        optimizer.step()
    second = plain.state[p]["exp_avg_sq"] / (1 - 0.999 ** optimizer._compressor.parameters.seen(p))
    assert float(second.mean()) == pytest.approx(0.05**2, rel=0.1)


class OfItsOwnRate(Own):
    """As transformers' Adafactor is by default."""

    def __init__(self, params):
        super().__init__(params, lr=None)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.05)


def test_a_group_without_a_learning_rate():
    model = Net()
    named = list(model.named_parameters())
    optimizer = onebit.DistributedOptimizer(OfItsOwnRate(model.parameters()), named, schedule=FOURS[0])
    first = train(model, optimizer, 1)
    assert train(model, optimizer, 23, start=1) < first
    assert_replicas_equal(model)


def test_state_in_other_memory_and_another_dict_goes_on():
    results = []
    for moves in (False, True):
        model = Net()
        optimizer = local(model, schedule=onebit.Local(every=4, doubling=0, freeze=8))
        train(model, optimizer, 14)
        if moves:
            for p, state in list(optimizer.state.items()):
                optimizer.state[p] = {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
        train(model, optimizer, 12, start=14)
        optimizer.flush()
        state = optimizer.state[model.first.weight]
        results.append((weights(model), state["exp_avg"].clone(), state["step"].clone()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("at", [14, 16])
def test_a_run_that_has_begun_with_a_plain_state_continues_bit_for_bit(at, folder):
    def begun():
        model = Net()
        plain = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(20):  # all workers alike
            plain.zero_grad()
            x, y = batch(step, rank=0)
            cross_entropy(model(x), y).backward()
            plain.step()
        named = list(model.named_parameters())
        schedule = onebit.Local(every=4, doubling=0, freeze=8)
        return model, onebit.DistributedOptimizer(plain, named, schedule=schedule)

    model, optimizer = begun()
    train(model, optimizer, at)
    onebit.save_checkpoint(folder, model, optimizer)
    again, resumed = begun()
    onebit.load_checkpoint(folder, again, resumed)
    seen = [optimizer._compressor.parameters.seen(p) for p in model.parameters()]
    assert [resumed._compressor.parameters.seen(p) for p in again.parameters()] == seen
    for of, with_ in ((model, optimizer), (again, resumed)):
        train(of, with_, 8, start=at)
        with_.flush()
    assert torch.equal(weights(model), weights(again))


@pytest.mark.parametrize("clip", [False, True])
def test_a_worker_whose_gradients_overflowed_takes_no_step_although_they_were_clipped(clip):
    model = Net()
    optimizer = local(model, schedule=FOURS[0])  # whose round is not over in the third step
    train(model, optimizer, 2)
    scaler, before = torch.amp.GradScaler("cpu", init_scale=8.0), weights(model)
    optimizer.zero_grad()
    x, y = batch(2)
    scaler.scale(cross_entropy(model(x), y)).backward()
    model.last.bias.grad[0] = torch.inf
    scaler.unscale_(optimizer)
    if clip:
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights(model), before)
    assert scaler.get_scale() == 4.0


class Ascending(torch.optim.Optimizer):
    """As SAM: it moves the weights, looks again, and moves them back."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        (group,) = self.param_groups
        trained = [p for p in group["params"] if p.grad is not None]
        moved = [0.01 * p.grad for p in trained]
        for p, move in zip(trained, moved, strict=True):
            p.add_(move)
        with torch.enable_grad():
            closure()
        for p, move in zip(trained, moved, strict=True):
            p.sub_(move).sub_(p.grad, alpha=group["lr"])


def test_a_step_that_moves_weights_before_its_closure_is_taken_back():
    model = Net()
    optimizer = local(model, Ascending, schedule=FOURS[0], lr=0.05)
    for step in range(8):
        x, y = batch(step)

        def look(x=x, y=y, bad=False):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if bad:
                model.first.weight.grad.fill_(torch.nan)

        look()
        before = weights(model)
        optimizer.step(lambda look=look, step=step: look(bad=step == 5))
        assert torch.equal(before, weights(model)) == (step == 5)
    assert_replicas_equal(model)


def test_closures_compute_gradients_after_the_freeze():
    model = Net()
    optimizer = local(model, schedule=onebit.Local(every=4, doubling=0, freeze=8))
    for step in range(16):
        with torch.no_grad():
            assert optimizer.step(closure_of(model, optimizer, step)) > 0
    assert_replicas_equal(model)


KINDS = (torch.optim.AdamW, torch.optim.RMSprop)
COMES_BACK = [(kind, how) for kind in KINDS for how in ("state", "checkpoint", "root")]


@pytest.mark.parametrize(("kind", "how"), [*COMES_BACK, (torch.optim.AdamW, "plain")])
@pytest.mark.parametrize("who", [0, 1])
def test_a_layer_that_one_worker_never_uses_comes_back(who, kind, how, folder):
    """It has a common momentum there, and no moments."""

    def made():
        torch.manual_seed(0)
        model = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(2))
        return model, local(model, kind, schedule=onebit.Local(every=2, doubling=0, momentum=0.5))

    def trained(model, optimizer, steps, start=0):
        for step in range(start, start + steps):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(SIZE * step + RANK))
            optimizer.zero_grad()
            (model[0](x) if who == RANK else model[0](x) + model[1](x)).square().mean().backward()
            optimizer.step()

    model, optimizer = made()
    trained(model, optimizer, 4)
    again, resumed = made()
    state = copy.deepcopy(optimizer.state_dict())
    if how == "plain":
        kept = kind(again.parameters(), lr=3e-3)
        kept.load_state_dict(state)
        trained(again, kept, 2)
        return
    if how == "checkpoint":
        onebit.save_checkpoint(folder, model, optimizer)
        onebit.load_checkpoint(folder, again, resumed)
    else:
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(state)
    if how == "root":
        onebit.broadcast_optimizer_state(resumed, root_rank=who)
    trained(model, optimizer, 4, start=4)
    trained(again, resumed, 4, start=4)
    assert_replicas_equal(again)
    if how == "checkpoint":
        assert torch.equal(weights(again), weights(model))

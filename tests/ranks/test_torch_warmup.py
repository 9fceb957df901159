"""The PyTorch face on real ranks: warm-ups whose gradients travel in few bits (``Recipe.warmup``)."""

import copy
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit import CheckpointError, ConfigurationError, DesyncError, NonFiniteError, Recipe, UnsupportedError
from horovod_onebit.warmup import EXACT_FIRST
from tests.ranks.torch_common import (
    OPTIMIZERS,
    RANK,
    SIZE,
    Net,
    assert_replicas_equal,
    batch,
    spoil,
    train,
    two_ranks_only,
    weights,
    wrap,
)
from tests.ranks.world import world

THREE = Recipe(warmup="three_bit")


def seen(optimizer):
    """How many averages of each gradient there were that was not zero."""
    found = optimizer._compressor.gradients.coded.describe()
    assert not found.pop("unused", 0)
    return found


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("bits", ["two_bit", "three_bit", "four_bit"])
@pytest.mark.parametrize(("kind", "arguments"), OPTIMIZERS)
def test_any_optimizer_trains_and_replicas_are_equal(kind, arguments, bits, exchange):
    model, plain = Net(), Net()
    recipe = Recipe(warmup=bits, exchange=exchange)
    optimizer = wrap(model, kind, recipe=recipe, warmup_steps=40, **arguments)
    exact = wrap(plain, kind, recipe=replace(recipe, warmup="exact"), warmup_steps=40, **arguments)
    for of, with_ in ((model, optimizer), (plain, exact)):
        train(of, with_, 40)
        assert_replicas_equal(of)
    assert not seen(optimizer)  # compression starts
    found, expected = (float(cross_entropy(m(batch(500)[0]), batch(500)[1])) for m in (model, plain))
    assert abs(found - expected) < 0.15
    train(model, optimizer, 20, start=40)
    assert_replicas_equal(model)


def test_by_default_gradients_travel_in_three_bits_and_then_one_bit_starts():
    """``warmup_steps="auto"``. Small tensors travel in float32, and until one bit starts ``unused``, too, which has no
    gradient."""
    model, sent = Net(), {"warmup": [], "compressed": []}
    optimizer = wrap(model, warmup_steps=None, lr=1e-3)
    for step in range(210):
        phase = optimizer.phase
        train(model, optimizer, 1, start=step)
        sent[phase].append(optimizer.stats().step_bytes_sent)
    parameters, large, ring = optimizer.stats().parameters, optimizer.stats().compressed_parameters, 2 / SIZE
    exact = {"warmup": parameters - large + model.unused.numel(), "compressed": parameters - large}
    bits = {
        phase: [(8 * found / (SIZE - 1) - 32 * ring * exact[phase]) / (parameters - exact[phase]) for found in each]
        for phase, each in sent.items()
    }
    assert bits["warmup"][:EXACT_FIRST] == pytest.approx([32 * ring] * EXACT_FIRST, rel=0.05)
    assert bits["warmup"][EXACT_FIRST:] == pytest.approx([3] * (len(bits["warmup"]) - EXACT_FIRST), rel=0.2)
    assert len(bits["warmup"]) > EXACT_FIRST + 5
    assert bits["compressed"] == pytest.approx([1] * len(bits["compressed"]), rel=0.3)
    assert len(bits["compressed"]) > 5
    assert_replicas_equal(model)


def test_gradients_are_the_workers_mean():
    """Over some steps of the same gradient; what one step lacks, the next ones bring (tests/unit/test_coded.py)."""
    p = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = onebit.DistributedOptimizer(
        torch.optim.SGD([p], lr=1.0), named_parameters=[("p", p)], recipe=THREE, warmup_steps=1000
    )
    torch.manual_seed(1)
    sizes, common = torch.logspace(-3, 0, 64), torch.randn(64, 64)
    torch.manual_seed(RANK)
    own = (2 * common + torch.randn(64, 64)) * sizes
    mean = world.allreduce(own, name="mean")
    given = torch.zeros_like(own)
    for step in range(EXACT_FIRST + 300):
        p.grad = None
        (p * own).sum().backward()
        optimizer.step()
        if step < EXACT_FIRST:
            torch.testing.assert_close(p.grad, mean)
        else:
            assert not torch.equal(p.grad, mean)
            given += p.grad
    assert float((given / 300 - mean).norm() / mean.norm()) < 0.005 * SIZE
    assert_equal(given)


def assert_equal(tensor):
    all_of = world.allgather(tensor.reshape(1, -1), name="compared")
    assert all(torch.equal(one, all_of[0]) for one in all_of)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_and_orders_of_dimensions(dtype):
    torch.manual_seed(1)
    sizes, common = torch.logspace(-2, 0, 16).reshape(-1, 1, 1), torch.randn(32, 16, 4, 4)
    torch.manual_seed(RANK)
    own = (2 * common + torch.randn(32, 16, 4, 4)) * sizes
    mean = world.allreduce(own, name="mean")
    p = torch.nn.Parameter(torch.zeros(32, 16, 4, 4, dtype=dtype).to(memory_format=torch.channels_last))
    optimizer = onebit.DistributedOptimizer(
        torch.optim.SGD([p], lr=0.0), named_parameters=[("p", p)], recipe=THREE, warmup_steps=1000
    )
    given = torch.zeros_like(own)
    for step in range(EXACT_FIRST + 100):
        p.grad = None
        (p * own.to(dtype)).sum().backward()
        optimizer.step()
        assert p.grad.dtype is dtype
        assert p.grad.is_contiguous(memory_format=torch.channels_last)
        if step >= EXACT_FIRST:
            given += p.grad
    assert float((given / 100 - mean).norm() / mean.norm()) < 0.02
    assert_equal(given)


def test_a_sum_in_place_of_a_mean():
    model, other = Net(), Net()
    summed = wrap(model, torch.optim.SGD, lr=0.01, recipe=THREE, warmup_steps=30, wrapping={"op": world.Sum})
    averaged = wrap(other, torch.optim.SGD, lr=0.01 * SIZE, recipe=THREE, warmup_steps=30)
    train(model, summed, 25)
    train(other, averaged, 25)
    torch.testing.assert_close(weights(model), weights(other), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("step", [3, EXACT_FIRST + 3])
@pytest.mark.parametrize("where", ["first.weight", "norm.bias"])
def test_nan_on_one_rank_is_skipped_by_all(exchange, step, where):
    model = Net()
    optimizer = wrap(model, warmup_steps=30, recipe=replace(THREE, exchange=exchange))
    train(model, optimizer, step)
    before, averages = weights(model), seen(optimizer)
    x, y = batch(step)
    optimizer.zero_grad()
    p = dict(model.named_parameters())[where]
    cross_entropy(model(x), y).backward()
    if RANK == SIZE - 1:
        p.grad[(0,) * p.dim()] = float("nan")
    optimizer.step()
    assert torch.equal(before, weights(model))
    assert optimizer.stats().skipped_steps == 1
    early = step < EXACT_FIRST and where == "norm.bias"  # the other gradients are learned of
    assert seen(optimizer) == {name: count + early for name, count in averages.items()}
    train(model, optimizer, 40, start=step)
    assert_replicas_equal(model)


def test_nan_raises_on_all_when_asked_to():
    model = Net()
    optimizer = wrap(model, warmup_steps=40, recipe=replace(THREE, on_nonfinite="raise"))
    train(model, optimizer, EXACT_FIRST + 2)
    x, y = batch(6)
    optimizer.zero_grad()
    if RANK == 0:
        spoil(model.first.weight, "inf")
    cross_entropy(model(x), y).backward()
    with pytest.raises(NonFiniteError):
        optimizer.step()
    train(model, optimizer, 2, start=7)
    assert_replicas_equal(model)


def test_the_scales_of_gradscalers_stay_together():
    model = Net()
    optimizer = wrap(model, warmup_steps=60, recipe=THREE)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    scales = []
    for step in range(30):
        x, y = batch(step)
        optimizer.zero_grad()
        if RANK == 0 and step == EXACT_FIRST + 5:
            spoil(model.second.weight, "inf")
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert_equal(torch.tensor(scales))
    assert scales[EXACT_FIRST + 5] == scales[EXACT_FIRST + 4] / 2
    assert_replicas_equal(model)


def test_gradients_are_clipped_alike():
    model = Net()
    optimizer = wrap(model, warmup_steps=60, recipe=THREE)
    norms = []
    for step in range(25):
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        norms.append(optimizer.clip_grad_norm_(0.1))
        total = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm()
        assert float(total) <= 0.1 * (1 + 1e-4)
        optimizer.step()
    assert_equal(torch.tensor(norms))
    assert_replicas_equal(model)


def test_gradients_that_are_accumulated():
    model = Net()
    optimizer = wrap(model, warmup_steps=20, recipe=THREE, wrapping={"backward_passes_per_step": 2})
    train(model, optimizer, 30, passes=2)
    assert_replicas_equal(model)


def test_a_state_that_is_cleared_says_nothing_of_gradients():
    model = Net()
    optimizer = wrap(model, warmup_steps=100, recipe=THREE)
    train(model, optimizer, EXACT_FIRST + 5)
    optimizer.state.clear()
    train(model, optimizer, 2, start=20)
    assert set(seen(optimizer).values()) == {EXACT_FIRST + 7}
    assert_replicas_equal(model)


def test_a_state_that_is_loaded_learns_anew():
    model = Net()
    optimizer = wrap(model, warmup_steps=100, recipe=THREE)
    train(model, optimizer, EXACT_FIRST + 5)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 2, start=20)
    assert set(seen(optimizer).values()) == {2}
    train(model, optimizer, EXACT_FIRST + 5, start=22)
    assert_replicas_equal(model)


def test_a_state_that_one_worker_alone_loads_is_named_on_all():
    model = Net()
    optimizer = wrap(model, warmup_steps=100, recipe=THREE)
    train(model, optimizer, EXACT_FIRST + 5)
    if RANK == 0:
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(DesyncError, match=r"averages of the gradient of first.weight before"):
        train(model, optimizer, 1, start=20)


def test_a_state_that_is_saved_is_that_of_a_plain_optimizer():
    model = Net()
    optimizer = wrap(model, warmup_steps=100, recipe=THREE)
    train(model, optimizer, EXACT_FIRST + 5)
    saved = optimizer.state_dict()
    plain = torch.optim.Adam(model.parameters(), lr=1e-3)
    plain.load_state_dict(saved)
    again = wrap(model, warmup_steps=100, recipe=THREE)
    again.load_state_dict(saved)
    train(model, again, EXACT_FIRST + 5, start=30)
    assert_replicas_equal(model)


@two_ranks_only
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("steps", [3, EXACT_FIRST + 5, 45])
def test_a_checkpoint(steps, exchange, tmp_path):
    """In the warm-up, while it learns and afterwards, and after it."""
    recipe = Recipe(warmup="three_bit", exchange=exchange, bucket_size=4096)
    folder = Path(world.broadcast_object(str(tmp_path), root_rank=0, name="folder"))
    model, again = Net(), Net(seed=1)
    optimizer = wrap(model, warmup_steps=40, recipe=recipe)
    train(model, optimizer, steps)
    onebit.save_checkpoint(folder, model, optimizer)
    resumed = wrap(again, warmup_steps=40, recipe=recipe)
    onebit.load_checkpoint(folder, again, resumed)
    assert torch.equal(weights(model), weights(again))
    for of, with_ in ((model, optimizer), (again, resumed)):
        train(of, with_, 4, start=steps)
        assert_replicas_equal(of)
    assert torch.equal(weights(model), weights(again))
    for of, with_ in ((model, optimizer), (again, resumed)):
        train(of, with_, 50, start=steps + 4)
    assert torch.equal(weights(model), weights(again))


def test_a_checkpoint_with_a_parameter_that_was_added_frozen(tmp_path):
    folder = Path(world.broadcast_object(str(tmp_path), root_rank=0, name="folder"))
    model = Net()
    optimizer = wrap(model, warmup_steps=40, recipe=THREE)
    train(model, optimizer, EXACT_FIRST + 2)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2000), requires_grad=False)]})
    onebit.save_checkpoint(folder, model, optimizer)
    onebit.load_checkpoint(folder, model, optimizer)
    train(model, optimizer, 3, start=20)
    assert set(seen(optimizer).values()) == {EXACT_FIRST + 5}
    assert_replicas_equal(model)


@pytest.mark.parametrize("broadcast", [world.broadcast_optimizer_state, onebit.broadcast_optimizer_state])
@pytest.mark.parametrize("steps", [3, EXACT_FIRST + 5])
def test_a_broadcast_in_the_middle(steps, broadcast):
    model = Net()
    optimizer = wrap(model, warmup_steps=100, recipe=THREE)
    train(model, optimizer, steps)
    if RANK == 1:
        with torch.no_grad():
            model.first.weight.add_(1.0)
    world.broadcast_parameters(model.state_dict(), root_rank=0)
    broadcast(optimizer, root_rank=0)
    train(model, optimizer, EXACT_FIRST + 5, start=40)
    assert_replicas_equal(model)


def test_a_parameter_that_is_trained_late_has_exact_averages():
    model = Net()
    model.second.weight.requires_grad_(False)
    optimizer = wrap(model, warmup_steps=20, recipe=THREE)
    train(model, optimizer, 25)
    model.second.weight.requires_grad_(True)
    train(model, optimizer, 30, start=25)
    assert_replicas_equal(model)


@pytest.mark.parametrize("schedule", [onebit.Local(), onebit.ZeroOne(), onebit.Gradients("two_bit")])
def test_with_another_schedule_there_is_no_such_warm_up(schedule):
    with pytest.raises(ConfigurationError, match=r"warmup='three_bit'.*schedule"):
        wrap(Net(), torch.optim.Adam, None, THREE, {"schedule": schedule})


def test_what_is_sent():
    model = Net()
    optimizer = wrap(model, warmup_steps=60, recipe=replace(THREE, exchange="direct"))
    sent = []
    for step in range(50):
        train(model, optimizer, 1, start=step)
        sent.append(optimizer.stats().step_bytes_sent)
    stats = optimizer.stats()
    trained = [p for p in model.parameters() if p.requires_grad]
    learned = sum(p.numel() for p in trained if p.numel() >= 1024 and p is not model.unused)
    small = sum(p.numel() for p in trained) - learned
    assert stats.parameters == learned + small
    assert (stats.compressed_parameters, stats.coded_parameters) == (0, learned)
    assert f"{learned:,} in few bits" in str(stats)
    ring = 2 * (SIZE - 1) / SIZE
    assert sent[EXACT_FIRST - 1] == pytest.approx(4 * ring * (learned + small), rel=0.01)
    assert sent[-1] < 4 * ring * small + 1.2 * (SIZE - 1) * learned * 3 / 8 + 300
    train(model, optimizer, 20, start=50)
    stats = optimizer.stats()
    assert (stats.compressed_parameters, stats.coded_parameters) == (learned + model.unused.numel(), 0)
    assert_replicas_equal(model)


def test_what_is_counted_when_a_state_was_loaded():
    """Its exact steps come again."""
    model = Net()
    optimizer = wrap(model, warmup_steps=60, recipe=THREE)
    train(model, optimizer, EXACT_FIRST + 2)
    assert optimizer.stats().coded_parameters > 0
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.stats().coded_parameters == 0
    train(model, optimizer, 2)
    assert optimizer.stats().coded_parameters == 0


class Counting(torch.optim.RMSprop):
    """As MADGRAD: what it counts is in its state, and of no parameter."""

    def step(self, closure=None):
        self.state.setdefault("k", torch.tensor([0])).add_(1)
        return super().step(closure)


ANY = [
    (Counting, {"lr": 1e-3}),
    (torch.optim.RMSprop, {"lr": 1e-3}),
    (torch.optim.Adafactor, {"lr": 1e-2}),
    (torch.optim.NAdam, {"lr": 2e-3}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
    (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
]


def every_step(model, kind, arguments, *, exchange="auto", **options):
    return wrap(
        model, kind, warmup_steps=None, recipe=Recipe(exchange=exchange), wrapping={"schedule": onebit.Gradients()},
        **arguments, **options,
    )  # fmt: skip


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize(("kind", "arguments"), ANY)
def test_any_optimizer_takes_its_own_steps(kind, arguments, exchange):
    model, plain = Net(), Net()
    optimizer = every_step(model, kind, arguments, exchange=exchange)
    exact = kind(plain.parameters(), **arguments)
    start = float(cross_entropy(plain(batch(500)[0]), batch(500)[1]))
    train(model, optimizer, 80)
    for step in range(80):
        x, y = batch(step)
        exact.zero_grad()
        cross_entropy(plain(x), y).backward()
        for name, p in plain.named_parameters():
            if p.grad is not None:
                p.grad = world.allreduce(p.grad, name=f"exact.{name}")
        exact.step()
    assert_replicas_equal(model)
    optimizer.check_replicas()
    found, expected = (float(cross_entropy(m(batch(500)[0]), batch(500)[1])) for m in (model, plain))
    assert expected < start - 0.3
    assert abs(found - expected) < 0.25 * (start - expected)


@pytest.mark.parametrize("steps", [3, EXACT_FIRST + 5])
@pytest.mark.parametrize(("kind", "arguments"), ANY)
def test_checkpoints_of_any_optimizer(kind, arguments, steps, tmp_path):
    folder = Path(world.broadcast_object(str(tmp_path), root_rank=0, name="folder"))
    model, again = Net(), Net(seed=1)
    optimizer = every_step(model, kind, arguments)
    train(model, optimizer, steps)
    onebit.save_checkpoint(folder, model, optimizer)
    resumed = every_step(again, kind, arguments)
    onebit.load_checkpoint(folder, again, resumed)
    plain = kind(Net().parameters(), **arguments)
    plain.load_state_dict(optimizer.state_dict())
    for of, with_ in ((model, optimizer), (again, resumed)):
        train(of, with_, 4, start=steps)
        assert_replicas_equal(of)
    assert torch.equal(weights(model), weights(again))


@pytest.mark.parametrize("other", ["exact", "four_bit"])
def test_workers_whose_warm_ups_differ(other):
    model = Net()
    optimizer = wrap(model, warmup_steps=60, recipe=Recipe(warmup="three_bit" if RANK == 0 else other))
    with pytest.raises(DesyncError, match=f"the recipe's warmup differs between workers: three_bit .* {other} on"):
        train(model, optimizer, EXACT_FIRST + 2)


def test_an_optimizer_whose_step_needs_several_gradients():
    with pytest.raises(UnsupportedError, match="LBFGS computes gradients several times"):
        every_step(Net(), torch.optim.LBFGS, {"lr": 1.0})


@pytest.mark.parametrize("broadcast", [world.broadcast_optimizer_state, onebit.broadcast_optimizer_state])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(("kind", "arguments"), ANY[1:])  # Horovod's does not send what is of no parameter
def test_a_broadcast_to_workers_without_state(kind, arguments, fresh, broadcast):
    """At the start, or where one worker has loaded what was saved."""
    model, before = Net(seed=RANK), Net()
    optimizer = every_step(model, kind, arguments)
    saved = every_step(before, kind, arguments)
    train(before, saved, 3)
    if RANK == 0 and not fresh:
        optimizer.load_state_dict(saved.state_dict())
    world.broadcast_parameters(model.state_dict(), root_rank=0)
    start = weights(model)
    broadcast(optimizer, root_rank=0)
    assert torch.equal(weights(model), start)
    assert optimizer.stats().step == (0 if fresh else 3)
    train(model, optimizer, EXACT_FIRST + 4)
    assert_replicas_equal(model)
    optimizer.check_replicas()


class Fails(Net):
    """Its last worker cannot load."""

    fails = False

    def get_extra_state(self):
        return {"kept": True}

    def set_extra_state(self, state):
        if self.fails and RANK == SIZE - 1:
            raise ValueError("cannot be loaded")


def test_a_checkpoint_that_cannot_be_loaded_changes_nothing(tmp_path):
    folder = Path(world.broadcast_object(str(tmp_path), root_rank=0, name="folder"))
    model = Fails()
    optimizer = wrap(model, warmup_steps=100, recipe=THREE)
    train(model, optimizer, EXACT_FIRST + 5)
    onebit.save_checkpoint(folder, model, optimizer)
    train(model, optimizer, 2, start=20)
    before = weights(model)
    model.fails = True
    with pytest.raises(CheckpointError):
        onebit.load_checkpoint(folder, model, optimizer)
    assert torch.equal(weights(model), before)
    train(model, optimizer, EXACT_FIRST + 2, start=30)
    assert_replicas_equal(model)


def test_any_optimizer_disagrees_about_its_rate():
    model = Net()
    optimizer = every_step(model, torch.optim.RMSprop, {"lr": 1e-3 * (1 + RANK)})
    with pytest.raises(DesyncError, match="learning rate of group 0"):
        train(model, optimizer, 1)


def test_any_optimizer_has_no_number_of_exact_steps():
    with pytest.raises(ConfigurationError, match=r"Gradients.*warmup_steps=5"):
        wrap(Net(), torch.optim.RMSprop, 5, Recipe(), {"schedule": onebit.Gradients()}, lr=1e-3)


def test_wrapped_again_without_the_schedule_a_one_bit_run_begins():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    named = list(model.named_parameters())
    ours = onebit.DistributedOptimizer(optimizer, named, schedule=onebit.Gradients())
    train(model, ours, EXACT_FIRST + 5)
    again = onebit.DistributedOptimizer(optimizer, named, warmup_steps=4)
    train(model, again, 10, start=30)
    assert again.stats().phase == "compressed"
    back = onebit.DistributedOptimizer(optimizer, named, schedule=onebit.Gradients())
    train(model, back, EXACT_FIRST + 5, start=50)
    assert_replicas_equal(model)


# -- messages that leave during the backward pass ---------------------------------------------------------------------


def under_way(optimizer):
    """How many messages of this step have been sent."""
    return len(optimizer._gradients.coded._mean.engine._sent)


def computed(model, optimizer, step):
    optimizer.zero_grad()
    x, y = batch(step)
    cross_entropy(model(x), y).backward()


def begun(exchange, steps=EXACT_FIRST + 5, **wrapping):
    """A run in which messages leave early, unless it is told otherwise."""
    model = Net()
    recipe = Recipe(warmup="three_bit", exchange=exchange, bucket_size=2048)
    optimizer = wrap(model, warmup_steps=60, recipe=recipe, wrapping=wrapping)
    train(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("late", ["no worker", "one worker"])
def test_the_same_weights_with_and_without_overlap(exchange, late):
    model, optimizer = begun(exchange, overlap=late == "no worker" or RANK > 0)
    computed(model, optimizer, EXACT_FIRST + 5)
    assert (under_way(optimizer) > 1) == (late == "no worker" or RANK > 0)
    optimizer.step()
    assert under_way(optimizer) == 0
    without, plain = begun(exchange, overlap=False)
    computed(without, plain, EXACT_FIRST + 5)
    assert under_way(plain) == 0
    plain.step()
    assert torch.equal(weights(model), weights(without))
    assert_replicas_equal(model)


def double_in_place(model, optimizer):
    model.first.weight.grad.mul_(2)


def replace_gradient(model, optimizer):
    model.first.weight.grad = model.first.weight.grad * 2


def spoil_gradient(model, optimizer):
    model.first.weight.grad.fill_(float("nan"))


def freeze(model, optimizer):
    model.first.weight.requires_grad = False


def load(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def accumulate(model, optimizer):
    optimizer.set_backward_passes_per_step(1)


def rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + RANK)


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize(
    ("change", "everywhere"),
    [
        (double_in_place, True), (double_in_place, False), (replace_gradient, True), (replace_gradient, False),
        (spoil_gradient, False), (freeze, True), (load, True), (accumulate, True), (rate, True),
    ],
)  # fmt: skip
def test_what_changes_after_messages_have_left(change, everywhere, exchange):
    model, optimizer = begun(exchange)
    for step in range(EXACT_FIRST + 5, EXACT_FIRST + 8):
        computed(model, optimizer, step)
        before = weights(model)
        if everywhere or RANK == 0:
            change(model, optimizer)
        with pytest.raises(DesyncError, match="learning rate") if change is rate else nullcontext():
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-3
        assert torch.equal(weights(model), before) == (change in (rate, spoil_gradient))
        assert under_way(optimizer) == 0
        assert_replicas_equal(model)
    train(model, optimizer, 60, start=EXACT_FIRST + 8)
    assert optimizer.phase.value == "compressed"
    assert_replicas_equal(model)


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("same_size", [True, False])
def test_workers_of_which_one_computes_some_gradients_only(same_size, exchange):
    """What it has sent waits for the layers after it, whose gradients it does not have; buckets may be of one size."""
    model, optimizer = begun(exchange)
    if same_size:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(5)))
        optimizer = wrap(model, warmup_steps=60, recipe=Recipe(warmup="three_bit", exchange=exchange, bucket_size=4096))
    parts = list(model.children())
    for step in range(20):
        optimizer.zero_grad()
        x = batch(step)[0]
        x = torch.cat([x, x], 1) if same_size else x
        whole = model(x) if RANK == 0 or step < 15 else parts[0](x)
        whole.square().mean().backward()
        optimizer.step()
        assert_replicas_equal(model)
    alike = [float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None]
    assert len({str(found) for found in world.allgather_object(alike)}) == 1


def test_clipping_after_messages_have_left():
    model, optimizer = begun("direct")
    for step in range(EXACT_FIRST + 5, EXACT_FIRST + 9):
        computed(model, optimizer, step)
        assert under_way(optimizer) > 1
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        assert_replicas_equal(model)


@pytest.mark.parametrize("call", ["step", "synchronize", "clip_grad_norm_", "passes", "check_replicas", "load"])
@pytest.mark.parametrize("warmup", ["three_bit", "exact"])
def test_nan_written_over_a_gradient_that_has_left_does_no_lasting_harm(warmup, call):
    """Over one bit, too: the residual of that parameter is lost, and nothing else."""
    model = Net()
    recipe = Recipe(warmup=warmup, exchange="direct", bucket_size=2048)
    optimizer = wrap(model, warmup_steps=60 if warmup == "three_bit" else 2, recipe=recipe)
    train(model, optimizer, EXACT_FIRST + 5)
    computed(model, optimizer, EXACT_FIRST + 5)
    engine = optimizer._gradients.coded._mean.engine if warmup == "three_bit" else optimizer._compressor.engine
    assert len(engine._sent) > 1
    if RANK == 0:
        model.first.weight.grad.fill_(float("nan"))
    with suppress(ConfigurationError, DesyncError):  # as they may
        if call == "synchronize":
            optimizer.synchronize()
        elif call == "clip_grad_norm_":
            optimizer.clip_grad_norm_(1.0)
        elif call == "passes":
            optimizer.set_backward_passes_per_step(1)
        elif call == "check_replicas" and RANK == 0:
            optimizer.check_replicas()
        elif call == "load":
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    before = optimizer.stats().step
    train(model, optimizer, 5, start=EXACT_FIRST + 6)
    assert optimizer.stats().step == before + 5
    assert all(bool(torch.isfinite(torch.from_numpy(found)).all()) for found in engine.feedback.state_dict().values())
    assert_replicas_equal(model)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adafactor])
def test_the_recipe_exact_never_compresses(kind):
    """Whatever the optimizer, and the warm-up that other recipes would have."""
    model, plain = Net(), Net()
    optimizer, own = wrap(model, kind, warmup_steps=3, recipe="exact"), kind(plain.parameters(), lr=1e-3)
    train(model, optimizer, 9)
    for step in range(9):
        own.zero_grad()
        x, y = batch(step)
        cross_entropy(plain(x), y).backward()
        for p in plain.parameters():
            if p.grad is not None:
                p.grad = world.allreduce(p.grad, name="mean")
        own.step()
    torch.testing.assert_close(weights(model), weights(plain), atol=0 if SIZE == 2 else 1e-6, rtol=0)
    assert_replicas_equal(model)
    stats = optimizer.stats()
    assert stats.phase == "warmup"
    assert stats.ratio_to_fp32 == 1.0


@pytest.mark.parametrize(("first", "then"), [("robust", "exact"), ("exact", "robust"), ("exact", "exact")])
def test_a_checkpoint_goes_on_with_the_recipe_exact_and_back(first, then, tmp_path):
    folder = Path(world.broadcast_object(str(tmp_path), root_rank=0, name="folder"))
    model, again = Net(), Net(seed=1)
    optimizer = wrap(model, recipe=first)
    train(model, optimizer, 9)
    onebit.save_checkpoint(folder, model, optimizer)
    resumed = wrap(again, recipe=then)
    onebit.load_checkpoint(folder, again, resumed)
    assert torch.equal(weights(model), weights(again))
    train(again, resumed, 9, start=9)
    assert_replicas_equal(again)
    assert resumed.phase == ("warmup" if then == "exact" else "compressed")
    if first == then:
        train(model, optimizer, 9, start=9)
        assert torch.equal(weights(model), weights(again))


def test_the_recipe_exact_has_no_schedule():
    with pytest.raises(ConfigurationError, match=r"recipe='exact' never compresses, and schedule=ZeroOne"):
        wrap(Net(), warmup_steps=None, recipe="exact", wrapping={"schedule": onebit.ZeroOne()})
    with pytest.raises(ConfigurationError, match=r"warmup_steps=0"):
        wrap(Net(), warmup_steps=0, recipe="exact")


class Noisy(torch.optim.SGD):
    """Langevin dynamics: the noise of each worker is its own."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn(p.shape, generator=self.generator), alpha=1e-3)


@pytest.mark.parametrize("wrapping", [{"schedule": onebit.Gradients()}, {"recipe": "exact"}])
@pytest.mark.parametrize("alike", [True, False])
def test_a_step_that_draws_random_numbers_of_its_own_is_found(alike, wrapping):
    model = Net()
    plain = Noisy(model.parameters(), lr=1e-2)
    plain.generator = torch.Generator().manual_seed(0 if alike else RANK)
    optimizer = onebit.DistributedOptimizer(plain, list(model.named_parameters()), **wrapping)
    if alike:
        train(model, optimizer, 3)
        assert_replicas_equal(model)
        state = copy.deepcopy(optimizer.state_dict())
        plain.generator.manual_seed(RANK)
        again = onebit.DistributedOptimizer(plain, list(model.named_parameters()), **wrapping)
        again.load_state_dict(state)
        optimizer = again
    with pytest.raises(DesyncError, match=r"draws random numbers"):
        train(model, optimizer, 2, start=3)


@pytest.mark.parametrize("rows", [96, 32])
@pytest.mark.parametrize("wrapping", [{"warmup_steps": 40}, {"schedule": onebit.Gradients()}])
def test_a_vocabulary_that_grows_or_shrinks_in_place(wrapping, rows):
    """Its state with it, as a plain AdamW takes it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(48, 40), torch.nn.Linear(40, 40))
    table = model[0].weight
    optimizer = onebit.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model.named_parameters(), **wrapping)
    coded, random = [], torch.Generator().manual_seed(RANK)
    for step in range(30):
        if step == 14:
            table.grad, table.data = None, _resized(table.data, rows)
            state = optimizer.state[table]
            state.update({key: _resized(state[key], rows) for key in ("exp_avg", "exp_avg_sq")})
        optimizer.zero_grad()
        model(torch.randint(0, min(48, len(table)), (32,), generator=random)).square().mean().backward()
        optimizer.step()
        coded.append(optimizer.stats().coded_parameters)
    assert_replicas_equal(model)
    assert coded[13] == 48 * 40 + 40 * 40
    assert coded[14] == 40 * 40
    assert coded[-1] == rows * 40 + 40 * 40


def _resized(tensor, rows):
    found = torch.zeros(rows, tensor.shape[1])
    found[: len(tensor)] = tensor[:rows]
    return found

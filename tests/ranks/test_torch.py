"""The PyTorch face on real ranks: warm-up, compression, the user's loop."""

import copy
import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit import Recipe
from horovod_onebit.warmup import Phase
from tests.ranks.torch_common import (
    DEVICE,
    OPTIMIZERS,
    RANK,
    SIZE,
    Net,
    assert_replicas_equal,
    batch,
    train,
    two_ranks_only,
    weights,
    wrap,
)
from tests.ranks.world import needs_horovod, world

# -- warm-up is Horovod's ---------------------------------------------------------------------------------------------

WRAPPINGS = [
    {},
    {"compression": world.Compression.fp16},
    {"groups": 2},
    {"gradient_predivide_factor": 2.0},
    {"op": world.Sum},
    {"backward_passes_per_step": 2},
]


@needs_horovod
@two_ranks_only
@pytest.mark.parametrize(("kind", "arguments"), OPTIMIZERS)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_warm_up_equals_horovod_bit_for_bit(kind, arguments, wrapping):
    results = []
    for ours in (False, True):
        model = Net()
        groups = [
            {"params": [p for n, p in model.named_parameters() if "bias" in n and p.requires_grad], "lr": 3e-4},
            {"params": [p for n, p in model.named_parameters() if "bias" not in n and p.requires_grad]},
        ]
        optimizer = kind(groups, **arguments)
        named = list(model.named_parameters())
        if ours:
            recipe = Recipe(warmup="exact")
            optimizer = onebit.DistributedOptimizer(
                optimizer, named_parameters=named, recipe=recipe, warmup_steps=50, **wrapping
            )
        else:
            optimizer = world.DistributedOptimizer(optimizer, named_parameters=named, **wrapping)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        passes = wrapping.get("backward_passes_per_step", 1)
        train(model, optimizer, 12, passes=passes, scheduler=scheduler, set_to_none=None)
        results.append(weights(model))
    assert torch.equal(*results)


# -- compression ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "arguments"), OPTIMIZERS)
def test_replicas_stay_equal_for_300_steps_and_the_loss_falls(kind, arguments):
    model = Net()
    optimizer = wrap(model, kind, warmup_steps=20, **arguments)
    train(model, optimizer, 20)
    assert optimizer.phase is Phase.COMPRESSED
    before = optimizer.stats().bytes_sent
    start = train(model, optimizer, 1, start=20)
    end = train(model, optimizer, 279, start=21)
    assert_replicas_equal(model)
    assert end < 0.7 * start
    stats = optimizer.stats()
    assert stats.step == 300
    small = 4 * (stats.parameters - stats.compressed_parameters)
    ring = 2 * (SIZE - 1) / SIZE
    assert stats.step_bytes_sent <= (SIZE - 1) * 1.1 * stats.compressed_parameters / 8 + ring * small + 2
    assert stats.bytes_sent == before + 280 * stats.step_bytes_sent
    assert 0 < stats.error_to_momentum < 50
    assert "compressed" in str(stats)


@pytest.mark.parametrize("recipe", ["paper", "fixed", Recipe(exchange="two_stage"), Recipe(block_size=64, scale="rms")])
def test_every_recipe_keeps_replicas_equal(recipe):
    model = Net()
    optimizer = wrap(model, warmup_steps=30, recipe=recipe)
    train(model, optimizer, 80)
    w = weights(model)
    gathered = world.allgather(w[None], name="weights.recipe")
    assert all(torch.equal(row, gathered[0]) for row in gathered)
    assert optimizer.phase is Phase.COMPRESSED


def test_groups_keep_their_own_hyperparameters():
    """A group with lr 0 must not move, and one with maximize must move the other way."""
    outcomes = []
    for maximize in (False, True):
        still, moving = (torch.nn.Parameter(torch.zeros(2000)) for _ in range(2))
        groups = [{"params": [still], "lr": 0.0}, {"params": [moving], "lr": 0.01, "maximize": maximize}]
        optimizer = torch.optim.Adam(groups)
        named = [("still", still), ("moving", moving)]
        optimizer = onebit.DistributedOptimizer(optimizer, named_parameters=named, warmup_steps=1)
        signs = torch.randn(2000, generator=torch.Generator(DEVICE).manual_seed(1))
        for _ in range(4):
            optimizer.zero_grad()
            ((still + moving) * signs).sum().backward()
            optimizer.step()
        assert not still.any()
        outcomes.append(moving.detach().clone())
    torch.testing.assert_close(outcomes[0], -outcomes[1])


def test_sum_is_average_times_workers():
    """With op=Sum both the gradient and the frozen second moment grow by n, so Adam moves alike (eps apart)."""
    results = []
    for op in (world.Average, world.Sum):
        model = Net()
        optimizer = wrap(model, warmup_steps=3, wrapping={"op": op}, eps=1e-16)
        train(model, optimizer, 10)
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


# -- the user's loop --------------------------------------------------------------------------------------------------


@two_ranks_only
@pytest.mark.parametrize("set_to_none", [True, False, None])
def test_zero_grad(set_to_none):
    model, reference = Net(), Net()
    train(model, wrap(model), 12, set_to_none=set_to_none)
    train(reference, wrap(reference), 12)
    assert torch.equal(weights(model), weights(reference))


@two_ranks_only
def test_gradients_made_in_a_closure_are_synchronized():
    model = Net()
    optimizer = wrap(model)
    for step in range(10):

        def closure(step=step):
            optimizer.zero_grad()
            x, y = batch(step)
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) > 0
    reference = Net()
    train(reference, wrap(reference), 10)
    assert torch.equal(weights(model), weights(reference))
    assert_replicas_equal(model)


def test_a_gradient_on_one_rank_only_counts_as_zero_elsewhere():
    model = Net()
    optimizer = wrap(model)
    for step in range(12):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = cross_entropy(model(x), y)
        if RANK == 0:
            loss = loss + model.unused.square().sum()
        loss.backward()
        optimizer.step()
    assert_replicas_equal(model)
    assert float(model.unused.detach().mean()) < 0.999


@pytest.mark.parametrize(
    "wrapping",
    [
        {"recipe": "exact"},
        {"warmup_steps": 4},
        {"schedule": onebit.Gradients()},
        {"schedule": onebit.Local(every=2, freeze=4)},
        {"schedule": onebit.ZeroOne(var_freeze_step=6, var_update_scaler=2, local_step_scaler=2, local_step_clipper=2)},
    ],
)
def test_gradients_whose_elements_share_memory(wrapping):
    """As ``torch.autograd.grad`` gives them for a sum."""
    trained = []
    for shared in (True, False):
        model = torch.nn.Linear(40, 40)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = onebit.DistributedOptimizer(optimizer, model.named_parameters(), **wrapping)
        for step in range(12):
            optimizer.zero_grad()
            for p in model.parameters():
                grad = torch.full((1,) * p.dim(), 1.0 + step + RANK).expand(p.shape)
                p.grad = grad if shared else grad.clone(memory_format=torch.contiguous_format)
            optimizer.step()
        optimizer.flush()
        trained.append(model.weight.detach())
    assert torch.equal(*trained)
    assert float(trained[0].max()) < 1


def test_freezing_and_unfreezing():
    model = Net()
    optimizer = wrap(model, warmup_steps=4)
    train(model, optimizer, 8)
    model.second.weight.requires_grad_(False)
    before = model.second.weight.detach().clone()
    train(model, optimizer, 4, start=8)
    assert torch.equal(before, model.second.weight)
    model.second.weight.requires_grad_(True)
    train(model, optimizer, 6, start=12)
    assert not torch.equal(before, model.second.weight)
    assert_replicas_equal(model)


def test_a_group_added_later_warms_up_and_is_compressed():
    model = Net()
    optimizer = wrap(model, warmup_steps=3)
    train(model, optimizer, 6)
    compressed = optimizer.stats().compressed_parameters
    late = torch.nn.Parameter(torch.full((32, 64), float(RANK == 0)))
    world.broadcast_(late.data, 0, name="late")  # unnamed, Horovod counts the calls of each worker
    optimizer.add_param_group({"params": [late], "lr": 1e-2})
    for step in range(6):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = cross_entropy(model(x), y) + (late * torch.randn_like(late)).sum() + late.square().sum()
        loss.backward()
        optimizer.step()
        expected = compressed + (late.numel() if step >= 2 else 0)
        assert optimizer.stats(norms=False).compressed_parameters == expected
    assert_replicas_equal(model)
    assert torch.equal(*world.allgather(late.detach()[None], name="late")[:2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_trained_with_float32_state(dtype):
    model = Net().to(dtype)
    optimizer = wrap(model)
    for step in range(12):
        optimizer.zero_grad()
        x, y = batch(step)
        cross_entropy(model(x.to(dtype)).float(), y).backward()
        optimizer.step()
    assert_replicas_equal(model)
    assert optimizer.state[model.first.weight]["exp_avg"].dtype is torch.float32
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert optimizer.state[model.first.weight]["exp_avg"].dtype is torch.float32


def test_channels_last_weights():
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(4, 64, 3), torch.nn.Flatten(), torch.nn.Linear(2304, 10))
        model = model.to(memory_format=memory_format)
        optimizer = wrap(model, warmup_steps=2, recipe=Recipe(block_size=None))
        for step in range(8):
            generator = torch.Generator().manual_seed(10 * step + RANK)
            x = torch.randn(8, 4, 8, 8, generator=generator, device="cpu").to(DEVICE).to(memory_format=memory_format)
            optimizer.zero_grad()
            cross_entropy(model(x), x.mean((1, 2, 3)).gt(0).long()).backward()
            optimizer.step()
        results.append(weights(model))
        assert_replicas_equal(model)
    # One scale for each tensor, so the order of its elements matters to rounding only.
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


def test_grad_scaler_with_an_infinity_on_one_rank():
    model = Net()
    optimizer = wrap(model, warmup_steps=5)
    train(model, optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(10):
        optimizer.zero_grad()
        x, y = batch(step)
        if step in (1, 6) and RANK == SIZE - 1:
            x = x * float("inf")
        before = weights(model)
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, weights(model)) == (step in (1, 6))
    assert_replicas_equal(model)
    assert optimizer.stats().skipped_steps == 2
    assert optimizer.stats().step == 10


@pytest.mark.parametrize("synchronize", [True, False])
def test_the_optimizers_clipping_with_a_grad_scaler(synchronize):
    """A power of two as the loss's scale changes no bit."""

    def run(scale):
        model = Net()
        optimizer = wrap(model, warmup_steps=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        norms = []
        for step in range(10):
            optimizer.zero_grad()
            x, y = batch(step)
            scaler.scale(cross_entropy(model(x), y)).backward()
            if synchronize:
                optimizer.synchronize()
            scaler.unscale_(optimizer)
            norms.append(optimizer.clip_grad_norm_(0.5))
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert_replicas_equal(model)
        return norms, weights(model)

    (norms, plain), (norms_scaled, scaled) = run(1.0), run(256.0)
    assert norms == norms_scaled
    assert max(norms) > 0.5
    assert torch.equal(plain, scaled) or SIZE > 2  # the order of Horovod's sums


def test_hooks_of_the_optimizer_run_once_a_step():
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer, 4)
    assert calls == ["pre", "post"] * 4


def test_a_scheduler_made_before_wrapping_still_works():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer = onebit.DistributedOptimizer(optimizer, list(model.named_parameters()), warmup_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of PyTorch: that steps of the optimizer were left out
        train(model, optimizer, 4, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    assert optimizer.stats().step == 4
    assert isinstance(optimizer, torch.optim.AdamW)


def test_synchronize_then_clip_then_step():
    model = Net()
    optimizer = wrap(model, warmup_steps=3)
    for step in range(8):
        optimizer.zero_grad()
        x, y = batch(step)
        cross_entropy(model(x), y).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_replicas_equal(model)


@needs_horovod
def test_clipping_is_the_same_on_all_ranks():
    model, reference = Net(), Net()
    optimizer = wrap(model, torch.optim.SGD, lr=1.0, warmup_steps=3)
    stock = world.DistributedOptimizer(torch.optim.SGD(reference.parameters(), 1.0), list(reference.named_parameters()))
    for step in range(8):
        for net, own in ((model, optimizer), (reference, stock)):
            own.zero_grad()
            x, y = batch(step)
            cross_entropy(net(x), y).backward()
            if own is optimizer:
                norm = optimizer.clip_grad_norm_(0.1)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    optimizer.step()
            elif step < 3:
                stock.synchronize()
                expected = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
                with stock.skip_synchronize():
                    stock.step()
                assert norm == pytest.approx(expected, rel=1e-5)
                torch.testing.assert_close(weights(model), weights(reference))
            else:
                stock.synchronize()
        assert len(set(world.allgather_object(norm))) == 1
    assert_replicas_equal(model)


def test_the_guards_of_horovod():
    model = Net()
    optimizer = wrap(model)
    x, y = batch(0)
    cross_entropy(model(x), y).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_weights_whose_memory_is_replaced_are_followed():
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 4)
    model.first.weight.data = model.first.weight.data.clone()
    before = model.first.weight.detach().clone()
    train(model, optimizer, 1, start=4)
    assert not torch.equal(before, model.first.weight)
    assert_replicas_equal(model)

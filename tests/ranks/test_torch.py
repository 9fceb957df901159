"""The PyTorch face on real ranks."""

import copy
import warnings

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError, DesyncError, NonFiniteError, Recipe, UnsupportedError
from horovod_onebit.warmup import Phase

hvd.init()
torch.set_num_threads(1)
RANK, SIZE = hvd.rank(), hvd.size()
two_ranks_only = pytest.mark.skipif(SIZE != 2, reason="float32 sums of more than two depend on Horovod's fusion")


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
    x = torch.randn(16, 32, generator=generator)
    return x, x[:, :10].argmax(1)


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


def assert_replicas_equal(model):
    w = weights(model)
    gathered = hvd.allgather(w[None], name="weights")
    assert torch.isfinite(w).all()
    assert all(torch.equal(row, gathered[0]) for row in gathered)


def wrap(model, kind=torch.optim.AdamW, warmup_steps=5, recipe="robust", wrapping=None, **arguments):
    optimizer = kind(model.parameters(), **({"lr": 1e-3} | arguments))
    named = list(model.named_parameters())
    return onebit.DistributedOptimizer(
        optimizer, named_parameters=named, warmup_steps=warmup_steps, recipe=recipe, **(wrapping or {})
    )


# -- warm-up is Horovod's ---------------------------------------------------------------------------------------------

OPTIMIZERS = [
    (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 1e-3, "maximize": False, "foreach": True}),
    (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {"lr": 0.1}),
]
WRAPPINGS = [
    {},
    {"compression": hvd.Compression.fp16},
    {"groups": 2},
    {"gradient_predivide_factor": 2.0},
    {"op": hvd.Sum},
    {"backward_passes_per_step": 2},
]


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
            optimizer = onebit.DistributedOptimizer(optimizer, named_parameters=named, warmup_steps=50, **wrapping)
        else:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, **wrapping)
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
    gathered = hvd.allgather(w[None], name="weights.recipe")
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
        signs = torch.randn(2000, generator=torch.Generator().manual_seed(1))
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
    for op in (hvd.Average, hvd.Sum):
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
    hvd.broadcast_(late.data, 0)
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
    assert torch.equal(*hvd.allgather(late.detach()[None], name="late")[:2])


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
            x = torch.randn(8, 4, 8, 8, generator=generator).to(memory_format=memory_format)
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
        warnings.simplefilter("ignore")
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


def test_clipping_is_the_same_on_all_ranks():
    model, reference = Net(), Net()
    optimizer = wrap(model, torch.optim.SGD, lr=1.0, warmup_steps=3)
    stock = hvd.DistributedOptimizer(torch.optim.SGD(reference.parameters(), 1.0), list(reference.named_parameters()))
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
        assert len(set(hvd.allgather_object(norm))) == 1
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


# -- state ------------------------------------------------------------------------------------------------------------


@two_ranks_only
@pytest.mark.parametrize(("kind", "arguments"), OPTIMIZERS[1:4])
@pytest.mark.parametrize("at", [3, 10])
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_a_resumed_run_continues_bit_for_bit(kind, arguments, at, exchange, tmp_path):
    recipe = Recipe(exchange=exchange)
    model = Net()
    optimizer = wrap(model, kind, warmup_steps=5, recipe=recipe, **arguments)
    train(model, optimizer, at)
    file = tmp_path / f"{RANK}.pt"
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "feedback": optimizer.feedback_state_dict(),
    }
    torch.save(saved, file)
    train(model, optimizer, 8, start=at)

    again = Net(seed=1)
    resumed = wrap(again, kind, warmup_steps=5, recipe=recipe, **arguments)
    loaded = torch.load(file, weights_only=True)
    again.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    resumed.load_feedback_state_dict(loaded["feedback"])
    assert resumed.stats(norms=False).step == at
    train(again, resumed, 8, start=at)
    assert torch.equal(weights(model), weights(again))


def test_a_plain_state_loads_and_warms_up():
    model = Net()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    plain.step()
    model.zero_grad()
    optimizer = wrap(model, warmup_steps=3)
    optimizer.load_state_dict(plain.state_dict())
    assert float(optimizer.state[model.first.weight]["step"]) == 1
    assert optimizer.phase is Phase.WARMUP
    train(model, optimizer, 5)
    assert optimizer.phase is Phase.COMPRESSED


def test_wrapping_keeps_state_and_defaults():
    model = Net()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.8, 0.9), eps=1e-5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    plain.step()
    moment = plain.state[model.first.weight]["exp_avg"].clone()
    optimizer = onebit.DistributedOptimizer(plain, list(model.named_parameters()), warmup_steps=3)
    assert torch.equal(optimizer.state[model.first.weight]["exp_avg"], moment)
    assert optimizer.defaults["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(("kind", "arguments"), [OPTIMIZERS[1], *OPTIMIZERS[3:]])
@pytest.mark.parametrize("broadcast", [hvd.broadcast_optimizer_state, onebit.broadcast_optimizer_state])
def test_broadcasting_a_fresh_state_moves_nothing(kind, arguments, broadcast):
    model = Net()
    optimizer = wrap(model, kind, **arguments)
    before = weights(model)
    broadcast(optimizer, root_rank=0)
    assert torch.equal(before, weights(model))
    assert optimizer.stats().step == 0
    train(model, optimizer, 8)
    assert_replicas_equal(model)


@pytest.mark.parametrize("steps", [2, 8])
def test_a_state_that_only_rank_0_has_reaches_all(steps):
    model = Net()
    first = wrap(model, warmup_steps=5)
    train(model, first, steps)
    state = copy.deepcopy(first.state_dict())
    optimizer = wrap(model, warmup_steps=5)
    if RANK == 0:
        optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = 0.125
    onebit.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.phase is first.phase
    for p in model.parameters():
        if p in first.state:
            assert torch.equal(optimizer.state[p]["exp_avg"], first.state[p]["exp_avg"])
    optimizer.param_groups[0]["lr"] = 1e-3
    train(model, optimizer, 6, start=steps)
    assert_replicas_equal(model)


# -- worlds -----------------------------------------------------------------------------------------------------------


def test_two_optimizers_in_one_process_do_not_mix_up():
    models = [Net(seed=1), Net(seed=2)]
    optimizers = [wrap(models[0]), wrap(models[1], torch.optim.SGD, lr=0.01)]
    for step in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = batch(step)
        sum(cross_entropy(model(x), y) for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()
    for model in models:
        assert_replicas_equal(model)


def test_wrapping_again_takes_the_parameters_over():
    model = Net()
    old = wrap(model)
    train(model, old, 2)
    new = wrap(model)
    train(model, new, 8)
    assert_replicas_equal(model)
    with pytest.raises(ConfigurationError, match="built later"):
        old.step()


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_nan_on_one_rank_is_skipped_by_all(exchange):
    model = Net()
    optimizer = wrap(model, warmup_steps=3, recipe=Recipe(exchange=exchange))
    train(model, optimizer, 6)
    before, owed = weights(model), optimizer.feedback_state_dict()
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters() if p.requires_grad]
    x, y = batch(6)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    if RANK == SIZE - 1:
        model.second.weight.grad[3, 5] = float("nan")
    optimizer.step()
    assert torch.equal(before, weights(model))
    after = [optimizer.state[p]["exp_avg"] for p in model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    for name, value in optimizer.feedback_state_dict().items():
        torch.testing.assert_close(value, owed[name], atol=1e-5, rtol=0)
    assert optimizer.stats().skipped_steps == 1
    train(model, optimizer, 5, start=7)
    assert_replicas_equal(model)


def test_nan_raises_on_all_when_asked_to():
    model = Net()
    optimizer = wrap(model, warmup_steps=2, recipe=Recipe(on_nonfinite="raise"))
    train(model, optimizer, 4)
    x, y = batch(6)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    if RANK == 0:
        model.first.weight.grad[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"worker \[0\]"):
        optimizer.step()


@pytest.mark.parametrize("what", ["recipe", "names", "shape"])
def test_ranks_that_disagree_are_told(what):
    wide = 48 if what == "shape" and RANK else 40
    big = torch.nn.Parameter(torch.zeros(wide, 60))
    small = torch.nn.Parameter(torch.zeros(3))
    recipe = Recipe(scale="rms" if what == "recipe" and RANK else "guarded")
    name = "other" if what == "names" and RANK else "big"
    optimizer = torch.optim.AdamW([big, small])
    named = [(name, big), ("small", small)]
    optimizer = onebit.DistributedOptimizer(optimizer, named, warmup_steps=1, recipe=recipe)
    compressor = optimizer._compressor
    for p in (big, small):
        p.grad = torch.ones_like(p)
        compressor.exact_steps[p] = 1
    compressor._mature()
    with pytest.raises(DesyncError, match="recipe, or the compressed parameters"):
        optimizer.step()


# -- refusals, before any collective ----------------------------------------------------------------------------------


def two_parameters(dtype=torch.float32):
    return [torch.nn.Parameter(torch.zeros(10, dtype=dtype)) for _ in range(2)]


class OwnStep(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: torch.optim.Adam(p, amsgrad=True), "without amsgrad"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "without capturable"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "without differentiable"),
        (lambda p: torch.optim.RMSprop(p), "torch.optim.Adam, AdamW, SGD"),
        (lambda p: OwnStep(p), "must not override step"),
    ],
)
def test_optimizers_that_have_no_one_bit_form(build, message):
    with pytest.raises(UnsupportedError, match=message):
        onebit.DistributedOptimizer(build(two_parameters()), warmup_steps=10)


def test_other_refusals():
    p = two_parameters()
    named = [("a", p[0]), ("b", p[1])]

    def attempt(optimizer=None, named_parameters=named, **arguments):
        optimizer = torch.optim.AdamW(p) if optimizer is None else optimizer
        return onebit.DistributedOptimizer(optimizer, named_parameters, **({"warmup_steps": 10} | arguments))

    refused = [
        (ConfigurationError, "unique. Found duplicates: a", {"named_parameters": [("a", p[0]), ("a", p[1])]}),
        (ConfigurationError, "not named", {"named_parameters": named[:1]}),
        (ConfigurationError, "tuples", {"named_parameters": p}),
        (UnsupportedError, "hvd.Average or hvd.Sum", {"op": hvd.Adasum}),
        (ConfigurationError, "backward_passes_per_step", {"backward_passes_per_step": 0}),
        (ConfigurationError, "recipe=", {"recipe": "fast"}),
        (ConfigurationError, "groups", {"groups": "all"}),
        (ConfigurationError, "only appear once", {"groups": [[p[0]], [p[0]]]}),
        (ConfigurationError, "needs op", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
    ]
    refused += [(ConfigurationError, "warmup_steps", {"warmup_steps": n}) for n in (0, -1, 1.5, True, "auto")]
    for kind, message, arguments in refused:
        with pytest.raises(kind, match=message):
            attempt(**arguments)
    with pytest.raises(ConfigurationError, match="already"):
        attempt(attempt())
    with pytest.raises(ConfigurationError, match="plain torch"):
        attempt(hvd.DistributedOptimizer(torch.optim.AdamW(p), named_parameters=named))
    c = two_parameters(torch.complex64)
    with pytest.raises(UnsupportedError, match="complex64"):
        attempt(torch.optim.SGD(c, lr=0.1), [("a", c[0]), ("b", c[1])])


def test_sparse_gradients():
    for dense in (False, True):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(100, 30, sparse=True)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        named = list(embedding.named_parameters())
        optimizer = onebit.DistributedOptimizer(optimizer, named, warmup_steps=2, sparse_as_dense=dense)
        for _ in range(5):
            optimizer.zero_grad()
            loss = embedding(torch.tensor([1, 2, 3 + RANK])).square().sum()
            if dense:
                loss.backward()
                optimizer.step()
            else:
                with pytest.raises(UnsupportedError, match="sparse_as_dense=True"):
                    loss.backward()
                break
        if dense:
            assert_replicas_equal(embedding)


def test_the_collectives_are_what_they_say():
    from horovod_onebit.torch.collectives import HorovodCollectives

    world = HorovodCollectives()
    own = np.full(3, RANK, np.uint8)
    gathered = world.allgather(own, "check.gather").wait()
    assert gathered.tolist() == [r for r in range(SIZE) for _ in range(3)]
    parts = np.array([10 * RANK + j for j in range(SIZE)], np.uint8)
    assert world.alltoall(parts, "check.alltoall").wait().tolist() == [10 * i + RANK for i in range(SIZE)]
    total = world.allreduce(np.full(2, RANK + 1, np.float32), "check.sum").wait()
    assert total.tolist() == [SIZE * (SIZE + 1) / 2] * 2

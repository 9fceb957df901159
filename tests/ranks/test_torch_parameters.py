"""The PyTorch face on real ranks: parameters that are never compressed, very many parameters, and what an optimizer is
not: copied, pickled, or traced by a compiler."""

import copy
import gc
import inspect
import pickle
import sys
import threading
import weakref

import pytest
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError, DesyncError, Recipe, UnsupportedError
from horovod_onebit.warmup import Phase
from tests.ranks.torch_common import DEVICE, RANK, SIZE, Net, assert_replicas_equal, batch, train, weights, wrap

# -- never compressed -------------------------------------------------------------------------------------------------


class Words(torch.nn.Module):
    """Row 0 of the embedding has no gradient, ever."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(200, 16, padding_idx=0)
        self.hidden = torch.nn.Linear(16, 128)
        self.last = torch.nn.Linear(128, 10)

    def forward(self, words):
        return self.last(torch.relu(self.hidden(self.embedding(words).mean(1))))


def read(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + RANK)
        words = torch.randint(0, 200, (16, 8), generator=generator, device="cpu").to(DEVICE)
        cross_entropy(model(words), words[:, 0] % 10).backward()
        optimizer.step()


def padding(model):
    return model.embedding.weight.detach()[0]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, onebit.LAMB])
@pytest.mark.parametrize("exact", [["embedding.weight"], ("embed*",), iter(["embedding.weight"])])
def test_elements_without_gradients_stay_where_they_are(kind, exact):
    if not isinstance(exact, (list, tuple)):
        exact = iter(["embedding.weight"])
    model = Words()
    optimizer = wrap(model, kind, lr=0.01, warmup_steps=3, wrapping={"exact": exact})
    read(model, optimizer, 12)
    assert optimizer.phase is Phase.COMPRESSED
    assert optimizer.stats().compressed_parameters == 16 * 128 + 128 * 10
    assert not padding(model).any()
    assert model.embedding.weight[1:].any()
    assert_replicas_equal(model)


def test_a_group_that_stays_exact():
    model = Words()
    parts = [{"params": [*model.hidden.parameters(), *model.last.parameters()]}]
    optimizer = onebit.DistributedOptimizer(
        torch.optim.AdamW(parts, lr=0.01), list(model.named_parameters()), warmup_steps=3
    )
    read(model, optimizer, 5)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.add_param_group({"params": model.embedding.parameters(), "exact": True})
    read(model, optimizer, 8)
    assert model.embedding.weight not in optimizer._parameters.bindings
    assert not padding(model).any()

    def again(exact):
        other = Words()
        rest = {"params": [*other.hidden.parameters(), *other.last.parameters()]}
        groups = [rest, {"params": list(other.embedding.parameters())} | ({"exact": True} if exact else {})]
        return other, onebit.DistributedOptimizer(
            torch.optim.AdamW(groups, lr=0.01), list(other.named_parameters()), warmup_steps=3
        )

    state = copy.deepcopy(optimizer.state_dict())
    assert state["param_groups"][1]["exact"] is True
    for with_option, without in ((True, False), (False, True)):  # in the state, or only in the optimizer
        saved = copy.deepcopy(state)
        if not with_option:
            del saved["param_groups"][1]["exact"]
        other, resumed = again(exact=without)
        resumed.load_state_dict(saved)
        assert resumed.param_groups[1]["exact"] is True
        read(other, resumed, 4)
        assert resumed.phase is Phase.COMPRESSED
        assert not padding(other).any()
        assert_replicas_equal(other)
    assert "exact" not in before["param_groups"][0]
    extra = torch.nn.Parameter(torch.zeros(2000))
    with pytest.raises(ConfigurationError, match="exact='yes'"):
        optimizer.add_param_group({"params": [extra], "exact": "yes"})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("named", [True, False])
def test_parameters_that_are_added_later_have_the_names_they_were_given(named):
    model = Words()
    parts = [*model.hidden.named_parameters(prefix="hidden"), *model.last.named_parameters(prefix="last")]
    plain = torch.optim.AdamW([p for _, p in parts] if named else parts, lr=0.01)
    wrapping = {"named_parameters": list(model.named_parameters())} if named else {}
    patterns = ["embed*"] if named else ["last*"]
    optimizer = onebit.DistributedOptimizer(plain, warmup_steps=2, exact=patterns, **wrapping)
    read(model, optimizer, 4)
    late = model.embedding.named_parameters(prefix="embedding")
    optimizer.add_param_group({"params": [p for _, p in late] if named else list(late)})
    read(model, optimizer, 4)
    assert "embedding.weight" in optimizer._parameters.names.values()
    assert (model.embedding.weight in optimizer._parameters.bindings) == (not named)
    assert (model.last.weight in optimizer._parameters.bindings) == named
    assert {name for _, name in optimizer._parameters.all_names()} <= {name for name, _ in model.named_parameters()}
    assert_replicas_equal(model)


def test_a_parameter_that_comes_back_is_refused_where_another_has_its_name():
    model = Words()
    plain = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    optimizer = onebit.DistributedOptimizer(plain, warmup_steps=2)
    heads = [torch.nn.Linear(64, 64, bias=False) for _ in range(2)]

    def add(head):
        optimizer.add_param_group({"params": list(head.named_parameters())})
        read(model, optimizer, 1)

    def remove(head):
        (group,) = (g for g in optimizer.param_groups if any(p is head.weight for p in g["params"]))
        optimizer.param_groups.remove(group)
        read(model, optimizer, 1)

    add(heads[0])
    remove(heads[0])
    add(heads[1])
    with pytest.raises(ConfigurationError, match="the name 'weight' is taken by another parameter"):
        add(heads[0])
    optimizer.param_groups.pop()
    read(model, optimizer, 6)
    assert_replicas_equal(model)


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_another_memory_format_gives_no_element_the_residual_of_another(exchange):
    """Those of elements that never have a gradient are zeros; with others' they would begin to move."""
    torch.manual_seed(0)
    model = torch.nn.Conv2d(16, 32, 3, bias=False)
    never = torch.rand(model.weight.shape, generator=torch.Generator(DEVICE).manual_seed(1)) < 0.5
    model.weight.register_hook(lambda grad: grad.masked_fill(never, 0))
    start = model.weight.detach().clone()
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    recipe = Recipe(exchange=exchange, block_size=64)
    optimizer = onebit.DistributedOptimizer(plain, model.named_parameters(), recipe=recipe, warmup_steps=4)

    def run(steps):
        for step in steps:
            generator = torch.Generator(DEVICE).manual_seed(10 * step + RANK)
            optimizer.zero_grad()
            model(torch.randn(4, 16, 6, 6, generator=generator)).square().mean().backward()
            optimizer.step()
        assert torch.equal(model.weight.detach()[never], start[never])
        assert_replicas_equal(model)

    run(range(16))
    model.to(memory_format=torch.channels_last)
    run(range(16, 60))
    model.to(memory_format=torch.contiguous_format)
    run(range(60, 80))
    assert not torch.equal(model.weight.detach()[~never], start[~never])


@pytest.mark.parametrize("how", ["name", "group"])
def test_workers_that_disagree_about_what_stays_exact(how):
    model = Words()
    optimizer = wrap(model, warmup_steps=3, wrapping={"exact": ["embed*"]} if how == "name" and RANK == 0 else {})
    if how == "group":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2000))], "exact": RANK == 0})
    with pytest.raises(DesyncError, match="is never compressed differs between workers: True on worker 0, False on"):
        read(model, optimizer, 1)


def test_a_state_of_an_optimizer_that_compressed_them():
    """Of SGD, which has no second moment: all elements move."""
    model = Words()
    first = wrap(model, torch.optim.SGD, warmup_steps=3, lr=0.01, momentum=0.9)
    read(model, first, 20)
    assert padding(model).any()
    state = copy.deepcopy(first.state_dict())
    other = Words()
    other.load_state_dict(model.state_dict())
    optimizer = wrap(
        other, torch.optim.SGD, warmup_steps=3, lr=0.01, momentum=0.9, wrapping={"exact": ["embedding.weight"]}
    )
    optimizer.load_state_dict(state)
    assert optimizer.phase is Phase.COMPRESSED
    before = other.embedding.weight.detach().clone()
    read(other, optimizer, 1)
    assert float((other.embedding.weight.detach() - before).abs().max()) < 0.05
    assert_replicas_equal(other)


@pytest.mark.parametrize(
    ("exact", "message"),
    [
        (["embeding.weight"], "'embeding.weight' matches no parameter; their names are embedding.weight, hidden"),
        ("embedding.weight", "expected names or patterns"),
        ([3], "expected names or patterns"),
        (7, "expected names or patterns"),
    ],
)
def test_patterns_that_stand_for_nothing(exact, message):
    with pytest.raises(ConfigurationError, match=message):
        wrap(Words(), wrapping={"exact": exact})


# -- many of them -----------------------------------------------------------------------------------------------------


def calls(action):
    """How many functions ``action`` calls on this thread, which does not depend on how busy the machine is."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    assert threading.current_thread() is threading.main_thread()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def work(number, groups):
    """Calls of each stage of a run with so many parameters."""
    found = {}
    parameters = [torch.nn.Parameter(torch.zeros(1024)) for _ in range(number)]
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    late = [torch.nn.Parameter(torch.zeros(8)) for _ in range(number)]

    def build():
        found["optimizer"] = onebit.DistributedOptimizer(
            torch.optim.AdamW(parameters, lr=1e-3), named, warmup_steps=2, groups=groups, exact=["p0", "p[1-2]"]
        )

    def step():
        optimizer.zero_grad()
        torch.autograd.backward([p.sum() * (1 + RANK) for p in parameters if p.requires_grad])
        optimizer.step()

    build_calls = calls(build)
    optimizer = found["optimizer"]
    stages = {"build": build_calls}
    for stage in ("warm-up", "the last exact step", "the first compressed step", "a compressed step"):
        stages[stage] = calls(step)
    assert optimizer.phase is Phase.COMPRESSED
    stages["state"] = calls(lambda: found.update(state=optimizer.state_dict()))
    stages["load"] = calls(lambda: optimizer.load_state_dict(found["state"]))
    stages["a step after that"] = calls(step)
    stages["a group"] = calls(lambda: optimizer.add_param_group({"params": late}))
    parameters[number // 2].requires_grad_(False)
    stages["a step with one frozen"] = calls(step)
    return stages


@pytest.mark.parametrize("groups", [None, 2])
def test_work_grows_no_faster_than_the_number_of_parameters(groups):
    work(20, groups)  # what is imported and compiled once
    few, many = work(150, groups), work(300, groups)
    growth = {stage: many[stage] / few[stage] for stage in few}
    assert max(growth.values()) < 2.4, growth


# -- what an optimizer is not -----------------------------------------------------------------------------------------


def test_a_compiled_training_step():
    found = []
    for compiles in (False, True):
        model = Net()
        optimizer = wrap(model, warmup_steps=3)

        def finish(optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(finish, backend="eager") if compiles else finish
        for number in range(6):
            x, y = batch(number)
            cross_entropy(model(x), y).backward()
            step()
        assert optimizer.phase is Phase.COMPRESSED
        found.append(weights(model))
    assert torch.equal(*found)


@pytest.mark.parametrize("options", [{"warmup_steps": 3}, {"warmup_steps": 99}, {"schedule": onebit.Local(every=2)}])
def test_parameters_that_were_taken_out_are_let_go_of(options):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = onebit.DistributedOptimizer(optimizer, list(model.named_parameters()), **options)
    (group,), left = optimizer.param_groups, []
    for stage in range(3):
        train(model, optimizer, 6, start=6 * stage)
        optimizer.flush()
        old = model.first.weight
        new = torch.nn.Parameter(old.detach().clone())
        group["params"] = [new if p is old else p for p in group["params"]]
        optimizer.state[new] = optimizer.state.pop(old)
        model.first.weight = new
        left.append(weakref.ref(old))
        del old, new
    train(model, optimizer, 6, start=18)
    optimizer.flush()
    gc.collect()
    assert [one() is None for one in left] == [True] * 3
    assert_replicas_equal(model)


def test_an_optimizer_cannot_be_copied():
    model = Net()
    optimizer = wrap(model, warmup_steps=3)
    train(model, optimizer, 2)
    for how in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="state_dict"):
            how(optimizer)
    train(model, optimizer, 3, start=2)
    assert_replicas_equal(model)


def test_a_group_after_one_was_removed():
    """Parameters without names: the new one's must not be that of another."""
    weights = [torch.nn.Parameter(torch.zeros(2000)) for _ in range(3)]
    plain = torch.optim.SGD([{"params": [w]} for w in weights[:2]], lr=0.1)
    optimizer = onebit.DistributedOptimizer(plain, warmup_steps=1)
    optimizer.param_groups.pop(0)
    optimizer.add_param_group({"params": weights[2:]})
    for _ in range(3):
        optimizer.zero_grad()
        sum(w.sum() for w in weights[1:]).backward()
        optimizer.step()
    assert [bool(w.detach().any()) for w in weights] == [False, True, True]


# -- two models -------------------------------------------------------------------------------------------------------


def play(generator, critic, optimizers, ranks, steps=24):
    """As in a GAN: the critic takes one to three steps, then the generator one through the critic."""
    of_generator, of_critic = optimizers
    for step in range(steps):
        xs = torch.cat([batch(step, rank)[0] for rank in ranks])
        for _ in range(1 + step % 3):
            of_critic.zero_grad()
            loss = (critic(xs[:, :8]) - 1).square().mean() + critic(generator(xs).detach()).square().mean()
            loss.backward()
            of_critic.step()
        critic.requires_grad_(False)
        of_generator.zero_grad()
        (critic(generator(xs)) - 1).square().mean().backward()
        of_generator.step()
        critic.requires_grad_(True)


def players():
    torch.manual_seed(0)
    sizes = ((32, 64, 8), (8, 64, 1))
    return [torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.Tanh(), torch.nn.Linear(b, c)) for a, b, c in sizes]


@pytest.mark.parametrize(
    "wrapping",
    [
        {"recipe": "exact"},
        {"warmup_steps": 5},
        {"schedule": onebit.Gradients()},
        {"schedule": onebit.Local(every=4, freeze=8)},
        {"schedule": onebit.ZeroOne(var_freeze_step=8, var_update_scaler=2, local_step_scaler=4)},
    ],
    ids=str,
)
def test_two_models_that_train_each_other(wrapping):
    models = players()
    small = {} if "recipe" in wrapping else {"recipe": Recipe(min_compressed_size=64, block_size=64)}
    optimizers = [
        onebit.DistributedOptimizer(torch.optim.AdamW(m.parameters(), 1e-3), m.named_parameters(), **wrapping, **small)
        for m in models
    ]
    play(*models, optimizers, [RANK])
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.flush()
        assert_replicas_equal(model)
    if "recipe" in wrapping:
        plain = players()
        play(*plain, [torch.optim.AdamW(m.parameters(), 1e-3) for m in plain], range(SIZE))
        for model, expected in zip(models, plain, strict=True):
            torch.testing.assert_close(weights(model), weights(expected), rtol=1e-3, atol=1e-4)


def test_a_parameter_that_is_twice_in_a_group():
    """PyTorch warns of it."""
    model = Words()
    with pytest.warns(UserWarning, match="duplicate"):
        plain = torch.optim.SGD([*model.parameters(), model.last.weight], lr=0.1)
    optimizer = onebit.DistributedOptimizer(plain, list(model.named_parameters()), warmup_steps=2)
    assert sorted(optimizer._parameters.names.values()) == sorted(name for name, _ in model.named_parameters())
    read(model, optimizer, 1)
    assert_replicas_equal(model)


def test_names_of_a_compiled_model_that_the_optimizer_was_given():
    model = Words()
    named = [(f"_orig_mod.{name}", p) for name, p in model.named_parameters()]
    for pattern in ("last*", "_orig_mod.last*"):
        optimizer = onebit.DistributedOptimizer(torch.optim.SGD(named, lr=0.1), warmup_steps=2, exact=[pattern])
        assert set(optimizer._parameters.names.values()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("recipe", ["exact", "robust"])
def test_gradients_travel_in_one_order_whichever_parameter_a_worker_has_seen_first(recipe):
    """Worker 0 has frozen the first layers before it builds the optimizer, and the others afterwards."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(3)]
    model = torch.nn.Sequential(*layers).to(DEVICE)

    def freeze(frozen):
        for layer in layers[:2]:
            layer.requires_grad_(not frozen)

    if RANK == 0:
        freeze(True)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = onebit.DistributedOptimizer(plain, list(model.named_parameters()), recipe=recipe, warmup_steps=100)
    freeze(True)
    for step in range(6):
        if step == 3:
            freeze(False)
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + RANK), device="cpu").to(DEVICE)
        (model(x) - x).square().mean().backward()
        optimizer.step()
    assert_replicas_equal(model)


class Resets(torch.optim.SGD):
    def zero_grad(self):
        super().zero_grad()


@pytest.mark.parametrize("how", ["nothing", "position", "name", "accelerate"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, Resets])
def test_arguments_of_zero_grad(kind, how):
    """That of accelerate looks for the name of the argument, and gives True if it is there."""
    model = Net()
    plain = kind(model.parameters(), lr=0.1)
    optimizer = onebit.DistributedOptimizer(plain, model.named_parameters(), recipe="exact")
    assert "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
    calls = {
        "nothing": optimizer.zero_grad,
        "position": lambda: optimizer.zero_grad(False),
        "name": lambda: optimizer.zero_grad(set_to_none=False),
        "accelerate": lambda: optimizer.zero_grad(set_to_none=True),
    }
    takes = kind is torch.optim.SGD or how in ("nothing", "accelerate")
    for step in range(3):
        x, y = batch(step)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if takes:
            calls[how]()
    if not takes:
        with pytest.raises(TypeError):
            calls[how]()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(grad is None for grad in grads) == (how in ("nothing", "accelerate"))
    assert not takes or not any(grad.any() for grad in grads if grad is not None)
    assert_replicas_equal(model)

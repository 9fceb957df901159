"""Whatever a user does to an optimizer's state, groups or wrapping between two steps: the library follows, or all
workers get one clear error. How far weights move in a step tells a stale second moment: it is compared with what the
plain optimizer does with the mean gradients and the same edits."""

import collections
import contextlib
import copy
import gc

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError, DesyncError, Recipe, UnsupportedError
from horovod_onebit.warmup import EXACT_FIRST
from tests.long import FEW
from tests.ranks.torch_common import DEVICE, RANK, SIZE, Lion, assert_replicas_equal, batch, weights
from tests.ranks.world import world

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
            grads = [p.grad for p in self.twin.parameters() if p.grad is not None]
            mean = world.allreduce(torch.cat([g.reshape(-1) for g in grads]), name="twin")
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
        y = torch.randint(10, (len(x),), generator=torch.Generator(DEVICE).manual_seed(2 * self.steps + RANK))
        cross_entropy(model(x), y).backward()

    def check(self, steps=24):
        """``steps`` more move ours as far as the plain optimizer's; all workers have the same."""
        ours, plain = self.train(steps)
        # Of own moments much is noise, and steps are shorter; so are Lion's, whose signs differ between workers.
        shortest = 0.4 if self.kind == "lion" else 0.6 if self.mode == "local" else 0.8
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


def other_memory(model, optimizer, values):
    """The same tensors, with other memory; ``values`` are put there."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.data = values(value)


def share(model, optimizer):
    """As a state does that is given to another process: its memory is other memory, without a trace."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.share_memory_()


EDITS |= {
    "zeros": zeros_in_place,
    "data of zeros": lambda model, optimizer: other_memory(model, optimizer, torch.zeros_like),
    "data elsewhere": lambda model, optimizer: other_memory(model, optimizer, torch.clone),
    "shared": share,
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


TRIED = {
    "warm-up": ("replaced", "clear", "zeros", "data of zeros", "shared"),
    "compressed": tuple(EDITS),
    "local": ("zeros",),
    "frozen": ("groups", "replaced", "clear", "zeros of data", "moved", "data of zeros", "data elsewhere", "shared"),
    "zero_one": ("groups", "clear", "zeros of data", "data of zeros", "shared"),
}


@pytest.mark.parametrize(("mode", "edit"), [(mode, edit) for mode in TRIED for edit in TRIED[mode]])
def test_an_edit_of_adams_state_or_groups(mode, edit):
    run = Run("adam", mode)
    run.train(44)
    for model, optimizer in run.both:
        EDITS[edit](model, optimizer)
    run.train(48)
    run.check()


@pytest.mark.parametrize("mode", ["warm-up", "compressed", "frozen", "zero_one"])
@pytest.mark.parametrize("edit", ["moved", "data elsewhere", "shared"])
def test_a_state_that_is_elsewhere_is_the_same_state(mode, edit):
    """Nothing begins again: the run goes on bit by bit."""
    found = []
    for moves in (True, False):
        run = Run("adam", mode)
        run.train(44)
        if moves:
            EDITS[edit](run.model, run.optimizer)
        run.train(8)
        found.append(weights(run.model))
    assert torch.equal(*found)


@pytest.mark.parametrize("mode", ["compressed", "zero_one"])
def test_a_state_that_is_cleared_before_the_first_step(mode):
    run = Run("adam", mode)
    for _, optimizer in run.both:
        optimizer.state.clear()
    run.train(48)
    run.check()


@pytest.mark.parametrize("call", ["step", "synchronize", "clip_grad_norm_"])
def test_a_state_that_is_cleared_after_the_backward_pass(call):
    """Messages have left then, unless they leave in ``step``: all workers take them back, and the step may be taken."""
    found = []
    for overlap in (True, False):
        model = Net()
        plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = onebit.DistributedOptimizer(plain, list(model.named_parameters()), warmup_steps=12, overlap=overlap)
        for step in range(40):
            x, y = batch(step)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if step == 20:
                assert optimizer._compressor.engine.under_way == overlap
                optimizer.state.clear()
                if overlap:
                    with pytest.raises(ConfigurationError, match="between backward"):
                        getattr(optimizer, call)(*([1e9] if call == "clip_grad_norm_" else []))
            optimizer.step()
        found.append(weights(model))
        assert_replicas_equal(model)
    assert torch.equal(*found) or SIZE > 2


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


@pytest.mark.parametrize("mode", ["frozen", "zero_one"])
def test_a_plain_optimizer_in_the_middle_of_a_round_is_not_wrapped_again(mode):
    run = Run("adam", mode)
    run.train(48)
    while not run.optimizer._compressor.pending:  # the first local step of a round
        run._backward(run.model)
        run.optimizer.step()
    with pytest.raises(ConfigurationError, match="flush"):
        wrap(run.model, run.plain, mode)
    run.optimizer.flush()
    run.optimizer = wrap(run.model, run.plain, mode)
    run.train(48)
    run.check()


def test_a_compressed_run_goes_on_with_another_kind_of_steps():
    """What the state says is understood by every schedule."""
    run = Run("adam", "compressed")
    for mode in ("frozen", "compressed", "zero_one", "local", "compressed"):
        run.train(32)
        if run.mode == "local":  # each worker's moments were its own
            onebit.broadcast_optimizer_state(run.plain)
        run.mode, run.optimizer = mode, wrap(run.model, run.plain, mode)
    run.train(48)
    run.check()


def test_layers_that_are_frozen_and_trained_by_turns_after_the_freeze():
    run = Run("adam", "frozen")
    run.model.last.weight.requires_grad_(False)
    run.twin.last.weight.requires_grad_(False)
    run.train(44)
    for model in (run.model, run.twin):
        model.first.weight.requires_grad_(False)
        model.last.weight.requires_grad_(True)
    before = run.model.last.weight.detach().clone(), run.model.first.weight.detach().clone()
    run.train(44)
    run.check()
    moved = (run.model.last.weight - before[0]).abs().mean() / 68 / LR
    assert 0.05 < moved < 1
    assert torch.equal(run.model.first.weight, before[1])
    # It has seen nothing but own gradients, and is frozen when another state is edited.
    run.optimizer.state[run.model.second.weight]["exp_avg_sq"].zero_()
    parameters = run.optimizer._parameters
    run._backward(run.model)
    run.optimizer.step()
    assert parameters.common_steps(run.model.last.weight) == parameters.common_steps(run.model.second.weight) == 0


@pytest.mark.parametrize("mode", ["frozen", "local"])
def test_an_iterator_that_ends_in_a_closure_is_seen_by_the_caller(mode):
    run = Run("adam", mode)
    run.train(24)
    with pytest.raises(StopIteration):
        run.optimizer.step(lambda: next(iter(())))
    run.train(24)
    run.check()


def test_an_edit_is_not_forgotten_by_a_step_that_fails_before_it():
    run = Run("adam", "frozen")
    run.train(44)
    run.optimizer.state[run.model.second.weight]["exp_avg_sq"].zero_()
    odd = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    run.optimizer.param_groups[0]["params"].append(odd)
    run._backward(run.model)
    with pytest.raises(UnsupportedError):
        run.optimizer.step()
    run.optimizer.param_groups[0]["params"].pop()
    run.optimizer.step()
    assert not run.optimizer.state[run.model.second.weight].get("onebit_variance_steps")


def test_second_moments_of_exact_steps_are_frozen_by_local_steps_as_what_they_are():
    """They are of the mean gradient, and only what local steps have added since is of each worker's own."""
    run = Run("adam", "warm-up")
    run.train(300)
    run.mode, run.optimizer = "frozen", wrap(run.model, run.plain, "frozen")
    run.train(44)
    run.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edit", ["zeros", "clear", "replaced"])
def test_an_edit_on_one_worker_alone_is_an_error_on_all_or_does_no_harm(edit, mode):
    run = Run("adam", mode)
    run.train(44)
    if ODD:
        EDITS[edit](run.model, run.optimizer)

    def steps():
        for _ in range(9):
            run.optimizer.zero_grad()
            run._backward(run.model)
            run.optimizer.step()
        run.optimizer.flush()

    # Before moments are common, each worker has its own; and exact steps make a state that is gone again.
    if (mode, edit) in (("local", "zeros"), ("local", "clear"), ("warm-up", "clear")):
        with contextlib.suppress(DesyncError):
            steps()
            assert_replicas_equal(run.model)
        return
    with pytest.raises(DesyncError, match=r"differs between workers|differs from that of|different methods"):
        steps()


@pytest.mark.parametrize("mode", ["compressed", "frozen"])
def test_after_an_edit_a_checkpoint_continues_bit_by_bit(mode, tmp_path_factory):
    folder = world.broadcast_object(str(tmp_path_factory.mktemp("edited")), root_rank=0, name="folder")
    run = Run("adam", mode)
    run.train(44)
    EDITS["zeros"](run.model, run.optimizer)
    run.train(28)
    onebit.save_checkpoint(folder, run.model, run.optimizer)
    again = Run("adam", mode)
    onebit.load_checkpoint(folder, again.model, again.optimizer)
    again.steps, again.twin = run.steps, run.twin
    for one in (run, again):
        one.train(8)
    again.steps = run.steps
    run.train(4), again.train(4)
    assert torch.equal(weights(run.model), weights(again.model))


# -- what differs, and what is named ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_forgotten_broadcast_is_an_error_in_the_first_step(mode):
    model = Net(seed=RANK)
    optimizer = wrap(model, KINDS["adam"](model.parameters()), mode)
    cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    with pytest.raises(DesyncError, match=r"first.weight.*worker.*[Bb]roadcast"):
        optimizer.step()


def test_a_forgotten_broadcast_of_the_state_is_an_error_in_the_first_step():
    model = Net()
    plain = KINDS["adam"](model.parameters())
    cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    plain.step()
    world.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrap(model, plain, "compressed")
    optimizer.zero_grad()
    cross_entropy(model(batch(1)[0]), batch(1)[1]).backward()
    with pytest.raises(DesyncError, match=r"which state was loaded|exp_avg"):
        optimizer.step()


@pytest.mark.parametrize("start", [0, 20], ids=["first step", "compression starts"])
def test_weights_that_differ_are_refused_until_they_are_the_same(start):
    run = Run("adam", "compressed")
    for _ in range(start):
        run.train(1)
    if ODD:
        run.model.second.weight.data *= 0.5
    for _ in range(2):
        run._backward(run.model)
        with pytest.raises(DesyncError, match=r"second.weight of worker"):
            run.optimizer.step()
    world.broadcast_parameters(run.model.state_dict(), root_rank=0)
    run._backward(run.model)
    run.optimizer.step()
    assert_replicas_equal(run.model)


@pytest.mark.parametrize("how", ["largest norm", "edit", "edit, not compared"])
def test_weights_that_part_are_found_before_they_are_compressed(how):
    torch.manual_seed(0)
    norm = 1.0 if how == "largest norm" else None  # the rows that a worker looks up are its own
    model = torch.nn.Sequential(torch.nn.Embedding(100, 32, max_norm=norm), torch.nn.Linear(32, 10))
    plain = KINDS["adam"](model.parameters())
    wrapping = {"check_replicas_every": False} if how == "edit, not compared" else {}
    optimizer = onebit.DistributedOptimizer(plain, list(model.named_parameters()), warmup_steps=5, **wrapping)
    taken = 0

    def train():
        nonlocal taken
        for step in range(8):
            optimizer.zero_grad()
            rows = torch.arange(8) + 8 * RANK + step
            cross_entropy(model(rows), rows % 10).backward()
            if step == 3 and ODD and norm is None:
                model[0].weight.data[50] += 1
            optimizer.step()
            taken += 1

    if how == "edit, not compared":
        train()
        return
    with pytest.raises(DesyncError, match=r"0.weight of worker 1 differs.*max_norm"):
        train()
    assert taken == (5 if how == "edit" else 0)


NAMED = {
    "lr": "learning rate of group 0 differs between workers: 1e-05 on worker 0, 0.003 on worker 1",
    "betas": "beta2 of group 0 differs between workers: 0.999 on worker 0, 0.9 on worker 1",
    "weight_decay": "weight decay of group 0 differs between workers",
    "warmup_steps": "the warm-up differs between workers: .*20.* on worker 0, .*30.* on worker 1",
    "recipe": "the recipe's block_size differs between workers",
    "requires_grad": "whether last.bias is frozen differs between workers: False on worker 0, True on worker 1",
    "shape": "the shape of last.bias differs between workers",
    "groups": "groups differs between workers: None on worker 0, 2 on worker 1",
}


IN_FEW_BITS = {
    "frozen": "whether 0.weight is frozen differs between workers: False on worker 0, True on worker 1",
    "added": "the number of parameters differs between workers: 4 on worker 0, 5 on worker 1",
    "alpha": "alpha of group 0 differs between workers: 0.99 on worker 0, 0.9 on worker 1",
}


@pytest.mark.parametrize("recipe", ["robust", "exact"])
@pytest.mark.parametrize("what", IN_FEW_BITS)
def test_an_error_names_what_differs_between_averages(what, recipe):
    """With any optimizer, all of whose hyperparameters are compared; nothing has changed, and the run goes on."""
    if SIZE != 2:
        pytest.skip("the texts name two workers")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 8))
    plain = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    few = {"schedule": onebit.Gradients()} if recipe == "robust" else {}
    optimizer = onebit.DistributedOptimizer(plain, list(model.named_parameters()), recipe=recipe, **few)

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().sum().backward()
        optimizer.step()

    for _ in range(EXACT_FIRST + 3):
        step()
    before = weights(model).clone()
    extra = torch.nn.Parameter(torch.zeros(2000))
    if ODD and what == "frozen":
        model[0].weight.requires_grad_(False)
    elif ODD and what == "added":
        optimizer.add_param_group({"params": [extra]})
    elif ODD:
        optimizer.param_groups[0]["alpha"] = 0.9
    with pytest.raises(DesyncError, match=IN_FEW_BITS[what]):
        step()
    assert torch.equal(weights(model), before)
    if what == "added":
        if not ODD:
            optimizer.add_param_group({"params": [extra]})
    else:
        model[0].weight.requires_grad_(True)
        optimizer.param_groups[0]["alpha"] = 0.99
    for _ in range(3):
        step()
    assert_replicas_equal(model)


@pytest.mark.parametrize("what", ["small out", "large out", "small in", "exact in"])
def test_groups_may_change_between_steps_that_send_early(what):
    model = Net()
    layers = [{"params": list(layer.parameters())} for layer in (model.first, model.second, model.last)]
    optimizer = onebit.DistributedOptimizer(
        torch.optim.SGD(layers, lr=0.01), list(model.named_parameters()), warmup_steps=3
    )
    extra = torch.nn.Parameter(torch.zeros(2000 if what == "exact in" else 5))

    def step(index):
        optimizer.zero_grad()
        x, y = batch(index)
        (cross_entropy(model(x), y) + extra.square().sum()).backward()
        optimizer.step()

    for index in range(6):
        step(index)
    if what.endswith("out"):
        optimizer.param_groups.pop(-1 if what == "small out" else 1)
    else:
        optimizer.add_param_group({"params": [extra], **({"exact": True} if what == "exact in" else {})})
    for index in range(6, 12):
        step(index)
    assert_replicas_equal(model)


@pytest.mark.parametrize("mode", ["warm-up", "compressed"])
@pytest.mark.parametrize("what", NAMED)
def test_an_error_names_what_differs(what, mode):
    if SIZE != 2:
        pytest.skip("the texts name two workers")
    model = Net()
    if what == "shape" and ODD:
        model.last = torch.nn.Linear(64, 11)
    plain = KINDS["adam"](model.parameters())
    options = dict(MODES[mode])
    if ODD:
        options |= {"warmup_steps": {"warmup_steps": 30}, "groups": {"groups": 2}}.get(what, {})
        options |= {"recipe": Recipe(block_size=512)} if what == "recipe" else {}
    if what == "warmup_steps" and not ODD:
        options = {"warmup_steps": 20}
    optimizer = onebit.DistributedOptimizer(plain, list(model.named_parameters()), **options)

    def step():
        for p in model.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        optimizer.step()

    if what in ("lr", "betas", "weight_decay", "requires_grad"):
        for _ in range(21 if mode == "compressed" else 2):
            step()
    if ODD:
        values = {"lr": 3e-3, "betas": (0.9, 0.9), "weight_decay": 0.5}
        if what in values:
            optimizer.param_groups[0][what] = values[what]
        if what == "requires_grad":
            model.last.bias.requires_grad_(False)
    with pytest.raises(DesyncError, match=NAMED[what]):
        step()


# -- inference mode, compiled models, hyperparameters that change in every step ----------------------------------------


@pytest.mark.parametrize("mode", ["compressed", "frozen", "zero_one"])
def test_collective_calls_within_inference_mode(mode, tmp_path_factory):
    """Lightning evaluates in it."""
    folder = world.broadcast_object(str(tmp_path_factory.mktemp("inference")), root_rank=0, name="folder")
    run = Run("adam", mode)
    run.train(34)
    run._backward(run.model)
    run.optimizer.step()
    with torch.inference_mode():
        run.optimizer.flush()
        run.optimizer.check_replicas()
        onebit.save_checkpoint(folder, run.model, run.optimizer)
        onebit.load_checkpoint(folder, run.model, run.optimizer)
        onebit.broadcast_optimizer_state(run.optimizer)
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        run.optimizer.load_feedback_state_dict(run.optimizer.feedback_state_dict())
        onebit.load_weights(folder, run.model)
        run.optimizer.stats()
    run.train(24)
    run.check()


def test_weights_of_a_compiled_model_are_loaded_into_a_plain_one_and_back(tmp_path_factory):
    folder = world.broadcast_object(str(tmp_path_factory.mktemp("compiled")), root_rank=0, name="folder")
    run = Run("adam", "compressed")
    run.train(4)
    compiled = torch.compile(run.model, backend="eager")
    onebit.save_checkpoint(folder, compiled, run.optimizer)
    for target in (Net(seed=1), torch.compile(Net(seed=1), backend="eager")):
        onebit.load_weights(folder, target)
        assert torch.equal(weights(target), weights(run.model))
    onebit.load_checkpoint(folder, run.model, run.optimizer)


class SharpnessAware:
    """SAM (Foret et al. 2021) as users write it: the second gradient is taken elsewhere, then the weights come back."""

    def __init__(self, model):
        self.model, self.old = model, []

    def climb(self):
        self.old = [p.data for p in self.model.parameters()]
        for p in self.model.parameters():
            p.data = p.data + 1e-3 * torch.sign(p.grad)

    def descend(self):
        for p, old in zip(self.model.parameters(), self.old, strict=True):
            p.data = old


@pytest.mark.parametrize("how", ["one cycle", "sam"])
def test_what_changes_in_every_step_after_the_backward_pass_is_learned_in_the_warm_up(how):
    run = Run("adam", "compressed")
    optimizer, sam = run.optimizer, SharpnessAware(run.model)
    if how == "sam":
        optimizer.set_backward_passes_per_step(2)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=200)
    for _ in range(30):
        run._backward(run.model)
        if how == "one cycle":
            cycle.step()  # before the optimizer's, which PyTorch warns of
        else:
            with torch.no_grad():
                sam.climb()
            run.model.zero_grad()
            run._backward(run.model)
            with torch.no_grad():
                sam.descend()
        optimizer.step()
        run.steps += 1
    assert optimizer.phase == "compressed"
    assert_replicas_equal(run.model)


# -- anything, in any order --------------------------------------------------------------------------------------------

STEPS = st.tuples(st.just("steps"), st.integers(1, 24))
CHANGE = st.tuples(st.just("edit"), st.sampled_from(sorted(EDITS)))
WRAP = st.tuples(st.just("wrap"), st.sampled_from(sorted(MODES)))


ACTIONS = st.lists(st.one_of(STEPS, CHANGE, WRAP), max_size=8)


@settings(
    derandomize=True, max_examples=4 if FEW else 12, deadline=None, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(MODES)), ACTIONS)
def test_any_edits_in_any_order(kind, mode, actions):
    if kind != "adam" and kind != "adamw" and mode == "zero_one":
        mode = "compressed"
    run = Run(kind, mode)
    run.train(4)
    for what, value in actions:
        if what == "steps":
            run.train(value)
        elif what == "edit":
            for model, optimizer in run.both:
                EDITS[value](model, optimizer)
        elif value != "zero_one" or kind in ("adam", "adamw"):
            run.optimizer.flush()
            own = "schedule" in MODES[run.mode] and run.mode != "zero_one"  # each worker's moments are
            run.mode, run.optimizer = value, wrap(run.model, run.plain, value)
            if own:
                onebit.broadcast_optimizer_state(run.optimizer)
    run.train(72)
    if kind in ("adam", "adamw"):
        run.check()
    run.optimizer.flush()
    assert_replicas_equal(run.model)


@pytest.mark.parametrize(
    ("kind", "mode"), [("adamw", "compressed"), ("lamb", "compressed"), ("adamw", "frozen"), ("adamw", "zero_one")]
)
@pytest.mark.parametrize("when", [22, 41])
def test_a_beta2_that_is_changed_leaves_frozen_second_moments_as_they_are(kind, mode, when):
    """In the first compressed steps, and later. Their bias was that of the old one; the steps would be three times too
    long."""
    results = []
    for changes in (False, True):
        p = torch.nn.Parameter(torch.ones(64, 64))
        optimizer = KINDS[kind]([p])
        optimizer = onebit.DistributedOptimizer(optimizer, [("p", p)], **MODES[mode])
        draw = torch.Generator().manual_seed(RANK)
        for step in range(61):
            if changes and step == when:
                optimizer.param_groups[0]["betas"] = (0.9, 0.9)
            p.grad = torch.randn(64, 64, generator=draw, device="cpu").to(DEVICE)
            optimizer.step()
        optimizer.flush()
        state, again = optimizer.state_dict(), KINDS[kind]([torch.nn.Parameter(torch.ones(64, 64))])
        again.load_state_dict(state)
        beta2, (own,) = again.param_groups[0]["betas"][1], again.state.values()
        resumed = onebit.DistributedOptimizer(KINDS[kind]([p]), [("p", p)], **MODES[mode])
        resumed.load_state_dict(copy.deepcopy(state))
        p.grad = torch.ones(64, 64)
        before = p.detach().clone()
        resumed.step()
        resumed.flush()
        results.append((before, own["exp_avg_sq"] / (1 - beta2 ** float(own["step"])), p.detach() - before))
    for steady, changed in zip(*results, strict=True):
        torch.testing.assert_close(changed, steady, rtol=1e-4, atol=1e-9)
    assert torch.equal(results[0][0], results[1][0])


def with_changed_beta2(mode, steps=45, when=41):
    """An optimizer whose beta2 was changed after its second moment was frozen; and a step of it with gradients drawn
    anew."""
    p = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = onebit.DistributedOptimizer(torch.optim.AdamW([p], lr=LR), [("p", p)], **MODES[mode])
    draw = torch.Generator().manual_seed(RANK)

    def step():
        p.grad = torch.randn(64, 64, generator=draw, device="cpu").to(DEVICE)
        optimizer.step()

    for number in range(steps):
        if number == when:
            optimizer.flush()
            optimizer.param_groups[0]["betas"] = (0.9, 0.9)
        step()
    optimizer.flush()
    return p, optimizer, step


@pytest.mark.parametrize("mode", ["compressed", "zero_one"])
def test_a_changed_beta2_is_the_same_on_all_workers_after_a_broadcast(mode):
    p, optimizer, step = with_changed_beta2(mode)
    before = optimizer.state[p]["exp_avg_sq"].clone()
    onebit.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in range(24):
        step()
    optimizer.flush()
    optimizer.check_replicas()
    if mode == "compressed":
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], before)
        assert optimizer._compressor.parameters.beta2(p) == 0.999


@pytest.mark.parametrize("mode", ["compressed", "frozen"])
def test_second_moments_that_are_taken_back_are_corrected_by_the_beta2_that_they_have_seen(mode):
    p, optimizer, _ = with_changed_beta2(mode)
    state = optimizer.state[p]
    second = state["exp_avg_sq"] / (1 - 0.999 ** state["onebit_variance_steps"])
    state["exp_avg"].zero_()
    p.grad = torch.zeros_like(p)
    optimizer.step()  # an exact one; of zeros
    state = optimizer.state[p]
    assert not {"onebit_variance_steps", "onebit_variance_beta2"} & set(state)
    taken = int(state["step"])
    torch.testing.assert_close(state["exp_avg_sq"] / 0.9 / (1 - 0.9 ** (taken - 1)), second, rtol=1e-4, atol=0)


def test_a_parameter_that_moves_to_a_group_with_another_beta2_keeps_the_one_of_its_second_moment():
    results = []
    for moves in (False, True):
        p, q = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))
        groups = [{"params": [p]}, {"params": [q], "betas": (0.9, 0.9)}]
        plain = torch.optim.AdamW(groups, lr=LR)
        optimizer = onebit.DistributedOptimizer(plain, [("p", p), ("q", q)], **MODES["compressed"])
        draw = torch.Generator().manual_seed(RANK)
        for step in range(40):
            if moves and step == 30:
                first, second = optimizer.param_groups
                first["params"], second["params"] = second["params"], first["params"]
            for one in (p, q):
                one.grad = torch.randn(64, 64, generator=draw, device="cpu").to(DEVICE)
            optimizer.step()
        results.append(p.detach().clone())
    torch.testing.assert_close(*results, rtol=0, atol=LR)  # else steps would be six times as long


def test_a_group_that_could_not_be_frozen_is_refused_when_it_is_added():
    p, q = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    optimizer = onebit.DistributedOptimizer(torch.optim.Adam([p], lr=LR), [("p", p)], **MODES["frozen"])
    with pytest.raises(UnsupportedError, match="without amsgrad"):
        optimizer.add_param_group({"params": [q], "amsgrad": True})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("once", "twice", "frozen"), [((), (12,), 20), ((24,), (24, 28), 44)])
def test_a_state_that_moves_to_a_new_parameter_before_the_freeze_is_frozen_as_what_it_is(once, twice, frozen):
    """Its gradients were this worker's own, and have more noise than the mean, whose second moment is wanted; or in
    part the mean's, where it moves again after a freeze."""
    seconds = []
    for moves in (once, twice):
        p = torch.nn.Parameter(torch.ones(64, 64))
        plain = torch.optim.AdamW([p], lr=LR)
        optimizer = onebit.DistributedOptimizer(plain, [("p", p)], **MODES["frozen"])
        draw = torch.Generator().manual_seed(RANK)
        for step in range(frozen + 4):
            if step in moves:
                q = torch.nn.Parameter(p.detach().clone())
                optimizer.state[q] = optimizer.state.pop(p)
                optimizer.param_groups[0]["params"] = [q]
                p = q
            p.grad = torch.randn(64, 64, generator=draw, device="cpu").to(DEVICE)
            optimizer.step()
        optimizer.flush()
        assert optimizer.state[p]["onebit_variance_steps"] == frozen
        assert not any(key.startswith("onebit") for state in optimizer.state_dict()["state"].values() for key in state)
        seconds.append(optimizer.state[p]["exp_avg_sq"])
    torch.testing.assert_close(*seconds, rtol=1e-5, atol=0)


def test_second_moments_that_are_taken_back_on_a_worker_with_few_gradients_are_corrected_as_on_the_others():
    p = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = onebit.DistributedOptimizer(torch.optim.AdamW([p], lr=LR), [("p", p)], **MODES["frozen"])
    draw = torch.Generator().manual_seed(RANK)
    for step in range(24):
        grad = torch.randn(64, 64, generator=draw, device="cpu").to(DEVICE)
        p.grad = None if ODD and step < 8 else grad
        optimizer.step()
    optimizer.flush()
    state = optimizer.state[p]
    second = state["exp_avg_sq"] / (1 - 0.999 ** state["onebit_variance_steps"])
    state["exp_avg"].zero_()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    taken = int(optimizer.state[p]["step"]) - 1
    now = optimizer.state[p]["exp_avg_sq"] / 0.999 / (1 - 0.999**taken)
    torch.testing.assert_close(now, second, rtol=1e-4, atol=0)


def test_a_second_moment_of_local_steps_is_of_own_gradients_when_the_optimizer_is_wrapped_again():
    seconds = []
    for stages in (((32, 32),), ((12, 100), (20, 20))):
        p = torch.nn.Parameter(torch.ones(64, 64))
        plain, draw = torch.optim.AdamW([p], lr=LR), torch.Generator().manual_seed(RANK)
        for steps, freeze in stages:
            optimizer = onebit.DistributedOptimizer(plain, [("p", p)], schedule=onebit.Local(every=4, freeze=freeze))
            for _ in range(steps):
                p.grad = torch.randn(64, 64, generator=draw, device="cpu").to(DEVICE)
                optimizer.step()
            optimizer.flush()
        state = optimizer.state[p]
        seconds.append(state["exp_avg_sq"] / (1 - 0.999 ** state["onebit_variance_steps"]))
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=0)


# -- what was not noticed before --------------------------------------------------------------------------------------


def drawn(shape, step=0):
    """A gradient of this worker's own."""
    generator = torch.Generator().manual_seed(SIZE * step + RANK)
    return torch.randn(shape, generator=generator, device="cpu").to(DEVICE)


@pytest.mark.parametrize("modes", [("local", "local"), ("local", "compressed"), ("compressed", "local")])
def test_two_optimizers_of_one_parameter_are_refused(modes):
    model = Net()
    both = [[*model.first.parameters(), *layer.parameters()] for layer in (model.second, model.last)]
    one, other = (
        onebit.DistributedOptimizer(torch.optim.AdamW(own), list(model.named_parameters()), **MODES[mode])
        for own, mode in zip(both, modes, strict=True)
    )
    x, y = batch(0)
    cross_entropy(model(x), y).backward()
    with pytest.raises(ConfigurationError, match=r"parameter first.bias, first.weight belongs to a Distributed"):
        one.step()
    other.step()


@pytest.mark.parametrize("method", ["step", "zero_grad", "state_dict"])
def test_a_method_that_somebody_has_replaced_is_refused(method):
    p = torch.nn.Parameter(torch.ones(64, 64))
    plain = torch.optim.AdamW([p], lr=1e-3)
    before = getattr(plain, method)
    setattr(plain, method, lambda *args: before(*args))
    with pytest.raises(UnsupportedError, match=f"{method} of this optimizer was replaced"):
        onebit.DistributedOptimizer(plain, [("p", p)])
    setattr(plain, method, before)  # its own
    torch.optim.lr_scheduler.StepLR(plain, 10)  # PyTorch's own
    wrapped = onebit.DistributedOptimizer(plain, [("p", p)])
    assert wrapped.zero_grad.__self__ is wrapped


@pytest.mark.parametrize("mode", ["compressed", "frozen"])
@pytest.mark.parametrize("deleted", [False, True])
def test_an_optimizer_that_was_only_tried_gives_its_parameters_back(mode, deleted):
    model = Net()
    optimizer = wrap(model, torch.optim.AdamW(model.parameters()), mode)
    for step in range(30):
        if step == 8:
            optimizer.flush()
            trial = wrap(model, torch.optim.AdamW(model.parameters()), "local")
            if deleted:
                del trial
                gc.collect()
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if step == 8 and not deleted:
            with pytest.raises(ConfigurationError, match="built later"):
                optimizer.step()
            return
        optimizer.step()
    optimizer.flush()
    assert_replicas_equal(model)


@pytest.mark.parametrize("mode", ["compressed", "frozen"])
def test_a_parameter_comes_in_the_place_of_one_with_its_name(mode):
    model = Net()
    plain = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    optimizer = onebit.DistributedOptimizer(plain, **MODES[mode])
    for step in range(60):
        if step == 30:
            optimizer.flush()
            torch.manual_seed(5)
            model.last = torch.nn.Linear(64, 10)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.flush()
    assert_replicas_equal(model)
    assert not torch.equal(model.last.weight, torch.nn.Linear(64, 10).weight)


@pytest.mark.parametrize("mode", ["compressed", "frozen", "zero_one"])
def test_a_group_that_is_exact_from_now_on(mode):
    model = Net()
    groups = [{"params": list(layer.parameters())} for layer in (model.first, model.second, model.last)]
    optimizer = onebit.DistributedOptimizer(torch.optim.AdamW(groups), list(model.named_parameters()), **MODES[mode])
    counts = []
    for step in range(90):
        if step in (30, 42):
            optimizer.param_groups[1]["exact"] = step == 30
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        counts.append(optimizer.stats().compressed_parameters)
    optimizer.flush()
    assert_replicas_equal(model)
    assert counts[29] == counts[89] == counts[40] + model.second.weight.numel()
    optimizer.check_replicas()


def test_a_group_that_one_worker_alone_makes_exact_is_an_error_on_all():
    p, q = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    plain = torch.optim.AdamW([{"params": [p]}, {"params": [q]}], lr=1e-3)
    optimizer = onebit.DistributedOptimizer(plain, [("p", p), ("q", q)], **MODES["compressed"])
    for step in range(24):
        p.grad, q.grad = drawn(p.shape, step), drawn(p.shape, step)
        optimizer.step()
    optimizer.param_groups[1]["exact"] = ODD
    p.grad, q.grad = drawn(p.shape), drawn(p.shape)
    with pytest.raises(DesyncError):
        optimizer.step()


@pytest.mark.parametrize(
    ("mode", "kind"),
    [(mode, "AdamW") for mode in (*MODES, "gradients", "exact")]
    + [(mode, "SGD") for mode in ("warm-up", "compressed", "local", "gradients", "exact")]
    + [("exact", "NAdam"), ("local", "Adamax"), ("gradients", "RMSprop")],
)
def test_pytorchs_own_state_dicts_on_one_worker_alone(mode, kind):
    """Without state and gradients, PyTorch calls ``step`` to make a state."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    found = []
    for asks in (True, False):
        model = Net()
        make = getattr(torch.optim, kind)
        options = MODES | {"gradients": {"schedule": onebit.Gradients()}, "exact": {"recipe": "exact"}}
        optimizer = onebit.DistributedOptimizer(
            make(model.parameters(), lr=1e-3), list(model.named_parameters()), **options[mode]
        )
        for step in range(30):
            if asks and ODD and step in (0, 8, 24):
                state = get_optimizer_state_dict(model, optimizer)["state"]
                assert kind != "AdamW" or not step or "exp_avg" in state["first.weight"]
            x, y = batch(step)
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        found.append(weights(model))
        assert_replicas_equal(model)
    assert torch.equal(*found)


@pytest.mark.parametrize("asks", [(0,), (SIZE - 1,), range(SIZE)], ids=["the root", "another", "all"])
@pytest.mark.parametrize("broadcasts", [onebit.broadcast_optimizer_state, "horovod's", None])
def test_a_state_that_was_made_to_be_shown_and_one_that_is_broadcast(broadcasts, asks):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = Net()
    make = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.1)
    optimizer = onebit.DistributedOptimizer(make, list(model.named_parameters()), recipe="exact")
    if RANK in asks:
        get_optimizer_state_dict(model, optimizer)
    if broadcasts == "horovod's":
        world.broadcast_optimizer_state(optimizer, root_rank=0)
    elif broadcasts:
        broadcasts(optimizer, 0)
    optimizer.check_replicas()
    for step in range(6):
        x, y = batch(step)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_replicas_equal(model)
    optimizer.check_replicas()


def test_a_momentum_that_is_raised_from_zero_is_in_the_state():
    p = torch.nn.Parameter(torch.ones(64, 64))
    plain = torch.optim.SGD([p], lr=1e-3)
    optimizer = onebit.DistributedOptimizer(plain, [("p", p)], warmup_steps=3)
    for step in range(20):
        if step == 10:
            optimizer.param_groups[0]["momentum"] = 0.9
        optimizer.zero_grad()
        (p * drawn(p.shape, step)).sum().backward()
        optimizer.step()
        if step == 15:
            p.data = p.data.clone()  # bound anew
            assert optimizer.state_dict()["state"][0]["momentum_buffer"].abs().sum() > 0
            before = optimizer.state[p]["momentum_buffer"].clone()
        if step == 16:
            moved = optimizer.state[p]["momentum_buffer"] - 0.9 * before
            assert moved.square().mean().sqrt() < 3  # a mean gradient
    optimizer.check_replicas()


@pytest.mark.parametrize("mode", ["warm-up", "compressed", "frozen", "local"])
def test_a_backward_pass_through_weights_of_before_the_step_is_pytorchs_error(mode):
    model = Net()
    optimizer = wrap(model, torch.optim.AdamW(model.parameters()), mode)
    for step in range(30):
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        loss = cross_entropy(model(x), y)
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

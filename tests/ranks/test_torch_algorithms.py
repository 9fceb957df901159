"""The PyTorch face on real ranks: 0/1 Adam, DeepSpeed's names."""

import copy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit import CheckpointError, ConfigurationError, DesyncError, Recipe, UnsupportedError
from horovod_onebit.schedule import Sends
from horovod_onebit.torch.diagnostics import Collector, gradients
from horovod_onebit.warmup import AutoWarmup, Phase
from tests.ranks.kinds import Renewed
from tests.ranks.torch_common import (
    RANK,
    REPEATABLE,
    SIZE,
    Net,
    assert_replicas_equal,
    batch,
    train,
    two_ranks_only,
    weights,
    wrap,
)
from tests.ranks.world import world

SCHEDULE = onebit.ZeroOne(var_freeze_step=40, var_update_scaler=4, local_step_scaler=20, local_step_clipper=4)


QUICK = onebit.ZeroOne(var_freeze_step=4, var_update_scaler=2, local_step_scaler=2, local_step_clipper=4)
"""After 14 steps, two local ones were taken since the last exchange."""


def zero_one(model, kind=torch.optim.AdamW, recipe="robust", schedule=SCHEDULE, **arguments):
    optimizer = kind(model.parameters(), **({"lr": 1e-3} | arguments))
    return onebit.DistributedOptimizer(optimizer, model.named_parameters(), schedule=schedule, recipe=recipe)


def apart(model):
    gathered = world.allgather(weights(model)[None], name="weights.local")
    return not torch.equal(gathered[0], gathered[-1])


@pytest.mark.parametrize("recipe", ["robust", Recipe(exchange="two_stage"), "paper"])
def test_zero_one_adam(recipe):
    model = Net()
    optimizer = zero_one(model, recipe=recipe)
    train(model, optimizer, 4)
    assert optimizer.phase is Phase.COMPRESSED
    sent = optimizer.stats().bytes_sent
    start = train(model, optimizer, 1, start=4)
    kinds, seen = {}, 4 + (SCHEDULE.sends(1) is Sends.MEAN)
    for step in range(5, 96):
        variance = optimizer.state[model.first.weight]["exp_avg_sq"].clone()
        end = train(model, optimizer, 1, start=step)
        kind = SCHEDULE.sends(step - 3)
        kinds[kind] = optimizer.stats(norms=False).step_bytes_sent
        renewed = not torch.equal(variance, optimizer.state[model.first.weight]["exp_avg_sq"])
        assert renewed == (kind is Sends.MEAN)
        seen += renewed
        if kind is not Sends.NOTHING:
            assert_replicas_equal(model)
        else:
            assert apart(model)
    assert end < 0.9 * start
    assert kinds[Sends.NOTHING] < kinds[Sends.DISPLACEMENT] == kinds[Sends.GRADIENT] < kinds[Sends.MEAN] / 10
    assert max(optimizer.state_dict()["param_groups"][0]["horovod_onebit"]["variance_steps"]) == seen
    assert optimizer.stats().bytes_sent > sent


@two_ranks_only
def test_zero_one_adam_resumes_bit_for_bit_after_an_exchange():
    for at in (3, 20, 64):  # warm-up, the gradient's stage, the local stage just after an exchange
        assert at < 4 or SCHEDULE.sends(at - 4) is not Sends.NOTHING
        model, again = Net(), Net(seed=1)
        optimizer, resumed = zero_one(model), zero_one(again)
        train(model, optimizer, at)
        state = copy.deepcopy([model.state_dict(), optimizer.state_dict(), optimizer.feedback_state_dict()])
        train(model, optimizer, 30, start=at)
        again.load_state_dict(state[0])
        resumed.load_state_dict(state[1])
        resumed.load_feedback_state_dict(state[2])
        train(again, resumed, 30, start=at)
        assert torch.equal(weights(model), weights(again))


FEW_BITS = onebit.ZeroOne(var_freeze_step=20, local_step_scaler=8, local_step_clipper=4, warmup="three_bit")


@two_ranks_only
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_zero_one_adam_after_a_warm_up_in_few_bits(exchange):
    """Until the freeze every step renews the second moment; the workers stay alike but for local steps."""
    recipe = Recipe(exchange=exchange)
    model = Net()
    optimizer = zero_one(model, schedule=FEW_BITS, recipe=recipe)
    start, sent = train(model, optimizer, 1), [0]
    for step in range(1, 48):
        variance = optimizer.state[model.first.weight]["exp_avg_sq"].clone()
        end = train(model, optimizer, 1, start=step)
        sent.append(optimizer.stats(norms=False).step_bytes_sent)
        renewed = not torch.equal(variance, optimizer.state[model.first.weight]["exp_avg_sq"])
        assert renewed == (step < 20)
        if step >= 20 and FEW_BITS.sends(step - 19) is Sends.NOTHING:
            assert apart(model)
        else:
            assert_replicas_equal(model)
    assert end < 0.9 * start
    assert sent[1] == sent[9] > 4 * sent[10] == 4 * sent[19] > 8 * sent[20]


@two_ranks_only
@pytest.mark.parametrize("steps", [15, 20, 32])
def test_after_a_warm_up_in_few_bits_it_resumes_bit_for_bit(steps, tmp_path):
    """In the warm-up, at its end, and after an exchange."""
    folder = Path(world.broadcast_object(str(tmp_path), root_rank=0, name="folder"))
    model, again = Net(), Net(seed=1)
    optimizer, resumed = (zero_one(m, schedule=FEW_BITS) for m in (model, again))
    train(model, optimizer, steps)
    onebit.save_checkpoint(folder, model, optimizer)
    onebit.load_checkpoint(folder, again, resumed)
    for m, o in ((model, optimizer), (again, resumed)):
        train(m, o, 24, start=steps)
    assert torch.equal(weights(model), weights(again))


@two_ranks_only
def test_a_checkpoint_belongs_to_its_schedule(tmp_path):
    """What residuals are of depends on it: those of gradients are far too large for moved weights."""
    folder = Path(world.broadcast_object(str(tmp_path), root_rank=0, name="folder"))
    optimizer = zero_one(model := Net())
    train(model, optimizer, 12)
    onebit.save_checkpoint(folder, model, optimizer)
    other = zero_one(again := Net(), schedule=FEW_BITS)
    told = (
        r"saved with schedule=ZeroOne\(var_freeze_step=40, .* and this optimizer is with schedule=ZeroOne\(.*three_bit"
    )
    with pytest.raises(CheckpointError, match=told):
        onebit.load_checkpoint(folder, again, other)
    with pytest.raises(ConfigurationError, match=told):
        other.load_feedback_state_dict(optimizer.feedback_state_dict())
    train(again, other, 24)
    other.flush()
    assert_replicas_equal(again)


@two_ranks_only
@pytest.mark.parametrize("recipe", ["robust", Recipe(exchange="two_stage"), "paper"])
def test_a_schedule_of_ones_own(recipe):
    """Of one bit and, now and then, exact steps; and it goes on bit for bit from a saved state."""
    model, again = Net(), Net(seed=1)
    optimizer, resumed = (zero_one(m, recipe=recipe, schedule=Renewed()) for m in (model, again))
    train(model, optimizer, 1)
    for step in range(1, 24):
        variance = optimizer.state[model.first.weight]["exp_avg_sq"].clone()
        train(model, optimizer, 1, start=step)
        renewed = not torch.equal(variance, optimizer.state[model.first.weight]["exp_avg_sq"])
        assert renewed == (step < 4 or Renewed().sends(step - 3) is Sends.MEAN)
        assert_replicas_equal(model)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_feedback_state_dict(optimizer.feedback_state_dict())
    for m, o in ((model, optimizer), (again, resumed)):
        train(m, o, 12, start=24)
    assert torch.equal(weights(model), weights(again))


@two_ranks_only
def test_workers_whose_schedules_differ_are_told():
    optimizer = zero_one(model := Net(), schedule=Renewed(every=5 + RANK))
    with pytest.raises(DesyncError, match="schedule differs between workers"):
        train(model, optimizer, 12)


@two_ranks_only
def test_workers_whose_schedules_say_different_things_are_told(monkeypatch):
    optimizer = zero_one(model := Net(), schedule=Renewed())
    monkeypatch.setattr(Renewed, "sends", lambda self, number: Sends.MEAN if RANK and number == 3 else Sends.GRADIENT)
    with pytest.raises(DesyncError, match="what this step sends, by the schedule, differs between workers: gradient"):
        train(model, optimizer, 12)


@pytest.mark.parametrize("steps", [2, 10, 43, 75])
def test_zero_one_adam_skips_a_nan_on_all_workers(steps):
    model = Net()
    optimizer = zero_one(model)
    train(model, optimizer, steps)
    x, y = batch(steps)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    if RANK == SIZE - 1 and steps >= 4:
        model.first.weight.grad[0, 0] = float("nan")
    before = weights(model)
    optimizer.step()
    assert torch.equal(before, weights(model)) == (steps >= 4)
    train(model, optimizer, 90 - steps, start=steps)
    assert optimizer.stats().skipped_steps == (steps >= 4)
    optimizer.flush()
    assert_replicas_equal(model)


@pytest.mark.parametrize("how", ["frozen", "frozen after backward", "frozen before synchronize", "taken out"])
def test_zero_one_adam_and_a_parameter_that_leaves_between_two_exchanges(how):
    model = Net()
    weight = model.second.weight
    optimizer = zero_one(model, schedule=QUICK)
    train(model, optimizer, 14)
    assert apart(model.second)
    if how == "frozen":
        weight.requires_grad_(False)
    elif how == "taken out":
        optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p is not weight]
    x, y = batch(14)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    if how.startswith("frozen"):
        weight.requires_grad_(False)
    if how == "frozen before synchronize":
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()
    kept = weight.detach().clone()
    train(model, optimizer, 4, start=15)
    optimizer.flush()
    assert torch.equal(kept, weight)
    assert_replicas_equal(model)
    weight.grad = None
    if how == "taken out":
        optimizer.add_param_group({"params": [weight]})
    else:
        weight.requires_grad_(True)
    train(model, optimizer, 4, start=19)
    optimizer.flush()
    assert not torch.equal(kept, weight)
    assert_replicas_equal(model)


def test_zero_one_adam_and_a_parameter_that_one_worker_freezes_alone():
    model = Net()
    optimizer = zero_one(model, schedule=QUICK)
    train(model, optimizer, 14)
    model.second.weight.requires_grad_(RANK > 0)
    with pytest.raises(DesyncError, match=r"worker 0 flush\(\)"):
        train(model, optimizer, 1, start=14)
    model.second.weight.requires_grad_(True)
    train(model, optimizer, 4, start=14)
    optimizer.flush()
    assert_replicas_equal(model)


@pytest.mark.parametrize("since", ["a state was loaded", "an exact group was added", "memory was replaced"])
def test_zero_one_adam_is_flushed_whatever_has_changed(since):
    model = Net()
    optimizer = zero_one(model, schedule=QUICK)
    train(model, optimizer, 14)
    assert apart(model)
    if since == "a state was loaded":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif since == "an exact group was added":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(40, 40))], "exact": True})
    else:
        model.second.weight.data = model.second.weight.data.clone()
    optimizer.flush()
    assert_replicas_equal(model)
    train(model, optimizer, 5, start=14)
    optimizer.flush()
    assert_replicas_equal(model)


def test_a_plain_lamb_of_half_precision_goes_on_from_its_own_state():
    weight = torch.nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    optimizer = onebit.LAMB([weight], lr=0.1)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[weight]["layer"].dtype is torch.float32
    assert float(weight.detach().max()) < 0.9


@pytest.mark.parametrize("build", [onebit.OnebitAdam, onebit.OnebitLamb])
def test_deepspeeds_names_warm_up_by_themselves(build):
    assert isinstance(build(Net().parameters())._parameters.warmup, AutoWarmup)


@pytest.mark.parametrize("arguments", [{"recipe": "exact"}, {"schedule": onebit.Local(every=2)}])
def test_deepspeeds_names_take_the_wrapper_s_arguments(arguments):
    trained = []
    for named in (True, False):
        model = Net()
        if named:
            optimizer = onebit.OnebitAdam(model.parameters(), lr=1e-3, **arguments)
        else:
            plain = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
            optimizer = onebit.DistributedOptimizer(plain, **arguments)
        train(model, optimizer, 4)
        trained.append(weights(model))
    assert torch.equal(*trained)


def test_deepspeeds_names():
    for build in (
        lambda p: onebit.OnebitAdam(p, lr=1e-3, freeze_step=5, weight_decay=0.01, eps_inside_sqrt=True),
        lambda p: onebit.OnebitLamb(p, lr=1e-2, freeze_step=5, max_coeff=0.3, bias_correction=False),
        lambda p: onebit.ZeroOneAdam(p, lr=1e-3, var_freeze_step=20, var_update_scaler=4, recipe="fixed"),
        lambda p: onebit.ZeroOneAdam(p, lr=1e-3, var_freeze_step=15, warmup="three_bit"),
    ):
        model = Net()
        optimizer = build(model.parameters())
        train(model, optimizer, 30)
        assert optimizer.phase is Phase.COMPRESSED
        assert_replicas_equal(model)
    refused = [
        (onebit.OnebitAdam, {"bias_correction": False}, "bias"),
        (onebit.OnebitAdam, {"amsgrad": True}, "amsgrad"),
        (onebit.OnebitAdam, {"eps_inside_sqrt": True, "recipe": "exact"}, "leave one out"),
        (onebit.OnebitLamb, {"max_grad_norm": 1.0}, "clip_grad_norm_"),
        (onebit.ZeroOneAdam, {"max_grad_norm": 1.0}, "clip_grad_norm_"),
    ]
    for kind, arguments, message in refused:
        with pytest.raises(UnsupportedError, match=message):
            kind(Net().parameters(), **arguments)


@pytest.mark.parametrize("recipe", ["robust", "paper"])
def test_deepspeeds_bounds_on_a_frozen_coefficient_have_no_effect(recipe):
    trained = []
    for bounds in ({}, {"factor_max": 1.5, "factor_min": 0.9, "factor_threshold": 0.01}):
        model = Net()
        optimizer = onebit.OnebitLamb(model.parameters(), lr=1e-2, freeze_step=5, recipe=recipe, **bounds)
        assert not optimizer.param_groups[0].keys() & {"factor_max", "factor_min", "factor_threshold"}
        train(model, optimizer, 15)
        assert optimizer.phase is Phase.COMPRESSED
        assert_replicas_equal(model)
        trained.append(weights(model))
    assert torch.equal(*trained) or not REPEATABLE


def test_diagnostics_of_a_model():
    model = Net()
    optimizer = wrap(model, warmup_steps=3)
    collector = Collector()
    for step in range(6):
        optimizer.zero_grad()
        x, y = batch(step)
        cross_entropy(model(x), y).backward()
        collector.add(gradients(model.named_parameters()))
        optimizer.step()
    found = collector.report()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained - {"unused"} <= {layer.name for layer in found.layers} <= trained
    assert found.verdict("robust") == "fine"


def test_what_zero_one_adam_is_not():
    p = [torch.nn.Parameter(torch.zeros(2000))]
    for optimizer, kind in ((torch.optim.SGD(p, lr=0.1), UnsupportedError), (onebit.LAMB(p), UnsupportedError)):
        with pytest.raises(kind, match="is for Adam and AdamW"):
            onebit.DistributedOptimizer(optimizer, schedule=SCHEDULE)
    with pytest.raises(ConfigurationError, match="first steps are the warm-up"):
        onebit.DistributedOptimizer(torch.optim.Adam(p), schedule=SCHEDULE, warmup_steps=10)

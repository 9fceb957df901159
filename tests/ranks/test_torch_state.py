"""The PyTorch face on real ranks: saving, loading, broadcasting, freezing, several optimizers."""

import copy
import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError, DesyncError, Recipe, UnsupportedError
from horovod_onebit.torch import functions
from horovod_onebit.torch.transport import choose
from horovod_onebit.warmup import Phase
from tests.ranks.torch_common import (
    OPTIMIZERS,
    RANK,
    Net,
    assert_replicas_equal,
    batch,
    repeatable_sums_only,
    train,
    weights,
    wrap,
)
from tests.ranks.world import needs_horovod, world

# -- state ------------------------------------------------------------------------------------------------------------


@repeatable_sums_only
@pytest.mark.parametrize(("kind", "arguments"), [*OPTIMIZERS[1:4], OPTIMIZERS[6]])
@pytest.mark.parametrize("at", [3, 10])
@pytest.mark.parametrize("recipe", ["robust", "paper"])
def test_a_resumed_run_continues_bit_for_bit(kind, arguments, at, recipe, tmp_path):
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


SCHEDULES = onebit.ZeroOne(var_freeze_step=4), onebit.Local(2, freeze=4)
STATES = [
    *OPTIMIZERS[1:4],
    OPTIMIZERS[6],
    *((torch.optim.AdamW, {"warmup_steps": None, "wrapping": {"schedule": one}}) for one in SCHEDULES),
]


@repeatable_sums_only
@pytest.mark.parametrize(("kind", "arguments"), STATES)
@pytest.mark.parametrize("at", [0, 3, 12])
def test_a_state_that_is_kept_can_be_loaded_several_times(kind, arguments, at):
    """As trials of a search begin anew, and runs go back to their best state."""
    model = Net()
    optimizer = wrap(model, kind, **arguments)
    if at:
        train(model, optimizer, at)
    optimizer.flush()
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    before, ends = copy.deepcopy(kept[1]["state"]), []
    train(model, optimizer, 3, start=at)  # residuals of now would be kept with the state of now
    for _ in range(3):
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        train(model, optimizer, 12, start=at)
        optimizer.flush()
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    torch.testing.assert_close(kept[1]["state"], before, rtol=0, atol=0)


def test_a_state_that_was_loaded_in_place_is_taken():
    """As torch.distributed.checkpoint loads into what state_dict() gave."""
    model, again = Net(), Net(seed=1)
    optimizer, resumed = wrap(model), wrap(again)
    train(model, optimizer, 12)
    saved, state = copy.deepcopy(optimizer.state_dict()), resumed.state_dict()
    for position, entries in state["state"].items():
        for key, value in entries.items():
            value.copy_(saved["state"][position][key])
    state["param_groups"] = saved["param_groups"]
    resumed.load_state_dict(state)
    again.load_state_dict(model.state_dict())
    train(again, resumed, 6, start=12)
    assert resumed.stats().step == 18
    assert_replicas_equal(again)


@pytest.mark.parametrize("steps", [1, 12])
def test_a_state_that_is_still_the_running_optimizers_own_is_refused(steps):
    model = Net()
    optimizer = wrap(model)
    train(model, optimizer, steps)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)  # at once, as trainers do that move it to another device
    state = optimizer.state_dict()
    train(model, optimizer, 2, start=steps)
    with pytest.raises(ConfigurationError, match=r"changed in the 2 steps.*copy\.deepcopy"):
        optimizer.load_state_dict(state)
    train(model, optimizer, 2, start=steps + 2)
    assert_replicas_equal(model)


def test_residuals_that_were_loaded_before_the_state_is_broadcast_are_kept():
    model = Net()
    optimizer = wrap(model, warmup_steps=5)
    train(model, optimizer, 10)
    again = Net(seed=1)
    resumed, feedback = wrap(again, warmup_steps=5), optimizer.feedback_state_dict()
    assert any(value.any() for value in feedback.values())
    if RANK == 0:
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
    resumed.load_feedback_state_dict(feedback)
    onebit.broadcast_parameters(again.state_dict(), root_rank=0)
    onebit.broadcast_optimizer_state(resumed, root_rank=0)
    found = resumed.feedback_state_dict()
    assert found.keys() == feedback.keys()
    assert all(torch.equal(found[name], value) for name, value in feedback.items())


def test_residuals_of_a_run_that_worker_0_has_left_are_forgotten():
    model = Net()
    optimizer = wrap(model, warmup_steps=5)
    train(model, optimizer, 10)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 10, start=10)
    onebit.broadcast_optimizer_state(optimizer, root_rank=0)
    assert any(value.any() for value in optimizer.feedback_state_dict().values())
    for _ in range(2):  # the second time it is the state that all have loaded last
        if RANK == 0:
            optimizer.load_state_dict(copy.deepcopy(state))
        onebit.broadcast_optimizer_state(optimizer, root_rank=0)
        assert not any(value.any() for value in optimizer.feedback_state_dict().values())
        train(model, optimizer, 3, start=10)
        assert any(value.any() for value in optimizer.feedback_state_dict().values())
    train(model, optimizer, 3, start=10)
    assert_replicas_equal(model)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, onebit.LAMB])
def test_a_state_without_entries_of_parameters_that_are_frozen_by_now(kind):
    model, again = Net(), Net()
    optimizer = wrap(model, kind, warmup_steps=5)
    train(model, optimizer, 10)
    state = copy.deepcopy(optimizer.state_dict())
    first = next(iter(again.parameters()))
    first.requires_grad_(False)
    del state["state"][0]
    resumed = wrap(again, kind, warmup_steps=5)
    resumed.load_state_dict(state)
    train(again, resumed, 8, start=10)
    assert_replicas_equal(again)


def test_a_state_of_parameters_in_another_order_is_refused():
    model = Net()
    optimizer = wrap(model, warmup_steps=5)
    train(model, optimizer, 8)
    named = list(model.named_parameters())
    named = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in (named[0], *reversed(named[1:]))]
    other = onebit.DistributedOptimizer(torch.optim.AdamW([p for _, p in named]), named)
    with pytest.raises(ConfigurationError, match=r"in another order than those of the state: number \d+ is .*expected"):
        other.load_state_dict(optimizer.state_dict())


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
@pytest.mark.parametrize("broadcast", [world.broadcast_optimizer_state, onebit.broadcast_optimizer_state])
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


@pytest.mark.parametrize("steps", [2, 8])
def test_a_broadcast_that_writes_at_the_root_is_no_edit(steps, monkeypatch):
    """As Gloo does to what is in the memory of a GPU."""
    model = Net()
    optimizer = wrap(model, warmup_steps=5)
    transport = type(optimizer._compressor.transport)
    broadcast = transport.broadcast
    monkeypatch.setattr(transport, "broadcast", lambda self, x, *more: broadcast(self, x.copy_(x.clone()), *more))
    train(model, optimizer, steps)
    phase = optimizer.phase
    onebit.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, 1, start=steps)
    assert optimizer.phase is phase
    assert_replicas_equal(model)


@pytest.mark.parametrize("steps", [2, 8])
def test_the_resume_idiom_of_horovod_scripts(steps):
    """Rank 0 alone loads the checkpoint; Horovod's own functions bring it to all."""
    model = Net()
    first = wrap(model, warmup_steps=5)
    train(model, first, steps)
    checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": first.state_dict()})
    again = Net(seed=RANK)
    optimizer = wrap(again, warmup_steps=5)
    if RANK == 0:
        again.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    world.broadcast_parameters(again.state_dict(), root_rank=0)
    world.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.phase is first.phase
    assert optimizer.stats().step == steps
    assert "horovod_onebit" not in optimizer.param_groups[0]
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        if p.requires_grad:
            assert torch.equal(first.state[p]["exp_avg"], optimizer.state[q]["exp_avg"])
    train(again, optimizer, 6, start=steps)
    assert optimizer.phase is Phase.COMPRESSED
    assert_replicas_equal(again)


PAPER_LAMB = (onebit.LAMB, {"lr": 1e-2, "wrapping": {"recipe": "paper"}})


@pytest.mark.parametrize(("kind", "arguments"), [*OPTIMIZERS, PAPER_LAMB])
@pytest.mark.parametrize(
    ("broadcast", "steps", "here"),
    [
        (world.broadcast_optimizer_state, 2, 0),
        (world.broadcast_optimizer_state, 8, 0),
        (world.broadcast_optimizer_state, 2, 7),
        (world.broadcast_optimizer_state, 9, 7),
        (onebit.broadcast_optimizer_state, 8, 0),
    ],
)
@repeatable_sums_only
def test_what_rank_0_alone_loads_is_what_all_would_load(kind, arguments, steps, broadcast, here):
    """Into an optimizer that has taken ``here`` steps; whatever each rank's state was made of."""
    arguments = dict(arguments)
    recipe = arguments.pop("wrapping", {}).get("recipe", "robust")
    model = Net()
    first = wrap(model, kind, warmup_steps=5, recipe=recipe, **arguments)
    train(model, first, steps)
    checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": first.state_dict()})

    def resume(alone):
        again = Net()
        optimizer = wrap(again, kind, warmup_steps=5, recipe=recipe, **arguments)
        if here:
            train(again, optimizer, here, start=50)
        again.load_state_dict(checkpoint["model"])
        optimizer.load_feedback_state_dict({})
        if RANK == 0 or not alone:
            optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
        if alone:
            broadcast(optimizer, root_rank=0)
        assert optimizer.phase is first.phase
        train(again, optimizer, 3, start=steps)
        return weights(again)

    assert torch.equal(resume(alone=True), resume(alone=False))


@pytest.mark.parametrize(("kind", "arguments"), [*OPTIMIZERS[:3], OPTIMIZERS[6]])
def test_a_plain_optimizer_goes_on_with_a_compressed_state(kind, arguments):
    model = Net()
    ours = wrap(model, kind, warmup_steps=5, **arguments)
    train(model, ours, 60)
    state = copy.deepcopy(ours.state_dict())
    other = Net()
    other.load_state_dict(model.state_dict())
    plain = kind(other.parameters(), **arguments)
    plain.load_state_dict(state)
    p, q = model.first.weight, other.first.weight
    before = p.detach().clone()
    assert float(plain.state[q]["step"]) == 60
    beta2 = plain.param_groups[0]["betas"][1]
    frozen = ours.state[p]["exp_avg_sq"] / (1 - beta2**5)
    torch.testing.assert_close(plain.state[q]["exp_avg_sq"] / (1 - beta2**60), frozen, rtol=1e-5, atol=0)
    for net, optimizer in ((model, ours), (other, plain)):
        optimizer.zero_grad()
        x, y = batch(60, rank=0)  # the same on all workers
        cross_entropy(net(x), y).backward()
        optimizer.step()
    ratio = (q.detach() - before).norm() / (p.detach() - before).norm()
    # LAMB's step is as long as the weights ask for, or as the mean coefficient of warm-up does.
    assert (0.2 if kind is onebit.LAMB else 0.5) < float(ratio) < 1.5


def _plain(model, checkpoint, kind=torch.optim.AdamW):
    model.load_state_dict(checkpoint["model"])
    plain = kind(model.parameters(), lr=1e-3)
    plain.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
    return plain


@repeatable_sums_only
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, onebit.LAMB])
@pytest.mark.parametrize("steps", [3, 40])
def test_a_plain_optimizer_that_has_loaded_our_state_is_wrapped(kind, steps):
    model = Net()
    first = wrap(model, kind, warmup_steps=5)
    train(model, first, steps)
    checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": first.state_dict()})
    found = []
    for load_first in (False, True):
        again = Net()
        if load_first:
            plain = _plain(again, checkpoint, kind)
            optimizer = onebit.DistributedOptimizer(plain, list(again.named_parameters()), warmup_steps=5)
        else:
            optimizer = wrap(again, kind, warmup_steps=5)
            again.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
        assert optimizer.phase is first.phase
        assert optimizer.stats().step == steps
        assert "horovod_onebit" not in optimizer.param_groups[0]
        train(again, optimizer, 6, start=steps)
        found.append(weights(again))
    assert torch.equal(*found)


def test_a_plain_optimizer_that_went_on_is_wrapped():
    model = Net()
    first = wrap(model, warmup_steps=5)
    train(model, first, 60)
    again = Net()
    plain = _plain(again, copy.deepcopy({"model": model.state_dict(), "optimizer": first.state_dict()}))
    for step in range(60, 70):
        plain.zero_grad()
        x, y = batch(step, rank=0)
        cross_entropy(again(x), y).backward()
        plain.step()
    optimizer = onebit.DistributedOptimizer(plain, list(again.named_parameters()), warmup_steps=5)
    assert optimizer.phase is Phase.COMPRESSED
    progress = optimizer.state_dict()["param_groups"][0]["horovod_onebit"]
    assert set(progress["variance_steps"]) == {0, 70, 5}  # small parameters; those that went on; the unused one
    before = again.first.weight.detach().clone()
    train(again, optimizer, 1, start=70)
    assert float((again.first.weight - before).detach().abs().max()) < 3.1e-3
    train(again, optimizer, 3, start=71)
    assert_replicas_equal(again)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, onebit.LAMB])
def test_a_state_that_was_saved_by_the_plain_optimizer_within_warms_up_from_the_right_moments(kind):
    model, named = Net(), lambda model: list(model.named_parameters())
    plain = kind(model.parameters(), lr=1e-3)
    optimizer = onebit.DistributedOptimizer(plain, named(model), warmup_steps=5)
    train(model, optimizer, 60)
    saved, again = copy.deepcopy(plain.state_dict()), Net()
    resumed = wrap(again, kind, warmup_steps=5)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved)
    assert resumed.phase is Phase.WARMUP
    rewrapped = onebit.DistributedOptimizer(plain, named(model), warmup_steps=5)  # whose state is the same
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        expected, found = rewrapped.state[p], resumed.state[q]
        assert expected.keys() == found.keys()
        assert all(value is None or torch.equal(value, found[key]) for key, value in expected.items())
    train(again, resumed, 8)
    assert resumed.phase is Phase.COMPRESSED
    assert_replicas_equal(again)


def test_states_of_formats_that_nothing_reads_are_refused():
    optimizer = wrap(Net(), warmup_steps=5)
    state = copy.deepcopy(optimizer.state_dict())
    for version in (1, 4):
        state["param_groups"][0]["horovod_onebit"]["version"] = version
        with pytest.raises(ConfigurationError, match=f"format {version}"):
            optimizer.load_state_dict(state)


@needs_horovod
def test_horovods_own_elastic_state_keeps_error_feedback():
    """Of this library, nothing is imported but ``horovod_onebit.torch``."""
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 6)
    before, residuals = weights(model), optimizer.feedback_state_dict()
    assert any(value.any() for value in residuals.values())
    elastic = world.elastic.TorchState(model=model, optimizer=optimizer, step=6)
    train(model, optimizer, 3, start=6)
    elastic.restore()
    assert torch.equal(before, weights(model))
    for name, value in optimizer.feedback_state_dict().items():
        assert torch.equal(value, residuals[name])
    elastic.sync()
    for name, value in optimizer.feedback_state_dict().items():
        mean = world.allreduce(residuals[name], name=f"mean.{name}") if value.numel() else value
        torch.testing.assert_close(value, mean)
    train(model, optimizer, 3, start=6)
    assert_replicas_equal(model)


def with_schedule(model, schedule):
    options = {"warmup_steps": 2} if schedule is None else {"schedule": schedule}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return onebit.DistributedOptimizer(optimizer, list(model.named_parameters()), **options)


@needs_horovod
@pytest.mark.parametrize("schedule", [None, onebit.Local(every=4)])
def test_what_elastic_workers_have_after_a_sync_is_what_they_go_back_to(schedule):
    """Worker 1 has just joined, with weights of its own; the older one is lost before the next commit."""
    from horovod_onebit.torch.elastic import TorchState

    model = Net()
    if RANK == 1:
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
    optimizer = with_schedule(model, schedule)
    state = TorchState(model=model, optimizer=optimizer, step=0)
    state.sync()
    assert_replicas_equal(model)
    train(model, optimizer, 8)
    before, state.step = weights(model), 8
    state.sync()  # of check_host_updates(), say, without a commit
    assert state.step == 8
    assert torch.equal(weights(model), before)
    train(model, optimizer, 6, start=8)
    assert model.first.weight.grad is not None
    state.step = 14
    state.restore()
    assert state.step == 8
    assert torch.equal(weights(model), before)
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)  # of a step that came to nothing
    assert optimizer.stats().step == 8
    train(model, optimizer, 6, start=8)
    state.restore()  # once more: it has kept a copy
    assert torch.equal(weights(model), before)
    assert optimizer.stats().step == 8
    state.sync()
    train(model, optimizer, 6, start=8)
    optimizer.flush()
    assert_replicas_equal(model)


@needs_horovod
def test_values_go_back_with_the_weights_if_a_worker_is_lost_in_a_sync(monkeypatch):
    import horovod.torch.elastic as hvd_elastic
    from horovod.common.exceptions import HorovodInternalError

    from horovod_onebit.torch.elastic import TorchState

    def lost(self):
        raise HorovodInternalError("a worker is lost")

    model = Net()
    optimizer = with_schedule(model, None)
    state = TorchState(model=model, optimizer=optimizer, step=0)
    state.sync()
    train(model, optimizer, 4)
    before, state.step = weights(model), 4
    state.commit()
    train(model, optimizer, 2, start=4)
    state.step = 6
    with monkeypatch.context() as patch:
        patch.setattr(hvd_elastic.TorchState, "sync", lost)
        with pytest.raises(HorovodInternalError):
            state.sync()
    state.restore()
    assert torch.equal(weights(model), before)
    assert state.step == 4


@needs_horovod
@pytest.mark.parametrize("schedule", [None, onebit.Local(every=4)])
def test_a_new_elastic_worker_that_trains_other_layers(schedule):
    """They were unfrozen, or frozen, since the job began: an error on all workers says so; none waits."""
    from horovod_onebit.torch.elastic import TorchState

    model = Net()
    optimizer = with_schedule(model, schedule)
    train(model, optimizer, 6)
    if RANK == 1:
        model.first.weight.requires_grad_(False)
    state = TorchState(model=model, optimizer=optimizer, step=0)
    state.sync()
    with pytest.raises(DesyncError, match=r"first\.weight"):
        train(model, optimizer, 6)


def test_a_broadcast_between_different_groups_is_refused_everywhere():
    model = Net()
    extra = torch.nn.Parameter(torch.zeros(5))
    optimizer = wrap(model)
    if RANK == 0:
        optimizer.add_param_group({"params": [extra]})
    with pytest.raises(ConfigurationError, match="other parameter groups"):
        onebit.broadcast_optimizer_state(optimizer, root_rank=0)


@needs_horovod
@pytest.mark.parametrize("most", [8, 1000, functions.LARGEST])
def test_tensors_of_any_kind_are_broadcast_in_pieces(most, monkeypatch):
    """Horovod counts the elements of one with int32, and refuses some dtypes."""
    send, names = world.broadcast_async_, []

    def checked(tensor, root_rank, name, **more):
        assert tensor.numel() * tensor.itemsize <= most
        names.append(name)
        return send(tensor, root_rank, name=name, **more)

    torch.manual_seed(RANK)
    of_dtypes = [torch.randn(size).to(d) for d in (torch.float32, torch.float64, torch.bfloat16) for size in (7, 300)]
    of_dtypes += [torch.randn(n) > 0 for n in (7, 12)] + [torch.randn(3, dtype=torch.complex64), torch.empty(0, 3)]
    no_dimensions = [torch.tensor(RANK), torch.tensor(RANK == 0), torch.randn((), dtype=torch.bfloat16)]
    of_layouts = [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(6, 4).t()]
    odd = torch.randn(9, dtype=torch.bfloat16)[1:] if RANK else torch.randn(8, dtype=torch.bfloat16)
    tensors = [*of_dtypes, *no_dimensions, *of_layouts, odd]
    expected = world.broadcast_object(copy.deepcopy(tensors), root_rank=1, name="expected")
    monkeypatch.setattr(functions, "LARGEST", most)
    monkeypatch.setattr(world, "broadcast_async_", checked)
    functions.broadcast_tensors(tensors, 1, choose(call="a test"), "pieces")
    monkeypatch.undo()
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, expected, strict=True))
    assert len(names) == len(set(names))
    assert len({str(found) for found in world.allgather_object(names, name="names")}) == 1
    assert (len(names) > len(tensors)) == (most < 10_000)


def test_loading_into_a_longer_warm_up_makes_no_leap():
    model = Net()
    first = wrap(model, warmup_steps=3)
    train(model, first, 100)
    state = copy.deepcopy(first.state_dict())
    optimizer = wrap(model, warmup_steps=200)
    optimizer.load_state_dict(state)
    assert optimizer.phase is Phase.WARMUP
    before = model.first.weight.detach().clone()
    train(model, optimizer, 1, start=100)
    assert float((model.first.weight - before).abs().max()) < 4e-3
    assert optimizer.state_dict()["param_groups"][0]["horovod_onebit"]["variance_steps"] == [0] * 10


@repeatable_sums_only
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_automatic_warm_up_is_the_default(kind):
    def build():
        model = Net()
        recipe = Recipe(warmup="exact")  # what is learned of gradients in few bits is not in ``state_dict()``
        return model, wrap(model, kind, warmup_steps=None, recipe=recipe, lr=1e-3)

    model, optimizer = build()
    train(model, optimizer, 15)
    state = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, 185, start=15)
    steps = optimizer._parameters.warmup.steps
    assert 20 <= steps < 200
    assert optimizer.phase is Phase.COMPRESSED
    assert_replicas_equal(model)
    again, resumed = build()
    again.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    train(again, resumed, 185, start=15)
    assert resumed._parameters.warmup.steps == steps
    assert torch.equal(weights(model), weights(again))


def test_a_share_of_all_steps_as_warm_up():
    model = Net()
    optimizer = wrap(model, warmup_steps=0.1, wrapping={"total_steps": 41})
    train(model, optimizer, 4)
    assert optimizer.phase is Phase.WARMUP
    train(model, optimizer, 1, start=4)
    assert optimizer.phase is Phase.COMPRESSED


# -- which parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["warm-up", "compressed"])
def test_a_group_that_leaves_and_comes_back(phase):
    model = Net()
    late = torch.nn.Parameter(torch.ones(40, 40))
    optimizer = wrap(model, warmup_steps=2 if phase == "compressed" else 50)
    optimizer.add_param_group({"params": [late]})

    def some_steps(start, moves):
        before = late.detach().clone()
        for step in range(start, start + 4):
            optimizer.zero_grad()
            x, y = batch(step)
            (cross_entropy(model(x), y) + (late * x.mean()).sum()).backward()
            optimizer.step()
            late.grad = None
        assert torch.equal(before, late) != moves

    some_steps(0, moves=True)
    group = optimizer.param_groups.pop()
    some_steps(4, moves=False)
    optimizer.add_param_group(group)
    some_steps(8, moves=True)
    optimizer.param_groups.pop()
    other = onebit.DistributedOptimizer(torch.optim.SGD([late], lr=0.1), [("late", late)], warmup_steps=1)
    train(model, optimizer, 4, start=12)
    late.grad = torch.ones_like(late)
    other.step()
    assert_replicas_equal(model)
    assert torch.equal(*world.allgather(late.detach()[None], name="late.again")[:2])


def test_a_state_that_is_loaded_after_a_group_has_left():
    model = Net()
    late = torch.nn.Parameter(torch.ones(40, 40))
    optimizer = wrap(model, warmup_steps=2)
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones_like(late)
    train(model, optimizer, 5, set_to_none=None)
    optimizer.param_groups.pop()
    del optimizer.state[late]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.phase is Phase.COMPRESSED
    train(model, optimizer, 4, start=5)
    assert_replicas_equal(model)


@pytest.mark.parametrize("broadcast", [world.broadcast_optimizer_state, onebit.broadcast_optimizer_state])
def test_gradients_that_were_summed_are_not_summed_again_after_a_broadcast(broadcast):
    model = Net()
    optimizer = wrap(model, warmup_steps=50, wrapping={"op": world.Sum})
    train(model, optimizer, 2)
    optimizer.zero_grad()
    x, y = batch(2)
    cross_entropy(model(x), y).backward()
    optimizer.clip_grad_norm_(1e9)
    summed = model.first.weight.grad.clone()
    broadcast(optimizer, root_rank=0)
    optimizer.step()
    assert torch.equal(model.first.weight.grad, summed)
    assert_replicas_equal(model)


@pytest.mark.parametrize(("kind", "arguments"), [OPTIMIZERS[1], OPTIMIZERS[3], OPTIMIZERS[6]])
def test_a_model_that_is_converted_before_the_first_step(kind, arguments):
    model = Net()
    optimizer = wrap(model, kind, warmup_steps=3, **arguments)
    model.bfloat16()
    for step in range(6):
        optimizer.zero_grad()
        x, y = batch(step)
        cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()
    assert optimizer.phase is Phase.COMPRESSED
    assert_replicas_equal(model)


def test_a_compiled_model_has_the_names_of_its_own(tmp_path):
    results = []
    for compiled in (False, True):
        model = Net()
        named = (torch.compile(model) if compiled else model).named_parameters()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = onebit.DistributedOptimizer(optimizer, named, warmup_steps=2, exact=["first.weight"])
        train(model, optimizer, 5)
        results.append(optimizer.feedback_state_dict().keys())
    assert results[0] == results[1]


def test_an_optimizer_that_one_worker_could_not_build_at_first():
    model = Net()
    if RANK == 1:
        with pytest.raises(ConfigurationError, match="kernels='gpu'"):
            wrap(model, wrapping={"kernels": "gpu"})
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 5)
    assert_replicas_equal(model)


@pytest.mark.parametrize(
    ("warmup_steps", "schedule"), [(3, None), (50, None), (None, onebit.Local(every=3, doubling=0))]
)
@pytest.mark.parametrize("clips", [False, True])
def test_freezing_between_backward_and_step(warmup_steps, schedule, clips):
    model = Net()
    optimizer = wrap(model, warmup_steps=warmup_steps, wrapping={"overlap": False, "schedule": schedule})
    train(model, optimizer, 6)
    before = [p.detach().clone() for p in model.norm.parameters()], model.second.weight.detach().clone()
    optimizer.zero_grad()
    x, y = batch(6)
    cross_entropy(model(x), y).backward()
    for p in (*model.norm.parameters(), model.second.weight):
        p.requires_grad_(False)
    if clips:
        optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before[0], model.norm.parameters(), strict=True))
    assert torch.equal(before[1], model.second.weight)
    optimizer.flush()
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


def test_the_order_of_freezing_does_not_matter_to_anybody():
    model = Net()
    optimizer = wrap(model, warmup_steps=3)
    train(model, optimizer, 6)
    model.first.weight.requires_grad_(False)
    train(model, optimizer, 2, start=6)
    model.first.weight.requires_grad_(True)
    train(model, optimizer, 8, start=8)
    residuals = optimizer.feedback_state_dict()
    onebit.broadcast_optimizer_state(optimizer, root_rank=0)
    for key, value in optimizer.feedback_state_dict().items():
        assert torch.equal(value, residuals[key])
    train(model, optimizer, 4, start=16)
    assert_replicas_equal(model)


@pytest.mark.parametrize("how", ["scaler", "synchronize", "groups"])
def test_unfreezing_and_freezing_in_warm_up(how):
    model = Net()
    model.second.weight.requires_grad_(False)
    optimizer = wrap(model, warmup_steps=30, wrapping={"groups": 2} if how == "groups" else {})
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(8):
        if step == 3:
            model.second.weight.requires_grad_(True)
        if step == 6:
            model.second.weight.requires_grad_(False)
            before = model.second.weight.detach().clone()
        optimizer.zero_grad()
        x, y = batch(step)
        loss = cross_entropy(model(x), y)
        if how == "scaler":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if how == "synchronize":
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
    assert torch.equal(before, model.second.weight)
    assert_replicas_equal(model)


def test_a_scheduler_made_before_wrapping_survives_a_load():
    model = Net()
    plain = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = onebit.DistributedOptimizer(plain, list(model.named_parameters()), warmup_steps=2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert plain.state is optimizer.state


@pytest.mark.parametrize(
    ("alone", "schedule"), [(False, None), (True, None), (False, onebit.Local(every=2, doubling=0))]
)
def test_a_state_that_is_loaded_into_the_plain_optimizer_after_wrapping_is_an_error(alone, schedule):
    model = Net()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = onebit.DistributedOptimizer(plain, list(model.named_parameters()), schedule=schedule)
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    if RANK == 0 or not alone:
        plain.load_state_dict(state)
    error = ConfigurationError if RANK == 0 or not alone else DesyncError
    with pytest.raises(error, match="load into what DistributedOptimizer returned"):
        train(model, optimizer, 1, start=2)
    optimizer.load_state_dict(state)  # which both have then
    assert plain.param_groups is optimizer.param_groups
    assert plain.state is optimizer.state
    train(model, optimizer, 1, start=2)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 5e-4
    optimizer.param_groups = list(optimizer.param_groups)  # and the plain one keeps its own
    train(model, optimizer, 3, start=3)
    assert_replicas_equal(model)


def test_a_broadcast_of_the_plain_optimizer_is_one_of_what_wraps_it():
    model = Net()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3 * (1 + RANK))
    optimizer = onebit.DistributedOptimizer(plain, list(model.named_parameters()), warmup_steps=2)
    onebit.broadcast_parameters(model.state_dict(), root_rank=0)
    onebit.broadcast_optimizer_state(plain, root_rank=0)
    train(model, optimizer, 4)
    assert plain.param_groups is optimizer.param_groups
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert_replicas_equal(model)


def test_what_a_load_may_not_bring_in():
    model = Net()
    other = torch.optim.AdamW(model.parameters(), amsgrad=True)
    optimizer = wrap(model)
    with pytest.raises(UnsupportedError, match="amsgrad"):
        optimizer.load_state_dict(other.state_dict())
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="complex64"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))]})
    optimizer.param_groups.pop()
    assert len(optimizer.param_groups) == 0


class Packed(torch.Tensor):
    """Stands for another tensor, as a quantized state does: it has no memory of its own, and no slices."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(function(args[0].inner))
        raise NotImplementedError(function)


class Packs(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                momentum = self.state[p].setdefault("momentum", Packed(torch.zeros_like(p))).inner
                p -= 1e-3 * momentum.mul_(0.9).add_(p.grad)


@pytest.mark.parametrize("arguments", [{"recipe": "exact"}, {"schedule": onebit.Gradients()}])
def test_a_state_of_tensors_that_stand_for_others(arguments):
    model, again = Net(), Net()
    optimizer, resumed = (
        onebit.DistributedOptimizer(Packs(net.parameters()), list(net.named_parameters()), **arguments)
        for net in (model, again)
    )
    train(model, optimizer, 3)
    optimizer.check_replicas()
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(again, resumed, 3, start=3)
    error = UnsupportedError if RANK == 0 else DesyncError
    for broadcast in (resumed, Packs(again.parameters())):
        broadcast.state[again.first.weight]["momentum"] = resumed.state[again.first.weight]["momentum"]
        with pytest.raises(error, match="state has Packed"):
            onebit.broadcast_optimizer_state(broadcast)
    train(again, resumed, 2, start=6)
    train(model, optimizer, 5, start=3)
    assert torch.equal(weights(model), weights(again))
    assert_replicas_equal(again)


@pytest.mark.parametrize("refused", ["exact", "complex"])
@pytest.mark.parametrize("schedule", [None, onebit.Local(every=2, doubling=0)])
def test_a_group_that_was_refused_is_added_in_another_form(refused, schedule):
    model = Net()
    optimizer = wrap(model, warmup_steps=None if schedule else 3, wrapping={"schedule": schedule})
    train(model, optimizer, 4)
    before = copy.deepcopy(optimizer.state_dict())
    late = torch.nn.Parameter(torch.ones(40, 40))
    last = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64 if refused == "complex" else torch.float32))
    group = {"params": [late, last]} | ({"exact": 1} if refused == "exact" else {})
    for _ in range(2):
        with pytest.raises((ConfigurationError, UnsupportedError), match=refused):
            optimizer.add_param_group(dict(group))
    after = optimizer.state_dict()
    assert after["state"].keys() == before["state"].keys()
    assert after["param_groups"] == before["param_groups"]
    optimizer.add_param_group({"params": [late]})
    for step in range(4, 12):
        optimizer.zero_grad()
        x, y = batch(step)
        (cross_entropy(model(x), y) + (late * x.mean()).sum()).backward()
        optimizer.step()
    assert not torch.equal(late, torch.ones(40, 40))
    assert_replicas_equal(torch.nn.ParameterList([*model.parameters(), late]))

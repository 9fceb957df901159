"""What is about ``torch.distributed`` itself, on every rank of a torchrun job."""

import gc
import os
import sys
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError, DesyncError, Recipe, UnsupportedError
from horovod_onebit.torch import exact
from horovod_onebit.torch.distributed import DistributedCollectives
from tests.ranks.torch_common import DEVICE, RANK, SIZE, Net, assert_replicas_equal, batch, spoil, train, weights, wrap
from tests.ranks.world import OVER_TORCH, collectives, world

pytestmark = pytest.mark.skipif(not OVER_TORCH, reason="is about torch.distributed")
SMALL = Recipe(bucket_size=2048, exchange="direct")


def test_horovod_is_not_imported():
    assert "horovod" not in sys.modules


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
def test_collectives_that_are_held_leave_when_they_are_started_or_waited_for(size):
    every = collectives()
    own = np.full(size, RANK, np.uint8)
    gathering, sum_of = every.allgather(own, "gather"), every.allreduce(np.full(size, 1.5, np.float32), "sum")
    dropped = every.allgather(own, "dropped") if RANK == 0 else None  # nobody starts it: nobody else needs to
    gathering.start()
    assert not gathering.ready()
    assert sum_of.wait().tolist() == [1.5 * SIZE] * size
    assert gathering.wait().tolist() == np.repeat(np.arange(SIZE), size).tolist()
    assert dropped is None or not dropped.ready()
    parts = np.repeat(np.arange(SIZE, dtype=np.float32) + 10 * RANK, size)
    moved = every.alltoall(parts, "parts").wait()
    assert moved.tolist() == np.repeat(10.0 * np.arange(SIZE) + RANK, size).tolist()


@pytest.mark.parametrize("given", ["group", "mesh", "world"])
def test_a_process_group_or_a_mesh_is_what_trains(given):
    from torch.distributed.device_mesh import init_device_mesh

    groups = {
        "group": lambda: dist.new_group(list(range(SIZE))),
        "mesh": lambda: init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp",)),
        "world": lambda: dist.group.WORLD,
    }
    model = Net()
    optimizer = wrap(model, warmup_steps=2, wrapping={"process_group": groups[given]()})
    train(model, optimizer, 5)
    assert_replicas_equal(model)
    assert optimizer.stats().step == 5


@pytest.mark.parametrize("given", ["group", "mesh"])
def test_a_worker_outside_of_the_process_group_takes_its_steps_alone(given):
    from torch.distributed.device_mesh import DeviceMesh

    group = dist.new_group([0]) if given == "group" else DeviceMesh("cpu", [0])
    model = Net()
    optimizer = wrap(model, warmup_steps=2, wrapping={"process_group": group})
    train(model, optimizer, 4)
    gathered = world.allgather(weights(model)[None])
    assert not torch.equal(gathered[0], gathered[1])  # other batches
    onebit.broadcast_optimizer_state(optimizer, root_rank=0, process_group=group)
    with pytest.raises(ConfigurationError, match="a part of it"):
        onebit.save_checkpoint("nowhere", model, optimizer)


def test_wrong_groups_are_named():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("tp", "dp"))
    for given, text in ((5, "process_group=5"), (mesh, "one dimension")):
        with pytest.raises(ConfigurationError, match=text):
            wrap(Net(), wrapping={"process_group": given})
    with pytest.raises(ConfigurationError, match="expected one of them"):
        wrap(Net(), wrapping={"process_group": dist.group.WORLD, "process_set": 1})
    train(model := Net(), wrap(model, wrapping={"process_group": mesh["dp"]}), 2)
    assert_replicas_equal(model)


@pytest.mark.parametrize(("warmup", "steps"), [("exact", 3), ("three_bit", 12)])
def test_groups_of_optimizers_that_are_gone_are_destroyed(warmup, steps):
    """Workers that collect garbage at different times destroy the same groups."""
    counts = []
    for number in range(20 if warmup == "exact" else 8):
        model = Net()
        optimizer = wrap(model, warmup_steps=steps - 1, recipe=Recipe(bucket_size=2048, warmup=warmup))
        train(model, optimizer, steps)
        if number % SIZE == RANK:
            left = optimizer, model  # until the next time, and in a circle
            optimizer.left = left
        else:
            del model, optimizer
            gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts) - counts[0] <= 30, counts
    assert_replicas_equal(Net())


# -- other averages ---------------------------------------------------------------------------------------------------


def step_with_own_gradients(model, inner, optimizer):
    """A step whose gradients, of ``inner`` in ``model``, are each worker's own until it is taken."""
    optimizer.zero_grad()
    x, y = batch(100)
    cross_entropy(model(x), y).backward()
    own = world.allgather(inner.first.weight.grad[None])
    assert not torch.equal(own[0], own[1])
    optimizer.step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_in_ddp_stay_local_with_model_and_the_weights_are_those_without_it(when):
    plain, inner = Net(), Net()
    train(plain, wrap(plain, warmup_steps=3), 8)
    if when == "before":
        model = DistributedDataParallel(inner, find_unused_parameters=True)
        optimizer = wrap(inner, warmup_steps=3, wrapping={"model": model})
    else:  # as trainers do
        optimizer = wrap(inner, warmup_steps=3, wrapping={"model": inner})
        model = DistributedDataParallel(inner, find_unused_parameters=True)
    train(model, optimizer, 8)
    assert torch.equal(weights(plain), weights(inner))
    step_with_own_gradients(model, inner, optimizer)
    with model.no_sync():
        model(batch(100)[0])
    step_with_own_gradients(model, inner, optimizer)


def test_gradients_stay_local_in_a_ddp_that_is_made_anew():
    inner = Net()
    inner.first.weight.requires_grad = False
    optimizer = wrap(inner, warmup_steps=3, wrapping={"model": inner})
    train(DistributedDataParallel(inner, find_unused_parameters=True), optimizer, 4)
    inner.first.weight.requires_grad = True
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    train(model, optimizer, 8, start=4)
    step_with_own_gradients(model, inner, optimizer)
    assert_replicas_equal(inner)


def test_a_ddp_of_another_model_goes_on_averaging():
    class Student(torch.nn.Module):
        def __init__(self, critic):
            super().__init__()
            self.net, self.others = Net(), [critic]  # which this module does not own

        def forward(self, x):
            return self.net(x) + self.others[0](x)

    critic = Net(seed=1)
    optimizer = wrap(critic, warmup_steps=3, wrapping={"model": critic})
    student = DistributedDataParallel(Student(critic), find_unused_parameters=True)
    x, y = batch(0)
    optimizer.zero_grad()
    cross_entropy(student(x), y).backward()
    optimizer.step()
    assert student.require_backward_grad_sync
    grads = world.allgather(student.module.net.first.weight.grad[None])
    assert torch.equal(grads[0], grads[1])


def test_a_ddp_that_is_made_anew_and_averages_is_refused():
    inner = Net()
    inner.first.weight.requires_grad = False
    optimizer = wrap(inner, warmup_steps=3)
    train(inner, optimizer, 4)
    inner.first.weight.requires_grad = True
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    with pytest.raises(ConfigurationError, match="require_backward_grad_sync = False"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("schedule", [None, onebit.Local(every=2)])
@pytest.mark.parametrize("when", ["before", "after"])
def test_ddp_that_averages_is_refused(when, schedule):
    inner = Net()
    arguments = {"warmup_steps": None if schedule else 3, "wrapping": {"schedule": schedule}}
    optimizer = wrap(inner, **arguments) if when == "after" else None
    ddp = DistributedDataParallel(inner, find_unused_parameters=True)
    with pytest.raises(ConfigurationError, match="require_backward_grad_sync = False"):
        wrap(inner, **arguments) if optimizer is None else train(ddp, optimizer, 1)
    ddp.require_backward_grad_sync = False
    optimizer = wrap(inner, **arguments)
    train(ddp, optimizer, 4)
    assert_replicas_equal(inner)


def test_sharded_parameters_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))
    with pytest.raises(UnsupportedError, match=r"'weight' is sharded over the workers"):
        wrap(model)
    with pytest.raises(ConfigurationError, match="model is int"):
        wrap(Net(), wrapping={"model": 5})


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_workers_that_send_at_different_times_exchange_the_same(exchange):
    """One worker encodes during backward and one in step(), other collectives of the program come in between."""
    recipe = Recipe(bucket_size=2048, exchange=exchange)
    alike, model = Net(), Net()
    train(alike, wrap(alike, warmup_steps=2, recipe=recipe), 8)
    optimizer = wrap(model, warmup_steps=2, recipe=recipe)
    for step in range(8):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = cross_entropy(model(x), y)
        loss.backward()
        dist.all_reduce(loss.detach())
        if RANK == 0 and step == 4:
            optimizer._gradients.send_late("a test", averages=True)
        optimizer.step()
    assert torch.equal(weights(model), weights(alike))
    assert_replicas_equal(model)


def test_two_optimizers_whose_gradients_mix():
    """A backward pass that computes gradients of both, and steps of one after the other."""
    first, second = Net(0), Net(1)
    one, two = (wrap(model, warmup_steps=2, recipe=SMALL) for model in (first, second))
    for step in range(6):
        x, y = batch(step)
        one.zero_grad()
        two.zero_grad()
        (cross_entropy(first(x), y) + cross_entropy(second(x), y)).backward()
        two.step()
        one.step()
    assert_replicas_equal(first)
    assert_replicas_equal(second)


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_messages_leave_during_the_backward_pass(exchange, monkeypatch):
    """From the second compressed step on, when it is known that gradients are final then."""
    left = []
    for name in ("all_gather", "all_to_all_single"):
        start = getattr(dist, name)
        monkeypatch.setattr(dist, name, lambda *args, start=start, **options: left.append(1) or start(*args, **options))
    model = Net()
    optimizer = wrap(model, warmup_steps=2, recipe=Recipe(bucket_size=2048, exchange=exchange))
    train(model, optimizer, 5)
    x, y = batch(5)
    optimizer.zero_grad()
    left.clear()
    cross_entropy(model(x), y).backward()
    most = len(optimizer._compressor.engine.layout.buckets) - 1  # that of ``unused`` waits
    assert 1 < len(left) <= most if DEVICE == "cuda" else len(left) == most > 1  # a GPU may still compute the last ones
    optimizer.step()
    assert_replicas_equal(model)


@pytest.mark.parametrize("passes", [1, 2])
def test_exact_means_leave_during_the_backward_pass(passes, monkeypatch):
    """From the second step on; means are those of gradients that are averaged one by one afterwards."""
    monkeypatch.setattr(exact, "FUSED", 2**14)
    left, start = [], dist.all_reduce
    model, twin = Net(), Net()
    optimizer = wrap(model, recipe="exact", wrapping={"backward_passes_per_step": passes})
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **options: left.append(1) or start(*args, **options))
    for step in range(4):
        for k in range(passes):
            x, y = batch(7919 * k + step)
            for trained in (model, twin):
                left.clear()
                (cross_entropy(trained(x), y) / passes).backward()
                if trained is model:
                    early = len(left)
        groups = optimizer._gradients.means._groups
        assert (early > 2) == (step > 0)  # those before ``unused``, which has no gradient
        optimizer.step()
        assert len(groups) > early or step == 0
        for p in twin.parameters():
            if p.requires_grad:
                p.grad = world.allreduce(torch.zeros_like(p) if p.grad is None else p.grad)
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
        assert_replicas_equal(model)
        if SIZE == 2:
            assert torch.equal(weights(model), weights(twin))


def begin(model, optimizer, step, what, end):
    """A step's gradients are there, NaN among those of worker 0 if it is to ``end`` by that; the weights before."""
    optimizer.zero_grad()
    before = weights(model)
    if end == "NaN" and RANK == 0:
        spoil(model.last.weight, "nan")
    backward(model, step, what)
    return before


@pytest.mark.parametrize("end", ["disagreement", "a state is loaded", "NaN", "an edit", "frozen", "taken out"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", ["all", "some", "raises"])
def test_training_continues_after_exact_means_were_dropped(end, late, what, monkeypatch):
    """Of which the workers have let different numbers leave, and worker 1 none if it is ``late``."""
    monkeypatch.setattr(exact, "FUSED", 2**14)
    model = Net()
    optimizer = wrap(model, warmup_steps=9)
    train(model, optimizer, 3)
    if late and RANK == 1:
        optimizer._gradients.send_late("a test", averages=True)
    for step in range(3, 6):
        before = begin(model, optimizer, step, what, end)
        refused = nullcontext()
        if end == "disagreement":
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + RANK)
            refused = pytest.raises(DesyncError, match="learning rate of group 0 differs")
        elif end == "a state is loaded":
            optimizer.load_state_dict(optimizer.state_dict())
            refused = suppress(DesyncError)  # workers of which different numbers had something to forget
        elif end == "an edit" and RANK == 0:
            model.last.weight.grad.fill_(1.0)
        elif end == "frozen":
            model.second.bias.requires_grad_(step % 2 == 0)
        elif end == "taken out" and step == 4:
            optimizer.param_groups[0]["params"] = [
                p for p in optimizer.param_groups[0]["params"] if p is not model.second.bias
            ]
        with refused:
            optimizer.step()
        if end in ("disagreement", "NaN"):
            assert torch.equal(weights(model), before)
        optimizer.param_groups[0]["lr"] = 1e-3
        assert_replicas_equal(model)
    train(model, optimizer, 6, start=8)
    assert_replicas_equal(model)
    assert optimizer.phase.value == "compressed"


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, grad):
        raise RuntimeError("out of memory, say")


def backward(model, step, what):
    """A backward pass, in which worker 1 computes ``what`` gradients, or raises in the middle."""
    x, y = batch(step)
    if what == "raises" and RANK == 1:
        h = model.tied(Raises.apply(torch.relu(model.norm(model.first(x)))))
        with pytest.raises(RuntimeError, match="out of memory"):
            model.last(torch.relu(model.second(torch.tanh(h)))).sum().backward()
        return
    parts = {"no": sum(p.sum() for p in model.first.parameters()) * 0, "some": model.first(x).square().mean()}
    (parts[what] if RANK == 1 and what in parts else cross_entropy(model(x), y)).backward()


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("what", ["all", "some"])
def test_workers_of_which_one_computes_some_gradients_only(what, exchange):
    model = Net()
    optimizer = wrap(model, warmup_steps=2, recipe=Recipe(bucket_size=2048, exchange=exchange))
    train(model, optimizer, 5)
    for step in range(5, 9):
        optimizer.zero_grad()
        backward(model, step, what)
        optimizer.step()
    assert_replicas_equal(model)


@pytest.mark.parametrize("end", ["disagreement", "a state is loaded", "NaN", "an edit"])
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", ["all", "some", "raises"])
def test_training_continues_after_messages_were_taken_back(end, exchange, late, what):
    """Of which the workers have let different numbers leave, and worker 1 none if it is ``late``. Nobody waits for what
    others will not start."""
    model = Net()
    optimizer = wrap(model, warmup_steps=2, recipe=Recipe(bucket_size=2048, exchange=exchange))
    train(model, optimizer, 5)
    if late and RANK == 1:
        optimizer._gradients.send_late("a test")
    for step in range(5, 8):
        before = begin(model, optimizer, step, what, end)
        if end == "disagreement":
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + RANK)
            with pytest.raises(DesyncError, match="learning rate of group 0 differs"):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 1e-3
        elif end == "a state is loaded":
            optimizer.load_state_dict(optimizer.state_dict())
            with suppress(DesyncError) if late else nullcontext():  # worker 1 has perhaps nothing to forget
                optimizer.step()
            continue
        else:
            if end == "an edit" and RANK == 0:
                model.last.weight.grad.fill_(float("nan"))
            refused = end == "an edit" and step == 5  # and sent in step() afterwards
            with pytest.raises(ConfigurationError, match="changed gradients") if refused else nullcontext():
                optimizer.step()
        assert torch.equal(weights(model), before)
    train(model, optimizer, 5, start=8)
    assert_replicas_equal(model)


@pytest.mark.parametrize("what", ["name", "shape", "none"])
def test_models_that_differ_are_not_broadcast(what):
    state = dict(Net(RANK).state_dict())
    if what == "name" and RANK == SIZE - 1:
        state["other"] = state.pop("first.weight")
    if what == "shape" and RANK == SIZE - 1:
        state["first.weight"] = torch.ones(3)
    if what == "none":
        onebit.broadcast_parameters(state)
        assert len({float(value.double().sum()) for value in world.allgather_object(state["first.weight"])}) == 1
        state["extra"] = 5
    with pytest.raises(ConfigurationError, match="extra: expected tensors" if what == "none" else "of worker 0 is not"):
        onebit.broadcast_parameters(state)


# -- groups by host ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(SIZE != 4, reason="two hosts of two workers")
@pytest.mark.parametrize("neighbours", [True, False])
def test_exchanges_within_and_between_hosts(monkeypatch, neighbours):
    host = RANK // 2 if neighbours else RANK % 2
    monkeypatch.setattr(DistributedCollectives, "host", lambda self: (host, 2))
    model = Net()
    optimizer = wrap(model, warmup_steps=3, recipe=Recipe(exchange="hierarchical", bucket_size=4096))
    train(model, optimizer, 12)
    assert_replicas_equal(model)
    assert optimizer._compressor.engine.exchange.name == "hierarchical"


def test_workers_of_a_host_are_counted():
    assert collectives().host()[1] == int(os.environ["LOCAL_WORLD_SIZE"])


def test_a_ddp_may_average_again_when_its_optimizer_is_gone(caplog):
    inner = Net()
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    optimizer = wrap(inner, warmup_steps=3, wrapping={"model": model})
    train(model, optimizer, 6)
    state = optimizer.state_dict()
    del optimizer
    gc.collect()
    assert ("set model.require_backward_grad_sync = True on all workers" in caplog.text) == (RANK == 0)
    assert not model.require_backward_grad_sync
    model.require_backward_grad_sync = True
    plain = torch.optim.AdamW(inner.parameters())
    plain.load_state_dict(state)
    train(model, plain, 4, start=6)
    assert_replicas_equal(inner)


def test_an_optimizer_that_is_refused_leaves_a_ddp_as_it_is():
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    with pytest.raises(ConfigurationError):
        wrap(model.module, warmup_steps=-3, wrapping={"model": model})
    assert model.require_backward_grad_sync


def test_parameters_of_a_ddp_that_no_optimizer_of_ours_trains_are_named(caplog):
    inner = Net()
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    named = list(inner.second.named_parameters())
    plain = torch.optim.AdamW(inner.second.parameters(), lr=1e-3)
    optimizer = onebit.DistributedOptimizer(plain, named, warmup_steps=3, model=model)
    train(model, optimizer, 1)
    assert ("first.weight, module.first.bias" in caplog.text) == (RANK == 0)


def test_a_ddp_within_a_module_whose_forward_is_never_called_is_switched_off():
    class Both(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = DistributedDataParallel(inner, find_unused_parameters=True)

    inner = Net()
    both = Both(inner)
    optimizer = wrap(inner, warmup_steps=3, wrapping={"model": both})
    train(both.inner, optimizer, 4)
    assert not both.inner.require_backward_grad_sync
    assert_replicas_equal(inner)

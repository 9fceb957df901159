"""The PyTorch face on real ranks: NaN, ranks that disagree, and what is refused."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError, DesyncError, NonFiniteError, Recipe, UnsupportedError
from horovod_onebit.warmup import EXACT_FIRST
from tests.ranks.torch_common import (
    DEVICE,
    RANK,
    SIZE,
    Lion,
    Net,
    assert_replicas_equal,
    batch,
    spoil,
    train,
    weights,
    wrap,
)
from tests.ranks.world import OVER_TORCH, collectives, needs_horovod, world

# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_nan_on_one_rank_is_skipped_by_all(exchange):
    model = Net()
    optimizer = wrap(model, warmup_steps=3, recipe=Recipe(exchange=exchange))
    train(model, optimizer, 6)
    before, residuals = weights(model), optimizer.feedback_state_dict()
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters() if p.requires_grad]
    x, y = batch(6)
    optimizer.zero_grad()
    if RANK == SIZE - 1:
        spoil(model.second.weight, "nan")
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert torch.equal(before, weights(model))
    after = [optimizer.state[p]["exp_avg"] for p in model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    for name, value in optimizer.feedback_state_dict().items():
        torch.testing.assert_close(value, residuals[name], atol=1e-5, rtol=0)
    assert optimizer.stats().skipped_steps == 1
    train(model, optimizer, 5, start=7)
    assert_replicas_equal(model)


def test_nan_raises_on_all_when_asked_to():
    model = Net()
    optimizer = wrap(model, warmup_steps=2, recipe=Recipe(on_nonfinite="raise"))
    train(model, optimizer, 4)
    x, y = batch(6)
    optimizer.zero_grad()
    if RANK == 0:
        spoil(model.first.weight, "inf")
    cross_entropy(model(x), y).backward()
    with pytest.raises(NonFiniteError, match="worker 0"):
        optimizer.step()
    train(model, optimizer, 2, start=7)
    assert_replicas_equal(model)


DISAGREEMENTS = ["recipe", "names", "shape", "warmup", "lr", "betas", "frozen", "state", "number"]


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_at_once(what):
    odd = RANK == SIZE - 1
    big = torch.nn.Parameter(torch.zeros(48 if what == "shape" and odd else 40, 60))
    small = torch.nn.Parameter(torch.zeros(3))
    built = [Net() for _ in range(2) if what == "number"]
    if built and odd:
        wrap(built[0])
    recipe = Recipe(scale="rms" if what == "recipe" and odd else "guarded")
    name = "other" if what == "names" and odd else "big"
    optimizer = torch.optim.AdamW([big, small], betas=(0.8 if what == "betas" and odd else 0.9, 0.999))
    named = [(name, big), ("small", small)]
    warmup = 3 if what == "warmup" and odd else 4
    optimizer = onebit.DistributedOptimizer(optimizer, named, warmup_steps=warmup, recipe=recipe)
    if what == "state":
        for _ in range(6):
            optimizer.zero_grad()
            (big.sum() + small.sum()).backward()
            optimizer.step()
        state = optimizer.state_dict()
        optimizer = torch.optim.AdamW([big, small])
        optimizer = onebit.DistributedOptimizer(optimizer, named, warmup_steps=4)
        if not odd:
            optimizer.load_state_dict(state)
    if what == "lr" and odd:
        optimizer.param_groups[0]["lr"] = 0.5
    if what == "frozen" and odd:
        big.requires_grad_(False)
    for p in (big, small):
        p.grad = torch.ones_like(p)
    with pytest.raises(DesyncError, match="differs between workers"):
        optimizer.step()
    if built and not odd:
        wrap(built[1])  # all workers have built as many again


def test_parameters_in_another_order_are_named():
    model = Net()
    parameters = list(model.parameters())
    plain = torch.optim.AdamW(parameters[::-1] if RANK == SIZE - 1 else parameters)
    optimizer = onebit.DistributedOptimizer(plain, model.named_parameters(), warmup_steps=4)
    for p in parameters:
        p.grad = torch.ones_like(p)
    with pytest.raises(DesyncError, match=r"the place of unused among the optimizer's parameters differs .*: 0 on"):
        optimizer.step()


def test_a_dtype_that_changes_on_one_worker_is_named():
    model = Net()
    optimizer = wrap(model, warmup_steps=20)
    train(model, optimizer, 3)
    for p in model.parameters():
        if RANK == SIZE - 1:
            p.data, p.grad = p.data.double(), None
        p.grad = torch.ones_like(p)
    with pytest.raises(DesyncError, match=r"the dtype of unused differs between workers: torch.float32 on worker 0"):
        optimizer.step()


@pytest.mark.parametrize("call", ["broadcast_parameters", "broadcast_optimizer_state"])
@pytest.mark.parametrize("rounds", [False, True])
def test_a_broadcast_that_one_worker_makes_alone(call, rounds):
    model = Net()
    local = {"schedule": onebit.Local(every=1)}
    optimizer = wrap(model, warmup_steps=None, wrapping=local) if rounds else wrap(model, warmup_steps=2)
    train(model, optimizer, 4)
    given = {
        "broadcast_parameters": model.state_dict(),
        "broadcast_optimizer_state": torch.optim.Adam(Net().parameters()),
    }
    odd = RANK == SIZE - 1
    for _ in range(2):
        odd = not odd
        with pytest.raises(DesyncError, match=rf"worker [01] {call}\(\)"):
            getattr(onebit, call)(given[call]) if odd else train(model, optimizer, 1, start=4)
    train(model, optimizer, 2, start=4)
    assert_replicas_equal(model)


@pytest.mark.parametrize("warmup", [2, 20])
def test_two_optimizers_that_are_stepped_in_another_order(warmup):
    """The error is of both, on all workers; then training can continue."""
    if warmup == 2 and not OVER_TORCH:
        pytest.skip("Horovod waits for ever for the other workers' part of a message, and join() finds it")
    models = [Net(0), Net(1)]
    optimizers = [wrap(model, warmup_steps=warmup, recipe=Recipe(bucket_size=2048)) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 4)
    for model, optimizer in zip(models, optimizers, strict=True):
        x, y = batch(4)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
    with pytest.raises(DesyncError, match="the optimizer's number differs between workers"):
        optimizers[RANK % 2].step()
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.step()
        train(model, optimizer, 3, start=5)
        assert_replicas_equal(model)
        optimizer.check_replicas()


@needs_horovod
def test_a_worker_that_has_joined():
    """In warm-up; in the compressed stage Horovod itself aborts the worker that joined, after this message."""
    model = Net()
    optimizer = wrap(model, warmup_steps=4)
    train(model, optimizer, 2)
    if RANK == 0:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(DesyncError, match=r"workers? 1.* called hvd.join"):
            optimizer.step()
    world.join()


def test_a_refused_step_with_a_grad_scaler_is_taken_again_as_it_was():
    found = []
    for refused in (False, True):
        model = Net()
        optimizer = wrap(model, warmup_steps=2)
        train(model, optimizer, 5)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(5, 8):
            optimizer.zero_grad()
            x, y = batch(step)
            scaler.scale(cross_entropy(model(x), y)).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                if refused and step == 6:
                    (group,) = optimizer.param_groups
                    group["lr"] = 1e-3 + RANK
                    with pytest.raises(DesyncError, match="learning rate of group 0"):
                        scaler.step(optimizer)
                    group["lr"] = 1e-3
                scaler.step(optimizer)
            scaler.update()
        found.append(weights(model))
    assert torch.equal(*found) or SIZE > 2 or DEVICE != "cpu"
    # On a GPU, residuals come back to rounding: see ``kernels.reference.restore``.
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
    assert_replicas_equal(model)


@pytest.mark.parametrize("recipe", ["robust", "exact"])
@pytest.mark.parametrize("at", [1, 6])
def test_an_overflow_that_was_clipped_by_value_is_skipped_by_all(recipe, at):
    model = Net()
    optimizer = wrap(model, warmup_steps=3, recipe=recipe, wrapping={"overlap": False})
    train(model, optimizer, at)
    scaler, before = torch.amp.GradScaler("cpu", init_scale=8.0), weights(model)
    optimizer.zero_grad()
    x, y = batch(at)
    scaler.scale(cross_entropy(model(x), y)).backward()
    if RANK == 0:
        model.last.bias.grad[0] = torch.inf
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights(model), before)
    assert optimizer.stats().skipped_steps == 1
    assert scaler.get_scale() == (4.0 if RANK == 0 else 8.0)
    train(model, optimizer, 3, start=at + 1)
    assert_replicas_equal(model)


@pytest.mark.parametrize("how", ["clip_grad_norm_", "GradScaler"])
def test_sums_of_a_refused_step_are_not_summed_again(how):
    found = []
    for refused in (False, True):
        model = Net()
        optimizer = wrap(model, torch.optim.SGD, lr=0.01, warmup_steps=50, wrapping={"op": world.Sum})
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=how == "GradScaler")
        train(model, optimizer, 2)
        optimizer.zero_grad()
        x, y = batch(2)
        scaler.scale(cross_entropy(model(x), y)).backward()
        if how == "clip_grad_norm_":
            optimizer.clip_grad_norm_(0.5)
        if refused:
            (group,) = optimizer.param_groups
            group["lr"] = 0.01 + RANK
            with pytest.raises(DesyncError, match="learning rate of group 0"):
                scaler.step(optimizer)
            group["lr"] = 0.01
        scaler.step(optimizer)
        train(model, optimizer, 2, start=3)
        found.append(weights(model))
    torch.testing.assert_close(*found)
    assert_replicas_equal(model)


def test_gradients_that_a_program_holds_stay_where_they_are():
    """One buffer, say, that is cleared in one call."""
    model = Net()
    optimizer = wrap(model, warmup_steps=EXACT_FIRST + 5)
    trained = [p for p in model.parameters() if p.requires_grad]
    buffer = torch.zeros(sum(p.numel() for p in trained))
    for p, part in zip(trained, buffer.split([p.numel() for p in trained]), strict=True):
        p.grad = part.view_as(p)
    grads = [p.grad for p in trained]
    for step in range(EXACT_FIRST + 9):
        buffer.zero_()
        x, y = batch(step)
        if step in (1, EXACT_FIRST + 2) and RANK == 0:
            spoil(model.first.weight, "nan")
        cross_entropy(model(x), y).backward()
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(trained, grads, strict=True))
    assert optimizer.phase == "compressed"
    assert_replicas_equal(model)


def test_small_gradients_are_not_lost_in_float16_when_their_scale_is_gone():
    p, small = (torch.nn.Parameter(torch.zeros(n)) for n in (4096, 8))
    plain = torch.optim.SGD([p, small], lr=1.0)
    named = [("p", p), ("small", small)]
    optimizer = onebit.DistributedOptimizer(plain, named, compression=onebit.Compression.fp16, warmup_steps=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale((p * 1e-3).sum() + (small * 1e-9).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert float(small.max()) == pytest.approx(-1e-9 * (step + 1), rel=0.01)


def test_the_scales_of_gradscalers_stay_together():
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(8):
        optimizer.zero_grad()
        x, y = batch(step)
        if step in (2, 5) and RANK == SIZE - 1:
            spoil(model.first.weight, "inf")
        scaler.scale(cross_entropy(model(x), y)).backward()
        if step > 3:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        assert len(set(world.allgather_object(scaler.get_scale()))) == 1
    assert scaler.get_scale() == 64.0
    assert optimizer.stats().skipped_steps == 2
    assert_replicas_equal(model)


@pytest.mark.parametrize("warmup_steps", [2, 50])
def test_gradients_set_by_hand_overflow_on_all_workers_alike(warmup_steps):
    model = Net()
    optimizer = wrap(model, warmup_steps=warmup_steps)
    train(model, optimizer, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for step in range(4, 8):
        x, y = batch(step)
        found = torch.autograd.grad(scaler.scale(cross_entropy(model(x), y)), parameters, allow_unused=True)
        for p, grad in zip(parameters, found, strict=True):
            p.grad = grad
        if (step, RANK) == (5, SIZE - 1):
            model.first.weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    assert world.allgather_object(scaler.get_scale()) == SIZE * [128.0]
    assert optimizer.stats().skipped_steps == 1
    assert_replicas_equal(model)


# -- refusals, before any collective ----------------------------------------------------------------------------------


def two_parameters(dtype=torch.float32):
    return [torch.nn.Parameter(torch.zeros(10, dtype=dtype)) for _ in range(2)]


class OwnStep(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def of_lion_pytorch(p):
    optimizer = Lion(p)
    optimizer.decoupled_wd = True  # its option of that name is no option of a group
    return optimizer


class LionOfAttributes(Lion):
    """With options that are in no group."""

    def __init__(self, params, cautious=False, maximize=False):
        super().__init__(params)
        self.cautious, self.maximize = cautious, maximize


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: torch.optim.Adam(p, amsgrad=True), "without amsgrad"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "without capturable"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "without differentiable"),
        (lambda p: Lion(p, cautious_factor=0.5), "with cautious_factor=1.0"),
        (lambda p: of_lion_pytorch(p), "without decoupled_wd"),
        (lambda p: Lion(p, use_gc=True), "without use_gc"),
        (lambda p: LionOfAttributes(p, cautious=True), "without cautious"),
        (lambda p: LionOfAttributes(p, maximize=True), "without maximize"),
        (
            lambda p: torch.optim.RMSprop(p),
            "torch.optim.Adam, AdamW, SGD; horovod_onebit.torch.LAMB; classes named Lion",
        ),
        (lambda p: OwnStep(p), "must not override step"),
    ],
)
def test_optimizers_that_have_no_one_bit_form(build, message):
    with pytest.raises(UnsupportedError, match=message):
        onebit.DistributedOptimizer(build(two_parameters()), warmup_steps=10)


@needs_horovod
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
        (UnsupportedError, "Average or Sum", {"op": 2}),
        (ConfigurationError, "backward_passes_per_step", {"backward_passes_per_step": 0}),
        (ConfigurationError, "recipe=", {"recipe": "fast"}),
        (ConfigurationError, "groups", {"groups": "all"}),
        (ConfigurationError, "only appear once", {"groups": [[p[0]], [p[0]]]}),
        (ConfigurationError, "needs op", {"gradient_predivide_factor": 2.0, "op": world.Sum}),
    ]
    refused += [(ConfigurationError, "warmup_steps", {"warmup_steps": n}) for n in (0, -1, 1.5, 0.2, True, "soon")]
    for kind, message, arguments in refused:
        with pytest.raises(kind, match=message):
            attempt(**arguments)
    with pytest.raises(ConfigurationError, match="already"):
        attempt(attempt())
    with pytest.raises(ConfigurationError, match="plain torch"):
        attempt(world.DistributedOptimizer(torch.optim.AdamW(p), named_parameters=named))
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


@pytest.mark.parametrize("warmup_steps", [2, 100])
@pytest.mark.parametrize("dense", [True, False])
def test_sparse_gradients_of_an_embedding_that_is_unfrozen(dense, warmup_steps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(100, 30, sparse=True), torch.nn.Linear(30, 40))
    model[0].weight.requires_grad_(False)
    named, before = list(model.named_parameters()), model[0].weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    wrapping = {"warmup_steps": warmup_steps, "sparse_as_dense": dense}
    optimizer = onebit.DistributedOptimizer(optimizer, named, **wrapping)
    for step in range(8):
        optimizer.zero_grad()
        model[0].weight.requires_grad_(step >= 4)
        model(torch.tensor([1, 2, 3 + RANK])).square().sum().backward()
        if step == 4 and not dense:
            with pytest.raises(UnsupportedError, match="sparse_as_dense=True"):
                optimizer.step()
            break
        optimizer.step()
    moved = (model[0].weight != before).detach().any(1)
    assert moved.nonzero().flatten().tolist() == (list(range(1, SIZE + 3)) if dense else [])
    assert_replicas_equal(model)


def test_the_collectives_are_what_they_say():
    every = collectives()
    own = np.full(3, RANK, np.uint8)
    gathered = every.allgather(own, "check.gather").wait()
    assert gathered.tolist() == [r for r in range(SIZE) for _ in range(3)]
    parts = np.array([10 * RANK + j for j in range(SIZE)], np.uint8)
    assert every.alltoall(parts, "check.alltoall").wait().tolist() == [10 * i + RANK for i in range(SIZE)]
    total = every.allreduce(np.full(2, RANK + 1, np.float32), "check.sum").wait()
    assert total.tolist() == [SIZE * (SIZE + 1) / 2] * 2


@pytest.mark.parametrize("after", ["nothing", "clipping"])
@pytest.mark.parametrize("steps", [3, 9])
def test_what_a_closure_raises_on_one_worker_is_told_to_all(steps, after):
    model = Net()
    optimizer = wrap(model, warmup_steps=5)
    train(model, optimizer, steps)
    before = weights(model)

    def closure():
        if RANK == SIZE - 1 and after == "nothing":
            raise OSError("no more data")
        optimizer.zero_grad()
        loss = cross_entropy(model(batch(steps)[0]), batch(steps)[1])
        loss.backward()
        if after == "clipping":
            optimizer.clip_grad_norm_(1.0)
            if RANK == SIZE - 1:
                raise OSError("no more data")
        return loss

    with pytest.raises(OSError if RANK == SIZE - 1 else DesyncError, match="no more data"):
        optimizer.step(closure)
    assert torch.equal(before, weights(model))
    train(model, optimizer, 4, start=steps)
    assert_replicas_equal(model)


# -- drift ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [3, 9])
def test_replicas_that_drift_apart_are_named_on_all_workers(steps):
    model = Net()
    optimizer = wrap(model, warmup_steps=5, wrapping={"check_replicas_every": 1})
    train(model, optimizer, steps)
    optimizer.check_replicas()
    if RANK == SIZE - 1:
        with torch.no_grad():
            model.second.weight[1, 2] += 1e-3
    with pytest.raises(DesyncError, match=rf"second.weight of worker {SIZE - 1} differs from that of worker 0"):
        optimizer.check_replicas()
    with pytest.raises(DesyncError, match="differs from that of worker 0"):
        train(model, optimizer, 1, start=steps)


def test_replicas_that_differ_between_exchanges_are_compared_after_them(monkeypatch):
    """Of 0/1 Adam: steps 9 to 12 are exchanges, then 14, 16, 18, 20, then 24, 28 and so on."""
    model, compared = Net(), []
    zero_one = onebit.ZeroOne(var_freeze_step=8, var_update_scaler=4, local_step_scaler=4, local_step_clipper=4)
    wrapping = {"schedule": zero_one, "check_replicas_every": 5}
    optimizer = wrap(model, warmup_steps=None, wrapping=wrapping)
    check = optimizer._compressor.check_replicas
    monkeypatch.setattr(optimizer._compressor, "check_replicas", lambda: compared.append(step) or check())
    for step in range(1, 34):
        train(model, optimizer, 1, start=step)
    assert compared == [5, 10, 16, 20, 28, 32]
    if RANK == 0:
        with torch.no_grad():
            model.norm.weight += 1
    with pytest.raises(DesyncError, match=r"norm.weight.* of workers? 1.* from that of worker 0"):
        train(model, optimizer, 3, start=34)


def test_state_that_drifts_apart_is_found_too():
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 4)
    if RANK == 0:
        optimizer.state[model.first.weight]["exp_avg_sq"][0, 0] += 1.0
    with pytest.raises(DesyncError, match=r"first.weight \(exp_avg_sq\)"):
        optimizer.check_replicas()


@pytest.mark.parametrize("every", [0, -1, 2.0, True])
def test_bad_intervals_are_refused(every):
    with pytest.raises(ConfigurationError, match="check_replicas_every"):
        wrap(Net(), wrapping={"check_replicas_every": every})


@pytest.mark.parametrize("finite", [2e38, 1e-3])
def test_a_sum_that_overflows_at_a_server_is_skipped_by_all(finite):
    """All gradients are finite, and so are the workers' messages."""
    w = torch.nn.Parameter(torch.zeros(4096))
    plain = torch.optim.SGD([w], lr=1e-3, momentum=0.9)
    recipe = Recipe(exchange="two_stage", block_size=64)
    optimizer = onebit.DistributedOptimizer(plain, [("w", w)], warmup_steps=1, recipe=recipe)
    for grad in (0.0, finite, 1e-3):
        optimizer.zero_grad()
        (w * grad).sum().backward()
        optimizer.step()
    assert optimizer.stats(norms=False).skipped_steps == (finite > 1)
    assert bool(torch.isfinite(w.detach()).all())

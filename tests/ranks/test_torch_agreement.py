"""Calls that one worker makes alone, options that differ, and gradients that are edited: an error on all, or equal
replicas; never a hang."""

import contextlib
import copy
import math
import threading

import pytest
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit import CheckpointError, ConfigurationError, DesyncError, NonFiniteError, Recipe, handshake, tasks
from tests.ranks.torch_common import RANK, SIZE, Net, assert_replicas_equal, batch, spoil, train, weights, wrap
from tests.ranks.world import OVER_TORCH, world

ODD = RANK == SIZE - 1
PHASES = {"warm-up": 50, "first compressed step": 3, "compressed": 2}
"""warmup_steps, when three steps were taken."""


def saved(model, optimizer):
    onebit.save_checkpoint("nowhere", model, optimizer)


def started(phase, **wrapping):
    model = Net()
    optimizer = wrap(model, warmup_steps=PHASES[phase], wrapping=wrapping)
    train(model, optimizer, 3)
    return model, optimizer


def backward(model, optimizer, step, scale=1.0):
    optimizer.zero_grad()
    x, y = batch(step)
    (cross_entropy(model(x), y) * scale).backward()


def clips_with_torch(model, optimizer):
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with optimizer.skip_synchronize():
        optimizer.step()


def skips(model, optimizer):
    with optimizer.skip_synchronize():
        optimizer.step()


def drops_its_gradients(model, optimizer):
    optimizer.synchronize()
    optimizer.zero_grad()
    optimizer.step()


ALONE = {
    "clip_grad_norm_": lambda model, optimizer: optimizer.clip_grad_norm_(1.0),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "synchronize, clip": clips_with_torch,
    "synchronize, zero_grad": drops_its_gradients,
    "check_replicas": lambda model, optimizer: optimizer.check_replicas(),
    "broadcast": lambda model, optimizer: onebit.broadcast_optimizer_state(optimizer),
    "save_checkpoint": saved,
    "GradScaler": lambda model, optimizer: torch.amp.GradScaler("cpu", init_scale=4.0).step(optimizer),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("what", ALONE)
def test_a_call_that_one_worker_makes_alone(what, phase):
    model, optimizer = started(phase)
    if what == "GradScaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        backward(model, optimizer, 3, scale=4.0 if ODD else 1.0)
        scaler.scale(torch.zeros(1))
        call = scaler.step if ODD else (lambda optimizer: optimizer.step())
        with pytest.raises(DesyncError, match="synchronize"):
            call(optimizer)
        return
    backward(model, optimizer, 3)
    with pytest.raises(DesyncError, match=rf"worker {SIZE - 1} {what.split('_')[0].split(',')[0]}"):
        ALONE[what](model, optimizer) if ODD else optimizer.step()


@pytest.mark.parametrize("phase", ["warm-up", "compressed"])
def test_skipping_the_average_on_one_worker(phase):
    model, optimizer = started(phase)
    for step in (3, 4):
        backward(model, optimizer, step)
        if phase == "compressed":  # there is no average to be skipped
            skips(model, optimizer) if ODD else optimizer.step()
            continue
        with pytest.raises(DesyncError, match="averaged gradients"):
            skips(model, optimizer) if ODD else optimizer.step()
        return
    assert_replicas_equal(model)


@pytest.mark.parametrize("how", ["on one worker", "by another norm", "by our own norm"])
def test_clipping_averages_differently_in_warm_up(how):
    model, optimizer = started("warm-up")
    backward(model, optimizer, 3)
    if how == "by our own norm":
        with pytest.raises(DesyncError, match=r"max_norm differs between workers: 0.01 on worker"):
            optimizer.clip_grad_norm_(1e-3 if ODD else 1e-2)
        return
    optimizer.synchronize()
    if ODD or how == "by another norm":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if ODD else 1e-2)
    with pytest.raises(DesyncError, match="averaged gradients"):
        skips(model, optimizer)


ARGUMENTS: list[dict] = [{}, {"groups": 2}, {"compression": world.Compression.fp16}]
DIFFERENT = {
    "check_replicas_every": {"check_replicas_every": 4},
    "groups": {"groups": 2},
    "passes": {"backward_passes_per_step": 2},
    "compression": {"compression": world.Compression.fp16},
    "predivide": {"gradient_predivide_factor": 2.0},
}


@pytest.mark.parametrize("what", [*DIFFERENT, "fused", "foreach"])
def test_options_that_differ(what):
    model = Net()
    options = {what: True} if ODD and what in ("fused", "foreach") else {}
    optimizer = wrap(model, warmup_steps=5, wrapping=DIFFERENT.get(what, {}) if ODD else {}, **options)
    # Gradients without a backward pass: nothing is under way that Horovod itself could stumble over.
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(DesyncError, match="differs between workers"):
        optimizer.step()


@pytest.mark.parametrize("phase", ["warm-up", "compressed"])
@pytest.mark.parametrize("how", ["alone", "plain alone", "broadcast", "all"])
def test_a_state_of_as_many_steps(how, phase):
    """Loaded on one worker alone it is an error; rank 0 may load it if it is broadcast."""
    model, optimizer = started(phase)
    other = Net(seed=1)
    donor = wrap(other, warmup_steps=PHASES[phase])
    train(other, donor, 3, start=100)
    state = donor.state_dict()
    if how == "plain alone":
        plain = torch.optim.AdamW(model.parameters())
        if ODD:
            plain.load_state_dict(state)
        optimizer = onebit.DistributedOptimizer(plain, list(model.named_parameters()), warmup_steps=PHASES[phase])
    elif how == "all" or (RANK == 0 if how == "broadcast" else ODD):
        optimizer.load_state_dict(state)
    if how == "broadcast":
        world.broadcast_optimizer_state(optimizer, root_rank=0)
    if how in ("broadcast", "all"):
        train(model, optimizer, 3, start=3)
        assert_replicas_equal(model)
        optimizer.check_replicas()
    else:
        with pytest.raises(DesyncError, match="which state was loaded"):
            train(model, optimizer, 1, start=3)


def test_loading_what_was_just_saved_keeps_the_error_feedback():
    """As accelerate does when it moves an optimizer's state to a device."""
    model, optimizer = started("compressed")
    before = optimizer.feedback_state_dict()
    optimizer.load_state_dict(optimizer.state_dict())
    after = optimizer.feedback_state_dict()
    assert before
    assert all(torch.equal(before[name], after[name]) for name in before)
    train(model, optimizer, 2, start=3)
    assert_replicas_equal(model)


def test_scales_of_gradscalers_that_differ_in_warm_up():
    model, optimizer = started("warm-up")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if ODD else 4.0)
    optimizer.zero_grad()
    x, y = batch(3)
    scaler.scale(cross_entropy(model(x), y)).backward()
    with pytest.raises(DesyncError, match="GradScaler's scale"):
        scaler.step(optimizer)


# -- gradients edited between backward() and step() -------------------------------------------------------------------


def torchs_norm(model, optimizer, step):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


EDITS = {
    "torch's norm": torchs_norm,
    "torch's value": lambda model, optimizer, step: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "one worker": lambda *args: torchs_norm(*args) if ODD else None,
    "some steps": lambda *args: torchs_norm(*args) if args[2] in (1, 4) else None,
    "workers by turns": lambda *args: torchs_norm(*args) if args[2] < 5 and args[2] % SIZE == RANK else None,
    "data, another layout": lambda model, optimizer, step: model.first.weight.grad.data.t().mul_(0.5),
    "data": lambda model, optimizer, step: [p.grad.data.mul_(0.5) for p in model.parameters() if p.grad is not None],
    "data, signs": lambda model, optimizer, step: model.second.weight.grad.data.neg_(),
    "data, a quarter": lambda model, optimizer, step: model.second.weight.grad.data.div_(4),
    "data, one row": lambda model, optimizer, step: model.first.weight.grad.data[3].zero_(),
    "data, clamped": lambda model, optimizer, step: [
        p.grad.data.clamp_(-0.01, 0.01) for p in model.parameters() if p.grad is not None
    ],
    "replaced": lambda model, optimizer, step: [setattr(p, "grad", p.grad * 0.5) for p in (model.first.weight,)],
    "none": lambda model, optimizer, step: setattr(model.first.weight, "grad", None) if step == 2 else None,
}


@pytest.mark.parametrize("options", ARGUMENTS, ids=str)
@pytest.mark.parametrize("edit", EDITS)
def test_edited_gradients_are_what_is_averaged_in_warm_up(edit, options):
    """Replicas are equal after every step, and weights are those of averaging the edited gradients by hand."""
    model, twin = Net(), Net()
    optimizer = wrap(model, warmup_steps=7, wrapping=options)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    for step in range(7):
        for trained in (model, twin):
            x, y = batch(step)
            cross_entropy(trained(x), y).backward()
            EDITS[edit](trained, None, step)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in twin.named_parameters():
            if p.requires_grad:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad = world.allreduce(
                    grad, name=f"twin.{name}", compression=options.get("compression", world.Compression.none)
                )
        plain.step()
        plain.zero_grad()
        assert_replicas_equal(model)
        if SIZE == 2:
            assert torch.equal(weights(model), weights(twin))


def lightning(model, optimizer, step):
    """All in a closure; zero_grad() is called in step()."""

    def closure():
        optimizer.zero_grad()
        x, y = batch(step)
        loss = cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss

    optimizer.step(closure=closure)


def trainer(model, optimizer, step):
    """transformers.Trainer and accelerate: torch's clipping in every step, model.zero_grad() after it."""
    x, y = batch(step)
    cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step(None)
    model.zero_grad()


class Wrapper:
    """As Lightning's: its own class, derived from the optimizer's, with attributes of its own."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Wrapper", (Wrapper, type(optimizer)), {})

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


def manual(model, optimizer, step):
    """Lightning's manual optimization."""
    wrapper = Wrapper(optimizer)
    wrapper.zero_grad()
    x, y = batch(step)
    cross_entropy(model(x), y).backward()
    wrapper.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with wrapper.skip_synchronize():
        optimizer.step()


def amp(model, optimizer, step):
    """Unscaling and clipping without synchronize()."""
    scaler = optimizer.__dict__.setdefault("scaler of the test", torch.amp.GradScaler("cpu", init_scale=8.0))
    optimizer.zero_grad()
    x, y = batch(step)
    scaler.scale(cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("loop", [lightning, trainer, manual, amp])
@pytest.mark.parametrize("resumed", [False, True])
def test_loops_of_trainers(loop, resumed):
    """In warm-up, when compression starts, compressed, and in a process that resumes there."""
    model = Net()
    optimizer = wrap(model, warmup_steps=4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    if resumed:
        state = model.state_dict()
        train(model, optimizer, 6)
        trained = optimizer.state_dict()
        model.load_state_dict(state)
        optimizer = wrap(model, warmup_steps=4)
        optimizer.load_state_dict(trained)
    for step in range(9):
        loop(model, optimizer, step)
        scheduler.step()
        assert_replicas_equal(model)
    assert optimizer.phase == "compressed"
    assert optimizer.stats(norms=False).skipped_steps == 0
    optimizer.check_replicas()


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_error_feedback_survives_an_edit_after_messages_have_left(value):
    """It starts again for what was overwritten there, and is what it was for all else."""
    model, optimizer = started("compressed")
    train(model, optimizer, 2, start=3)
    before = optimizer.feedback_state_dict()
    backward(model, optimizer, 5)
    if ODD:
        model.second.weight.grad.mul_(value)
    with pytest.raises(ConfigurationError, match="overlap=False"):
        optimizer.step()
    for name, residual in optimizer.feedback_state_dict().items():
        lost = ODD and name in ("second.weight", "tied.weight")
        expected = torch.zeros_like(residual) if lost else before[name]
        torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-5)
    model.zero_grad()
    train(model, optimizer, 3, start=6)
    assert optimizer.stats().skipped_steps == 0
    assert_replicas_equal(model)


@pytest.mark.parametrize("phase", ["warm-up", "compressed"])
@pytest.mark.parametrize("odd", [ODD, True], ids=["one worker", "all"])
def test_what_one_worker_finds_wrong_is_told_to_all(odd, phase):
    model, optimizer = started(phase)
    train(model, optimizer, 2, start=3)
    for value in (float("nan"), "high"):
        backward(model, optimizer, 5)
        if odd:
            optimizer.param_groups[0]["lr"] = value
        with pytest.raises((ConfigurationError, ValueError) if odd else DesyncError):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.step()
    train(model, optimizer, 2, start=7)
    assert_replicas_equal(model)


def test_the_first_surprising_edit_after_warm_up_is_an_error_and_the_next_is_not():
    model, optimizer = started("compressed")
    train(model, optimizer, 2, start=3)
    before = weights(model)
    backward(model, optimizer, 5)
    torchs_norm(model, optimizer, 5)
    with pytest.raises(ConfigurationError, match="overlap=False"):
        optimizer.step()
    assert torch.equal(before, weights(model))
    optimizer.step()  # with the gradients as they are now
    assert not torch.equal(before, weights(model))
    model.zero_grad()
    for step in range(5, 8):
        trainer(model, optimizer, step)
        assert_replicas_equal(model)


@pytest.mark.parametrize("how", ["mended", "broadcast", "broadcast by Horovod", "again"])
@pytest.mark.parametrize("wrapping", [{}, {"groups": 2}, {"overlap": False}, {"overlap": not ODD}], ids=str)
@pytest.mark.parametrize("phase", PHASES)
def test_a_refused_step_can_be_mended(phase, wrapping, how):
    model, optimizer = started(phase, **wrapping)
    train(model, optimizer, 2, start=3)
    backward(model, optimizer, 5)
    if ODD:
        optimizer.param_groups[0]["lr"] = 0.5
    for _ in range(2 if how == "again" else 1):
        with pytest.raises(DesyncError, match="learning rate"):
            optimizer.step()
    if how == "broadcast":
        onebit.broadcast_optimizer_state(optimizer)
    elif how == "broadcast by Horovod":
        world.broadcast_optimizer_state(optimizer, root_rank=0)
    else:
        optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    train(model, optimizer, 4, start=6)
    assert_replicas_equal(model)
    optimizer.check_replicas()


@pytest.mark.parametrize("how", ["broadcast", "refused", "refused, Horovod's", "loaded by all"])
@pytest.mark.parametrize("phase", PHASES)
def test_gradients_that_one_worker_alone_has_abandoned(phase, how):
    """It starts later averages and messages under the names that the others use."""
    model, optimizer = started(phase)
    train(model, optimizer, 2, start=3)
    state = copy.deepcopy(optimizer.state_dict())
    if how != "loaded by all" or not ODD:
        backward(model, optimizer, 5)
    if how == "loaded by all" or not ODD:
        optimizer.load_state_dict(state)
    if how == "loaded by all":
        with contextlib.suppress(DesyncError):  # nothing may have left yet
            optimizer.step()
    elif how != "broadcast":
        with pytest.raises(DesyncError, match="which state was loaded"):
            optimizer.step()
    if how == "refused, Horovod's":
        world.broadcast_optimizer_state(optimizer, root_rank=0)
    elif how != "loaded by all":
        onebit.broadcast_optimizer_state(optimizer)
    train(model, optimizer, 4, start=6)
    assert_replicas_equal(model)
    optimizer.check_replicas()


# -- NaN and Inf in warm-up -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    "options", [{}, {"groups": 2}, {"compression": world.Compression.fp16}, {"op": world.Sum}], ids=str
)
def test_nan_in_warm_up_is_skipped_by_all(value, options):
    model, optimizer = started("warm-up", **options)
    before = weights(model)
    moments = {p: {k: v.clone() for k, v in optimizer.state[p].items()} for p in optimizer.state}
    if ODD:
        spoil(model.second.weight, value)
    backward(model, optimizer, 3)
    optimizer.step()
    assert torch.equal(before, weights(model))
    for p, state in moments.items():
        assert all(torch.equal(value, optimizer.state[p][key]) for key, value in state.items())
    stats = optimizer.stats()
    assert (stats.skipped_steps, stats.step) == (1, 3)
    train(model, optimizer, 3, start=4)
    assert_replicas_equal(model)
    assert not torch.equal(before, weights(model))


def test_huge_but_finite_gradients_are_not_skipped():
    model, optimizer = started("warm-up")
    for p in model.parameters():
        p.grad = torch.full_like(p, 3e38 / SIZE)
    before = weights(model)
    optimizer.step()
    assert optimizer.stats().skipped_steps == 0
    assert not torch.equal(before, weights(model))


def test_nan_in_warm_up_raises_on_all_when_asked_to():
    model = Net()
    optimizer = wrap(model, warmup_steps=9, recipe=Recipe(on_nonfinite="raise"))
    train(model, optimizer, 2)
    before = weights(model)
    if RANK == 0:
        spoil(model.first.weight, "nan")
    backward(model, optimizer, 2)
    with pytest.raises(NonFiniteError, match="mean gradient"):
        optimizer.step()
    assert torch.equal(before, weights(model))
    train(model, optimizer, 1, start=3)
    assert_replicas_equal(model)


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(OVER_TORCH, reason="PyTorch pairs what two threads send by its order, and Gloo may end the process")
@pytest.mark.parametrize("phase", ["warm-up", "compressed"])
def test_two_optimizers_in_two_threads_are_refused(phase):
    pairs = [started(phase) for _ in range(2)]
    caught, barrier = [], threading.Barrier(2)

    def work(model, optimizer, number):
        barrier.wait()
        try:
            train(model, optimizer, 20, start=3 + 100 * number)
        except (ConfigurationError, DesyncError) as error:
            caught.append(error)

    threads = [threading.Thread(target=work, args=(*pair, k), daemon=True) for k, pair in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    # One of them may be left waiting for workers that gave up; the next agreement tells it.
    for _, optimizer in pairs:
        if any(thread.is_alive() for thread in threads):
            with pytest.raises((ConfigurationError, DesyncError)):
                tasks.run(optimizer._compressor.agreement.meet("flush"))
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert caught


def test_one_thread_after_another_may_step():
    model, optimizer = started("compressed")
    for step in range(3, 6):
        thread = threading.Thread(target=train, args=(model, optimizer, 1, step))
        thread.start()
        thread.join()
    train(model, optimizer, 2, start=6)
    assert_replicas_equal(model)


def test_a_call_within_another_is_an_error():
    """As of a signal handler that runs while this worker waits for the others."""
    model, optimizer = started("compressed")
    local = Net()
    rounds = onebit.DistributedOptimizer(
        torch.optim.SGD(local.parameters(), 0.1), list(local.named_parameters()),
        schedule=onebit.Local(every=4, doubling=0, delay=2),
    )  # fmt: skip
    train(local, rounds, 4)
    backward(local, rounds, 4)
    calls = [
        optimizer.check_replicas, optimizer.step, lambda: optimizer.clip_grad_norm_(1.0),
        lambda: saved(model, optimizer), rounds.flush, rounds.step, rounds.check_replicas,
    ]  # fmt: skip
    for call in calls:
        backward(model, optimizer, 3)
        seen = []
        read = handshake.read_agreement

        def within(*arguments, call=call, seen=seen, read=read):
            if not seen:
                seen.append(None)
                with pytest.raises((ConfigurationError, CheckpointError), match="signal handler"):
                    call()
            return read(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handshake, "read_agreement", within)
            optimizer.step()
        assert seen
    assert optimizer.stats().step == 3 + len(calls)
    train(model, optimizer, 2, start=4)
    train(local, rounds, 3, start=5)
    rounds.flush()
    for each in (model, local):
        assert_replicas_equal(each)


def test_what_one_worker_cannot_broadcast_is_told_to_all():
    model = Net()
    with pytest.raises(TypeError if ODD else DesyncError):
        onebit.broadcast_parameters(None if ODD else model.state_dict())
    onebit.broadcast_parameters(model.state_dict())
    assert_replicas_equal(model)


SCHEDULES = {"default": None, "gradients": onebit.Gradients(), "local": onebit.Local(every=2)}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_rate_that_differs_in_the_last_digit_of_float64_is_the_same(schedule):
    """As NumPy's cosines do between processors."""
    model = Net()
    optimizer = wrap(model, warmup_steps=None if schedule else 2, wrapping={"schedule": schedule})
    (group,) = optimizer.param_groups
    for step in range(6):
        rate = 1e-3 * (1 - step / 10)
        group["lr"] = math.nextafter(rate, 1) if ODD else rate
        train(model, optimizer, 1, start=step)
    optimizer.flush()
    optimizer.check_replicas()
    assert_replicas_equal(model)
    group["lr"] = rate * (1 + 1e-6 * ODD)
    with pytest.raises(DesyncError, match="learning rate of group 0 differs"):
        train(model, optimizer, 2, start=6)


@pytest.mark.parametrize("call", ["broadcast_parameters", "broadcast_optimizer_state"])
def test_a_root_of_each_worker_s_own_is_refused(call):
    model = Net()
    given = model.state_dict() if call == "broadcast_parameters" else wrap(model)
    with pytest.raises(DesyncError, match=rf"{call} \(root 0\) on worker 0, {call} \(root 1\) on worker 1"):
        getattr(onebit, call)(given, root_rank=RANK % 2)
    getattr(onebit, call)(given, root_rank=1)


def test_a_worker_that_finds_no_checkpoint_does_not_wait(tmp_path):
    model, optimizer = started("compressed")
    with pytest.raises(DesyncError, match=r"worker \d broadcast_parameters\(\)"):
        onebit.broadcast_parameters(model.state_dict()) if ODD else onebit.load_checkpoint(tmp_path, model, optimizer)
    onebit.broadcast_parameters(model.state_dict())


def clipped(own, max_norm):
    """The norm, and the gradients after it, for gradients that are multiples of ones, ``own``."""
    model, optimizer = started("compressed")
    optimizer.zero_grad()
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.full_like(p, own)
    norm = optimizer.clip_grad_norm_(max_norm)
    found = {float(value) for p in trained for value in p.grad.unique()}
    optimizer.step()
    assert_replicas_equal(model)
    return norm, found, sum(p.numel() for p in trained)


def test_the_norm_after_the_warm_up_is_the_root_mean_square_of_the_workers():
    norm, found, size = clipped(RANK + 1.0, 1.0)
    expected = (size * sum((rank + 1.0) ** 2 for rank in range(SIZE)) / SIZE) ** 0.5
    assert norm == pytest.approx(expected, rel=1e-5)
    assert list(found) == [pytest.approx((RANK + 1.0) / expected, rel=1e-5)]
    norm, found, size = clipped(RANK + 1.0, 1e6)
    assert found == {RANK + 1.0}

"""Messages that leave during the backward pass: the same results, and no change of a gradient is lost."""

import dataclasses
import time

import pytest
import torch
from torch.nn.functional import cross_entropy

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.recipe import PRESETS
from tests.ranks.torch_common import (
    DEVICE,
    OPTIMIZERS,
    RANK,
    SIZE,
    Net,
    assert_replicas_equal,
    batch,
    repeatable_sums_only,
    train,
    two_ranks_only,
    wrap,
)
from tests.ranks.world import world

SMALL = {name: dataclasses.replace(recipe, bucket_size=8192) for name, recipe in PRESETS.items()}


def backward(model, optimizer, step):
    optimizer.zero_grad()
    x, y = batch(step)
    cross_entropy(model(x), y).backward()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def sent(optimizer):
    return len(optimizer._compressor.engine._sent)


@two_ranks_only
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("recipe", ["robust", "paper"])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_the_same_weights_with_and_without_overlap(kind, options, recipe, passes):
    results = []
    for overlap in (True, False):
        model = Net()
        optimizer = wrap(
            model,
            kind,
            recipe=SMALL[recipe],
            warmup_steps=3,
            wrapping={"overlap": overlap, "backward_passes_per_step": passes},
            **options,
        )
        train(model, optimizer, 9, passes=passes)
        assert_replicas_equal(model)
        results.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_messages_leave_during_backward():
    model = Net()
    optimizer = wrap(model, recipe=SMALL["robust"], warmup_steps=2)
    train(model, optimizer, 3)
    backward(model, optimizer, 3)
    buckets = len(optimizer._compressor.engine.layout.buckets)
    assert sent(optimizer) == buckets - 1 == 3  # the last holds a parameter that is never used
    optimizer.step()
    assert sent(optimizer) == 0
    assert_replicas_equal(model)


def test_messages_leave_early_after_a_layer_was_unfrozen_in_the_warm_up():
    model = Net()
    model.first.requires_grad_(False)
    optimizer = wrap(model, recipe=SMALL["robust"], warmup_steps=6)
    for step in range(16):
        if step == 3:
            model.first.requires_grad_(True)
        backward(model, optimizer, step)
        optimizer.step()
    backward(model, optimizer, 16)
    assert sent(optimizer) > 0
    optimizer.step()
    assert_replicas_equal(model)


def test_workers_may_differ_in_when_they_send():
    model = Net()
    optimizer = wrap(model, recipe=SMALL["robust"], warmup_steps=2, wrapping={"overlap": RANK == 0})
    train(model, optimizer, 9)
    backward(model, optimizer, 9)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_replicas_equal(model)


@two_ranks_only
def test_clipping_in_every_step_is_noticed():
    results = []
    for overlap in (True, False):
        model = Net()
        optimizer = wrap(model, warmup_steps=2, wrapping={"overlap": overlap})
        for step in range(8):
            backward(model, optimizer, step)
            if step >= 2:  # in warm-up gradients must not be touched while Horovod averages them
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        results.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("edit", ["in place", "data", "replaced", "hyperparameter"])
def test_a_late_change_on_one_worker_is_an_error_on_all(edit):
    model = Net()
    optimizer = wrap(model, recipe=SMALL["robust"], warmup_steps=2)
    train(model, optimizer, 6)
    before = weights(model)
    backward(model, optimizer, 6)
    if RANK == SIZE - 1:
        weight = model.second.weight
        if edit == "in place":
            weight.grad.mul_(0.5)
        elif edit == "data":
            weight.grad.data.mul_(0.5)
        elif edit == "replaced":
            weight.grad = weight.grad * 0.5
        else:
            optimizer.param_groups[0]["eps"] = 1e-3
    with pytest.raises(Exception, match="overlap=False" if edit != "hyperparameter" else "hyperparameter") as caught:
        optimizer.step()
    if edit != "hyperparameter":
        assert isinstance(caught.value, ConfigurationError)
        assert f"worker {SIZE - 1} changed" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@two_ranks_only
@pytest.mark.parametrize("how", ["synchronize", "clip"])
def test_announced_changes_are_taken_into_account(how):
    results = []
    for overlap in (True, False):
        model = Net()
        optimizer = wrap(model, recipe=SMALL["robust"], warmup_steps=2, wrapping={"overlap": overlap})
        train(model, optimizer, 6)
        for step in range(6, 9):
            backward(model, optimizer, step)
            if how == "clip":
                optimizer.clip_grad_norm_(0.1)
                optimizer.step()
            else:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
        assert_replicas_equal(model)
        results.append(weights(model))
    near = torch.cat([torch.isclose(*pair, rtol=0, atol=1e-6).reshape(-1) for pair in zip(*results, strict=True)])
    assert near.double().mean() > 0.98  # a sign may fall otherwise where the error is rounded


def test_nan_that_was_sent_already_is_taken_back_by_all():
    model = Net()
    optimizer = wrap(model, recipe=SMALL["robust"], warmup_steps=2)
    train(model, optimizer, 6)
    before, error = weights(model), optimizer.feedback_state_dict()
    optimizer.zero_grad()
    x, y = batch(6)
    if RANK == 0:
        x[0, 0] = float("nan")
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert optimizer.stats().skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    for name, value in optimizer.feedback_state_dict().items():
        torch.testing.assert_close(value, error[name], rtol=1e-5, atol=1e-5)
    train(model, optimizer, 4, start=7)
    assert_replicas_equal(model)


@two_ranks_only
def test_a_learning_rate_set_after_backward_counts():
    results = []
    for overlap in (True, False):
        model = Net()
        optimizer = wrap(model, recipe=SMALL["robust"], warmup_steps=2, wrapping={"overlap": overlap})
        for step in range(8):
            backward(model, optimizer, step)
            optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            optimizer.step()
        results.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_loading_a_state_after_backward_forgets_what_was_sent():
    model = Net()
    optimizer = wrap(model, recipe=SMALL["robust"], warmup_steps=2)
    train(model, optimizer, 6)
    state, residuals = optimizer.state_dict(), optimizer.feedback_state_dict()
    backward(model, optimizer, 6)
    optimizer.load_state_dict(state)
    for name, residual in optimizer.feedback_state_dict().items():
        torch.testing.assert_close(residual, residuals[name], rtol=1e-4, atol=1e-5)
    train(model, optimizer, 4, start=6)
    assert_replicas_equal(model)


@repeatable_sums_only
@pytest.mark.parametrize("then", ["step", "synchronized", "backward"])
@pytest.mark.parametrize("warmup_steps", [50, 2])
def test_the_number_of_passes_changes_after_backward(warmup_steps, then):
    results = []
    for after in (True, False):
        model = Net()
        recipe, wrapping = SMALL["robust"], {"op": world.Sum}
        optimizer = wrap(model, recipe=recipe, warmup_steps=warmup_steps, wrapping=wrapping)
        train(model, optimizer, 4)
        time.sleep(0.2 * (RANK > 0))  # no average arrives before worker 0 goes on
        if then == "backward" and not after:
            optimizer.set_backward_passes_per_step(2)
        backward(model, optimizer, 4)
        if then == "synchronized":
            optimizer.clip_grad_norm_(1e9)
        if after:
            assert sent(optimizer) == (3 if warmup_steps == 2 and then != "synchronized" else 0)
            optimizer.set_backward_passes_per_step(1)
        if then == "backward":
            x, y = batch(5)
            cross_entropy(model(x), y).backward()
        optimizer.step()
        results.append([weights(model), optimizer.feedback_state_dict()])
        optimizer.set_backward_passes_per_step(2)
        train(model, optimizer, 4, start=6, passes=2)
        assert_replicas_equal(model)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


class Odd(torch.nn.Module):
    """Channels-last and bfloat16 parameters, and one that this worker uses in some steps only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = torch.nn.Conv2d(8, 32, 3).to(memory_format=torch.channels_last)
        self.narrow = torch.nn.Linear(32, 64).to(torch.bfloat16)
        self.sometimes = torch.nn.Linear(64, 64)
        self.last = torch.nn.Linear(64, 10)

    def forward(self, x, step):
        h = self.conv(x.to(memory_format=torch.channels_last)).relu().mean((2, 3))
        h = self.narrow(h.to(torch.bfloat16)).float()
        if (step + RANK) % 2:
            h = h + self.sometimes(h)
        return self.last(h)


@two_ranks_only
@pytest.mark.parametrize("set_to_none", [True, False])
def test_odd_models_with_and_without_overlap(set_to_none):
    results = []
    for overlap in (True, False):
        model = Odd()
        optimizer = wrap(
            model,
            torch.optim.Adam,
            recipe=SMALL["robust"],
            warmup_steps=2,
            wrapping={"overlap": overlap},
            weight_decay=0.1,
        )
        for step in range(8):
            optimizer.zero_grad(set_to_none=set_to_none)
            generator = torch.Generator().manual_seed(10 * step + RANK)
            model(
                torch.randn(4, 8, 9, 9, generator=generator, device="cpu").to(DEVICE), step
            ).square().mean().backward()
            optimizer.step()
        assert_replicas_equal(model)
        results.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

"""The PyTorch face with the CUDA kernels against the host's: on a GPU, or with NUMBA_ENABLE_CUDASIM=1 in the simulator.

One GPU serves all ranks, over Horovod or ``torch.distributed``. With ONEBIT_PTX, see ``tests.cuda.test_kernels``.
"""

import copy
import dataclasses
import os
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from numba import config
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError, DesyncError, Recipe
from horovod_onebit.exchange import hierarchical
from horovod_onebit.kernels import has_gpu
from horovod_onebit.torch.collectives import Gathered
from tests.one_core import stay_on_one_core
from tests.ranks.torch_common import RANK, SIZE, assert_replicas_equal, spoil, weights
from tests.ranks.world import collectives, world

pytestmark = pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU here, and Numba does not simulate")

if config.ENABLE_CUDASIM:
    stay_on_one_core(RANK)
if "ONEBIT_PTX" in os.environ:
    from tests.cuda import machine

    machine.install(os.environ["ONEBIT_PTX"])
DEVICE = "cpu" if config.ENABLE_CUDASIM else "cuda"
COLLECTIVES = type(collectives())  # of the transport
TRANSPORT = sys.modules[COLLECTIVES.__module__]
RECIPE = Recipe(block_size=64, min_compressed_size=100, bucket_size=2**20)
ADAM = (torch.optim.AdamW, {"lr": 1e-2})
OPTIMIZERS = [
    ADAM,
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.01, "maximize": False}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    (onebit.LAMB, {"lr": 1e-2, "weight_decay": 0.01}),
]


class Small(torch.nn.Module):
    """Two compressed parameters, whose sizes are no multiples of a block, and small ones."""

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(12, 15)
        self.last = torch.nn.Linear(15, 7)
        self.to(DEVICE, dtype)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def wrap(model, kernels, kind=torch.optim.AdamW, recipe=RECIPE, warmup_steps=2, **arguments):
    optimizer = kind(model.parameters(), **({"lr": 1e-2} | arguments))
    named = list(model.named_parameters())
    return onebit.DistributedOptimizer(optimizer, named, warmup_steps=warmup_steps, recipe=recipe, kernels=kernels)


def step(model, optimizer, number, bad=False):
    generator = torch.Generator().manual_seed(1000 * number + RANK)
    x = torch.randn(16, 12, generator=generator, device="cpu").to(DEVICE, model.first.weight.dtype)
    optimizer.zero_grad()
    if bad:
        spoil(model.first.weight, "nan")
    loss = cross_entropy(model(x).float(), x[:, :7].argmax(1))
    loss.backward()
    optimizer.step()


def train(model, optimizer, steps, start=0):
    for number in range(start, start + steps):
        step(model, optimizer, number)


def uses_kernels(optimizer):
    """Whether all tensors are the kernels', and all messages theirs, too."""
    compressor = optimizer._compressor
    places = {not isinstance(b.tensor.weight, np.ndarray) for b in compressor.parameters.bindings.values()}
    places |= {not isinstance(message.row, np.ndarray) for message in compressor.engine._messages}
    assert len(places) == 1
    return places.pop()


def count_calls(monkeypatch, owner, name):
    """Counts the calls of a method, or of a function, for what is on the device."""
    counts, method = Counter(), getattr(owner, name)

    def counted(*arguments):
        counts["device"] += 1
        return method(*arguments)

    monkeypatch.setattr(owner, name, counted)
    return counts


@pytest.fixture(params=[False, True], ids=["by the host", "where they are"])
def gathered(request, monkeypatch):
    """Messages are gathered in the host's memory, or where the kernels write them, as with NCCL. Counts the latter."""
    monkeypatch.setattr(COLLECTIVES, "takes_device_memory", request.param)
    counts = count_calls(monkeypatch, Gathered, "words")
    yield counts
    assert bool(counts) <= request.param


MOMENTUM_SPACE = dataclasses.replace(RECIPE, space="momentum", clip=None, exchange="direct")


@pytest.mark.parametrize(
    ("kind", "arguments", "recipe"),
    [
        (*ADAM, dataclasses.replace(RECIPE, exchange="two_stage")),
        *((*pair, dataclasses.replace(RECIPE, exchange="direct")) for pair in OPTIMIZERS),
        (onebit.LAMB, {"lr": 1e-2, "weight_decay": 0.01}, MOMENTUM_SPACE),
    ],
)
def test_both_kernels_train_alike(kind, arguments, recipe, gathered):
    trained, residuals = [], []
    for kernels in ("cpu", "cuda"):
        model = Small()
        optimizer = wrap(model, kernels, kind, recipe, **arguments)
        train(model, optimizer, 6)
        assert uses_kernels(optimizer) == (kernels == "cuda")
        assert_replicas_equal(model)
        trained.append(weights(model).cpu())
        residuals.append(optimizer.feedback_state_dict())
        stats = optimizer.stats()
        assert stats.error_norm > 0
        assert stats.momentum_norm > 0
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-6)
    assert residuals[0].keys() == residuals[1].keys()
    for name, value in residuals[0].items():
        torch.testing.assert_close(residuals[1][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    trained = []
    for kernels in ("cpu", "cuda"):
        model = Small(dtype)
        optimizer = wrap(model, kernels, eps=1e-3)  # a smaller one is 0 in float16
        train(model, optimizer, 5)
        assert uses_kernels(optimizer) == (kernels == "cuda")
        assert_replicas_equal(model)
        trained.append(weights(model).cpu())
    torch.testing.assert_close(*trained, rtol=1e-2 if dtype != torch.float64 else 1e-5, atol=1e-3)


def uses_kernels_for_gradients(optimizer):
    engine = optimizer._gradients.coded._mean.engine
    places = {not isinstance(array, np.ndarray) for t in engine.tensors for array in (t.weight, t.variance, t.residual)}
    places |= {message.on_device for message in engine._messages}
    assert len(places) == 1
    return places.pop()


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_few_bits(exchange, dtype, gathered):
    """Both kernels train alike, also after a step that all skip."""
    recipe = dataclasses.replace(RECIPE, exchange=exchange, warmup="three_bit")
    trained = []
    for kernels in ("cpu", "cuda"):
        model = Small(dtype)
        optimizer = wrap(model, kernels, recipe=recipe, warmup_steps=100, eps=1e-3)
        train(model, optimizer, 13)
        assert uses_kernels_for_gradients(optimizer) == (kernels == "cuda")
        before = weights(model)
        step(model, optimizer, 13, bad=RANK == SIZE - 1)
        assert torch.equal(before, weights(model)) == (optimizer.stats().skipped_steps == 1)
        train(model, optimizer, 3, start=14)
        assert_replicas_equal(model)
        trained.append(weights(model).cpu())
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(*trained, **close)


def test_gradients_in_few_bits_move_with_the_model(monkeypatch):
    model = Small()
    optimizer = wrap(model, "cuda", recipe=dataclasses.replace(RECIPE, warmup="two_bit"), warmup_steps=100)
    train(model, optimizer, 12)
    before = optimizer._gradients.coded.describe()
    for host in (True, False):
        with monkeypatch.context() as patch:
            if host:
                patch.setattr(optimizer._parameters.placement, "of", lambda p: None)
            train(model, optimizer, 2, start=12 + 2 * (not host))
        assert uses_kernels_for_gradients(optimizer) != host
        assert_replicas_equal(model)
    assert {name: count + 4 for name, count in before.items()} == optimizer._gradients.coded.describe()


def test_direct_messages_stay_where_they_are(gathered):
    model = Small()
    optimizer = wrap(model, "cuda")
    train(model, optimizer, 5)
    buckets = len(optimizer._compressor.engine.layout.buckets)
    assert gathered["device"] == (3 * buckets if COLLECTIVES.takes_device_memory else 0)


@pytest.mark.skipif(SIZE != 4, reason="needs four ranks: two hosts of two")
@pytest.mark.parametrize("between", ["direct", "two_stage"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_workers_of_a_host_add_up_where_the_gradients_are(between, dtype, gathered, monkeypatch):
    """As they do in the host's memory, on hosts that are made up: the same sums, so the same bits from host to host."""
    monkeypatch.setattr(COLLECTIVES, "host", lambda self: (RANK // 2, 2))
    monkeypatch.setattr(hierarchical.Exchange, "between", between)
    recipe = dataclasses.replace(RECIPE, exchange="hierarchical", bucket_size=100)
    moved = count_calls(monkeypatch, TRANSPORT, "moved")
    trained, residuals = [], []
    for kernels in ("cpu", "cuda"):
        model = Small(dtype)
        optimizer = wrap(model, kernels, recipe=recipe, eps=1e-3)
        train(model, optimizer, 6)
        before = weights(model)
        step(model, optimizer, 6, bad=RANK == SIZE - 1)
        assert torch.equal(before, weights(model))
        assert optimizer.stats().skipped_steps == 1
        train(model, optimizer, 2, start=7)
        assert_replicas_equal(model)
        assert optimizer._compressor.engine.exchange.name == "hierarchical"
        trained.append(weights(model).cpu())
        residuals.append(optimizer.feedback_state_dict())
    buckets = len(optimizer._compressor.engine.layout.buckets)
    assert buckets > 1
    assert moved["device"] == (7 * buckets if COLLECTIVES.takes_device_memory else 0)
    rough = {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(*trained, **({"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else rough))
    assert residuals[0].keys() == residuals[1].keys()
    if dtype is torch.float32:
        for name, value in residuals[0].items():
            torch.testing.assert_close(residuals[1][name], value, rtol=1e-4, atol=1e-5)


def test_nan_on_one_worker_is_skipped_by_all(gathered):
    model = Small()
    optimizer = wrap(model, "cuda")
    train(model, optimizer, 4)
    before, residuals = weights(model), optimizer.feedback_state_dict()
    step(model, optimizer, 4, bad=RANK == SIZE - 1)
    assert torch.equal(before, weights(model))
    assert optimizer.stats().skipped_steps == 1
    for name, value in optimizer.feedback_state_dict().items():
        torch.testing.assert_close(value, residuals[name], atol=1e-5, rtol=0)
    train(model, optimizer, 2, start=5)
    assert_replicas_equal(model)


def test_a_resumed_run_goes_on_bit_for_bit_and_may_change_kernels(gathered):
    model = Small()
    optimizer = wrap(model, "cuda")
    train(model, optimizer, 4)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), optimizer.feedback_state_dict()])
    train(model, optimizer, 3, start=4)
    for kernels in ("cuda", "cpu"):
        again = Small(seed=1)
        resumed = wrap(again, kernels)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(copy.deepcopy(saved[1]))
        resumed.load_feedback_state_dict(saved[2])
        train(again, resumed, 3, start=4)
        assert uses_kernels(resumed) == (kernels == "cuda")
        if kernels == "cuda" and SIZE == 2:
            assert torch.equal(weights(model), weights(again))
        torch.testing.assert_close(weights(model), weights(again), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_a_gradscaler(dtype):
    """Inf on one worker, in warm-up and after it: all skip alike, and all scales fall."""
    model = Small()
    optimizer = wrap(model, "cuda")
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0)
    for number in range(8):
        optimizer.zero_grad()
        if number in (1, 5) and RANK == SIZE - 1:
            spoil(model.first.weight, "inf")
        generator = torch.Generator().manual_seed(1000 * number + RANK)
        x = torch.randn(16, 12, generator=generator, device="cpu").to(DEVICE)
        with torch.autocast(DEVICE, dtype):
            loss = cross_entropy(model(x).float(), x[:, :7].argmax(1))
        scaler.scale(loss).backward()
        if number == 6:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        assert len(set(world.allgather_object(scaler.get_scale()))) == 1
    assert uses_kernels(optimizer)
    assert scaler.get_scale() == 64.0
    assert optimizer.stats().skipped_steps == 2
    assert_replicas_equal(model)


@pytest.mark.parametrize("space", ["update", "momentum"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_zero_one_adam(space, decoupled, gathered):
    """Exact steps, steps by one-bit gradients, local steps, exchanges of what they moved; in the end, a flush."""
    schedule = onebit.ZeroOne(var_freeze_step=8, var_update_scaler=2, local_step_scaler=2, local_step_clipper=4)
    recipe = Recipe(block_size=64, min_compressed_size=100, space=space, clip=3.0 if space == "update" else None)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    trained = []
    for kernels in ("cpu", "cuda"):
        model = Small()
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.01)
        named = list(model.named_parameters())
        optimizer = onebit.DistributedOptimizer(optimizer, named, schedule=schedule, recipe=recipe, kernels=kernels)
        train(model, optimizer, 8)
        step(model, optimizer, 8, bad=RANK == 0)
        train(model, optimizer, 9, start=9)
        assert uses_kernels(optimizer) == (kernels == "cuda")
        assert optimizer.stats().skipped_steps == 1
        optimizer.flush()
        assert_replicas_equal(model)
        trained.append(weights(model).cpu())
    torch.testing.assert_close(*trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float32])
def test_local_steps_after_the_freeze_move_weights_of_every_dtype(dtype):
    """They are copied to float32 and back, but for those of float32."""
    schedule, trained = onebit.Local(every=4, doubling=0, freeze=4), []
    for kernels in ("cpu", "cuda"):
        model = Small(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        named = list(model.named_parameters())
        optimizer = onebit.DistributedOptimizer(optimizer, named, schedule=schedule, recipe=RECIPE, kernels=kernels)
        train(model, optimizer, 6)
        assert uses_kernels(optimizer) == (kernels == "cuda")
        before = weights(model)
        train(model, optimizer, 1, start=6)
        assert not torch.equal(before, weights(model))
        train(model, optimizer, 9, start=7)
        assert_replicas_equal(model)
        trained.append(weights(model).cpu())
    close = 0.05 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(*trained, rtol=close, atol=close)


@pytest.mark.parametrize("options", [{"momentum": 0.3}, {"momentum": 0.3, "delay": 1}, {"freeze": 2}])
def test_local_steps(options):
    def trained(kernels):
        model, schedule = Small(), onebit.Local(every=2, doubling=0, **options)
        optimizer = onebit.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-2), list(model.named_parameters()), schedule=schedule,
            recipe=RECIPE, kernels=kernels,
        )  # fmt: skip
        for number in range(6):
            step(model, optimizer, number)
        optimizer.flush()
        assert_replicas_equal(model)
        return weights(model)

    torch.testing.assert_close(trained("cuda"), trained("cpu"), atol=1e-6, rtol=0)


def test_a_model_that_moves_to_other_memory_goes_on(monkeypatch):
    model = Small()
    optimizer = wrap(model, "cuda")
    train(model, optimizer, 4)
    assert uses_kernels(optimizer)
    placement = optimizer._parameters.placement
    for host in (True, False):
        with monkeypatch.context() as patch:
            if host:
                patch.setattr(placement, "of", lambda p: None)
            for p in model.parameters():
                p.data = p.data.clone()
            train(model, optimizer, 2, start=4 + 2 * (not host))
        assert uses_kernels(optimizer) != host
        assert_replicas_equal(model)


def test_workers_with_messages_in_different_memories_are_told(monkeypatch):
    """With NCCL: one worker's cannot be gathered with another's."""
    monkeypatch.setattr(COLLECTIVES, "takes_device_memory", True)
    model = Small()
    optimizer = wrap(model, "cuda" if RANK == 0 else "cpu")
    train(model, optimizer, 2)
    with pytest.raises(
        DesyncError, match=r"where messages of first.weight are differs between workers: GPU on worker 0"
    ):
        step(model, optimizer, 2)


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigurationError, match="kernels='gpu'"):
        wrap(Small(), "gpu")


class Deep(torch.nn.Module):
    """Eight layers whose messages leave in buckets of their own, while the gradients of others are still computed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(512, 512) for _ in range(8)])
        self.to(DEVICE)

    def forward(self, x):
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


DEEP = {
    "one bit": {"recipe": dataclasses.replace(RECIPE, bucket_size=2**16), "warmup_steps": 3},
    "three bits": {"recipe": dataclasses.replace(RECIPE, bucket_size=2**16, warmup="three_bit"), "warmup_steps": 100},
    "gradients in few bits": {"recipe": dataclasses.replace(RECIPE, bucket_size=2**16), "schedule": onebit.Gradients()},
    "local steps": {"recipe": RECIPE, "schedule": onebit.Local(every=4)},
}


@pytest.mark.skipif(bool(config.ENABLE_CUDASIM), reason="the simulator has no streams, and takes minutes")
@pytest.mark.parametrize("beside", [False, True], ids=["one stream", "a stream of its own"])
@pytest.mark.parametrize("case", DEEP)
def test_messages_that_leave_during_the_backward_pass(case, beside):
    """With many in flight, and on any stream, replicas stay equal, and the loss is that of the host's kernels."""
    losses = []
    for kernels in ("cpu", "cuda"):
        model = Deep()
        optimizer = onebit.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), kernels=kernels, **DEEP[case]
        )
        stream = torch.cuda.Stream() if beside else None
        with torch.cuda.stream(stream):
            for number in range(30):
                generator = torch.Generator().manual_seed(1000 * number + RANK)
                x = torch.randn(16, 512, generator=generator, device="cpu").to(DEVICE)
                optimizer.zero_grad()
                loss = (model(x) - x.roll(1, 1)).square().mean()
                loss.backward()
                optimizer.step()
            if case == "local steps":
                optimizer.flush()
            losses.append(float(loss.detach()))
            assert_replicas_equal(model)
    assert abs(losses[1] / losses[0] - 1) < 0.02

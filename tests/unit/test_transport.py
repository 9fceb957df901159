"""Which transport the PyTorch face takes, and that it needs no Horovod."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch.nn")
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError, UnsupportedError
from horovod_onebit.face import next_name
from horovod_onebit.torch import averaging, transport

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_HOROVOD = """
import sys, tempfile

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch, torch.distributed as dist
import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model = torch.nn.Linear(64, 64)
onebit.broadcast_parameters(model.state_dict())
optimizer = onebit.DistributedOptimizer(torch.optim.Adam(model.parameters()), warmup_steps=2)
onebit.broadcast_optimizer_state(optimizer)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
assert optimizer.phase.value == "compressed"
with tempfile.TemporaryDirectory() as folder:
    onebit.save_checkpoint(folder, model, optimizer)
    onebit.load_checkpoint(folder, model, optimizer)
plain = torch.optim.Adam(model.parameters())
for call in (lambda: onebit.elastic, lambda: onebit.DistributedOptimizer(plain, process_set=0)):
    try:
        call()
    except (ImportError, ConfigurationError) as error:
        print(type(error).__name__, error)
"""


def test_everything_but_elastic_works_without_horovod():
    job = subprocess.run([sys.executable, "-c", WITHOUT_HOROVOD], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stderr
    first, second = job.stdout.splitlines()
    assert first.startswith("ModuleNotFoundError No module named 'horovod")
    assert second.startswith("ConfigurationError process_set=0, and Horovod cannot be imported")


def test_our_constants_are_horovods():
    hvd = pytest.importorskip("horovod.torch")
    assert (onebit.Average, onebit.Sum) == (hvd.Average, hvd.Sum)
    for name in ("none", "fp16"):
        ours, theirs = getattr(onebit.Compression, name), getattr(hvd.Compression, name)
        assert ours.__name__ == theirs.__name__  # which workers compare
        values = torch.randn(7)
        assert torch.equal(ours.decompress(*ours.compress(values)), theirs.decompress(*theirs.compress(values)))


def wrapped(**arguments):
    return onebit.DistributedOptimizer(torch.optim.Adam(torch.nn.Linear(8, 8).parameters()), **arguments)


def test_nothing_is_initialised():
    with pytest.raises(ConfigurationError, match=r"call hvd.init\(\) before DistributedOptimizer.*init_process_group"):
        wrapped()
    with pytest.raises(ConfigurationError, match=r"torch\.distributed is not initialised"):
        wrapped(process_group=5)
    with pytest.raises(ConfigurationError, match=r"init_process_group\(\)"):
        onebit.broadcast_parameters({})


@pytest.fixture
def process_group():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def test_both_are_initialised(monkeypatch, process_group):
    hvd = pytest.importorskip("horovod.torch")
    monkeypatch.setattr(hvd, "is_initialized", lambda: True)
    with pytest.raises(ConfigurationError, match=r"both initialised.*process_set=.*process_group="):
        wrapped()
    with pytest.raises(ConfigurationError, match=r"broadcast_parameters\(\.\.\., process_set="):
        onebit.broadcast_parameters({})
    assert wrapped(process_group=dist.group.WORLD)._compressor.transport.in_order


def test_one_transport_serves_all_optimizers_until_the_world_is_another(process_group):
    first = transport.choose(call="a test")
    assert transport.choose(process_group=dist.group.WORLD, call="a test") is first
    dist.destroy_process_group()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        assert transport.choose(call="a test") is not first


def test_nothing_is_left_open_of_worlds_that_were_destroyed():
    opened = []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            transport.choose(call="a test")
            dist.destroy_process_group()
        gc.collect()
        opened.append(len(os.listdir("/proc/self/fd")))
    assert opened[-1] == opened[0]


def test_models_that_average_in_a_class_derived_from_ddps_are_found(process_group):
    class Derived(DistributedDataParallel):
        pass

    class Again(Derived):
        pass

    for kind in (DistributedDataParallel, Derived, Again):
        model, other = (kind(torch.nn.Linear(2, 2)) for _ in range(2))
        with pytest.raises(ConfigurationError, match="require_backward_grad_sync = False"):
            averaging.check(model.parameters())
        averaging.switch_off(other, other)
        averaging.check(other.parameters())
        averaging.check(torch.nn.Linear(2, 2).parameters())


def test_a_model_whose_own_averages_are_switched_off_can_be_copied():
    model = torch.nn.Linear(2, 2)
    averaging.switch_off(model, model)
    model(torch.ones(1, 2))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_optimizers_are_counted_alike_by_workers_that_have_come_later():
    """In an elastic job, the whole world of a newcomer's first optimizer had other members."""
    names = [next_name(0, ranks, "phases") for ranks in ((0, 1), (0, 1, 2), (0, 1))]
    assert names == ["onebit.0.phases.0", "onebit.0.phases.1", "onebit.0.phases.2"]
    of_sets = [next_name(3, ranks, "phases") for ranks in ((0, 1), (1, 2))]
    assert of_sets == ["onebit.3.phases.0", "onebit.3.phases.0"]
    assert next_name(-1, (), "phases") == "onebit.-1.phases.0"  # of a worker that is outside of a group


def test_what_averages_whatever_it_is_told_is_refused(process_group):
    x = torch.ones(1, 2)
    for inner, whole in ((torch.nn.Linear(2, 2), False), (torch.nn.Linear(2, 2), True)):
        model = DistributedDataParallel(inner, static_graph=True)
        averaging.switch_off(model if whole else inner, model)
        with pytest.raises(UnsupportedError, match="leave static_graph out"):
            model(x)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    averaging.switch_off(model, model)
    model(x).sum().backward()
    with model.join(), pytest.raises(UnsupportedError, match="as many batches"):
        model(x)

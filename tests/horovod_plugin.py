"""A pytest plugin on each rank: Horovod's tests find our optimizer where they look for Horovod's.

Each test is run in both phases, ``warmup`` (compression never starts) and ``compressed`` (each optimizer has had its
warm-up before the test gets it), with Horovod's ``broadcast_optimizer_state`` and with ours.
"""

import faulthandler
import inspect
import itertools
import os
import sys
import unittest.mock

import pytest
import torch
from _pytest.runner import runtestprotocol

# Horovod's tests/utils wants the package, which is the standard library's since Python 3.3.
sys.modules.setdefault("mock", unittest.mock)

import horovod.torch as hvd  # noqa: E402

import horovod_onebit.torch as onebit  # noqa: E402
import horovod_onebit.torch.elastic as elastic  # noqa: E402
from horovod_onebit import Recipe  # noqa: E402
from horovod_onebit.errors import DesyncError, UnsupportedError  # noqa: E402

CONCERNED = ("DistributedOptimizer", "broadcast_optimizer_state", "broadcast_parameters", "TorchState")
OFFERED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)

REFUSED = {
    "test_sparse_embeddings": "SparseAdam has no 1-bit form, and sparse gradients need sparse_as_dense=True",
    "test_delta_optimizer": "op=hvd.Adasum, and it wants a GPU",
    "test_model_parallelism": "wants two GPUs for each worker",
    "test_broadcast_state_gpu": "Horovod skips it",
    "test_broadcast_state_no_grad": "wants the gradient that Horovod's broadcast_optimizer_state leaves behind when it "
    "takes its hidden step to make state; ours has state from the beginning, and nothing is stepped",
}
"""Horovod's tests that are not run, and why."""

DISAGREE = {
    "test_broadcast_state_options": "its workers take a step with hyperparameters of their own before they broadcast",
}
"""Horovod's tests in which the first step of each optimizer must be refused on all workers; the rest is to pass."""

TERMINAL = os.fdopen(os.dup(2), "w")  # what pytest captures is lost when a rank is ended


class Mode:
    """What the tests get at present."""

    phase = "warmup"
    disagreeing = False
    compressed = 0  # optimizers that were in the compressed phase when a test got them


HOROVODS_BROADCAST = hvd.broadcast_optimizer_state
BROADCASTS = {"horovod": HOROVODS_BROADCAST, "onebit": onebit.broadcast_optimizer_state}


def distributed(optimizer, *args, **kwargs):
    """``onebit.DistributedOptimizer`` with the arguments of Horovod's."""
    first_step = Mode.phase == "compressed"
    kwargs["recipe"] = Recipe(min_compressed_size=1, warmup="exact")
    wrapped = onebit.DistributedOptimizer(optimizer, *args, **kwargs, warmup_steps=1 if first_step else 10**6)
    if first_step:
        _warm_up(wrapped)
        Mode.compressed += 1
        # A worker that is not in the process set does not compress.
        assert wrapped.phase == "compressed" or not wrapped._participates
    return _disagreeing(wrapped) if Mode.disagreeing else wrapped


def _warm_up(optimizer):
    """One exact step, with rank 0's options, that leaves the weights where they are."""
    own = [dict(group) for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(0)
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        group.update(hvd.broadcast_object(options, name="options"), lr=0.0)
        for p in group["params"]:
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=generator).to(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, options in zip(optimizer.param_groups, own, strict=True):
        group.update(options)


def _disagreeing(optimizer):
    """``optimizer``, whose next step all workers must refuse."""
    step = optimizer.step

    def refused():
        del optimizer.step
        with pytest.raises(DesyncError, match="differs between workers"):
            step()

    optimizer.step = refused
    return optimizer


def offered(cls):
    """The optimizers that tests which try all of PyTorch's are to try."""
    return [kind for kind in type.__subclasses__(cls) if kind in OFFERED] if cls is torch.optim.Optimizer else []


def check_refusals():
    """Whatever ``offered`` leaves out is refused when it is wrapped."""
    for kind in type.__subclasses__(torch.optim.Optimizer):
        if kind.__module__.startswith("torch.optim") and kind not in OFFERED:
            parameter = torch.nn.Parameter(torch.zeros(4, 4))
            with pytest.raises(UnsupportedError, match="has no 1-bit form"):
                onebit.DistributedOptimizer(kind([parameter]), warmup_steps=1)


def pytest_sessionstart():
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # as the tests do, before hvd.init()
    hvd.init()
    check_refusals()
    hvd.shutdown = lambda: None  # Gloo often fails to connect a second time, whoever asks
    hvd.DistributedOptimizer = distributed
    hvd.elastic.TorchState = elastic.TorchState
    torch.optim.Optimizer.__subclasses__ = classmethod(offered)


def pytest_collection_modifyitems(items, config):
    """The tests that concern the optimizer and its state, but for those that ask for what is refused."""
    names = {item.name for item in items}
    if "test_broadcast_state" in names and not (REFUSED | DISAGREE).keys() <= names:
        raise pytest.UsageError(f"this Horovod has no {sorted((REFUSED | DISAGREE).keys() - names)}: mend the lists")
    chosen = [
        item
        for item in items
        if item.name not in REFUSED and any(word in inspect.getsource(item.function) for word in CONCERNED)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_runtest_protocol(item, nextitem):
    """Run ``item`` in both phases, with both broadcasts."""
    Mode.disagreeing = item.name in DISAGREE
    for Mode.phase, whose in itertools.product(("warmup", "compressed"), BROADCASTS):
        hvd.broadcast_optimizer_state = BROADCASTS[whose]
        item._initrequest()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in runtestprotocol(item, nextitem=nextitem, log=True):
            if report.failed:
                _end(
                    f"{item.nodeid} failed in {report.when}, {Mode.phase}, broadcast of {whose}\n{report.longreprtext}"
                )
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _end(text):
    """A rank that fails must not leave the others waiting: it ends, and the launcher ends the job."""
    TERMINAL.write(f"\n{text}\n")
    TERMINAL.flush()
    os._exit(1)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{Mode.compressed} optimizers were compressed")


@pytest.fixture(autouse=True)
def nothing_hangs():
    faulthandler.dump_traceback_later(120, exit=True, file=TERMINAL)
    yield
    faulthandler.cancel_dump_traceback_later()

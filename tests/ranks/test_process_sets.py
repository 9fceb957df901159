"""1-bit training inside process sets: two sets of two, and one rank that trains alone."""

import horovod.torch as hvd
import pytest
import torch

import horovod_onebit.torch as onebit
from horovod_onebit.torch.horovod import HorovodCollectives

hvd.init()
pytestmark = pytest.mark.skipif(hvd.size() != 4, reason="needs four ranks")


def train(process_set, seed):
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    named = list(model.named_parameters())
    optimizer = onebit.DistributedOptimizer(optimizer, named, warmup_steps=3, process_set=process_set)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(12):
        optimizer.zero_grad()
        x = torch.randn(8, 40, generator=generator)
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), optimizer


def test_two_sets_of_two_train_apart():
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    own = sets[hvd.rank() // 2]
    w, optimizer = train(own, seed=hvd.rank())
    rows = hvd.allgather(w[None], name="sets")
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[2], rows[3])
    assert not torch.equal(rows[0], rows[2])
    assert optimizer.stats().step_bytes_sent < 40 * 40 // 8 + 500
    for process_set in sets:
        hvd.remove_process_set(process_set)


def test_a_rank_outside_the_set_trains_alone():
    some = hvd.add_process_set([0, 1, 2])
    w, _ = train(some, seed=hvd.rank())
    rows = hvd.allgather(w[None], name="alone")
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[3])
    hvd.remove_process_set(some)


def test_no_sets_are_added_in_an_elastic_job(monkeypatch):
    """Horovod would abort all workers when one dies."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    assert HorovodCollectives().hosts([[0, 1], [2, 3]]) is None

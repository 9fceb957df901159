"""Checkpoints of every worker: the run goes on bit for bit, and bad files are an error on all."""

import json
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import horovod_onebit.torch as onebit
from horovod_onebit import CheckpointError, ConfigurationError, Recipe, world
from horovod_onebit.feedback import SERVER_PREFIX
from horovod_onebit.torch import world as torch_world
from tests.ranks.torch_common import RANK, REPEATABLE, SIZE, Net, assert_replicas_equal, train, weights, wrap

TWO_STAGE = Recipe(exchange="two_stage", block_size=64)


@pytest.fixture
def folder(tmp_path):
    """One folder for all workers."""
    return Path(hvd.broadcast_object(str(tmp_path), root_rank=0, name="folder"))


@pytest.mark.parametrize("steps", [2, 5, 8])
@pytest.mark.parametrize("recipe", ["robust", "paper", TWO_STAGE])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, onebit.LAMB, torch.optim.SGD])
def test_a_resumed_run_goes_on_bit_for_bit(folder, kind, recipe, steps):
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    model = Net()
    optimizer = wrap(model, kind, warmup_steps=4, recipe=recipe, **momentum)
    train(model, optimizer, steps)
    onebit.save_checkpoint(folder, model, optimizer, extra={"epoch": 3})
    train(model, optimizer, 6, start=steps)

    again = Net(seed=5)
    resumed = wrap(again, kind, warmup_steps=4, recipe=recipe, **momentum)
    train(again, resumed, 1)
    assert onebit.load_checkpoint(folder, again, resumed) == {"epoch": 3}
    train(again, resumed, 6, start=steps)
    if REPEATABLE:
        assert torch.equal(weights(model), weights(again))
    assert_replicas_equal(again)


def test_the_last_complete_one_counts(folder):
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    for steps in range(3):
        train(model, optimizer, 2, start=2 * steps)
        onebit.save_checkpoint(folder, model, optimizer, extra={"steps": steps})
    hvd.barrier()
    assert len(list(folder.glob("*.pt"))) == SIZE + 1
    assert not list(folder.glob("*.tmp"))
    assert onebit.load_checkpoint(folder, model, optimizer) == {"steps": 2}


FAULTS = ["empty folder", "truncated", "missing", "foreign", "another key", "bad json", "another format"]


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_files_are_an_error_on_all_workers_and_change_nothing(folder, fault):
    model = Net()
    optimizer = wrap(model, warmup_steps=2)
    train(model, optimizer, 5)
    if fault != "empty folder":
        onebit.save_checkpoint(folder, model, optimizer)
    before = weights(model)
    if RANK == 0 and fault != "empty folder":
        last = sorted(folder.glob(f"*.worker-{SIZE - 1:04d}.pt"))[0]
        if fault == "truncated":
            last.write_bytes(last.read_bytes()[:200])
        elif fault == "missing":
            last.unlink()
        elif fault == "foreign":
            torch.save(torch.ones(3), last)
        elif fault == "another key":
            torch.save({"format": 1, "key": "other"}, last)
        elif fault == "bad json":
            (folder / "latest.json").write_text("{")
        else:
            (folder / "latest.json").write_text(json.dumps({"format": 99}))
    hvd.barrier()
    with pytest.raises(CheckpointError, match="cannot load the checkpoint; worker"):
        onebit.load_checkpoint(folder, model, optimizer)
    assert torch.equal(before, weights(model))
    train(model, optimizer, 2, start=5)
    assert_replicas_equal(model)


def test_a_folder_that_cannot_be_written_is_an_error_on_all_workers(folder):
    model = Net()
    optimizer = wrap(model)
    if RANK == 0:
        (folder / "file").write_text("")
    hvd.barrier()
    with pytest.raises(CheckpointError, match="cannot save"):
        onebit.save_checkpoint(folder / "file", model, optimizer)
    with pytest.raises(ConfigurationError, match="expected what"):
        onebit.save_checkpoint(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("recipe", ["robust", TWO_STAGE])
def test_other_workers_owe_together_what_these_did(recipe):
    """As after Horovod was started anew; here the new world has the same number of workers."""
    model = Net()
    optimizer = wrap(model, warmup_steps=2, recipe=recipe)
    train(model, optimizer, 6)
    compressor = optimizer._compressor
    torch_world.leave(compressor)
    torch_world.leave(compressor)  # twice is once
    assert not any(name.startswith(SERVER_PREFIX) for name in compressor.engine.feedback.state_dict())
    train(model, optimizer, 1, start=6)  # settles
    assert compressor.left is None
    train(model, optimizer, 3, start=7)
    assert_replicas_equal(model)

    torch_world.leave(compressor)
    expected = world.owed(hvd.allgather_object(compressor.left, name="saved again"))
    torch_world.settle(compressor)
    for name, residual in compressor.engine.feedback.state_dict().items():
        np.testing.assert_allclose(residual, expected[name], rtol=1e-5, atol=1e-7)
    assert expected
    train(model, optimizer, 3, start=10)
    assert_replicas_equal(model)

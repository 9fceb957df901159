"""The PyTorch face: what a run costs, written by worker 0."""

import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import horovod_onebit.torch as onebit
from horovod_onebit import ConfigurationError
from horovod_onebit.tools.monitor import read
from tests.ranks.torch_common import RANK, SIZE, Net, train, wrap
from tests.ranks.world import needs_horovod, world

sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")  # TensorBoard then imports no TensorFlow


def test_worker_0_writes_lines_and_scalars(tmp_path):
    path, folder = tmp_path / "run.jsonl", tmp_path / "board"
    model = Net()
    optimizer = wrap(model, warmup_steps=4)
    with onebit.Monitor(optimizer, jsonl=path, tensorboard=folder, every=2) as monitor:
        for step in range(9):
            loss = train(model, optimizer, 1, start=step)
            monitor.step(loss=loss)
    assert path.exists() == folder.exists() == (RANK == 0)
    if RANK != 0:
        return
    rows = read(path)
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert [row["phase"] for row in rows] == ["warmup", "compressed", "compressed", "compressed"]
    assert rows[-1]["bytes_sent"] == optimizer.stats().bytes_sent - optimizer.stats().step_bytes_sent
    if SIZE > 1:
        assert rows[-1]["ratio_to_fp32"] > 5
    board = EventAccumulator(str(folder)).Reload()
    losses = board.Scalars("horovod_onebit/loss")
    assert [event.step for event in losses] == [2, 4, 6, 8]
    assert losses[-1].value == pytest.approx(rows[-1]["loss"])


@needs_horovod
@pytest.mark.parametrize("schedule", [None, onebit.Local(every=2, doubling=0)])
def test_the_first_worker_of_a_process_set_writes(schedule, tmp_path):
    """The others do nothing, whether they are in the set or not."""
    path, last = tmp_path / "run.jsonl", SIZE - 1
    members = world.add_process_set([last])
    model = Net()
    wrapping = {"process_set": members, "schedule": schedule}
    optimizer = wrap(model, warmup_steps=None if schedule else 2, wrapping=wrapping)
    with onebit.Monitor(optimizer, jsonl=path, tensorboard=tmp_path / "board", every=2) as monitor:
        for step in range(4):
            monitor.step(loss=train(model, optimizer, 1, start=step))
    assert path.exists() == (tmp_path / "board").exists() == (last == RANK)
    assert last != RANK or [row["step"] for row in read(path)] == [2, 4]
    world.barrier()  # the set must not go before its member has trained
    world.remove_process_set(members)


def test_other_optimizers_are_refused():
    with pytest.raises(ConfigurationError, match="optimizer is Net"):
        onebit.Monitor(Net())
    optimizer = wrap(Net())
    if RANK == 0:
        with pytest.raises(ConfigurationError, match="cannot be written"):
            onebit.Monitor(optimizer, jsonl="/nowhere/run.jsonl")

"""The core on real MPI ranks, with no framework: the same bits as the simulation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import numpy as np
from horovod_onebit import simulation
from horovod_onebit.mpi import MPICollectives
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam

def worker(collectives, recipe):
    rng = np.random.default_rng(collectives.rank)
    weights = {name: np.zeros(size, np.float32) for name, size in (("a", 9), ("b", 1025), ("c", 5000))}
    optimizer = NumpyOptimizer(weights, Adam(lr=0.01), collectives=collectives, warmup_steps=1, recipe=recipe)
    for _ in range(30):
        optimizer.step({k: (w - 1 + rng.standard_normal(w.size)).astype(np.float32) for k, w in weights.items()})
    return np.concatenate(list(weights.values()))

world = MPICollectives()
for recipe in ("robust", "paper"):
    real = worker(world, recipe)
    simulated = simulation.run(lambda c: worker(c, recipe), world.size)[0]
    close = np.abs(real - simulated).max() < 1e-6
    gathered = world.allgather(real.view(np.uint8), "check").wait().reshape(world.size, -1)
    assert close and (gathered == gathered[0]).all(), recipe
sys.stdout.write(f"rank {world.rank} agrees\\n")
"""


RESUMED = """
import sys
import numpy as np
from horovod_onebit.checkpoint import load_checkpoint, save_checkpoint
from horovod_onebit.mpi import MPICollectives
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.recipe import Recipe
from horovod_onebit.rules.adam import Adam
from horovod_onebit.schedule import Local

def train(optimizer, weights, start, stop):
    for step in range(start, stop):
        rng = np.random.default_rng([world.rank, step])
        optimizer.step({k: (w - 1 + rng.standard_normal(w.size)).astype(np.float32) for k, w in weights.items()})

def build(options):
    weights = {name: np.zeros(size, np.float32) for name, size in (("a", 9), ("b", 1025), ("c", 5000))}
    return NumpyOptimizer(weights, Adam(lr=0.01), collectives=world, **options), weights

world, folder, saves = MPICollectives(), sys.argv[1], sys.argv[2] == "saves"
two_stage = Recipe(exchange="two_stage")
for number, options in enumerate(({"warmup_steps": 3, "recipe": two_stage}, {"schedule": Local(every=4, freeze=6)})):
    optimizer, weights = build(options)
    if saves:
        train(optimizer, weights, 0, 11)
        save_checkpoint(f"{folder}/{number}", optimizer, extra={"step": 11})
        train(optimizer, weights, 11, 20)
        optimizer.flush()
        np.savez(f"{folder}/{number}.{world.rank}.npz", **weights)
    else:
        step = load_checkpoint(f"{folder}/{number}", optimizer)["step"]
        train(optimizer, weights, step, 20)
        optimizer.flush()
        if world.size == 3:
            with np.load(f"{folder}/{number}.{world.rank}.npz") as expected:
                assert all(np.array_equal(weights[name], expected[name]) for name in weights), options
    row = np.concatenate(list(weights.values())).view(np.uint8)
    gathered = world.allgather(row, "check").wait().reshape(world.size, -1)
    assert (gathered == gathered[0]).all(), options
sys.stdout.write(f"rank {world.rank} agrees\\n")
"""


def mpirun(processes, program, *arguments):
    found = Path(sys.executable).with_name("mpirun")
    command = [str(found) if found.exists() else "mpirun", "--oversubscribe", "-np", str(processes), sys.executable]
    env = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command += [str(program), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("agrees") == processes
    return result.stderr


@pytest.mark.horovodrun
def test_mpirun_agrees_with_the_simulation(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    mpirun(3, program)


@pytest.mark.horovodrun
def test_a_job_that_is_started_again_continues(tmp_path):
    """With as many processes bit for bit; with others, from the same weights and the mean of the residuals."""
    program = tmp_path / "program.py"
    program.write_text(RESUMED)
    mpirun(3, program, str(tmp_path), "saves")
    mpirun(3, program, str(tmp_path), "resumes")
    assert "is of 3 workers and there are 2" in mpirun(2, program, str(tmp_path), "resumes")

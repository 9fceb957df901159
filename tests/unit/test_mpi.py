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


@pytest.mark.horovodrun
def test_mpirun_agrees_with_the_simulation(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [
        str(mpirun) if mpirun.exists() else "mpirun",
        "--oversubscribe",
        "-np",
        "3",
        sys.executable,
        str(program),
    ]
    env = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("agrees") == 3

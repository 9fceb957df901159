"""A worker that dies ends the job, on all ranks, within seconds; nothing of it is left."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from jobs.processes import ROOT

pytestmark = pytest.mark.horovodrun


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_dead_worker_ends_the_job(backend):
    mark, tools = uuid.uuid4().hex, Path(sys.executable).parent
    env = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    command = [str(tools / "horovodrun"), "-np", "3", f"--{backend}", sys.executable, "tests/faults/dies.py", mark]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    output = done.stdout + done.stderr
    assert f"dies {mark}" in output
    assert done.returncode != 0
    # mpirun and horovodrun say which process it was; the survivors, over Gloo, that a collective failed.
    assert "signal 9" in output or "exit code" in output.lower() or "terminated with non-zero" in output, output
    left = [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
    psutil.wait_procs(left, timeout=10)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_job_may_end_while_an_exchange_is_under_way():
    tools = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [str(tools / "horovodrun"), "-np", "2", "--gloo", sys.executable, "tests/faults/ends.py", "two_stage"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the last step was taken") == 2

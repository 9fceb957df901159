"""A worker that dies ends the job, on all ranks, within seconds; nothing of it is left."""

import subprocess
import sys
import uuid

import psutil
import pytest

from jobs.processes import ROOT, environment, launch

pytestmark = pytest.mark.horovodrun


def horovodrun(processes, backend, script, argument):
    """The ended job, whether or not it failed."""
    command = [*launch(processes, backend), sys.executable, script, argument]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_dead_worker_ends_the_job(backend):
    mark = uuid.uuid4().hex
    done = horovodrun(3, backend, "tests/faults/dies.py", mark)
    output = done.stdout + done.stderr
    assert f"dies {mark}" in output
    assert done.returncode != 0
    # mpirun and horovodrun say which process it was; the survivors, over Gloo, that a collective failed.
    assert "signal 9" in output or "exit code" in output.lower() or "terminated with non-zero" in output, output
    left = [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
    psutil.wait_procs(left, timeout=10)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_job_may_end_while_an_exchange_is_under_way():
    done = horovodrun(2, "gloo", "tests/faults/ends.py", "two_stage")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the last step was taken") == 2

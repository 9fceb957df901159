"""Workers that are killed and workers that join, under Horovod elastic; the hosts are names of this machine."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.processes import ROOT

pytestmark = pytest.mark.horovodrun
LIMIT = 240


class Job:
    """An elastic job on hosts that may change while it runs."""

    def __init__(self, folder, script, hosts, *arguments, least=1):
        self.folder = folder
        self.hosts = folder / "hosts"
        self.give(hosts)
        discovery = folder / "discover.sh"
        discovery.write_text(f"#!/bin/sh\ncat {self.hosts}\n")
        discovery.chmod(discovery.stat().st_mode | stat.S_IXUSR)
        tools = Path(sys.executable).parent
        env = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        env |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [str(tools / "horovodrun"), "--gloo", "-np", str(len(hosts)), "--min-np", str(least), "--max-np", "4"]
        command += ["--host-discovery-script", str(discovery), sys.executable, str(ROOT / "tests" / "faults" / script)]
        self.output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            [*command, str(folder), *map(str, arguments)],
            cwd=ROOT, env=env, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def give(self, hosts):
        temporary = self.hosts.with_suffix(".new")
        temporary.write_text("".join(f"{host}:1\n" for host in hosts))
        temporary.replace(self.hosts)

    def state(self):
        """Steps taken, workers, loss."""
        try:
            step, workers, loss = (self.folder / "step").read_text().split()
        except (OSError, ValueError):
            return 0, 0, float("nan")
        return int(step), int(workers), float(loss)

    def wait(self, condition, what):
        start = time.monotonic()
        while not condition():
            if self.process.poll() is not None or time.monotonic() - start > LIMIT:
                pytest.fail(f"no {what}: {self.state()}, status {self.process.poll()}\n{self.said()[-6000:]}")
            time.sleep(0.05)

    def kill(self, host):
        for path in self.folder.glob(f"{host}.*.pid"):
            os.kill(int(path.suffixes[-2][1:]), signal.SIGKILL)
            path.unlink()

    def said(self):
        return (self.folder / "output").read_text() + (self.folder / "log").read_text()

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.output.close()


def hosts():
    """Three names of this machine that Horovod takes for hosts of their own."""
    return ["localhost", "127.0.0.1", socket.gethostname()]


@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_training_goes_on_when_a_worker_is_killed_and_another_joins(exchange, tmp_path):
    first, second, third = hosts()
    job = Job(tmp_path, "elastic_torch.py", [first, second], 400, exchange)
    try:
        job.wait(lambda: job.state()[0] > 30, "compressed steps")
        job.kill(second)
        job.wait(lambda: job.state()[1] == 1, "training alone")
        job.give([first, third])
        job.wait(lambda: job.state()[1] == 2, "second worker")
        job.wait(lambda: job.process.poll() is not None, "end")
    finally:
        job.end()
    assert job.process.returncode == 0, job.said()
    weights = [np.load(tmp_path / f"weights-{rank}.npz") for rank in range(2)]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0].files)
    assert job.state()[0] == 400
    assert job.state()[2] < 12
    log = (tmp_path / "log").read_text()
    assert log.count("done with 2 workers") == 2
    assert "with 1 workers, owing 0.000000" not in log

"""Elastic jobs on hosts that may change while they run; the hosts are names of this machine."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time

import psutil

from jobs.processes import ROOT, environment, launch

HOSTS = ("localhost", "127.0.0.1", socket.gethostname())
"""Three names of this machine that Horovod takes for hosts of their own."""


class Job:
    """``script`` of this folder, with ``folder`` as its first argument, on ``slots`` workers for each of ``hosts``."""

    def __init__(self, folder, script, hosts, *arguments, limit=240, options=(), slots=1):
        self.folder, self.limit, self.slots = folder, limit, slots
        self.hosts = folder / "hosts"
        self.give(hosts)
        for old in folder.glob("*.pid"):
            old.unlink()
        discovery = folder / "discover.sh"
        discovery.write_text(f"#!/bin/sh\ncat {self.hosts}\n")
        discovery.chmod(discovery.stat().st_mode | stat.S_IXUSR)
        env = environment(TF_CPP_MIN_LOG_LEVEL="3")
        command = [*launch(len(hosts) * slots, "gloo"), "--min-np", "1", "--max-np", "4"]
        command += ["--host-discovery-script", str(discovery), *options, sys.executable]
        self.output = (folder / "output").open("a")
        self.process = subprocess.Popen(
            [*command, str(ROOT / "tests" / "faults" / script), str(folder), *map(str, arguments)],
            cwd=ROOT, env=env, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def give(self, hosts):
        """Let Horovod find these hosts."""
        temporary = self.hosts.with_suffix(".new")
        temporary.write_text("".join(f"{host}:{self.slots}\n" for host in hosts))
        temporary.replace(self.hosts)

    def state(self):
        """Steps taken, workers, loss."""
        try:
            step, workers, loss = (self.folder / "step").read_text().split()
        except (OSError, ValueError):
            return 0, 0, float("nan")
        return int(step), int(workers), float(loss)

    def wait(self, condition, what):
        """Until ``condition()``; an ``AssertionError`` if the job ends before or it takes too long."""
        start = time.monotonic()
        while not condition():
            if self.process.poll() is not None or time.monotonic() - start > self.limit:
                status = self.process.poll()
                raise AssertionError(f"no {what}: {self.state()}, status {status}\n{self.said()[-6000:]}")
            time.sleep(0.05)

    def workers(self):
        """The processes of the workers by host: those that live."""
        found = {}
        for path in self.folder.glob("*.pid"):
            host, pid = path.stem.rsplit("+", 1)
            if psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
                found[host] = int(pid)
        return found

    def signal(self, host, number):
        os.kill(self.workers()[host], number)

    def kill(self, host):
        self.signal(host, signal.SIGKILL)

    def said(self):
        return "\n".join(
            (self.folder / name).read_text() for name in ("output", "log") if (self.folder / name).exists()
        )

    def end(self):
        """Kill all that is left of it."""
        pids = [*self.workers().values()]
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.output.close()

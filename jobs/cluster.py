"""Several hosts on one machine: network namespaces on a bridge, each with its own sshd, links of a given rate.

    with cluster(hosts=2, rate="1gbit") as hosts:
        hosts.horovodrun("mpi", sys.executable, "torch/train.py")
        hosts.received()  # bytes by host, as the network interfaces count them

    python -m jobs.cluster --hosts 4 --rate 1gbit -- horovodrun arguments after the hosts ...

Linux and root only. What is made is taken away at the end, and what an earlier run left behind at the beginning.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.link import INTERFACE, NETWORK, shape
from jobs.processes import ROOT, run

NAME = "onebit"  # of the bridge; begins the names of the namespaces and links
OURS = re.compile(rf"{NAME}(v?\d+)?")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NAMES = Path("/etc/netns")  # `ip netns exec` puts the files of a namespace's folder there in place of those in /etc
LOCK = Path("/run/onebit-cluster.lock")
MOST = 253  # hosts; the bridge has the last address
TOOLS = ("ip", "tc", "ssh", "sshd", "ssh-keygen", "unshare", "hostname")


def unavailable() -> str | None:
    """Why there can be no cluster here; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    _find_tools()
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing: install iproute2 and openssh-server"
    probe = f"probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
        try:
            _run("ip", "-n", probe, "link", "add", NAME, "type", "bridge")
            _run("ip", "-n", probe, "link", "add", f"{NAME}v0", "type", "veth", "peer", "name", INTERFACE)
            _run("ip", "netns", "exec", probe, "tc", "qdisc", "add", "dev", INTERFACE, *shape("1gbit"))
        finally:
            _run("ip", "netns", "del", probe)
    except RuntimeError as error:
        return f"no network of hosts can be made here: {error}"
    return None


def _find_tools() -> None:
    """Where ``ip`` and ``sshd`` are is not on every root's PATH."""
    found = os.environ.get("PATH", os.defpath).split(":")
    os.environ["PATH"] = ":".join([*found, *(folder for folder in ("/usr/sbin", "/sbin") if folder not in found)])


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@dataclass
class Cluster:
    """The hosts, while they are there."""

    addresses: list[str]
    folder: Path
    servers: list[subprocess.Popen] = field(default_factory=list)

    def received(self) -> list[int]:
        """Bytes that each host's network interface has received since it was made."""
        return [self._counter(i, "rx_bytes") for i in range(len(self.addresses))]

    def sent(self) -> list[int]:
        """Bytes that each host's network interface has sent since it was made."""
        return [self._counter(i, "tx_bytes") for i in range(len(self.addresses))]

    def _counter(self, host: int, name: str) -> int:
        path = f"/sys/class/net/{INTERFACE}/statistics/{name}"
        command = ["ip", "netns", "exec", f"{NAME}{host}", "cat", path]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def horovodrun(
        self, backend: str, *command: str, slots: int = 1, timeout: float = 600, variables: Mapping[str, str] = {}
    ) -> str:
        """Run ``command`` on ``slots`` processes of every host by horovodrun over ``"mpi"`` or ``"gloo"``.

        ``variables`` are added to the environment. Returns its output; raises ``RuntimeError`` with the end of it if it
        fails or does not end in time.
        """
        runner = str(Path(sys.executable).with_name("horovodrun"))
        hosts = ",".join(f"{address}:{slots}" for address in self.addresses)
        arguments = [runner, "-np", str(slots * len(self.addresses)), "-H", hosts, f"--{backend}"]
        arguments += ["--network-interfaces", INTERFACE]
        if backend == "mpi":
            arguments.append(f"--mpi-args=--allow-run-as-root -mca oob_tcp_if_include {NETWORK}.0/24")
        else:
            arguments = [*_on(0, 'exec "$@"'), "sh", *arguments]
        path = f"{self.folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        if slots * len(self.addresses) > (os.cpu_count() or 1):
            env.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
            env.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", "120")
        return run([*arguments, *command], env, timeout)


def _on(host: int, script: str) -> list[str]:
    """The command that runs ``script`` on ``host``."""
    # A name of its own for each: MPI takes processes on hosts of one name for neighbours.
    script = f"hostname {NAME}{host} && {script}"
    return ["ip", "netns", "exec", f"{NAME}{host}", "unshare", "--uts", "sh", "-c", script]


@contextmanager
def cluster(hosts: int, rate: str | None = "1gbit") -> Iterator[Cluster]:
    """``hosts`` hosts whose links carry ``rate`` (as ``tc`` writes it: 100mbit, 1gbit) in each direction.

    Waits while another process has a cluster: their names are the same.
    """
    _find_tools()
    with _alone(), _ended_by_signals(), tempfile.TemporaryDirectory(prefix="onebit-cluster-") as folder:
        _remove()
        made = Cluster([f"{NETWORK}.{i + 1}" for i in range(hosts)], Path(folder))
        try:
            _network(made, rate)
            _ssh(made)
            yield made
        finally:
            with _signals(ENDING, signal.SIG_IGN):
                for server in made.servers:
                    server.kill()
                    server.wait()
                _remove()


@contextmanager
def _alone() -> Iterator[None]:
    """No other process does this at the same time."""
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.getLogger(__name__).warning("another process has a cluster: waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP are as Ctrl-C, which ends pytest, too, once what was made is taken away. A second one changes
    nothing."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    # Under nohup, SIGHUP is ignored.
    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    with _signals(heard, end):
        yield


@contextmanager
def _signals(numbers: Sequence[int], handler: Any) -> Iterator[None]:
    """What ``handler`` is for these signals meanwhile; the main thread alone may set it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


def _remove() -> None:
    """Take away what there is of a cluster, processes included."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    for name in (line.split()[0] for line in listed if line):
        if not OURS.fullmatch(name):
            continue
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    for folder in NAMES.glob(f"{NAME}*"):
        if OURS.fullmatch(folder.name):
            shutil.rmtree(folder)
    # The kernel takes links away a while after their namespace.
    for link in Path("/sys/class/net").glob(f"{NAME}*"):
        if OURS.fullmatch(link.name):
            subprocess.run(["ip", "link", "del", link.name], capture_output=True)


def _network(made: Cluster, rate: str | None) -> None:
    _run("ip", "link", "add", NAME, "type", "bridge")
    _run("ip", "address", "add", f"{NETWORK}.254/24", "dev", NAME)
    _run("ip", "link", "set", NAME, "up")
    hosts = "127.0.0.1 localhost\n" + "".join(f"{a} {NAME}{i}\n" for i, a in enumerate(made.addresses))
    for i, address in enumerate(made.addresses):
        namespace, outside = f"{NAME}{i}", f"{NAME}v{i}"
        inside = ["ip", "netns", "exec", namespace]
        _run("ip", "netns", "add", namespace)
        (NAMES / namespace).mkdir(parents=True)
        (NAMES / namespace / "hosts").write_text(hosts)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
        _run("ip", "link", "set", outside, "master", NAME, "up")
        _run(*inside, "ip", "address", "add", f"{address}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            _run(*inside, "ip", "link", "set", device, "up")
        if rate:
            _run("tc", "qdisc", "add", "dev", outside, *shape(rate))
            _run(*inside, "tc", "qdisc", "add", "dev", INTERFACE, *shape(rate))


def _ssh(made: Cluster) -> None:
    """One sshd on every host, one key for all, and an ``ssh`` that knows both."""
    folder, ssh = made.folder, shutil.which("ssh")
    for name in ("host", "user"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    server = f"""
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
MaxStartups 100
SetEnv "PATH={path}" "LD_LIBRARY_PATH={os.environ.get("LD_LIBRARY_PATH", "")}"
"""
    client = f"""
IdentityFile {folder}/user
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
"""
    (folder / "sshd_config").write_text(server)
    (folder / "ssh_config").write_text(client)
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {ssh} -F {folder}/ssh_config "$@"\n')
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    for i in range(len(made.addresses)):
        command = _on(i, f"exec {shutil.which('sshd')} -D -f {folder}/sshd_config")
        made.servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for address in made.addresses:
        _wait_for(str(folder / "ssh"), address)


def _wait_for(ssh: str, address: str) -> None:
    for _ in range(50):
        if subprocess.run([ssh, address, "true"], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    raise RuntimeError(f"sshd of {address} does not answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--slots", type=int, default=1, help="processes on each host")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it")
    parser.add_argument("--backend", choices=("mpi", "gloo"), default="mpi")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if not 1 <= options.hosts <= MOST:
        parser.error(f"--hosts {options.hosts}: expected a number from 1 to {MOST}")
    if reason := unavailable():
        parser.exit(2, f"{reason}\n")
    with cluster(options.hosts, options.rate) as hosts:
        print(hosts.horovodrun(options.backend, *options.command, slots=options.slots, timeout=3600))
        print("received, bytes by host:", hosts.received())


if __name__ == "__main__":
    main()

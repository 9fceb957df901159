"""Hosts for a job over a slow link, without privileges: each worker is in a network namespace of its own.

    [*prefix("100mbit"), "--workers", "2", "--", sys.executable, "torch/train.py"]  # run it with a pipe as stdin

Needs Linux, `unshare`, `ip` and `tc`, and root or user namespaces. Each link carries the rate in each direction.

The namespaces have no names and live as long as their processes. All of these end with the first process of their
process namespace, which ends with the job, or when nobody holds the other end of its stdin any more. So nothing is left
behind, even if the caller is killed, and several jobs at once have nothing in common.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from jobs.processes import packages, started, when_stdin_ends

NETWORK = "10.77.0"
INTERFACE = "e0"
SWITCH = "switch"
TOOLS = ("unshare", "ip", "tc")

# A worker's own namespaces are there when this begins to run, its link a moment later. Gloo looks its address up by the
# name of the host, which therefore is its address.
HOST = """
set -e
echo made
read -r address
PYTHON -IS -c 'import socket, sys; socket.sethostname(sys.argv[1])' "$address"
ip link set lo up
ip address add "$address/24" dev INTERFACE
ip link set INTERFACE up
tc qdisc add dev INTERFACE SHAPE
status=0
"$@" </dev/null >&2 || status=$?
ip -json -statistics link show dev INTERFACE
exit $status
"""


class UnavailableError(Exception):
    """Why there can be no links here."""


def shape(rate: str) -> list[str]:
    """The arguments of `tc qdisc add` for a link of ``rate``, as ``tc`` writes it: 100mbit, 1gbit."""
    # What a link lets through at once beyond its rate must be little beside a message.
    burst = "16kb" if rate.endswith("mbit") else "64kb"
    return ["root", "tbf", "rate", rate, "burst", burst, "latency", "400ms"]


def environment() -> dict[str, str]:
    """This process's, with the folders on PATH where `ip` and `tc` are stored."""
    return os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "PYTHONPATH": packages()}


@cache
def prefix(rate: str, launcher: str = "horovodrun") -> list[str]:
    """What to put before the arguments of `python -m jobs.link`, tried out. Raises ``UnavailableError``.

    The workers find each other as those of ``launcher`` do: horovodrun or torchrun.
    """
    if sys.platform != "linux":
        raise UnavailableError("links between processes need Linux's network namespaces")
    env = environment()
    missing = [tool for tool in TOOLS if shutil.which(tool, path=env["PATH"]) is None]
    if missing:
        raise UnavailableError(f"{', '.join(missing)} missing: install util-linux and iproute2")
    said = ""
    for privileges in ([[]] if os.geteuid() == 0 else []) + [["--map-root-user"]]:
        unshare = ["unshare", *privileges, "--net", "--pid", "--fork", "--kill-child"]
        command = [*unshare, sys.executable, "-m", "jobs.link", "--rate", rate, "--launcher", launcher]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            with (
                started([*command, "--workers", "2", "--", "true"], env, log) as job,
                suppress(subprocess.TimeoutExpired),
            ):
                job.wait(timeout=60)
            if job.returncode == 0:
                return command
            said = (log.read_text().strip().splitlines() or [f"it ended with status {job.returncode}"])[-1]
    raise UnavailableError(f"no network namespaces with links can be made here: {said}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")


def _host(number: int, rate: str, variables: dict[str, str], command: Sequence[str]) -> subprocess.Popen:
    """Worker ``number`` in a namespace of its own, and its link to the switch."""
    words = {"INTERFACE": INTERFACE, "PYTHON": shlex.quote(sys.executable), "SHAPE": " ".join(shape(rate))}
    script = re.sub("|".join(words), lambda found: words[found[0]], HOST)
    host = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", script, "sh", *command],
        env=os.environ | variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert host.stdin is not None
    assert host.stdout is not None
    if host.stdout.readline() != "made\n":
        sys.exit(f"no network namespace can be made for worker {number}")
    outside = f"host{number}"
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", str(host.pid))
    _run("ip", "link", "set", outside, "master", SWITCH, "up")
    _run("tc", "qdisc", "add", "dev", outside, *shape(rate))
    host.stdin.write(f"{_address(number)}\n")
    host.stdin.flush()
    return host


def _address(number: int) -> str:
    return f"{NETWORK}.{number + 1}"


def _of_torchrun(workers: int) -> list[dict[str, str]]:
    """What torchrun sets for each worker, one on a host; they meet at worker 0."""
    common = {
        "MASTER_ADDR": _address(0), "MASTER_PORT": "29500", "WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "link", "GLOO_SOCKET_IFNAME": INTERFACE,
    }  # fmt: skip
    return [{**common, "RANK": str(rank)} for rank in range(workers)]


def _of_horovodrun(workers: int) -> list[dict[str, str]]:
    """What Horovod's Gloo reads, for each worker; they meet at a server of this process."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    slots = get_host_assignments(parse_hosts(",".join(f"{_address(i)}:1" for i in range(workers))), workers)
    server = RendezvousServer()
    common = create_run_env_vars(f"{NETWORK}.254", [INTERFACE], server.start())
    server.init(slots)
    return [{k: str(v) for k, v in (common | create_slot_env_vars(slot)).items()} for slot in slots]


VARIABLES = {"horovodrun": _of_horovodrun, "torchrun": _of_torchrun}
"""By the launcher that a job is meant for."""


def _wait(hosts: Sequence[subprocess.Popen]) -> int:
    """0, or the status of a worker that failed; the others then have ten seconds to say why."""
    deadline = float("inf")
    while None in (states := [host.poll() for host in hosts]) and time.monotonic() < deadline:
        if deadline == float("inf") and any(states):
            deadline = time.monotonic() + 10
        time.sleep(0.05)
    return next((state for state in states if state), 0)


def main() -> int:
    """In the namespaces that ``prefix`` makes: links and workers. Prints ``RESULT`` and the bytes each has sent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rate", required=True)
    parser.add_argument("--launcher", choices=VARIABLES, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    when_stdin_ends(lambda: os._exit(1))
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", SWITCH, "type", "bridge")
    _run("ip", "address", "add", f"{NETWORK}.254/24", "dev", SWITCH)
    _run("ip", "link", "set", SWITCH, "up")
    # As many threads as a worker would have on a host of its own.
    number = str(max(1, len(os.sched_getaffinity(0)) // options.workers))
    threads = {"OMP_NUM_THREADS": number, "TF_NUM_INTRAOP_THREADS": number}
    variables = VARIABLES[options.launcher](options.workers)
    hosts = [_host(i, options.rate, variables[i] | threads, options.command) for i in range(options.workers)]
    status = _wait(hosts)
    if status == 0:
        counters = [json.loads(host.stdout.read())[0]["stats64"] for host in hosts]
        print("RESULT", json.dumps({"sent": [c["tx"]["bytes"] for c in counters]}), flush=True)
    # All that is left of the job ends with this process, the first in its namespace.
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())

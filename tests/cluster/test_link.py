"""Workers in network namespaces of their own: what they see, and that nothing of them is left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import link
from jobs.processes import ROOT, result

pytestmark = pytest.mark.cluster

SHOW = """
import os, socket, subprocess
shape = subprocess.run(["tc", "qdisc"], capture_output=True, text=True).stdout
print(os.environ["HOROVOD_RANK"], socket.gethostname(), shape)
"""
SEND = """
import os, socket, time
if os.environ["HOROVOD_RANK"] == "0":
    client, _ = socket.create_server(("10.77.0.1", 4000)).accept()
    print("got", sum(len(part) for part in iter(lambda: client.recv(65536), b"")))
else:
    while True:
        try:
            client = socket.create_connection(("10.77.0.1", 4000), timeout=60)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    client.sendall(bytes(10**6))
    client.shutdown(socket.SHUT_WR)
    client.recv(1)  # until all has arrived
"""


@pytest.fixture(params=["as we are", "user namespaces"])
def prefix(request, monkeypatch):
    """The command prefix, as root and as anybody else has it."""
    link.prefix.cache_clear()
    if request.param == "user namespaces":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    try:
        yield link.prefix("100mbit")
    except link.UnavailableError as error:
        pytest.skip(str(error))
    finally:
        link.prefix.cache_clear()


def start(prefix, *command, workers=2):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [*prefix, "--workers", str(workers), "--", *command], cwd=ROOT, env=link.environment(), **pipes
    )


def finish(process):
    output = process.stdout.read()  # stdin stays open until then
    return process.wait(timeout=120), output


def test_each_worker_has_its_own_shaped_interface(prefix):
    status, output = finish(start(prefix, sys.executable, "-c", SHOW, workers=3))
    assert status == 0, output
    for rank in range(3):
        assert f"{rank} 10.77.0.{rank + 1}" in output
    assert output.count("qdisc tbf") == 3
    assert output.count("rate 100Mbit") == 3


def test_two_jobs_at_once_do_not_meet(prefix):
    """What one sends is counted at its own interface, under the same addresses as the other's."""
    jobs = [start(prefix, sys.executable, "-c", SEND) for _ in range(2)]
    for status, output in map(finish, jobs):
        assert status == 0, output
        assert "got 1000000" in output
        assert 10**6 < result(output)["sent"][1] < 1.3 * 10**6


def test_a_worker_that_fails_ends_the_others(prefix):
    program = "import os, sys, time; sys.exit(3) if os.environ['HOROVOD_RANK'] == '1' else time.sleep(600)"
    status, _ = finish(start(prefix, sys.executable, "-c", program))
    assert status == 3


def test_all_is_gone_when_stdin_is_closed(prefix, tmp_path):
    mark = f"sleeps for {tmp_path}"
    process = start(prefix, sys.executable, "-c", f"import time; time.sleep(600)  # {mark}")
    wait_for(lambda: len(marked(mark)) >= 2)
    process.stdin.close()
    assert process.wait(timeout=120) != 0
    wait_for(lambda: not marked(mark))
    assert not list(Path("/sys/class/net").glob(f"{link.SWITCH}*"))


def marked(mark):
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if mark in words and "jobs.link" not in words:
            found.append(words)
    return found


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)

"""docker/entrypoint.sh: the hosts of a cluster end with one key, whoever starts when and whoever dies on its way."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENTRYPOINT = str(Path(__file__).parents[2] / "docker" / "entrypoint.sh")
TOOLS = ("ssh-keygen", "ssh-keyscan", "/usr/sbin/sshd")
SHOW = ["sh", "-c", "cat $HOME/.ssh/id_ed25519 $HOME/.ssh/authorized_keys $HOME/.ssh/config"]

pytestmark = pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="openssh-client and -server are missing")


def environment(home, path=""):
    return dict(os.environ, HOME=str(home), TMPDIR=str(home), ONEBIT_CLUSTER="1", PATH=f"{path}:{os.environ['PATH']}")


def start(home, *command, **options):
    return subprocess.Popen(
        [ENTRYPOINT, *command],
        env=environment(home, **options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def shown(process):
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


def public(home):
    command = ["ssh-keygen", "-y", "-f", str(home / ".ssh" / "id_ed25519")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_containers_that_start_at_once_have_one_key(tmp_path):
    outputs = {shown(process) for process in [start(tmp_path, *SHOW) for _ in range(8)]}
    assert len(outputs) == 1
    assert public(tmp_path) in outputs.pop()
    assert shown(start(tmp_path, *SHOW)).startswith("-----BEGIN OPENSSH PRIVATE KEY-----")
    assert sorted(path.name for path in (tmp_path / ".ssh").iterdir()) == ["authorized_keys", "config", "id_ed25519"]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / ".ssh").iterdir()} == {0o600}


CALLS = {"mktemp": 1, "ssh-keygen": 2, "ln": 3, "rm": 1}


@pytest.mark.parametrize(("tool", "call"), [(tool, call + 1) for tool, calls in CALLS.items() for call in range(calls)])
def test_a_container_that_dies_on_its_way_stops_no_other(tool, call, tmp_path):
    """It is killed when it calls ``tool`` for the ``call``-th time, after what the tool does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / tool).write_text(
        f"#!{sys.executable}\nimport os, signal, subprocess, sys\n"
        f"subprocess.run([{shutil.which(tool)!r}, *sys.argv[1:]])\n"
        f"with open({str(tmp_path / 'calls')!r}, 'a+') as file:\n"
        f"    file.write('.')\n    file.seek(0)\n    count = len(file.read())\n"
        f"if count == {call}:\n    os.kill(os.getppid(), signal.SIGKILL)\n"
    )
    (folder / tool).chmod(0o755)
    killed = start(tmp_path, "true", path=str(folder))
    killed.communicate(timeout=60)
    assert killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    first = tmp_path / ".ssh" / "id_ed25519"
    before = first.read_text() if first.exists() else ""
    assert shown(start(tmp_path, *SHOW)).startswith(before)
    assert (tmp_path / ".ssh" / "authorized_keys").read_text() == public(tmp_path)


def test_a_volume_that_an_earlier_image_left_half_way_is_used(tmp_path):
    (tmp_path / ".ssh" / "making").mkdir(parents=True)
    output = shown(start(tmp_path, *SHOW))
    assert public(tmp_path) in output


def test_a_command_is_healthy_while_it_runs(tmp_path):
    shown(start(tmp_path, "healthy"))


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="a network of its own needs root and iproute2")
def test_a_host_is_healthy_when_its_ssh_server_answers(tmp_path):
    (tmp_path / "ssh_host_key").write_text("of a host whose server has ended")
    assert start(tmp_path, "healthy").wait(60) == 1
    Path("/run/sshd").mkdir(exist_ok=True)
    inside = ["unshare", "--net", "sh", "-c", f'ip link set lo up; "{ENTRYPOINT}" host & exec sleep 60']
    host = subprocess.Popen(inside, env=environment(tmp_path), stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        enter = ["nsenter", "--net", f"--target={host.pid}"]
        deadline = time.monotonic() + 30
        while subprocess.run([*enter, ENTRYPOINT, "healthy"], env=environment(tmp_path)).returncode:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        key = ["ssh", "-F", str(tmp_path / ".ssh" / "config"), "-i", str(tmp_path / ".ssh" / "id_ed25519")]
        login = subprocess.run([*enter, *key, "127.0.0.1", "echo", "in"], capture_output=True, text=True, timeout=30)
        assert login.stdout == "in\n", login.stderr
    finally:
        os.killpg(host.pid, signal.SIGTERM)
        host.wait()

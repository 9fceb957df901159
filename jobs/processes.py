"""Jobs that are ended when they take too long, and what they print for those who started them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(arguments: Sequence[str], env: Mapping[str, str], timeout: float) -> str:
    """The output of a job that is started in the project's folder.

    Raises ``RuntimeError`` with its beginning and its end if it fails, or does not end within ``timeout`` seconds; it
    is then killed with all its children.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    job = subprocess.Popen(arguments, cwd=ROOT, env=env, text=True, start_new_session=True, **pipes)
    try:
        output, _ = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        raise RuntimeError(f"{arguments} did not end within {timeout:.0f} s\n{output[-6000:]}") from None
    if job.returncode:
        raise RuntimeError(f"{arguments} ended with status {job.returncode}\n{output[:6000]}\n...\n{output[-2000:]}")
    return output


def two_processes(script: str | Path, *arguments: str, backend: str = "mpi", timeout: float = 1200, **env: str) -> Any:
    """The ``result`` of a Python program that horovodrun starts twice on this machine; ``env`` is set besides."""
    python = Path(sys.executable)
    packages = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONPATH": packages} | env
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(python.with_name("horovodrun")), "-np", "2", f"--{backend}", str(python), str(script), *arguments]
    return result(run(command, os.environ | {"PATH": path} | env, timeout))


def result(output: str) -> Any:
    """What worker 0 printed as ``RESULT`` and JSON."""
    line = next(line for line in output.splitlines() if "RESULT " in line)
    return json.loads(line.split("RESULT ", 1)[1])

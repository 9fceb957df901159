"""Jobs that end when they take too long or when their caller ends, and what they print for who started them.

python -m jobs.processes COMMAND ...  # runs COMMAND, and ends it when nobody holds the other end of stdin any more
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(arguments: Sequence[str], env: Mapping[str, str], timeout: float, cwd: Path = ROOT) -> str:
    """The output of a job that is started in the project's folder, or in ``cwd``.

    Raises ``RuntimeError`` with its beginning and its end if it fails, or does not end within ``timeout`` seconds; it
    is then killed with all its children, as it is when this process is interrupted.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    job = subprocess.Popen(arguments, cwd=cwd, env=env, text=True, start_new_session=True, **pipes)
    try:
        output, _ = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        raise RuntimeError(f"{arguments} did not end within {timeout:.0f} s\n{output[-6000:]}") from None
    except BaseException:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        raise
    if job.returncode:
        raise RuntimeError(f"{arguments} ended with status {job.returncode}\n{output[:3000]}\n...\n{output[-9000:]}")
    return output


def packages() -> str:
    """PYTHONPATH for jobs: the project's folder, then what this process has."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def environment(**variables: str) -> dict[str, str]:
    """For jobs of horovodrun on this machine, and ``variables``: each process has one thread, and yields its core where
    it waits."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    few = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    return os.environ | {"PATH": path, "PYTHONPATH": packages()} | few | variables


def launch(count: int, backend: str) -> list[str]:
    """The beginning of the command that runs a program in ``count`` processes on this machine."""
    return [str(Path(sys.executable).with_name("horovodrun")), "-np", str(count), f"--{backend}"]


@contextmanager
def started(arguments: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen]:
    """A job that prints to ``log`` and has ended when the context ends, however that comes about.

    The job must end when its stdin does, as those of ``guarded`` and of ``jobs.link`` do. Then it ends even if this
    process is killed.
    """
    with log.open("w") as output:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
        job = subprocess.Popen(arguments, cwd=ROOT, env=env, start_new_session=True, **pipes)
    try:
        yield job
    finally:
        assert job.stdin is not None
        job.stdin.close()
        try:
            job.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def guarded(arguments: Sequence[str]) -> list[str]:
    """The command that runs ``arguments`` until they end, or until its stdin does."""
    return [sys.executable, "-m", "jobs.processes", *arguments]


def when_stdin_ends(then: Callable[[], None]) -> None:
    """Call ``then``, in a thread of its own, when nobody holds the other end of this process's stdin any more."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        then()

    threading.Thread(target=watch, daemon=True).start()


def horovodrun(
    count: int, script: str | Path, *arguments: str, backend: str = "mpi", timeout: float = 1200, **env: str
) -> Any:
    """The ``result`` of a Python program in ``count`` processes on this machine; ``env`` is set besides."""
    command = [*launch(count, backend), sys.executable, str(script), *arguments]
    return result(run(command, environment(**env), timeout))


def result(output: str) -> Any:
    """What worker 0 printed as ``RESULT`` and JSON."""
    line = next(line for line in output.splitlines() if "RESULT " in line)
    return json.loads(line.split("RESULT ", 1)[1])


def main() -> int:
    job = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                job.wait(timeout=15)
            os.killpg(job.pid, signal.SIGKILL)

    when_stdin_ends(end)
    return job.wait()


if __name__ == "__main__":
    sys.exit(main())

"""``python -m tests.horovod_suite``: Horovod's own tests, with our optimizer in the place of Horovod's.

Horovod's release on PyPI has no tests, so a checkout of its repository is needed: ``--source`` names one; without it,
``horovod-0.28.1`` in the cache of ``docker/install_horovod.py`` is used, and cloned there if it is not. Nothing of it
is copied or changed: ``tests/horovod_plugin.py`` puts our optimizer in, and lists what is not run, with the reasons.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from jobs import processes

HOROVOD = "0.28.1"
REPOSITORY = "https://github.com/horovod/horovod.git"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "horovod-onebit")
CHECKOUT = CACHE / f"horovod-{HOROVOD}"

PARALLEL = "test/parallel/test_torch.py"
SINGLE = "test/single/test_torch_elastic.py"


def at_hand() -> Path | None:
    """The checkout in the cache, if there is one."""
    return CHECKOUT if (CHECKOUT / PARALLEL).exists() else None


def fetch() -> Path:
    """The checkout in the cache, cloned if need be."""
    if not at_hand():
        command = ["git", "clone", "--quiet", "--depth", "1", "--branch", f"v{HOROVOD}", REPOSITORY, str(CHECKOUT)]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"Horovod's repository could not be cloned: pass --source, or put a checkout into {CHECKOUT}")
    return CHECKOUT


def environment() -> dict[str, str]:
    """For jobs whose ranks import this project from here."""
    return processes.environment(TF_CPP_MIN_LOG_LEVEL="3", PYTEST_ADDOPTS="")


def run_tests(file: Path, launcher: list[str], *arguments: str, timeout: float = 600) -> str:
    """Run Horovod's tests in ``file`` by ``launcher`` (none: on one process); the output."""
    with tempfile.NamedTemporaryFile(suffix=".ini") as settings:  # Horovod's settings and ours do not apply
        pytest = ["-m", "pytest", "-q", "-p", "tests.horovod_plugin", "-p", "no:cacheprovider", "-c", settings.name]
        command = [*launcher, sys.executable, *pytest, "--disable-warnings", str(file), *arguments]
        return processes.run(command, environment(), timeout)


def parallel(source: Path, backend: str, *arguments: str, workers: int = 2) -> int:
    """Horovod's tests of several workers; how many passed, which must be the same number on each."""
    return passed(run_tests(source / PARALLEL, processes.launch(workers, backend), *arguments), workers)


def single(source: Path, *arguments: str) -> int:
    """Horovod's tests of one worker."""
    return passed(run_tests(source / SINGLE, [], *arguments), 1)


def passed(output: str, workers: int) -> int:
    """The number of tests that passed on each of ``workers``."""
    numbers = re.findall(r"(\d+) passed", output)
    if len(numbers) != workers or len(set(numbers)) != 1 or re.search(r"\d+ (failed|error)", output):
        raise RuntimeError(f"expected the same number of passed tests from {workers} workers\n{output[-6000:]}")
    return int(numbers[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Other options are pytest's.")
    parser.add_argument("--source", type=Path, help=f"a checkout of Horovod {HOROVOD}, default: {CHECKOUT}")
    parser.add_argument("--backends", nargs="+", default=["gloo", "mpi"], choices=["gloo", "mpi"])
    parser.add_argument("--processes", type=int, default=2)
    args, others = parser.parse_known_args()
    source = (args.source or fetch()).absolute()
    for backend in args.backends:
        number = parallel(source, backend, *others, workers=args.processes)
        print(f"{PARALLEL}, {args.processes} processes, {backend}: {number} passed")
    print(f"{SINGLE}: {single(source, *others)} passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

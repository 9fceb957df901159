"""What happens to folders in which checkpoints are saved: full disks, and jobs of others."""

import contextlib
import errno
import os
import subprocess
import sys

import numpy as np

from horovod_onebit import simulation
from horovod_onebit.checkpoint import save_checkpoint
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam

OTHER_JOB = """
import sys
from pathlib import Path
from horovod_onebit.checkpoints import files, lock
class Optimizer: pass
place, optimizer = Path(sys.argv[1]), Optimizer()
lock.acquire(place, optimizer, "")
files.complete(place, "0123456789abcdef", 1, 77, {})
print("saves", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def another_job(folder):
    """A process that has saved a checkpoint in ``folder`` and still runs; it is killed at the end."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", OTHER_JOB, str(folder)], **pipes)
    try:
        assert process.stdout.readline() == b"saves\n"
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def small_disk(folder, kilobytes):
    """``folder`` is a disk of its own; whether it is, which takes root."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    """Write a file that leaves no space; returns it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return filler


def no_space(monkeypatch):
    """Let this process find the disk full."""

    def fsync(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


def checkpoint_of_numpy(folder):
    """Save one of two workers with a ``NumpyOptimizer``, before any step."""

    def save(collectives):
        weights = {"w": np.zeros(8, np.float32)}
        save_checkpoint(folder, NumpyOptimizer(weights, Adam(lr=1e-3), collectives=collectives))

    simulation.run(save, 2)


OF_NUMPY = r"of step 0 is of NumPy, expected one of .*: load it with horovod_onebit\.checkpoint, or .*shared\.npz"

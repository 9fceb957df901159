"""Train for a long time while workers are killed, stopped for a while, given NaN, added, removed and restarted.

    python -m tests.faults.soak --minutes 30

A fault is survived if training goes on within the limit, from no more steps back than were not saved yet. Replicas are
compared by checksum in every step; a difference ends the job. Ends with status 1 if any fault is not survived.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from tests.faults.elastic_jobs import HOSTS, Job

COMMIT, SAVE, ENOUGH = 5, 50, 30  # steps between commits and checkpoints, and that show that training goes on
FOREVER = 10**9
PATIENCE, PAUSE = 40, 5  # seconds that Horovod has for a host to come back, and that it needs to look at the hosts


class Soak:
    """One job after the other in ``folder``, and what was done to them."""

    script = "elastic_torch.py"

    def __init__(self, folder: Path, exchange: str, rng: random.Random) -> None:
        self.folder, self.exchange, self.rng = folder, exchange, rng
        (folder / "checkpoints").touch()
        self.injected: Counter[str] = Counter()
        self.survived = self.steps = self.asked_again = 0
        self.job = self.start()

    def start(self) -> Job:
        """On all hosts; a host whose worker has died may be used again after some seconds."""
        options = ("--blacklist-cooldown-range", "2", "4")
        return Job(self.folder, self.script, HOSTS, FOREVER, self.exchange, limit=180, options=options)

    def begin(self) -> None:
        """Wait for the first steps; raises ``AssertionError`` as soon as a worker fails before them.

        Horovod starts such workers again and again, so that the job itself goes on for a long time.
        """

        def begun() -> bool:
            step = self.job.state()[0]
            if not step and "Traceback (most recent call last)" in (said := self.job.said()):
                raise AssertionError(f"the first run does not start\n{said[-6000:]}")
            return step > ENOUGH

        self.job.wait(begun, "first steps")

    def gather(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for workers; where Horovod forgets a host whose worker has died, tell it of the hosts once more.

        Training goes on meanwhile, without that host.
        """
        asked = time.monotonic()

        def gathered() -> bool:
            nonlocal asked
            if not condition() and time.monotonic() - asked > PATIENCE:
                self.asked_again += 1
                self.job.give(sorted(self.job.workers()))
                time.sleep(PAUSE)
                self.job.give(HOSTS)
                asked = time.monotonic()
            return condition()

        self.job.wait(gathered, what)

    def kill(self) -> None:
        """One worker; another must be left."""
        self.gather(lambda: len(self.job.workers()) > 1, "second worker to be left after a kill")
        self.job.kill(self.rng.choice(sorted(self.job.workers())))

    def delay(self) -> None:
        """One worker does nothing for a while."""
        host = self.rng.choice(sorted(self.job.workers()))
        self.job.signal(host, signal.SIGSTOP)
        time.sleep(self.rng.uniform(1, 5))
        self.job.signal(host, signal.SIGCONT)

    def nan(self) -> None:
        """One gradient of one worker, once."""
        host = self.rng.choice(sorted(self.job.workers()))
        (self.folder / f"{host}.nan").touch()

    def resize(self) -> None:
        """Other hosts, in any number; one of those before must be left, or Horovod gives up: nobody knows the state."""
        self.gather(lambda: self.job.state()[1] == len(HOSTS), "world of all hosts before a resize")
        self.job.give(self.rng.sample(HOSTS, self.rng.randint(1, len(HOSTS))))

    def restart(self) -> None:
        """All processes die; a new job goes on from the last checkpoint."""
        self.job.end()
        self.job = self.start()

    def inject(self, fault: str) -> None:
        """Do it, and wait until training goes on; raises ``AssertionError`` if it does not."""
        before = self.job.state()[0]
        (self.folder / "step").unlink(missing_ok=True)
        getattr(self, fault)()
        self.injected[fault] += 1
        self.job.wait(lambda: self.job.state()[0] > 0, f"step after {fault}")
        first = self.job.state()[0]
        back = SAVE if fault == "restart" else COMMIT
        if first < before - back - 1:
            raise AssertionError(f"after {fault}: step {first}, and {before} before, so that more than {back} are lost")
        self.job.wait(lambda: self.job.state()[0] > first + ENOUGH, f"progress after {fault}")
        loss = self.job.state()[2]
        if not math.isfinite(loss) or loss > 30:
            raise AssertionError(f"after {fault}: loss {loss}")
        self.steps += self.job.state()[0] - before
        self.survived += 1
        if fault != "restart":
            self.job.give(HOSTS)


def run(minutes: float, seed: int, console: Console) -> dict[str, Any]:
    rng, folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="soak"))
    faults = ["kill", "delay", "nan", "resize", "restart"]
    end, error = time.monotonic() + 60 * minutes, ""
    soak = Soak(folder, rng.choice(["direct", "two_stage"]), rng)
    try:
        soak.begin()
        with Progress(console=console) as progress:
            task = progress.add_task("soak", total=60 * minutes)
            while (left := end - time.monotonic()) > 0:
                progress.update(task, completed=60 * minutes - left)
                soak.inject(rng.choice(faults))
        if not soak.survived:
            error = "the time was over before the first fault"
    except AssertionError as caught:
        error = str(caught)
    finally:
        soak.job.end()
    log = (folder / "log").read_text() if (folder / "log").exists() else ""
    found = {
        "minutes": minutes, "exchange": soak.exchange, "injected": dict(soak.injected),
        "survived": soak.survived, "NaN given": log.count("gives NaN"),
        "worlds": log.count("trains from"), "resumed": log.count("resumes"), "hosts given again": soak.asked_again,
        "steps compared": soak.steps,
        "loss": soak.job.state()[2], "error": error,
    }  # fmt: skip
    if not error:
        shutil.rmtree(folder)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report to this file, too")
    options, console = parser.parse_args(), Console()
    if not 0 < options.minutes < math.inf:
        parser.error(f"--minutes {options.minutes}: expected a positive number")
    found = run(options.minutes, options.seed, console)
    table = Table("", "", title="Soak")
    for name, value in found.items():
        table.add_row(name, Text(str(value)))
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["error"]))


if __name__ == "__main__":
    raise SystemExit(main())

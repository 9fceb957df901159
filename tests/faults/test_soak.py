"""The soak itself: it says at once that nothing runs, and not after half an hour."""

import subprocess
import sys
import time

import pytest
from rich.console import Console

from jobs.processes import ROOT
from tests.faults import soak

pytestmark = pytest.mark.horovodrun


def test_a_first_run_that_does_not_start(monkeypatch, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise RuntimeError('no training today')")
    monkeypatch.setattr(soak.Soak, "script", str(script))
    start = time.monotonic()
    found = soak.run(minutes=30, seed=0, console=Console(quiet=True))
    assert "no training today" in found["error"]
    assert (found["injected"], found["survived"]) == ({}, 0)
    assert time.monotonic() - start < 90


@pytest.mark.parametrize("minutes", ["nan", "0", "-3", "inf"])
def test_a_time_that_is_none(minutes):
    command = [sys.executable, "-m", "tests.faults.soak", "--minutes", minutes]
    job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert job.returncode == 2
    assert "expected a positive number" in job.stderr

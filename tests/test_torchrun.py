"""Real torchrun jobs: a part of the tests of tests/ranks on every rank, without Horovod."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_training
from jobs.demo import parse
from jobs.processes import ROOT, result, run
from tests.long import LONG
from tests.test_horovodrun import demo, horovodrun

TORCHRUN = Path(sys.executable).with_name("torchrun")
ALWAYS = ("_distributed", "_overlap")
MORE = (
    "", "_agreement", "_faults", "_warmup", "_checkpoint", "_state", "_local", "_algorithms", "_parameters", "_edits",
)  # fmt: skip

pytestmark = pytest.mark.horovodrun


def torchrun(processes, *command, timeout=1800, **variables):
    """Run a job and return its output; fails with the end of it if the job does, or does not end in time."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT)} | variables
    launcher = [str(TORCHRUN), "--standalone", "--nproc-per-node", str(processes)]
    return run([*launcher, *map(str, command)], env, timeout)


def pytest_on_ranks(processes, names, *arguments, **variables):
    options = ["-q", "-x", "-p", "no:cacheprovider", "--disable-warnings", "--color=no"]
    files = [f"tests/ranks/test_torch{name}.py" for name in names]
    output = torchrun(processes, "-m", "pytest", *options, *files, *arguments, **variables)
    assert len(re.findall(r"\d+ passed", output)) == processes, output[-3000:]


def test_on_two_ranks():
    pytest_on_ranks(2, ALWAYS)


@LONG
def test_more_on_two_ranks():
    pytest_on_ranks(2, MORE, ONEBIT_CASES="2")


@LONG
def test_hosts_of_two_ranks():
    pytest_on_ranks(4, ["_distributed"], "-k", "hosts or outside")


def test_the_same_bits_as_over_horovod(tmp_path):
    """Weights, the optimizers' state and all residuals after 20 steps; a sum of two does not depend on its order."""
    torchrun(2, "tests/ranks/digests.py", tmp_path / "torch.json")
    horovodrun(2, "mpi", "tests/ranks/digests.py", tmp_path / "horovod.json")
    over_torch, over_horovod = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("torch", "horovod"))
    assert len(over_torch) > 30
    assert over_torch == over_horovod


@LONG
def test_another_number_of_workers_goes_on_from_a_checkpoint(tmp_path):
    for processes in (2, 3):
        output = torchrun(processes, "tests/ranks/resize.py", tmp_path, "two_stage")
        assert output.count("went on") == processes
    assert "redistributed" in output


@LONG
def test_a_checkpoint_goes_from_one_transport_to_the_other(tmp_path):
    horovodrun(2, "mpi", "tests/ranks/resize.py", tmp_path, "direct")
    assert torchrun(2, "tests/ranks/resize.py", tmp_path, "direct").count("went on") == 2


RESTARTS = re.compile(r"trained from step (\d+): (\w+), without a break: (\w+)")


def test_workers_that_torchrun_restarts_continue_bit_for_bit(tmp_path):
    # Otherwise torchrun's attempts share a store, and workers may find addresses there of those that are gone.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    output = torchrun(2, "--max-restarts", "1", "tests/ranks/restarts.py", tmp_path, "10", **own_store)
    assert "exitcode: -9" in output
    ((first, found, undisturbed),) = RESTARTS.findall(output)
    assert first == "8"
    assert found == undisturbed


@LONG
def test_another_number_of_workers_continues_after_a_worker_was_killed(tmp_path):
    with pytest.raises(RuntimeError, match="exitcode: -9"):
        torchrun(2, "tests/ranks/restarts.py", tmp_path, "10")
    output = torchrun(3, "tests/ranks/restarts.py", tmp_path)
    assert [first for first, _, _ in RESTARTS.findall(output)] == ["8"]
    assert "redistributed" in output


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def apart(*what):
    """What two workers print that no launcher ends."""
    port = str(free_port())
    of_torchrun = {"TORCHELASTIC_RUN_ID": "alone", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **of_torchrun}
    command = [sys.executable, "tests/ranks/alone.py", *what]
    jobs = [
        subprocess.Popen(command, cwd=ROOT, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        return [job.communicate(timeout=120)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()


MISSING = ["dies", "dies_in_backward"]
MORE_MISSING = [pytest.param(what, marks=LONG) for what in ("dies_in_backward_in_warmup", "sleeps")]


@pytest.mark.parametrize("what", [*MISSING, *MORE_MISSING])
def test_a_worker_that_is_missing_is_an_error_that_names_the_call(what):
    first, _ = apart(what)
    assert first.startswith("TransportError after")
    assert "onebit.0.agreement: " in first
    assert "start it again from a checkpoint" in first


def test_workers_that_disagree_have_the_same_error():
    what = ["learning_rate", "flushes", "learning_rate_in_warmup"]
    first, second = (re.sub(r" after \d+ s", "", found).splitlines() for found in apart(*what))
    assert [line.partition(": ")[0] for line in first] == ["DesyncError"] * len(what)
    assert first == second


@LONG
def test_a_short_demo_imports_no_horovod(tmp_path, monkeypatch):
    """From its first words to its picture, over a link where the machine allows it."""
    output, stub = tmp_path / "output", tmp_path / "horovod.py"
    stub.write_text("raise RuntimeError('Horovod is imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = demo(output, "--launcher", "torchrun", "--steps", "24", "--warmup-steps", "4", "--width", "64")
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert said.index("float32: step 24 of 24") < said.index("one bit: step 24 of 24") < said.index("Next:")
    assert sorted(file.name for file in output.iterdir()) == [
        "torch-mlp-none-0.jsonl", "torch-mlp-onebit-0.jsonl", "torch-mlp.png",
    ]  # fmt: skip


def test_the_training_that_is_measured_on_a_gpu_runs_on_a_cpu():
    found = gpu_training.train("torchrun", 1, "cpu", steps=3, width=16)
    assert len(found["losses"]) == 3
    assert found["last"]["parameters"] > 0
    assert found["replicas equal"]


LARGE = """
import json, sys
import numpy as np
import torch.distributed as dist
sys.path.insert(0, {root!r})
from jobs.data import Task
from studies import large, large_worker

large.STEPS, large.LOOK, large.RISE, large.ROWS = 64, 32, 10, 8
large.WIDTH, large.LAYERS, large.HEADS, large.LENGTH = 16, 1, 2, 8
x, y = ((np.arange(512) + at).reshape(64, 8) % 50 for at in (0, 1))
large.data = lambda: Task(x, y, x, y, 50)
dist.init_process_group("gloo")
found = {{name: large_worker.train(large.WAYS[name], 0, "cpu") for name in ("exact", "onebit", "local", "diloco 16")}}
if dist.get_rank() == 0:
    print("RESULT", json.dumps(found))
dist.destroy_process_group()
"""


def test_the_large_study_trains_each_kind_of_way(tmp_path):
    script = tmp_path / "large.py"
    script.write_text(LARGE.format(root=str(ROOT)))
    found = result(torchrun(2, script))
    for name, one in found.items():
        # Exact Adam is one process's, so that two workers differ there.
        assert one["replicas equal"] == (name != "exact"), name
        assert one["loss"] == one["losses"][-1] < one["losses"][0]
    assert len(found["onebit"]["sent"]) == 2


def test_a_demo_in_keras_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(["--launcher", "torchrun", "--framework", "tf", "--output", str(tmp_path)])
    assert "Keras needs Horovod" in capsys.readouterr().err


def test_the_environment_of_the_demo_has_the_versions_that_the_tests_run_with():
    pins = [set(re.findall(r"^\S+==\S+", (ROOT / "requirements" / f"{name}.txt").read_text(), re.MULTILINE))
            for name in ("torchrun", "dev")]  # fmt: skip
    assert pins[0] <= pins[1]


def test_the_link_tool_measures_this_job():
    output = torchrun(2, "--no-python", Path(sys.executable).with_name("horovod-onebit"), "link", "--parameters", "25M")
    assert "2 workers on one host" in output
    assert "no link between hosts to measure" in output

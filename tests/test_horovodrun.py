"""Real horovodrun jobs: the tests of tests/ranks on every rank, and the training job."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jobs.processes import ROOT, environment, launch, run
from tests.long import FEW, LONG

PLAIN = "mpirun"  # itself, as Open MPI binds processes to cores, and not by horovodrun, which binds none

# More processes than cores: they wait without turning, and for each other longer than Gloo's 30 seconds.
CROWDED = {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "120"}

pytestmark = pytest.mark.horovodrun


def horovodrun(processes, backend, *command, timeout=1800, **variables):
    """Run a job and return its output; fails with the end of it if the job does, or does not end in time."""
    env = environment(TF_CPP_MIN_LOG_LEVEL="3", **CROWDED)
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # of which horovodrun sees to itself
    env |= {"PYTEST_ADDOPTS": ""} | variables  # what the caller's pytest selects is not for those on the ranks
    start = ["mpirun", "-np", str(processes)] if backend == PLAIN else launch(processes, backend)
    return run([*start, sys.executable, *map(str, command)], env, timeout)


# The last one leaves collectives behind that some worker never starts, which hvd.join(), in the second one, would
# stumble over; Horovod crashes there, too, when it has seen many names of collectives before.
FACE = (
    "", "_faults", "_overlap", "_clients", "_checkpoint", "_state", "_parameters", "_algorithms", "_local",
    "_warmup", "_rest", "_bad_input", "_monitor", "_edits", "_agreement",
)  # fmt: skip
TORCH = ["tests/ranks/test_process_sets.py", *(f"tests/ranks/test_torch{name}.py" for name in FACE)]
OF_KERAS = (
    "", "_overlap", "_zero_one", "_local", "_state", "_warmup", "_faults", "_checkpoint", "_clients", "_meeting",
    "_edits", "_rest",
)  # fmt: skip
KERAS = [f"tests/ranks/test_keras{name}.py" for name in OF_KERAS]
HIERARCHY, OVERLAP = ["tests/ranks/test_keras_hierarchy.py"], ["tests/ranks/test_keras_overlap.py"]
# All run over the backend that is faster where processes share cores, and over the other one test of each kind.
OF_TWO = (
    "(for_300_steps and (arguments1 or arguments6)) or every_recipe or that_disagree or nan_on_one or nan_that_was_sent"
    " or idiom or (zero_one_adam and robust) or then_clip or (any_optimizer and RMSprop)"
)
OF_FOUR = (
    "(for_300_steps and arguments1) or (every_recipe and paper) or nan_on_one or nan_that_was_sent or sets"
    " or a_rank_out or (makes_alone and compressed) or idiom or (goes_on_bit and AdamW and 5)"
    " or (continues_bit and AdamW) or (any_optimizer and AdamW) or round_with_damaged"
)
NONE_OF_FOUR = "_clients", "_parameters", "_algorithms", "_bad_input", "_monitor", "_edits"
"""Files of which ``OF_FOUR`` selects nothing."""
OF_FOUR_FILES = [file for file in TORCH if not file.removesuffix(".py").endswith(NONE_OF_FOUR)]
# As under `mpirun`, which binds each process to a core, or `srun -c 1`: TensorFlow has one thread for its operations.
ONE_THREAD = {"TF_NUM_INTEROP_THREADS": "1", "ONEBIT_ONE_CORE": "1"}
REPEATABLE = {"HOROVOD_FUSION_THRESHOLD": "0"}  # without it, sums of more than two depend on timing
TWO_GLOO_KERAS = "disagree or (300 and adamw) or in_one_function or first_batch or several_steps or nan_in_warm"
JOBS = [
    (2, PLAIN, KERAS, ""),
    (2, "mpi", TORCH, ""),
    pytest.param(2, "gloo", TORCH, OF_TWO, marks=LONG),
    (4, "mpi", OF_FOUR_FILES, OF_FOUR),
    pytest.param(4, "gloo", TORCH, "nan_on_one or sets or (resumed and AdamW and robust and 10)", marks=LONG),
    (4, "mpi", [*HIERARCHY, *OVERLAP], "(neighbours and not first_batch) or before_the_backward"),  # needs two threads
    pytest.param(2, "gloo", KERAS, TWO_GLOO_KERAS, marks=LONG),
]


def pytest_on_ranks(processes, backend, *arguments, **variables):
    options = ["-q", "-x", "-p", "no:cacheprovider", "--disable-warnings", "--color=no"]
    output = horovodrun(processes, backend, "-m", "pytest", *options, *arguments, **variables)
    # Open MPI's prefixes carry colours along.
    assert len(re.findall(r"\d+ passed", output)) == processes, output[-3000:]


@pytest.mark.parametrize(("processes", "backend", "files", "only"), JOBS)
def test_on_every_rank(processes, backend, files, only):
    selected = ["-k", only] if only else []
    variables = {**(ONE_THREAD if files == KERAS else {}), **(REPEATABLE if processes > 2 else {})}
    pytest_on_ranks(processes, backend, *files, *selected, **variables)


@pytest.mark.parametrize("face", ["torch", pytest.param("keras", marks=LONG)])
def test_the_compiled_cuda_kernels(face, tmp_path):
    pytest.importorskip("numba_cuda", reason="the CUDA kernels need numba-cuda: pip install numba-cuda[cu13]")
    from tests.cuda.compile import driven

    driver, simulator = driven(tmp_path), {"NUMBA_ENABLE_CUDASIM": "1", "ONEBIT_PTX": str(tmp_path)}
    variables, files = {"torch": simulator, "keras": driver}[face], [f"tests/ranks/test_{face}_cuda.py"]
    pytest_on_ranks(2, "mpi", *files, **variables)
    if not FEW:
        pytest_on_ranks(4, "mpi", *files, "-k", "of_a_host", **variables)


@LONG
@pytest.mark.parametrize(
    ("kind", "exchange"), [("adamw", "direct"), ("plain sgd", "two_stage"), ("lamb", "direct"), ("lion", "two_stage")]
)
def test_nothing_is_compiled_after_the_first_step_of_keras(kind, exchange, tmp_path):
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    output = horovodrun(2, "mpi", "tests/ranks/compiles.py", kind, exchange, **cache)
    found = re.findall(r"compiled: (\d+) (\w+)", output)
    assert sum(int(count) for count, phase in found if phase == "warmup") > 100
    assert [count for count, phase in found if phase == "compressed"] == ["0", "0"]


def test_a_communicator_of_mpi4py():
    assert horovodrun(4, "mpi", "tests/ranks/communicator.py").count("agrees") == 4


@pytest.mark.parametrize("program", ["resize.py", pytest.param("resize_keras.py", marks=LONG)])
def test_another_number_of_workers_goes_on_from_a_checkpoint(program, tmp_path):
    for processes in (2, 3):
        arguments = [f"tests/ranks/{program}", tmp_path, "two_stage"]
        output = horovodrun(processes, "mpi", *arguments)
        assert output.count("went on") == processes
    assert "redistributed" in output


@pytest.fixture(scope="module")
def uncompressed(tmp_path_factory):
    """What a framework's job reaches without compression, run once."""
    return cache(lambda framework: trained(framework, "gloo", "none", tmp_path_factory.mktemp(framework)))


def trained(framework, backend, compression, folder):
    """The last line of a job's metrics; its replicas are equal bit by bit."""
    metrics, saved = folder / f"{compression}.jsonl", str(folder / f"{compression}-{{rank}}.npz")
    horovodrun(
        2, backend, f"{framework}/train.py", "--task", "digits", "--compression", compression, "--steps", 320,
        "--warmup-steps", 20, "--metrics", metrics, "--save-weights", saved,
    )  # fmt: skip
    ranks = [np.load(saved.format(rank=rank)) for rank in range(2)]
    assert ranks[0].files
    assert all(np.array_equal(ranks[0][name], ranks[1][name]) for name in ranks[0].files)
    return json.loads(metrics.read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("framework", "backend"),
    [("torch", "gloo"), pytest.param("torch", "mpi", marks=LONG), ("tf", "gloo")],
)
def test_the_job_reaches_the_same_accuracy_with_one_bit(framework, backend, uncompressed, tmp_path):
    """Replicas equal bit by bit, accuracy within a point, few bytes; seeds are averaged by `python -m jobs.demo`."""
    none, onebit = uncompressed(framework), trained(framework, backend, "onebit", tmp_path)
    assert none["accuracy"] > 0.96
    assert onebit["accuracy"] >= none["accuracy"] - 0.01
    small = 4 * (onebit["parameters"] - onebit["compressed_parameters"])
    assert onebit["last_step_bytes"] <= 1.1 * onebit["compressed_parameters"] / 8 + small


def demo(output, *options):
    """The demo as a process; a child of a shell in the background would not hear SIGINT."""
    command = [sys.executable, "-m", "jobs.demo", "--output", str(output), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    hears = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | CROWDED, **pipes, **hears)


def test_a_short_demo_from_its_first_words_to_its_picture(tmp_path):
    """Over a link where the machine allows it, else with predictions."""
    process = demo(tmp_path, "--steps", "24", "--warmup-steps", "4", "--width", "64")
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert said.startswith("This trains the network")
    assert said.index("float32: step 24 of 24") < said.index("one bit: step 24 of 24") < said.index("Next:")
    assert "The network interface of a process counted" in said or "Predicted seconds" in said
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "torch-mlp-none-0.jsonl", "torch-mlp-onebit-0.jsonl", "torch-mlp.png",
    ]  # fmt: skip


def of(folder):
    """The processes whose command names ``folder``."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = command.read_bytes().decode(errors="replace")
            if str(folder) in words:
                found.append(words)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("link", "end"),
    [("auto", "SIGINT"), *(pytest.param(*ended, marks=LONG) for ended in (("none", "SIGTERM"), ("auto", "SIGKILL")))],
)
def test_a_demo_that_is_ended_leaves_no_process_behind(link, end, tmp_path):
    process = demo(tmp_path, "--link", link)
    deadline = time.monotonic() + 120
    while not any(
        "train.py" in words and "horovodrun" not in words and "jobs.link" not in words for words in of(tmp_path)
    ):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(getattr(signal, end))
    process.communicate(timeout=120)
    assert process.returncode != 0
    while of(tmp_path):
        assert time.monotonic() < deadline + 120, of(tmp_path)
        time.sleep(0.1)
    if end != "SIGKILL":
        assert list(tmp_path.iterdir()) == []


def test_bad_options_end_the_job_on_every_rank():
    command = [*launch(2, "gloo"), sys.executable, "torch/train.py", "--recipe", "fast"]
    job = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert job.returncode != 0
    assert "expected one of 'robust', 'paper', 'fixed'" in job.stdout + job.stderr

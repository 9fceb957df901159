"""The doctor: this environment is well, and ill ones are told what to do."""

import importlib.util
import json
import subprocess
import sys

import pytest

from horovod_onebit import kernels
from horovod_onebit.tools import doctor
from horovod_onebit.tools.cli import main

HERE = {"python": "3.11.7", "numpy": "2.4", "numba": "0.68", "horovod": "0.28.1", "torch": "2.13"}


def levels(found, answer, gpus=0, fault=""):
    _, findings = doctor.examine(found, lambda what: {"gpus": gpus, "fault": fault} if what == "gpus" else answer)
    return [(finding.level, finding.what) for finding in findings[1:]]


def test_a_job_can_run_here(capsys):
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"horovod", "torch", "tensorflow", "keras"} <= answer["versions"].keys()
    whats = [finding["what"] for finding in answer["findings"]]
    assert sum("Horovod works with" in what for what in whats) == 2
    assert any("does not synchronise under Keras 3" in what for what in whats)


@pytest.mark.parametrize(
    ("found", "answer", "expected"),
    [
        ({"python": "3.11.7", "numpy": "2.4"}, {}, "Horovod is not installed"),
        ({"python": "3.11.7", "horovod": "0.28.1"}, {}, "neither PyTorch nor TensorFlow"),
        (HERE, "ImportError: no extension", "does not work with torch: ImportError"),
        (HERE, {"built": ["nccl"]}, "neither Gloo nor MPI"),
    ],
)
def test_what_keeps_a_job_from_running_is_an_error(found, answer, expected):
    assert any(level == "error" and expected in what for level, what in levels(found, answer))


@pytest.mark.parametrize("works", ["torch", "tensorflow"])
def test_a_horovod_for_one_framework_runs_its_jobs(works, monkeypatch):
    answers = {"gpus": {"gpus": 0}, works: {"built": ["gloo"]}}
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    _, findings = doctor.examine(HERE | {"tensorflow": "2.21"}, lambda what: answers.get(what, "ImportError: none"))
    assert any(finding.level == "note" and "does not work with" in finding.what for finding in findings)
    assert all(finding.level != "error" for finding in findings)


def test_the_cause_is_the_line_that_names_the_exception(monkeypatch):
    said = "Traceback ...\nImportError: Extension has not been built.\nIf this is not expected, reinstall."
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr("subprocess.run", lambda *args, **options: failed)
    assert doctor.probe("tensorflow") == "ImportError: Extension has not been built."


def test_pytorch_runs_without_horovod():
    for more, level in (({}, "ok"), ({"tensorflow": "2.21"}, "note")):
        _, findings = doctor.examine({"python": "3.11.7", "torch": "2.13.0", **more}, lambda what: {"gpus": 0})
        found = next(finding for finding in findings if "torch.distributed" in finding.what)
        assert found.level == level
        assert all(finding.level != "error" for finding in findings)


def test_numpy_runs_on_mpi_alone(monkeypatch):
    found = {"python": "3.11.7", "numpy": "2.4", "mpi4py": "4.1"}
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert levels(found, {}) == [
        ("ok", "NumPy's jobs run over MPI, by horovod_onebit.mpi and mpirun; neither Horovod nor PyTorch is installed")
    ]
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert ("note", "neither mpirun nor srun is on PATH") in levels(found, {})
    assert any(level == "error" for level, _ in levels(found | {"tensorflow": "2.21"}, {}))  # Keras needs Horovod


def test_a_host_that_does_not_know_its_own_name(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "no.such.host.invalid")
    told = levels(HERE, {"built": ["gloo"]})
    assert any(level == "error" and "no.such.host.invalid, cannot be resolved" in what for level, what in told)


def test_gpus_without_nccl_are_worth_a_note():
    told = levels(HERE | {"keras": "3.15"}, {"built": ["gloo", "cuda"]}, gpus=8)
    assert ("ok", "Horovod works with torch, built with gloo, cuda") in told
    assert any(level == "note" and "8 GPUs, and Horovod without NCCL" in what for level, what in told)
    without = levels(HERE, {"built": ["gloo"]}, gpus=8)
    assert ("note", "8 GPUs, and Horovod without CUDA: a tensor on a GPU is an error") in without
    assert not [what for level, what in told if level == "error" and "horovodrun" not in what]


@pytest.mark.parametrize("edited", [True, False])
def test_a_horovod_of_others_is_worth_a_note(edited, monkeypatch, tmp_path):
    (tmp_path / "common").mkdir()
    body = "\n    return True\n" if edited else "\n    return bool(_built)\n"
    (tmp_path / "common" / "util.py").write_text(f"def gloo_built(verbose=False):{body}")
    (tmp_path / "__init__.py").write_text("")
    assert doctor.patched()  # this environment's
    monkeypatch.setattr(doctor, "find_horovod", lambda: tmp_path)
    told = levels(HERE, {"built": ["gloo"]})
    assert edited != any(level == "note" and "when a worker dies" in what for level, what in told)


def test_kernels_that_do_not_work_are_worth_a_note(monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "numba_cuda" or there(name))
    without_horovod = {"python": "3.12.3", "torch": "2.13.0"}
    for found in (HERE, without_horovod):
        told = levels(found, {"built": ["gloo", "nccl"]}, gpus=8)
        assert ("ok", "the CUDA kernels work on the first of 8 GPUs") in told
        told = levels(found, {"built": ["gloo", "nccl"]}, gpus=8, fault="they failed: no row_stack")
        assert ("note", "they failed: no row_stack") in told


@pytest.mark.parametrize("without", [False, True])
def test_processes_that_compile_what_they_import_are_worth_a_note(monkeypatch, without):
    monkeypatch.setattr("sys.dont_write_bytecode", without)
    told = levels(HERE, {"built": ["gloo"]})
    assert without == any(level == "note" and "writes no bytecode" in what for level, what in told)


def test_a_numba_cuda_that_does_not_work_is_as_good_as_none(monkeypatch):
    """Without its libraries of CUDA, say: whatever it raises."""
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "numba_cuda" or there(name))
    monkeypatch.setitem(sys.modules, "horovod_onebit.kernels.toolchain", None)
    assert "numba-cuda does not work here, ModuleNotFoundError" in kernels.missing.__wrapped__()

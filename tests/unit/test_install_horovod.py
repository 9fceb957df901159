"""docker/install_horovod.py: where it finds NCCL. The build itself is what `make setup` and the images do."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker" / "install_horovod.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("install_horovod", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "install_horovod", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def packages(script, tmp_path, monkeypatch):
    """A site-packages with NCCL as PyTorch's wheels bring it."""
    library = tmp_path / "site-packages" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    header = library.parents[1] / "include" / "nccl.h"
    for path in (library, header):
        path.parent.mkdir(parents=True)
        path.write_text("")
    monkeypatch.setattr(script.sysconfig, "get_path", lambda name: str(tmp_path / "site-packages"))
    toolkit = tmp_path / "cuda" / "include" / "cuda_runtime.h"
    toolkit.parent.mkdir(parents=True)
    toolkit.write_text("")
    return library, header


def test_nccl_of_the_wheels_is_laid_out_as_horovod_looks_for_it(script, packages, tmp_path):
    library, header = packages
    env = {"PATH": os.environ["PATH"], "HOROVOD_CUDA_HOME": str(tmp_path / "cuda")}
    rpath = script.use_nccl(env, "/mpi")
    home = Path(env["HOROVOD_NCCL_HOME"])
    assert (home / "lib" / "libnccl.so").resolve() == library
    assert (home / "include" / "nccl.h").resolve() == header
    assert rpath == "/mpi:$ORIGIN/../../nvidia/nccl/lib"


def test_a_nccl_of_ones_own_is_left_alone(script, tmp_path):
    env = {"PATH": os.environ["PATH"], "HOROVOD_NCCL_HOME": "/opt/nccl"}
    assert script.use_nccl(env, "/mpi") == "/mpi"
    assert env["HOROVOD_NCCL_HOME"] == "/opt/nccl"


def test_what_is_missing_is_named(script, packages, tmp_path, monkeypatch):
    env = {"PATH": "", "HOROVOD_CUDA_HOME": str(tmp_path / "cuda")}
    packages[1].unlink()
    with pytest.raises(script.Failure, match="nvidia-nccl"):
        script.use_nccl(env, "")
    monkeypatch.setattr(script.Path, "exists", lambda path: False)
    with pytest.raises(script.Failure, match="nvcc"):
        script.find_cuda(env)


@pytest.mark.parametrize(
    ("gpu", "toolkit", "operations", "variables", "without"),
    [
        (False, True, None, {}, True),  # of a toolkit, PyTorch may find a part that is of no use
        (False, True, "NCCL", {}, False),
        (False, True, None, {"HOROVOD_GPU_OPERATIONS": "MPI"}, False),
        (True, True, None, {}, False),
        (True, False, None, {}, True),
    ],
)
def test_cuda_is_left_out_where_nothing_asks_for_it(
    gpu, toolkit, operations, variables, without, script, packages, tmp_path, monkeypatch, capsys
):
    env = {"PATH": "", **variables} | ({"HOROVOD_CUDA_HOME": str(tmp_path / "cuda")} if toolkit else {})
    there = script.Path.exists

    def exists(path):
        """Of this machine, nothing is there but what the test has made."""
        return gpu if str(path) == "/dev/nvidiactl" else path.is_relative_to(tmp_path) and there(path)

    monkeypatch.setattr(script.Path, "exists", exists)
    edits = script.edits_of(script.argparse.Namespace(gpu_operations=operations), env, {"torch": "2.13.0"})
    assert (script.WITHOUT_CUDA in edits) is without
    assert ("no CUDA toolkit" in capsys.readouterr().out) is (gpu and not toolkit)


@pytest.mark.parametrize(
    ("version", "standard"), [("2.13.0+cpu", 17), ("2.14.1", 20), ("2.15.0+cu132", 20), ("3.0.0a0", 20), (None, 17)]
)
def test_the_standard_of_cpp_is_that_of_pytorchs_headers(version, standard, script, tmp_path):
    args, versions = script.argparse.Namespace(gpu_operations="NCCL"), {"torch": version} if version else {}
    name = "horovod/torch/CMakeLists.txt"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("set(CMAKE_CXX_STANDARD 14)")
    edits = [edit for edit in script.edits_of(args, {"PATH": ""}, versions) if edit[0] == name]
    script.apply_edits(tmp_path, "", edits)
    assert (tmp_path / name).read_text() == f"set(CMAKE_CXX_STANDARD {standard})"

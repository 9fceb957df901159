"""A program that knows Horovod alone, run by ``python -m horovod_onebit.install``: what it imports is ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from horovod.torch import DistributedOptimizer
import horovod.torch.elastic as elastic
import helper
assert __name__ == "__main__" and elastic.TorchState.__module__ == "horovod_onebit.torch.elastic"
print(DistributedOptimizer.__wrapped__.__module__, sys.argv[1:])
"""


def run(*arguments, cwd):
    command = [sys.executable, "-m", "horovod_onebit.install", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("program", [["train.py"], ["-m", "train"]])
def test_names_and_arguments(program, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("")
    done = run("--warmup-steps", "5", *program, "--epochs", "3", "-m", cwd=tmp_path)
    assert done.stdout == "horovod_onebit.torch.optimizer ['--epochs', '3', '-m']\n", done.stderr


def test_a_program_finds_its_own_file_from_another_folder(tmp_path):
    (tmp_path / "train.py").write_text("import os; os.chdir('/'); print(open(__file__).read()[:9])")
    done = run("train.py", cwd=tmp_path)
    assert done.stdout == "import os\n", done.stderr


def test_a_program_that_fails_fails(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    assert run("train.py", cwd=tmp_path).returncode == 7
    missing = run("there_is_none.py", cwd=tmp_path)
    assert (missing.returncode, missing.stderr.splitlines()[-1].split(": ", 2)[2]) == (
        2,
        "there_is_none.py: there is no such file",
    )
    assert "the following arguments are required: program" in run(cwd=tmp_path).stderr

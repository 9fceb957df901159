"""The programs of examples/ run by the commands that their first lines give; those of trainers: ``tests.clients``."""

import ast
import json
import re
import shlex
import sys

import numpy as np
import pytest

from jobs.processes import ROOT, run
from tests.horovod_suite import environment
from tests.long import LONG

NOTEBOOK = ROOT / "examples" / "first_look.ipynb"
PROGRAMS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
OF_TRAINERS = {"with_accelerate.py", "with_lightning.py", "with_trainer.py"}
OF_RAY = {"ray_train.py"}
ALWAYS = {"keras_fit.py", "numpy_on_mpi.py", "pytorch_loop.py", "pytorch_torchrun.py"}

pytestmark = pytest.mark.horovodrun


def command_of(program):
    """That of the docstring."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / program).read_text()))
    return re.search(r"^ *((horovodrun|torchrun|mpirun) .*)", text, re.MULTILINE)[1]


@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=() if name in ALWAYS else LONG) for name in sorted(set(PROGRAMS) - OF_TRAINERS - OF_RAY)],
)
def test_a_program_runs_as_it_says(program, tmp_path):
    hosts = tmp_path / "discover.sh"
    hosts.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    hosts.chmod(0o755)
    words = shlex.split(command_of(program).replace("examples/", f"{ROOT}/examples/"))
    words = [str(hosts) if word == "./discover.sh" else word for word in words]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    output = run(words, environment() | as_root, 300, cwd=tmp_path)
    if program == "numpy_on_mpi.py":
        assert float(output.rsplit("mean square ", 1)[1].split()[0]) < 0.5
    else:
        assert "(compressed, 0 skipped)" in output or "400: 2 workers" in output


def test_the_notebook_runs_and_says_the_same():
    """Its numbers are those of simulated runs, which are the same on every machine of a kind."""
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    program = "\n".join("".join(cell["source"]) for cell in cells)
    said = run([sys.executable, "-c", program], environment() | {"MPLBACKEND": "agg"}, 300)
    kept = "".join("".join(out.get("text", "")) for cell in cells for out in cell["outputs"])
    losses = [[float(loss) for loss in re.findall(r"test loss ([\d.]+)", text)] for text in (said, kept)]
    assert len(losses[1]) == 3
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.1)
    assert said.count("equal: True") == kept.count("equal: True") == 4
    same = r"1-bit \w+: 1-bit .*|[\d.]+ MB sent|In the warm-up.*"
    assert len(re.findall(same, kept)) == 7
    assert re.findall(same, said) == re.findall(same, kept)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_short_enough_to_be_read(program):
    assert len((ROOT / "examples" / program).read_text().splitlines()) < 80
    assert program in (ROOT / "examples" / "README.md").read_text()
    if program not in OF_RAY:
        assert f"examples/{program}" in command_of(program)

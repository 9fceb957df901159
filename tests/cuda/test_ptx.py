"""The CUDA kernels as machine code for every GPU that the installed toolkit knows; no GPU is needed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA kernels need numba-cuda: pip install numba-cuda[cu12]")

from numba import config, cuda, types

if config.ENABLE_CUDASIM:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from numba.cuda import dispatcher

from horovod_onebit.kernels.cuda.launch import MAX_THREADS
from horovod_onebit.kernels.cuda.programs import COLUMNS, PROGRAMS

CAPABILITIES = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
REGISTERS_OF_A_BLOCK = 65536
ALONE = {"NUMBA_ENABLE_CUDASIM": "1", "PYTEST_ADDOPTS": ""}  # what the caller's pytest selects is not for this one


def assembler():
    """ptxas, of the package nvidia-cuda-nvcc or of the system; None if there is none."""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or [] if found else []:
        for path in sorted(Path(folder).glob("*/bin/ptxas")):
            return str(path)
    return None


def translate(program, capability, monkeypatch):
    # Numba asks the driver which GPU a device function is for.
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=capability))
    try:
        return cuda.compile_ptx(PROGRAMS[program], (types.int64, types.int64), cc=capability)[0]
    except Exception as error:  # of a kind that depends on the toolkit
        if "arch" in str(error).lower() or "compute" in str(error).lower():
            pytest.skip(f"this toolkit does not know {capability}: {error}")
        raise


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_machine_code_has_no_spills_and_rounds_every_operation(program, capability, tmp_path, monkeypatch):
    ptx = translate(program, capability, monkeypatch)
    assert not re.search(r"fma\.rn\.f32|\.approx|\.ftz|\.local", ptx)
    assert "ld.global.v4.f32" in ptx or program == "decode"
    assert "st.global.v4.f32" in ptx or program == "squares"
    assert ("shfl.sync" in ptx) == (program in ("encode", "recode", "squares"))
    tool = assembler()
    if tool is None:
        pytest.skip("no ptxas here: its package is nvidia-cuda-nvcc-cu12")
    source, target = tmp_path / "kernel.ptx", f"sm_{capability[0]}{capability[1]}"
    source.write_text(ptx)
    command = [tool, "-v", f"--gpu-name={target}", str(source), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    assert registers * MAX_THREADS <= REGISTERS_OF_A_BLOCK


def test_the_kernels_agree_with_the_reference_in_the_simulator():
    """All of test_kernels.py, in a process of its own: Numba decides at its import whether to simulate."""
    tests = Path(__file__).with_name("test_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, env=os.environ | ALONE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d{2} passed", done.stdout)
    assert "skipped" not in done.stdout
    assert COLUMNS == 32  # a row is two cache lines

"""The CUDA kernels as machine code for every GPU that the installed toolkit knows; no GPU is needed."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA kernels need numba-cuda: pip install numba-cuda[cu13]")

from numba import config

if config.ENABLE_CUDASIM:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from horovod_onebit.kernels.cuda import MAX_THREADS
from horovod_onebit.rules.lamb import take_over_momentum
from tests.cuda.compile import driven, programs, ptx

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
REGISTERS_OF_A_BLOCK = 65536
PROGRAMS = {program.name: program for program in programs()}
ONE_A_LOOP = {program.loop: program for program in PROGRAMS.values()}.values()


def alike(capability):
    """Another for which the compiler makes the same of a kernel; from 10.0 on it is a different one."""
    return min(max(capability, (9, 0)), (10, 0))


CASES = [(program, capability) for program in PROGRAMS.values() for capability in CAPABILITIES
         if capability == (9, 0) or program in ONE_A_LOOP]  # fmt: skip
"""Every program for one capability, and one program of each loop for all."""
OLD = [capability for capability in CAPABILITIES if alike(capability) == (9, 0)]
COMPILED = [(program, capability) for program in PROGRAMS.values() for capability in OLD
            if capability == OLD[0] or program == next(iter(ONE_A_LOOP))]  # fmt: skip


def assembler():
    """ptxas, of the package nvidia-cuda-nvcc or of the system; None if there is none."""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or [] if found else []:
        for path in sorted(Path(folder).glob("*/bin/ptxas")):
            return str(path)
    return None


def translate(program, capability):
    try:
        return ptx(program, capability)
    except Exception as error:  # of a kind that depends on the toolkit
        if "arch" in str(error).lower() or "compute" in str(error).lower():
            pytest.skip(f"this toolkit does not know {capability}: {error}")
        raise


@pytest.mark.cases(24)
@pytest.mark.parametrize(("program", "capability"), CASES, ids=lambda case: getattr(case, "name", None) or str(case))
def test_machine_code_has_no_spills_and_rounds_every_operation(program, capability, tmp_path):
    code = translate(program, alike(capability))
    assert not re.search(r"fma\.rn\.f32|\.approx|\.ftz|\s\.local|(ld|st)\.local", code)
    assert "ld.global.v4.f32" in code or program.loop == "pick" or program.formula is take_over_momentum
    assert "st.global.v4.f32" in code or program.loop in ("sums", "pick")
    assert ("shfl.sync" in code) == (program.loop in ("encode", "sums"))
    tool = assembler()
    if tool is None:
        pytest.skip("no ptxas here: its package is nvidia-cuda-nvcc")
    source, target = tmp_path / "kernel.ptx", f"sm_{capability[0]}{capability[1]}"
    source.write_text(re.sub(r"^\.target sm_\w+", f".target {target}", code, flags=re.MULTILINE))
    command = [tool, "-v", f"--gpu-name={target}", str(source), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    assert registers * MAX_THREADS <= REGISTERS_OF_A_BLOCK


def kernel_tests(**environment):
    """All of test_kernels.py, in a process of its own: Numba decides at its import whether to simulate."""
    tests = Path(__file__).with_name("test_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    alone = {"PYTEST_ADDOPTS": ""}  # what the caller's pytest selects is not for this one
    done = subprocess.run(command, env=os.environ | alone | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.search(r"\d{2} passed", done.stdout)
    return done.stdout


def test_the_kernels_agree_with_the_reference_in_the_simulator():
    assert "skipped" not in kernel_tests(NUMBA_ENABLE_CUDASIM="1")


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler here, for the driver")
def test_the_compiled_kernels_agree_with_the_reference(tmp_path):
    """As on a GPU, with all that Numba does there; only that the driver is ours, and the kernels run on the CPU."""
    output = kernel_tests(**driven(tmp_path))
    assert "PerformanceWarning" not in output


def code_of(program, capability):
    """Its instructions: what differs in any case, the names of symbols and the target, is taken out."""
    lines = re.sub(r"_Z\w+", "symbol", translate(program, capability)).splitlines()
    return [line for line in lines if not line.lstrip().startswith(("//", ".version", ".target", ".common"))]


@pytest.mark.cases(6)
@pytest.mark.parametrize(("program", "capability"), COMPILED, ids=lambda case: getattr(case, "name", None) or str(case))
def test_older_gpus_run_the_same_instructions(program, capability):
    """What is shown of the code for one capability holds for them all."""
    assert code_of(program, capability) == code_of(program, alike(capability))


def test_a_warp_executes_few_instructions():
    """What bounds a kernel's speed besides memory; no timing, but counts, which are the same on every machine."""
    command = [sys.executable, "-m", "tests.cuda.instructions"]
    counts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    most = {"encode, update space": 345, "encode, momentum space": 225, "decode and Adam": 220, "LAMB's step": 120}
    assert {name: counts[name] for name in most if counts[name]["instructions"] > most[name]} == {}

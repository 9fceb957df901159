"""The cache of compiled kernels: a help, and never a hindrance."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import horovod_onebit
from horovod_onebit.kernels.compiling import cached

PROGRAM = """
import numpy as np
from horovod_onebit.codecs import GUARD, find
from horovod_onebit.kernels import cpu
from horovod_onebit.kernels.reference import Coding
rows = np.full((1, 12), 255, np.uint8)
rows.view(np.float32)[0, 0] = 1
coding, row = Coding(find("sign"), 64, GUARD), np.zeros(12, np.uint8)
cpu.recode(rows, 0, coding, np.zeros(64, np.float32), np.zeros(64, np.float32), row, 0, coding)
print(row.view(np.float32)[0])  # the scale of what was decoded
"""


SIMD = """
import re
import numpy as np
from horovod_onebit.codecs import GUARD, find
from horovod_onebit.kernels import cpu
from horovod_onebit.kernels.reference import Arrays, Coding
from horovod_onebit.rules import adam, lamb
sign = find("sign")
coding, array = Coding(sign, 64, GUARD), np.ones(64, np.float32)
rows, one = np.zeros((2, sign.size(64, 64)), np.uint8), np.float32(1)
full, layer = Arrays(array, array, array, array), Arrays(None, array, array, array)
adams, lambs = adam.Scalars(*[one] * 9), lamb.Step(*[one] * len(lamb.Step._fields))
cpu.encode(adam.update, adams, full, array.copy(), rows[0], 0, coding)
cpu.apply(adam.move_by_update, adams, layer, rows, 0, coding)
cpu.sums(lamb.lengths, lambs, layer, np.empty((1, 2)))
cpu.move(lamb.move, lambs, layer)
for template, codec, formula in (
    (cpu._encode, sign, adam.update),
    (cpu._apply, sign, adam.move_by_update),
    (cpu._sums, None, lamb.lengths),
    (cpu._move, None, lamb.move),
):
    (text,) = cpu._compiled(template, codec, formula).inspect_llvm().values()
    print(template.__name__, *sorted(set(re.findall(r"call[^@]*@llvm[.]sqrt[.]v([0-9]+)f32", text))))
"""


def run(home, program=PROGRAM, **variables):
    env = os.environ | {"HOME": str(home), "NUMBA_CACHE_DIR": str(home / "cache")} | variables
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_change_in_another_file_compiles_anew(tmp_path):
    """Numba alone would go on with what it has: it looks at the file of the function that is called."""
    shutil.copytree(Path(horovod_onebit.__file__).parent, tmp_path / "horovod_onebit")
    here = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    assert float(run(tmp_path, **here)) == 1
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbi")}
    assert kept
    for path in (tmp_path / "horovod_onebit").rglob("*.py"):
        os.utime(path)  # installed again: nothing has changed
    assert float(run(tmp_path, **here)) == 1
    assert kept == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbi")}
    file = tmp_path / "horovod_onebit" / "codecs" / "sign.py"
    text = file.read_text()
    file.write_text(text.replace("where(code != 0, -s, s)", "where(code != 0, 4 * s, s)"))
    assert file.read_text() != text
    assert float(run(tmp_path, **here)) == 4


DIES = """
from numba.core.caching import IndexDataCacheFile
IndexDataCacheFile._save_data = lambda self, name, data: None
"""


def test_what_another_process_is_about_to_write_is_not_taken_from_an_older_version(tmp_path):
    """Numba lists what it keeps before it writes it; a worker of the same job may read the list in between."""
    shutil.copytree(Path(horovod_onebit.__file__).parent, tmp_path / "horovod_onebit")
    here = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    assert float(run(tmp_path, **here)) == 1
    before = set((tmp_path / "cache").rglob("*.nbc"))
    file = tmp_path / "horovod_onebit" / "codecs" / "sign.py"
    file.write_text(file.read_text().replace("where(code != 0, -s, s)", "where(code != 0, 4 * s, s)"))
    assert float(run(tmp_path, DIES + PROGRAM, **here)) == 4
    assert float(run(tmp_path, **here)) == 4
    assert not before & set((tmp_path / "cache").rglob("*.nbc")), "of other sources: nobody reads it again"


def test_two_processes_that_keep_different_types_keep_both_apart():
    function = cached(nogil=True)(double)
    file = function._cache._cache._cache_file
    assert len({file._data_name(1) for _ in range(9)}) == 9


def test_loops_over_formulas_are_simd(tmp_path):
    """A formula that is not is 10 to 40 times slower: Numba need only lose track of which arguments are arrays."""
    found = dict(line.split(maxsplit=1) for line in run(tmp_path, SIMD).splitlines() if " " in line)
    assert sorted(found) == ["_apply", "_encode", "_move", "_sums"]


def double(x):
    return 2 * x


@pytest.mark.parametrize("error", [OSError(116, "Stale file handle"), EOFError("cut off"), KeyError("x")])
@pytest.mark.parametrize("what", ["load_overload", "save_overload"])
def test_a_cache_that_fails_is_as_good_as_none(what, error, monkeypatch):
    function = cached(nogil=True)(double)

    def fail(*_):
        raise error

    monkeypatch.setattr(function._cache._cache, what, fail)
    assert function(np.float32(3)) == 6


def test_files_that_are_cut_off_are_compiled_anew(tmp_path):
    expected = run(tmp_path)
    files = [path for path in Path(tmp_path).rglob("*.nb?") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert run(tmp_path) == expected


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(stat.S_IRUSR | stat.S_IXUSR)
    run(tmp_path)


def test_no_folder_at_all(monkeypatch):
    def nowhere(self):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("numba.core.dispatcher.Dispatcher.enable_caching", nowhere)
    assert cached(nogil=True)(double)(np.float32(3)) == 6


def test_a_function_that_is_in_no_file_is_compiled():
    """A rule in a notebook's cell."""
    names = {}
    exec(compile("def triple(x):\n    return 3 * x\n", "/nowhere/ipykernel_1/2.py", "exec"), names)
    assert cached(nogil=True)(names["triple"])(np.float32(2)) == 6

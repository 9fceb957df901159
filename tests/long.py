"""What ``make test`` leaves to ``make test-all``, so that it takes minutes."""

import os

import pytest

FEW = int(os.environ.get("ONEBIT_CASES") or 0)
"""Cases of each test on ranks, at most; 0 means all: see tests/ranks/conftest.py."""

LONG = pytest.mark.skipif(FEW > 0, reason="takes long: in `make test-all`")

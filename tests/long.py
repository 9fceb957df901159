"""What ``make test`` leaves to ``make test-all``, so that it takes minutes."""

import math
import os
import zlib

import pytest

FEW = int(os.environ.get("ONEBIT_CASES") or 0)
"""Cases of each test on ranks, at most; 0 means all, also of the tests that are marked ``cases``."""

LONG = pytest.mark.skipif(FEW > 0, reason="takes long: in `make test-all`")


def _step(count):
    """From a case to the next: one that meets all of ``count``, and changes every parameter from the first on."""
    near = round(0.618 * count)
    return next(step for step in sorted(range(1, count + 1), key=lambda s: abs(s - near)) if math.gcd(step, count) == 1)


def sample(config, items, most):
    """Leave of the cases of each test ``most(item)``, spread over those that it has, or all if that is None.

    They are the same in every process, and of each test others, so that not all take the first optimizer."""
    cases = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set[int]()
    for name, found in cases.items():
        first, limit = zlib.crc32(name.encode()), most(found[0])
        count = len(found) if limit is None else min(limit, len(found))
        step = _step(len(found))
        chosen |= {id(found[(first + i * step) % len(found)]) for i in range(count)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]

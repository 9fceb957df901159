"""``make test`` takes minutes: of what has many cases, it runs some (``tests.long``)."""

import pytest

from tests.long import FEW, sample


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    """Of a test that is marked ``cases(n)``, run n cases where few are wanted."""
    if not FEW:
        return

    def most(item):
        marker = item.get_closest_marker("cases")
        return marker.args[0] if marker else None

    sample(config, items, most)

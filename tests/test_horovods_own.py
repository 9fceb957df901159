"""Horovod's own tests with our optimizer in place of Horovod's, where a checkout of its repository is at hand.

``python -m tests.horovod_suite`` fetches one; without it this file has no tests.
"""

import pytest

from tests import horovod_suite

SOURCE = horovod_suite.at_hand()

pytestmark = pytest.mark.horovodrun

if SOURCE:

    def test_horovods_tests_pass_with_our_optimizer():
        assert horovod_suite.parallel(SOURCE, "gloo") == 40
        assert horovod_suite.single(SOURCE) == 8

"""Horovod's own tests and examples with our optimizer in place of Horovod's, where its repository is at hand.

``python -m tests.horovod_suite`` fetches a checkout; without one this file has no tests.
"""

import pytest

from tests import horovod_examples, horovod_suite

SOURCE = horovod_suite.at_hand()

pytestmark = pytest.mark.horovodrun

if SOURCE:

    def test_horovods_tests_pass_with_our_optimizer():
        assert horovod_suite.parallel(SOURCE, "gloo") == 40
        assert horovod_suite.single(SOURCE) == 8

    @pytest.mark.parametrize("name", horovod_examples.EXAMPLES)
    def test_horovods_examples_train_with_our_optimizer(name):
        horovod_examples.run_example(name, SOURCE)

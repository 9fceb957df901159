"""Workers that are killed and workers that join, under Horovod elastic."""

import numpy as np
import pytest

from tests.faults.elastic_jobs import HOSTS, Job
from tests.long import LONG

pytestmark = pytest.mark.horovodrun


@pytest.mark.parametrize(
    ("script", "exchange"),
    [
        ("elastic_torch.py", "two_stage"),
        pytest.param("elastic_torch.py", "local", marks=LONG),
        ("elastic_torch.py", "frozen"),
        pytest.param("elastic_torch.py", "three_bit", marks=LONG),
        ("elastic_keras.py", "direct"),
    ],
)
def test_training_goes_on_when_a_worker_is_killed_and_another_joins(script, exchange, tmp_path):
    first, second, third = HOSTS
    job = Job(tmp_path, script, [first, second], 300, exchange)
    try:
        job.wait(lambda: job.state()[0] > 30, "compressed steps")
        job.kill(second)
        job.wait(lambda: job.state()[1] == 1, "training alone")
        job.give([first, third])
        job.wait(lambda: job.state()[1] == 2, "second worker")
        job.process.wait(job.limit)
    finally:
        job.end()
    assert job.process.returncode == 0, job.said()
    weights = [np.load(tmp_path / f"weights-{rank}.npz") for rank in range(2)]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0].files)
    assert job.state()[0] == 300
    assert job.state()[2] < 12
    log = (tmp_path / "log").read_text()
    assert log.count("done with 2 workers") == 2
    if exchange != "three_bit":  # whose errors are not kept when the workers change
        assert "with 1 workers, residuals 0.000000" not in log


@LONG
def test_a_job_that_may_add_process_sets_goes_on_when_a_worker_is_killed(tmp_path):
    first, second, _ = HOSTS
    job = Job(tmp_path, "elastic_torch.py", [first, second], 100, "auto", slots=2)
    try:
        job.wait(lambda: job.state()[0] > 30, "compressed steps")
        job.kill(second)
        job.process.wait(job.limit)
    finally:
        job.end()
    assert job.process.returncode == 0, job.said()
    assert (tmp_path / "log").read_text().count("done with 2 workers") == 2

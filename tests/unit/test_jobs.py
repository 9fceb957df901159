"""What the jobs of all frameworks share."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))

from jobs import report
from jobs.data import SEQUENCE, load
from jobs.metrics import Metrics
from jobs.options import learning_rate, parse


@pytest.mark.parametrize("task", ["digits", "vgg", "charlm"])
def test_batches_depend_on_seed_step_and_rank_alone(task):
    options = parse(["--task", task, "--batch-size", "8", "--seed", "3"])
    data, again = load(options), load(options)
    x, y = data.batch(options, 5, 1, 2)
    np.testing.assert_array_equal(x, again.batch(options, 5, 1, 2)[0])
    assert len(x) == len(y) == 8
    for other in (data.batch(options, 6, 1, 2), data.batch(options, 5, 0, 2)):
        assert not np.array_equal(x, other[0])
    alone = parse(["--task", task, "--batch-size", "16", "--seed", "3"])
    joined = data.batch(alone, 5, 0, 1)[0]
    np.testing.assert_array_equal(joined[1::2], x)


def test_the_tasks_have_the_shapes_they_say():
    digits, vgg, text = (load(parse(["--task", task])) for task in ("digits", "vgg", "charlm"))
    assert digits.train_x.shape == (1437, 1, 8, 8)
    assert vgg.train_x.shape == (1437, 1, 32, 32)
    assert text.train_x.shape[1] == SEQUENCE
    assert len(text.train_x) > 5000
    np.testing.assert_array_equal(text.train_x[0][1:], text.train_y[0][:-1])
    assert not set(map(bytes, digits.train_x)) & set(map(bytes, digits.test_x[:50]))


@pytest.mark.parametrize(
    "wrong",
    [
        "--task mnist",
        "--steps 0",
        "--lr -1",
        "--batch-size -4",
        "--warmup-steps 0",
        "--data-dir /nowhere",
        "--metrics /nowhere/out.jsonl",
        "--save-weights weights.npz",
        "--compression int8",
    ],
)
def test_bad_options_end_with_a_message(wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(wrong.split())
    assert stopped.value.code == 2
    assert wrong.split()[0] in capsys.readouterr().err


def test_the_cosine_schedule_ends_near_zero():
    options = parse(["--steps", "100", "--lr", "0.5"])
    rates = [learning_rate(options, step) for step in range(100)]
    assert rates[0] == 0.5
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 1e-3
    assert learning_rate(parse(["--lr", "0.5", "--lr-schedule", "constant"]), 99) == 0.5


def test_metrics_make_a_table_and_a_plot(tmp_path):
    runs = []
    for compression in ("none", "onebit"):
        path = tmp_path / f"{compression}.jsonl"
        options = parse(["--compression", compression, "--metrics", str(path), "--steps", "20"])
        with Metrics(options, rank=0) as metrics:
            for step in (10, 20):
                metrics.log(step, loss=1.0 / step, phase="compressed", bytes_sent=step, bytes_received=step)
            totals = {"accuracy": 0.9, "test_loss": 0.1, "last_step_bytes": 100, "fp32_step_bytes": 3200}
            metrics.final(**totals, bytes_sent=2000, bytes_received=2000)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line.get("final") for line in lines] == [None, None, True]
        runs.append(report.read(path))
    table = report.table(runs, "title")
    assert table.row_count == 2
    assert [*table.columns[4].cells] == ["32.0", "32.0"]
    report.plot(runs, tmp_path / "plots" / "loss.png")
    assert (tmp_path / "plots" / "loss.png").stat().st_size > 5000


def test_a_run_that_broke_off_is_not_reported(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"step": 10, "loss": 1.0}\n')
    with pytest.raises(ValueError, match="did not come to its end"):
        report.read(path)

"""What the jobs of all frameworks share."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from jobs import demo, link, report
from jobs.data import SEQUENCE, load
from jobs.metrics import Metrics
from jobs.options import TASKS, learning_rate, parse, recipe_of
from jobs.processes import ROOT, guarded, started
from jobs.view import View


@pytest.mark.parametrize("task", TASKS)
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
        "--save-weights /nowhere/{rank}.npz",
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


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    data = load(parse(["--task", "digits"]))
    order = np.random.default_rng(0).permutation(len(labels))
    np.testing.assert_array_equal(np.concatenate([data.train_y, data.test_y]), labels[order])
    np.testing.assert_array_equal(
        np.concatenate([data.train_x, data.test_x]).reshape(-1, 64), (images[order] / 8 - 1).astype(np.float32)
    )


def one_run(folder, compression, step_bytes, *more):
    """A run of 20 steps as a job writes it."""
    path, steps = folder / f"{compression}.jsonl", ["--steps", "20", "--warmup-steps", "15"]
    options = parse(["--compression", compression, "--metrics", str(path), *steps, *more])
    with Metrics(options, rank=0) as metrics:
        for step in (10, 20):
            metrics.log(step, loss=1.0 / step, phase="compressed", bytes_sent=step, bytes_received=step)
        totals = {"accuracy": 0.9, "test_loss": 0.1, "last_step_bytes": step_bytes, "fp32_step_bytes": 3200}
        metrics.final(**totals, bytes_sent=2000, bytes_received=2000, parameters=10**6, workers=2)
    return path


def timed(run, seconds):
    """The same run, had it taken so long."""
    steps = [line | {"seconds": seconds * line["step"] / 20} for line in run.steps]
    return report.Run(steps, run.final | {"seconds": seconds})


@pytest.fixture
def runs(tmp_path):
    return [timed(report.read(one_run(tmp_path, *kind)), s) for kind, s in ((("none", 3200), 6), (("onebit", 100), 2))]


def test_metrics_make_a_table_and_a_plot(runs, tmp_path):
    lines = [json.loads(line) for line in (tmp_path / "none.jsonl").read_text().splitlines()]
    assert [line.get("final") for line in lines] == [None, None, True]
    table = report.table(runs, "title")
    assert [*table.columns[0].cells] == ["float32", "one bit"]
    assert [*table.columns[4].cells] == ["1.0", "32.0"]
    report.plot(runs, tmp_path / "plots" / "loss.png")
    assert 5000 < (tmp_path / "plots" / "loss.png").stat().st_size < 150_000


def test_the_conclusion_says_which_was_faster(runs):
    assert "3.0 times as fast as with float32" in report.conclusion(runs)
    assert "took 2.0 times as long as with float32" in report.conclusion([runs[0], timed(runs[1], 12)])
    assert report.conclusion(runs[1:]) == ""


def test_predictions_are_those_of_the_planner(runs):
    """A slower link costs float32 more; the ten exact steps cost one bit the same."""
    slow, fast = ([float(s) for s in report._predicted(runs, rate)] for rate in ("100mbit", "1gbit"))
    assert slow[0] > fast[0] > 6
    assert 10 / 20 * slow[0] < slow[1] < 0.9 * slow[0]


@pytest.mark.parametrize(
    ("more", "exact"),
    [
        (["--warmup", "exact"], True),
        (["--warmup", "three_bit"], False),
        (["--recipe", "paper"], True),
        (["--recipe", "paper", "--warmup", "three_bit"], False),
        (["--recipe", "paper", "--warmup", "exact"], True),
        (["--optimizer", "zero_one_adam"], True),
        (["--optimizer", "zero_one_adam", "--warmup", "three_bit"], False),
    ],
)
def test_predictions_are_of_the_warm_up_of_the_run(runs, tmp_path, more, exact):
    other = timed(report.read(one_run(tmp_path, "onebit", 100, *more)), 2)
    default, found = (float(report._predicted([runs[0], one], "100mbit")[1]) for one in (runs[1], other))
    assert found > default + 0.1 if exact else found == pytest.approx(default, abs=0.1)


def test_a_line_that_is_being_written_is_not_read(tmp_path):
    path = tmp_path / "running.jsonl"
    assert report.lines(path) == []
    path.write_text('{"step": 10}\n{"step": 2')
    assert report.lines(path) == [{"step": 10}]


def watched(console):
    """What a person sees of two runs, the second twice as fast."""
    with View(console, ["float32", "one bit"], 20, [0, 0]) as view:
        for index, seconds in enumerate((4.0, 2.0)):
            record = {"step": 20, "loss": 0.5, "accuracy": 0.9, "bytes_sent": 10**6, "seconds": seconds}
            with view.run(index) as watch:
                for records in ([], [record], [record], [record, {"final": True}]):
                    watch(records)
    return console.file.getvalue()


def test_the_view_writes_plain_lines_where_there_is_no_terminal():
    said = watched(Console(file=io.StringIO(), width=120, force_terminal=False))
    assert "\x1b" not in said
    assert said.count("step 20 of 20") == 2
    assert "2.0 times as fast" in said


def test_the_view_on_a_terminal_shows_both_runs():
    said = watched(Console(file=io.StringIO(), width=120, force_terminal=True))
    assert "20/20" in said
    assert "2.0 times as fast" in said


def test_the_demo_hands_what_it_does_not_know_to_the_job(tmp_path):
    args = demo.parse(["--output", str(tmp_path / "new"), "--optimizer", "lamb", "--width", "64", "--link", "none"])
    assert args.more == ["--optimizer", "lamb", "--width", "64"]
    assert (args.task, args.steps, args.warmup_steps, args.seeds, args.np) == ("mlp", 300, 20, [0], 2)
    job = demo._job(args, "onebit", 3, tmp_path / "metrics.jsonl")
    options = parse(job[2:])
    assert (options.optimizer, options.width, options.seed, options.warmup_steps) == ("lamb", 64, 3, 20)


def test_three_bits_are_the_warm_up_of_one_bit_alone(tmp_path):
    """In Keras float32 is our own optimizer, too, which never compresses."""
    args = demo.parse(["--output", str(tmp_path / "new")])
    jobs = {kind: parse(demo._job(args, kind, 0, tmp_path / "m.jsonl")[2:]) for kind in report.NAMES}
    found = {kind: recipe_of(job) for kind, job in jobs.items()}
    assert found["none"] == found["fp16"] == "exact"
    assert found["onebit"].warmup == "three_bit"
    assert {kind: job.half for kind, job in jobs.items()} == {"none": False, "fp16": False, "onebit": True}
    zero_one = demo.parse(["--output", str(tmp_path / "new"), "--optimizer", "zero_one_adam"])
    assert parse(demo._job(zero_one, "onebit", 0, tmp_path / "m.jsonl")[2:]).warmup == "exact"


@pytest.mark.parametrize("wrong", ["--np 1", "--steps -1", "--warmup-steps 0", "--link 10mbit", "--compressions int8"])
def test_bad_options_end_the_demo_with_a_message(wrong, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.parse(["--output", str(tmp_path), *wrong.split()])
    assert stopped.value.code == 2
    assert wrong.split()[0] in capsys.readouterr().err


@pytest.fixture
def no_tools(monkeypatch):
    """As on a machine without iproute2."""
    link.prefix.cache_clear()
    monkeypatch.setattr(link.shutil, "which", lambda tool, path: None if tool == "tc" else f"/bin/{tool}")
    yield
    link.prefix.cache_clear()


def test_without_links_the_demo_says_why_and_predicts(no_tools, tmp_path):
    args = demo.parse(["--output", str(tmp_path)])
    network, reason = demo.network_of(args)
    assert network == []
    assert reason == "tc missing: install util-linux and iproute2"
    console = Console(file=io.StringIO(), width=200)
    demo.introduce(console, args, network, reason)
    assert "tc missing" in console.file.getvalue()
    assert "have no network to wait for" in console.file.getvalue()


def test_a_demo_without_links_ends_with_predictions(runs, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    demo.conclude(console, demo.parse(["--output", str(tmp_path)]), runs)
    said = console.file.getvalue()
    assert "100 Mbit/s" in said
    assert "1 Gbit/s" in said
    assert "make demo FRAMEWORK=tf" in said
    assert (tmp_path / "torch-mlp.png").exists()


def test_a_link_that_was_demanded_and_cannot_be_is_an_error(no_tools, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["demo", "--output", str(tmp_path), "--link", "1gbit"])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit, match=r"--link 1gbit: tc missing.*--link none"):
        demo.main()


def test_mpi_has_no_link(tmp_path):
    network, said = demo.network_of(demo.parse(["--output", str(tmp_path), "--backend", "mpi"]))
    assert network == []
    assert "--backend gloo" in said


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(condition, seconds=60):
    """Wait for it, as long as a loaded machine may need."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_was_started_ends_with_an_error(tmp_path):
    log = tmp_path / "log"
    with suppress(KeyError), started(guarded([sys.executable, "-c", SLEEPER]), link.environment(), log):
        until(log.read_text)
        raise KeyError
    assert not alive(int(log.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_was_started_ends_with_a_caller_that_is_killed(tmp_path):
    log = tmp_path / "log"
    program = f"""
import time
from contextlib import suppress
from pathlib import Path
from jobs import link
from jobs.processes import guarded, started
with started(guarded([{sys.executable!r}, "-c", {SLEEPER!r}]), link.environment(), Path({str(log)!r})):
    time.sleep(600)
"""
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    until(lambda: log.exists() and log.read_text())
    caller.kill()
    caller.wait()
    until(lambda: not alive(int(log.read_text())))


def test_a_run_that_broke_off_is_not_reported(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"step": 10, "loss": 1.0}\n')
    with pytest.raises(ValueError, match="did not come to its end"):
        report.read(path)

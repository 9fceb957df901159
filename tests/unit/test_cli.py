"""The command line: every command answers a person and a program, and says what is wrong with a question."""

import dataclasses
import json
import math

import numpy as np
import pytest

from horovod_onebit import ConfigurationError
from horovod_onebit.stats import Stats
from horovod_onebit.tools import cli, show, trial
from horovod_onebit.tools.diagnostics import Collector
from horovod_onebit.tools.monitor import JsonLines, Monitor, TensorBoard, plot, read


class Optimizer:
    """What Monitor needs of one."""

    def __init__(self):
        self.steps = -1

    def stats(self, *, norms=True):
        self.steps += 1
        return Stats("compressed", 10 * self.steps, 0, 100, 90, 0, 10, 10, 5, 5, 20.0, 0.1, 0.2, 0.3, math.nan, 1.0)


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.jsonl"
    with Monitor(Optimizer(), [JsonLines(path)], every=10) as monitor:
        for step in range(35):
            monitor.step(loss=np.float32(1 / (step + 1)), note="x")
    return path


@pytest.fixture
def report_file(tmp_path):
    collector = Collector()
    collector.add({"layer": np.random.default_rng(0).standard_normal(2000)})
    collector.report().save(tmp_path / "report.json")
    return tmp_path / "report.json"


@pytest.mark.parametrize(("ratio", "text"), [(20.0, "5 bytes sent, 5.0 % of float32's;"), (0.0, "5 bytes sent; ")])
def test_what_a_run_has_cost_as_text(ratio, text):
    """After ``flush()`` of 0/1 Adam nothing was sent last that float32 gradients would have sent, too."""
    assert text in str(dataclasses.replace(Optimizer().stats(), ratio_to_fp32=ratio))


PLAN = ["plan", "--parameters", "110M", "--workers", "16", "--link", "10gbit", "--compute-ms", "250"]
SIMULATE = ["simulate", "--steps", "40", "--workers", "2", "--recipes", "exact", "robust"]


@pytest.mark.parametrize(
    ("arguments", "text", "key"),
    [
        (PLAN, "1-bit pays", "verdict"),
        (["diagnose", "REPORT"], "robust: fine", "verdicts"),
        (["plot", "RUN", "--output", "PICTURE"], "bytes sent in a step", "panels"),
        ([*SIMULATE, "--plot", "PICTURE"], "replicas", "curve"),
    ],
)
def test_text_for_a_person_and_json_for_a_program(arguments, text, key, run_file, report_file, tmp_path, capsys):
    places = {"RUN": run_file, "REPORT": report_file, "PICTURE": tmp_path / "run.svg"}
    arguments = [str(places.get(a, a)) for a in arguments]
    assert cli.main(arguments) == 0
    assert text in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert key in (found[0] if isinstance(found, list) else found)
    if str(places["PICTURE"]) in arguments:
        assert places["PICTURE"].read_text().startswith("<?xml")


def test_simulated_workers_learn_with_one_bit(capsys):
    assert cli.main([*SIMULATE[:1], "--recipes", "exact", "robust", "paper", "--json"]) == 0
    exact, robust, paper = json.loads(capsys.readouterr().out)
    before = trial.run(trial.Trial(steps=1), "exact")
    assert exact["loss"] < 0.1 * before.loss
    assert robust["loss"] < 1.2 * exact["loss"]
    assert all(outcome["replicas_equal"] for outcome in (exact, robust, paper))
    assert robust["bytes"] < exact["bytes"] / 5
    assert exact["bytes"] == exact["fp32_bytes"]


def test_json_has_null_for_what_diverged(capsys):
    assert cli.main([*SIMULATE, "--lr", "1e30", "--json"]) == 0
    outcomes = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [outcome["loss"] for outcome in outcomes] == [None, None]
    assert show.finite({"a": (math.inf, [math.nan, 1.5]), "b": "nan"}) == {"a": [None, [None, 1.5]], "b": "nan"}


def test_the_exchange_may_be_chosen():
    sent = {
        exchange: trial.run(trial.Trial(workers=16, steps=30), "robust", exchange=exchange).last_bytes
        for exchange in ("direct", "two_stage")
    }
    assert sent["two_stage"] < 0.75 * sent["direct"]  # a share is at least a block, and there are six


@pytest.mark.parametrize(
    ("steps", "recipe", "said"), [("5", "robust", True), ("6", "robust", False), ("5", "exact", False)]
)
def test_a_trial_that_ends_in_its_warmup_says_so(steps, recipe, said, capsys):
    assert cli.main(["simulate", "--workers", "2", "--steps", steps, "--warmup-steps", "5", "--recipes", recipe]) == 0
    assert ("No step sent one bit" in capsys.readouterr().out) == said


def test_tables_are_plain_in_a_pipe(capsys):
    assert cli.main(SIMULATE) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("recipe")
    assert [line.split()[0] for line in lines[1:]] == ["exact", "robust"]
    assert show.table(["a", "b"], [["1", "22"]]) == "a   b\n1  22"


def test_a_terminal_gets_a_drawn_table(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "┃" in show.table(["a", "b"], [["1", "22"]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--workers", "0"], "workers=0"),
        (["simulate", "--workers", "3", "--workers-per-host", "2"], "do not fill"),
        (["simulate", "--recipes", "fast"], "recipe='fast'"),
        (["simulate", "--noise", "-1"], "noise=-1.0"),
        (["simulate", "--lr", "nan"], "lr=nan"),
        (["simulate", "--lr", "inf"], "lr=inf"),
        (["simulate", "--lr", "0"], "lr=0.0"),
        (["simulate", "--noise", "nan"], "noise=nan"),
        (["simulate", "--noise", "inf"], "noise=inf"),
        (["simulate", "--seed", "-1"], "seed=-1"),
        ([*PLAN, "--compute-ms", "nan"], "compute=nan"),
        ([*PLAN, "--compute-ms", "inf"], "compute=inf"),
        ([*PLAN, "--compute-ms=-1"], "compute=-0.001"),
        ([*PLAN, "--latency-us", "nan"], "latency=nan"),
        ([*PLAN, "--latency-us", "inf"], "latency=inf"),
        ([*PLAN, "--latency-us=-3"], "latency=-"),
        ([*PLAN, "--link", "nan"], "link 'nan'"),
        ([*PLAN, "--link", "infgbit"], "link 'infgbit'"),
        ([*PLAN, "--parameters", "nan"], "'nan': expected a number"),
        ([*PLAN, "--parameters", "1e400"], "'1e400': expected a number"),
        ([*PLAN, "--parameters=-5M"], "parameters=-5000000"),
        ([*PLAN, "--workers", "0"], "workers=0"),
        ([*PLAN, "--workers", 400 * "9"], "a number is too large"),
        ([*PLAN, "--parameters", "1e308"], "a number is too large"),
        (["link", "--parameters=-5M"], "parameters=-5000000"),
        (["plot", "/nowhere/run.jsonl"], "expected a file of JSON lines"),
        (["diagnose", "/nowhere/report.json"], "expected a report"),
        (["diagnose", "REPORT", "--plot", "/nowhere/x.png"], "cannot be written"),
        ([*PLAN, "--plot", "/nowhere/x.png"], "cannot be written"),
        ([*PLAN, "--plot", "x.unknown"], "cannot be written"),
    ],
)
def test_wrong_questions_end_with_status_2(arguments, message, report_file, capsys):
    assert cli.main([str(report_file) if a == "REPORT" else a for a in arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", ['"step"', '["step"]', "3", "null"])
def test_lines_that_are_no_rows(line, tmp_path, capsys):
    file = tmp_path / "run.jsonl"
    file.write_text(f"{line}\n")
    assert cli.main(["plot", str(file)]) == 2
    assert "expected a file of JSON lines" in capsys.readouterr().err


def test_lines_of_a_monitor(run_file):
    rows = read(run_file)
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert rows[0]["error_norm"] is None
    assert rows[1]["loss"] == pytest.approx(1 / 20)
    assert rows[2]["step_seconds"] >= 0
    assert rows[1]["seconds"] <= rows[2]["seconds"]
    assert rows[0]["note"] == "x"


def drawn(monkeypatch, *paths):
    """The labels of the lines that ``plot`` draws."""
    figures = []
    monkeypatch.setattr(show, "save", lambda figure, output: figures.append(figure))
    plot([str(path) for path in paths], "run.png")
    return {line.get_label() for axes in figures[0].axes for line in axes.get_lines() if "loss" in axes.get_ylabel()}


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path, monkeypatch):
    def run(name):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"step": 1, "loss": 2.0, "test_loss": null}\n')
        return path

    exact, onebit, other = run("exact/run.jsonl"), run("onebit/run.jsonl"), run("onebit/other.jsonl")
    assert drawn(monkeypatch, exact, onebit, other) == {"exact/run: loss", "onebit/run: loss", "other: loss"}
    assert drawn(monkeypatch, exact, other) == {"run: loss", "other: loss"}
    deep = [run("a/seed 0/run.jsonl"), run("b/seed 0/run.jsonl")]
    assert drawn(monkeypatch, *deep) == {"a/seed 0/run: loss", "b/seed 0/run: loss"}
    monkeypatch.chdir(onebit.parent)
    assert drawn(monkeypatch, "run.jsonl", "../exact/run.jsonl") == {"exact/run: loss", "onebit/run: loss"}
    assert drawn(monkeypatch, "run.jsonl", onebit) == {"run: loss"}
    same = run("x/run.json"), run("x/run.jsonl")
    assert drawn(monkeypatch, *same) == {f"{path}: loss" for path in same}


@pytest.mark.parametrize("text", ["{", "{\n", "[1]\n", '{"step": 1}\n', '{"step": 1, "loss": "low"}\n'])
def test_files_that_cannot_be_drawn(text, tmp_path, capsys):
    (tmp_path / "run.jsonl").write_text(text)
    assert cli.main(["plot", str(tmp_path / "run.jsonl"), "--output", str(tmp_path / "run.png")]) == 2
    assert "expected" in capsys.readouterr().err


def test_a_resumed_run_goes_on_in_its_file(run_file):
    with Monitor(Optimizer(), [JsonLines(run_file, append=True)], every=1) as monitor:
        monitor.step()
    assert [row["step"] for row in read(run_file)] == [10, 20, 30, 10]


def test_a_last_line_that_was_cut_off_is_left_out_and_not_continued(run_file):
    with run_file.open("a") as file:
        file.write('{"step": 40, "lo')
    assert [row["step"] for row in read(run_file)] == [10, 20, 30]
    with Monitor(Optimizer(), [JsonLines(run_file, append=True)], every=1) as monitor:
        monitor.step()
    assert [row["step"] for row in read(run_file)] == [10, 20, 30, 10]


def test_a_last_line_that_lacks_its_end_alone_is_kept(run_file):
    with run_file.open("a") as file:
        file.write('{"step": 40}')
    assert [row["step"] for row in read(run_file)] == [10, 20, 30, 40]
    with Monitor(Optimizer(), [JsonLines(run_file, append=True)], every=1) as monitor:
        monitor.step()
    assert [row["step"] for row in read(run_file)] == [10, 20, 30, 40, 10]


@pytest.mark.parametrize("fails", ["add", "end"])
def test_a_sink_that_fails_does_not_end_the_training(fails, tmp_path, caplog):
    """tensorboard's writer and TensorFlow's have errors of their own."""

    class Board(TensorBoard):
        def add(self, tag, value, step):
            if fails == "add":
                raise RuntimeError("no space left on device")

        def end(self):
            raise RuntimeError("no space left on device")

    path = tmp_path / "run.jsonl"
    with Monitor(Optimizer(), [Board(), JsonLines(path)], every=1) as monitor:
        for _ in range(3):
            monitor.step()
    assert len(read(path)) == 3
    (record,) = caplog.records
    assert record.getMessage() == "Board is written no more: RuntimeError: no space left on device"


def test_a_file_that_cannot_be_written():
    with pytest.raises(ConfigurationError, match="cannot be written"):
        JsonLines("/nowhere/run.jsonl")
    with pytest.raises(ConfigurationError, match="every=0"):
        Monitor(Optimizer(), [], every=0)

"""The planner: hand-made cases, what it says of links that are slow or fast, and the measurements of the cluster."""

import json
from dataclasses import replace

import pytest

from benchmarks import report
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.tools import cli, planner

JOB = planner.Job(parameters=25_000_000, workers=2, link=125e6, compute=0.4)


def estimates(job):
    return {e.way: e for e in planner.plan(job).estimates}


def test_bytes_of_two_workers():
    found = estimates(JOB)
    assert found["float32"].received == 100e6
    assert found["float16"].received == 50e6
    message = 25_000_000 / 8 + 4 * 24_415 + 48 * 6
    assert found["1-bit direct"].received == message
    assert found["1-bit two-stage"].received == message


def test_bytes_grow_with_workers_in_direct_and_hardly_in_two_stage():
    two, four, many = (estimates(replace(JOB, workers=n)) for n in (2, 4, 64))
    assert four["1-bit direct"].received == 3 * two["1-bit direct"].received
    assert four["1-bit two-stage"].received == 1.5 * two["1-bit two-stage"].received
    assert many["1-bit two-stage"].received < 2 * two["1-bit two-stage"].received
    assert many["1-bit direct"].received > many["float32"].received / 2


def test_hosts_of_several_workers():
    found = estimates(replace(JOB, workers=16, workers_per_host=8))
    message = planner.message_bytes(25_000_000)
    assert found["1-bit direct"].received == 8 * message
    assert found["1-bit two-stage"].received == pytest.approx((8 * 8 / 16 + 8 / 16) * message)
    alone = estimates(replace(JOB, workers=8, workers_per_host=8))
    assert all(e.received == 0 for e in alone.values())
    assert alone["1-bit direct"].transfer < found["1-bit direct"].transfer


@pytest.mark.parametrize(("rate", "pays"), [("100mbit", True), ("1gbit", True), ("100gbit", False)])
def test_verdicts(rate, pays):
    plan = planner.plan(replace(JOB, link=planner.rate(rate)))
    assert (plan.speedup > 1.05) == pays
    assert ("does not pay" in plan.verdict) == (not pays)


def test_one_worker_has_nothing_to_send():
    plan = planner.plan(replace(JOB, workers=1))
    assert "one worker" in plan.verdict
    assert all(e.received == e.transfer == 0 for e in plan.estimates)


@pytest.mark.parametrize(
    ("text", "value"), [("110M", 110_000_000), ("1.3B", 1_300_000_000), ("25_000_000", 25_000_000), ("8k", 8000)]
)
def test_numbers(text, value):
    assert planner.number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("1gbit", 125e6), ("10Gbit/s", 1.25e9), ("100mbit", 12.5e6), ("1.2GB", 1.2e9), ("25Gbps", 3.125e9)],
)
def test_rates(text, value):
    assert planner.rate(text) == value


@pytest.mark.parametrize("text", ["", "fast", "12", "-1gbit", "1xbit", "nangbit", "infgbit"])
def test_bad_rates(text):
    with pytest.raises(ConfigurationError, match="expected a rate"):
        planner.rate(text)


@pytest.mark.parametrize("text", ["", "many", "1X", "nan", "inf"])
def test_bad_numbers(text):
    with pytest.raises(ConfigurationError, match="expected a number"):
        planner.number(text)


@pytest.mark.parametrize(
    "change", [{"workers": 0}, {"parameters": 0}, {"workers_per_host": 3}, {"link": 0.0}, {"compute": -1.0}]
)
def test_bad_jobs(change):
    with pytest.raises(ConfigurationError):
        replace(JOB, **change)


def test_command_line(capsys, tmp_path):
    arguments = ["plan", "--parameters", "110M", "--workers", "16", "--link", "10gbit", "--compute-ms", "250"]
    assert cli.main([*arguments, "--plot", str(tmp_path / "plan.svg")]) == 0
    assert "1-bit pays" in capsys.readouterr().out
    assert (tmp_path / "plan.svg").stat().st_size > 1000
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["workers"] == 16
    assert cli.main([*arguments[:-3], "slow", "--compute-ms", "250"]) == 2
    assert "expected a rate" in capsys.readouterr().err


RESULTS = report.load("link")["results"]


@pytest.mark.parametrize("name", RESULTS)
def test_bytes_are_those_that_the_interfaces_counted(name):
    result = RESULTS[name]
    foretold = estimates(report.job(result))
    for kind, way in report.KINDS.items():
        counted = result["exchange"][kind]["received"]
        assert foretold[way].received / planner.LINE_RATE == pytest.approx(counted, rel=0.06)


@pytest.mark.parametrize("name", [name for name, result in RESULTS.items() if result["hosts"] == 2])
def test_times_are_within_a_quarter_of_those_measured(name):
    """Where each host has a core to itself."""
    for _, kind, foretold, measured in report.predictions({name: RESULTS[name]}):
        assert foretold == pytest.approx(measured, rel=0.25), kind

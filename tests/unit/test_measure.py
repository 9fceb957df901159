"""The benchmarks' statistics: intervals of ratios, when to stop, what other processes use."""

import itertools
import random
import subprocess
import sys
import time
from fractions import Fraction
from importlib.util import find_spec
from math import comb
from pkgutil import iter_modules

import numpy as np
import pytest

import benchmarks
from benchmarks import measure, report, target
from benchmarks.measure import Turn, Usage, Verdict, Way, interval, verdict


def rounds_of(ratios, baseline=2.0):
    return [{"a": Turn(ratio * baseline, 10.0), "b": Turn(baseline, 100.0)} for ratio in ratios]


def decide(rounds, most=10**6, *, elapsed=0.0, another=1.0, seconds=100.0, pairs=(("a", "b"),)):
    return verdict(rounds, pairs, {"a": most, "b": 10**6}, elapsed=elapsed, another=another, seconds=seconds)


@pytest.mark.skipif(not (find_spec("horovod") and find_spec("tensorflow") and find_spec("torch")), reason="needs all")
def test_all_benchmarks_can_be_imported():
    """They prepare their inputs as they are imported, from what the library has now."""
    names = [f"import benchmarks.{module.name}" for module in iter_modules(benchmarks.__path__)]
    subprocess.run([sys.executable, "-c", "\n".join(names)], check=True, timeout=300)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8, 9, 12, 40])
def test_the_interval_is_the_narrowest_of_order_statistics_with_95_percent(count):
    values = random.Random(count).sample(range(1000), count)
    found = interval(values)
    inside = sum(found.low <= value <= found.high for value in values)
    cut = (count - inside) // 2
    exact = 1 - 2 * sum(Fraction(comb(count, i), 2**count) for i in range(cut + 1))
    assert found.confidence == pytest.approx(float(exact))
    assert (found.confidence >= 0.95) == (count >= 6)
    wider = exact - 2 * Fraction(comb(count, cut + 1), 2**count)
    assert cut + 2 > (count + 1) // 2 or wider < Fraction(95, 100)
    assert found.median == pytest.approx(float(np.median(values)))
    assert found.count == count


def test_the_interval_holds_the_median_as_often_as_it_says():
    rng = np.random.default_rng(0)
    held = [one.low <= 1 <= one.high for one in (interval(rng.lognormal(0, 1, 9)) for _ in range(2000))]
    assert interval(range(9)).confidence == pytest.approx(0.961, abs=1e-3)
    assert np.mean(held) == pytest.approx(0.961, abs=0.015)


def test_no_values_give_no_interval():
    assert interval([]).count == 0
    assert not interval([]).settled()


@pytest.mark.parametrize(
    ("values", "settled"),
    [
        ([1.0] * 6, True),
        ([1.0] * 5, False),  # too few for 95 %
        ([0.95, 1, 1, 1, 1, 1.05], True),
        ([0.95, 1, 1, 1, 1, 1.2], False),
        ([0.8, 1, 1, 1, 1, 1.05], False),
        ([0.5, *[1.0] * 8, 1.5], True),  # of ten, the smallest and the largest are outside
    ],
)
def test_a_ratio_is_settled_when_its_interval_is_within_a_tenth(values, settled):
    assert interval(values).settled() is settled


def test_it_goes_on_until_every_ratio_is_settled():
    assert decide(rounds_of([1.0] * 5)) is Verdict.MORE
    assert decide(rounds_of([1.0] * 6)) is Verdict.MET
    noisy = rounds_of([1, 1, 1, 1, 1, 2])
    assert decide(noisy) is Verdict.MORE
    assert decide(noisy, pairs=[("a", "b"), ("b", "b")]) is Verdict.MORE


def test_it_ends_when_another_round_would_take_too_long():
    noisy = rounds_of([1, 1, 1, 1, 1, 2])
    assert decide(noisy, elapsed=89, another=10) is Verdict.MORE
    assert decide(noisy, elapsed=91, another=10) is Verdict.OUT
    assert decide(rounds_of([1.0] * 6), elapsed=200, another=10) is Verdict.MET
    assert decide([], elapsed=0, another=1) is Verdict.MORE
    assert decide([], elapsed=100, another=1) is Verdict.OUT


def test_a_way_that_takes_part_in_two_rounds_is_not_waited_for():
    two = [*rounds_of([1.0, 1.0]), *({"b": Turn(2.0, 1.0)} for _ in range(4))]
    assert decide(two, most=2) is Verdict.OUT
    assert decide(two, most=3) is Verdict.MORE


def test_ratios_are_taken_within_a_round():
    rounds = [{"a": Turn(2.0, 0), "b": Turn(1.0, 0)}, {"b": Turn(7.0, 0)}, {"a": Turn(40.0, 0), "b": Turn(20.0, 0)}]
    found = measure.summary(rounds, "a", [("a", "b")])
    assert found["ratios"]["b"]["median"] == found["ratios"]["b"]["low"] == found["ratios"]["b"]["high"] == 2.0
    assert found["rounds"] == 2
    assert found["differences"]["b"]["low"] == 1.0
    assert found["seconds"]["median"] == 21.0


def test_every_round_has_its_own_order_and_all_workers_the_same():
    orders = [tuple(measure.order(["a", "b", "c"], number)) for number in range(50)]
    assert set(orders) == set(itertools.permutations("abc"))
    assert orders == [tuple(measure.order(["a", "b", "c"], number)) for number in range(50)]


def at(clock, busy, own, machine="here", cores=2):
    return Usage(machine, cores, busy, own, clock)


def test_others_are_what_no_process_of_the_job_has_used():
    before = [at(0.0, 100.0, 5.0), at(0.0, 100.0, 7.0)]
    after = [at(10.0, 118.0, 14.0), at(10.0, 118.0, 15.0)]
    assert measure.others(before, after) == pytest.approx((18 - 9 - 8) / 20)
    # One process alone, on the same machine, takes the other one for a stranger.
    assert measure.others(before[:1], after[:1]) == pytest.approx((18 - 9) / 20)


def test_each_machine_counts_for_itself():
    before = [at(0.0, 50.0, 0.0, "one"), at(3.0, 900.0, 0.0, "two", cores=4)]
    after = [at(10.0, 60.0, 10.0, "one"), at(13.0, 920.0, 10.0, "two", cores=4)]
    assert measure.others(before, after) == pytest.approx(10 / 40)


def test_what_is_seen_is_never_negative():
    assert measure.others([at(0.0, 10.0, 0.0)], [at(1.0, 10.9, 1.0)]) == 0.0


@pytest.mark.parametrize(("share", "anyway", "refused"), [(0.1, False, False), (0.11, False, True), (0.9, True, False)])
def test_a_loaded_machine_is_refused(share, anyway, refused):
    if refused:
        with pytest.raises(measure.Loaded, match=r"11% of the cores, expected at most 10%.*--anyway"):
            measure.refuse(share, anyway=anyway)
    else:
        measure.refuse(share, anyway=anyway)


def test_this_machine_can_be_looked_at():
    before = measure.usage()
    sum(range(10**6))
    after = measure.usage()
    assert after.machine == before.machine
    assert after.busy >= before.busy
    assert after.own >= before.own
    assert after.cores >= 1
    assert measure.others([before], [after]) >= 0


class Alone(measure.Workers):
    """One worker, without Horovod."""

    def __init__(self, loads):
        self._loads = iter(loads)

    def barrier(self):
        pass

    def gather(self, value):
        _, _, turns = value
        busy = next(self._loads)
        return [(at(0.0, 0.0, 0.0), at(1.0, 2 * busy, 0.0), turns)]

    def agree(self, value):
        return value


def ways(**seconds):
    return {name: Way(lambda one=one: one, steps=2) for name, one in seconds.items()}


def test_rounds_in_which_others_were_busy_are_discarded():
    loads = itertools.chain([0.5, 0.0, 0.4], itertools.repeat(0.05))
    found = measure.compare(ways(a=3.0, b=2.0), [("a", "b")], Alone(loads), seconds=60)
    assert found["discarded"] == 2
    assert found["rounds"] == 6
    assert found["met"]
    assert found["load"]["largest"] == pytest.approx(0.05)
    assert found["ways"]["a"]["seconds"]["median"] == 1.5
    assert found["ways"]["a"]["ratios"]["b"]["median"] == 1.5


def test_with_anyway_they_count_and_the_result_is_marked():
    found = measure.compare(ways(a=3.0, b=2.0), [("a", "b")], Alone(itertools.repeat(0.5)), seconds=60, anyway=True)
    assert found["rounds"] == 6
    assert found["anyway"]
    assert "loaded machine" in measure.describe(found)


def test_a_machine_that_is_never_quiet_is_refused():
    with pytest.raises(measure.Loaded, match="50% of the cores"):
        measure.compare(ways(a=3.0, b=2.0), [("a", "b")], Alone(itertools.repeat(0.5)), seconds=0.0)


def test_the_time_to_a_loss_is_compared_within_a_seed():
    def runs(*seconds):
        return [{"seconds": s, "steps": 10, "received": 1.0, "reached": True, "load": 0.0} for s in seconds]

    found = target.rows({"ways": {"horovod fp32": runs(10, 20, 40), "onebit": runs(1, 2, 4)}})
    assert found["onebit"]["ratio"]["low"] == found["onebit"]["ratio"]["high"] == pytest.approx(0.1)
    assert found["onebit"]["seconds"] == [2, 1, 4]
    assert found["horovod fp32"]["ratio"]["median"] == 1


def measured(ways_, *baselines):
    pairs = measure.pairs_of(list(ways_), baselines)
    found = measure.compare(ways_, pairs, Alone(itertools.repeat(0.02)), seconds=60)
    return {
        "hosts": 2, "rate": "100mbit", "cores": 2, "workers": 2, "parameters": 1_000_000,
        "training": found.pop("ways"), "measured": {"training": found},
    }  # fmt: skip


def test_the_page_shows_medians_of_times_and_intervals_of_ratios():
    names = {"no communication": 0.2, "horovod fp32": 0.8, "onebit": 0.25}
    text = report.trainings({"one": measured(ways(**names), "no communication", "horovod fp32")})
    assert "6 rounds; every interval of a ratio is within 10 %; other processes used 2 % of the cores" in text
    assert "| onebit | 125 | 1.25 [1.25, 1.25] | 3.2 [3.2, 3.2] | 0.00 |" in text


def test_the_page_says_of_how_few_rounds_a_ratio_is():
    steps = ways(**{"no communication": 0.2, "onebit local 16": 0.3})
    steps["diloco 16"] = Way(lambda: 0.9, most=2)
    found = measured(steps, "no communication")
    assert not found["measured"]["training"]["met"]
    text = report.local_steps({"one": found})
    assert "**1 of 2 intervals are within 10 %**" in text
    assert "9 [9, 9] (2 of them)" in text


def test_a_round_without_ways_of_minutes_is_not_expected_to_take_as_long():
    """One way, for one round, takes nearly all of the first one's time."""
    short = {"a": Way(lambda: 1e-3), "b": Way(lambda: 1e-3 * random.random())}
    ways = short | {"slow": Way(lambda: time.sleep(0.4), most=1)}
    found = measure.compare(ways, [("b", "a")], Alone(itertools.repeat(0.05)), seconds=0.5, target=0.0)
    assert found["rounds"] > 1

"""Several hosts: the bytes that really cross the links, as the network interfaces count them."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from horovod_onebit import Recipe, costs
from jobs.cluster import cluster, unavailable
from jobs.processes import result
from tests.long import LONG

reason = unavailable()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(reason is not None, reason=str(reason))]


# Horovod's own messages are as many as its cycles, and these as many as the machine has time for: fewer of both.
SLOW_CYCLES = {"HOROVOD_CYCLE_TIME": "10"}


@cache
def job(hosts, backend, slots=1, exchange="auto"):
    """What each process found."""
    with cluster(hosts, "1gbit") as made:
        output = made.horovodrun(
            backend, "python", "tests/cluster/job.py", exchange, slots=slots, timeout=300, variables=SLOW_CYCLES
        )
    return result(output)


def test_namespaces_of_others_stay(request):
    """Only those of a cluster that was left behind are taken away."""
    others = [f"onebit-x{os.getpid()}", f"onebitv{os.getpid()}x"]
    for name in others:
        request.addfinalizer(lambda name=name: subprocess.run(["ip", "netns", "del", name], check=True))
        subprocess.run(["ip", "netns", "add", name], check=True)
    with pytest.raises(RuntimeError, match=r"tc qdisc add .*nonsense"), cluster(2, "nonsense"):
        pass
    with cluster(1, None) as made:
        assert len(made.received()) == 1
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert {*others, "onebit0"} <= {line.split()[0] for line in left.splitlines()}
    assert "onebit1" not in left


@pytest.mark.parametrize(("hosts", "backend"), [(2, "mpi"), (4, "mpi")])
def test_replicas_on_several_hosts_are_equal_and_their_messages_small(hosts, backend):
    found = job(hosts, backend)
    assert len(found) == hosts
    for one in found:
        assert one["equal"]
        assert one["exchange"] == ("direct" if hosts == 2 else "two_stage")
        assert one["compressed"] < one["exact"] / (25 if hosts == 2 else 18)
        # The program's own count leaves out framing, acknowledgements, small tensors' frames and Horovod's control.
        assert 1.0 < one["compressed"] / one["claimed"] < 1.25


def test_bytes_hardly_grow_with_hosts():
    """Of two hosts each receives a bit a parameter; of four three quarters of a bit, and of two bits."""
    two, four = ([one["compressed"] for one in job(hosts, "mpi")] for hosts in (2, 4))
    assert max(four) < 2.5 * min(two)


@LONG
@pytest.mark.parametrize(("hosts", "backend", "most"), [(2, "gloo", 1.15), (4, "gloo", 1.15), (4, "mpi", 2.2)])
def test_hosts_of_two_workers_receive_what_the_planner_says(hosts, backend, most):
    """With the headers of TCP and Horovod, over Gloo, whose allgather is a ring. Open MPI's brings more."""
    found = job(hosts, backend, slots=2, exchange="direct")
    way = costs.ways(found[0]["parameters"], Recipe(), 2 * hosts, 2)["direct"]
    for one in found:
        assert one["equal"]
        assert way.received < one["compressed"] < most * way.received


@LONG
def test_hosts_of_two_workers_send_one_message_for_both():
    found, alone = job(2, "gloo", slots=2, exchange="hierarchical"), job(2, "mpi")
    assert [one["exchange"] for one in found] == ["hierarchical"] * 4
    assert all(one["equal"] for one in found)
    assert found[0]["compressed"] < 1.35 * alone[0]["compressed"]


@LONG
def test_four_hosts_of_two_workers_receive_what_four_workers_would():
    """Three quarters of a bit a parameter, and of the two bits of the answer; that, scales and headers, is 2.3 bits."""
    found = job(4, "mpi", slots=2, exchange="hierarchical")
    assert len(found) == 8
    for one in found:
        assert one["equal"]
        assert one["exchange"] == "hierarchical"
        bits = 8 * one["compressed"] / one["parameters"]
        assert 2.3 < bits < 1.15 * 2.3


@LONG
def test_keras_exchanges_hierarchically():
    """In graphs and eagerly, with one thread for TensorFlow's operations, and with no process sets."""
    with cluster(2, "1gbit") as made:
        found = result(made.horovodrun("mpi", "python", "tests/cluster/keras_job.py", slots=2, timeout=400))
    assert len(found) == 4
    for graph, eager, auto in found:
        assert graph == eager == {"exchange": "hierarchical", "equal": True, "graph is eager": True}
        assert auto == {"exchange": "hierarchical", "equal": True}


def test_all_is_taken_away():
    with cluster(1, None) as made:
        assert len(made.received()) == 1
    with cluster(2, "10gbit") as made:  # the same names again
        assert len(made.sent()) == 2


@LONG
@pytest.mark.parametrize(("backend", "slots", "rate"), [("gloo", 2, 100), ("mpi", 1, 1000)])
def test_the_rate_of_a_link_is_measured(backend, slots, rate):
    """Not above what tc allows; below it, where processes share cores. Worker 0 alone says so."""
    with cluster(2, f"{rate}mbit") as made:
        command = [str(Path(sys.executable).with_name("horovod-onebit")), "link", "--parameters", "25M"]
        output = made.horovodrun(backend, *command, slots=slots, timeout=300)
    found = re.findall(r"a host's link: ([\d,]+) Mbit/s", output)
    assert len(found) == 1, output
    assert 0.05 * rate < float(found[0].replace(",", "")) < 1.2 * rate
    assert f"{2 * slots} workers on 2 hosts" in output
    taken = "hierarchical" if slots == 2 else "direct"
    assert f'exchange="auto" takes "{taken}" for 25,000,000 parameters' in output

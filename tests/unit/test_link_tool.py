"""``horovod-onebit link``: the same answer on all workers, and what it says."""

import numpy as np
import pytest

from horovod_onebit import costs, simulation
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.tools import link


def test_workers_on_one_host_have_no_link():
    found = simulation.run(lambda collectives: link.measure(collectives, times=3), 2, workers_per_host=2)
    assert found[0] == found[1]
    assert found[0].rate is None
    assert "no link between hosts" in link.text(found[0])


def told(own, hosts):
    """What workers say, if they differ from ``own`` in their host and its number of workers."""
    rows = np.tile(own.view(np.uint64), (len(hosts), 1))
    rows[:, 1:3] = hosts
    return rows.view(np.uint8).reshape(-1)


class Wire:
    """Two hosts of two workers, this one being worker 0: what the others send takes its time on this clock."""

    rank, size = 0, 4

    def __init__(self, rate, latency):
        self.rate, self.latency, self.now = rate, latency, 0.0

    def clock(self):
        return self.now

    def host(self):
        return 0, 2

    def allgather(self, array, name):
        if name == "onebit.hosts":
            return Arrived(told(array, [(0, 2), (0, 2), (1, 2), (1, 2)]))
        return Arrived(np.tile(array, self.size))

    def alltoall(self, array, name):
        received = 2 * 2 * array.nbytes / self.size  # by a host: two workers' parts from each of two others
        self.now += self.latency + received / self.rate
        return Arrived(array)

    def allreduce(self, array, name):
        return Arrived(array)


class Arrived:
    def __init__(self, array):
        self.array = array

    def wait(self):
        return self.array


def test_the_rate_is_what_a_host_receives_in_a_second(monkeypatch):
    """Of two workers on the other host, whose parts for both of its own come over the link."""
    wire = Wire(rate=20e6 * costs.LINE_RATE, latency=3e-3)
    monkeypatch.setattr(link.time, "perf_counter", wire.clock)
    found = link.measure(wire, times=3)
    assert found.hosts == 2
    assert found.workers == 4
    assert found.rate == pytest.approx(20e6, rel=1e-3)  # the small message has bytes, too
    assert found.latency == pytest.approx((3e-3 - costs.CPU.wait) / 2, rel=0.05)
    text = link.text(found, 25_000_000)
    assert "160 Mbit/s" in text
    assert 'takes "hierarchical"' in text


def test_a_link_that_takes_no_time_is_an_error(monkeypatch):
    times = iter([0.0, 1.0] * 3 + [0.0, 0.5] * 3)  # seconds of the small message, and of the large one
    monkeypatch.setattr(link.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(link, "LONGEST", link.LARGE)
    with pytest.raises(ConfigurationError, match="too fast, or the hosts too busy"):
        link.measure(Wire(1e12, 0.0), times=3)


def test_hosts_of_different_size_are_refused():
    class Uneven(Wire):
        def allgather(self, array, name):
            return Arrived(told(array, [(0, 3), (0, 3), (0, 3), (1, 1)]))

    with pytest.raises(ConfigurationError, match="different numbers of workers"):
        link.measure(Uneven(1e6, 0.0))

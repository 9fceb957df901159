"""``horovod-onebit link``: the same answer on all workers, and what it says."""

import time

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
    """Two hosts of two workers, this one being worker 0: what the others send takes its time."""

    rank, size = 0, 4

    def __init__(self, rate, latency):
        self.rate, self.latency = rate, latency

    def host(self):
        return 0, 2

    def allgather(self, array, name):
        if name == "onebit.hosts":
            return Arrived(told(array, [(0, 2), (0, 2), (1, 2), (1, 2)]))
        return Arrived(np.tile(array, self.size))

    def alltoall(self, array, name):
        received = 2 * 2 * array.nbytes / self.size  # by a host: two workers' parts from each of two others
        time.sleep(self.latency + received / self.rate)
        return Arrived(array)

    def allreduce(self, array, name):
        return Arrived(array)


class Arrived:
    def __init__(self, array):
        self.array = array

    def wait(self):
        return self.array


def test_the_rate_is_what_a_host_receives_in_a_second():
    """Of two workers on the other host, whose parts for both of its own come over the link."""
    found = link.measure(Wire(rate=20e6 * costs.LINE_RATE, latency=3e-3), times=3)
    assert found.hosts == 2
    assert found.workers == 4
    assert found.rate == pytest.approx(20e6, rel=0.2)
    assert found.latency == pytest.approx(1e-3, rel=0.5)  # 1 ms is Horovod's own
    text = link.text(found, 25_000_000)
    assert "160 Mbit/s" in text or f"{8e-6 * found.rate:,.0f} Mbit/s" in text
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

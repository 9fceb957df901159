"""Ranges for a profiler."""

import contextlib

import numpy as np

from horovod_onebit import simulation, stats
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam


class Profiler:
    def __init__(self):
        self.ranges = []

    @contextlib.contextmanager
    def annotate(self, name, domain):
        self.ranges.append((domain, name))
        yield


def test_a_compressed_step_is_marked(monkeypatch):
    profiler = Profiler()
    monkeypatch.setattr(stats, "nvtx", profiler)

    def worker(collectives):
        weights = {"a": np.ones(2000, np.float32)}
        optimizer = NumpyOptimizer(weights, Adam(1e-3), collectives=collectives, warmup_steps=1)
        for _ in range(2):
            optimizer.step({"a": weights["a"]})

    simulation.run(worker, 1)
    assert {name for _, name in profiler.ranges} == {"encode", "exchange", "decode"}
    assert {domain for domain, _ in profiler.ranges} == {"horovod_onebit"}

"""Wrong arguments of the core's public functions: an error that names what was given."""

import contextlib
import re

import numpy as np
import pytest

from horovod_onebit import ConfigurationError, simulation
from horovod_onebit.checkpoints import files
from horovod_onebit.checks import check_version
from horovod_onebit.diagnostics import Collector, Report
from horovod_onebit.feedback import ErrorFeedback
from horovod_onebit.kernels import cpu
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.sgd import SGD

WEIGHTS = {"a": np.zeros((2, 3), np.float32)}
NAN = float("nan")


def optimizer(weights=WEIGHTS, rule=None, **options):
    def worker(collectives):
        return NumpyOptimizer(weights, rule or Adam(1e-3), collectives=collectives, warmup_steps=1, **options)

    return simulation.run(worker, 1)[0]


def feedback(state):
    kept = ErrorFeedback()
    kept.residual("a", 3)
    kept.load_state_dict(state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimizer([1]), "weights is list"),
        (lambda: optimizer({}), "weights is empty"),
        (lambda: optimizer({"a": [1.0]}), "weights['a'] is list"),
        (lambda: optimizer({"a": np.zeros(3)}), "float64"),
        (lambda: optimizer({"a": np.zeros((4, 4), np.float32)[:, :2]}), "C-contiguous"),
        (lambda: optimizer(rule="adam"), "rule='adam'"),
        (lambda: optimizer(kernels="gpu"), "kernels='gpu'"),
        (lambda: optimizer(recipe="fast"), "recipe='fast'"),
        (lambda: optimizer().step({}), "expected one for each of ['a']"),
        (lambda: optimizer().step([1]), "grads is list"),
        (lambda: optimizer().step({"a": WEIGHTS["a"], "b": 1}), "['a', 'b']"),
        (lambda: optimizer().step({"a": WEIGHTS["a"].T}), "has shape (3, 2): expected (2, 3)"),
        (lambda: simulation.run(lambda _: 0, 0), "workers=0"),
        (lambda: simulation.run(lambda _: 0, "2"), "workers='2'"),
        (lambda: simulation.run(lambda _: 0, 3, workers_per_host=2), "do not fill hosts"),
        (lambda: Adam(-1.0), "lr=-1.0"),
        (lambda: Adam(NAN), "lr=nan"),
        (lambda: Adam("x"), "lr='x'"),
        (lambda: Adam(1e-3, beta1=1.0), "beta1=1.0"),
        (lambda: Adam(1.0, beta2=-0.1), "beta2=-0.1"),
        (lambda: Adam(1.0, eps=NAN), "eps=nan"),
        (lambda: SGD(0.1, momentum=-1.0), "momentum=-1.0"),
        (lambda: SGD(float("inf")), "lr=inf"),
        (lambda: SGD(0.1, nesterov=True), "nesterov"),
        (lambda: cpu.set_num_threads(0), "count=0"),
        (lambda: cpu.set_num_threads(True), "count=True"),
        (lambda: feedback([1]), "state is list"),
        (lambda: feedback({"a": np.zeros(2, np.float32)}), "got 2 elements, expected 3"),
        (lambda: feedback({"a": np.zeros(3)}), "float64"),
        (lambda: feedback({"a": np.full(3, NAN, np.float32)}), "NaN or Inf"),
        (lambda: Collector().report(), "no gradients"),
        (lambda: Collector().add(5), "gradients is int"),
        (lambda: Report.load("/nowhere/report.json"), "expected a report"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        call()


def test_a_finished_checkpoint_removes_the_one_before_and_nothing_else(tmp_path):
    mine = ["model.pt", "best.shared.npz", "0123.worker-0001.npz", "notes.txt", "0123456789abcdef.shared.npz.bak"]
    old, key = "0123456789abcdef", "fedcba9876543210"
    for name in mine:
        (tmp_path / name).write_text("")
    for name in (old, key):
        for rank in range(2):
            files.worker_file(tmp_path, name, rank).write_text("")
        (tmp_path / f"{name}.shared.npz").write_text("")
    files.complete(tmp_path, key, 2, 7, {})
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*mine, "latest.json", f"{key}.shared.npz", *(f"{key}.worker-{rank:04d}.npz" for rank in range(2))}
    assert files.history(tmp_path)[0].key == key


@pytest.mark.parametrize(
    ("found", "fits"), [("2.8.0", True), ("2.10.0+cpu", True), ("3.0", True), ("2.7.1+cu126", False), ("1.13", False)]
)
def test_an_older_framework_is_named(found, fits):
    with contextlib.nullcontext() if fits else pytest.raises(ImportError, match=r"needs torch 2\.8 or later; this is"):
        check_version("torch", found)

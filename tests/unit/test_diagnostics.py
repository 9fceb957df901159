"""What the diagnostics say, against runs that do it."""

import functools
import json
import math

import numpy as np
import pytest

from horovod_onebit import PRESETS, ConfigurationError, simulation
from horovod_onebit.diagnostics import Collector, Report
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam
from horovod_onebit.tools.cli import main

f32 = np.float32
SIZE = 4096


def magnitudes(spread, unseen=0.0):
    rng = np.random.default_rng(1)
    scale = 10.0 ** rng.uniform(-spread, 0, SIZE)
    return np.where(rng.random(SIZE) < unseen, 0, scale).astype(f32)


def collect(magnitude, steps=20):
    collector, rng = Collector(), np.random.default_rng(2)
    for _ in range(steps):
        collector.add({"w": (magnitude * rng.standard_normal(SIZE)).reshape(64, 64), "bias": rng.standard_normal(3)})
    return collector.report()


def test_the_figures_of_a_layer():
    layer = collect(np.full(SIZE, 1e-3, f32)).layers[0]
    assert (layer.name, layer.size, layer.unseen) == ("w", SIZE, 0)
    assert layer.mean == pytest.approx(1e-3 * math.sqrt(2 / math.pi), rel=0.02)
    assert layer.median == pytest.approx(1e-3 * 0.6745, rel=0.02)
    assert 1 < layer.spread < 3
    quarter = collect(magnitudes(0, unseen=0.25))
    assert quarter.layers[0].unseen == pytest.approx(0.25, abs=0.03)
    assert quarter.layers[1].blow_up == {"robust": 1.0, "paper": 1.0, "fixed": 1.0}
    assert collect(magnitudes(6)).layers[0].spread > 1e5


@pytest.mark.parametrize(
    ("spread", "unseen", "paper", "fixed"),
    [
        (0, 0, "fine", "fine"),
        (2, 0, "risky", "risky"),
        (8, 0, "diverges", "diverges"),
        (0, 0.1, "diverges", "diverges"),
    ],
)
def test_the_verdict_agrees_with_what_happens(spread, unseen, paper, fixed):
    """Elements not seen yet get their first gradient 10 steps after compression has started."""
    magnitude = magnitudes(spread, unseen)
    report = collect(magnitude)
    assert [report.verdict(name) for name in ("paper", "fixed", "robust")] == [paper, fixed, "fine"]

    def worker(collectives, recipe):
        weights = {"w": np.zeros(SIZE, f32)}
        optimizer = NumpyOptimizer(
            weights, Adam(lr=0.01), collectives=collectives, warmup_steps=20, recipe=PRESETS[recipe]
        )
        rng = np.random.default_rng(collectives.rank)
        full = magnitudes(spread)
        for step in range(120):
            now = magnitude if step < 30 else full
            optimizer.step({"w": now * (weights["w"] - 1 + rng.standard_normal(SIZE, dtype=f32))})
        return np.abs(weights["w"] - 1).max()

    with np.errstate(all="ignore"):
        errors = {n: simulation.run(functools.partial(worker, recipe=n), 2)[0] for n in PRESETS}
    for name, word in (("paper", paper), ("fixed", fixed), ("robust", "fine")):
        diverged = not errors[name] < 10
        assert diverged == (word == "diverges"), (name, errors)


def test_a_saved_report_is_shown(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report = collect(magnitudes(4))
    file, picture = tmp_path / "report.json", tmp_path / "report.svg"
    report.save(file)
    assert Report.load(file) == report
    assert main(["diagnose", str(file), "--plot", str(picture)]) == 0
    output = capsys.readouterr().out
    assert "median |g|" in output
    assert "robust: fine" in output
    assert picture.exists()
    data = json.loads(file.read_text())
    data["layers"][0]["blow_up"] = 3
    for wrong in ("{}", "no json", '{"steps": 1, "layers": [{"name": "w"}]}', json.dumps(data)):
        file.write_text(wrong)
        assert main(["diagnose", str(file)]) == 2
        assert "expected a report" in capsys.readouterr().err
    assert main(["diagnose", str(tmp_path / "none")]) == 2


def test_a_report_without_layers_says_so(tmp_path, capsys):
    collector = Collector()
    collector.add({"w": np.zeros((0, 3), f32)})
    report, file, picture = collector.report(), tmp_path / "report.json", tmp_path / "report.svg"
    report.save(file)
    assert report.text() == "1 steps, and no layer in any of them: there is nothing to report."
    assert main(["diagnose", str(file), "--plot", str(picture)]) == 0
    assert "nothing to report" in capsys.readouterr().out
    assert main(["diagnose", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdicts"] == {}


def test_bad_gradients():
    collector = Collector()
    with pytest.raises(ConfigurationError, match="no gradients yet"):
        collector.report()
    with pytest.raises(ConfigurationError, match="NaN or Inf"):
        collector.add({"w": np.array([1.0, np.nan])})
    collector.add({"w": np.ones(3)})
    with pytest.raises(ConfigurationError, match="4 elements, before 3"):
        collector.add({"w": np.ones(4)})

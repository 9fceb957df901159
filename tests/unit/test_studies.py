"""The studies' parts that are claims about this library."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))

from studies import paraboloid, published, quadratics, report


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_paper_recipe_is_the_published_pseudo_code(workers):
    assert published.difference(workers) < 1e-6


def test_the_error_as_printed_diverges_and_ours_does_not():
    with np.errstate(all="ignore"):
        assert not np.isfinite(paraboloid.as_printed(100, 10)[-1])
    assert paraboloid.descend(published.PRESETS["paper"], 100, 10)[-1] < 1e-6


def test_a_cell_of_the_table_of_quadratics():
    def loss(recipe, spread):
        return quadratics.final_loss(quadratics.Cell("Adam", recipe, spread, 2))

    assert loss("robust", "elements 1e8") < 2 * loss("exact", "elements 1e8")
    assert loss("paper", "elements 1e8") > 1e3
    assert len(list(quadratics.cells())) == len(set(quadratics.cells()))
    assert quadratics.magnitudes("layers 1e8").max() / quadratics.magnitudes("layers 1e8").min() == pytest.approx(1e8)
    assert quadratics.magnitudes("1e4, 5 % cold").min() < 1e-3


def test_numbers_of_the_page():
    assert [report.number(x) for x in (0.0123, 2e6, float("nan"), float("inf"))] == ["0.012", *["diverged"] * 3]
    assert report.table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"

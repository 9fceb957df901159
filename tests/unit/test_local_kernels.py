"""0/1 Adam's formulas: the loops against the reference, and the reference against Adam in float64."""

import numpy as np
import pytest

from horovod_onebit import codecs
from horovod_onebit.kernels import cpu, reference
from horovod_onebit.kernels.reference import Arrays
from horovod_onebit.rules import scalars, zero_one_adam
from tests.unit.test_kernels import Inputs, assert_same, coding, of_adam, scales_of

f32 = np.float32
SYNC = scalars(zero_one_adam.Sync, correction=1.25, eps_inside=0, eps=1e-6, decay=0.99, rates=0.03, common=1)
FORMULAS = [zero_one_adam.displacement, zero_one_adam.scaled_displacement]


def moved(size, **options):
    """What a SYNC looks at: the anchor is the array that others take for the gradient."""
    x = Inputs(size, **options)
    return x, Arrays(None, None, x.variance, x.weight, x.grad)


def encode(kernels, formula, x, arrays, how):
    row, residual = np.zeros(4 + how.codec.size(x.error.size, how.block_size), np.uint8), x.error.copy()
    with np.errstate(all="ignore"):
        kernels.encode(formula, SYNC, arrays, residual, row, 4, how)
    return row, residual


@pytest.mark.parametrize("size", [0, 1, 129, 3000, 70_001])
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("codec", codecs.names())
def test_what_moved_is_encoded_as_by_the_reference(size, formula, codec):
    (x, arrays), how = moved(size), coding(codec=codec)
    assert_same(*(encode(kernels, formula, x, arrays, how) for kernels in (reference, cpu)), size, how)


def test_a_local_step_is_adams_with_a_frozen_second_moment():
    x = Inputs(1000)
    m, v, w = (a.astype(np.float64) for a in (x.momentum, x.variance, x.weight))
    after = 0.9 * m + 0.1 * (x.grad.astype(np.float64) + 0.01 * w)
    update = np.clip(after / (np.sqrt(1.25 * v) + 1e-8), -3, 3)
    reference.move(zero_one_adam.local, of_adam(l2=0.01), x.all())
    np.testing.assert_allclose(x.momentum, after, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x.weight, 0.99 * w - 0.01 * update, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", [reference, cpu])
def test_what_moved_is_sent_or_owed_and_can_be_taken_back(kernels):
    (x, arrays), how = moved(3000), coding()
    row, residual = encode(kernels, FORMULAS[0], x, arrays, how)
    assert np.isfinite(scales_of(row, 3000, how)).all()
    sent = reference.decode_mean(row[None], 4, 3000, how)
    displaced = x.weight - f32(0.99) * x.grad
    sent[x.variance == 0] = displaced[x.variance == 0] = 0  # they rest
    np.testing.assert_allclose(sent + residual, displaced + x.error, rtol=1e-5, atol=1e-4)
    kernels.restore(FORMULAS[0], SYNC, arrays, residual, row, 4, how)
    np.testing.assert_allclose(residual, x.error, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kernels", [reference, cpu])
@pytest.mark.parametrize("formula", FORMULAS)
def test_weights_that_are_no_numbers_are_reported_and_leave_the_error(kernels, formula):
    (x, arrays), how = moved(300), coding()
    x.weight[200] = np.inf
    row, residual = encode(kernels, formula, x, arrays, how)
    np.testing.assert_array_equal(residual[128:256], x.error[128:256])
    assert np.isnan(scales_of(row, 300, how)[1])

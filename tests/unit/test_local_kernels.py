"""0/1 Adam's kernels for CPUs against the reference, and the reference against Adam in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_onebit.kernels import cpu, reference
from horovod_onebit.kernels.reference import num_blocks, num_bytes
from tests.unit.test_kernels import Inputs, spec

f32 = np.float32


def message(size, block_size, workers, seed):
    rng = np.random.default_rng(seed)
    scales = np.abs(rng.standard_normal((workers, num_blocks(size, block_size))).astype(f32))
    return scales, rng.integers(0, 256, (workers, num_bytes(size)), dtype=np.uint8)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(0, 10_000),
    seed=st.integers(0, 10**6),
    workers=st.integers(1, 5),
    update_space=st.booleans(),
    inside=st.booleans(),
    l2=st.sampled_from([0.0, 0.01]),
    rates=st.sampled_from([0.0, 0.03]),
)
def test_every_kernel_is_the_reference(size, seed, workers, update_space, inside, l2, rates):
    s = spec(eps=1e-6, eps_inside_sqrt=inside, l2=l2)
    scales, bits = message(size, s.block_size, workers, seed)
    results = []
    for kernels in (reference, cpu):
        x = Inputs(size, seed)
        m, v, w, anchor = x.momentum, x.variance, x.w, x.grad.copy()
        kernels.local_step(x.grad, m, v, w, s, step_size=0.01, decay=0.99)
        out = np.zeros(num_blocks(size, s.block_size), f32), np.zeros(num_bytes(size), np.uint8)
        variance = None if update_space else v
        assert kernels.encode_moved(w, anchor, variance, x.error, *out, s, decay=0.98)
        sent = x.error.copy()
        kernels.restore_moved(w, anchor, variance, x.error, *out, s, decay=0.98)
        results.append([m.copy(), w.copy(), out[1], sent, x.error, out[0]])
        kernels.apply_gradient(scales, bits, m, v, w, s, update_space=update_space, step_size=0.01, decay=0.99)
        results[-1] += [m.copy(), w.copy()]
        kernels.take_over(scales, bits, m, v, w, anchor, s, update_space=update_space, decay=0.98, rates=rates)
        results[-1] += [m, w]
    for number, (ours, theirs) in enumerate(zip(*results, strict=True)):
        if number in (3, 4, 5):  # what depends on a float64 sum
            np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6 * max(1.0, np.abs(theirs).max(initial=0)))
        else:
            np.testing.assert_array_equal(ours, theirs)


def test_a_local_step_is_adams_with_a_frozen_second_moment():
    x = Inputs(1000)
    m, v, w = (a.astype(np.float64) for a in (x.momentum, x.variance, x.w))
    after = 0.9 * m + 0.1 * (x.grad.astype(np.float64) + 0.01 * w)
    update = np.clip(after / (np.sqrt(1.25 * v) + 1e-8), -3, 3)
    reference.local_step(x.grad, x.momentum, x.variance, x.w, spec(l2=0.01), step_size=0.01, decay=0.99)
    np.testing.assert_allclose(x.momentum, after, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x.w, 0.99 * w - 0.01 * update, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", [reference, cpu])
def test_what_moved_is_sent_or_owed_and_can_be_taken_back(kernels):
    x, s = Inputs(3000), spec()
    anchor, before = x.grad, x.error.copy()
    out = np.zeros(num_blocks(3000, s.block_size), f32), np.zeros(num_bytes(3000), np.uint8)
    assert kernels.encode_moved(x.w, anchor, None, x.error, *out, s, decay=0.99)
    sent = kernels.decode_mean(out[0][None], out[1][None], 3000, s.block_size)
    moved = x.w - f32(0.99) * anchor
    np.testing.assert_allclose(sent + x.error, moved + before, rtol=1e-5, atol=1e-4)
    kernels.restore_moved(x.w, anchor, None, x.error, *out, s, decay=0.99)
    np.testing.assert_allclose(x.error, before, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kernels", [reference, cpu])
def test_weights_that_are_no_numbers_are_reported_and_leave_the_error(kernels):
    x, s = Inputs(300), spec()
    x.w[200] = np.inf
    before, out = x.error.copy(), (np.zeros(num_blocks(300, s.block_size), f32), np.zeros(num_bytes(300), np.uint8))
    assert not kernels.encode_moved(x.w, x.grad, x.variance, x.error, *out, s, decay=1.0)
    block = slice(128, 256)
    np.testing.assert_array_equal(x.error[block], before[block])
    assert np.isnan(out[0][1])

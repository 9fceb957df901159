"""The Numba kernels against the NumPy reference, and the numbers and identities of the 1-bit codec."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_onebit.kernels import cpu, reference
from horovod_onebit.kernels.reference import CHUNK, Spec, num_blocks, num_bytes

f32 = np.float32
LENGTHS = [0, 1, 7, 8, 9, 127, 128, 129, 1023, 1024, 1025, 3000, 200_001]
SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-42, 1e-30, -1e-20, 1e30, -3e38, np.nan, np.inf, -np.inf], f32)
PAPER = np.array([1e-4, 1e-4, -1e-3, -1e-2, -1e-6])


def spec(**changes):
    values = {
        "momentum_factor": 0.9,
        "grad_factor": 0.1,
        "l2": 0.0,
        "eps": 1e-8,
        "eps_inside_sqrt": False,
        "variance_correction": 1.25,
        "clip": 3.0,
        "scale": "guarded",
        "block_size": 128,
    }
    return Spec(**(values | changes))


class Inputs:
    def __init__(self, size, seed=0, special=0.0, variance=True, weight=False):
        rng = np.random.default_rng(seed)
        self.arrays = rng.standard_normal((4, size)).astype(f32) * 10 ** rng.uniform(-3, 3, (4, size)).astype(f32)
        if special:
            where = rng.random((4, size)) < special
            self.arrays[where] = rng.choice(SPECIAL, where.sum())
        self.grad, self.momentum, self.error, w = self.arrays
        self.weight = w if weight else None
        self.variance = (rng.standard_normal(size).astype(f32) ** 2) if variance else None
        self.w = w

    def encode(self, kernels, s):
        error = self.error.copy()
        scales = np.full(num_blocks(error.size, s.block_size), -1, f32)
        bits = np.full(num_bytes(error.size), 0x5A, np.uint8)
        with np.errstate(all="ignore"):
            finite = kernels.encode(self.grad, self.momentum, self.variance, self.weight, error, scales, bits, s)
        return finite, bits, scales, error


def assert_same(a, b):
    assert a[0] == b[0]
    np.testing.assert_array_equal(a[1], b[1])  # bits: exactly
    for x, y in zip(a[2:], b[2:], strict=True):  # floats: to rounding of a float64 sum
        np.testing.assert_allclose(x, y, rtol=2e-7, atol=1e-37)


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("variance", [True, False])
@pytest.mark.parametrize("block_size", [8, 128, 1024, None])
def test_encode_is_the_reference_at_every_length(size, variance, block_size):
    inputs = Inputs(size, variance=variance)
    s = spec(block_size=block_size or max(size, 1))
    assert_same(inputs.encode(reference, s), inputs.encode(cpu, s))


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(0, 700),
    seed=st.integers(0, 10**6),
    special=st.sampled_from([0.0, 0.01, 0.5]),
    variance=st.booleans(),
    weight=st.booleans(),
    scale=st.sampled_from(["rms", "guarded"]),
    block_size=st.sampled_from([8, 16, 128, 1024]),
    inside=st.booleans(),
    clip=st.sampled_from([3.0, math.inf]),
    eps=st.sampled_from([0.0, 1e-8, 1e-3]),
)
def test_encode_is_the_reference(size, seed, special, variance, weight, scale, block_size, inside, clip, eps):
    inputs = Inputs(size, seed, special, variance, weight)
    s = spec(scale=scale, block_size=block_size, eps_inside_sqrt=inside, clip=clip, eps=eps, l2=0.01 if weight else 0.0)
    assert_same(inputs.encode(reference, s), inputs.encode(cpu, s))


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(0, 700),
    workers=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    block_size=st.sampled_from([8, 128, 1024]),
    case=st.sampled_from(["update", "momentum", "plain"]),
)
def test_apply_is_the_reference_on_strided_rows_of_the_wire(size, workers, seed, block_size, case):
    rng = np.random.default_rng(seed)
    blocks, nbytes = num_blocks(size, block_size), num_bytes(size)
    wire = rng.integers(0, 256, (workers, 4 * blocks + nbytes + 5), dtype=np.uint8)
    bits = wire[:, 3 : 3 + nbytes]
    scales = np.abs(rng.standard_normal((workers, blocks + 2)).astype(f32))[:, 1 : blocks + 1]
    results = []
    for kernels in (reference, cpu):
        inputs = Inputs(size, seed, variance=case != "plain")
        arguments = {"step_size": 0.01, "decay": 0.99, "look_back": 0.02 if case == "plain" else 0.0}
        m, w = inputs.momentum, inputs.w
        s = spec(block_size=block_size)
        kernels.apply(scales, bits, m, inputs.variance, w, s, update_space=case == "update", **arguments)
        results.append((m, w, kernels.decode_mean(scales, bits, size, block_size)))
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 500), workers=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_recode_is_the_reference_and_loses_nothing(size, workers, seed):
    rng = np.random.default_rng(seed)
    blocks, nbytes = num_blocks(size, 16), num_bytes(size)
    scales = np.abs(rng.standard_normal((workers, blocks))).astype(f32)
    bits = rng.integers(0, 256, (workers, nbytes), dtype=np.uint8)
    error = rng.standard_normal(size).astype(f32)
    out = []
    for kernels in (reference, cpu):
        new, s, b = np.zeros(size, f32), np.zeros(blocks, f32), np.zeros(nbytes, np.uint8)
        kernels.recode(scales, bits, error, new, s, b, "guarded", 16)
        out.append((b, s, new))
        mean = kernels.decode_mean(scales, bits, size, 16)
        decoded = kernels.decode_mean(s[None], b[None], size, 16)
        np.testing.assert_allclose(decoded + new, mean + error, atol=1e-6)
    np.testing.assert_array_equal(out[0][0], out[1][0])
    np.testing.assert_allclose(out[0][1], out[1][1], rtol=2e-7)


@pytest.mark.parametrize("kernels", [reference, cpu])
def test_what_is_sent_and_what_is_kept_is_what_there_was(kernels):
    inputs = Inputs(5000, variance=True)
    s = spec()
    _, bits, scales, error = inputs.encode(kernels, s)
    decoded = kernels.decode_mean(scales[None], bits[None], 5000, s.block_size)
    u = reference.contribution(inputs.grad, inputs.momentum, inputs.variance, None, s)
    scale = np.abs(u) + np.abs(inputs.error) + np.abs(decoded)
    assert (np.abs((decoded + error) - (u + inputs.error)) <= 4e-7 * scale).all()


@pytest.mark.parametrize("kernels", [reference, cpu])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["grad", "momentum", "error"])
@pytest.mark.parametrize("variance", [True, False])
def test_a_block_that_is_not_finite_is_left_alone_and_reported(kernels, bad, where, variance):
    inputs = Inputs(1000, variance=variance)
    before = inputs.error.copy()
    getattr(inputs, where)[300] = bad
    finite, _, scales, error = inputs.encode(kernels, spec())
    assert not finite
    assert np.flatnonzero(np.isnan(scales)).tolist() == [300 // 128]
    if where != "error":
        np.testing.assert_array_equal(error[256:384], before[256:384])


@pytest.mark.parametrize("kernels", [reference, cpu])
def test_restore_undoes_encode(kernels):
    inputs = Inputs(5000, variance=True, weight=True)
    inputs.grad[777] = np.nan
    s = spec(l2=0.01)
    _, bits, scales, error = inputs.encode(kernels, s)
    kernels.restore(inputs.grad, inputs.momentum, inputs.variance, inputs.weight, error, scales, bits, s)
    block = slice(777 // 128 * 128, 777 // 128 * 128 + 128)
    np.testing.assert_array_equal(error[block], inputs.error[block])
    u = reference.contribution(inputs.grad, inputs.momentum, inputs.variance, inputs.weight, s)
    rms = np.repeat(np.nan_to_num(scales), 128)[:5000]
    assert (np.abs(error - inputs.error) <= 4e-7 * (np.nan_to_num(np.abs(u)) + np.abs(inputs.error) + rms)).all()


def layer(kernels, inputs, s):
    """Sums of squares before, and the weights after a step of LAMB's."""
    sums = np.empty((num_blocks(inputs.w.size, CHUNK), 2))
    weight, arrays = inputs.w.copy(), (inputs.momentum, inputs.variance)
    with np.errstate(all="ignore"):
        kernels.squares(*arrays, weight, sums, s)
        kernels.move(*arrays, weight, s, step_size=0.02, decay=0.99)
    return sums, weight


@pytest.mark.parametrize("size", [*LENGTHS, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("inside", [0.0, 0.01])
@pytest.mark.parametrize("special", [0.0, 0.01])
def test_a_step_of_a_layer_is_the_reference(size, inside, special):
    inputs = Inputs(size, seed=size, special=special)
    (expected, after), (sums, weight) = (
        layer(kernels, inputs, spec(eps=1e-6, momentum_factor=1.5, l2=inside)) for kernels in (reference, cpu)
    )
    np.testing.assert_allclose(sums, expected, rtol=1e-12)
    np.testing.assert_array_equal(weight, after)


def test_the_sums_of_a_layer_do_not_depend_on_threads():
    inputs, results = Inputs(200_001), []
    try:
        for count in (1, 2, 3):
            cpu.set_num_threads(count)
            results.append(layer(cpu, inputs, spec(momentum_factor=1.0, l2=0.1)))
    finally:
        cpu.set_num_threads(2)
    for result in results[1:]:
        for ours, theirs in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_the_number_of_threads_does_not_matter():
    inputs = Inputs(300_000)
    try:
        cpu.set_num_threads(1)
        one = inputs.encode(cpu, spec())
        cpu.set_num_threads(3)
        three = inputs.encode(cpu, spec())
    finally:
        cpu.set_num_threads(2)
    for a, b in zip(one[1:], three[1:], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kernels", [reference, cpu])
def test_a_block_of_zeros_moves_nothing(kernels):
    zeros = np.zeros(64, f32)
    error, scales, bits = zeros.copy(), np.ones(1, f32), np.ones(8, np.uint8)
    assert kernels.encode(zeros, zeros, zeros, None, error, scales, bits, spec(block_size=64, eps=0.0))
    assert scales[0] == 0
    assert not bits.any()
    assert not error.any()


def test_the_papers_five_numbers():
    assert np.linalg.norm(PAPER) == pytest.approx(0.010050870658803644, rel=1e-15)
    assert np.abs(PAPER).sum() == pytest.approx(0.011201, rel=1e-15)
    expected = {
        "rms": (0.004494886005228608, 1.003222774773767),
        "guarded": (0.0033603, 0.813706593113180),
    }
    for name, (scale, relative) in expected.items():
        s = reference.scale_of(PAPER, name)
        assert s == pytest.approx(scale, rel=1e-7)
        decoded = np.where(PAPER < 0, -scale, scale)
        assert np.sum((PAPER - decoded) ** 2) / np.sum(PAPER**2) == pytest.approx(relative, rel=1e-12)
    assert np.unpackbits(reference.pack_signs(PAPER), bitorder="little")[:5].tolist() == [0, 0, 1, 1, 1]


def test_one_shot_errors_on_gaussian_numbers():
    x = np.random.default_rng(0).standard_normal(2_000_000)
    expected = 2 * (1 - math.sqrt(2 / math.pi))
    for name in ("rms", "guarded"):  # the guard leaves them alone
        s = float(reference.scale_of(x, name))
        assert np.mean((x - np.where(x < 0, -s, s)) ** 2) == pytest.approx(expected, abs=2e-3)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 64), tail=st.floats(0, 6))
def test_guarded_always_contracts(seed, size, tail):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(size) * 10 ** rng.uniform(0, tail, size)).astype(f32)
    s = float(reference.scale_of(x, "guarded"))
    wide = x.astype(np.float64)
    assert np.linalg.norm(wide - np.where(x < 0, -s, s)) < np.linalg.norm(wide)


def test_one_element_with_rms_is_lossless():
    inputs = Inputs(1, variance=False)
    inputs.error[:] = 0
    _, bits, scales, error = inputs.encode(cpu, spec(scale="rms", block_size=8))
    assert error[0] == 0
    m = f32(0.9) * inputs.momentum + f32(0.1) * inputs.grad
    np.testing.assert_array_equal(cpu.decode_mean(scales[None], bits[None], 1, 8), m)


@pytest.mark.parametrize("update_space", [False, True])
def test_the_sum_of_what_was_sent_telescopes(update_space):
    """MATH: m_t = beta m_{t-1} + (1 - beta) mean g + e_{t-1} - e_t, in float64, in the space that is compressed."""
    rng = np.random.default_rng(1)
    size, workers, beta = 200, 2, float(f32(0.9))
    variance = rng.random(size) + 0.5 if update_space else None
    s = spec(momentum_factor=beta, grad_factor=1 - beta, block_size=16, clip=math.inf, variance_correction=1.0)
    d = 1.0 if variance is None else reference.denominator(variance, s)
    momentum = rng.standard_normal(size)
    errors = np.zeros((workers, size))
    for _ in range(150):
        grads = rng.standard_normal((workers, size))
        scales = np.zeros((workers, num_blocks(size, 16)))
        bits = np.zeros((workers, num_bytes(size)), np.uint8)
        before = errors.mean(0)
        for i in range(workers):
            reference.encode(grads[i], momentum, variance, None, errors[i], scales[i], bits[i], s)
        mean = sum(
            reference.unpack_signs(bits[i], size).astype(float) * reference.per_element(scales[i], size, 16)
            for i in range(workers)
        ) / float(workers)
        exact = (float(f32(beta)) * momentum + float(f32(1 - beta)) * grads.mean(0)) / d
        assert np.abs(mean - (exact + before - errors.mean(0))).max() < 1e-12
        momentum = mean * d


def test_the_distance_to_uncompressed_momentum_is_what_is_owed():
    """MATH: q = m - uncompressed m, h_t = b h_{t-1} + (1 - b) E_{t-1}: sum q = -E_T - b / (1 - b) h_T."""
    rng = np.random.default_rng(2)
    size, workers, beta = 120, 4, float(f32(0.9))
    s = spec(momentum_factor=beta, grad_factor=1 - beta, block_size=8, scale="rms")
    one_minus_beta = float(f32(1 - beta))
    momentum, exact, total, h = (np.zeros(size) for _ in range(4))
    errors = np.zeros((workers, size))
    for _ in range(120):
        grads = rng.standard_normal((workers, size))
        h = beta * h + one_minus_beta * errors.mean(0)
        scales, bits = np.zeros((workers, size // 8)), np.zeros((workers, num_bytes(size)), np.uint8)
        for i in range(workers):
            reference.encode(grads[i], momentum, None, None, errors[i], scales[i], bits[i], s)
        signs = [reference.unpack_signs(b, size).astype(float) for b in bits]
        momentum = sum(x * reference.per_element(y, size, 8) for x, y in zip(signs, scales, strict=True)) / workers
        exact = beta * exact + one_minus_beta * grads.mean(0)
        total += momentum - exact
    expected = -errors.mean(0) - beta / (1 - beta) * h
    # beta and 1 - beta are rounded to float32 one by one, so their sum is 1 to 1e-7 only.
    assert np.abs(total - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_short_tensor_is_not_padded():
    x = np.arange(1, 11, dtype=f32)
    zeros = np.zeros(10, f32)
    for kernels in (reference, cpu):
        error, scales, bits = zeros.copy(), np.zeros(1, f32), np.zeros(2, np.uint8)
        s = spec(momentum_factor=0.0, grad_factor=1.0, scale="rms", block_size=512)
        kernels.encode(x, zeros, None, None, error, scales, bits, s)
        assert scales[0] == f32(math.sqrt(38.5))
        assert np.sum(error**2) / np.sum(x**2) < 0.56

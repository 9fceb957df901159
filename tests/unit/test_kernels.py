"""The Numba loops against the NumPy reference, and the numbers and identities of the codecs."""

import math
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_onebit import codecs
from horovod_onebit.codecs import GUARD, NO_GUARD
from horovod_onebit.feedback import ErrorFeedback
from horovod_onebit.formulas import alive, of_innovation
from horovod_onebit.kernels import cpu, reference
from horovod_onebit.kernels.reference import CHUNK, Arrays, Coding, num_blocks
from horovod_onebit.rules import adam, frozen, gradient, lamb, lion, scalars, sgd, zero_one_adam

f32 = np.float32
LENGTHS = [0, 1, 7, 8, 9, 127, 128, 129, 1023, 1024, 1025, 3000, 200_001]
SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-42, 1e-30, -1e-20, 1e30, -3e38, np.nan, np.inf, -np.inf], f32)
PAPER = np.array([1e-4, 1e-4, -1e-3, -1e-2, -1e-6])
SIGN = codecs.find("sign")
BOUNDS = {"rms": NO_GUARD, "guarded": GUARD}


def coding(block_size=128, codec="sign", scale="guarded"):
    return Coding(codecs.find(codec), block_size, BOUNDS[scale])


def of_adam(**changes):
    values = {"beta1": 0.9, "grad": 0.1, "l2": 0.0, "correction": 1.25, "eps_inside": 0.0, "eps": 1e-8, "clip": 3.0,
              "decay": 0.99, "step": 0.01}  # fmt: skip
    return scalars(adam.Scalars, **(values | changes))


FORMULAS = {(True, True): adam.update_l2, (True, False): adam.update, (False, True): adam.momentum_l2,
            (False, False): adam.momentum}  # fmt: skip
"""By whether there is a second moment, and whether weights decay into the gradient."""


class Inputs:
    def __init__(self, size, seed=0, special=0.0, variance=True, weight=False):
        rng = np.random.default_rng(seed)
        self.arrays = rng.standard_normal((4, size)).astype(f32) * 10 ** rng.uniform(-3, 3, (4, size)).astype(f32)
        if special:
            where = rng.random((4, size)) < special
            self.arrays[where] = rng.choice(SPECIAL, where.sum())
        self.grad, self.momentum, self.error, self.weight = self.arrays
        self.variance = rng.standard_normal(size).astype(f32) ** 2
        self.variance[rng.random(size) < 0.2] = 0  # of elements that rest
        self.formula = FORMULAS[variance, weight]

    def all(self):
        return Arrays(self.grad, self.momentum, self.variance, self.weight, self.error)

    def encode(self, kernels, p, how):
        residual, row = self.error.copy(), np.full(4 + how.codec.size(self.error.size, how.block_size), 0x5A, np.uint8)
        row[4:] = 0
        with np.errstate(all="ignore"):
            kernels.encode(self.formula, p, self.all(), residual, row, 4, how)
        assert (row[:4] == 0x5A).all()
        return row, residual

    def contribution(self, p):
        return reference.contribution(self.formula, p, self.all())


def scales_of(row, size, how, at=4):
    words = row[at:].view(f32)
    return words[:: how.codec.record_size(how.block_size) // 4][: num_blocks(size, how.block_size)]


def codes_of(row, how, at=4):
    """All but the scales."""
    codes = row[at:].copy()
    codes.view(f32)[:: how.codec.record_size(how.block_size) // 4] = 0
    return codes


def random_rows(rng, workers, size, how, extra=0):
    """Messages of several workers with anything in them, but for scales that are numbers."""
    rows = rng.integers(0, 256, (workers, extra + how.codec.size(size, how.block_size)), dtype=np.uint8)
    for row in rows:
        scales_of(row, size, how, extra)[:] = np.abs(rng.standard_normal(num_blocks(size, how.block_size)))
    return rows


def assert_same(a, b, size, how):
    np.testing.assert_array_equal(codes_of(a[0], how), codes_of(b[0], how))  # exactly
    # Floats to rounding of a float64 sum.
    np.testing.assert_allclose(scales_of(a[0], size, how), scales_of(b[0], size, how), rtol=2e-7, atol=1e-37)
    np.testing.assert_allclose(a[1], b[1], rtol=2e-7, atol=1e-37)


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("variance", [True, False])
@pytest.mark.parametrize("block_size", [8, 128, 1024, None])
@pytest.mark.parametrize("codec", codecs.names())
def test_encode_is_the_reference_at_every_length(size, variance, block_size, codec):
    inputs, how = Inputs(size, variance=variance), coding(block_size or max(size, 1), codec)
    assert_same(inputs.encode(reference, of_adam(), how), inputs.encode(cpu, of_adam(), how), size, how)


@settings(max_examples=200, deadline=None)
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
    codec=st.sampled_from(codecs.names()),
)
def test_encode_is_the_reference(size, seed, special, variance, weight, scale, block_size, inside, clip, eps, codec):
    inputs, how = Inputs(size, seed, special, variance, weight), coding(block_size, codec, scale)
    epsilons = {"eps_inside": eps if inside else 0.0, "eps": 0.0 if inside else eps}
    p = of_adam(clip=clip, l2=0.01 if weight else 0.0, **epsilons)
    assert_same(inputs.encode(reference, p, how), inputs.encode(cpu, p, how), size, how)


SYNC = scalars(zero_one_adam.Sync, correction=1.25, eps_inside=0, eps=1e-6, decay=0.9, rates=0.03, common=1)
SYNC_OF_NOTHING = scalars(zero_one_adam.Sync, correction=1, eps_inside=1e-6, eps=0, decay=1, rates=0, common=1)
MOTIONS = {
    "update": (adam.move_by_update, of_adam()),
    "momentum": (adam.move_by_momentum, of_adam()),
    "sgd": (sgd.move, scalars(sgd.Scalars, momentum=0.9, grad=1, l2=0, decay=0.99, look_back=0.02, step=0.01)),
    "lion": (lion.move, scalars(lion.Scalars, beta1=0.9, grad=0.1, keep=0.9, take=0.1, decay=0.99, step=0.01)),
    "gradient": (zero_one_adam.move_by_scaled_gradient, of_adam()),
    "sync": (zero_one_adam.take_over, SYNC),
    "sync of nothing": (zero_one_adam.take_over_scaled, SYNC_OF_NOTHING),
    "frozen": (frozen.take_over, SYNC),
    "frozen, no step": (frozen.take_over, SYNC_OF_NOTHING),
    "lamb": (lamb.take_over_update, of_adam()),
    "new update": (of_innovation(adam.move_by_update, adam.kept_update), of_adam()),
    "new momentum of lamb": (of_innovation(lamb.take_over_momentum, adam.kept_momentum), of_adam()),
}


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(0, 700),
    workers=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    block_size=st.sampled_from([8, 128, 1024]),
    case=st.sampled_from(sorted(MOTIONS)),
    codec=st.sampled_from(codecs.names()),
    at=st.sampled_from([0, 32]),
)
def test_apply_is_the_reference(size, workers, seed, block_size, case, codec, at):
    how, (formula, p) = coding(block_size, codec), MOTIONS[case]
    rows, results = random_rows(np.random.default_rng(seed), workers, size, how, at), []
    for kernels in (reference, cpu):
        inputs = Inputs(size, seed)
        before = inputs.variance.copy(), inputs.grad.copy(), inputs.error.copy()
        kernels.apply(formula, p, inputs.all()._replace(gradient=None), rows, at, how)
        for array, old in zip((inputs.variance, inputs.grad, inputs.error), before, strict=True):
            np.testing.assert_array_equal(array, old)
        results.append((inputs.momentum, inputs.weight))
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 700),
    seed=st.integers(0, 10**6),
    block_size=st.sampled_from([8, 128, 1024]),
    case=st.sampled_from(sorted(MOTIONS)),
    kernels=st.sampled_from([reference, cpu]),
)
def test_apply_from_arrays_that_stay_as_they_are(size, seed, block_size, case, kernels):
    how, (formula, p) = coding(block_size, "sign"), MOTIONS[case]
    rows = random_rows(np.random.default_rng(seed), 2, size, how, 0)
    inputs, new = (Inputs(size, seed) for _ in range(2))
    before = inputs.all()._replace(gradient=None)
    for array in (before.momentum, before.weight):
        array.flags.writeable = False
    new.momentum[:], new.weight[:] = np.nan, np.nan
    after = before._replace(momentum=new.momentum, weight=new.weight)
    kernels.apply(formula, p, after, rows, 0, how, before)
    there = Inputs(size, seed)
    kernels.apply(formula, p, there.all()._replace(gradient=None), rows, 0, how)
    np.testing.assert_array_equal(new.momentum, there.momentum)
    np.testing.assert_array_equal(new.weight, there.weight)


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(1, 500),
    workers=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    codec=st.sampled_from(codecs.names()),
    again=st.sampled_from(codecs.names()),
    resting=st.sampled_from([None, 0.0, 0.1, 0.9]),
)
def test_recode_is_the_reference_and_loses_nothing(size, workers, seed, codec, again, resting):
    """But of elements that rest, of which nothing is kept."""
    rng, how, then = np.random.default_rng(seed), coding(16, codec), coding(16, again)
    rows, error, out = random_rows(rng, workers, size, how), rng.standard_normal(size).astype(f32), []
    variance = None if resting is None else (rng.random(size) >= resting).astype(f32)
    moves = np.ones(size, bool) if variance is None else variance > 0
    for kernels in (reference, cpu):
        new, row = np.zeros(size, f32), np.zeros(4 + then.codec.size(size, 16), np.uint8)
        kernels.recode(rows, 0, how, error, new, row, 4, then, variance)
        out.append((row, new))
        mean, decoded = reference.decode_mean(rows, 0, size, how), reference.decode_mean(row[None], 4, size, then)
        np.testing.assert_allclose((decoded + new)[moves], (mean + error)[moves], atol=1e-6)
        assert not new[~moves].any()
    assert_same(*out, size, then)


@pytest.mark.parametrize("kernels", [reference, cpu])
@pytest.mark.parametrize("codec", codecs.names())
@pytest.mark.parametrize("share", [0.5, 0.1, 0.0])
def test_scales_are_those_of_the_elements_that_move(kernels, codec, share):
    """What is sent of these is what would be without the others."""
    size, how = 512, coding(512, codec)
    rng = np.random.default_rng(1)
    moves = rng.random(size) < share
    whole, few = Inputs(size), Inputs(int(moves.sum()))
    whole.variance[:] = moves
    for name in ("grad", "momentum", "error", "variance"):
        getattr(few, name)[:] = getattr(whole, name)[moves]
    (row, _), (row_of_few, _) = whole.encode(kernels, of_adam(), how), few.encode(kernels, of_adam(), how)
    if share:
        np.testing.assert_allclose(scales_of(row, size, how), scales_of(row_of_few, few.grad.size, how), rtol=1e-6)
    else:
        np.testing.assert_array_equal(scales_of(row, size, how), [0])

    def decoded(row, size, variance):
        """By the workers, and by a server that sends it again."""
        new, again = np.zeros(size, f32), np.zeros(4 + how.codec.size(size, 512), np.uint8)
        kernels.recode(row[None], 4, how, np.zeros(size, f32), new, again, 4, how, variance)
        return [reference.decode_mean(sent[None], 4, size, how) for sent in (row, again)]

    both = zip(decoded(row, size, whole.variance), decoded(row_of_few, few.grad.size, None), strict=True)
    for of_whole, of_few in both:
        np.testing.assert_allclose(of_whole[moves], of_few, rtol=1e-6)


@pytest.mark.parametrize("kernels", [reference, cpu])
@pytest.mark.parametrize("codec", codecs.names())
def test_what_is_sent_and_what_is_kept_is_what_there_was(kernels, codec):
    inputs, how = Inputs(5000), coding(codec=codec)
    row, error = inputs.encode(kernels, of_adam(), how)
    decoded, u = reference.decode_mean(row[None], 4, 5000, how), inputs.contribution(of_adam())
    decoded[inputs.variance == 0] = 0  # they rest
    scale = np.abs(u) + np.abs(inputs.error) + np.abs(decoded)
    assert (np.abs((decoded + error) - (u + inputs.error)) <= 4e-7 * scale).all()


@pytest.mark.parametrize("kernels", [reference, cpu])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["grad", "momentum", "error"])
@pytest.mark.parametrize("variance", [True, False])
def test_a_block_that_is_not_finite_is_left_alone_and_reported(kernels, bad, where, variance):
    inputs, how = Inputs(1000, variance=variance), coding()
    before = inputs.error.copy()
    getattr(inputs, where)[300] = bad
    row, error = inputs.encode(kernels, of_adam(), how)
    assert np.flatnonzero(np.isnan(scales_of(row, 1000, how))).tolist() == [300 // 128]
    if where != "error":
        np.testing.assert_array_equal(error[256:384], before[256:384])


@pytest.mark.parametrize("codec", codecs.names())
def test_a_block_that_is_not_finite_has_no_values(codec):
    kind = codecs.find(codec)
    codes = np.arange(2**kind.bits, dtype=np.uint32)
    assert np.isnan(kind.value(codes, np.float32(np.nan))).all()


@pytest.mark.parametrize("kernels", [reference, cpu])
@pytest.mark.parametrize("codec", codecs.names())
def test_restore_undoes_encode(kernels, codec):
    inputs, how = Inputs(5000, weight=True), coding(codec=codec)
    inputs.grad[777] = np.nan
    p = of_adam(l2=0.01)
    row, error = inputs.encode(kernels, p, how)
    kernels.restore(inputs.formula, p, inputs.all(), error, row, 4, how)
    block = slice(777 // 128 * 128, 777 // 128 * 128 + 128)
    np.testing.assert_array_equal(error[block], inputs.error[block])
    u, rms = inputs.contribution(p), np.repeat(np.nan_to_num(scales_of(row, 5000, how)), 128)[:5000]
    assert (np.abs(error - inputs.error) <= 4e-7 * (np.nan_to_num(np.abs(u)) + np.abs(inputs.error) + rms)).all()


GRADIENT = scalars(
    gradient.Scalars, correction=1.5, floor=0, start=0.01, keep=0.999, take=0.001, then_correction=1.4, then_floor=0,
    then_start=0.01, most=32,
)  # fmt: skip


@pytest.mark.parametrize("size", [9, 1025, 200_001])
@pytest.mark.parametrize("special", [0.0, 0.01])
@pytest.mark.parametrize("codec", ["logistic_two", "logistic_three", "logistic_four"])
def test_what_forgets_keeps_nothing_but_what_rests(size, special, codec):
    """As in the reference; and undone bit for bit but for what rests."""
    inputs, how = Inputs(size, special=special), coding(256, codec, "rms")
    inputs.variance += f32(1e-3) * (inputs.variance > 0)  # not too small for the codes to be equal
    inputs.formula = gradient.contribute_only
    found = [inputs.encode(kernels, GRADIENT, how) for kernels in (reference, cpu)]
    assert_same(*found, size, how)
    moves = alive(inputs.variance)
    for kernels, (row, residual) in zip((reference, cpu), found, strict=True):
        np.testing.assert_array_equal(residual[moves], inputs.error[moves])
        whole = inputs.contribution(GRADIENT) + inputs.error
        finite = np.repeat(np.isfinite(scales_of(row, size, how)), 256)[:size]
        np.testing.assert_array_equal(residual, np.where(moves | ~finite, inputs.error, whole))
        kernels.restore(inputs.formula, GRADIENT, inputs.all(), residual, row, 4, how)
        np.testing.assert_array_equal(residual[moves], inputs.error[moves])
        off = np.abs(residual[~moves & finite] - inputs.error[~moves & finite])
        assert (off <= 4e-7 * np.abs(whole[~moves & finite]) + 1e-37).all()


EXACT = {
    "adam": (
        adam.exact,
        scalars(
            adam.Exact, grad=1, l2=0.01, take1=0.1, keep2=0.99, take2=0.01, root=0.5, eps=1e-8, decay=0.9, step=0.1
        ),
    ),
    "sgd": (
        sgd.exact,
        scalars(sgd.Exact, grad=1, l2=0.01, momentum=0.9, take=1, ahead_g=1, ahead_m=0.9, decay=1, step=0.1),
    ),
    "sgd without momentum": (
        sgd.exact_without_momentum,
        scalars(sgd.Exact, grad=1, l2=0.01, momentum=0, take=1, ahead_g=0, ahead_m=1, decay=1, step=0.1),
    ),
    "lion": (lion.exact, scalars(lion.Scalars, beta1=0.9, grad=0.1, keep=0.99, take=0.01, decay=0.99, step=0.01)),
    "lamb": (
        lamb.exact_moments,
        scalars(adam.Exact, grad=1, l2=0, take1=0.1, keep2=0.99, take2=0.01, root=0.5, eps=1e-8, decay=0.9, step=0.1),
    ),
    "local": (zero_one_adam.local, of_adam(l2=0.01)),
}


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.parametrize("size", [0, 1, 1025, 200_001])
@pytest.mark.parametrize("special", [0.0, 0.01])
def test_move_is_the_reference(case, size, special):
    (formula, p), results = EXACT[case], []
    for kernels in (reference, cpu):
        inputs = Inputs(size, 3, special)
        with np.errstate(all="ignore"):
            kernels.move(formula, p, inputs.all())
        results.append((*inputs.arrays, inputs.variance))
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)


def layer(kernels, inputs, inside):
    """Sums of squares before, and the weights after a step of LAMB's."""
    sums, step = np.empty((num_blocks(inputs.weight.size, CHUNK), 2)), inputs.weight.copy()
    arrays = inputs.all()._replace(gradient=None, weight=step)
    p = scalars(lamb.Step, first=1.5, inside=inside, correction=1.25, eps_inside=0, eps=1e-6, decay=0.99, step=0.02)
    with np.errstate(all="ignore"):
        kernels.sums(lamb.lengths, p, arrays, sums)
        kernels.move(lamb.move, p, arrays)
    return sums, step


@pytest.mark.parametrize("size", [*LENGTHS, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("inside", [0.0, 0.01])
@pytest.mark.parametrize("special", [0.0, 0.01])
def test_a_step_of_a_layer_is_the_reference(size, inside, special):
    inputs = Inputs(size, seed=size, special=special)
    (expected, after), (sums, weight) = (layer(kernels, inputs, inside) for kernels in (reference, cpu))
    np.testing.assert_allclose(sums, expected, rtol=1e-12)
    np.testing.assert_array_equal(weight, after)


def test_the_sums_of_a_layer_do_not_depend_on_threads():
    inputs, results = Inputs(200_001), []
    try:
        for count in (1, 2, 3):
            cpu.set_num_threads(count)
            results.append(layer(cpu, inputs, 0.1))
    finally:
        cpu.set_num_threads(2)
    for result in results[1:]:
        for ours, theirs in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_kernels_run_when_the_interpreter_ends():
    program = """
import atexit
import numpy as np
from horovod_onebit.kernels import cpu
cpu.set_num_threads(4)
work = lambda first, last: print(first, last, flush=True)
atexit.register(lambda: cpu._over_blocks(2**20, 1024, work))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert sorted(done.stdout.split("\n")) == ["", "0 256", "256 512", "512 768", "768 1024"], done.stderr


def test_the_number_of_threads_does_not_matter():
    inputs = Inputs(300_000)
    try:
        cpu.set_num_threads(1)
        one = inputs.encode(cpu, of_adam(), coding())
        cpu.set_num_threads(3)
        three = inputs.encode(cpu, of_adam(), coding())
    finally:
        cpu.set_num_threads(2)
    for a, b in zip(one, three, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kernels", [reference, cpu])
@pytest.mark.parametrize("codec", codecs.names())
def test_a_block_of_zeros_moves_nothing(kernels, codec):
    zeros, how = np.zeros(64, f32), coding(64, codec)
    error, row = zeros.copy(), np.ones(how.codec.size(64, 64), np.uint8)
    kernels.encode(adam.update, of_adam(eps=0.0), Arrays(zeros, zeros, zeros, zeros), error, row, 0, how)
    assert scales_of(row, 64, how, 0) == 0
    assert not reference.decode_mean(row[None], 0, 64, how).any()
    assert not error.any()


def scale_of(x, name, codec="sign"):
    return codecs.find(codec).scale(np.abs(x).sum() / x.size, np.square(x).sum() / x.size, BOUNDS[name])


def test_the_papers_five_numbers():
    assert np.linalg.norm(PAPER) == pytest.approx(0.010050870658803644, rel=1e-15)
    assert np.abs(PAPER).sum() == pytest.approx(0.011201, rel=1e-15)
    expected = {"rms": (0.004494886005228608, 1.003222774773767), "guarded": (0.0033603, 0.813706593113180)}
    for name, (scale, relative) in expected.items():
        assert scale_of(PAPER, name) == pytest.approx(scale, rel=1e-7)
        decoded = np.where(PAPER < 0, -scale, scale)
        assert np.sum((PAPER - decoded) ** 2) / np.sum(PAPER**2) == pytest.approx(relative, rel=1e-12)
    assert SIGN.code(PAPER, 1).tolist() == [0, 0, 1, 1, 1]


def test_one_shot_errors_on_gaussian_numbers():
    x, inner, outer = np.random.default_rng(0).standard_normal(2_000_000), 2.2 / 3, 2.2
    # 1 - 2 E|x| q + E q^2, with the inner level q below the middle of the two.
    middle, at_0 = (inner + outer) / 2, math.sqrt(2 / math.pi)
    below, at_middle = math.erf(middle / math.sqrt(2)), at_0 * math.exp(-(middle**2) / 2)
    moment, power = inner * (at_0 - at_middle) + outer * at_middle, inner**2 * below + outer**2 * (1 - below)
    for codec, expected in (("sign", 2 * (1 - at_0)), ("two_bit", 1 - 2 * moment + power)):
        s, kind = scale_of(x, "rms", codec), codecs.find(codec)
        assert np.mean((x - kind.value(kind.code(x, s), s)) ** 2) == pytest.approx(expected, abs=2e-3)
    assert scale_of(x, "rms") / np.abs(x).mean() == pytest.approx(1.2533, abs=1e-3)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 64), tail=st.floats(0, 6), codec=st.sampled_from(codecs.names()))
def test_guarded_scales_always_contract(seed, size, tail, codec):
    rng, kind = np.random.default_rng(seed), codecs.find(codec)
    x = (rng.standard_normal(size) * 10 ** rng.uniform(0, tail, size)).astype(f32).astype(np.float64)
    s = scale_of(x, "guarded", codec)
    assert np.linalg.norm(x - kind.value(kind.code(x, s), s)) < np.linalg.norm(x)


def test_the_nearest_of_two_bits_levels_is_taken():
    kind, x = codecs.find("two_bit"), np.linspace(-5, 5, 4001).astype(f32)
    levels = np.array([-3, -1, 1, 3], f32)
    got = kind.value(kind.code(x, f32(3)), f32(3))
    np.testing.assert_allclose(np.abs(x - got), np.abs(x[:, None] - levels).min(axis=1), atol=1e-6)


def test_one_element_with_rms_is_lossless():
    inputs, how = Inputs(1, variance=False), coding(8, scale="rms")
    inputs.error[:] = 0
    row, error = inputs.encode(cpu, of_adam(), how)
    assert error[0] == 0
    m = f32(0.9) * inputs.momentum + f32(0.1) * inputs.grad
    np.testing.assert_array_equal(reference.decode_mean(row[None], 4, 1, how), m)


@pytest.mark.parametrize("update_space", [False, True])
@pytest.mark.parametrize("codec", codecs.names())
def test_the_sum_of_what_was_sent_telescopes(update_space, codec):
    """m_t = beta m_{t-1} + (1 - beta) mean g + e_{t-1} - e_t, in float64, in the space that is compressed."""
    rng, how = np.random.default_rng(1), coding(16, codec)
    size, workers, beta = 200, 2, float(f32(0.9))
    variance, formula = rng.random(size) + 0.5, adam.update if update_space else adam.momentum
    p = of_adam(beta1=beta, grad=1 - beta, clip=math.inf, correction=1.0)
    d = adam.denominator(p, variance) if update_space else 1.0
    momentum, errors = rng.standard_normal(size), np.zeros((workers, size))
    for _ in range(150):
        grads, mean, before = rng.standard_normal((workers, size)), np.zeros(size), errors.mean(0)
        for i in range(workers):
            row = np.zeros(how.codec.size(size, 16), np.uint8)
            reference.encode(formula, p, Arrays(grads[i], momentum, variance), errors[i], row, 0, how)
            mean += reference.decode_mean(row[None], 0, size, how).astype(float) / workers
        exact = (float(f32(beta)) * momentum + float(f32(1 - beta)) * grads.mean(0)) / d
        assert np.abs(mean - (exact + before - errors.mean(0))).max() < 1e-12
        momentum = mean * d


def test_the_distance_to_uncompressed_momentum_is_what_is_owed():
    """q = m - uncompressed m, h_t = b h_{t-1} + (1 - b) E_{t-1}: sum q = -E_T - b / (1 - b) h_T."""
    rng, how = np.random.default_rng(2), coding(8, scale="rms")
    size, workers, beta = 120, 4, float(f32(0.9))
    p, one_minus_beta = of_adam(beta1=beta, grad=1 - beta), float(f32(1 - beta))
    momentum, exact, total, h = (np.zeros(size) for _ in range(4))
    errors = np.zeros((workers, size))
    for _ in range(120):
        grads = rng.standard_normal((workers, size))
        h = beta * h + one_minus_beta * errors.mean(0)
        sent = np.zeros(size)
        for i in range(workers):
            row = np.zeros(how.codec.size(size, 8), np.uint8)
            reference.encode(adam.momentum, p, Arrays(grads[i], momentum), errors[i], row, 0, how)
            sent += reference.decode_mean(row[None], 0, size, how)
        momentum = sent / workers
        exact = beta * exact + one_minus_beta * grads.mean(0)
        total += momentum - exact
    expected = -errors.mean(0) - beta / (1 - beta) * h
    # beta and 1 - beta are rounded to float32 one by one, so their sum is 1 to 1e-7 only.
    assert np.abs(total - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_short_tensor_is_not_padded():
    x, zeros = np.arange(1, 11, dtype=f32), np.zeros(10, f32)
    for kernels in (reference, cpu):
        how = coding(512)
        error, row = zeros.copy(), np.zeros(how.codec.size(10, 512), np.uint8)
        kernels.encode(adam.momentum, of_adam(beta1=0, grad=1), Arrays(x, zeros), error, row, 0, how)
        assert scales_of(row, 10, how, 0) == f32(np.sqrt(38.5))
        assert np.sum(error**2) / np.sum(x**2) < 0.56


def test_large_zeros_take_memory_only_while_something_is_written_there():
    def taken():
        return mmap.PAGESIZE * int(Path("/proc/self/statm").read_text().split()[1])

    size = 2**21
    np.ones(size, f32)  # memory of this size is reused from now on
    before = taken()
    zeros = reference.zeros(size)
    assert not zeros.any()
    assert taken() - before < size  # a quarter of its bytes
    zeros += 1
    assert taken() - before > 3 * size
    del zeros
    assert taken() - before < size
    feedback = ErrorFeedback()
    feedback.load_state_dict({"w": reference.zeros(size)})
    feedback.reset()
    assert not feedback.residual("w", size).any()
    assert taken() - before < size

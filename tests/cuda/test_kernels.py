"""The CUDA kernels against the NumPy reference: on a GPU, or with NUMBA_ENABLE_CUDASIM=1 in Numba's simulator.

With ONEBIT_PTX, a folder of what they compile to, that is what runs, by ``machine`` on the CPU: in the simulator's
place, or, with ONEBIT_DRIVER, the library of driver.c, in a GPU's.
"""

import math
import os
import warnings

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA kernels need numba-cuda: pip install numba-cuda[cu13]")

from numba import config, cuda

from horovod_onebit import Recipe, codecs, simulation
from horovod_onebit.codecs import GUARD, NO_GUARD
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.formulas import of_innovation
from horovod_onebit.kernels import reference
from horovod_onebit.kernels.reference import CHUNK, Arrays, Coding, num_blocks
from horovod_onebit.layout import TensorSpec, plan
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules import adam, gradient, lamb, scalars, sgd, zero_one_adam
from horovod_onebit.rules.adam import Adam
from tests.one_core import stay_on_one_core

SIMULATED = bool(config.ENABLE_CUDASIM)
if SIMULATED:
    stay_on_one_core()
elif not cuda.is_available():
    pytest.skip("no NVIDIA GPU here", allow_module_level=True)

from horovod_onebit.kernels import cuda as kernels  # noqa: E402

MACHINE = os.environ.get("ONEBIT_PTX")
if MACHINE:
    from tests.cuda import machine

    if SIMULATED:
        machine.install(MACHINE)
    else:
        machine.drive(MACHINE, os.environ["ONEBIT_DRIVER"])

# All of them are run by what is compiled, which is faster.
pytestmark = pytest.mark.cases(2) if SIMULATED and not MACHINE else []

f32 = np.float32
SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-42, 1e-30, -1e-20, 1e30, -3e38, np.nan, np.inf, -np.inf], f32)
# A thread block of the simulator takes a tenth of a second.
SIZES = [1, 9, 131, 200] if SIMULATED else [1, 7, 9, 131, 300, 1023, 1025, 70_001, 5_000_003]
BLOCKS = [16, 64, 2048] if SIMULATED else [8, 64, 1024, 2048, 8192]
if MACHINE:
    SIZES, BLOCKS = [1, 7, 9, 131, 300, 1023, 1025, 9001], [8, 64, 1024, 2048, 8192]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


SIGN, TWO_BIT = codecs.find("sign"), codecs.find("two_bit")


def coding(block_size=64, codec=SIGN, guard=GUARD):
    return Coding(codec, block_size, guard)


def of_adam(**changes):
    values = {"beta1": 0.9, "grad": 0.1, "l2": 0.0, "correction": 1.25, "eps_inside": 0.0, "eps": 1e-8, "clip": 3.0,
              "decay": 0.99, "step": 0.01}  # fmt: skip
    return scalars(adam.Scalars, **(values | changes))


def scales_of(row, size, how, at=0):
    return row[..., at:].view(f32)[..., :: how.codec.record_size(how.block_size) // 4][
        ..., : num_blocks(size, how.block_size)
    ]


def without_scales(row, size, how, at=0):
    codes = row.copy()
    scales_of(codes, size, how, at)[:] = 0
    return codes


def messages(workers, size, how, extra=0, seed=0):
    """Of several workers, with any codes and scales that are numbers."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (workers, extra + how.codec.size(size, how.block_size)), dtype=np.uint8)
    scales = scales_of(rows, size, how, extra)
    scales[:] = np.abs(rng.standard_normal(scales.shape))
    return rows


class Device:
    """Arrays on the device, at an address that is a multiple of 16 bytes plus ``shift`` elements."""

    def __init__(self, shift=0):
        self.shift, self.pairs = shift, []

    def __call__(self, array):
        if array is None:
            return None
        room = np.zeros(array.size + 8, array.dtype)
        if SIMULATED:
            first = -(room.ctypes.data // array.itemsize) % 4 + self.shift
            place = room[first : first + array.size]
            place[:] = array
            return place
        whole = cuda.to_device(room)
        place = whole[self.shift : self.shift + array.size]
        if array.size:
            place.copy_to_device(np.ascontiguousarray(array))
        return place


def host(place):
    return np.array(place) if isinstance(place, np.ndarray) else place.copy_to_host()


def arrays(size, seed=0, special=0.0, count=4):
    rng = np.random.default_rng(seed)
    made = rng.standard_normal((count, size)).astype(f32) * 10 ** rng.uniform(-3, 3, (count, size)).astype(f32)
    where = rng.random((count, size)) < special
    made[where] = rng.choice(SPECIAL, where.sum())
    return [row.copy() for row in made]


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=2e-7, atol=1e-37)


def check_encode(size, how, p=None, formula=adam.update, *, special=0.0, shift=0, seed=0):
    p = p or of_adam()
    grad, momentum, error, weight = arrays(size, seed, special)
    variance = np.abs(arrays(size, seed + 1, count=1)[0])
    variance[np.random.default_rng(seed).random(size) < 0.1] = 0  # of elements that rest
    rows = [np.full(4 + how.codec.size(size, how.block_size), 90, np.uint8) for _ in "ab"]
    expected, given = error.copy(), Arrays(grad, momentum, variance, weight)
    with np.errstate(all="ignore"):
        reference.encode(formula, p, given, expected, rows[0], 4, how)
    put = Device(shift)
    device, residual = Arrays(*map(put, given)), put(error)
    kernels.encode(formula, p, device, residual, rows[1], 4, how)
    assert (rows[1][:4] == 90).all()
    np.testing.assert_array_equal(*(without_scales(row, size, how, 4) for row in rows))
    close(*(scales_of(row, size, how, 4) for row in rows))
    close(host(residual), expected)
    with np.errstate(all="ignore"):
        reference.restore(formula, p, given, expected, rows[0], 4, how)
    kernels.restore(formula, p, device, residual, rows[0], 4, how)
    if not special:
        close(host(residual), expected)
    assert np.isfinite(host(residual)[np.isfinite(error)]).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block_size", BLOCKS)
def test_encode_and_restore_are_the_reference(size, block_size):
    check_encode(size, coding(block_size))


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("block_size", BLOCKS[:2])
def test_two_bits_are_the_reference(size, block_size):
    check_encode(size, coding(block_size, TWO_BIT))


@pytest.mark.parametrize("guard", [GUARD, NO_GUARD])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("formula", [adam.update, adam.update_l2, adam.momentum, adam.momentum_l2])
def test_every_kind_of_encoding(guard, inside, formula):
    p = of_adam(
        eps_inside=1e-8 if inside else 0.0, eps=0.0 if inside else 1e-8, l2=0.01, clip=3.0 if inside else math.inf
    )
    check_encode(131, coding(guard=guard), p, formula, shift=int(inside))


GRADIENT = scalars(
    gradient.Scalars, correction=1.5, floor=0, start=0.01, keep=0.999, take=0.001, then_correction=1.4, then_floor=0,
    then_start=0.01, most=32,
)  # fmt: skip


@pytest.mark.parametrize("codec", ["logistic_two", "logistic_three", "logistic_four"])
@pytest.mark.parametrize("formula", [gradient.contribute, gradient.contribute_only])
@pytest.mark.parametrize("shift", [0, 1])
def test_gradients_in_few_bits_are_the_reference(codec, formula, shift):
    check_encode(300, coding(256, codecs.find(codec), NO_GUARD), GRADIENT, formula, shift=shift)


@pytest.mark.parametrize("special", [0.01, 0.5])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_numbers_that_are_none(special, shift):
    for seed in range(1 if SIMULATED else 20):
        check_encode(300, coding(), of_adam(eps=0.0), special=special, shift=shift, seed=seed)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("shift", [0, 1])
def test_short_gradients_are_read_as_they_are(kind, shift):
    grad, momentum, error = arrays(300, count=3)
    if kind == "float16":
        short = grad.astype(np.float16)
        wide = short.astype(f32)
    else:
        short = (grad.view(np.uint32) >> 16).astype(np.uint16)
        wide = (short.astype(np.uint32) << 16).view(f32)
    how, put, expected = coding(), Device(shift), error.copy()
    rows = [np.zeros(how.codec.size(300, 64), np.uint8) for _ in "ab"]
    reference.encode(adam.momentum, of_adam(), Arrays(wide, momentum), expected, rows[0], 0, how)
    place, residual = put(short), put(error)
    address = place.ctypes.data if SIMULATED else place.__cuda_array_interface__["data"][0]
    given = Arrays(kernels.Buffer(address, 300, kind, place), put(momentum))
    kernels.encode(adam.momentum, of_adam(), given, residual, rows[1], 0, how)
    np.testing.assert_array_equal(*(without_scales(row, 300, how) for row in rows))
    close(host(residual), expected)


MOTIONS = {
    "update": (adam.move_by_update, of_adam()),
    "momentum": (adam.move_by_momentum, of_adam()),
    "new update": (of_innovation(adam.move_by_update, adam.kept_update), of_adam()),
    "plain": (sgd.move, scalars(sgd.Scalars, momentum=0.9, grad=1, l2=0, decay=0.99, look_back=0.02, step=0.01)),
}


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(
    ("case", "codec"), [*((case, SIGN) for case in MOTIONS), ("update", TWO_BIT)], ids=lambda x: getattr(x, "name", x)
)
def test_apply_and_decode_are_the_reference(workers, case, codec):
    how, (formula, p) = coding(codec=codec), MOTIONS[case]
    for size in SIZES[2:]:
        rows = messages(workers, size, how, 32, size)
        momentum, weight, v = arrays(size, size, count=3)
        v, put = np.abs(v), Device(workers % 2)
        before = Arrays(None, put(momentum), put(v), put(weight))
        device = before._replace(momentum=put(np.zeros(size, f32)), weight=put(np.zeros(size, f32)))
        kernels.apply(formula, p, device, rows, 32, how, before)
        np.testing.assert_array_equal(host(before.momentum), momentum)
        np.testing.assert_array_equal(host(before.weight), weight)
        kernels.apply(formula, p, before, rows, 32, how)
        reference.apply(formula, p, Arrays(None, momentum, v, weight), rows, 32, how)
        for moved in (device, before):
            np.testing.assert_array_equal(host(moved.momentum), momentum)
            np.testing.assert_array_equal(host(moved.weight), weight)


@pytest.mark.parametrize("size", [131, CHUNK + 9])
@pytest.mark.parametrize("inside", [0.0, 0.01])
def test_a_step_of_a_layer_is_the_reference(size, inside):
    momentum, variance, weight = arrays(size, 2, count=3)
    p = scalars(lamb.Step, first=1.5, inside=inside, correction=1.25, eps_inside=0, eps=1e-6, decay=0.99, step=0.02)
    put, given = Device(1 if inside else 0), Arrays(None, momentum, np.abs(variance), weight)
    device = Arrays(None, *(put(x) for x in given[1:4]))
    sums, expected = (np.empty((num_blocks(size, CHUNK), 2)) for _ in range(2))
    kernels.sums(lamb.lengths, p, device, sums)
    reference.sums(lamb.lengths, p, given, expected)
    np.testing.assert_allclose(sums, expected, rtol=1e-12)
    kernels.move(lamb.move, p, device)
    reference.move(lamb.move, p, given)
    np.testing.assert_array_equal(host(device.weight), weight)


def test_an_exact_step_is_the_reference():
    p = scalars(adam.Exact, grad=1, l2=0.01, take1=0.1, keep2=0.99, take2=0.01, root=0.5, eps=1e-8, decay=0.9, step=0.1)
    grad, momentum, variance, weight = arrays(SIZES[-1], 9)
    put, given = Device(), Arrays(grad, momentum, np.abs(variance), weight)
    device = Arrays(*(put(x) for x in given[:4]))
    kernels.move(adam.exact, p, device)
    reference.move(adam.exact, p, given)
    for ours, theirs in zip(device[:4], given[:4], strict=True):
        np.testing.assert_array_equal(host(ours), theirs)


@pytest.mark.parametrize("update_space", [True, False])
@pytest.mark.parametrize("inside", [0.0, 0.01])
def test_local_steps_are_the_reference(update_space, inside):
    size, how = SIZES[-1], coding()
    epsilons = {"eps_inside": 1e-6 if inside else 0.0, "eps": 0.0 if inside else 1e-6}
    p, rows = of_adam(l2=inside, **epsilons), messages(3, size, how, seed=3)
    sent, taken, by = (
        (zero_one_adam.displacement, zero_one_adam.take_over, zero_one_adam.move_by_scaled_gradient)
        if update_space
        else (zero_one_adam.scaled_displacement, zero_one_adam.take_over_scaled, zero_one_adam.move_by_gradient)
    )
    grad, momentum, weight, error = arrays(size, 4)
    (variance,) = np.abs(arrays(size, 5, count=1))
    results = []
    for backend, put in ((reference, np.copy), (kernels, Device(int(inside > 0)))):
        g, m, v, w, e, anchor = (put(x) for x in (grad, momentum, variance, weight, error, np.zeros(size, f32)))
        given, row = Arrays(g, m, v, w, anchor), np.zeros(how.codec.size(size, how.block_size), np.uint8)
        backend.copy(w, anchor)
        backend.move(zero_one_adam.local, p, given)
        seen = [host(m), host(w)]
        sync = scalars(zero_one_adam.Sync, correction=1.25, decay=0.98, rates=0, common=1, **epsilons)
        backend.encode(sent, sync, given, e, row, 0, how)
        seen += [without_scales(row, size, how), host(e)]
        backend.restore(sent, sync, given, e, row, 0, how)
        seen.append(host(e))
        backend.apply(by, p, given, rows, 0, how)
        seen += [host(m), host(w)]
        for rates in (0.0, 0.03):
            backend.apply(taken, sync._replace(rates=f32(rates)), given, rows, 0, how)
            seen += [host(m), host(w)]
        results.append([np.array(x) for x in seen])
    for number, (ours, theirs) in enumerate(zip(*results, strict=True)):
        if number in (3, 4):  # the residual depends on a float64 sum
            np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6 * np.abs(theirs).max())
        else:
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("odd", ["gradient", "momentum", "variance", "residual"])
def test_one_tensor_that_is_not_aligned_is_enough(odd):
    grad, momentum, error, _ = arrays(200, 6)
    (variance,) = np.abs(arrays(200, 7, count=1))
    given = {"gradient": grad, "momentum": momentum, "variance": variance, "residual": error}
    placed = {name: Device(int(name == odd))(array) for name, array in given.items()}
    results, how = [], coding()
    for backend, (g, m, v, e) in ((reference, given.values()), (kernels, placed.values())):
        row = np.zeros(how.codec.size(200, 64), np.uint8)
        backend.encode(adam.update, of_adam(), Arrays(g, m, v), e, row, 0, how)
        results.append((without_scales(row, 200, how), host(e)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    close(*(residuals for _, residuals in results))


def test_whole_arrays_are_fetched_and_written():
    (values,) = arrays(131, count=1)
    place = Device()(values)
    buffer = kernels.Buffer(place.ctypes.data if SIMULATED else place.__cuda_array_interface__["data"][0], 131)
    np.testing.assert_array_equal(kernels.host(buffer), values)
    kernels.write(buffer[7:], 2 * values[7:])
    np.testing.assert_array_equal(host(place), np.concatenate([values[:7], 2 * values[7:]]))
    kernels.write(buffer, 0.0)
    assert not host(place).any()


def test_kernels_that_do_not_work_are_found_out(monkeypatch):
    assert kernels.fault() == ""
    if SIMULATED:  # for tests, which need no telling
        return
    monkeypatch.setattr(kernels, "apply", lambda *arguments, **options: None)
    kernels.fault.cache_clear()
    assert "do not compute on this GPU what they should" in kernels.fault()
    monkeypatch.setattr(kernels, "apply", lambda rows: None)
    kernels.fault.cache_clear()
    assert "failed on this GPU: TypeError" in kernels.fault()
    kernels.fault.cache_clear()


@pytest.mark.parametrize("scales", [False, True])
def test_a_message_arrives_later(scales):
    how, put = coding(), Device()
    grad, momentum, error, _ = arrays(300)
    (bucket,) = plan([TensorSpec("x", 300)], Recipe(block_size=64), 2).buckets
    expected, row = error.copy(), np.zeros(32 + bucket.bytes, np.uint8)
    reference.encode(adam.momentum, of_adam(), Arrays(grad, momentum), expected, row, 32, how)
    mirror = kernels.host_mirror(-(-len(row) // 16) * 16, bucket.blocks)
    for _ in range(2):
        residual, given = put(error), Arrays(put(grad), put(momentum))  # which must outlive the batch
        mirror.host[:] = 90
        with kernels.batch():
            kernels.encode(adam.momentum, of_adam(), given, residual, mirror.row, 32, how)
        mirror.fetch(32, bucket, scales=scales)
        assert not (SIMULATED and mirror.arrived())  # a GPU may be done already, or not
        mirror.wait()
        assert mirror.arrived()
        if scales:
            close(mirror.scales, scales_of(row, 300, how, 32))
            assert (mirror.host == 90).all()
            continue
        np.testing.assert_array_equal(*(without_scales(x, 300, how, 32) for x in (mirror.host[: len(row)], row)))
        close(*(scales_of(x, 300, how, 32) for x in (mirror.host[: len(row)], row)))
        assert not mirror.host[:32].any()
        close(host(residual), expected)
    mirror.host[:32] = 7
    mirror.send(32)
    device = np.asarray(mirror.row) if SIMULATED else mirror.array.copy_to_host()
    assert (device[:32] == 7).all()
    np.testing.assert_array_equal(*(without_scales(x[: len(row)], 300, how, 32)[32:] for x in (device, row)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_mean_of_rows_is_the_reference(size, workers, shift):
    rows, expected = np.concatenate(arrays(size, count=workers)), np.zeros(size, np.float32)
    reference.mean(rows, expected)
    out = kernels.zeros(size + shift)
    assert not kernels.host(out).any()
    kernels.mean(Device(shift)(rows), out[shift:])
    np.testing.assert_array_equal(kernels.host(out), np.pad(expected, (shift, 0)))


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_gradients_are_widened(kind):
    grad = arrays(131, count=1)[0]
    short = {"float16": grad.astype(np.float16), "bfloat16": (grad.view(np.uint32) >> 16).astype(np.uint16)}
    put, stored = Device(), short.get(kind, grad)
    place = put(stored)
    address = place.ctypes.data if SIMULATED else place.__cuda_array_interface__["data"][0]
    out = kernels.zeros(140)
    kernels.widen(kernels.Buffer(address, 131, kind, place), out[3:134])
    wide = (stored.astype(np.uint32) << 16).view(f32) if kind == "bfloat16" else stored.astype(np.float32)
    np.testing.assert_array_equal(kernels.host(out), np.pad(wide, (3, 6)))


def test_a_batch_is_one_launch_for_all_tensors():
    how, put = coding(), Device()
    tensors = [arrays(size, size) for size in (131, 9, 64)]
    ours, theirs = [], []
    for backend, results, place in ((reference, theirs, np.copy), (kernels, ours, put)):
        rows = [np.zeros(how.codec.size(len(t[0]), 64), np.uint8) for t in tensors]
        placed = [[place(x) for x in t] for t in tensors]
        with backend.batch():
            for t, row in zip(placed, rows, strict=True):
                backend.encode(adam.momentum, of_adam(), Arrays(t[0], t[1]), t[2], row, 0, how)
            if backend is kernels:
                assert not any(row.any() for row in rows)
        results += rows
    for a, b, tensor in zip(ours, theirs, tensors, strict=True):
        size = len(tensor[0])
        np.testing.assert_array_equal(without_scales(a, size, how), without_scales(b, size, how))
        close(scales_of(a, size, how), scales_of(b, size, how))


def test_an_error_in_a_batch_launches_nothing():
    (grad, momentum, error), how, put = arrays(64, count=3), coding(), Device()
    row, residual = np.zeros(how.codec.size(64, 64), np.uint8), put(error)
    with pytest.raises(KeyError), kernels.batch():  # noqa: PT012
        kernels.encode(adam.momentum, of_adam(), Arrays(put(grad), put(momentum)), residual, row, 0, how)
        raise KeyError
    kernels.encode(adam.momentum, of_adam(), Arrays(put(grad), put(momentum)), put(error), row, 0, how)
    np.testing.assert_array_equal(host(residual), error)


def test_bad_arrays_are_refused():
    put, how = Device(), coding()
    row = np.zeros(how.codec.size(64, 64), np.uint8)
    good, short = put(arrays(64)[0]), put(arrays(32)[0])

    def encode(residual, *given):
        kernels.encode(adam.momentum, of_adam(), Arrays(*given), residual, row, 0, how)

    with pytest.raises(ConfigurationError, match=r"different lengths: .*'residual': 32"):
        encode(short, good, good)
    with pytest.raises(ConfigurationError, match="momentum as float16; expected float32"):
        encode(good, good, kernels.Buffer(16, 64, "float16"))
    with pytest.raises(ConfigurationError, match="got list; expected an array in device memory"):
        encode(good, good, [1.0])
    with pytest.raises(ConfigurationError, match="step 2"):
        kernels.Buffer(0, 8)[::2]


@pytest.mark.skipif(not SIMULATED, reason="NumPy's arrays are on the device in the simulator only")
@pytest.mark.parametrize("exchange", ["direct", "two_stage"])
def test_an_optimizer_is_the_same_with_either_kernels(exchange):
    recipe = Recipe(block_size=64, min_compressed_size=32, exchange=exchange)
    target = np.random.default_rng(0).standard_normal(150).astype(f32)

    def train(kernels):
        def worker(collectives):
            noise, weights = np.random.default_rng(collectives.rank), {"w": np.zeros(150, f32), "b": np.zeros(5, f32)}
            options = {"warmup_steps": 2, "recipe": recipe, "kernels": kernels}
            optimizer = NumpyOptimizer(weights, Adam(lr=0.1), collectives=collectives, **options)
            for step in range(5):
                grads = {"w": weights["w"] - target + noise.standard_normal(150).astype(f32), "b": weights["b"]}
                grads["w"][7] = np.nan if step == 3 and collectives.rank else grads["w"][7]
                assert optimizer.step(grads) == (step != 3)
            return weights["w"]

        return simulation.run(worker, 2)

    ours, theirs = train("cuda"), train("cpu")
    np.testing.assert_array_equal(ours[0], ours[1])
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-6)

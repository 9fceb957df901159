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

from horovod_onebit import Recipe, simulation
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels import reference
from horovod_onebit.kernels.reference import CHUNK, Spec, num_blocks, num_bytes
from horovod_onebit.optimizer import NumpyOptimizer
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


def spec(**changes):
    values = Spec(0.9, 0.1, 0.0, 1e-8, False, 1.25, clip=3.0, scale="guarded", block_size=64)
    return values._replace(**changes)


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


def check_encode(size, s, *, variance=True, weight=False, special=0.0, shift=0, seed=0):
    grad, momentum, error, w = arrays(size, seed, special)
    v = np.abs(arrays(size, seed + 1, count=1)[0]) if variance else None
    w = w if weight else None
    outs = [(np.full(num_blocks(size, s.block_size), -1, f32), np.full(num_bytes(size), 90, np.uint8)) for _ in "ab"]
    expected = error.copy()
    with np.errstate(all="ignore"):
        finite = reference.encode(grad, momentum, v, w, expected, *outs[0], s)
    put = Device(shift)
    device = [put(x) for x in (grad, momentum, v, w, error)]
    assert kernels.encode(*device, *outs[1], s) == finite
    np.testing.assert_array_equal(outs[1][1], outs[0][1])
    close(outs[1][0], outs[0][0])
    close(host(device[4]), expected)
    with np.errstate(all="ignore"):
        reference.restore(grad, momentum, v, w, expected, *outs[0], s)
    kernels.restore(*device, *outs[0], s)
    if not special:
        close(host(device[4]), expected)
    assert np.isfinite(host(device[4])[np.isfinite(error)]).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block_size", BLOCKS)
def test_encode_and_restore_are_the_reference(size, block_size):
    check_encode(size, spec(block_size=block_size))


@pytest.mark.parametrize("scale", ["rms", "guarded"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("variance", "weight"), [(True, False), (False, True), (True, True)])
def test_every_kind_of_encoding(scale, inside, variance, weight):
    s = spec(scale=scale, eps_inside_sqrt=inside, l2=0.01 if weight else 0.0, clip=3.0 if inside else math.inf)
    check_encode(131, s, variance=variance, weight=weight, shift=int(inside))


@pytest.mark.parametrize("special", [0.01, 0.5])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_numbers_that_are_none(special, shift):
    for seed in range(1 if SIMULATED else 20):
        check_encode(300, spec(eps=0.0), special=special, shift=shift, seed=seed)


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
    s, put = spec(), Device(shift)
    outs = [(np.zeros(num_blocks(300, 64), f32), np.zeros(num_bytes(300), np.uint8)) for _ in "ab"]
    expected = error.copy()
    reference.encode(wide, momentum, None, None, expected, *outs[0], s)
    place, device = put(short), [put(momentum), put(error)]
    address = place.ctypes.data if SIMULATED else place.__cuda_array_interface__["data"][0]
    gradient = kernels.Buffer(address, 300, kind, place)
    assert kernels.encode(gradient, device[0], None, None, device[1], *outs[1], s)
    np.testing.assert_array_equal(outs[1][1], outs[0][1])
    close(host(device[1]), expected)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("case", ["update", "momentum", "plain"])
def test_apply_and_decode_are_the_reference(workers, case):
    for size in SIZES[2:]:
        block_size, rng = 64, np.random.default_rng(size)
        wire = rng.integers(0, 256, (workers, num_bytes(size) + 5), dtype=np.uint8)
        bits = wire[:, 3 : 3 + num_bytes(size)]
        scales = np.abs(rng.standard_normal((workers, num_blocks(size, block_size) + 2)).astype(f32))[:, 1:-1]
        momentum, weight, v = arrays(size, size, count=3)
        v = None if case == "plain" else np.abs(v)
        options = {"update_space": case == "update", "step_size": 0.01, "decay": 0.99}
        options["look_back"] = 0.02 if case == "plain" else 0.0
        put = Device(workers % 2)
        device = [put(x) for x in (momentum, v, weight, np.zeros(size, f32))]
        kernels.apply(scales, bits, *device[:3], spec(block_size=block_size), **options)
        kernels.decode_mean(scales, bits, size, block_size, out=device[3])
        np.testing.assert_array_equal(host(device[3]), reference.decode_mean(scales, bits, size, block_size))
        reference.apply(scales, bits, momentum, v, weight, spec(block_size=block_size), **options)
        np.testing.assert_array_equal(host(device[0]), momentum)
        np.testing.assert_array_equal(host(device[2]), weight)


@pytest.mark.parametrize("block_size", BLOCKS)
def test_recode_is_the_reference(block_size):
    size, workers, rng = SIZES[-1], 3, np.random.default_rng(1)
    bits = rng.integers(0, 256, (workers, num_bytes(size)), dtype=np.uint8)
    scales = np.abs(rng.standard_normal((workers, num_blocks(size, block_size))).astype(f32))
    (error,) = arrays(size, count=1)
    results, put = [], Device()
    for recode, array in ((reference.recode, np.copy), (kernels.recode, put)):
        old, new = array(error), array(np.zeros(size, f32))
        out = np.zeros(num_blocks(size, block_size), f32), np.zeros(num_bytes(size), np.uint8)
        recode(scales, bits, old, new, *out, "guarded", block_size)
        results.append((out[1], out[0], host(new) if recode is kernels.recode else new))
    np.testing.assert_array_equal(results[1][0], results[0][0])
    for ours, theirs in zip(results[1][1:], results[0][1:], strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("size", [131, CHUNK + 9])
@pytest.mark.parametrize("inside", [0.0, 0.01])
def test_a_step_of_a_layer_is_the_reference(size, inside):
    momentum, variance, weight = arrays(size, 2, count=3)
    s = spec(eps=1e-6, momentum_factor=1.5, l2=inside)
    variance, put = np.abs(variance), Device(1 if inside else 0)
    device = [put(x) for x in (momentum, variance, weight)]
    sums, expected = (np.empty((num_blocks(size, CHUNK), 2)) for _ in range(2))
    kernels.squares(*device, sums, s)
    reference.squares(momentum, variance, weight, expected, s)
    np.testing.assert_allclose(sums, expected, rtol=1e-12)
    kernels.move(*device, s, step_size=0.02, decay=0.99)
    reference.move(momentum, variance, weight, s, step_size=0.02, decay=0.99)
    np.testing.assert_array_equal(host(device[2]), weight)


@pytest.mark.parametrize("update_space", [True, False])
@pytest.mark.parametrize("inside", [0.0, 0.01])
def test_local_steps_are_the_reference(update_space, inside):
    size, workers, s = SIZES[-1], 3, spec(eps=1e-6, eps_inside_sqrt=inside > 0, l2=inside)
    rng = np.random.default_rng(3)
    scales = np.abs(rng.standard_normal((workers, num_blocks(size, s.block_size))).astype(f32))
    bits = rng.integers(0, 256, (workers, num_bytes(size)), dtype=np.uint8)
    grad, momentum, weight, error = arrays(size, 4)
    (variance,) = np.abs(arrays(size, 5, count=1))
    results = []
    for backend, put in ((reference, np.copy), (kernels, Device(int(inside > 0)))):
        g, m, v, w, e, anchor = (put(x) for x in (grad, momentum, variance, weight, error, np.zeros(size, f32)))
        backend.copy(w, anchor)
        out = np.zeros(num_blocks(size, s.block_size), f32), np.zeros(num_bytes(size), np.uint8)
        backend.local_step(g, m, v, w, s, step_size=0.01, decay=0.99)
        seen = [host(m), host(w)]
        arguments = w, anchor, None if update_space else v, e, *out, s
        assert backend.encode_moved(*arguments, decay=0.98)
        seen += [out[1].copy(), host(e)]
        backend.restore_moved(*arguments, decay=0.98)
        seen.append(host(e))
        options = {"update_space": update_space, "decay": 0.99}
        backend.apply_gradient(scales, bits, m, v, w, s, step_size=0.01, **options)
        seen += [host(m), host(w)]
        for rates in (0.0, 0.03):
            backend.take_over(scales, bits, m, v, w, anchor, s, rates=rates, **options)
            seen += [host(m), host(w)]
        results.append(seen)
    for number, (ours, theirs) in enumerate(zip(*results, strict=True)):
        if number in (3, 4):  # what is owed depends on a float64 sum
            np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6 * np.abs(theirs).max())
        else:
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("odd", ["grad", "momentum", "variance", "error"])
def test_one_tensor_that_is_not_aligned_is_enough(odd):
    grad, momentum, error, _ = arrays(200, 6)
    (variance,) = np.abs(arrays(200, 7, count=1))
    given = {"grad": grad, "momentum": momentum, "variance": variance, "error": error}
    placed = {name: Device(int(name == odd))(array) for name, array in given.items()}
    results = []
    for backend, (g, m, v, e) in ((reference, given.values()), (kernels, placed.values())):
        out = np.zeros(num_blocks(200, 64), f32), np.zeros(num_bytes(200), np.uint8)
        assert backend.encode(g, m, v, None, e, *out, spec())
        results.append((out[1], host(e)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    close(*(owed for _, owed in results))


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
    monkeypatch.setattr(kernels, "apply", lambda scales: None)
    kernels.fault.cache_clear()
    assert "failed on this GPU: TypeError" in kernels.fault()
    kernels.fault.cache_clear()


def test_a_message_arrives_later():
    s, put = spec(), Device()
    grad, momentum, error, _ = arrays(300)
    expected, out = error.copy(), (np.zeros(5, f32), np.zeros(38, np.uint8))
    reference.encode(grad, momentum, None, None, expected, *out, s)
    twin, place = kernels.twin(32 + 20 + 38 + 6), put(error)
    for _ in range(2):
        place = put(error)
        twin.host[:] = 90
        arguments = put(grad), put(momentum), None, None, place
        with kernels.batch():
            kernels.encode(*arguments, twin.part(32, 5, "float32")[0:5], twin.part(52, 38, "uint8")[0:38], s)
        twin.fetch(96)
        assert twin.arrived() != SIMULATED
        twin.wait()
        close(twin.host[32:52].view(f32), out[0])
        np.testing.assert_array_equal(twin.host[52:90], out[1])
        assert not twin.host[:32].any()
        close(host(place), expected)
    twin.host[:32] = 7
    twin.send(32)
    device = np.asarray(twin) if SIMULATED else twin.array.copy_to_host()
    np.testing.assert_array_equal(device[:90], twin.host[:90])


def test_a_batch_is_one_launch_for_all_tensors():
    s, put = spec(), Device()
    tensors = [arrays(size, size) for size in (131, 9, 64)]
    ours, theirs = [], []
    for kernel, results, place in ((reference, theirs, np.copy), (kernels, ours, put)):
        outs = [(np.zeros(num_blocks(len(t[0]), 64), f32), np.zeros(num_bytes(len(t[0])), np.uint8)) for t in tensors]
        placed = [[place(x) for x in t] for t in tensors]
        if kernel is kernels:
            with kernels.batch():
                for t, out in zip(placed, outs, strict=True):
                    kernel.encode(t[0], t[1], None, None, t[2], *out, s)
                assert not any(out[1].any() for out in outs)
        else:
            for t, out in zip(placed, outs, strict=True):
                kernel.encode(t[0], t[1], None, None, t[2], *out, s)
        results += outs
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a[1], b[1])
        close(a[0], b[0])


def test_an_error_in_a_batch_launches_nothing():
    (grad, momentum, error), out = arrays(64, count=3), (np.zeros(1, f32), np.zeros(8, np.uint8))
    put = Device()
    device = [put(x) for x in (grad, momentum, error)]
    with pytest.raises(KeyError), kernels.batch():  # noqa: PT012
        kernels.encode(*device[:2], None, None, device[2], *out, spec())
        raise KeyError
    kernels.encode(*[put(x) for x in (grad, momentum)], None, None, put(error), *out, spec())
    np.testing.assert_array_equal(host(device[2]), error)


def test_bad_arrays_are_refused():
    put, out = Device(), (np.zeros(1, f32), np.zeros(8, np.uint8))
    good, short = put(arrays(64)[0]), put(arrays(32)[0])
    with pytest.raises(ConfigurationError, match=r"different lengths: .*'error': 32"):
        kernels.encode(good, good, None, None, short, *out, spec())
    with pytest.raises(ConfigurationError, match="momentum as float16; expected float32"):
        kernels.encode(good, kernels.Buffer(16, 64, "float16"), None, None, good, *out, spec())
    with pytest.raises(ConfigurationError, match="got list; expected an array in device memory"):
        kernels.encode(good, [1.0], None, None, good, *out, spec())
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

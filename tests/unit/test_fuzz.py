"""Messages that are damaged, and configurations that nobody would write: an error that says so, or a right answer."""

import itertools
import random

import numpy as np
import pytest

from horovod_onebit import ConfigurationError, Recipe, WireError, codecs, wire
from horovod_onebit.kernels import checksum, cpu
from horovod_onebit.kernels.reference import Arrays, Coding, num_blocks
from horovod_onebit.layout import TensorSpec, plan
from horovod_onebit.rules import adam, scalars

WORKERS = 3
RECIPE = Recipe(block_size=64, min_compressed_size=1, bucket_size=500)


def arrived(rng):
    """A bucket, its stamp, and what a gather of good messages gives."""
    layout = plan([TensorSpec("a", 100), TensorSpec("b", 333)], RECIPE, WORKERS)
    bucket, stamp = layout.buckets[0], wire.Stamp(int(rng.integers(1000)), layout.digest)
    rows = []
    for _ in range(WORKERS):
        message = wire.Message(bucket)
        message.buffer[32 : 32 + bucket.bytes] = rng.integers(0, 256, bucket.bytes, dtype=np.uint8)
        message.buffer[32:].view(np.float32)[bucket.scales] = rng.random(bucket.blocks, np.float32)
        rows.append(message.seal(stamp, finite=bool(rng.random() < 0.9)))
    return bucket, stamp, np.concatenate(rows)


def damage(data, rng):
    """Flip bits, overwrite a stretch, cut, lengthen, or replace all."""
    kind = rng.integers(5)
    data = data.copy()
    if kind == 0:
        for where in rng.integers(0, data.size, rng.integers(1, 8)):
            data[where] ^= np.uint8(1 << rng.integers(8))
    elif kind == 1:
        start = rng.integers(data.size)
        part = data[start : start + rng.integers(1, 64)]
        part[:] = rng.integers(0, 256, part.size, dtype=np.uint8)
    elif kind == 2:
        data = data[: rng.integers(data.size)]
    elif kind == 3:
        data = np.concatenate([data, rng.integers(0, 256, rng.integers(1, 200), dtype=np.uint8)])
    else:
        data = rng.integers(0, 256, rng.integers(0, 2 * data.size), dtype=np.uint8)
    return data


def test_a_hundred_thousand_damaged_messages():
    """What is let through is of the right shape, and its scales can be used."""
    rng = np.random.default_rng(0)
    bucket, stamp, good = arrived(rng)
    opened = wire.read(good, bucket, stamp, workers=WORKERS)
    refused = 0
    for _ in range(100_000):
        try:
            found = wire.read(damage(good, rng), bucket, stamp, workers=WORKERS)
        except WireError:
            refused += 1
            continue
        for name in ("rows", "finite"):
            np.testing.assert_array_equal(getattr(found, name), getattr(opened, name))
    assert 99_000 < refused < 100_000


def test_every_flipped_bit_is_noticed():
    """Wherever in the message: header, scales, bits, padding; and wherever the same bit is flipped in two words."""
    bucket, stamp, good = arrived(np.random.default_rng(0))
    for bit in range(8 * good.size):
        data = good.copy()
        data[bit // 8] ^= np.uint8(1 << bit % 8)
        with pytest.raises(WireError, match=rf"worker {bit // 8 * WORKERS // good.size}"):
            wire.read(data, bucket, stamp, workers=WORKERS)
    words = good.view(np.uint32)
    body = [i for i in range(words.size // WORKERS) if i >= 8]
    for first, second in itertools.combinations(body, 2):
        for bit in (0, 15, 30, 31):
            data = words.copy()
            data[[first, second]] ^= np.uint32(1 << bit)
            with pytest.raises(WireError, match="damaged"):
                wire.read(data.view(np.uint8), bucket, stamp, workers=WORKERS)


def test_the_checksum_is_that_of_the_reference():
    rng = np.random.default_rng(0)
    for count, words in (
        (3, 0),
        (3, 1),
        (3, 3),
        (3, 4),
        (3, 7),
        (3, 64),
        (3, 1001),
        (40, 0),
        (40, 7),
        (40, 127),
        (40, 128),
    ):
        rows = rng.integers(0, 256, (count, 4 * words), dtype=np.uint8)
        assert checksum.checksums(rows).tolist() == checksum.reference(rows).tolist()
        if words > 1:
            swapped = rows.view(np.uint32)[:, ::-1].copy().view(np.uint8)
            assert (checksum.checksums(rows) != checksum.checksums(swapped)).all()


def test_any_bits_can_be_decoded():
    rng = np.random.default_rng(1)
    values = {"beta1": 0.9, "grad": 0.1, "l2": 0, "correction": 1, "eps_inside": 0, "eps": 1e-8, "clip": 3}
    p = scalars(adam.Scalars, **values, decay=1, step=0.1)
    for _ in range(200):
        size = int(rng.integers(1, 400))
        coding = Coding(codecs.find(rng.choice(codecs.names())), 64, codecs.GUARD)
        rows = rng.integers(0, 256, (WORKERS, coding.codec.size(size, 64)), dtype=np.uint8)
        scales = np.arange(num_blocks(size, 64)) * coding.codec.record_size(64) // 4
        rows.view(np.float32)[:, scales] = rng.random((WORKERS, len(scales)), np.float32)
        momentum, weight = np.zeros(size, np.float32), np.zeros(size, np.float32)
        variance = np.ones(size, np.float32)
        cpu.apply(adam.move_by_update, p, Arrays(None, momentum, variance, weight), rows, 0, coding)
        assert np.isfinite(weight).all()
        assert np.isfinite(momentum).all()


NUMBERS = [None, True, False, 0, 1, -1, 7, 8, 16, 1024, 2**31, 0.5, 3.0, -2.0, float("nan"), float("inf"), [], {}]
TEXTS = ["", "rms", "update", "momentum", "direct", "two_stage", "auto", "hierarchical", "guarded", "skip", "raise"]
VALUES = [*NUMBERS, *TEXTS]
FIELDS = list(Recipe.__dataclass_fields__)


def test_ten_thousand_random_recipes():
    """Each is refused with a reason, or lays out tensors without a gap."""
    chance = random.Random(0)
    made = 0
    for _ in range(10_000):
        options = {field: chance.choice(VALUES) for field in chance.sample(FIELDS, chance.randint(0, 4))}
        sizes = [chance.choice([0, 1, 7, 8, 9, 1000, 5000]) for _ in range(chance.randint(0, 4))]
        workers = chance.choice([1, 2, 3, 64])
        try:
            recipe = Recipe(**options)
            layout = plan([TensorSpec(str(i), size) for i, size in enumerate(sizes)], recipe, workers)
        except ConfigurationError:
            continue
        made += 1
        pieces = [piece for bucket in layout.buckets for piece in bucket.pieces]
        for i, size in enumerate(sizes):
            own = [piece for piece in pieces if piece.tensor == i]
            assert sum(piece.stop - piece.start for piece in own) == size
    assert made > 500


@pytest.mark.parametrize("bad", [{"exchange": "fast"}, {"exchange": None}, {"bucket_size": True}])
def test_reasons_name_the_field(bad):
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        Recipe(**bad)

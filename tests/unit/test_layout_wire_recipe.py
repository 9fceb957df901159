"""Layout, wire format, recipe, warm-up: what all workers must agree on."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_onebit import PRESETS, ConfigurationError, Recipe, WireError, wire
from horovod_onebit.layout import TensorSpec, plan, shares
from horovod_onebit.recipe import resolve


def specs(*sizes):
    return [TensorSpec(f"t{i}", size) for i, size in enumerate(sizes)]


recipes = st.builds(
    Recipe,
    block_size=st.sampled_from([8, 16, 128, 1024, None]),
    bucket_size=st.integers(1, 5000),
    exchange=st.sampled_from(["direct", "two_stage"]),
)


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(0, 4000), max_size=12), recipe=recipes, workers=st.integers(1, 9))
def test_every_element_has_one_place_and_no_scale_is_shared(sizes, recipe, workers):
    layout = plan(specs(*sizes), recipe, workers)
    covered = [np.zeros(size, int) for size in sizes]
    for bucket in layout.buckets:
        blocks, nbytes = np.zeros(bucket.blocks, int), np.zeros(bucket.bytes, int)
        for piece in bucket.pieces:
            covered[piece.tensor][piece.start : piece.stop] += 1
            blocks[piece.blocks] += 1
            nbytes[piece.bytes] += 1
            assert piece.start % 8 == 0
            assert recipe.block_size is None or piece.start % recipe.block_size == 0
        assert (blocks == 1).all()
        assert (nbytes == 1).all()
        _check_shares(bucket, workers)
    assert all((c == 1).all() for c in covered)


def _check_shares(bucket, workers):
    cut = shares(bucket, workers)
    assert len(cut) == workers
    assert sum(share.bucket.size for share in cut) == bucket.size
    assert [share.blocks.stop for share in cut[:-1]] == [share.blocks.start for share in cut[1:]]
    assert [share.bytes.stop for share in cut[:-1]] == [share.bytes.start for share in cut[1:]]
    assert cut[-1].blocks.stop == bucket.blocks
    assert cut[-1].bytes.stop == bucket.bytes
    largest = max((piece.block_size for piece in bucket.pieces), default=0)
    whole = sum(piece.block_size * (piece.blocks.stop - piece.blocks.start) for piece in bucket.pieces)
    assert max(share.bucket.size for share in cut) <= whole / workers + largest


@pytest.mark.parametrize("block_size", [8, 1024, None])
@pytest.mark.parametrize("workers", [2, 64, 1000])
def test_no_gather_reaches_two_gibibytes(block_size, workers):
    recipe = Recipe(block_size=block_size, bucket_size=2**31)
    layout = plan(specs(340_000_000, 5_000_000_000), recipe, workers)
    assert max(wire.message_size(bucket) for bucket in layout.buckets) * workers < 2**31
    assert sum(bucket.size for bucket in layout.buckets) == 5_340_000_000


def test_a_block_that_cannot_be_gathered_is_refused():
    with pytest.raises(ConfigurationError, match="smaller block_size"):
        plan(specs(10), Recipe(block_size=2**26), 1_000_000)


def test_blocks_of_1024_cost_a_thirty_second_of_a_bit_more():
    (bucket,) = plan(specs(2**20), Recipe(), 2).buckets
    bits = 8 * bucket.bytes / 2**20
    assert bits == 1.03125
    assert wire.message_size(bucket) - bucket.bytes <= 32 + 15


def test_the_digest_tells_what_matters():
    def digest(tensors=None, recipe=None, workers=2):
        return plan(tensors or specs(2000, 3000), recipe or Recipe(), workers).digest

    assert digest() == digest()
    different = {
        digest(),
        digest(specs(3000, 2000)),
        digest([TensorSpec("a", 2000), TensorSpec("t1", 3000)]),
        digest([TensorSpec("t0", 2000, "(2000,) float16"), TensorSpec("t1", 3000)]),
        digest(recipe=Recipe(clip=4.0)),
        digest(recipe=Recipe(scale="rms")),
    }
    assert len(different) == 6


@pytest.mark.parametrize(
    ("recipe", "digest"),
    [
        (Recipe(exchange="two_stage"), 0xC3152F7A8FE97A27),
        (PRESETS["paper"], 0x8FFD50BF9D352A22),
        (PRESETS["fixed"], 0xA81D288409E174B9),
        (Recipe(clip=2.0, on_nonfinite="raise"), 0x684AACC2A601725B),
    ],
)
def test_the_digest_stays_what_it_is(recipe, digest):
    """Checkpoints name the residuals of servers by it."""
    tensors = [TensorSpec("a", 5000, "(50, 100) (100, 1) torch.float32"), TensorSpec("b", 9)]
    assert plan(tensors, recipe, 3).digest == digest


def test_names_must_be_unique():
    with pytest.raises(ConfigurationError, match="more than once: a"):
        plan([TensorSpec("a", 1), TensorSpec("a", 2)], Recipe(), 2)


def bucket_and_messages(workers=3, size=3000, place=np.asarray, scale=None):
    """Of which the last has ``scale`` among its own; as sealed for ``place``."""
    (bucket,) = plan(specs(size), Recipe(block_size=128), workers).buckets
    stamp = wire.Stamp(7, 0x1234567890ABCDEF)
    rng = np.random.default_rng(0)
    messages = []
    for _ in range(workers):
        message = wire.Message(bucket)
        fill(message.buffer, bucket, rng)
        if scale is not None and len(messages) == workers - 1:
            scale_number(message.buffer, bucket, 3)[:] = scale
        messages.append(message.seal(stamp, finite=True).copy())
        if place is Distant:  # the checksum of such a message is of its scales
            scales = wire.scales_of(messages[-1][None], bucket)
            covered = scales.view(np.uint8)
            wire.seal_rows(messages[-1][None], bucket.blocks, bucket.index, stamp, finite=True, covered=covered)
    return bucket, stamp, messages


def fill(buffer, bucket, rng):
    """Any codes, and scales that are numbers."""
    buffer[32 : 32 + bucket.bytes] = rng.integers(0, 256, bucket.bytes)
    buffer[32:].view(np.float32)[bucket.scales] = rng.random(bucket.blocks)


def scale_number(buffer, bucket, block):
    return buffer[32:].view(np.float32)[bucket.scales[block] :][:1]


class Distant:
    """A ``wire.Remote`` in host memory."""

    def __init__(self, array):
        self.array, self.size = array, array.size

    def words(self, rows, bucket):
        return np.ascontiguousarray(self.array.reshape(rows, -1).view(np.int32)[:, wire.checked_words(bucket)])

    def rows(self, rows):
        return self.array.reshape(rows, -1)


PLACES = pytest.mark.parametrize("place", [np.asarray, Distant])


@PLACES
def test_a_message_comes_back_as_it_was_sent(place):
    bucket, stamp, messages = bucket_and_messages(place=place)
    assert wire.HEADER.itemsize == 32
    assert len(messages[0]) % 16 == 0
    read = wire.read(place(np.concatenate(messages)), bucket, stamp, workers=3)
    assert read.finite.all()
    for i, buffer in enumerate(messages):
        np.testing.assert_array_equal(read.rows[i], buffer)


@PLACES
@pytest.mark.parametrize("field", ["magic", "version", "step", "layout", "bucket", "blocks"])
def test_a_wrong_header_names_the_worker_and_the_field(field, place):
    bucket, stamp, messages = bucket_and_messages(place=place)
    header = messages[1][:32].view(wire.HEADER)
    header[field] += 1
    with pytest.raises(WireError, match=f"worker 1 has {field}"):
        wire.read(place(np.concatenate(messages)), bucket, stamp, workers=3)


@PLACES
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 5.1])
def test_a_corrupt_scale_is_refused(scale, place):
    bucket, stamp, messages = bucket_and_messages(place=place, scale=scale)
    if np.isfinite(scale):
        stamp = dataclasses.replace(stamp, largest_scale=5.0)
    with pytest.raises(WireError, match="worker 2 is corrupt"):
        wire.read(place(np.concatenate(messages)), bucket, stamp, workers=3)


def test_messages_of_another_length_on_a_device_are_refused():
    bucket, stamp, messages = bucket_and_messages()
    with pytest.raises(WireError, match="expected 2 \\*"):
        wire.read(Distant(np.concatenate(messages)), bucket, stamp, workers=2)


@pytest.mark.parametrize("change", [lambda a: a[:-1], lambda a: np.append(a, np.uint8(0)), lambda a: a.view(np.int8)])
def test_a_wrong_length_or_type_is_refused(change):
    bucket, stamp, messages = bucket_and_messages()
    with pytest.raises(WireError, match="expected"):
        wire.read(change(np.concatenate(messages)), bucket, stamp, workers=3)


def test_fuzzed_messages_raise_or_decode_to_finite_numbers():
    bucket, stamp, messages = bucket_and_messages()
    good = np.concatenate(messages)
    rng = np.random.default_rng(0)
    outcomes = {"raised": 0, "read": 0}
    for i in range(3000):
        data = rng.integers(0, 256, len(good), dtype=np.uint8) if i % 10 == 0 else good.copy()
        flips = rng.integers(0, len(good), rng.integers(1, 6))
        data[flips] ^= (1 << rng.integers(0, 8, len(flips))).astype(np.uint8)
        try:
            read = wire.read(data, bucket, stamp, workers=3)
        except WireError:
            outcomes["raised"] += 1
        else:
            outcomes["read"] += 1
            assert np.isfinite(wire.scales_of(read.rows, bucket)[read.finite]).all()
    assert outcomes == {"raised": 3000, "read": 0}


@PLACES
def test_a_damaged_scale_names_the_worker(place):
    bucket, stamp, messages = bucket_and_messages(place=place)
    scale_number(messages[2], bucket, 3)[:] *= 1.0001
    with pytest.raises(WireError, match=r"worker 2 is damaged"):
        wire.read(place(np.concatenate(messages)), bucket, stamp, workers=3)


def test_steps_beyond_what_the_header_counts():
    bucket, _, (one, *_) = bucket_and_messages()
    for step in (2**32 - 1, 2**32, 2**40 + 3):
        stamp = wire.Stamp(step, 5)
        sealed = wire.Message(bucket, one).seal(stamp, finite=True)
        wire.read(sealed, bucket, stamp, workers=1)
        with pytest.raises(WireError, match="has step"):
            wire.read(sealed, bucket, wire.Stamp(step + 1, 5), workers=1)


def test_presets():
    assert resolve("robust") == Recipe() == PRESETS["robust"]
    paper, fixed = resolve("paper"), resolve("fixed")
    assert (paper.space, paper.scale, paper.block_size, paper.exchange) == ("momentum", "rms", None, "two_stage")
    assert fixed == dataclasses.replace(paper, eps_inside_sqrt=True)
    assert Recipe().clip_for(16) == pytest.approx(3 * 1.16**0.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("space", "weights"),
        ("scale", "median"),
        ("scale", "mean_abs"),
        ("exchange", "ring"),
        ("on_nonfinite", "ignore"),
        ("block_size", 0),
        ("block_size", -8),
        ("block_size", 12),
        ("block_size", 1024.0),
        ("block_size", True),
        ("clip", 0),
        ("clip", -1.0),
        ("clip", float("nan")),
        ("clip", "3"),
        ("eps_inside_sqrt", 1),
        ("min_compressed_size", 0),
        ("bucket_size", 1.5),
    ],
)
def test_a_recipe_refuses_what_makes_no_sense(field, value):
    with pytest.raises(ConfigurationError, match=f"{field}=.*expected"):
        Recipe(**{field: value})


def test_residuals_keep_their_names():
    """Whatever the options are that residuals do not depend on."""
    spec = [TensorSpec("w", 5000, "(5000,)")]
    two_stage = dataclasses.replace(PRESETS["robust"], exchange="two_stage")
    for recipe, digest in ((two_stage, 0x9DE80B08BFC403DD), (PRESETS["paper"], 0x336E8939D100E5E9)):
        saved = dataclasses.replace(recipe, server_codec="sign", warmup="exact", link=1.0, on_nonfinite="raise")
        assert plan(spec, recipe, 3).digest == plan(spec, saved, 3).digest == digest
    assert two_stage.server_codec == "two_bit"
    assert PRESETS["paper"].server_codec == PRESETS["fixed"].server_codec == "sign"


def test_a_clip_without_update_space_is_refused():
    with pytest.raises(ConfigurationError, match="space='update', or clip=None"):
        Recipe(space="momentum")


def test_an_unknown_preset_lists_those_there_are():
    with pytest.raises(ConfigurationError, match="'robust', 'paper', 'fixed'"):
        resolve("fast")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().clip = 1.0

"""Which parameter lives where: tensors -> pieces -> buckets, the same on every worker.

A bucket is one message. Tensors are laid one after the other in the order given; each starts with a block, and so a
record, of its own, so that no scale is shared by two tensors and padding never enters a scale. A tensor that is larger
than a bucket is cut, at block boundaries, into pieces.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_onebit.codecs import Codec, find
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels.reference import Array, num_blocks
from horovod_onebit.recipe import GATHER_LIMIT, Recipe

Range = tuple[int, int, int, int]  # tensor, start, stop, block size


@dataclass(frozen=True)
class TensorSpec:
    """A parameter as the layout sees it: its name, its number of elements, and anything else that all workers must
    agree on (shape, dtype, memory order), as text. Also ``place``, where its messages are; the digest is without it."""

    name: str
    size: int
    detail: str = ""
    place: str = ""


@dataclass(frozen=True)
class Piece:
    """Elements ``start:stop`` of tensor number ``tensor``, and where in the message its records are."""

    tensor: int
    start: int
    stop: int
    block_size: int
    blocks: slice
    bytes: slice


@dataclass(frozen=True)
class Bucket:
    """One message: which pieces it carries, how many blocks, and how many bytes of records of ``codec``."""

    index: int
    codec: Codec
    pieces: tuple[Piece, ...]
    blocks: int
    bytes: int

    @property
    def size(self) -> int:
        """Elements (parameters) carried."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @cached_property
    def scales(self) -> NDArray[np.intp]:
        """Where the scale of each block is, (blocks,), in words of 4 bytes from the first record's."""
        found = [
            (
                piece.bytes.start
                + self.codec.record_size(piece.block_size) * np.arange(piece.blocks.stop - piece.blocks.start)
            )
            // 4
            for piece in self.pieces
        ]
        return np.concatenate(found) if found else np.zeros(0, np.intp)

    @cached_property
    def device_words(self) -> dict[Any, Any]:
        """Copies of ``wire.checked_words`` in the memory of GPUs, by device: made once for each bucket."""
        return {}

    def coded(self, codec: Codec) -> Bucket:
        """The same pieces as records of another codec."""
        return self if codec == self.codec else _bucket(self.index, codec, [_range(piece) for piece in self.pieces])


@dataclass(frozen=True)
class Share:
    """The part of a bucket that one worker serves: a bucket of its own, and where it is in the whole one."""

    bucket: Bucket
    blocks: slice
    bytes: slice


@dataclass(frozen=True)
class Layout:
    """All buckets of a set of tensors, and a digest of everything that decides them."""

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    digest: int

    @property
    def size(self) -> int:
        return sum(spec.size for spec in self.tensors)

    def assemble(self, pieces: Sequence[Sequence[Array]]) -> list[Array]:
        """The tensors, flat float32, from the pieces of each bucket."""
        tensors = [np.empty(spec.size, np.float32) for spec in self.tensors]
        for bucket, values in zip(self.buckets, pieces, strict=True):
            for piece, value in zip(bucket.pieces, values, strict=True):
                tensors[piece.tensor][piece.start : piece.stop] = value
        return tensors


def plan(tensors: Sequence[TensorSpec], recipe: Recipe, workers: int) -> Layout:
    """Lay ``tensors`` out in buckets of about ``recipe.bucket()`` elements.

    Raises ``ConfigurationError`` for duplicate names, negative sizes, or a world so large that one block does not
    fit into a gather.
    """
    twice = sorted(name for name, count in Counter(spec.name for spec in tensors).items() if count > 1)
    if twice:
        raise ConfigurationError(f"tensor names must be unique; given more than once: {', '.join(twice)}")
    for spec in tensors:
        if spec.size < 0:
            raise ConfigurationError(f"tensor {spec.name!r} has size {spec.size}; expected 0 or more elements")
    capacity, longest = _limits(recipe, workers)
    codec, buckets = find(recipe.codec), list[Bucket]()
    pending: list[Range] = []
    room = capacity
    for index, spec in enumerate(tensors):
        for start in range(0, spec.size, longest):
            stop = min(start + longest, spec.size)
            block_size = _block_size(stop - start, recipe, workers)
            cost = codec.size(stop - start, block_size)
            if pending and cost > room:
                buckets.append(_bucket(len(buckets), codec, pending))
                pending, room = [], capacity
            pending.append((index, start, stop, block_size))
            room -= cost
    if pending:
        buckets.append(_bucket(len(buckets), codec, pending))
    return Layout(tuple(tensors), tuple(buckets), _digest(tensors, recipe, capacity))


def shares(bucket: Bucket, workers: int) -> tuple[Share, ...]:
    """Cut ``bucket`` at blocks into ``workers`` shares of about as many elements, whatever its codec; some are empty if
    there are fewer blocks."""
    counts = [piece.blocks.stop - piece.blocks.start for piece in bucket.pieces]
    ends = np.cumsum(np.repeat([piece.block_size for piece in bucket.pieces], counts))  # as if all blocks were full
    inner = [int(ends[-1]) * j // workers if counts else 0 for j in range(1, workers)]
    edges = [0, *np.searchsorted(ends, inner, side="right").tolist(), bucket.blocks]
    result = []
    byte = 0
    for lo, hi in pairwise(edges):
        ranges = [one for piece in bucket.pieces for one in _overlap(piece, lo, hi)]
        share = _bucket(bucket.index, bucket.codec, ranges)
        result.append(Share(share, slice(lo, hi), slice(byte, byte + share.bytes)))
        byte += share.bytes
    return tuple(result)


def _overlap(piece: Piece, lo: int, hi: int) -> list[Range]:
    """The elements of ``piece`` whose blocks are in ``lo:hi`` of its bucket."""
    first = max(lo, piece.blocks.start) - piece.blocks.start
    last = min(hi, piece.blocks.stop) - piece.blocks.start
    if first >= last:
        return []
    start = piece.start + first * piece.block_size
    return [(piece.tensor, start, min(piece.start + last * piece.block_size, piece.stop), piece.block_size)]


def _block_size(size: int, recipe: Recipe, workers: int) -> int:
    if recipe.block_size is None and recipe.exchange in ("two_stage", "hierarchical"):
        # Workers' shares are cut at scales: give each worker a scale of its own in every tensor.
        return max(-(-size // workers) + 7, 8) // 8 * 8
    return recipe.block_size_for(size)


def _limits(recipe: Recipe, workers: int) -> tuple[int, int]:
    """Bytes of records that a bucket should hold, and the longest piece, in elements."""
    kinds = [find(recipe.codec), find(recipe.server_codec)]
    unit, gather = recipe.block_size or 8, GATHER_LIMIT // workers - 64
    units = gather // max(kind.record_size(unit) for kind in kinds)
    if units < 1:
        raise ConfigurationError(
            f"{workers} workers cannot gather even one block of {unit} elements within 2 GiB: use a smaller block_size"
        )
    units = min(units, max(recipe.bucket() // unit, 1))
    # A tensor with one scale of its own is cut only where a gather could not carry it.
    longest = units * unit if recipe.block_size is not None else (gather - 8) * 8 // max(kind.bits for kind in kinds)
    return units * (4 + kinds[0].bits * unit // 8), longest // 8 * 8


def _range(piece: Piece) -> Range:
    return piece.tensor, piece.start, piece.stop, piece.block_size


def _bucket(index: int, codec: Codec, ranges: Sequence[Range]) -> Bucket:
    pieces = []
    block = byte = 0
    for tensor, start, stop, block_size in ranges:
        blocks = slice(block, block + num_blocks(stop - start, block_size))
        records = slice(byte, byte + codec.size(stop - start, block_size))
        pieces.append(Piece(tensor, start, stop, block_size, blocks, records))
        block, byte = blocks.stop, records.stop
    return Bucket(index, codec, tuple(pieces), block, byte)


def _digest(tensors: Sequence[TensorSpec], recipe: Recipe, capacity: int) -> int:
    # The names of servers' residuals in checkpoints contain it, so it must not change from version to version.
    text = f"({tuple((t.name, t.size, t.detail) for t in tensors)!r}, {recipe.signature()}, {capacity!r})"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

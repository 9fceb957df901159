"""Which parameter lives where: tensors -> pieces -> buckets, the same on every worker.

A bucket is one message. Tensors are laid one after the other in the order given; each starts on a whole byte and
a block of its own, so that no scale is shared by two tensors and padding never enters a scale. A tensor that is
larger than a bucket is cut, at block boundaries, into pieces.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels.reference import Array, num_blocks, num_bytes
from horovod_onebit.recipe import GATHER_LIMIT, Recipe

Cut = tuple[int, int, int, int]  # tensor, start, stop, block size


@dataclass(frozen=True)
class TensorSpec:
    """A parameter as the layout sees it: its name, its number of elements, and anything else that all workers must
    agree on (shape, dtype, memory order), as text."""

    name: str
    size: int
    detail: str = ""


@dataclass(frozen=True)
class Piece:
    """Elements ``start:stop`` of tensor number ``tensor``, and where its scales and bits lie in the message."""

    tensor: int
    start: int
    stop: int
    block_size: int
    first_block: int
    first_byte: int

    @property
    def blocks(self) -> slice:
        return slice(self.first_block, self.first_block + num_blocks(self.stop - self.start, self.block_size))

    @property
    def bytes(self) -> slice:
        return slice(self.first_byte, self.first_byte + num_bytes(self.stop - self.start))


@dataclass(frozen=True)
class Bucket:
    """One message: which pieces it carries, how many scales and how many bytes of bits."""

    index: int
    pieces: tuple[Piece, ...]
    blocks: int
    bytes: int

    @property
    def size(self) -> int:
        """Elements (parameters) carried."""
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(frozen=True)
class Share:
    """The part of a bucket that one worker serves: a bucket of its own, and where it lies in the whole one."""

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

    def unfuse(self, fused: Sequence[Array]) -> list[Array]:
        """The tensors of which the elements of each bucket lie together in ``fused``: flat float32."""
        tensors = [np.empty(spec.size, np.float32) for spec in self.tensors]
        for bucket, values in zip(self.buckets, fused, strict=True):
            start = 0
            for piece in bucket.pieces:
                size = piece.stop - piece.start
                tensors[piece.tensor][piece.start : piece.stop] = values[start : start + size]
                start += size
        return tensors


def plan(tensors: Sequence[TensorSpec], recipe: Recipe, workers: int) -> Layout:
    """Lay ``tensors`` out in buckets of about ``recipe.bucket_size`` elements.

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
    buckets: list[Bucket] = []
    pending: list[Cut] = []
    room = capacity
    for index, spec in enumerate(tensors):
        for start in range(0, spec.size, longest):
            stop = min(start + longest, spec.size)
            block_size = _block_size(stop - start, recipe, workers)
            cost = 4 * num_blocks(stop - start, block_size) + num_bytes(stop - start)
            if pending and cost > room:
                buckets.append(_bucket(len(buckets), pending))
                pending, room = [], capacity
            pending.append((index, start, stop, block_size))
            room -= cost
    if pending:
        buckets.append(_bucket(len(buckets), pending))
    return Layout(tuple(tensors), tuple(buckets), _digest(tensors, recipe, capacity))


def shares(bucket: Bucket, workers: int) -> tuple[Share, ...]:
    """Cut ``bucket`` at blocks into ``workers`` shares, about equal; the last ones may be empty."""
    edges = [bucket.blocks * j // workers for j in range(workers + 1)]
    result = []
    byte = 0
    for lo, hi in pairwise(edges):
        share = _bucket(bucket.index, [cut for piece in bucket.pieces for cut in _overlap(piece, lo, hi)])
        result.append(Share(share, slice(lo, hi), slice(byte, byte + share.bytes)))
        byte += share.bytes
    return tuple(result)


def _overlap(piece: Piece, lo: int, hi: int) -> list[Cut]:
    """The elements of ``piece`` whose blocks are in ``lo:hi`` of its bucket."""
    first = max(lo, piece.blocks.start) - piece.first_block
    last = min(hi, piece.blocks.stop) - piece.first_block
    if first >= last:
        return []
    start = piece.start + first * piece.block_size
    return [(piece.tensor, start, min(piece.start + last * piece.block_size, piece.stop), piece.block_size)]


def _block_size(size: int, recipe: Recipe, workers: int) -> int:
    if recipe.block_size is None and recipe.exchange == "two_stage":
        # Servers' shares are cut at scales: give each server a scale of its own in every tensor.
        return max(-(-size // workers) + 7, 8) // 8 * 8
    return recipe.block_size_for(size)


def _limits(recipe: Recipe, workers: int) -> tuple[int, int]:
    """Bytes of scales and bits that a bucket should hold, and the longest piece, in elements."""
    unit = recipe.block_size or 8
    per_unit = 4 + num_bytes(unit)
    gather = GATHER_LIMIT // workers - 64
    if gather < per_unit:
        raise ConfigurationError(
            f"{workers} workers cannot gather even one block of {unit} elements within 2 GiB: use a smaller block_size"
        )
    wanted = max(recipe.bucket_size // unit, 1) * per_unit
    capacity = min(wanted, gather)
    # A tensor with one scale of its own is cut only where a gather could not carry it.
    longest = capacity // per_unit * unit if recipe.block_size is not None else (gather - 4) * 8
    return capacity, longest


def _bucket(index: int, cuts: Sequence[Cut]) -> Bucket:
    pieces = []
    block = byte = 0
    for tensor, start, stop, block_size in cuts:
        piece = Piece(tensor, start, stop, block_size, block, byte)
        block, byte = piece.blocks.stop, piece.bytes.stop
        pieces.append(piece)
    return Bucket(index, tuple(pieces), block, byte)


def _digest(tensors: Sequence[TensorSpec], recipe: Recipe, capacity: int) -> int:
    # The names of servers' residuals in checkpoints contain it, so it must not change from version to version.
    text = f"({tuple((t.name, t.size, t.detail) for t in tensors)!r}, {recipe.signature()}, {capacity!r})"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

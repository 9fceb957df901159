"""Which parameter lives where: tensors -> pieces -> buckets, the same on every worker.

A bucket is one message. Tensors are laid one after the other in the order given; each starts on a whole byte and
a block of its own, so that no scale is shared by two tensors and padding never enters a scale. A tensor that is
larger than a bucket is cut, at block boundaries, into pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.kernels.reference import num_blocks, num_bytes
from horovod_onebit.recipe import GATHER_LIMIT, Recipe


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
class Layout:
    """All buckets of a set of tensors, and a digest of everything that decides them."""

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    digest: int

    @property
    def size(self) -> int:
        return sum(spec.size for spec in self.tensors)


def plan(tensors: Sequence[TensorSpec], recipe: Recipe, workers: int) -> Layout:
    """Lay ``tensors`` out in buckets of about ``recipe.bucket_size`` elements.

    Raises ``ConfigurationError`` for duplicate names, negative sizes, or a world so large that one block does not
    fit into a gather.
    """
    names = [spec.name for spec in tensors]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigurationError(f"tensor names must be unique; given more than once: {', '.join(twice)}")
    for spec in tensors:
        if spec.size < 0:
            raise ConfigurationError(f"tensor {spec.name!r} has size {spec.size}; expected 0 or more elements")
    capacity, longest = _limits(recipe, workers)
    buckets: list[Bucket] = []
    pending: list[tuple[int, int, int]] = []
    room = capacity
    for index, spec in enumerate(tensors):
        for start in range(0, spec.size, longest):
            stop = min(start + longest, spec.size)
            cost = _message_bytes(stop - start, recipe)
            if pending and cost > room:
                buckets.append(_bucket(len(buckets), pending, recipe))
                pending, room = [], capacity
            pending.append((index, start, stop))
            room -= cost
    if pending:
        buckets.append(_bucket(len(buckets), pending, recipe))
    return Layout(tuple(tensors), tuple(buckets), _digest(tensors, recipe, capacity))


def _message_bytes(size: int, recipe: Recipe) -> int:
    return 4 * num_blocks(size, recipe.block_size_for(size)) + num_bytes(size)


def _limits(recipe: Recipe, workers: int) -> tuple[int, int]:
    """Bytes of scales and bits that a bucket should hold, and the longest piece, in elements."""
    unit = recipe.block_size or 8
    per_unit = _message_bytes(unit, recipe)
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


def _bucket(index: int, cuts: Sequence[tuple[int, int, int]], recipe: Recipe) -> Bucket:
    pieces = []
    block = byte = 0
    for tensor, start, stop in cuts:
        piece = Piece(tensor, start, stop, recipe.block_size_for(stop - start), block, byte)
        block, byte = piece.blocks.stop, piece.bytes.stop
        pieces.append(piece)
    return Bucket(index, tuple(pieces), block, byte)


def _digest(tensors: Sequence[TensorSpec], recipe: Recipe, capacity: int) -> int:
    text = repr((tuple((t.name, t.size, t.detail) for t in tensors), recipe, capacity))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

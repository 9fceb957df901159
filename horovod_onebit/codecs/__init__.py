"""A codec is a file of this folder: how the numbers of a block become a few bits each.

A block travels as one record of fixed size: its scale, then its codes.

offset 0    scale, float32
offset 4    bit planes, ``ceil(count / 8)`` bytes each: bit j of every element's code, little-endian
then        zeros up to a multiple of 4 bytes

A codec's formulas are functions of one element (see ``horovod_onebit.formulas``):

``scale(mean, square, guard)``  the block's scale, from the means of its magnitudes and of its squares, all float64
``code(c, s)``                  the code of an element, uint32 below ``2 ** bits``
``value(code, s)``              what that code stands for, linear in ``s``, and NaN where ``s`` is

``guard`` bounds the scale in multiples of the mean magnitude, so that compression always shrinks the error; infinite
bounds are ``NO_GUARD``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from horovod_onebit.errors import ConfigurationError

GUARD, NO_GUARD = 1.5, 1e30


@dataclass(frozen=True, eq=False)
class Codec:
    """What the loops need to know of a codec; ``name`` is that of its file, ``bits`` those of an element. There is one
    value for each name, so that it is found in a dictionary at once."""

    name: str
    bits: int
    scale: Callable[..., Any]
    code: Callable[..., Any]
    value: Callable[..., Any]

    def record_size(self, count: int) -> int:
        """Bytes of the record of a block of ``count`` elements."""
        planes = self.bits * (-(-count // 8))
        return 4 + -(-planes // 4) * 4

    def size(self, size: int, block_size: int) -> int:
        """Bytes of the records of ``size`` elements; the last block may be shorter."""
        whole, rest = divmod(size, block_size)
        return whole * self.record_size(block_size) + (self.record_size(rest) if rest else 0)


def names() -> tuple[str, ...]:
    """All codecs."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


_found: dict[str, Codec] = {}


def find(name: str) -> Codec:
    """The codec of the file ``name``."""
    if not isinstance(name, str) or name not in _found:
        if name not in names():
            raise ConfigurationError(f"codec {name!r} is unknown; expected one of {', '.join(map(repr, names()))}")
        file = import_module(f"{__name__}.{name}")
        _found.setdefault(name, Codec(name, file.BITS, file.scale, file.code, file.value))
    return _found[name]

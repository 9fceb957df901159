"""What users keep in a checkpoint: values of NumPy and paths are put into plain types, own classes are refused."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np

TAG = "horovod_onebit.type"
PLAIN = (type(None), bool, int, float, str)
STORABLE = (
    "numbers, texts, bytes, None, paths, NumPy scalars and arrays, and dicts, lists and tuples of these (PyTorch: "
    "tensors, too). dataclasses.asdict() makes a dict of a dataclass"
)


class Packer:
    """Turns values into what a framework's files can hold; ``unpack`` is the inverse.

    ``native`` says whether the files hold a value as it is, and ``containers`` are the types of containers that they
    keep apart; with ``text_keys``, keys of dicts are texts alone. ``array`` puts a flat array of uint8 into something
    that the files hold.
    """

    def __init__(
        self,
        native: Callable[[Any], bool],
        array: Callable[[np.ndarray], Any],
        containers: tuple[type, ...],
        *,
        text_keys: bool,
    ) -> None:
        self._native, self._array, self._containers, self._text_keys = native, array, containers, text_keys

    def pack(self, value: Any, where: str, inside: tuple[int, ...] = ()) -> Any:
        """``value``, whose name is ``where``, in plain types: itself if nothing has to be changed.

        Raises ``TypeError`` that names what cannot be stored. ``inside`` are the containers around it.
        """
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
            return self._numpy(value, where)
        if isinstance(value, PurePath):
            return {TAG: "path", "value": str(value)}
        if id(value) in inside:
            raise TypeError(f"{where} contains itself")
        inside = (*inside, id(value))
        if isinstance(value, dict) and kind in self._containers:
            return self._dict(value, where, inside)
        if kind in (list, tuple):
            items = [self.pack(item, f"{where}[{i}]", inside) for i, item in enumerate(value)]
            if kind not in self._containers:
                return {TAG: kind.__name__, "items": items}
            return value if _same(items, value) else kind(items)
        if self._native(value):
            return value
        if kind is bytes:
            return {TAG: "bytes", "value": base64.b64encode(value).decode()}
        raise TypeError(
            f"{where} is {kind.__module__}.{kind.__qualname__}, which cannot be stored: expected {STORABLE}"
        )

    def _dict(self, value: dict, where: str, inside: tuple[int, ...]) -> Any:
        for key in value:
            if not _is_key(key):
                raise TypeError(
                    f"{where} has the key {key!r}, a {type(key).__name__}: expected texts or numbers as keys"
                )
        items = [self.pack(item, f"{where}[{key!r}]", inside) for key, item in value.items()]
        if TAG in value or (self._text_keys and any(type(key) is not str for key in value)):
            keys = [self.pack(key, where) for key in value]
            return {TAG: "dict", "items": [list(pair) for pair in zip(keys, items, strict=True)]}
        return value if _same(items, value.values()) else type(value)(zip(value, items, strict=True))

    def _numpy(self, value: Any, where: str) -> Any:
        if value.dtype.kind not in "?biufcSUmM":
            raise TypeError(f"{where} is a NumPy array of {value.dtype}, which cannot be stored: expected {STORABLE}")
        kind = "scalar" if isinstance(value, np.generic) else "array"
        data = self._array(np.array(bytearray(value.tobytes()), np.uint8))
        return {TAG: kind, "dtype": value.dtype.str, "shape": list(value.shape), "value": data}


def _is_key(key: Any) -> bool:
    return type(key) in PLAIN or (type(key) is tuple and all(map(_is_key, key)))


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def unpack(value: Any, array: Callable[[Any], np.ndarray]) -> Any:
    """The inverse of ``Packer.pack``; ``array`` is the inverse of its ``array``."""
    if isinstance(value, dict):
        if TAG in value:
            return _untag(value, array)
        items = {key: unpack(item, array) for key, item in value.items()}
        return value if _same(items.values(), value.values()) else type(value)(items)
    if type(value) in (list, tuple):
        elements = [unpack(item, array) for item in value]
        return value if _same(elements, value) else type(value)(elements)
    return value


def _untag(value: dict, array: Callable[[Any], np.ndarray]) -> Any:
    kind = value[TAG]
    if kind == "path":
        return Path(value["value"])
    if kind == "bytes":
        return base64.b64decode(value["value"])
    if kind in ("list", "tuple"):
        items = [unpack(item, array) for item in value["items"]]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {unpack(key, array): unpack(item, array) for key, item in value["items"]}
    if kind in ("array", "scalar"):
        data = bytearray(np.asarray(array(value["value"]), np.uint8))
        found = np.ndarray(tuple(value["shape"]), np.dtype(value["dtype"]), data)
        return found if kind == "array" else found[()]
    raise ValueError(f"a value of kind {kind!r} is of a later version of this library")

"""One file of a checkpoint: plain values as JSON, and beside them the arrays, each by its name.

The file is a ``.npz``, which ``numpy.load`` reads, too: a zip archive of ``values.json`` and one ``NAME.npy`` for each
array. The name of an array is its path in the values, such as ``model/first.weight``. Arrays of dtypes that NumPy
lacks, such as bfloat16, are stored as integers of the same bits, and ``values.json`` has their dtypes. Arrays of zeros
are compressed. Arrays are written and read one at a time. Only values are read, never code, and classes of the user's
own are refused.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple

import numpy as np

from horovod_onebit.checkpoints.files import FORMAT

VALUES = "values.json"
TAG = "horovod_onebit.type"
PLAIN = (type(None), bool, int, float, str)
MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set)}
BYTES = {kind.__name__: kind for kind in (bytes, bytearray)}
STORABLE = (
    "numbers, texts, bytes, None, paths, NumPy scalars and arrays, and dicts, lists, tuples and sets of these "
    "(PyTorch: strided and sparse_coo tensors that have values, too). dataclasses.asdict() makes a dict of a dataclass"
)


class Encoded(NamedTuple):
    """A value of a framework, as what a file can hold.

    Attributes:
        kind: by which the framework's decoder knows it.
        value: plain values, and arrays perhaps.
        array: what it holds, if that is one array.
        memory: the same for all values that share one memory, and are stored once; None if it has none of its own.
    """

    kind: str
    value: Any
    array: np.ndarray | None = None
    memory: Hashable = None


class Converter:
    """What a framework's own values are in a file; this one knows none."""

    def encode(self, value: Any) -> Encoded | np.ndarray | None:
        """What is stored for ``value``: an array comes back as such, an ``Encoded`` by ``decode``. None if ``value`` is
        not the framework's."""
        return None

    def called(self, value: Any) -> str:
        """What ``value`` is, in words, where it cannot be stored."""
        return f"{type(value).__module__}.{type(value).__qualname__}"

    def decode(self, found: Encoded) -> Any:
        """The inverse of ``encode``."""
        raise ValueError(
            f"a value of kind {found.kind!r} is of another framework, or of a later version of this library"
        )


def dumps(value: Any, converter: Converter) -> bytes:
    """``value`` as the bytes of such a file, for another worker: pickled, a sparse tensor loses ``requires_grad``."""
    file = io.BytesIO()
    write(file, "", {"value": value}, converter)
    return file.getvalue()


def loads(data: bytes, converter: Converter) -> Any:
    """What ``dumps`` was given."""
    return read(io.BytesIO(data), "", converter)["value"]


def write(path: Path | IO[bytes], key: str, values: Mapping[str, Any], converter: Converter) -> None:
    """Write ``values`` to the file ``path`` of the checkpoint ``key``. Raises ``TypeError`` that names what cannot be
    stored."""
    with zipfile.ZipFile(path, "w", compresslevel=1) as archive:

        def put(name: str, array: np.ndarray) -> None:
            zeros = array.dtype.kind == "f" and not array.any()  # most residuals while gradients travel in few bits
            archive.compression = zipfile.ZIP_DEFLATED if zeros else zipfile.ZIP_STORED
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)

        packer = _Packer(put, converter)
        packed = {name: packer.pack(value, (name,)) for name, value in values.items()}
        archive.writestr(VALUES, json.dumps({"format": FORMAT, "key": key, "values": packed}))


def check(value: Any, name: str, converter: Converter) -> None:
    """Raise ``TypeError`` unless ``write`` can store ``value``, which is called ``name``."""
    json.dumps(_Packer(lambda name, array: None, converter).pack(value, (name,)))


def read(path: Path | IO[bytes], key: str, converter: Converter, only: Iterable[str] | None = None) -> dict[str, Any]:
    """The values that ``write`` was given; of ``only`` these names, if they are given.

    Raises ``ValueError`` if the file is not one of the checkpoint ``key``.
    """
    with zipfile.ZipFile(path) as archive:
        found = json.loads(archive.read(VALUES))
        if found.get("format") != FORMAT or found.get("key") != key:
            raise ValueError(f"{path} does not belong to this checkpoint")
        packed, unpacker = found["values"], _Unpacker(archive, converter)
        return {name: unpacker.unpack(packed[name]) for name in (packed if only is None else only)}


KINDS = "?biufcSUmM"
"""Of NumPy's dtypes: numbers, texts, bytes and times."""


class _Packer:
    """Turns values into JSON, and gives their arrays to ``put`` with names of their own."""

    def __init__(self, put: Callable[[str, np.ndarray], None], converter: Converter) -> None:
        self._put, self._converter = put, converter
        self._names: set[str] = set()
        self._shared: dict[Hashable, Any] = {}

    def pack(self, value: Any, where: tuple[Any, ...], inside: tuple[int, ...] = ()) -> Any:
        """``value``, which is found by the keys ``where``; ``inside`` are the containers around it."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, np.generic) and value.dtype.kind in KINDS:
            return {TAG: "scalar", "dtype": value.dtype.str, "value": base64.b64encode(value.tobytes()).decode()}
        if kind in (np.ndarray, np.memmap):
            return self._array(value, where)
        if isinstance(value, PurePath):
            return {TAG: "path", "value": str(value)}
        if kind in BYTES.values():
            return {TAG: kind.__name__, "value": base64.b64encode(value).decode()}
        if kind is complex:
            return {TAG: "complex", "value": [value.real, value.imag]}
        if id(value) in inside:
            raise TypeError(f"{_called(where)} contains itself")
        inside = (*inside, id(value))
        if kind in MAPPINGS.values():
            return self._mapping(value, where, inside)
        if kind in SEQUENCES.values():
            items = [self.pack(item, (*where, i), inside) for i, item in enumerate(value)]
            return items if kind is list else {TAG: kind.__name__, "items": items}
        return self._encoded(value, where, inside)

    def _mapping(self, value: Mapping, where: tuple[Any, ...], inside: tuple[int, ...]) -> Any:
        for key in value:
            if not _is_key(key):
                raise TypeError(
                    f"{_called(where)} has the key {key!r}, a {type(key).__name__}: expected texts or numbers as keys"
                )
        items = [self.pack(item, (*where, key), inside) for key, item in value.items()]
        if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
            return dict(zip(value, items, strict=True))
        keys = [self.pack(key, where) for key in value]
        return {TAG: type(value).__name__, "items": list(zip(keys, items, strict=True))}

    def _array(self, value: np.ndarray, where: tuple[Any, ...]) -> dict[str, Any]:
        own = value.dtype.isbuiltin == 2  # bfloat16, say, of the package ml_dtypes
        if value.dtype.kind not in KINDS and not own:
            raise TypeError(
                f"{_called(where)} is a NumPy array of {value.dtype}, which cannot be stored: expected {STORABLE}"
            )
        name = "/".join(map(str, where))
        if name in self._names or not name.isprintable() or len(name) > 1000:
            name = f"array {len(self._names)}"
        self._names.add(name)
        self._put(name, value.view(f"u{value.dtype.itemsize}") if own else value)
        return {TAG: "array", "name": name, **({"dtype": value.dtype.name} if own else {})}

    def _encoded(self, value: Any, where: tuple[Any, ...], inside: tuple[int, ...]) -> Any:
        found = self._converter.encode(value)
        if found is None:
            kind = self._converter.called(value)
            raise TypeError(f"{_called(where)} is {kind}, which cannot be stored: expected {STORABLE}")
        if isinstance(found, np.ndarray):
            return self._array(found, where)
        if found.memory not in self._shared or found.memory is None:
            packed = {TAG: found.kind, "value": self.pack(found.value, where, inside)}
            packed["array"] = None if found.array is None else self._array(found.array, where)
            self._shared[found.memory] = packed
        return self._shared[found.memory]


def _called(where: Sequence[Any]) -> str:
    return str(where[0]) + "".join(f"[{key!r}]" for key in where[1:])


def _is_key(key: Any) -> bool:
    return type(key) in PLAIN or (type(key) is tuple and all(map(_is_key, key)))


class _Unpacker:
    """The inverse of ``_Packer``: reads arrays from ``archive``."""

    def __init__(self, archive: zipfile.ZipFile, converter: Converter) -> None:
        self._archive, self._converter = archive, converter
        self._arrays: dict[str, np.ndarray] = {}

    def unpack(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.unpack(item) for item in value]
        if isinstance(value, dict):
            return self._untag(value) if TAG in value else {key: self.unpack(item) for key, item in value.items()}
        return value

    def _untag(self, value: dict[str, Any]) -> Any:
        kind = value[TAG]
        if kind in MAPPINGS:
            return MAPPINGS[kind]({self.unpack(key): self.unpack(item) for key, item in value["items"]})
        if kind in SEQUENCES:
            return SEQUENCES[kind](map(self.unpack, value["items"]))
        if kind in BYTES:
            return BYTES[kind](base64.b64decode(value["value"]))
        if kind == "array":
            return self._array(value["name"], value.get("dtype"))
        if kind == "scalar":
            dtype = np.dtype(value["dtype"])
            if dtype.kind not in KINDS:  # bytes of a file would be taken for the address of an object
                raise ValueError(f"a scalar of {dtype}, which this library does not write")
            return np.ndarray((), dtype, base64.b64decode(value["value"]))[()]
        if kind == "complex":
            return complex(*value["value"])
        if kind == "path":
            return Path(value["value"])
        return self._converter.decode(Encoded(kind, self.unpack(value["value"]), self.unpack(value["array"])))

    def _array(self, name: str, dtype: str | None) -> np.ndarray:
        if name not in self._arrays:  # what shared its memory does so again
            with self._archive.open(f"{name}.npy") as file:
                self._arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
        found = self._arrays[name]
        return found if dtype is None else found.view(_dtype(dtype))


def _dtype(name: str) -> np.dtype:
    with suppress(ImportError):
        importlib.import_module("ml_dtypes")  # so that NumPy knows bfloat16 and its like
    return np.dtype(name)

"""Packs small named arrays into bytes, the form of a method's private state in the store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgpack

from hushfleet.array_api import np
from hushfleet.errors import StoreError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_NUMBERS = re.compile(r"[<|][fiub]\d{1,2}")


def pack_arrays(arrays: Mapping[str, ArrayLike]) -> bytes:
    """Packs arrays, little-endian on every machine. Raises `StoreError` for anything but numbers."""
    packed = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            raise StoreError(f"the private array {name!r} has the type {array.dtype}; only numbers can be stored")
        stored = array.astype(array.dtype.newbyteorder("<"))
        packed[name] = [stored.dtype.str, list(array.shape), stored.tobytes()]
    data: bytes = msgpack.packb(packed)
    return data


def unpack_arrays(data: bytes) -> dict[str, np.ndarray]:
    """Unpacks the bytes of `pack_arrays`; raises ValueError or TypeError for other bytes."""
    try:
        arrays, packed = {}, msgpack.unpackb(data)
    except ValueError as error:  # some errors have an empty text
        raise ValueError(f"they are not msgpack: {str(error) or type(error).__name__}") from error
    if not isinstance(packed, dict):
        raise TypeError(f"expected a map of named arrays, got {type(packed).__name__}")
    for name, (dtype, shape, raw) in packed.items():
        if not _NUMBERS.fullmatch(dtype):  # NumPy parses another text as Python, and raises SyntaxError
            raise ValueError(f"{dtype!r} is not a type of numbers")
        array = np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
        arrays[name] = array.astype(array.dtype.newbyteorder("="))
    return arrays

"""Typed values as msgpack, in one form only: what is read must be what the writer would have written.

So repeated keys, padded integers and fields in another order are refused without a rule for each.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgpack

from hushfleet.config.strict import from_plain, to_plain
from hushfleet.errors import Malformed

T = TypeVar("T")


def pack(value: Any) -> bytes:
    """A dataclass of `hushfleet.config.strict` as bytes."""
    return msgpack.packb(to_plain(value), use_bin_type=True)


def unpack(
    kind: type[T],
    data: bytes | memoryview,
    *,
    what: str,
    max_text: int,
    max_bytes: int,
    max_list: int,
    max_map: int,
) -> T:
    """The value of type `kind` that `pack` gave as `data`.

    :param what: how errors call it, as in "the update's header".
    :param max_text: the longest text in bytes; likewise of byte strings, and the most items of lists and of maps.

    Raises `Malformed`, and nothing else.
    """
    try:
        plain = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=max_text,
            max_bin_len=max_bytes,
            max_array_len=max_list,
            max_map_len=max_map,
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises a dozen kinds: its own, ValueError, UnicodeDecodeError, ...
        raise Malformed(f"{what} is not msgpack: {error}") from error
    value = from_plain(kind, plain)
    if pack(value) != data:
        raise Malformed(f"{what} is not written in the canonical form")
    return value

"""Writes and reads the start of blobs: two magic bytes, version, 0, u32 header length, header (msgpack)."""

from __future__ import annotations

import struct

from hushfleet.errors import Malformed, TooLarge

MAX_LAYERS = 4096
MAX_HEADER_BYTES = 1 << 17
_HEAD = struct.Struct("<2sBBI")
HEAD_BYTES = _HEAD.size


def headed(magic: bytes, version: int, header: bytes | memoryview) -> bytes:
    """Returns the start of a blob with this header. Raises `TooLarge`."""
    _check_length(len(header), magic)
    return _HEAD.pack(magic, version, 0, len(header)) + header


def cut_header(data: bytes | memoryview, magic: bytes, version: int) -> tuple[memoryview, memoryview]:
    """Returns the header, still packed, and the bytes after it. Raises `Malformed` or `TooLarge`."""
    view = memoryview(data)
    if len(view) < HEAD_BYTES:
        raise Malformed(f"a blob {magic!r} of {len(view)} bytes is too short")
    *found, header_bytes = _HEAD.unpack_from(view)
    if found != [magic, version, 0]:
        raise Malformed(f"not a blob {magic!r} of version {version}: it begins with {bytes(view[:4]).hex()}")
    _check_length(header_bytes, magic)
    return cut(view[HEAD_BYTES:], header_bytes)


def cut(view: memoryview, length: int) -> tuple[memoryview, memoryview]:
    """Returns the first `length` bytes, and the rest. Raises `Malformed`.

    >>> first, rest = cut(memoryview(b"header values"), 6)
    >>> bytes(first), bytes(rest)
    (b'header', b' values')
    """
    if length > len(view):
        raise Malformed(f"a section of {length} bytes is announced where {len(view)} are left")
    return view[:length], view[length:]


def _check_length(header_bytes: int, magic: bytes) -> None:
    if header_bytes > MAX_HEADER_BYTES:
        raise TooLarge(f"the header of a blob {magic!r} has {header_bytes} bytes, above {MAX_HEADER_BYTES}")

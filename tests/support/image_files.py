"""Image files as bytes, for what no library writes: forms that are rare, large, or meant to do harm; and no files."""

from __future__ import annotations

import os
import socket
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

Tag = tuple[int, int, int, int]
"""The tag, the type, the count, and the value or its place."""


def png_chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *, before: bytes = b"", after: bytes = b"") -> bytes:
    """A black grey image of 8 bits.

    :param before: chunks before the pixels; `after`: behind them.
    """
    packer, row = zlib.compressobj(1), bytes(1 + width)
    pixels = b"".join([*(packer.compress(row) for _ in range(height)), packer.flush()])
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    chunks = (head, before, png_chunk(b"IDAT", pixels), after, png_chunk(b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def tiff(tags: Iterable[Tag]) -> bytes:
    """The head of a TIFF file, little-endian."""
    rows = sorted(tags)
    return b"II*\0" + struct.pack("<IH", 8, len(rows)) + b"".join(struct.pack("<HHII", *row) for row in rows) + bytes(4)


def with_segments(jpeg: bytes, segments: bytes) -> bytes:
    """The JPEG file with these segments in front of its own."""
    return jpeg[:2] + segments + jpeg[2:]


def in_several_scans(grey: bytes) -> bytes:
    """A JPEG file in colour, of the pixels of a grey one three times, each component in a scan of its own: not
    progressive, but libjpeg keeps the whole of it."""
    frame, scan = grey.index(b"\xff\xc0"), grey.index(b"\xff\xda")
    _, bits, height, width, _ = struct.unpack(">HBHHB", grey[frame + 2 : frame + 10])
    behind = frame + 2 + 11  # a frame of one component has 11 bytes
    components = b"".join(bytes([number, 0x11, 0]) for number in (1, 2, 3))
    colour = b"\xff\xc0" + struct.pack(">HBHHB", 17, bits, height, width, 3) + components
    coded = grey[scan + 2 + 8 : -2]  # behind the head of the scan, without the end of the image
    scans = b"".join(
        b"\xff\xda" + struct.pack(">HB", 8, 1) + bytes([number, 0, 0, 63, 0]) + coded for number in (1, 2, 3)
    )
    return grey[:frame] + colour + grey[behind:scan] + scans + b"\xff\xd9"


@contextmanager
def others_than_files(folder: Path) -> Iterator[None]:
    """A pipe, a socket and a device with names of images. A reader of the pipe gets zeros, and does not wait."""
    os.mkfifo(folder / "pipe.jpg")
    end = os.open(folder / "pipe.jpg", os.O_RDWR | os.O_NONBLOCK)
    os.write(end, bytes(4096))
    with socket.socket(socket.AF_UNIX) as listening:
        handle = os.open(folder, os.O_RDONLY)
        listening.bind(f"/proc/self/fd/{handle}/socket.jpg")  # the path of a socket has 108 characters at most
        os.close(handle)
    (folder / "device.jpg").symlink_to("/dev/full")
    yield
    os.close(end)

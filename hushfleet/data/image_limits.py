"""Decides which files are read as images: by their names, and by the memory that decoding takes.

A file of kilobytes may hold pixels of gigabytes. The memory is computed from the head of the file, before any pixel is
decoded, and the same limit holds on boards and in simulations. Tests measure it for each format.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from itertools import islice
from typing import IO, Any

from hushfleet.errors import BadInput

IMAGE_MIB = 128
"""Memory in MiB for reading one image, beside the bytes of its file. The system slows a client down above 60 % of a
board's memory (MemoryHigh= of its unit), 307 of 512 MiB, and a client has 78 MiB before it reads anything."""
FILE_MIB = 64
"""The maximum size of an image file in MiB; some decoders need the whole file in memory."""
MOST_PARTS = 1 << 16
"""The maximum number of segments, chunks or strips in a file, because Pillow keeps some hundred bytes for each."""
TEXT_BYTES = 4 << 20
"""The maximum total of texts that a PNG file may unpack, of which Pillow keeps up to four bytes a character."""
EXIF_BYTES = 1 << 20

DECODERS = ("Jpeg", "Png", "Gif", "Bmp", "Ppm", "WebP", "Tiff", "Avif")
"""Pillow's decoders that are used; the others are never called."""
_MIB = 1 << 20
_JPEG = ("JPEG", "MPO")  # MPO: several JPEG images, of which the first is read
# Bytes for a pixel, measured with Pillow 11, 12 and 13.
_IN_MODE = {"1": 1, "L": 1, "P": 1, "I;16": 6}  # 16-bit grey becomes 8-bit through arrays
_OTHER_MODE = 4
_DECODER: dict[str, int] = {"AVIF": 20, "BMP": 2, "GIF": 1, "PPM": 7, "WEBP": 14}  # beside the image
_ROW = 64  # for a row or a column: pointers, and weights while resizing
_COEFFICIENT = 2  # for a sample of a JPEG image in several scans, which libjpeg keeps whole

_BITS_PER_SAMPLE, _ORIENTATION, _SAMPLES_PER_PIXEL, _TILE_WIDTH, _TILE_LENGTH = 258, 274, 277, 322, 323  # TIFF tags
_BYTE_TYPES = (1, 2, 6, 7)  # of TIFF, which Pillow leaves as bytes
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9  # JPEG markers
_ALONE = (0x01, *range(0xD0, 0xD8))  # JPEG markers without a content


def check_file(file: IO[bytes]) -> None:
    """Checks the size and the number of parts of a file before Pillow opens it. Raises `BadInput`."""
    size = file.seek(0, 2)
    if size > FILE_MIB * _MIB:
        raise BadInput(
            f"the file has {size / _MIB:.0f} MiB, and image files of at most {FILE_MIB} MiB are read; save it smaller"
        )
    file.seek(0)
    if _count_parts(file) > MOST_PARTS:
        raise BadInput(f"the file has more than {MOST_PARTS:,} parts; save the image again")


def check_memory(
    image: Any, whole: tuple[int, int], *, channels: int, size: tuple[int, int], are_bytes: bool = True
) -> None:
    """Checks the memory for decoding, converting and resizing an opened PIL image. Raises `BadInput`.

    :param image: its pixels are not decoded yet, and it has the size to which a JPEG image will be decoded.
    :param whole: width and height in the file.
    :param channels: 1 or 3.
    :param size: width and height to which it will be resized.
    :param are_bytes: whether its pixels become bytes, and not numbers.
    """
    (width, height), wanted = image.size, 1 if channels == 1 and are_bytes else 4
    own = _IN_MODE.get("I;16" if image.mode.startswith("I;16") else image.mode, _OTHER_MODE)
    beside = _decoder_bytes(image, whole)
    copies = max(own + wanted, 2 * wanted) * width * height  # while it is converted, and while it is turned
    lines = _ROW * (width + height) + wanted * size[0] * height
    needed = max(own * width * height + beside, copies) + lines
    if needed > IMAGE_MIB * _MIB:
        is_jpeg, fitting = image.format in _JPEG, whole[0] * whole[1] * IMAGE_MIB * _MIB / needed
        progressive = ", progressive" if is_jpeg and beside else ""
        jpeg = "" if is_jpeg and not beside else f", or as a JPEG{' that is not progressive' * is_jpeg}"
        raise BadInput(
            f"its {whole[0]} x {whole[1]} pixels ({image.format}, {image.mode}{progressive}) take {needed / _MIB:.0f} "
            f"MiB to read, and an image may take {IMAGE_MIB} MiB; save it with at most "
            f"{math.floor(fitting / 1e5) / 10} million pixels{jpeg}"
        )


def check_exif(image: Any) -> None:
    """Checks the size of the camera's data, which Pillow reads as numbers. Raises `BadInput`."""
    if (size := len(image.info.get("exif", b""))) > EXIF_BYTES:
        raise BadInput(f"it has {size / _MIB:.1f} MiB of EXIF data; save it without them")


def _decoder_bytes(image: Any, whole: tuple[int, int]) -> int:
    """Returns what the decoder keeps beside the image."""
    if image.format in _JPEG:
        return _coefficients(image, whole) if _has_several_scans(image) else 0
    if any(codec == "libtiff" for codec, *_ in image.tile):
        return _strips(image)
    return int(_DECODER.get(image.format, 0) * image.width * image.height)


def _has_several_scans(image: Any) -> bool:
    """Returns whether libjpeg will keep the whole image as coefficients, by the rule of libjpeg."""
    components = b""
    for marker, place in islice(_segments(image.fp), MOST_PARTS):
        if marker == _START_OF_SCAN:
            image.fp.seek(place)
            components = image.fp.read(1)
    return "progressive" in image.info or components != bytes([len(image.layer)])


def _coefficients(image: Any, whole: tuple[int, int]) -> int:
    """Returns the bytes that libjpeg needs for all coefficients of a JPEG image."""
    across, down = (max((each[place] for each in image.layer), default=1) for place in (1, 2))
    samples = sum(each[1] * each[2] for each in image.layer) / (across * down)
    blocks = (8 * across, 8 * down)
    width, height = (-(-side // block) * block for side, block in zip(whole, blocks, strict=True))
    return int(_COEFFICIENT * samples * width * height)


def _strips(image: Any) -> int:
    """Returns the bytes for the largest strip or tile of a TIFF image, as it is packed and unpacked.

    Pillow turns such an image while they are there.
    """
    tags, (width, height) = image.tag_v2, image.size
    bits = tags.get(_BITS_PER_SAMPLE, (1,))
    samples = max(len(bits), tags.get(_SAMPLES_PER_PIXEL, 1))
    tile = tags.get(_TILE_WIDTH, 0) * tags.get(_TILE_LENGTH, 0)
    copy = _OTHER_MODE * width * height if tags.get(_ORIENTATION, 1) != 1 else 0
    return int(copy + 2 * max(width * height, tile) * -(-max(bits) * samples // 8))


def _count_parts(file: IO[bytes]) -> int:
    """Counts the segments, chunks or numbers in the head of a file; stops above `MOST_PARTS`."""
    start = file.read(8)
    if start.startswith(b"\xff\xd8"):
        parts: Iterator[object] = _segments(file)
    elif start.startswith(b"\x89PNG"):
        parts = (kind for kind in _png_chunks(file) if kind not in (b"IDAT", b"fdAT"))
    elif start.startswith(b"RIFF"):
        parts = _riff_chunks(file)
    elif start[:2] in (b"II", b"MM"):
        if 43 in start[2:4]:
            raise BadInput("it is a BigTIFF file, and these are not read; save it as a JPEG")
        return max(_tag_counts(file, "<" if start[:2] == b"II" else ">"), default=0)
    else:
        return 0
    return sum(1 for _ in islice(parts, MOST_PARTS + 1))


def _segments(file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """Yields the marker of each segment before the first scan of a JPEG file, and where its content begins."""
    file.seek(2)
    while byte := file.read(1):
        if byte != b"\xff":
            continue
        while byte == b"\xff":
            byte = file.read(1)
        marker = int.from_bytes(byte, "big")
        if not marker or marker in _ALONE:
            continue
        length, place = int.from_bytes(file.read(2), "big"), file.tell()
        yield marker, place
        if marker in (_START_OF_SCAN, _END_OF_IMAGE):
            return
        file.seek(place + max(0, length - 2))


def _png_chunks(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(8)
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        yield kind
        file.seek(length + 4, 1)


def _riff_chunks(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(12)
    while len(head := file.read(8)) == 8:
        kind, length = struct.unpack("<4sI", head)
        yield kind
        file.seek(length + length % 2, 1)


def _tag_counts(file: IO[bytes], order: str) -> Iterator[int]:
    """Yields how many numbers each tag of the first image of a TIFF file has."""
    file.seek(4)
    file.seek(struct.unpack(f"{order}I", file.read(4))[0])
    (count,) = struct.unpack(f"{order}H", file.read(2))
    for _ in range(count):
        _, kind, numbers, _ = struct.unpack(f"{order}HHII", file.read(12))
        if kind not in _BYTE_TYPES:
            yield numbers

"""Finds the FAT partitions of a card image: MBR and GPT, read without mounting anything.

MBR: IBM PC partition table, four entries of 16 bytes at offset 446. GPT: UEFI specification 2.10, section 5.3.
"""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hushfleet.errors import BadInput

SECTOR_BYTES = 512
_GPT_SECTORS = (512, 4096)  # bytes; a GPT does not contain its sector size, but its header is in the second sector
_FAT_TYPES = {0x01, 0x04, 0x06, 0x0B, 0x0C, 0x0E, 0xEF}
_PROTECTIVE = 0xEE
_FAT_GUIDS = {
    uuid.UUID("c12a7328-f81f-11d2-ba4b-00a0c93ec93b"),  # EFI system partition
    uuid.UUID("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7"),  # basic data
}
_MOST_ENTRIES, _MOST_ENTRY_BYTES = 256, 4096


@dataclass(frozen=True)
class DiskPartition:
    """A partition of an image.

    :param start: in bytes.
    :param size: in bytes.
    :param is_fat: whether its type in the table is FAT.
    """

    start: int
    size: int
    is_fat: bool


def read_partitions(image: Path) -> list[DiskPartition]:
    """Reads the partitions in table order. Raises `BadInput` without a table, or if a partition exceeds the file."""
    with image.open("rb") as file:
        length = file.seek(0, 2)
        file.seek(0)
        first = file.read(SECTOR_BYTES)
        if len(first) < SECTOR_BYTES or first[510:] != b"\x55\xaa":
            raise BadInput(f"{image} has no partition table: is it the image of a card, and unpacked?")
        entries = [first[446 + 16 * i : 462 + 16 * i] for i in range(4)]
        if any(entry[4] == _PROTECTIVE for entry in entries):
            partitions = _gpt(file, image)
        else:
            fields = [(entry[4], *struct.unpack_from("<II", entry, 8)) for entry in entries]
            partitions = [
                DiskPartition(start * SECTOR_BYTES, size * SECTOR_BYTES, kind in _FAT_TYPES)
                for kind, start, size in fields
                if kind and size
            ]
    for partition in partitions:
        if partition.start + partition.size > length:
            raise BadInput(
                f"{image} is cut off: a partition ends at byte {partition.start + partition.size} of {length}"
            )
    return partitions


def _gpt(file: BinaryIO, image: Path) -> list[DiskPartition]:
    for sector in _GPT_SECTORS:
        file.seek(sector)
        header = file.read(92)
        if header[:8] == b"EFI PART" and len(header) == 92:
            break
    else:
        raise BadInput(f"{image} has a partition table that announces a GPT, which is missing")
    at, count, size = struct.unpack_from("<QII", header, 72)
    if not 0 < count <= _MOST_ENTRIES or not 128 <= size <= _MOST_ENTRY_BYTES:
        raise BadInput(f"{image} has a GPT of {count} entries of {size} bytes; that is damaged")
    file.seek(at * sector)
    table = file.read(count * size)
    found = []
    for entry in (table[i * size : (i + 1) * size] for i in range(count)):
        if len(entry) == size and any(entry[:16]):
            first, last = struct.unpack_from("<QQ", entry, 32)
            is_fat = uuid.UUID(bytes_le=entry[:16]) in _FAT_GUIDS
            found.append(DiskPartition(first * sector, (last - first + 1) * sector, is_fat))
    return found

"""Reads and copies stock images without mounting anything: partitions, Python versions, architecture, cloud-init.

`debugfs` of e2fsprogs reads ext4 inside a file. Without it, nothing is known about an ext4 root, and the profile of the
board is used. MBR: IBM PC partition table, four entries of 16 bytes at offset 446. GPT: UEFI specification 2.10,
section 5.3.
"""

from __future__ import annotations

import errno
import lzma
import re
import shutil
import struct
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hushfleet.errors import BadInput, HushfleetError, StoreFull
from hushfleet.progress import doing

_ARCHITECTURES = {"aarch64-linux-gnu": "aarch64", "arm-linux-gnueabihf": "armhf", "x86_64-linux-gnu": "x86_64"}
_MAGIC = {"squashfs": (0, b"hsqs"), "erofs": (1024, b"\xe2\xe1\xf5\xe0"), "ext4": (0x438, b"\x53\xef")}
SECTOR_BYTES = 512
_GPT_SECTORS = (512, 4096)  # bytes; a GPT does not contain its sector size, but its header is in the second sector
_FAT_TYPES = {0x01, 0x04, 0x06, 0x0B, 0x0C, 0x0E, 0xEF}
_PROTECTIVE = 0xEE
_FAT_GUIDS = {
    uuid.UUID("c12a7328-f81f-11d2-ba4b-00a0c93ec93b"),  # EFI system partition
    uuid.UUID("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7"),  # basic data
}
_MOST_ENTRIES, _MOST_ENTRY_BYTES = 256, 4096
_BLOCK = 1 << 20


@dataclass(frozen=True)
class System:
    """The system of an image.

    :param pythons: the installed versions, such as `3.13`, newest first; empty: not known.
    :param arch: as in `platform.machine()`.
    :param cloud_init: whether cloud-init is installed.
    :param name: its own name, such as `Debian GNU/Linux 13 (trixie)`.
    :param foreign: why the image cannot contain a system for the client; empty: it can.
    """

    pythons: Sequence[str] = ()
    arch: str | None = None
    cloud_init: bool = False
    name: str = ""
    foreign: str = ""


def read_system(image: Path) -> System:
    """Returns the system of the first root partition that has Python."""
    debugfs = shutil.which("debugfs") or shutil.which("debugfs", path="/usr/sbin:/sbin")
    kinds = []
    for partition in read_partitions(image):
        kind = "" if partition.is_fat else _file_system(image, partition.start)
        if kind == "ext4" and debugfs is None:
            return System()
        if kind == "ext4" and debugfs is not None:
            where = f"{image}?offset={partition.start}"
            programs, libraries = _names(debugfs, where, "/usr/bin"), _names(debugfs, where, "/usr/lib")
            found = [match.groups() for name in programs if (match := re.fullmatch(r"python(\d+)\.(\d+)", name))]
            if found:
                newest_first = sorted((tuple(map(int, numbers)) for numbers in found), reverse=True)
                release = _debugfs(debugfs, where, "cat /usr/lib/os-release")
                named = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
                return System(
                    pythons=tuple(".".join(map(str, numbers)) for numbers in newest_first),
                    arch=next((arch for folder, arch in _ARCHITECTURES.items() if folder in libraries), None),
                    cloud_init="cloud-init" in programs,
                    name=named[1] if named else "",
                )
        kinds += [f"{kind} without Python" if kind == "ext4" else kind] if kind else []
    return System(foreign=f"its partitions hold {', '.join(dict.fromkeys(kinds))}" if kinds else "")


def _file_system(image: Path, start: int) -> str:
    """Returns the name of the file system if it is in `_MAGIC`; empty for another, or none."""
    with image.open("rb") as file:
        file.seek(start)
        head = file.read(2048)
    return next((name for name, (at, magic) in _MAGIC.items() if head[at : at + len(magic)] == magic), "")


def _names(debugfs: str, where: str, folder: str) -> set[str]:
    """Returns the names in a folder. `ls -p` prints /inode/mode/uid/gid/name/size/."""
    listed = _debugfs(debugfs, where, f"ls -p {folder}").splitlines()
    return {line.split("/")[5] for line in listed if line.count("/") > 5}


def _debugfs(debugfs: str, where: str, request: str) -> str:
    done = subprocess.run([debugfs, "-R", request, where], capture_output=True, check=False)
    return done.stdout.decode("utf-8", "replace")


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


def copy_sparse(source: Path, target: Path) -> None:
    """Copies an image, or unpacks an `.xz` image. Afterwards `target` is complete, or does not exist.

    Raises `BadInput` for a damaged `.xz`, `StoreFull` if there is no space, and `HushfleetError` if a disk fails.
    """
    packed = source.suffix == ".xz"
    size = source.stat().st_size >> 20
    # Not alike: empty parts of an image take almost no time, and unpack to gigabytes.
    work = doing(f"{'unpacking' if packed else 'copying'} {source.name}, MiB", total=size, alike=False)
    part = target.with_name(f"{target.name}.part")
    try:
        with work as copied, source.open("rb") as image, part.open("wb") as new:
            old = lzma.LZMAFile(image) if packed else image  # noqa: SIM115 (closing it would close nothing)
            while block := old.read(_BLOCK):
                if any(block):
                    new.write(block)
                else:
                    new.seek(len(block), 1)
                copied.done = image.tell() >> 20
            new.truncate()
        part.replace(target)
    except (lzma.LZMAError, EOFError) as error:  # EOFError: the download was incomplete
        raise BadInput(f"{source} cannot be unpacked: {error}") from error
    except OSError as error:
        if error.filename is not None:  # it could not be opened
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"{target} cannot be written: {error.strerror}; free some space") from error
        raise HushfleetError(f"{source} cannot be copied to {target}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)

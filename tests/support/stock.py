"""Small stock images of cards, as one downloads them: a partition table, and a FAT boot partition with its files."""

from __future__ import annotations

import os
import struct
import subprocess
import uuid
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from hushfleet.firmware_profiles.cards.stock_image import read_partitions
from support.tools import SEARCH_PATH, find

SECTOR = 512
START = 2048 * SECTOR  # bytes
TRIXIE = {
    "config.txt": "arm_64bit=1\n",
    "cmdline.txt": "console=tty1 root=PARTUUID=9710ec8c-02 rootfstype=ext4 fsck.repair=yes rootwait quiet\n",
    "user-data": "#cloud-config\n",
    "meta-data": "dsmode: local\ninstance_id: rpios-image\n",
    "network-config": "network:\n  version: 2\n",
}
BOOKWORM = {
    "config.txt": "arm_64bit=1\n",
    "cmdline.txt": "console=tty1 root=PARTUUID=9710ec8c-02 rootwait init=/usr/lib/raspberrypi-sys-mods/firstboot\n",
    "issue.txt": "Raspberry Pi reference 2025-05-13\n",
}

needs_mtools = pytest.mark.needs("dosfstools", "mtools")


def make_image(path: Path, files: Mapping[str, str] = TRIXIE, *, mib: int = 40, gpt: int = 0) -> Path:
    """One FAT partition from `START` on and an empty Linux partition of 1 MiB behind it.

    :param gpt: 512 or 4096: its sectors' bytes; 0: an MBR.
    """
    fat, root = mib << 20, 1 << 20
    plain = path.with_suffix(".fat")
    mkfs = find("dosfstools")
    assert mkfs is not None
    run = partial(subprocess.run, check=True, capture_output=True)
    run([mkfs, "-n", "bootfs", "-i", "12345678", "-C", plain, str(fat >> 10)])
    for name, text in files.items():
        run(["mcopy", "-i", plain, "-", f"::/{name}"], input=text.encode())
    kinds = [(0x0C, START, fat), (0x83, START + fat, root)]
    with path.open("wb") as image:
        image.truncate(START + fat + root + 34 * SECTOR)
        image.write(gpt_tables(kinds, gpt) if gpt else mbr(kinds))
        image.seek(START)
        image.write(plain.read_bytes())
    plain.unlink()
    return path


def mbr(kinds: list[tuple[int, int, int]]) -> bytes:
    """Of (type, first byte, bytes)."""
    entries = [
        struct.pack("<B3sB3sII", 0, bytes(3), kind, bytes(3), at // SECTOR, size // SECTOR) for kind, at, size in kinds
    ]
    return bytes(446) + b"".join(entries).ljust(64, b"\0") + b"\x55\xaa"


def put_root(image: Path, *names: str, files: Mapping[str, str] | None = None) -> None:
    """An ext4 file system with these empty files below /usr in the second partition. :param files: with their texts."""
    root, ext4 = image.with_suffix(".root"), image.with_suffix(".ext4")
    for name, text in {**dict.fromkeys(names, ""), **(files or {})}.items():
        path = root / "usr" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root.mkdir(exist_ok=True)
    command = ["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(ext4), "1M"]
    subprocess.run(command, env={**os.environ, "PATH": SEARCH_PATH}, check=True, capture_output=True)
    with image.open("r+b") as file:
        file.seek(read_partitions(image)[1].start)
        file.write(ext4.read_bytes())
    ext4.unlink()


def gpt_tables(kinds: list[tuple[int, int, int]], sector: int) -> bytes:
    """The protective MBR, the header and the entries of a GPT."""
    guids = {0x0C: "ebd0a0a2-b9e5-4433-87c0-68b6b72699c7", 0x83: "0fc63daf-8483-4772-8e79-3d69d8477de4"}
    entries = b"".join(
        uuid.UUID(guids[kind]).bytes_le
        + uuid.uuid4().bytes_le
        + struct.pack("<QQQ", at // sector, (at + size) // sector - 1, 0)
        + bytes(72)
        for kind, at, size in kinds
    ).ljust(128 * 128, b"\0")
    start, guid = struct.pack("<8sIIII", b"EFI PART", 0x10000, 92, 0, 0), bytes(16)
    rest = struct.pack("<QQQQ16sQIII", 1, 99, 34, 98, guid, 2, 128, 128, zlib.crc32(entries))
    fields = start + rest
    return mbr([(0xEE, SECTOR, SECTOR)]).ljust(sector, b"\0") + fields.ljust(sector, b"\0") + entries


def read_back(image: Path, folder: Path) -> dict[str, bytes]:
    """All files of the boot partition, by path, as mtools reads them."""
    folder.mkdir()
    subprocess.run(
        ["mcopy", "-s", "-n", "-Q", "-i", f"{image}@@{START}", "::/*", str(folder)], check=True, capture_output=True
    )
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

"""Wanted: a board whose memory is used up, by an archive that few bytes make large.

The release is signed by the right key, on a build machine that was broken into. Root unpacks it on a board with 512 MB.
The child of each test may use `ROOM_BYTES` more than it has when it begins.
"""

from __future__ import annotations

import io
import lzma
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOM_BYTES, BOMB_BYTES = 64 << 20, 192 << 20
CHILD = """
import json, lzma, resource, sys, tarfile
from pathlib import Path
from types import SimpleNamespace
from hushfleet.release.archive import unpack

def unpack_of_0_3_0(file, manifest, folder):
    folder.mkdir()
    with tarfile.open(fileobj=file, mode="r|xz") as tar:
        for entry in tar:
            if not entry.isreg() or entry.sparse is not None:
                raise ValueError(entry.name[:80])
            tar.members.clear()

now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + int(sys.argv[3]),) * 2)
call = {"as it was": unpack_of_0_3_0, "now": unpack}[sys.argv[1]]
manifest = SimpleNamespace(version="2.0", unpacked_bytes=1 << 30, entries=100)
try:
    with open(sys.argv[2], "rb") as file:
        call(file, manifest, Path(sys.argv[2]).parent / sys.argv[1])
except BaseException as error:
    print(type(error).__name__, str(error)[:200])
"""


def header(kind: bytes, size: int) -> bytes:
    entry = tarfile.TarInfo("a")
    entry.type, entry.size = kind, size
    return entry.tobuf(tarfile.GNU_FORMAT)


def zeros() -> Iterator[bytes]:
    for _ in range(BOMB_BYTES >> 20):
        yield bytes(1 << 20)


def a_long_name(kind: bytes) -> Iterator[bytes]:
    yield header(kind, BOMB_BYTES)
    yield from zeros()
    yield header(tarfile.REGTYPE, 0)


def a_sparse_file_of_many_parts() -> Iterator[bytes]:
    """GNU's first form: blocks of 21 parts follow the header, as long as each says so."""
    first = bytearray(header(tarfile.GNUTYPE_SPARSE, 0))
    first[482] = 1
    first[148:156] = b" " * 8
    first[148:156] = b"%06o\0 " % sum(first)
    yield bytes(first)
    part = b"%011o\0" % 1
    block = (part * 42).ljust(504, b"\0") + b"\1" + bytes(7)
    for _ in range(BOMB_BYTES >> 22):  # 42 numbers take more memory than the 512 bytes that they stand in
        yield block * 2048


def a_sparse_file_of_many_numbers() -> Iterator[bytes]:
    """Version 1.0: how many parts it has stands in the content, and so do they."""
    records = b"".join(
        b"%d %s=%s\n" % (len(key) + len(value) + 5, key, value)
        for key, value in ((b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"))
    )
    yield header(tarfile.XHDTYPE, len(records)) + records.ljust(512, b"\0")
    yield header(tarfile.REGTYPE, 512)
    yield b"99999999\n".ljust(512, b"0")[:511] + b"\n"
    for _ in range(BOMB_BYTES >> 22):
        yield b"1\n" * (1 << 20)


def packed(parts: Iterator[bytes]) -> bytes:
    compressor = lzma.LZMACompressor(preset=0)
    return b"".join(map(compressor.compress, parts)) + compressor.flush()


def a_large_dictionary() -> bytes:
    """The header of xz's first block says how much memory is needed: here 3 GiB."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a"))
    small = lzma.compress(plain.getvalue(), filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}])
    size = 4 * (small[12] + 1)
    block = bytearray(small[12 : 12 + size - 4])
    block[block.index(b"\x21\x01") + 2] = 39
    return small[:12] + bytes(block) + struct.pack("<I", zlib.crc32(block)) + small[12 + size :]


BOMBS = {
    "GNU's long name": lambda: packed(a_long_name(tarfile.GNUTYPE_LONGNAME)),
    "GNU's long link": lambda: packed(a_long_name(tarfile.GNUTYPE_LONGLINK)),
    "attributes by pax": lambda: packed(a_long_name(tarfile.XHDTYPE)),
    "attributes of all by pax": lambda: packed(a_long_name(tarfile.XGLTYPE)),
    "many parts": lambda: packed(a_sparse_file_of_many_parts()),
    "many numbers": lambda: packed(a_sparse_file_of_many_numbers()),
    "a large dictionary": a_large_dictionary,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_that_needs_much_memory(bomb: str, tmp_path: Path) -> None:
    payload = tmp_path / "payload"
    payload.write_bytes(BOMBS[bomb]())
    assert payload.stat().st_size < 1 << 20

    def unpacked(how: str) -> str:
        command = [sys.executable, "-c", CHILD, how, str(payload), str(ROOM_BYTES)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "memory" in unpacked("as it was").lower()
    assert unpacked("now").startswith("Malformed")

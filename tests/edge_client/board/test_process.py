"""Memory that the client's process returns to the system."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from hushfleet.edge_client.board.process import return_idle_code

BYTES = 1 << 22


def resident(name: str) -> int:
    """KiB of a file's pages that this process has in memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            inside = line.endswith(name)
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


def test_pages_of_files_are_returned_and_read_again(tmp_path: Path) -> None:
    content = os.urandom(BYTES)
    with (tmp_path / "library").open("w+b") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        with mmap.mmap(file.fileno(), BYTES, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as library:
            assert library[:] == content
            assert resident(str(file.name)) == BYTES >> 10
            return_idle_code()
            if ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(0), ctypes.c_size_t(0), 21):
                pytest.skip("a kernel before Linux 5.4")
            assert resident(str(file.name)) < BYTES >> 12
            assert library[:] == content

"""Reads files that the client writes for root in the state directory, which may contain an attacker's links and pipes.

One of them is the line with which a board's charges are kept a second time, outside of the store's file system. The
client writes STATE/charged.txt; root's timer copies it to the boot partition, from which `slots.py begin` hands it to
the client at its next start. So a store that was put back, with all of its file system, is still detected. The line has
no secret and nothing of the board's data.

It uses only the standard library, like `slots.py`: both are in `slots.pyz`.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from pathlib import Path
from typing import NamedTuple

from hushfleet.edge_client.storage.state_files import CHARGED

_LINE = re.compile(r"([0-9a-f]{64}) ([0-9]{1,18}) ([0-9.e+-]{1,24}) ([0-9a-f]{8})")
_MOST_BYTES = 160


def open_inside(folder: Path, name: str) -> int:
    """Opens a regular file; no link is followed. Raises `OSError`."""
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=inside)
    finally:
        os.close(inside)
    if not os.path.isfile(f"/proc/self/fd/{handle}"):
        os.close(handle)
        raise OSError(f"{folder / name} is not a file")
    return handle


def read_inside(folder: Path, name: str, most: int = 64) -> tuple[str, int]:
    """Reads the first `most` bytes of a file, and when it was written (nanoseconds); empty and 0 if there is none."""
    with contextlib.suppress(OSError):
        handle = open_inside(folder, name)
        try:
            return os.read(handle, most).decode("ascii", "replace").strip(), os.fstat(handle).st_mtime_ns
        finally:
            os.close(handle)
    return "", 0


def remove_inside(folder: Path, name: str) -> None:
    """Removes a file, if that is possible."""
    with contextlib.suppress(OSError):
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.unlink(name, dir_fd=inside)
        finally:
            os.close(inside)


def clear_inside(folder: Path) -> None:
    """Removes the releases in `folder`."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.endswith(".hfr"):
                remove_inside(folder, name)


def only_release(folder: Path) -> Path:
    """Returns the only release in `folder`. Raises `OSError` if there is not exactly one."""
    names = [] if folder.is_symlink() else sorted(name for name in os.listdir(folder) if name.endswith(".hfr"))
    if len(names) != 1:
        raise OSError(f"{folder} has {len(names)} releases; it must have exactly one")
    return folder / names[0]


class ChargeLine(NamedTuple):
    """The charges of a store.

    :param key: the public key of its device, 64 hex digits: the line of another store is ignored.
    :param rounds: the number of charged rounds.
    :param weight: the sum of `Charge.weight`.
    """

    key: str
    rounds: int
    weight: float

    @property
    def text(self) -> str:
        said = f"{self.key} {self.rounds} {self.weight!r}"
        return f"{said} {zlib.crc32(said.encode()):08x}\n"

    @classmethod
    def read(cls, folder: Path) -> ChargeLine | None:
        """Reads the line in a folder; None if there is none, or it was cut or damaged."""
        found = _LINE.fullmatch(read_inside(folder, CHARGED, _MOST_BYTES)[0])
        try:
            line = None if found is None else cls(found[1], int(found[2]), float(found[3]))
        except ValueError:
            return None
        return line if line is not None and found is not None and line.text.split()[3] == found[4] else None

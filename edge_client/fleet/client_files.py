"""Reads files that the client writes for root in the state directory, which may contain an attacker's links and pipes.

It uses only the standard library, like `slots.py`: both are in `slots.pyz`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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

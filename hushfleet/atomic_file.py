"""A file that is there whole or not at all, whenever the process or the machine dies."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from hushfleet.errors import StoreFull


def write_whole(path: Path, data: bytes, *, durable: bool) -> None:
    """Writes beside the place, syncs, renames, and syncs the folder, which is made. Raises `StoreFull`.

    A reader sees the old file or the new one.

    :param durable: False leaves syncing to the operating system: for simulations only.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(part, path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        advice = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StoreFull(f"{path} cannot be written: {error.strerror}{advice}") from error


def sync_folder(folder: Path) -> None:
    """Syncs a folder: new, renamed and deleted entries survive a power cut from now on. Raises `OSError`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

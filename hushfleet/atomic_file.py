"""Writes a file atomically: it is there whole or not at all, even if the process or the machine dies. Reads notes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

from hushfleet.errors import StoreFull

PART_SUFFIX = ".part"
"""Suffix of the temporary file, which a kill leaves behind."""


def write_whole(path: Path, data: bytes, *, durable: bool, mode: int | None = None) -> None:
    """Writes a temporary file next to `path`, syncs it, renames it, and syncs the folder. Raises `StoreFull`.

    Creates the folder if it is missing. A reader sees the old file or the new one.

    :param durable: False leaves syncing to the operating system: for simulations only.
    :param mode: permissions, such as 0o600 for a secret, whatever the umask; nobody else can open the file earlier.
    """
    part = path.with_name(path.name + PART_SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if mode is not None:
            part.unlink(missing_ok=True)  # others may have it open
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600 if mode else 0o666)) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
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
    """Syncs a folder, so that its new, renamed and deleted entries survive a power cut. Raises `OSError`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; returns an empty one if there is none, or the file is damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text("utf-8"))
        return content if isinstance(content, dict) else {}
    return {}

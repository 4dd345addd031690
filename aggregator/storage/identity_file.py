"""Keeps the aggregator's key in a file of its own, because it must outlive a run.

Devices pin the first key that they receive and obey no other, so every run of a federation is signed with the same
key. It belongs to the operator, not to a run folder: if it is lost, the new key must be set on each device.

Next to it, `<name>.epoch` holds the number of the key's newest start. Devices refuse messages with an older number, so
that nobody can bring back an earlier run by publishing messages that it once signed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from hushfleet.atomic_file import sync_folder
from hushfleet.errors import BadInput, StoreError
from hushfleet.user_files import user_config_dir
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import MAX_INT


def default_path(federation: str) -> Path:
    """Returns the federation's key file in the user's configuration folder. Raises `BadInput` if there is no folder."""
    return user_config_dir() / f"{federation}.key"


def load_or_create(path: Path) -> Identity:
    """Returns the key in `path`; creates it (mode 0600) if there is none yet. Raises `BadInput` or `StoreError`."""
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create(path)
        return Identity.from_bytes(path.read_bytes())
    except OSError as error:
        raise StoreError(f"the aggregator's key {path} cannot be read or made: {error.strerror}") from error


def load(path: Path) -> Identity:
    """Returns the key in `path`, and never creates one. Raises `BadInput` if there is none, or it is damaged."""
    try:
        return Identity.from_bytes(path.read_bytes())
    except OSError as error:
        raise BadInput(f"there is no private key to read in {path}: {error.strerror}") from error
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error


def epoch_file(path: Path) -> Path:
    """Returns the file with the number of the newest start of the key in `path`."""
    return path.with_name(f"{path.name}.epoch")


def last_epoch(path: Path) -> int:
    """Returns the number of the newest start of the key in `path`; 0 if it is not known."""
    with contextlib.suppress(OSError):
        text = epoch_file(path).read_bytes()[:32].strip()
        return int(text) if text.isdigit() else 0
    return 0


def next_epoch(path: Path, *, clock: Callable[[], float] = time.time) -> int:
    """Returns the number of this start of the key in `path`: above all earlier ones, and synced before it is returned.

    It is the time in Unix seconds if that is above the last number: so a counter that was lost starts above the numbers
    that devices have seen, and a temporarily wrong clock does no harm while the counter exists. Raises `StoreError`.
    """
    file = epoch_file(path)
    try:
        with open(os.open(file, os.O_CREAT | os.O_RDWR, 0o600), "r+b") as counter:
            fcntl.flock(counter, fcntl.LOCK_EX)  # two aggregators that start at once get different numbers
            text = counter.read(32).strip()
            last = int(text) if text.isdigit() else 0
            epoch = max(last + 1 if last < MAX_INT else 0, int(clock()))
            counter.seek(0)
            counter.write(b"%019d\n" % epoch)
            counter.truncate()
            counter.flush()
            os.fsync(counter.fileno())
            sync_folder(path.parent)  # for the counter's name, if it is new
    except OSError as error:
        raise StoreError(f"the counter of starts {file} cannot be read or written: {error.strerror}") from error
    return epoch


def _create(path: Path) -> None:
    """Writes a new key under another name, then links it: if two aggregators start at once, only one key remains.

    The folder is synced before the key is used: devices that had pinned a key that a power cut then deleted would
    not obey any aggregator any more.
    """
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with open(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(Identity.generate().to_bytes())
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        sync_folder(path.parent)
    finally:
        fresh.unlink(missing_ok=True)

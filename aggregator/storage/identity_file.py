"""The aggregator's key in a file of its own, because it must outlive a run.

Devices pin the first key that they meet and obey no other, so every run of a federation is signed with the same
one. It belongs to the operator, not to a run folder: lose it, and each device must be told of the new one.

Beside it, in `<name>.epoch`, is the number of the key's newest start. Devices refuse what names an older one, so that
nobody can bring back an earlier run by publishing what it once signed.
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
    """Below the user's configuration folder, one file for each federation. Raises `BadInput` where there is none."""
    return user_config_dir() / f"{federation}.key"


def load_or_create(path: Path) -> Identity:
    """The key in `path`, made there (mode 0600) if there is none yet. Raises `BadInput` or `StoreError`."""
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create(path)
        return Identity.from_bytes(path.read_bytes())
    except OSError as error:
        raise StoreError(f"the aggregator's key {path} cannot be read or made: {error.strerror}") from error


def load(path: Path) -> Identity:
    """The key in `path`, which is never made here. Raises `BadInput` where there is none, or it is damaged."""
    try:
        return Identity.from_bytes(path.read_bytes())
    except OSError as error:
        raise BadInput(f"there is no private key to read in {path}: {error.strerror}") from error
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error


def epoch_file(path: Path) -> Path:
    """The file with the number of the newest start of the key in `path`."""
    return path.with_name(f"{path.name}.epoch")


def last_epoch(path: Path) -> int:
    """The number of the newest start of the key in `path`; 0 where it is not known."""
    with contextlib.suppress(OSError):
        text = epoch_file(path).read_bytes()[:32].strip()
        return int(text) if text.isdigit() else 0
    return 0


def next_epoch(path: Path, *, clock: Callable[[], float] = time.time) -> int:
    """The number of this start of the key in `path`: above all before it, synced before it is returned.

    Unix seconds where they are more than one above the last: so a counter that was lost starts above what devices have
    seen, and a clock that is wrong for a while does no harm as long as the counter is there. Raises `StoreError`.
    """
    file = epoch_file(path)
    try:
        with open(os.open(file, os.O_CREAT | os.O_RDWR, 0o600), "r+b") as counter:
            fcntl.flock(counter, fcntl.LOCK_EX)  # of two aggregators that start at once, each gets its own
            text = counter.read(32).strip()
            last = int(text) if text.isdigit() else 0
            epoch = max(last + 1 if last < MAX_INT else 0, int(clock()))
            counter.seek(0)
            counter.write(b"%019d\n" % epoch)
            counter.truncate()
            counter.flush()
            os.fsync(counter.fileno())
            sync_folder(path.parent)  # the counter's name, where it is new
    except OSError as error:
        raise StoreError(f"the counter of starts {file} cannot be read or written: {error.strerror}") from error
    return epoch


def _create(path: Path) -> None:
    """Written whole under another name, then linked: of two aggregators that start at once, one key stays.

    The folder is synced before anybody is shown the key: devices that had pinned one which a power cut took away would
    obey no aggregator any more.
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

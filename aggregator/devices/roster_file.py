"""Reads the roster of devices for secure sums from a file that may change while the aggregator runs."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from hushfleet.errors import WireError
from hushfleet.secure.roster import Roster

log = logging.getLogger("hushfleet.aggregator")


class RosterFile:
    """Reads the file again before each round if it has changed; a damaged file is skipped with a warning."""

    def __init__(self, file: Path) -> None:
        self.path = file
        self._seen: tuple[int, ...] | None = None
        self._roster: Roster | None = None

    def current(self) -> Roster | None:
        """Returns the newest roster that could be read; None if there is no file, or no roster could be read yet."""
        try:
            status = self.path.stat()
            # the last one changes if somebody lets the aggregator read a file that it could not read
            seen = status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns
            if seen != self._seen:
                self._seen = seen
                self._roster = Roster.from_bytes(self.path.read_bytes())
        except FileNotFoundError:
            self._seen = self._roster = None
        except (OSError, WireError) as error:
            log.warning("the roster %s cannot be read, so the one before it stays: %s", self.path, error)
        return self._roster


def last_signed(file: Path, operator: bytes) -> Roster | None:
    """Reads the roster in `file`; returns None if there is none that this key has signed."""
    with contextlib.suppress(OSError, WireError):
        return Roster.from_bytes(file.read_bytes(), operator=operator)
    return None

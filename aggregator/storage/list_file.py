"""Reads a list of boards from a file that may change while the aggregator runs: a membership list, or the admission
list."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from hushfleet.errors import WireError
from hushfleet.secure.membership_list import MembershipList

Content = TypeVar("Content")
log = logging.getLogger("hushfleet.aggregator")


class ListFile(Generic[Content]):
    """Reads the file again if it has changed; one that is damaged or refused is skipped with a warning.

    :param read: makes the list of the file's bytes. Raises a `WireError` for one that must not be used.
    :param name: of the list, for the warning.
    """

    def __init__(self, file: Path, read: Callable[[bytes], Content], *, name: str = "roster") -> None:
        self.path, self._read, self._name = file, read, name
        self._seen: tuple[int, ...] | None = None
        self._content: Content | None = None

    def current(self) -> Content | None:
        """Returns the newest list that could be read; None if there is no file, or no list could be read yet."""
        try:
            status = self.path.stat()
            # the last one changes if somebody lets the aggregator read a file that it could not read
            seen = status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns
            if seen != self._seen:
                self._seen = seen
                self._content = self._read(self.path.read_bytes())
        except FileNotFoundError:
            self._seen = self._content = None
        except (OSError, WireError) as error:
            log.warning("the %s %s cannot be read, so the one before it stays: %s", self._name, self.path, error)
        return self._content


def membership_list_file(file: Path) -> ListFile[MembershipList]:
    """Reads the membership list of secure aggregation, whoever has signed it: boards check that."""
    return ListFile(file, MembershipList.from_bytes)

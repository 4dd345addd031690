"""Deletes the oldest of a board's images or CSV files, where its owner has said how long or how many may stay.

Nothing is deleted unless `data.keep` or `data.max_mib` is set, and never more than they ask for. A wrong clock must
delete nothing. So a file goes when it was too old at the daily look before, too: a clock that was wrong for less than a
day changes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hushfleet import atomic_file
from hushfleet.data.folder import named
from hushfleet.durations import duration_s
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.errors import StoreError

FILE_NAME = "retention.json"
ENDINGS = {
    "folder": (".bmp", ".gif", ".heic", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"),
    "csv": (".csv",),
}
"""Only files with these endings are deleted."""
LOOK_S = 3600.0
DAY_S = 86400.0
MIB = 1 << 20

_log = logging.getLogger("hushfleet.edge")


class _File(NamedTuple):
    """:param came: unix seconds at which it came into its folder; a copy or a move sets it, and no program can."""

    came: float
    path: str
    size: int


class Retention:
    """The deletions of one board.

    :param section: where the data are, and what the owner has set.
    :param state_dir: keeps the time of the last daily look.
    :param now: unix seconds.
    """

    def __init__(self, section: OwnDataSection, state_dir: Path, *, now: Callable[[], float] = time.time) -> None:
        self._section, self._now = section, now
        self._note = state_dir / FILE_NAME
        self._due_at = 0.0 if section.keep or section.max_mib else float("inf")
        self._said = ""

    def advance(self, clock: float) -> None:
        """Deletes what is due, at most once an hour.

        :param clock: monotonic seconds.
        """
        if clock < self._due_at:
            return
        self._due_at = clock + LOOK_S
        files = sorted(self._files())
        if self._section.keep:
            limit = self._came_before(duration_s(self._section.keep))
            old = [file for file in files if file.came < limit]
            self._delete(old, f"data.keep = {self._section.keep!r}")
            files = files[len(old) :]
        if self._section.max_mib:
            excess = sum(file.size for file in files) - self._section.max_mib * MIB
            count = 0
            while excess > 0 and count < len(files):
                excess -= files[count].size
                count += 1
            self._delete(files[:count], f"data.max_mib = {self._section.max_mib}")

    def _came_before(self, keep_s: float) -> float:
        """The time before which a file must have come to be deleted now, by the daily look before this one."""
        now, last = self._now(), None
        with suppress(OSError, ValueError, TypeError, KeyError):
            last = float(json.loads(self._note.read_text("utf-8"))["looked"])
        if last is not None and 0 <= now - last < DAY_S:
            return -float("inf")
        with suppress(StoreError):  # a full disk is told elsewhere
            atomic_file.write_whole(self._note, json.dumps({"looked": now}).encode(), durable=True)
        return -float("inf") if last is None or now < last else last - keep_s

    def _files(self) -> list[_File]:
        """The files that may be deleted: what links lead to, hidden files and held-out ones are no such files."""
        section, found = self._section, dict[str, _File]()
        for folder in filter(None, (section.path, section.inbox, section.unlabelled)):
            for top, folders, names in os.walk(os.path.realpath(folder)):
                folders[:] = [name for name in folders if not name.startswith(".")]
                for path in (os.path.join(top, name) for name in names if not name.startswith(".")):
                    with suppress(OSError):  # it was moved meanwhile
                        status = os.lstat(path)
                        if stat.S_ISREG(status.st_mode) and path.lower().endswith(ENDINGS[section.kind]):
                            found[path] = _File(status.st_ctime, path, status.st_size)
        held_out = section.held_out and os.path.join(os.path.realpath(section.held_out), "")
        return [file for file in found.values() if not (held_out and file.path.startswith(held_out))]

    def _delete(self, files: Sequence[_File], why: str) -> None:
        deleted, failed = list[str](), ""
        for file in files:
            try:
                os.unlink(file.path)
                deleted.append(file.path)
            except FileNotFoundError:
                continue
            except OSError as error:
                failed = f"{file.path}: {error.strerror}"
                break
        if deleted:
            _log.info("%s: deleted %d files, the oldest: %s", why, len(deleted), named(deleted))
        if failed and failed != self._said:
            _log.error(
                "%s: cannot delete %s; the client's user must own its folder, and its unit allow it "
                "(ReadWritePaths=, docs/field.md)", why, failed,
            )  # fmt: skip
        self._said = failed

"""Deletes the oldest of a board's images or CSV files, if its owner has limited their age or their size.

Nothing is deleted unless `data.keep` or `data.max_mib` is set, and never more than they require. A wrong clock must
delete nothing. So a file is deleted only if it was also too old at the previous daily check: a clock that was ahead for
less than a day changes nothing. A file that arrived while the clock was behind has a date that is too old. It counts as
arrived when the clock is right again (`_redated`).

`data.keep` decides about each file by its own age. With `data.max_mib` a large file is the end of others. It deletes by
arrival, so a file of an earlier window of data never decides about one of the present window; tasks that protect single
records refuse it (`by_content`).
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from hushfleet import atomic_file
from hushfleet.data.walk import ENDINGS_OF, named, walked
from hushfleet.durations import duration_s
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.storage.state_files import FEATURES, RETENTION
from hushfleet.errors import StoreError

LOOK_S = 3600.0
DAY_S = 86400.0
MIB = 1 << 20

_log = logging.getLogger("hushfleet.edge")


class _File(NamedTuple):
    """:param came: unix seconds when it arrived in its folder; a copy or a move sets this, and no program can."""

    came: float
    path: str
    size: int


@dataclass(frozen=True)
class _Looks:
    """Times that are kept from one check to the next.

    :param looked: unix seconds of the last daily check.
    :param behind: the clock's time when it was first found to be earlier than `looked`; None if it is not.
    :param came: arrival times, by path, of files whose own dates may come from a clock that was behind.
    """

    looked: float
    behind: float | None = None
    came: dict[str, float] = field(default_factory=dict)


class Retention:
    """The deletions of one board.

    :param section: where the data are, and what the owner has set.
    :param state_dir: the folder for the time of the last daily check, and the corrected dates.
    :param now: unix seconds.
    :param arrived: as `Arrivals.of_file`.
    """

    def __init__(
        self,
        section: OwnDataSection,
        state_dir: Path,
        *,
        now: Callable[[], float] = time.time,
        arrived: Callable[[str], float | None] = lambda path: None,
    ) -> None:
        self._section, self._now, self._arrived = section, now, arrived
        self._arrivals: dict[_File, float] = {}
        self._note = state_dir / RETENTION
        self._due_at = 0.0 if section.keep or section.max_mib else float("inf")
        self._said = ""
        self._looks: _Looks | None = None

    def advance(self, clock: float) -> None:
        """Deletes what is due, at most once an hour.

        :param clock: monotonic seconds.
        """
        if clock < self._due_at:
            return
        self._due_at = clock + LOOK_S
        files, before = self._look()
        if self._section.keep:
            limit = before - duration_s(self._section.keep)
            old = [file for file in files if file.came < limit]
            self._delete(old, f"data.keep = {self._section.keep!r}")
            files = files[len(old) :]
        if self._section.max_mib:
            excess = sum(file.size for file in files) - self._section.max_mib * MIB
            files, count = self._by_arrival(files) if excess > 0 else files, 0
            while excess > 0 and count < len(files):
                excess -= files[count].size
                count += 1
            self._delete(files[:count], f"data.max_mib = {self._section.max_mib}")

    def _by_arrival(self, files: Sequence[_File]) -> list[_File]:
        """Sorts by the arrival of the content: a file that was copied or touched is as old as before.

        Arrivals are in counted time, which may be far behind the clock, and what waits in the inbox has none. Therefore
        dates are compared: of each file with an arrival, the earliest date of those that arrived with it or later.
        """
        self._arrivals = {file: at for file in files if (at := self._arrivals.get(file) or self._arrived(file.path))}
        order, came = {file: (file.came, 0.0, file.path) for file in files}, float("inf")
        for at, file in sorted(((at, file) for file, at in self._arrivals.items()), reverse=True):
            came = min(came, file.came)
            order[file] = came, at, file.path
        return sorted(files, key=order.__getitem__)

    def _look(self) -> tuple[list[_File], float]:
        """Returns the files that may be deleted, the oldest first; and the time of the previous daily check, or minus
        infinity if this is no daily check."""
        now, files, before = self._now(), self._files(), -float("inf")
        kept = self._looks or self._read()
        looks = kept or _Looks(now)
        if now < looks.looked:
            if looks.behind is None or now < looks.behind:
                looks = replace(looks, behind=now)
            elif now - looks.behind >= DAY_S:  # the clock is right, and was ahead before
                looks = _Looks(now, came={path: came for path, came in looks.came.items() if came <= now})
        else:
            looks = replace(looks, behind=None, came=_redated(files, looks, now))
            if now - looks.looked >= DAY_S:
                before, looks = looks.looked, replace(looks, looked=now)
        if looks != kept:
            self._looks = looks  # used if the disk is too full for the note
            with suppress(StoreError):  # this is reported elsewhere
                atomic_file.write_whole(self._note, json.dumps(asdict(looks)).encode(), durable=True)
        known = {path: came for path, came in looks.came.items() if came <= now}
        if looks.behind is not None:  # files that arrived since then are the newest, with the oldest dates
            since = looks.looked + DAY_S - looks.behind
            known |= {file.path: file.came + since for file in files if abs(file.came - looks.behind) < DAY_S}
        return sorted(file._replace(came=max(file.came, known.get(file.path, file.came))) for file in files), before

    def _read(self) -> _Looks | None:
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            plain = json.loads(self._note.read_text("utf-8"))
            behind, came = plain.get("behind"), plain.get("came", {})
            return _Looks(
                float(plain["looked"]),
                None if behind is None else float(behind),
                {path: float(at) for path, at in came.items()},
            )
        return None

    def _files(self) -> list[_File]:
        """Returns the files that may be deleted; this excludes targets of links, hidden files and held-out files."""
        section, found = self._section, dict[str, _File]()
        for folder in filter(None, (section.path, section.inbox, section.unlabelled)):
            for top, folders, names in walked(os.path.realpath(folder)):
                folders[:] = [name for name in folders if not name.startswith(".")]
                for path in (os.path.join(top, name) for name in names if not name.startswith(".")):
                    with suppress(OSError):  # it was moved meanwhile
                        status = os.lstat(path)
                        if stat.S_ISREG(status.st_mode) and path.lower().endswith(ENDINGS_OF[section.kind]):
                            found[path] = _File(status.st_ctime, path, status.st_size)
        held_out = os.path.realpath(section.held_out) if section.held_out else None
        return [file for file in found.values() if held_out is None or not Path(file.path).is_relative_to(held_out)]

    def _delete(self, files: Sequence[_File], why: str) -> None:
        deleted, failed = list[str](), ""
        for file in files:
            try:
                os.unlink(file.path)
                deleted.append(file.path)
            except FileNotFoundError:
                continue
            except OSError as error:  # the others are deleted nevertheless: no file decides about another
                failed = failed or f"{file.path}: {error.strerror}"
        if deleted:
            with suppress(OSError):  # they are also of the deleted samples, and the next round makes the others' again
                self._note.with_name(FEATURES).unlink(missing_ok=True)
            _log.info("%s: deleted %d files, the oldest: %s", why, len(deleted), named(deleted))
        if failed and failed != self._said:
            _log.error(
                "%s: cannot delete %s; the client's user must own its folder, and its unit allow it "
                "(ReadWritePaths=, docs/field.md)", why, failed,
            )  # fmt: skip
        self._said = failed


def _redated(files: Sequence[_File], looks: _Looks, now: float) -> dict[str, float]:
    """Returns the arrival times of files with doubtful dates, by path: now, unless noted before.

    A date is doubtful if the clock was found to be behind, and the date is less than a day from that time. It is also
    doubtful if no daily check was made for two days, and the date is later than the last check: the board may have been
    off, and its clock may have continued where it had stopped.
    """
    gap = looks.looked if now - looks.looked > 2 * DAY_S else float("inf")
    doubted = (
        file.path
        for file in files
        if file.came >= gap or (looks.behind is not None and abs(file.came - looks.behind) < DAY_S)
    )
    there = {file.path for file in files}
    return {path: came for path, came in looks.came.items() if path in there} | {
        path: looks.came.get(path, now) for path in doubted
    }

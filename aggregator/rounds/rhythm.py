"""Decides when a run's rounds may be open: by schedule and the operator's pause, across restarts and clock jumps.

The time that has really passed since the last round opened decides. While the process lives, a clock that is set
forward or back moves the time of that opening by the same amount, also in the store. If a clock was set back while
nothing ran, the opening may be in the future: then it counts as now.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from hushfleet.aggregator.config.calendar import Schedule
from hushfleet.aggregator.config.schedule import ScheduleSection
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import StoreError

JUMP_S = 2.0
"""If a clock moves by less than this against the time since the machine's start, this is a correction, not a jump."""
_KEY = "last_opening"

log = logging.getLogger("hushfleet.aggregator")


def since_boot() -> float:
    """Returns seconds of a clock that nobody sets, and that runs while the machine sleeps if the system has one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Rhythm:
    """The times at which the rounds of a stored run open.

    :param pause: a file; while it exists, training is paused.
    :param wall: unix seconds; also an attribute.
    :param elapsed: monotonic seconds.
    """

    def __init__(
        self,
        section: ScheduleSection,
        store: AggregatorStore,
        *,
        pause: Path | None = None,
        wall: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = since_boot,
    ) -> None:
        self.until = section.until
        self._schedule = Schedule(section) if section.is_set else None
        self._store, self._pause = store, pause
        self.wall = self._wall = wall
        self._elapsed = elapsed
        self._offset = wall() - elapsed()
        self._opens = self._ends = 0.0  # last results, which are valid until these times
        self._last = self._read()

    @property
    def zone(self) -> str:
        """The name of the schedule's time zone."""
        return "UTC" if self._schedule is None else self._schedule.zone

    @property
    def paused(self) -> bool:
        """True if an operator has paused training."""
        return self._pause is not None and self._pause.exists()

    def opens(self) -> float:
        """Returns when the next round may open, in unix seconds, now or later; infinity if none opens any more."""
        now = self._now()
        if self._schedule is not None and self._opens <= now:
            self._opens = self._schedule.opens(now, last=self._last)
        return max(now, self._opens)

    def is_due(self) -> bool:
        """Returns whether the next round may open now."""
        return not self.paused and self.opens() <= self._now()

    def left_s(self) -> float:
        """Returns seconds until the window that is open now ends: 0 if none is, infinity if there are no windows."""
        now = self._now()
        if self._schedule is not None and self._ends <= now:
            self._ends = self._schedule.ends(now)
        return max(0.0, self._ends - now) if self._schedule is not None else math.inf

    def goes_on(self) -> float:
        """Returns when a round that rests after its window continues, in unix seconds."""
        return self._now() if self._schedule is None else self._schedule.opens(self._now(), last=None)

    def opened(self) -> None:
        """Notes the round that has just been opened and stored."""
        offset, self._last, self._opens = self._offset, None, 0.0
        self._last = self._now()
        if self._offset != offset:  # the stored time may come from the clock before the jump
            self._note(self._last)

    def _now(self) -> float:
        now = self._wall()
        jump = now - self._elapsed() - self._offset
        if abs(jump) > JUMP_S:
            self._offset += jump
            self._opens = self._ends = 0.0
            if self._last is not None:
                self._note(self._last + jump)
        return now

    def _read(self) -> float | None:
        row, now = self._store.last_round(), self._wall()
        if row is None:
            return None
        stored = self._store.get(_KEY)
        noted = {} if stored is None else json.loads(stored)
        last = float(noted["at"] if noted.get("round") == row.round else row.opened_at)
        if last > now + JUMP_S:
            self._note(last := now)
        return last

    def _note(self, last: float) -> None:
        row, self._last = self._store.last_round(), last
        try:
            self._store.put(_KEY, json.dumps({"round": 0 if row is None else row.round, "at": last}).encode())
        except StoreError as error:  # a full disk: after a restart the clock is trusted
            log.warning("%s", error)

"""Messages that were not accepted: counted, and reported at most once a minute.

Anyone who may write to a topic can send garbage as fast as the network allows; a log on a memory card must
not grow with it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from hushfleet.errors import WireError

REPORT_EVERY_S = 60.0

_log = logging.getLogger("hushfleet.edge")


class Quarantine:
    """:param clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._unreported = 0
        self._next_report: float | None = None

    @property
    def total(self) -> int:
        return self.counts.total()

    def add(self, topic: str, error: WireError) -> None:
        """One more message on `topic` that was ignored."""
        self.counts[type(error).__name__] += 1
        self._unreported += 1
        now = self._clock()
        if self._next_report is None or now >= self._next_report:
            _log.warning("%d messages were ignored, the last on %.120r: %.400s", self._unreported, topic, str(error))
            self._unreported = 0
            self._next_report = now + REPORT_EVERY_S

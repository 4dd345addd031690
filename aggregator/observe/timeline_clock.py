"""The time of a timeline: seconds since the run's first event, whatever clock stamped the events."""

from __future__ import annotations

LONGEST_PAUSE_S = 600.0


class RunClock:
    """Never goes backwards. A run that was stopped overnight and resumed goes on where it was: the stop is left out.

    So is a jump back at a start, since a resumed simulation may begin its own clock anew.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[float, float]] = []  # (from this raw time on, what to subtract)
        self.now = 0.0
        self.left_out_s = 0.0

    def advance(self, raw: float, *, is_start: bool) -> float:
        """Sets `now` to an event's time.

        :param raw: as the event has it.
        :param is_start: the aggregator begins, or goes on; `left_out_s` then says how long a stop was left out.
        """
        if not self._pieces:
            self._pieces.append((raw, raw))
        at = raw - self._pieces[-1][1]
        self.left_out_s = 0.0
        if is_start and (at < self.now or at - self.now > LONGEST_PAUSE_S):
            self.left_out_s = max(0.0, at - self.now)
            self._pieces.append((raw, raw - self.now))
            at = self.now
        self.now = max(self.now, at)
        return self.now

    def of(self, raw: float) -> float:
        """A moment of another log with the same clock: seconds from 0 to `now`."""
        offset = next((offset for begins, offset in reversed(self._pieces) if raw >= begins), raw)
        return min(max(0.0, raw - offset), self.now)

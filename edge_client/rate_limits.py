"""Limits how often a device asks again, announces itself again, and logs what it rejects."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from hushfleet.errors import WireError
from hushfleet.wire.format.messages import NotEnrolled

ENROLMENT_FIRST_WAIT_S = 60.0
ENROLMENT_LONGEST_WAIT_S = 3600.0
REPORT_EVERY_S = 60.0

_log = logging.getLogger("hushfleet.edge")


class Backoff:
    """The time of the next request: the wait doubles, and starts again with the first wait after any progress.

    :param first_s: the first wait, seconds.
    :param longest_s: the longest wait.
    :param now: monotonic seconds, as in all methods; the first request is due at once.
    """

    def __init__(self, first_s: float, longest_s: float, *, now: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.reset(now)

    def reset(self, now: float, *, wait: bool = False) -> None:
        """Notes progress: the next request is due at once, or after the first wait."""
        self._wait_s = self._first_s
        self.due_at = now + self._first_s if wait else now

    def hasten(self, now: float) -> None:
        """Makes the next request due after the first wait at the latest, because the cause of the delay may be gone."""
        self.due_at = min(self.due_at, now + self._first_s)

    def tried(self, now: float) -> None:
        """Notes a request at `now`."""
        self.due_at = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._longest_s)


class EnrolmentRetry:
    """Retries enrolment when the aggregator does not accept the device: logs the reason and announces it again later.

    When the operator accepts the device, the aggregator reads the device's retained state by itself. Therefore the
    retry is only for messages that were lost.

    :param public_key: the key of this device; answers about other keys are ignored.
    """

    def __init__(self, device: str, public_key: bytes) -> None:
        self._device, self._public_key = device, public_key
        self.reason: str | None = None
        """The last reason that was given; None if there was none."""
        self._backoff = Backoff(ENROLMENT_FIRST_WAIT_S, ENROLMENT_LONGEST_WAIT_S, now=0.0)
        self._waiting = False

    def refused(self, answer: NotEnrolled, now: float) -> None:
        """Notes that the aggregator does not accept this device. The same reason is logged once."""
        if (answer.device, answer.public_key) != (self._device, self._public_key):
            return
        if answer.reason != self.reason:
            self.reason = answer.reason
            _log.warning("%s", answer.reason)
        if not self._waiting:
            self._waiting = True
            self._backoff.tried(now)

    def is_due(self, now: float) -> bool:
        """Returns whether the device should announce itself again now; true once for each refusal."""
        due = self._waiting and now >= self._backoff.due_at
        self._waiting = self._waiting and not due
        return due


class RejectedMessages:
    """Counts messages that were not accepted, and logs them at most once a minute.

    Anyone who may write to a topic can send garbage as fast as the network allows, and a log on a memory card must not
    grow with it.

    :param clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._unreported = 0
        self._next_report = -float("inf")

    @property
    def total(self) -> int:
        return self.counts.total()

    def add(self, topic: str, error: WireError) -> None:
        """Counts one more ignored message on `topic`."""
        self.counts[type(error).__name__] += 1
        self._unreported += 1
        now = self._clock()
        if now >= self._next_report:
            _log.warning("%d messages were ignored, the last on %.120r: %.400s", self._unreported, topic, str(error))
            self._unreported = 0
            self._next_report = now + REPORT_EVERY_S

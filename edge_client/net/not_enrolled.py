"""What a device does that the aggregator does not accept: it says so in its log, and asks again, ever more rarely.

The aggregator looks at the device's retained state by itself when its operator accepts the device, so asking again is
for what was lost on the way.
"""

from __future__ import annotations

import logging

from hushfleet.wire.format.messages import NotEnrolled

FIRST_WAIT_S = 60.0
LONGEST_WAIT_S = 3600.0

_log = logging.getLogger("hushfleet.edge")


class Knocking:
    """:param public_key: of this device; an answer to another key is not for it."""

    def __init__(self, device: str, public_key: bytes) -> None:
        self._device, self._public_key = device, public_key
        self._logged: str | None = None
        self._wait_s = FIRST_WAIT_S
        self._due_at: float | None = None

    def refused(self, answer: NotEnrolled, now: float) -> None:
        """The aggregator said that it does not accept this device. The same reason is logged once."""
        if (answer.device, answer.public_key) != (self._device, self._public_key):
            return
        if answer.reason != self._logged:
            self._logged = answer.reason
            _log.warning("%s", answer.reason)
        if self._due_at is None:
            self._due_at = now + self._wait_s
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)

    def is_due(self, now: float) -> bool:
        """Whether the device should announce itself again now; true once for each refusal."""
        if self._due_at is None or now < self._due_at:
            return False
        self._due_at = None
        return True

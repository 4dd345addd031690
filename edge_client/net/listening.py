"""Subscribes a device to its topics, and again if something has not come that the broker keeps."""

from __future__ import annotations

from collections.abc import Iterable

from hushfleet.edge_client.net.rate_limits import Backoff
from hushfleet.wire.link.interface import Link

FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 900.0


class Listening:
    """The filters of a device.

    A broker whose access list came to have the device after it had connected never sends by itself what it kept
    (measured with Mosquitto 2.0.11). Another may lose what is published at the moment of a subscription (measured with
    NATS 2.15.1: one of 64 boards never got the task).
    """

    def __init__(self, link: Link, filters: Iterable[str], *, now: float) -> None:
        self._link, self._filters = link, tuple(dict.fromkeys(filters))
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S, now=now)
        self._lacks = True

    def begin(self) -> None:
        for topic_filter in self._filters:
            self._link.subscribe(topic_filter)

    def connected(self, now: float) -> None:
        self._backoff.reset(now, wait=True)

    def again(self, now: float, *, lacks: bool) -> bool:
        """Subscribes again, ever more rarely, while something is lacking; whether it did so now."""
        if lacks and not self._lacks:
            self._backoff.reset(now, wait=True)
        self._lacks = lacks
        if not lacks or now < self._backoff.due_at:
            return False
        self._backoff.tried(now)
        self.begin()
        return True

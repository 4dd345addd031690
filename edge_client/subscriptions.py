"""Subscribes a device to its topics, and again if a message that the broker retains has not arrived."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hushfleet.edge_client.rate_limits import Backoff
from hushfleet.wire.link.interface import Link

FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 900.0


class Subscriptions:
    """The topic filters of a device.

    If a broker adds a device to its access list after the device has connected, it never sends the retained messages by
    itself (measured with Mosquitto 2.0.11). Another broker may lose a message that is published at the moment of a
    subscription (measured with NATS 2.15.1: one of 64 boards never got the task).
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

    @property
    def due_at(self) -> float:
        """The time of the next subscription while a message is missing, on the monotonic clock."""
        return self._backoff.due_at if self._lacks else math.inf

    def again(self, now: float, *, lacks: bool) -> bool:
        """Subscribes again, at growing intervals, while a message is missing; returns whether it did so now."""
        if lacks and not self._lacks:
            self._backoff.reset(now, wait=True)
        self._lacks = lacks
        if not lacks or now < self._backoff.due_at:
            return False
        self._backoff.tried(now)
        self.begin()
        return True

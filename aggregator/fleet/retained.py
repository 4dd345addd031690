"""Clears messages that boards have asked the broker to retain on topics where nothing should be retained.

Mosquitto has no setting for that: an access list allows a topic or forbids it, and a message that a subscriber hears
live does not say that it was retained. So the fleet service clears these topics again and again, without looking.
"""

from __future__ import annotations

from collections import deque

from hushfleet.aggregator.fleet.service import FleetService, ServicePart
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.wire.format.topics import Topics

CLEAR_EVERY_S = 3600.0
MOST_AT_ONCE = 8


class ClearRetained(ServicePart):
    """A part of the fleet service. It acts at the start, and then once an hour, for a few boards at a time."""

    def __init__(self, registry: FleetRegistry) -> None:
        self._registry = registry
        self._waiting = deque[str]()
        self._begin_at = 0.0

    def act(self, service: FleetService, now: float) -> None:
        if now >= self._begin_at:
            self._begin_at = now + CLEAR_EVERY_S
            self._waiting = deque(board.device for board in self._registry.boards())
        for _ in range(min(MOST_AT_ONCE, len(self._waiting))):
            device = self._waiting[0]
            for topic in never_retained(service.topics, device):
                service.clear(topic)
            self._waiting.popleft()


def never_retained(topics: Topics, device: str) -> tuple[str, ...]:
    """Returns topics that a board may write, and on which nothing should be retained (docs/wire.md, "Topics")."""
    return topics.msg(device), topics.chunk(device), topics.renewal(device), topics.wants(device)


def ever_retained(topics: Topics, device: str) -> tuple[str, ...]:
    """Returns all topics that a board may write."""
    return topics.state(device), topics.health(device), *never_retained(topics, device)

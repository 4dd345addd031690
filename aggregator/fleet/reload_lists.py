"""Tells the brokers to read their lists a second time, some time after each change.

Mosquitto clears its flag for a signal after it has read its files, so a signal that comes while it reads is lost. With
one signal only, the second of two quick changes would never take effect: a board with a new card could not send or
receive, or a board that is locked out would stay connected.
"""

from __future__ import annotations

import math

from hushfleet.aggregator.fleet.service import FleetService, ServicePart
from hushfleet.aggregator.fleet.trust.access import lists_written, reload_brokers
from hushfleet.aggregator.fleet.trust.folder import FleetFolder

LOOK_EVERY_S = 0.5
RELOAD_AFTER_S = 1.0


class ReloadLists(ServicePart):
    """A part of the fleet service. It acts after its start, and after the service or a command has written a list."""

    every_s = LOOK_EVERY_S

    def __init__(self, folder: FleetFolder) -> None:
        self._folder = folder
        self._written: list[int] = []
        self._ask_at = math.inf

    def act(self, service: FleetService, now: float) -> None:
        written = lists_written(self._folder)
        if written != self._written:
            self._written, self._ask_at = written, now + RELOAD_AFTER_S
        if now >= self._ask_at:
            self._ask_at = math.inf
            reload_brokers(self._folder)

"""The activity of each device by the run's event log: its board, its accepted rounds, when it was last heard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_FROM_DEVICES = ("presence", "offer", "update", "decline")


@dataclass
class DeviceActivity:
    """One device.

    :param rounds: number of its accepted updates.
    :param last_seen: unix seconds of its last message; None: there was none.
    """

    board: str = ""
    rounds: int = 0
    last_seen: float | None = None


def add_activity(found: dict[str, DeviceActivity], events: Iterable[Mapping[str, Any]]) -> None:
    """Adds later events of the log to what the earlier ones gave."""
    for event in events:
        name, kind = event.get("device"), event.get("event")
        if isinstance(name, str) and kind in _FROM_DEVICES:
            device = found.setdefault(name, DeviceActivity())
            device.board = str(event.get("board") or device.board)
            device.rounds += kind == "update" and event.get("code") == "accepted"
            device.last_seen = event.get("at", device.last_seen)

"""Reads the activity of each device from the run's event log: its board, its accepted rounds, its last message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_FROM_DEVICES = ("presence", "offer", "update", "decline")
_THERE = ("ready", "training")


@dataclass
class DeviceActivity:
    """One device.

    :param presence: its newest presence in the log.
    :param rounds: number of its accepted updates.
    :param last_seen: unix seconds of its last message; None if there was none.
    """

    board: str = ""
    presence: str = ""
    rounds: int = 0
    last_seen: float | None = None


def add_activity(found: dict[str, DeviceActivity], events: Iterable[Mapping[str, Any]]) -> None:
    """Adds later events of the log to the activities found in earlier events."""
    for event in events:
        name, kind = event.get("device"), event.get("event")
        if isinstance(name, str) and kind in _FROM_DEVICES:
            device = found.setdefault(name, DeviceActivity())
            device.board = str(event.get("board") or device.board)
            device.rounds += kind == "update" and event.get("code") == "accepted"
            if kind != "presence" or _is_heard(device.presence, event.get("state")):
                device.last_seen = event.get("at", device.last_seen)
            if kind == "presence":
                device.presence = str(event.get("state"))


def _is_heard(before: str, state: Any) -> bool:
    """Returns whether the device itself has sent this state now.

    The broker reports that a device is lost, and repeats the old states of all devices to an aggregator that starts.
    """
    return state in _THERE or (state == "sleeping" and before in _THERE)

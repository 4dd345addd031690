"""Reads and writes what simulated devices have measured about themselves: JSON lines of one device, or of all by round.

A line of all has columns, so that a fleet of thousands writes one line a round:

    {"round": 3, "devices": ["device-0", ...], "loss": {"each": [...]}, "clip_weights": {"all": [...]}}

A column has the values of all devices (`each`), or the value that all of them share (`all`), or, with `at`, the places
of the devices that have one. In the field there are no such files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hushfleet.aggregator.results.events import EventTail
from hushfleet.plain_json import to_json

NAME = "metrics.jsonl"
Line = dict[str, Any]


class DeviceMetrics:
    """The lines that simulated devices write about themselves. A device may be rounds ahead of the log.

    :param folder: has the file of all devices, or a folder for each.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[str, EventTail] = {}
        self._of_all = EventTail(folder / NAME)
        self._waiting: list[tuple[str, Line]] = []

    def read(self, device: str) -> None:
        """Reads a device's new lines after its update: it writes them before it sends the update."""
        tail = self._tails.setdefault(device, EventTail(self._folder / device / NAME))
        self._waiting += [(device, line) for line in tail.read() if isinstance(line.get("round"), int)]

    def until(self, round: int) -> list[tuple[str, Line]]:
        """Returns the lines up to this round, each once, with their devices."""
        for line in self._of_all.read():
            self._waiting += by_device(line).items()
        found = [each for each in self._waiting if each[1]["round"] <= round]
        self._waiting = [each for each in self._waiting if each[1]["round"] > round]
        return found


def read_all_metrics(folder: Path, devices: Collection[str]) -> dict[str, dict[int, Line]]:
    """Returns the metrics of these devices, by device and round; if a round has several lines, later values count."""
    found = {device: _by_round(EventTail(folder / device / NAME).read()) for device in devices}
    for whole in EventTail(folder / NAME).read():
        for device, line in by_device(whole).items():
            found[device].setdefault(line["round"], {}).update(line)
    return found


def _by_round(lines: list[Line]) -> dict[int, Line]:
    rounds: dict[int, Line] = {}
    for line in lines:
        if isinstance(line.get("round"), int):
            rounds.setdefault(line["round"], {}).update(line)
    return rounds


def write_metrics(path: Path, round: int, lines: Mapping[str, Mapping[str, object]]) -> None:
    """Appends one line with the metrics of devices in a round. A line that a full disk has truncated stays separate."""
    names = {name for line in lines.values() for name in line} - {"round"}
    each = list(lines.values())
    columns = {name: _column(name, each) for name in sorted(names)}
    text = json.dumps(to_json({"round": round, "devices": list(lines), **columns}), allow_nan=False)
    with path.open("ab") as out:
        out.write(f"\n{text}\n".encode())


def _column(name: str, lines: list[Mapping[str, object]]) -> Line:
    at = [place for place, line in enumerate(lines) if name in line]
    values = [lines[place][name] for place in at]
    if len(at) < len(lines):
        return {"each": values, "at": at}
    return {"all": values[0]} if all(value == values[0] for value in values) else {"each": values}


def by_device(line: Line) -> dict[str, Line]:
    """Divides a line of all devices."""
    names, round = line.get("devices"), line.get("round")
    if not isinstance(names, list) or not isinstance(round, int):
        return {}
    found: dict[str, Line] = {name: {"round": round} for name in names}
    for key, column in line.items():
        if key in ("devices", "round"):
            continue
        places = column.get("at", range(len(names)))
        values = column["each"] if "each" in column else [column["all"]] * len(names)
        for place, value in zip(places, values, strict=True):
            found[names[place]][key] = value
    return found

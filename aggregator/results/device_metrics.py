"""Reads and writes what simulated devices have measured about themselves: JSON lines of one device, or of all by round.

A line of all has columns (`columns`): {"round": 3, "devices": ["device-0", ...], "loss": {"each": [...]}}. In the field
there are no such files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hushfleet.aggregator.results.columns import columns_of, rows_of
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


def write_metrics(path: Path, round: int, lines: Mapping[str, Mapping[str, Any]]) -> None:
    """Appends one line with the metrics of devices in a round. A line that a full disk has truncated stays separate."""
    columns = columns_of(list(lines.values()))
    text = json.dumps(to_json({**columns, "round": round, "devices": list(lines)}), allow_nan=False)
    with path.open("ab") as out:
        out.write(f"\n{text}\n".encode())


def by_device(line: Line) -> dict[str, Line]:
    """Divides a line of all devices."""
    names, round = line.pop("devices", None), line.pop("round", None)
    if not isinstance(names, list) or not isinstance(round, int):
        return {}
    return {name: {**row, "round": round} for name, row in zip(names, rows_of(line, len(names)), strict=True)}

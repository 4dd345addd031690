"""Publishes the figures of `/metrics` for Home Assistant by its MQTT discovery; this part is off by default.

Fleet and boards are devices of Home Assistant. Each is described by one retained message, and its figures are one JSON
object on a topic of its own. All are published when they change, and again once a minute, because Mosquitto keeps no
retained messages over a restart.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from hushfleet.aggregator.fleet.service import FleetService, ServicePart
from hushfleet.aggregator.fleet.view import FleetView
from hushfleet.aggregator.fleet.watching.metrics import METRICS
from hushfleet.errors import LinkLost
from hushfleet.wire.link.discovery import CONFIGS, OFFLINE, ONLINE, description, encoded
from hushfleet.wire.link.interface import Will

STATES = "hushfleet-home"
EVERY_S = 10.0
AGAIN_S = 60.0
UNITS: dict[str, dict[str, str]] = {
    "_timestamp_seconds": {"device_class": "timestamp"},
    "_bytes_total": {"device_class": "data_size", "unit_of_measurement": "B", "state_class": "total_increasing"},
    "_total": {"state_class": "total_increasing"},
    "_seconds": {"device_class": "duration", "unit_of_measurement": "s", "state_class": "measurement"},
    "_celsius": {"device_class": "temperature", "unit_of_measurement": "°C", "state_class": "measurement"},
    "_ratio": {"unit_of_measurement": "%", "state_class": "measurement"},
}
"""Properties of a sensor for Home Assistant, by the end of its metric's name; the first that matches is used."""


def availability(federation: str) -> str:
    """Returns the topic that says whether the fleet service publishes."""
    return f"{STATES}/{federation}/available"


def will(federation: str) -> Will:
    return Will(availability(federation), OFFLINE)


class HomeAssistant(ServicePart):
    """Publishes the figures of a fleet.

    :param make_view: reads the fleet's folder, in the service's thread.
    """

    every_s = EVERY_S
    fails_as = "Home Assistant is told nothing new"

    def __init__(self, federation: str, make_view: Callable[[], FleetView]) -> None:
        self._federation, self._make_view = federation, make_view
        self._published: dict[str, bytes] = {}
        self._again_at = 0.0

    def act(self, service: FleetService, now: float) -> None:
        messages, again = messages_of(self._make_view()), now >= self._again_at
        for topic in self._published.keys() - messages.keys():  # Home Assistant then forgets a board
            service.clear(topic)
        for topic, payload in messages.items():
            before = self._published.get(topic)
            if again or before != payload:
                if before is not None and before != payload and topic.startswith(CONFIGS):
                    self._remove(service, topic, before, payload)
                service.send(topic, payload, retain=True)
        self._published = messages
        if again:
            self._again_at = now + AGAIN_S

    def _remove(self, service: FleetService, topic: str, before: bytes, payload: bytes) -> None:
        """Removes figures that are gone, such as those of the former task: sends only their platform.

        Home Assistant would still show the last value of a figure that is only left out.
        """
        was, described = json.loads(before)["components"], json.loads(payload)
        gone = {key: {"platform": was[key]["platform"]} for key in was.keys() - described["components"].keys()}
        if gone:
            described["components"] |= gone
            service.send(topic, encoded(described), retain=True)

    def end(self, service: FleetService) -> None:
        with suppress(LinkLost):
            service.send(availability(self._federation), OFFLINE, retain=True)


def messages_of(view: FleetView) -> dict[str, bytes]:
    """Returns all retained messages, by topic."""
    of_fleet, of_boards = list[_Figure](), {board.device: list[_Figure]() for board in view.boards}
    for metric, described in METRICS.items():
        for labels, value in described.samples(view):
            if described.labels[:1] == ("board",):
                of_boards[labels[0]].append(_Figure(metric, labels[1:], value))
            else:
                of_fleet.append(_Figure(metric, labels, value))
    federation = view.federation
    fleet, topic = f"hushfleet_{federation}", f"{STATES}/{federation}"
    about = {"name": f"Hushfleet {federation}", "model": "fleet"}
    messages = {availability(federation): ONLINE} | _device(federation, fleet, f"{topic}/fleet", about, of_fleet)
    for board in view.boards:
        about = {"name": board.device, "model": board.board, "suggested_area": board.place, "via_device": fleet}
        unique, states = f"{fleet}_{board.device}", f"{topic}/board/{board.device}"
        messages |= _device(federation, unique, states, about, of_boards[board.device])
    return messages


class _Figure(NamedTuple):
    """A sample of a metric. A board's sample has no label with the board's name."""

    metric: str
    labels: tuple[str, ...]
    value: float | None

    @property
    def key(self) -> str:
        parts = [self.metric] if self.metric.endswith("_info") else [self.metric, *self.labels]
        return re.sub("[^a-zA-Z0-9_]", "_", "_".join(parts))


def _device(
    federation: str, unique: str, states: str, about: Mapping[str, str], figures: Sequence[_Figure]
) -> dict[str, bytes]:
    """Returns a device's description and its figures.

    :param states: the topic of the figures.
    """
    components = {figure.key: _component(figure, f"{unique}_{figure.key}") for figure in figures}
    topic, described = description(unique, about, components, states=states, availability=availability(federation))
    return {topic: described, states: encoded({figure.key: _format_figure(figure) for figure in figures})}


def _component(figure: _Figure, unique: str) -> dict[str, str]:
    metric = figure.metric
    end = next((end for end in UNITS if metric.endswith(end)), "")
    name = metric.removeprefix("hushfleet_").removeprefix("board_").removesuffix(end.removeprefix("_bytes"))
    told = {
        "platform": "sensor",
        "name": " ".join([*name.split("_"), *(() if metric.endswith("_info") else figure.labels)]),
        "unique_id": unique,
        "value_template": f"{{{{ value_json.{figure.key} }}}}",
        **UNITS.get(end, {}),
    }
    if kind := METRICS[metric].binary:
        told |= {"platform": "binary_sensor", "device_class": kind, "payload_on": "1", "payload_off": "0"}
    return told


def _format_figure(figure: _Figure) -> Any:
    """Returns the value in Home Assistant's form; None means unknown there as well."""
    metric, value = figure.metric, figure.value
    if metric.endswith("_info"):
        return ", ".join(filter(None, figure.labels))
    if value is None:
        return None
    if not math.isfinite(value):
        return "infinite"
    if metric.endswith("_timestamp_seconds"):
        try:
            return datetime.fromtimestamp(value, UTC).isoformat(timespec="seconds")
        except (OverflowError, ValueError, OSError):  # a board may report any number as the end of its certificate
            return None
    if METRICS[metric].binary:
        return int(value)
    return round(100 * value, 1) if metric.endswith("_ratio") else value

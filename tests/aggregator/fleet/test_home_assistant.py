"""The figures for Home Assistant: what it asks of a discovery message, and who may publish and read it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hushfleet.aggregator.broker.config import mosquitto_acl
from hushfleet.aggregator.fleet.service import FleetService
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, HOME_ASSISTANT_NAME, FleetFolder
from hushfleet.aggregator.fleet.trust.members import check_board_name
from hushfleet.aggregator.fleet.view import FleetView
from hushfleet.aggregator.fleet.watching.home_assistant import AGAIN_S, EVERY_S, HomeAssistant, messages_of
from hushfleet.aggregator.fleet.watching.metrics import metrics
from hushfleet.errors import BadInput, PrivacyError
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.interface import Delivery, LinkUp
from hushfleet.wire.link.mqtt import MqttLink
from support.desk import event_of, make_folder, served
from support.fleet_views import a_board, a_view

CLASSES = {
    "sensor": {"timestamp", "data_size", "duration", "temperature"},
    "binary_sensor": {"connectivity", "problem", "running"},
}
"""Of https://www.home-assistant.io/integrations/sensor/ and .../binary_sensor/."""
FLEET = "homeassistant/device/hushfleet_greenhouse/config"


def read(view: FleetView) -> dict[str, Any]:
    return {topic: json.loads(body) for topic, body in messages_of(view).items() if not topic.endswith("/available")}


def test_each_description_is_one_that_home_assistant_takes() -> None:
    """By "Device discovery payload" and "Discovery topic" of its documentation, and the schema of its integration."""
    messages, seen = read(a_view()), set[str]()
    configs = [topic for topic in messages if topic.startswith("homeassistant/")]
    assert len(configs) == 1 + 12
    for topic in configs:
        assert re.fullmatch(r"homeassistant/device/[a-zA-Z0-9_-]+/config", topic)
        told = messages[topic]
        assert set(told) == {"device", "origin", "state_topic", "availability_topic", "qos", "components"}
        assert set(told["origin"]) == {"name", "sw_version"}
        assert set(told["device"]) <= {"identifiers", "name", "manufacturer", "model", "suggested_area", "via_device"}
        assert told["availability_topic"] == "hushfleet-home/greenhouse/available"
        values = messages[told["state_topic"]]
        for key, component in told["components"].items():
            assert component["value_template"] == f"{{{{ value_json.{key} }}}}"
            assert re.fullmatch(r"[a-z_][a-z0-9_]*", key), "a name in a template"
            platform, value = component["platform"], values[key]
            kind = component.get("device_class")
            assert kind is None or kind in CLASSES[platform]
            if "state_class" in component:
                assert value is None or isinstance(value, int | float)
                assert kind != "timestamp"
            if platform == "binary_sensor":
                assert value in (None, 0, 1)
            assert component["unique_id"] not in seen
            seen.add(component["unique_id"])
        assert values.keys() == told["components"].keys()


def test_the_figures_are_those_of_the_metrics() -> None:
    view = a_view()
    messages, scale = read(view), 0
    for family in text_string_to_metric_families(metrics(view).decode()):
        for sample in family.samples:
            if sample.name.endswith("_info"):
                continue
            labels = dict(sample.labels)
            board = labels.pop("board", None)
            values = messages["hushfleet-home/greenhouse/" + ("fleet" if board is None else f"board/{board}")]
            key = re.sub(r"\W", "_", "_".join([sample.name, *labels.values()]))
            if "code" in labels and sample.value == 0:  # Prometheus alone has the codes that did not occur
                assert key not in values
                continue
            shown = values[key]
            if sample.name.endswith("_timestamp_seconds"):
                assert shown.endswith("+00:00")
            else:
                scale = 100 if sample.name.endswith("_ratio") else 1
                assert shown == pytest.approx(scale * sample.value), sample.name
    assert messages["hushfleet-home/greenhouse/fleet"]["hushfleet_run_info"] == "greenhouse-hush-1a2b3c4d, hush, device"
    assert messages["hushfleet-home/greenhouse/board/greenhouse-07"]["hushfleet_board_temperature_celsius"] is None
    names = {each["name"] for each in messages[FLEET]["components"].values()}
    assert {"boards ready", "boards urgent", "accuracy", "uplink bytes", "declines budget", "round open"} <= names


def test_an_infinite_epsilon_is_no_number() -> None:
    run = a_view().run
    assert run is not None
    messages = read(replace(a_view(), run=replace(run, epsilon=float("inf"))))
    assert messages["hushfleet-home/greenhouse/fleet"]["hushfleet_epsilon_server"] == "infinite"


class Published:
    """What a part publishes."""

    def __init__(self) -> None:
        self.topics: list[tuple[str, bytes]] = []

    def send(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        assert retain
        self.topics.append((topic, payload))

    def clear(self, topic: str) -> None:
        self.topics.append((topic, b""))

    def take(self) -> dict[str, bytes]:
        found = dict(self.topics)
        self.topics.clear()
        return found


def test_a_time_that_no_calendar_has_is_unknown() -> None:
    """Where the registry has no end of its certificate, the board's own word counts: it ended the fleet service."""
    far = a_board(1, certificate_end=float((1 << 63) - 1))
    figures = read(replace(a_view(), boards=(far,)))["hushfleet-home/greenhouse/board/greenhouse-01"]
    assert figures["hushfleet_board_certificate_expiry_timestamp_seconds"] is None
    assert figures["hushfleet_board_rounds_total"] == 11


def test_changes_are_published_and_all_of_it_now_and_then() -> None:
    view, seen = [a_view()], Published()
    part, service = HomeAssistant("greenhouse", lambda: view[0]), cast(FleetService, seen)
    part.advance(service, 100.0)
    assert seen.take() == messages_of(view[0])
    part.advance(service, 100.1)
    part.advance(service, 100.0 + EVERY_S)
    assert seen.take() == {}
    view[0] = replace(view[0], boards=(replace(view[0].boards[0], rounds=12), *view[0].boards[1:-1]))
    part.advance(service, 100.0 + 2 * EVERY_S)
    gone = (
        "homeassistant/device/hushfleet_greenhouse_greenhouse-12/config",
        "hushfleet-home/greenhouse/board/greenhouse-12",
    )
    found = seen.take()
    assert {topic for topic, payload in found.items() if not payload} == set(gone)
    assert {"hushfleet-home/greenhouse/board/greenhouse-01", "hushfleet-home/greenhouse/fleet"} == found.keys() - set(
        gone
    )
    part.advance(service, 100.0 + AGAIN_S)
    assert seen.take() == messages_of(view[0])
    part.end(service)
    assert seen.take() == {"hushfleet-home/greenhouse/available": b"offline"}


def test_a_figure_of_the_former_task_is_removed() -> None:
    """By "Device discovery payload": a component that has only its platform is removed, one that is left out stays."""
    run = a_view().run
    assert run is not None
    view, seen = [a_view()], Published()
    part, service = HomeAssistant("greenhouse", lambda: view[0]), cast(FleetService, seen)
    part.advance(service, 100.0)
    assert "hushfleet_declines_total_disk" in json.loads(seen.take()[FLEET])["components"]
    view[0] = replace(view[0], run=replace(run, task="next", declines=(("budget", 1),)))
    part.advance(service, 100.0 + EVERY_S)
    first, last = (json.loads(payload)["components"] for topic, payload in seen.topics if topic == FLEET)
    assert first == last | {"hushfleet_declines_total_disk": {"platform": "sensor"}}
    assert seen.take()[FLEET] == messages_of(view[0])[FLEET], "the last is kept"


def test_what_cannot_be_read_does_not_end_the_service(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> FleetView:
        raise PrivacyError("delta must lie strictly between 0 and 1, got 2.0")

    part, seen = HomeAssistant("greenhouse", broken), Published()
    for turn in range(3):
        part.advance(cast(FleetService, seen), 100.0 + turn * EVERY_S)
    assert seen.take() == {}
    assert len(caplog.records) == 1, "said once"


def test_the_access_list_has_it_only_where_it_is_on() -> None:
    off = mosquitto_acl(federation="greenhouse", service="fleet")
    assert "home" not in off
    on = mosquitto_acl(federation="greenhouse", service="fleet", home_assistant=HOME_ASSISTANT_NAME)
    assert on.startswith(off)
    assert "topic write hushfleet-home/greenhouse/#" in on
    assert "user homeassistant\ntopic deny hushfleet/1/#\n" in on
    with pytest.raises(BadInput, match="uses this name itself"):
        check_board_name("homeassistant")


@pytest.mark.needs("mosquitto")
def test_home_assistant_reads_it_at_the_fleets_broker(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "greenhouse")
    file = folder.path / FILE_NAME
    assert "[home_assistant]\nenabled = false" in file.read_text()
    file.write_text(file.read_text().replace("[home_assistant]\nenabled = false", "[home_assistant]\nenabled = true"))
    folder = FleetFolder(folder.path)
    with served(folder):
        pem, key = (folder.service / f"home-assistant.{end}" for end in ("pem", "key"))
        assert key.stat().st_mode & 0o777 == 0o600
        address = BrokerAddress.parse(folder.local_broker, ca_file=folder.ca / "ca.pem", cert_file=pem, key_file=key)
        link = MqttLink(address, client_id=HOME_ASSISTANT_NAME)
        for topic in ("homeassistant/#", "hushfleet-home/#", "hushfleet/1/#"):
            link.subscribe(topic)
        link.open()
        event_of(link, LinkUp)
        heard: dict[str, bytes] = {}
        while len(heard) < 1 + 2 * 3:
            found = event_of(link, Delivery)
            heard[found.topic] = found.payload
        assert heard["hushfleet-home/greenhouse/available"] == b"online"
        assert set(heard) == set(messages_of(replace(a_view(), boards=a_view().boards[:2])))
    link.close()

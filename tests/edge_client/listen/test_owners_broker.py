"""What Home Assistant reads at a real broker of the owner."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hushfleet.aggregator.broker.process import start_broker
from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.listen.listener import Heard
from hushfleet.edge_client.listen.owners_broker import AGAIN_S, OwnersBroker
from hushfleet.wire.link.interface import Delivery, LinkUp
from hushfleet.wire.link.mqtt import MqttLink
from support.edge import DEVICE
from support.sound_board import a_sound, listening

pytestmark = pytest.mark.needs("mosquitto")
CONFIG = f"homeassistant/device/hushfleet_listen_{DEVICE}/config"
STATE, AVAILABLE = f"hushfleet-listen/{DEVICE}/state", f"hushfleet-listen/{DEVICE}/available"


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    with start_broker("mosquitto", data_dir=tmp_path_factory.mktemp("broker")) as broker:
        yield broker.url


@pytest.fixture
def home(url: str) -> Iterator[MqttLink]:
    """Home Assistant's connection, which hears everything."""
    with closing(MqttLink(url, client_id="home")) as link:
        link.open()
        link.subscribe("#")
        while not isinstance(link.receive(10.0), LinkUp):
            pass
        yield link


def told(home: MqttLink, topic: str) -> bytes:
    """The next message of a topic."""
    while (event := home.receive(30.0)) is not None:
        if isinstance(event, Delivery) and event.topic == topic:
            return event.payload
    raise AssertionError(f"nothing on {topic}")


def heard(name: str, probability: float = 0.9, alarm: str = "") -> Heard:
    return Heard(0.0, -31.26, ((name, probability),), alarm, ())


def test_home_assistant_finds_the_board_and_its_sounds(home: MqttLink, hears, url: str) -> None:
    now = 0.0
    with OwnersBroker(hears, url, clock=lambda: now) as teller:
        while not isinstance(event := home.receive(0.05), Delivery):
            teller.tell(heard("dog", 0.871, "dog"))
        assert event.topic == CONFIG
        described = json.loads(event.payload)
        assert (described["state_topic"], described["availability_topic"]) == (STATE, AVAILABLE)
        assert told(home, AVAILABLE) == b"online"
        state = json.loads(told(home, STATE))
        assert state == {"sound": "dog", "alarm": "dog", "probability": 87.1, "loudness": -31.3}
        for key, sensor in described["components"].items():
            assert sensor["platform"] == "sensor"
            assert sensor["value_template"] == f"{{{{ value_json.{key} }}}}"
        assert set(described["components"]) == set(state)
        teller.tell(heard("dog", 0.6, "dog"))  # no news
        teller.tell(heard("cat"))
        assert json.loads(told(home, STATE))["sound"] == "cat"
        now = AGAIN_S
        teller.tell(heard("cat"))
        assert told(home, CONFIG) == event.payload, "Mosquitto forgets retained messages when it is started again"
    assert [told(home, AVAILABLE) for _ in range(2)] == [b"online", b"offline"]


def test_a_score_is_told_in_place_of_a_probability(home: MqttLink, hears, url: str) -> None:
    with OwnersBroker(hears, url) as teller:
        while not isinstance(event := home.receive(0.05), Delivery) or event.retained:
            teller.tell(Heard(0.0, -31.26, (), "unusual", (), 1.25))
        assert json.loads(event.payload)["components"].keys() == {"sound", "alarm", "score", "loudness"}
        assert json.loads(told(home, STATE)) == {
            "sound": "unusual", "alarm": "unusual", "score": 1.25, "loudness": -31.3
        }  # fmt: skip


def test_the_command_tells_the_owners_broker(home: MqttLink, hears, device_toml: Path, url: str) -> None:
    device_toml.write_text(device_toml.read_text() + f'mqtt = "{url}"')
    with listening(device_toml, "--from", "-", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        while (event := home.receive(0.05)) is None or event.topic != STATE or event.retained:
            process.stdin.write(a_sound("tone").astype("<i2").tobytes())
            process.stdin.flush()
        process.communicate(timeout=60)
    assert json.loads(event.payload)["alarm"] == "tone"
    assert process.returncode == 0
    while told(home, AVAILABLE) != b"offline":
        pass


def test_what_is_heard_never_goes_to_the_fleets_broker(hears, device_toml: Path, capsys) -> None:
    device_toml.write_text(device_toml.read_text() + 'mqtt = "mqtt://me:secret@127.0.0.1:9"')
    assert main(["listen", str(device_toml), "--from", "nothing.wav"]) == 2
    said = capsys.readouterr().err
    assert "listen.mqtt = 'mqtt://127.0.0.1:9': must be a broker of your own, and not the fleet's" in said
    assert "secret" not in said


def test_a_broker_that_is_away_is_said_once_and_the_board_listens_on(
    hears, device_toml: Path, tmp_path, caplog
) -> None:
    with OwnersBroker(hears, "mqtt://127.0.0.1:8") as teller:
        while "Home Assistant is told nothing" not in caplog.text:
            teller.tell(heard("dog"))
        for _ in range(100):
            teller.tell(heard("dog"))
    assert caplog.text.count("Home Assistant is told nothing") == 1

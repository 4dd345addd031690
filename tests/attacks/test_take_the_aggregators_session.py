"""A device takes the aggregator's MQTT session by connecting with its client id.

MQTT ends the older of two connections with one client id. With `use_identity_as_username` a certificate decides what a
client may read and write, but not its client id: any certificate of the fleet could keep the aggregator off its broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates_bench import QUICK, Authority, tls_broker

from hushfleet.aggregator.broker import config
from hushfleet.aggregator.broker.process import Broker, start_broker
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.interface import Delivery, LinkDown, LinkEvent, LinkUp
from hushfleet.wire.link.mqtt import MqttLink

TOPICS = Topics("plant")
AGGREGATOR, THIEF = Identity.from_bytes(bytes([1]) * 32), Identity.from_bytes(bytes([2]) * 32)

Connect = Callable[..., MqttLink]


@pytest.fixture
def connect() -> Iterator[Connect]:
    links: list[MqttLink] = []

    def connected(broker: Broker, client_id: str, *filters: str, authority: Authority | None, name: str) -> MqttLink:
        files = {}
        if authority is not None:
            pair = authority.issue(name)
            files = {"ca_file": authority.ca_file, "cert_file": pair.cert_file, "key_file": pair.key_file}
        link = MqttLink(BrokerAddress.parse(broker.url, **files), client_id=client_id, timing=QUICK)
        links.append(link)
        for topic_filter in filters:
            link.subscribe(topic_filter)
        link.open()
        assert link.receive(20.0) == LinkUp()
        return link

    yield connected
    for link in links:
        link.close()


def attack(
    connect: Connect, broker: Broker, *, client_id: str, guesses: list[str], authority: Authority | None
) -> list[LinkEvent | None]:
    """What the aggregator's link sees while devices connect with `guesses`; each then sends a message of its own."""
    aggregator = connect(broker, client_id, TOPICS.all_msgs, authority=authority, name="aggregator")
    seen = []
    for index, guess in enumerate(guesses):
        thief = connect(broker, guess, authority=authority, name=f"pi-{index}")
        thief.publish(TOPICS.msg(f"pi-{index}"), b"still me")
        seen.append(aggregator.receive(20.0))  # one after the other: messages of two clients have no order
    return seen


def calm(count: int) -> list[Delivery]:
    return [Delivery(TOPICS.msg(f"pi-{index}"), b"still me", False) for index in range(count)]


def test_without_the_binding_a_device_takes_it(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack, with the configuration as it was."""
    made = config.mosquitto_config

    def unbound(**options: object) -> str:
        lines = made(**options).splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("use_username_as_clientid"))

    monkeypatch.setattr(config, "mosquitto_config", unbound)
    authority = Authority(tmp_path, "fleet-ca")
    with tls_broker(authority, authority.issue("broker")) as broker:
        name = "aggregator-plant"
        (event,) = attack(connect, broker, client_id=name, guesses=[name], authority=authority)
    assert isinstance(event, LinkDown)


def test_a_certificate_cannot_take_the_client_id_of_another(connect: Connect, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "fleet-ca")
    client_id = AGGREGATOR.client_id("aggregator-plant")
    with tls_broker(authority, authority.issue("broker")) as broker:
        # what the aggregator's link sends, and what the broker makes of it
        guesses = [client_id, "aggregator"]
        assert attack(connect, broker, client_id=client_id, guesses=guesses, authority=authority) == calm(2)


@pytest.mark.needs("mosquitto")
def test_where_no_certificate_binds_it_the_client_id_cannot_be_guessed(connect: Connect, tmp_path: Path) -> None:
    client_id = AGGREGATOR.client_id("aggregator-plant")
    with start_broker("mosquitto", data_dir=tmp_path) as broker:
        guesses = ["aggregator-plant", THIEF.client_id("aggregator-plant")]
        assert attack(connect, broker, client_id=client_id, guesses=guesses, authority=None) == calm(2)


def test_a_client_id_outlives_a_restart_and_tells_nothing_of_the_key() -> None:
    client_id = AGGREGATOR.client_id("aggregator-plant")
    assert client_id == Identity.from_bytes(AGGREGATOR.to_bytes()).client_id("aggregator-plant")
    name, _, rest = client_id.rpartition("-")
    assert name == "aggregator-plant"
    assert len(rest) == 16
    assert rest not in AGGREGATOR.public_key.hex()
    assert rest not in AGGREGATOR.to_bytes().hex()

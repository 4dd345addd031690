"""A stranger reaches the port for boards without a certificate, and wants more than to ask for one. Real brokers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.interface import Delivery, LinkDown, LinkUp
from hushfleet.wire.link.mqtt import MqttLink
from support.desk import FEDERATION, QUICK, Board, event_of, make_folder, served

TOPICS = Topics(FEDERATION)
VICTIM = "greenhouse-01"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetFolder]:
    folder = make_folder(tmp_path_factory.mktemp("fleet") / "greenhouse")
    with served(folder):
        yield folder


def stranger(fleet: FleetFolder, *filters: str, client_id: str = "stranger", **login: object) -> MqttLink:
    address = BrokerAddress.parse(fleet.local_enrolment, ca_file=fleet.ca / "ca.pem", **login)
    link = MqttLink(address, client_id=client_id, timing=QUICK)
    for topic_filter in filters:
        link.subscribe(topic_filter)
    link.open()
    return link


def member(fleet: FleetFolder, name: str, folder: Path) -> MqttLink:
    files = {"cert_file": folder / "cert.pem", "key_file": folder / "cert.key"}
    address = BrokerAddress.parse(fleet.local_broker, ca_file=fleet.ca / "ca.pem", **files)
    link = MqttLink(address, client_id=name, timing=QUICK)
    link.subscribe("hushfleet/#")
    link.open()
    event_of(link, LinkUp)
    return link


def test_what_a_stranger_writes_reaches_nobody(fleet: FleetFolder) -> None:
    """Neither the fleet's broker nor, on this one, those who wait for answers."""
    aggregator, other = member(fleet, "aggregator", fleet.aggregator), stranger(fleet, "#", client_id="other")
    event_of(other, LinkUp)
    link = stranger(fleet)
    event_of(link, LinkUp)
    for topic in (TOPICS.server, TOPICS.round, TOPICS.answer(VICTIM), TOPICS.msg(VICTIM), TOPICS.fleet(VICTIM)):
        link.publish(topic, b"forged")
    assert other.receive(0.5) is None
    while (event := aggregator.receive(0.2)) is not None:  # the service clears what boards have had retained
        assert not (isinstance(event, Delivery) and event.payload)
    for each in (aggregator, other, link):
        each.close()


def test_a_stranger_does_not_see_what_others_ask(fleet: FleetFolder) -> None:
    spy = stranger(fleet, "#", TOPICS.all_requests, client_id="spy")
    event_of(spy, LinkUp)
    link = stranger(fleet)
    event_of(link, LinkUp)
    link.publish(TOPICS.request(VICTIM), b"proof")
    assert spy.receive(0.5) is None
    spy.close()
    link.close()


@pytest.mark.parametrize("name", ["aggregator", "fleet"])
def test_a_stranger_takes_nobodys_session(fleet: FleetFolder, name: str) -> None:
    """Mosquitto ends the session of whoever has the same client id, on all listeners of one process."""
    folder = {"aggregator": fleet.aggregator, "fleet": fleet.service}[name]
    victim = member(fleet, name, folder) if name == "aggregator" else None
    link = stranger(fleet, client_id=name)
    event_of(link, LinkUp)
    if victim is not None:
        assert not isinstance(victim.receive(0.5), LinkDown)
        victim.close()
    board_home = fleet.path.parent / f"board-{name}"
    board = Board(fleet, board_home, {"aggregator": VICTIM, "fleet": "greenhouse-02"}[name])
    assert board.enrol(patience_s=15), "the service still answers"
    link.close()


def test_a_stranger_is_not_the_service(fleet: FleetFolder, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("guess\n")
    link = stranger(fleet, username="fleet", password_file=password)
    assert "refused the login" in event_of(link, LinkDown).reason
    link.close()


def test_a_stranger_does_not_get_into_the_fleets_broker(fleet: FleetFolder) -> None:
    address = BrokerAddress.parse(fleet.local_broker, ca_file=fleet.ca / "ca.pem")
    link = MqttLink(address, client_id=VICTIM, timing=QUICK)
    link.open()
    event_of(link, LinkDown)
    link.close()


def test_an_old_card_stays_out_when_a_new_one_has_its_name(tmp_path: Path) -> None:
    """Both certificates carry the same name; the old one is revoked, also for the connection that it has."""
    fleet = make_folder(tmp_path / "greenhouse", boards=1)
    with served(fleet):
        old = Board(fleet, tmp_path / "old", VICTIM)
        assert old.enrol()
        held = old.link()
        event_of(held, LinkUp)
        with FleetRegistry(fleet.path) as registry:
            registry.expect_new_card(VICTIM)  # the service sees it within a moment, and tells the broker
        new = Board(fleet, tmp_path / "new", VICTIM)
        assert new.enrol()
        link = new.link()
        event_of(link, LinkUp)
        event_of(held, LinkDown)  # its session is the new card's
        assert not any(isinstance(held.receive(0.3), LinkUp) for _ in range(5))
        assert not isinstance(link.receive(0.2), LinkDown)
        assert not old.enrol(patience_s=1.0)
        held.close()
        link.close()

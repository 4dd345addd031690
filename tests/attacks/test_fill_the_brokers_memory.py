"""Whoever may publish leaves retained messages on ever new topics, and a broker keeps each of them. Real brokers."""

from __future__ import annotations

from pathlib import Path

from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.interface import Delivery, LinkUp
from hushfleet.wire.link.mqtt import MqttLink
from support.desk import FEDERATION, QUICK, Board, event_of, make_folder, served, until

TOPICS = Topics(FEDERATION)
DEVICE = "greenhouse-01"


def test_a_board_leaves_nothing_behind_but_its_own_state_and_health(tmp_path: Path) -> None:
    fleet = make_folder(tmp_path / "greenhouse", boards=1)
    with served(fleet):
        board = Board(fleet, tmp_path / "board", DEVICE)
        assert board.enrol()
        link = board.link()
        event_of(link, LinkUp)
        for count in range(20):
            link.publish(f"{TOPICS.prefix}/c/{DEVICE}/up/{count}", b"filler", retain=True)
            link.publish(f"{TOPICS.msg(DEVICE)}/{count}", b"filler", retain=True)
            link.publish(Topics(f"invented-{count}").state(DEVICE), b"filler", retain=True)
        link.publish(TOPICS.state(DEVICE), b"mine", retain=True)
        files = {"cert_file": fleet.aggregator / "cert.pem", "key_file": fleet.aggregator / "cert.key"}
        reader = MqttLink(
            BrokerAddress.parse(fleet.local_broker, ca_file=fleet.ca / "ca.pem", **files),
            client_id="aggregator",
            timing=QUICK,
        )
        reader.subscribe("hushfleet/#")
        reader.open()
        kept = [until(lambda: next_delivery(reader))]
        while (event := reader.receive(0.5)) is not None:
            kept += [event] if isinstance(event, Delivery) else []
        assert [event.payload for event in kept] == [b"mine"]
        reader.close()
        link.close()


def next_delivery(link: MqttLink) -> Delivery | None:
    event = link.receive(0.1)
    return event if isinstance(event, Delivery) else None


def test_a_stranger_leaves_nothing_behind(tmp_path: Path) -> None:
    fleet = make_folder(tmp_path / "greenhouse", boards=0)
    with served(fleet):
        stranger = MqttLink(
            BrokerAddress.parse(fleet.local_enrolment, ca_file=fleet.ca / "ca.pem"), client_id="stranger", timing=QUICK
        )
        stranger.open()
        event_of(stranger, LinkUp)
        stranger.publish(TOPICS.request("somebody"), b"filler", retain=True)
        assert stranger.receive(2.0) is not None, "the broker ends the connection"
        stranger.close()
        login = {"username": "fleet", "password_file": fleet.service / "enrolment.password"}
        reader = MqttLink(
            BrokerAddress.parse(fleet.local_enrolment, ca_file=fleet.ca / "ca.pem", **login),
            client_id="reader",
            timing=QUICK,
        )
        reader.subscribe(TOPICS.all_requests)
        reader.open()
        event_of(reader, LinkUp)
        assert reader.receive(1.0) is None
        reader.close()

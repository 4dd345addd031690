"""Whoever may publish leaves retained messages on ever new topics, and a broker keeps each of them. Real brokers."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from hushfleet.aggregator.fleet.processes import brokers_of, started
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.interface import Delivery, LinkUp
from hushfleet.wire.link.mqtt import MqttLink
from support.desk import FEDERATION, QUICK, Board, event_of, make_folder, served, until
from support.tools import find

TOPICS = Topics(FEDERATION)
DEVICE = "greenhouse-01"
LATER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>
time_t time(time_t *at) {
    time_t now = ((time_t (*)(time_t *))dlsym(RTLD_NEXT, "time"))(0) + (access(FILE_NAME, F_OK) ? 0 : 3700);
    if (at) *at = now;
    return now;
}
"""


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


@pytest.mark.needs("compiler", "mosquitto")
def test_a_session_that_a_stranger_asks_to_keep_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that keeps sessions for ever takes 1 KiB for each that comes once."""
    later, source, library = (tmp_path / name for name in ("later", "later.c", "later.so"))
    source.write_text(LATER)
    compiler = str(find("compiler"))
    subprocess.run(
        [compiler, "-shared", "-fPIC", f'-DFILE_NAME="{later}"', "-o", str(library), str(source), "-ldl"], check=True
    )
    fleet = make_folder(tmp_path / "greenhouse", boards=0)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with started(fleet, brokers_of(fleet)):
        assert not session_was_kept(fleet)

        def is_forgotten() -> bool:
            later.unlink(missing_ok=True)
            assert session_was_kept(fleet)
            later.touch()  # an hour has passed
            time.sleep(1.0)  # the broker looks now and then, and each visit begins the hour anew
            return not session_was_kept(fleet)

        until(is_forgotten)


def session_was_kept(fleet: FleetFolder) -> bool:
    """Of a stranger that connects, asks for it to be kept, and goes."""
    came, kept = threading.Event(), list[bool]()
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id="stranger", clean_session=False)
    client.tls_set(str(fleet.ca / "ca.pem"))
    client.on_connect = lambda _client, _data, flags, *_: (kept.append(flags.session_present), came.set())
    client.connect("127.0.0.1", fleet.config.broker.enrolment_port)
    client.loop_start()
    assert came.wait(60)
    client.disconnect()
    client.loop_stop()
    return kept[0]

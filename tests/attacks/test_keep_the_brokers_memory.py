"""A board with a good certificate makes the fleet's broker keep as much as it can for it, for ever. Real Mosquitto.

A session that is not clean keeps all that is published for its board while that is away, and the broker keeps each
message that is to be retained. With the configuration of 0.3.0 that was up to 256 MiB for each board, until the
broker was started anew, also after the board was locked out.
"""

from __future__ import annotations

import datetime
import threading
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from hushfleet.aggregator.broker import config as broker_config
from hushfleet.aggregator.fleet.processes import brokers_of, started
from hushfleet.aggregator.fleet.retained import ever_retained, never_retained
from hushfleet.aggregator.fleet.trust.authority import Authority, read_request
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.interface import Delivery, LinkUp
from hushfleet.wire.link.mqtt import MqttLink
from support.desk import FEDERATION, QUICK, Board, event_of, make_folder, serving, until

pytestmark = pytest.mark.needs("mosquitto")
TOPICS = Topics(FEDERATION)
DEVICE = "greenhouse-01"
MESSAGE_BYTES, MESSAGES = 512 << 10, 64  # 32 MiB
AS_IT_WAS = {"max_inflight_bytes": "0", "max_queued_bytes": str(256 << 20)}


class Thief:
    """Whoever has a board's certificate, with a client that asks the broker to keep its session."""

    def __init__(self, fleet: FleetFolder, board: Board) -> None:
        self.session_was_kept: bool | None = None
        self.got_bytes = 0
        self._came, self._subscribed, self._quiet = threading.Event(), threading.Event(), threading.Event()
        self._client = paho.Client(CallbackAPIVersion.VERSION2, client_id=DEVICE, clean_session=False)
        certificate, key = str(board.tls.certificate_file), str(board.tls.key_file)
        self._client.tls_set(str(fleet.ca / "ca.pem"), certificate, key)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.on_message = self._on_message
        self._client.connect("127.0.0.1", fleet.config.broker.port)
        self._client.loop_start()
        assert self._came.wait(60)

    def subscribe(self, topic_filter: str) -> None:
        self._client.subscribe(topic_filter, 1)
        assert self._subscribed.wait(60)

    def retain(self, topic: str, data: bytes) -> None:
        self._client.publish(topic, data, qos=1, retain=True).wait_for_publish(60)

    def hears_all(self) -> int:
        """Bytes of what was kept for it."""
        while self._quiet.wait(1.0):
            self._quiet.clear()
        return self.got_bytes

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _on_connect(self, _client: object, _data: object, flags: paho.ConnectFlags, *_: object) -> None:
        self.session_was_kept = flags.session_present
        self._came.set()

    def _on_message(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        self.got_bytes += len(message.payload)
        self._quiet.set()


@pytest.fixture
def fleet(tmp_path: Path) -> FleetFolder:
    return make_folder(tmp_path / "greenhouse", boards=1)


def with_certificate(fleet: FleetFolder, home: Path) -> Board:
    board = Board(fleet, home, DEVICE)
    key = read_request(board.tls.request(), device=DEVICE)
    authority = Authority.load(fleet.ca)
    board.tls.keep(authority.sign_client(DEVICE, key, days=1, now=datetime.datetime.now(datetime.UTC)).pem)
    return board


def aggregator(fleet: FleetFolder, *filters: str) -> MqttLink:
    files = {"cert_file": fleet.aggregator / "cert.pem", "key_file": fleet.aggregator / "cert.key"}
    address = BrokerAddress.parse(fleet.local_broker, ca_file=fleet.ca / "ca.pem", **files)
    link = MqttLink(address, client_id="aggregator", timing=QUICK)
    for topic_filter in filters:
        link.subscribe(topic_filter)
    link.open()
    event_of(link, LinkUp)
    return link


def leave_a_queue(fleet: FleetFolder, board: Board) -> None:
    """What the aggregator says while the board is away."""
    thief = Thief(fleet, board)
    thief.subscribe(f"{TOPICS.prefix}/blob/+")
    thief.close()
    link = aggregator(fleet)
    for number in range(MESSAGES):
        link.publish(f"{TOPICS.prefix}/blob/{number:064x}", bytes(MESSAGE_BYTES))
    link.close()


@pytest.mark.parametrize("as_it_was", [True, False])
def test_a_session_that_is_kept_holds_little(
    fleet: FleetFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_it_was: bool
) -> None:
    if as_it_was:
        monkeypatch.setattr(broker_config, "_COMMON", with_settings(AS_IT_WAS))
    with started(fleet, brokers_of(fleet)):
        board = with_certificate(fleet, tmp_path / "board")
        leave_a_queue(fleet, board)
        thief = Thief(fleet, board)
        assert thief.session_was_kept
        kept = thief.hears_all()
        thief.close()
    if as_it_was:
        assert kept == MESSAGES * MESSAGE_BYTES
    else:
        assert MESSAGE_BYTES < kept <= 2 * broker_config.MAX_WAITING_BYTES


def with_settings(settings: dict[str, str]) -> str:
    lines = [line.split(" ", 1) for line in broker_config._COMMON.splitlines()]
    return "".join(f"{key} {settings.get(key, value)}\n" for key, value in lines)


def test_a_board_that_is_locked_out_leaves_nothing(fleet: FleetFolder, tmp_path: Path) -> None:
    """Neither its session nor a message that it has had retained."""
    with started(fleet, brokers_of(fleet)):
        board = with_certificate(fleet, tmp_path / "board")
        leave_a_queue(fleet, board)
        thief = Thief(fleet, board)
        for topic in ever_retained(TOPICS, DEVICE):
            thief.retain(topic, bytes(MESSAGE_BYTES))
        thief.close()
        link = aggregator(fleet)
        assert retained(link) == set(ever_retained(TOPICS, DEVICE)), "the attack"
        with serving(fleet):
            with FleetRegistry(fleet.path) as registry:
                registry.block(DEVICE, "stolen")
            until(lambda: not retained(link))
            with FleetRegistry(fleet.path) as registry:
                registry.unblock(DEVICE)
            again = until(lambda: let_in(fleet, board))
            assert not again.session_was_kept
            again.close()
        link.close()


def let_in(fleet: FleetFolder, board: Board) -> Thief | None:
    try:
        return Thief(fleet, board)
    except (OSError, AssertionError):
        return None


def test_what_is_retained_where_nothing_is_to_be_is_cleared(fleet: FleetFolder, tmp_path: Path) -> None:
    with started(fleet, brokers_of(fleet)):
        board = with_certificate(fleet, tmp_path / "board")
        thief = Thief(fleet, board)
        for topic in ever_retained(TOPICS, DEVICE):
            thief.retain(topic, bytes(MESSAGE_BYTES))
        thief.close()
        link = aggregator(fleet)
        assert retained(link) == set(ever_retained(TOPICS, DEVICE)), "the attack"
        left = set(ever_retained(TOPICS, DEVICE)) - set(never_retained(TOPICS, DEVICE))
        with serving(fleet):  # at its start, and then once an hour
            until(lambda: retained(link) == left)
        link.close()


def retained(link: MqttLink) -> set[str]:
    """Topics of the board on which the broker keeps a message, by a subscription that is made anew."""
    topic_filter = f"{TOPICS.prefix}/c/{DEVICE}/up/+"
    link.subscribe(topic_filter)
    found = set[str]()
    while (event := link.receive(1.0)) is not None:
        if isinstance(event, Delivery) and event.retained and event.payload:
            found.add(event.topic)
    link.unsubscribe(topic_filter)
    return found

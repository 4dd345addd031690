"""`MqttLink` against both real brokers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hushfleet.aggregator.broker.process import Broker, start_broker
from hushfleet.errors import BadInput, LinkLost, TooLarge
from hushfleet.wire.format.chunks import Assembler, expand, split
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Ack, Missing, Offer, decode_message, encode_message
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link import mailbox as mailbox_module
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.connection import Connection, Timing
from hushfleet.wire.link.interface import Delivery, LinkDown, LinkEvent, LinkUp
from hushfleet.wire.link.mqtt import MqttLink
from support.links import WAIT_S, next_event
from support.tools import BROKERS, need

QUICK = Timing(backoff_base_s=0.05, backoff_cap_s=0.2, answer_s=5.0, publish_s=10.0)
TOPICS = Topics("test")


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with start_broker(request.param, data_dir=tmp_path) as running:
        yield running


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Broker]:
    need("mosquitto")
    with start_broker("mosquitto", data_dir=tmp_path) as running:
        yield running


class Links:
    """Makes links to one broker and closes them at the end of the test."""

    def __init__(self) -> None:
        self.made: list[MqttLink] = []

    def opened(self, broker: Broker, client_id: str, *filters: str, **options: object) -> MqttLink:
        link = self.started(broker, client_id, *filters, **options)
        assert next_event(link) == LinkUp()
        return link

    def started(self, broker: Broker, client_id: str, *filters: str, **options: object) -> MqttLink:
        link = MqttLink(broker.url, client_id=client_id, timing=QUICK, **options)
        self.made.append(link)
        for topic_filter in filters:
            link.subscribe(topic_filter)
        link.open()
        return link


@pytest.fixture
def links() -> Iterator[Links]:
    made = Links()
    yield made
    for link in made.made:
        link.close()


def until(link: MqttLink, kind: type[LinkEvent]) -> LinkEvent:
    """The next event of a kind; others before it are passed over."""
    while not isinstance(event := next_event(link), kind):
        pass
    return event


def test_messages_arrive_whole_and_in_order(broker: Broker, links: Links) -> None:
    receiver = links.opened(broker, "receiver", "x/+/y", "z")
    sender = links.opened(broker, "sender")
    payloads = [random.Random(index).randbytes(61_440) for index in range(30)]
    for index, payload in enumerate(payloads):
        sender.publish(f"x/{index}/y", payload)
    sender.publish("elsewhere", b"")
    sender.publish("z", b"")
    for index, payload in enumerate(payloads):
        assert next_event(receiver) == Delivery(f"x/{index}/y", payload, False)
    assert next_event(receiver) == Delivery("z", b"", False)
    assert receiver.receive(0) is None


def test_a_retained_message_waits_for_later_subscribers(broker: Broker, links: Links) -> None:
    sender = links.opened(broker, "sender", "echo")
    sender.publish("plan", b"old", retain=True)
    sender.publish("plan", b"new", retain=True)
    sender.publish("echo", b"")
    assert next_event(sender) == Delivery("echo", b"", False)
    assert next_event(links.opened(broker, "before", "plan")) == Delivery("plan", b"new", True)
    late = links.opened(broker, "late")
    late.subscribe("plan")
    assert next_event(late) == Delivery("plan", b"new", True)


def test_after_unsubscribing_nothing_more_comes(broker: Broker, links: Links) -> None:
    link = links.opened(broker, "link", "a", "b")
    link.publish("a", b"1")
    assert next_event(link) == Delivery("a", b"1", False)
    link.unsubscribe("a")
    link.publish("a", b"2")
    link.publish("b", b"3")
    assert next_event(link) == Delivery("b", b"3", False)


CLIENT = """
import sys, time
from hushfleet.wire.link.mqtt import MqttLink
from hushfleet.wire.link.interface import Will
link = MqttLink(sys.argv[1], client_id="victim", will=Will("victim/state", b"lost"))
link.open()
print(type(link.receive(30.0)).__name__, flush=True)
link.publish("victim/state", b"ready", retain=True)
if sys.argv[2] == "close":
    link.close()
time.sleep(60 if sys.argv[2] == "stay" else 0)
"""


def client_process(broker: Broker, how: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[4])
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, broker.url, how],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "LinkUp\n"
    return process


def test_the_will_speaks_for_a_killed_process(broker: Broker, links: Links) -> None:
    watcher = links.opened(broker, "watcher", "victim/state")
    with client_process(broker, "stay") as process:
        assert next_event(watcher) == Delivery("victim/state", b"ready", False)
        process.send_signal(signal.SIGKILL)
    assert next_event(watcher) == Delivery("victim/state", b"lost", False)
    assert next_event(links.opened(broker, "later", "victim/state")) == Delivery("victim/state", b"lost", True)


def test_a_goodbye_sends_what_is_queued_and_leaves_no_will(broker: Broker, links: Links) -> None:
    watcher = links.opened(broker, "watcher", "victim/state", "end")
    with client_process(broker, "close"):
        pass
    watcher.publish("end", b"")
    assert next_event(watcher) == Delivery("victim/state", b"ready", False)
    assert next_event(watcher) == Delivery("end", b"", False)


def test_subscriptions_are_back_after_the_broker_was_killed(broker: Broker, links: Links) -> None:
    link = links.opened(broker, "link", *(f"topic/{index}" for index in range(20)))
    broker.kill()
    down = next_event(link)
    assert isinstance(down, LinkDown)
    assert "lost" in down.reason
    with pytest.raises(LinkLost, match="nothing was sent"):
        link.publish("topic/7", b"")
    assert isinstance(next_event(link), LinkDown)
    broker.restart()
    until(link, LinkUp)
    for index in range(20):
        link.publish(f"topic/{index}", b"again")
        assert next_event(link) == Delivery(f"topic/{index}", b"again", False)


def test_subscribing_while_down_counts_from_the_next_connection(broker: Broker, links: Links) -> None:
    link = links.opened(broker, "link", "old")
    broker.kill()
    until(link, LinkDown)
    link.subscribe("new")
    link.unsubscribe("old")
    broker.restart()
    until(link, LinkUp)
    link.publish("old", b"")
    link.publish("new", b"")
    assert next_event(link) == Delivery("new", b"", False)


@pytest.mark.needs("mosquitto")
def test_without_a_broker_every_attempt_says_why_until_one_is_there(tmp_path: Path, links: Links) -> None:
    broker = start_broker("mosquitto", data_dir=tmp_path)
    broker.stop()
    link = links.started(broker, "link")
    for _ in range(3):
        event = next_event(link)
        assert isinstance(event, LinkDown)
        assert f"127.0.0.1:{broker.port} cannot be reached" in event.reason
        assert "refused" in event.reason
    with broker:
        broker.restart()
        until(link, LinkUp)


def receive_update(link: MqttLink, device: Identity, aggregator: Identity, size: int, result: list[bytes]) -> None:
    """The aggregator's side of a transfer: answers offers, collects chunks, acknowledges the whole."""
    assembler: Assembler | None = None
    while not result:
        match link.receive(WAIT_S):
            case None:
                return
            case Delivery(topic, payload, _) if TOPICS.parse(topic).kind == "chunk" and assembler:
                assembler.add(payload)
            case Delivery(topic, payload, _) if TOPICS.parse(topic).kind == "msg":
                offer = decode_message(payload, federation="test", public_key=device.public_key)
                assert isinstance(offer, Offer)
                assembler = assembler or Assembler(offer.digest, offer.size, max_blob_bytes=size)
                answer: Ack | Missing = Missing("t", 1, offer.digest, assembler.missing())
                if assembler.complete:
                    result.append(assembler.blob())
                    answer = Ack("t", 1, offer.digest)
                try:
                    link.publish(TOPICS.down("pi"), encode_message(answer, aggregator, federation="test"))
                except LinkLost:
                    result.clear()


def test_an_update_survives_the_death_of_the_broker_by_sending_what_is_missing(broker: Broker, links: Links) -> None:
    device, aggregator = Identity.generate(), Identity.generate()
    update = random.Random(9).randbytes(2_000_000)
    received: list[bytes] = []
    inbox = links.opened(broker, "aggregator", TOPICS.all_msgs, TOPICS.all_chunks)
    thread = threading.Thread(target=receive_update, args=(inbox, device, aggregator, len(update), received))
    thread.start()
    link = links.opened(broker, "pi", TOPICS.down("pi"))
    frames = list(split(update, 60 * 1024))
    assert len(frames) == 33
    offer = encode_message(Offer("t", 1, frames[0][4:36], len(update)), device, federation="test")
    sent = 0
    link.publish(TOPICS.msg("pi"), offer)
    assert isinstance(next_event(link), Delivery)
    for frame in frames[:15]:
        link.publish(TOPICS.chunk("pi"), frame)
        sent += 1
    broker.kill()
    until(link, LinkDown)
    broker.restart()
    until(link, LinkUp)
    while True:
        try:
            link.publish(TOPICS.msg("pi"), offer)
            event = link.receive(1.0)
            if not isinstance(event, Delivery):
                continue
            answer = decode_message(event.payload, federation="test", public_key=aggregator.public_key)
            if isinstance(answer, Ack):
                break
            assert isinstance(answer, Missing)
            for index in expand(answer.missing, len(frames)):
                link.publish(TOPICS.chunk("pi"), frames[index])
                sent += 1
        except LinkLost:
            until(link, LinkUp)
    thread.join(WAIT_S)
    assert received == [update]
    assert sent >= len(frames)


def test_a_message_above_the_cap_is_refused_and_harms_nothing(broker: Broker, links: Links) -> None:
    link = links.opened(broker, "link", "x")
    with pytest.raises(TooLarge, match="1048577 bytes is above the cap of 1048576"):
        link.publish("x", bytes((1 << 20) + 1))
    link.publish("x", bytes(1 << 20))
    assert next_event(link) == Delivery("x", bytes(1 << 20), False)


def test_a_message_the_broker_will_not_take_is_not_sent_again(mosquitto: Broker, links: Links) -> None:
    """With paho's own reconnect it would be resent for ever, with everything else stuck behind it."""
    link = links.opened(mosquitto, "link", "x", message_cap_bytes=4 << 20)
    reasons = []
    for _ in range(3):
        link.publish("x", bytes(2 << 20))
        down = next_event(link)
        assert isinstance(down, LinkDown)
        reasons.append(down.reason)
        until(link, LinkUp)
        link.publish("x", b"small")
        assert next_event(link) == Delivery("x", b"small", False)
    assert "does not take messages of 2097152 bytes" in reasons[-1]
    assert "does not take" not in reasons[0]


def test_a_second_device_with_the_same_id_is_named_as_the_reason(mosquitto: Broker, links: Links) -> None:
    first = links.started(mosquitto, "pi-7")
    links.started(mosquitto, "pi-7")
    while True:
        down = until(first, LinkDown)
        assert isinstance(down, LinkDown)
        if "another device with the id 'pi-7' seems to be connected" in down.reason:
            break


def test_a_frozen_broker_is_noticed_by_keep_alive(mosquitto: Broker, links: Links) -> None:
    link = links.opened(mosquitto, "link", "x", keepalive_s=1)
    os.kill(mosquitto.pid, signal.SIGSTOP)
    try:
        assert isinstance(next_event(link), LinkDown)
    finally:
        os.kill(mosquitto.pid, signal.SIGCONT)
    until(link, LinkUp)
    link.publish("x", b"")
    assert next_event(link) == Delivery("x", b"", False)


def test_a_slow_owner_slows_the_network_and_loses_nothing(
    mosquitto: Broker, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "RECEIVED_CAP_BYTES", 100_000)
    receiver = links.opened(mosquitto, "receiver", "x")
    sender = links.opened(mosquitto, "sender", "y")
    for number in range(300):
        sender.publish("x", number.to_bytes(2, "big") * 10_000)
    sender.publish("y", b"")
    assert next_event(sender) == Delivery("y", b"", False)
    numbers = []
    for _ in range(300):
        event = next_event(receiver)
        assert isinstance(event, Delivery)
        numbers.append(int.from_bytes(event.payload[:2], "big"))
    assert numbers == list(range(300))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_the_thread_is_the_loss_of_the_link(
    mosquitto: Broker, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = links.opened(mosquitto, "link", "x")

    def die(_connection: Connection) -> None:
        raise SystemExit

    monkeypatch.setattr(Connection, "_read", die)
    link.publish("x", b"")
    down = next_event(link)
    assert isinstance(down, LinkDown)
    assert "thread ended" in down.reason
    with pytest.raises(LinkLost):
        link.publish("x", b"")


def test_an_unexpected_error_costs_one_connection_only(
    mosquitto: Broker, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = links.opened(mosquitto, "link", "x")
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "_read", lambda _connection: {}["missing"])
        down = until(link, LinkDown)
        assert isinstance(down, LinkDown)
        assert "KeyError" in down.reason
    until(link, LinkUp)
    link.publish("x", b"")
    assert next_event(link) == Delivery("x", b"", False)


def test_closing_twice_or_without_opening_is_harmless(mosquitto: Broker) -> None:
    link = MqttLink(mosquitto.url, client_id="never")
    link.close()
    link = MqttLink(mosquitto.url, client_id="twice")
    link.open()
    with pytest.raises(BadInput, match="opened once"):
        link.open()
    assert next_event(link) == LinkUp()
    link.close()
    link.close()
    with pytest.raises(LinkLost):
        link.publish("x", b"")
    assert threading.active_count() < 20


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:1883", "must begin with mqtt"),
        ("http://h", "must begin with mqtt"),
        ("mqtt://[::1", "has no valid host or port"),
        ("mqtt://me:secret/1@h", r"broker's URL 'mqtt://h' has one of / \? #"),
        ("mqtts://me:secret#1@h:1883", r"broker's URL 'mqtts://h:1883' has one of / \? #"),
        ("mqtt://", "names no host"),
        ("mqtt://h:99999", "port"),
        ("mqtt://h:x", "port"),
        ("mqtt://h/path", "after the port"),
        ("mqtt://h?x=1", "after the port"),
        ("mqtt://:secret@h", "without a user name"),
    ],
)
def test_urls_that_cannot_be_used_say_why_and_keep_the_password_to_themselves(url: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        MqttLink(url, client_id="x")
    assert "secret" not in str(caught.value)


def test_addresses_are_read_in_full(tmp_path: Path) -> None:
    address = BrokerAddress.parse("mqtt://me:p%40ss@Broker.local:1999/")
    assert (address.host, address.port, address.tls) == ("broker.local", 1999, False)
    assert (address.username, address.password) == ("me", "p@ss")
    assert str(address) == repr(address) == "mqtt://broker.local:1999"
    assert BrokerAddress.parse("mqtt://[::1]").port == 1883
    assert str(BrokerAddress.parse("mqtts://[::1]")) == "mqtts://[::1]:8883"
    (tmp_path / "password").write_text("y\nnot this\n")
    given = BrokerAddress.parse("mqtt://me:x@h", username="other", password_file=tmp_path / "password")
    assert (given.username, given.password) == ("other", "y")


def test_tls_files_are_checked_at_once(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    with pytest.raises(BadInput, match="not encrypted"):
        BrokerAddress.parse("mqtt://h", ca_file=junk)
    with pytest.raises(BadInput, match="does not exist"):
        BrokerAddress.parse("mqtts://h", ca_file=tmp_path / "none.pem")
    with pytest.raises(BadInput, match="does not hold certificates"):
        BrokerAddress.parse("mqtts://h", ca_file=junk)
    with pytest.raises(BadInput, match="both"):
        BrokerAddress.parse("mqtts://h", cert_file=junk)
    with pytest.raises(BadInput, match="not a certificate and its key"):
        BrokerAddress.parse("mqtts://h", cert_file=junk, key_file=junk)

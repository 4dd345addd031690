"""`MqttLink` against a broker that follows a script, packet by packet, and cuts where real ones rarely do."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator

import paho.mqtt.client
import pytest

from hushfleet.errors import LinkLost
from hushfleet.wire.link import mqtt
from hushfleet.wire.link.connection import Timing
from hushfleet.wire.link.interface import Delivery, LinkDown, LinkUp, Will
from hushfleet.wire.link.mqtt import MqttLink
from support.links import next_event

QUICK = Timing(backoff_base_s=0.02, backoff_cap_s=0.05, answer_s=1.0, publish_s=0.3, close_s=2.0)
CONNACK = b"\x20\x02\x00\x00"
PINGRESP = b"\xd0\x00"
CONNECT, PUBLISH, PUBACK, SUBSCRIBE, UNSUBSCRIBE, DISCONNECT = 1, 3, 4, 8, 10, 14
PINGREQ = 12


class Peer:
    """The broker's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(20.0)

    def packet(self) -> tuple[int, int, bytes]:
        """The next packet: type, flags, body."""
        first = self._exactly(1)[0]
        length, shift = 0, 0
        while True:
            digit = self._exactly(1)[0]
            length |= (digit & 0x7F) << shift
            shift += 7
            if digit < 0x80:
                return first >> 4, first & 0x0F, self._exactly(length)

    def expect(self, kind: int) -> bytes:
        got, _, body = self.packet()
        assert got == kind, f"packet {got} came instead of {kind}: {body!r}"
        return body

    def accept(self) -> None:
        self.expect(CONNECT)
        self.send(CONNACK)

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def suback(self, body: bytes, *codes: int) -> None:
        self.send(bytes([0x90, 2 + len(codes)]) + body[:2] + bytes(codes))

    def publish(self, topic: bytes, payload: bytes, packet_id: int) -> None:
        body = len(topic).to_bytes(2, "big") + topic + packet_id.to_bytes(2, "big") + payload
        self.send(bytes([0x32, len(body)]) + body)

    def cut(self) -> None:
        self.connection.close()

    def is_silent(self, seconds: float) -> bool:
        self.connection.settimeout(seconds)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.connection.settimeout(20.0)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.connection.recv(count - len(data))
            assert more, "the link hung up"
            data += more
        return data


class Script:
    """A listening socket; `peer` is the next connection of the link."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(20.0)
        self.url = f"mqtt://127.0.0.1:{self.listener.getsockname()[1]}"
        self.peers: list[Peer] = []
        self.links: list[MqttLink] = []

    def peer(self) -> Peer:
        peer = Peer(self.listener.accept()[0])
        self.peers.append(peer)
        return peer

    def link(self, *filters: str, **options: object) -> MqttLink:
        link = MqttLink(self.url, client_id="pi", **{"timing": QUICK, **options})
        self.links.append(link)
        for topic_filter in filters:
            link.subscribe(topic_filter)
        link.open()
        return link


@pytest.fixture
def script() -> Iterator[Script]:
    running = Script()
    yield running
    running.listener.close()
    for peer in running.peers:
        peer.cut()
    for link in running.links:
        link.close()


def down_reason(link: MqttLink) -> str:
    event = next_event(link)
    assert isinstance(event, LinkDown)
    return event.reason


def test_connect_says_3_1_1_clean_session_will_and_login(script: Script) -> None:
    script.url = script.url.replace("mqtt://", "mqtt://me:secret@")
    script.link(will=Will("w", b"lost"), keepalive_s=7)
    body = script.peer().expect(CONNECT)
    # clean session 2, will 4, will QoS 1 8, will retain 32, password 64, user name 128
    flags = 2 | 4 | 8 | 32 | 64 | 128
    assert body == (
        b"\x00\x04MQTT\x04" + bytes([flags, 0, 7]) + b"\x00\x02pi\x00\x01w\x00\x04lost\x00\x02me\x00\x06secret"
    )


def test_cut_between_publish_and_puback_is_reported_and_never_resent(script: Script) -> None:
    link = script.link()
    peer = script.peer()
    peer.accept()
    assert next_event(link) == LinkUp()
    link.publish("t", b"one")
    assert peer.expect(PUBLISH) == b"\x00\x01t\x00\x01one"
    peer.cut()
    assert "was lost" in down_reason(link)
    again = script.peer()
    again.accept()
    assert next_event(link) == LinkUp()
    assert again.is_silent(0.2)
    link.publish("t", b"two")
    kind, flags, body = again.packet()
    assert (kind, flags) == (PUBLISH, 0x02)  # QoS 1, not a duplicate
    assert body.endswith(b"two")


def test_the_link_is_up_only_after_every_suback_and_deliveries_wait_for_it(script: Script) -> None:
    link = script.link(*(f"t/{index}" for index in range(9)))
    peer = script.peer()
    peer.accept()
    first, second = peer.expect(SUBSCRIBE), peer.expect(SUBSCRIBE)
    peer.suback(first, *[1] * 8)
    peer.publish(b"t/0", b"early", 5)
    assert peer.expect(PUBACK) == b"\x00\x05"
    assert link.receive(0.1) is None
    with pytest.raises(LinkLost):
        link.publish("t/0", b"")
    peer.suback(second, 1)
    assert next_event(link) == LinkUp()
    assert next_event(link) == Delivery("t/0", b"early", False)


def test_a_refused_subscription_is_named(script: Script) -> None:
    link = script.link("a", "b")
    peer = script.peer()
    peer.accept()
    peer.suback(peer.expect(SUBSCRIBE), 1, 0x80)
    assert "refused a subscription" in down_reason(link)


@pytest.mark.parametrize(("code", "text"), [(4, "Bad user name or password"), (5, "Not authorized")])
def test_a_refused_login_is_named_and_tried_again(script: Script, code: int, text: str) -> None:
    link = script.link()
    for _ in range(2):
        peer = script.peer()
        peer.expect(CONNECT)
        peer.send(bytes([0x20, 2, 0, code]))
        reason = down_reason(link)
        assert "refused the login" in reason
        assert text in reason
    script.peer().accept()
    assert next_event(link) == LinkUp()


def test_no_connack_and_no_suback_end_in_time(script: Script) -> None:
    link = script.link("a")
    script.peer().expect(CONNECT)
    assert "gave no answer for 1 s" in down_reason(link)
    peer = script.peer()
    peer.accept()
    peer.expect(SUBSCRIBE)
    assert "gave no answer for 1 s" in down_reason(link)


def test_without_pubacks_publish_blocks_then_gives_up_and_connects_anew(script: Script) -> None:
    link = script.link(max_in_flight=3)
    peer = script.peer()
    peer.accept()
    assert next_event(link) == LinkUp()
    for number in range(3):
        link.publish("t", b"%d" % number)
    with pytest.raises(LinkLost, match=r"acknowledged nothing for 0\.3 s"):
        link.publish("t", b"3")
    assert [peer.expect(PUBLISH)[-1:] for _ in range(3)] == [b"0", b"1", b"2"]
    assert "acknowledged nothing" in down_reason(link)
    again = script.peer()
    again.accept()
    assert next_event(link) == LinkUp()
    for number in range(3):
        link.publish("t", b"%d" % number)
    assert len([again.expect(PUBLISH) for _ in range(3)]) == 3


def test_a_puback_makes_room(script: Script) -> None:
    link = script.link(max_in_flight=1)
    peer = script.peer()
    peer.accept()
    assert next_event(link) == LinkUp()
    for number in range(5):
        link.publish("t", b"%d" % number)
        body = peer.expect(PUBLISH)
        assert body[-1:] == b"%d" % number
        peer.send(b"\x40\x02" + body[3:5])


def test_a_topic_that_is_not_utf8_does_no_harm(script: Script) -> None:
    link = script.link("#")
    peer = script.peer()
    peer.accept()
    peer.suback(peer.expect(SUBSCRIBE), 1)
    assert next_event(link) == LinkUp()
    peer.publish(b"\xff\xfe", b"bad", 1)
    peer.publish(b"good", b"good", 2)
    event = next_event(link)
    while isinstance(event, (LinkDown, LinkUp)):
        peer = script.peer()
        peer.accept()
        peer.suback(peer.expect(SUBSCRIBE), 1)
        assert next_event(link) == LinkUp()
        peer.publish(b"good", b"good", 2)
        event = next_event(link)
    assert event == Delivery("good", b"good", False)


def test_garbage_from_the_broker_never_ends_the_thread(script: Script) -> None:
    rng = random.Random(1)
    link = script.link("#")
    for turn in range(40):
        peer = script.peer()
        peer.expect(CONNECT)
        prefix = [b"", CONNACK, CONNACK + b"\x90\x03\x00\x01\x01"][turn % 3]
        with contextlib.suppress(OSError):
            peer.send(prefix + rng.randbytes(rng.randint(1, 300)))
        peer.cut()
        while not isinstance(next_event(link), LinkDown):
            pass
    peer = script.peer()
    peer.accept()
    peer.suback(peer.expect(SUBSCRIBE), 1)
    assert next_event(link) == LinkUp()


def test_close_waits_for_what_is_in_flight_and_says_goodbye(script: Script) -> None:
    link = script.link(will=Will("w", b"lost"))
    peer = script.peer()
    peer.accept()
    assert next_event(link) == LinkUp()
    link.publish("t", b"last")
    body = peer.expect(PUBLISH)
    peer.send(b"\x40\x02" + body[3:5])
    link.close()
    assert peer.expect(DISCONNECT) == b""


def test_a_broken_connection_is_closed_without_goodbye_so_that_the_will_counts(script: Script) -> None:
    link = script.link("t", will=Will("w", b"lost"))
    peer = script.peer()
    peer.accept()
    peer.suback(peer.expect(SUBSCRIBE), 0x80)
    assert "refused" in down_reason(link)
    assert peer.connection.recv(10) == b""


def test_orders_while_up_are_sent_in_their_order(script: Script) -> None:
    link = script.link()
    peer = script.peer()
    peer.accept()
    assert next_event(link) == LinkUp()
    link.subscribe("blob")
    link.publish("want", b"")
    link.unsubscribe("blob")
    assert [peer.packet()[0] for _ in range(3)] == [SUBSCRIBE, PUBLISH, UNSUBSCRIBE]


def test_a_paused_link_sends_what_is_queued_and_then_answers_nothing_until_it_goes_on(script: Script) -> None:
    link = script.link()
    peer = script.peer()
    peer.accept()
    assert next_event(link) == LinkUp()
    link.publish("t", b"0")
    link.pause()
    assert peer.expect(PUBLISH)[-1:] == b"0"
    for number in range(200):
        peer.publish(b"a", b"x", number + 1)
    assert peer.is_silent(0.5)
    assert link.receive(0.0) is None
    link.resume()
    link.publish("t", b"1")
    packets = [peer.packet() for _ in range(201)]
    assert sorted(body for kind, _, body in packets if kind == PUBACK) == [n.to_bytes(2, "big") for n in range(1, 201)]
    assert [body[-1:] for kind, _, body in packets if kind == PUBLISH] == [b"1"]
    assert [next_event(link) for _ in range(200)] == [Delivery("a", b"x", False)] * 200


def test_what_two_devices_of_one_id_do_to_each_other_is_said_as_long_as_it_lasts(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits ever longer, so connections soon live longer than those by which it was found."""
    link = script.link(timing=Timing(backoff_base_s=0.001, backoff_cap_s=60.0))
    said = []
    for turn in range(5):
        if turn == 3:
            monkeypatch.setattr(mqtt, "SHORT_LIFE_S", 0.0)  # from now on each connection lives longer
        peer = script.peer()
        peer.accept()
        assert next_event(link) == LinkUp()
        peer.cut()
        said.append("another device with the id 'pi'" in down_reason(link))
    assert said == [False, False, True, True, True]


def test_after_a_connection_that_died_in_silence_something_is_said_more_often(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that forgets idle connections drops what comes later, without a word."""
    monkeypatch.setattr(paho.mqtt.client, "time_func", lambda: 200 * time.monotonic())
    link = script.link()
    kept = []
    for words in ("something is sent every 20 s from now on", "every 15 s", "lost (Keep alive timeout)"):
        peer = script.peer()
        kept.append(int.from_bytes(peer.expect(CONNECT)[8:10], "big"))
        peer.send(CONNACK)
        assert next_event(link) == LinkUp()
        assert words in down_reason(link)
    assert kept == [60, 20, 15]
    peer = script.peer()
    peer.accept()
    assert next_event(link) == LinkUp()
    peer.cut()
    assert "something is sent" not in down_reason(link), "the network is well"


def test_a_paused_link_says_in_each_keepalive_that_it_lives_and_needs_no_answer(script: Script) -> None:
    """The broker drops who is silent for one and a half of them; who reads nothing sees no answer."""
    link = script.link("a", keepalive_s=1)
    peer = script.peer()
    peer.accept()
    peer.suback(peer.expect(SUBSCRIBE), 1)
    assert next_event(link) == LinkUp()
    link.pause()
    for _ in range(3):
        peer.expect(PINGREQ)
        peer.send(PINGRESP)
    link.resume()
    peer.publish(b"a", b"x", 1)
    assert next_event(link) == Delivery("a", b"x", False)


def test_two_pauses_in_a_row_send_what_was_queued_between(script: Script) -> None:
    link = script.link()
    peer = script.peer()
    peer.accept()
    assert next_event(link) == LinkUp()
    for number in range(20):
        link.pause()
        link.resume()
        link.publish("t", b"%d" % number)
    link.pause()
    assert [int(peer.expect(PUBLISH)[5:]) for _ in range(20)] == [*range(20)]
    assert peer.is_silent(0.2)


def test_a_paused_link_makes_no_connection_and_says_later_that_it_was_lost(script: Script) -> None:
    """How long a handshake takes would tell how busy the machine is."""
    link = script.link()
    peer = script.peer()
    peer.accept()
    assert next_event(link) == LinkUp()
    link.pause()
    peer.cut()
    script.listener.settimeout(0.5)
    with pytest.raises(TimeoutError):
        script.listener.accept()
    assert link.receive(0.0) is None
    link.resume()
    assert "was lost" in down_reason(link)
    script.listener.settimeout(20.0)
    peer = script.peer()
    link.pause()  # given up: the login was not answered yet
    script.listener.settimeout(0.5)
    with pytest.raises(TimeoutError):
        script.listener.accept()
    link.resume()
    assert "paused" in down_reason(link)
    script.listener.settimeout(20.0)
    script.peer().accept()
    assert next_event(link) == LinkUp()


def test_a_broker_that_takes_nothing_holds_a_pause_up_no_longer_than_an_answer(script: Script) -> None:
    link = script.link(max_in_flight=20)
    peer = script.peer()
    peer.accept()
    assert next_event(link) == LinkUp()
    for _ in range(16):
        link.publish("t", bytes(1 << 20))
    link.pause()
    link.resume()
    assert "paused" in down_reason(link)


def test_a_link_that_is_closed_in_a_pause_says_goodbye(script: Script) -> None:
    link = script.link()
    peer = script.peer()
    peer.accept()
    assert next_event(link) == LinkUp()
    link.pause()
    link.close()
    peer.expect(DISCONNECT)

"""A broker wants to know when a training ends within its slot: it sends messages, and times each acknowledgement.

The board's network thread shares the interpreter with training, and answers later while that works. The figures are
in docs/privacy.md, "How many records a device has". So a board must not answer within a slot at all. Here the broker
is the attacker, the board's agent and its link are the real ones, and the clock is a number, so that nothing depends
on how busy the machine is.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.in_process import InProcess
from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.messages import Birth, ServerState, decode_message, encode_message
from hushfleet.wire.format.spec import PrivacySpec
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Delivery
from hushfleet.wire.link.mqtt import MqttLink
from support.edge import DEVICE, Bench, Clock, Package, ScriptedAggregator, Stop

PATIENCE_S = 120.0
TOPICS = Topics("test")
FIRST_OF_NOISE = 30_000  # packet ids of what the broker sends of its own


class CuriousBroker:
    """A broker for one board, with a `LocalHub` behind it. It notes in order what the board sends."""

    def __init__(self, hub: LocalHub) -> None:
        self.heard: list[object] = []  # the state of a birth, the id of an acknowledgement, or a packet's type
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._listener.getsockname()[1]}"
        self._link, self._sending, self._noise, self._ended = hub.link(DEVICE), threading.Lock(), FIRST_OF_NOISE, False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def send_noise(self, count: int = 20) -> set[int]:
        """Messages with QoS 1 that are no messages of Hushfleet; their packet ids."""
        first, self._noise = self._noise, self._noise + count
        for number in range(first, self._noise):
            self._send(TOPICS.down(DEVICE), b"noise", number)
        return set(range(first, self._noise))

    def in_the_slot(self) -> list[object]:
        """What the board has sent since it announced its training, without the birth that does so."""
        at = max(index for index, entry in enumerate(self.heard) if entry == "training")
        return self.heard[at + 1 :]

    def close(self) -> None:
        self._ended = True
        self._listener.close()
        self._thread.join()
        self._link.close()

    def _serve(self) -> None:
        self._connection = self._listener.accept()[0]
        deliveries = threading.Thread(target=self._deliver)
        with self._connection, self._connection.makefile("rb") as stream:
            while head := stream.read(1):
                length = shift = 0
                while True:
                    digit = stream.read(1)[0]
                    length |= (digit & 127) << shift
                    shift += 7
                    if digit < 128:
                        break
                self._take(head[0], stream.read(length), deliveries)
        self._ended = True

    def _take(self, head: int, body: bytes, deliveries: threading.Thread) -> None:
        kind = head >> 4
        if kind == 1:
            self._link.open()
            self._raw(b"\x20\x02\x00\x00")
            deliveries.start()
        elif kind == 3:
            end = 2 + int.from_bytes(body[:2], "big")
            topic, payload = body[2:end].decode(), body[end + 2 :]
            self._raw(b"\x40\x02" + body[end : end + 2])
            self._link.publish(topic, payload, retain=bool(head & 1))
            if topic == TOPICS.state(DEVICE):
                birth = decode_message(payload, federation="test")
                assert isinstance(birth, Birth)
                self.heard.append(birth.state)
                return
        elif kind == 4:
            self.heard.append(int.from_bytes(body, "big"))
            return
        elif kind in (8, 10):
            at, codes = 2, b""
            while at < len(body):
                end = at + 2 + int.from_bytes(body[at : at + 2], "big")
                order = self._link.subscribe if kind == 8 else self._link.unsubscribe
                order(body[at + 2 : end].decode())
                at, codes = end + (kind == 8), codes + b"\x01"
            self._raw(bytes([0x90, 2 + len(codes)]) + body[:2] + codes if kind == 8 else b"\xb0\x02" + body[:2])
        self.heard.append(f"packet {kind}")

    def _deliver(self) -> None:
        number = 0
        while not self._ended:
            event = self._link.receive(0.02)
            if isinstance(event, Delivery):
                number += 1
                self._send(event.topic, event.payload, number, retained=event.retained)

    def _send(self, topic: str, payload: bytes, number: int, *, retained: bool = False) -> None:
        body = len(topic).to_bytes(2, "big") + topic.encode() + number.to_bytes(2, "big") + payload
        rest, length = len(body), b""
        while True:
            rest, digit = rest >> 7, rest & 127
            length += bytes([digit | (128 if rest else 0)])
            if not rest:
                break
        self._raw(bytes([0x32 | retained]) + length + body)

    def _raw(self, data: bytes) -> None:
        with self._sending:
            self._connection.sendall(data)


@pytest.fixture
def bench(package: Package, config: DeviceConfig) -> Iterator[tuple[Bench, CuriousBroker]]:
    """A board that has a secret about how long it works, at a curious broker."""
    privacy = PrivacySpec("record", "strict", 1.0, 1.1, 1e-5, sample_rate=1 / 4, batches=4)
    package = package.with_spec(privacy=privacy, task="records")
    config = replace(config, limits=replace(config.limits, constant_time=True))
    hub, clock = LocalHub(), Clock()
    broker, server = CuriousBroker(hub), ScriptedAggregator(hub, package)
    store = DeviceStore(config.store_path, device=DEVICE, durable=False)
    connect = partial(MqttLink, broker.url, client_id=DEVICE)
    workshop, stop = InProcess(clock=clock), Stop(clock)
    agent = Agent(config, lambda will: connect(will=will), store, clock=clock, stop=stop, workshop=workshop)
    agent.start()
    server.announce()
    yield Bench(hub, server, config, clock, store, agent), broker
    agent.close()
    store.close()
    broker.close()


def until(bench: Bench, condition: Callable[[], Any]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, f"it did not come; {bench.agent.rejected.counts}"
        bench.agent.step(0.01)
        bench.server.pump()


def seen(condition: Callable[[], Any]) -> None:
    """Waits while the board is busy with something else."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, "it did not come"
        time.sleep(0.005)


def train(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None], later: Callable[[], None]
) -> None:
    """One round, up to the end of its slot.

    :param meanwhile: what is done at the end of its training; `later`: while the slot goes on.
    """
    plain, ended = DeviceRound.run, list[bool]()

    def watched(self: DeviceRound, *args: Any, **more: Any) -> Any:
        entry = plain(self, *args, **more)
        meanwhile()
        return entry

    def in_the_slot() -> None:
        if not ended:
            ended.append(True)
            later()

    monkeypatch.setattr(DeviceRound, "run", watched)
    until(bench, lambda: bench.server.births and bench.agent.store_check.confirmed)
    bench.agent.stop.meanwhile = in_the_slot
    bench.server.open_round(1)
    until(bench, lambda: ended)


def test_a_link_that_goes_on_answers_while_the_board_trains(
    bench: tuple[Bench, CuriousBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack, with the link as it was: each acknowledgement can be timed, in the training and after its end."""
    board, broker = bench
    monkeypatch.setattr(MqttLink, "pause", lambda self: None)

    def meanwhile() -> None:
        noise = broker.send_noise()
        seen(lambda: noise <= set(broker.in_the_slot()))

    def later() -> None:
        meanwhile()
        assert broker.heard.count("ready") == 1, "and the end of the training is not announced yet"

    train(board, monkeypatch, meanwhile, later)


def test_between_the_announced_beginning_and_end_nothing_is_answered(
    bench: tuple[Bench, CuriousBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    board, broker = bench
    noise = set[int]()

    def meanwhile() -> None:
        noise.update(broker.send_noise())
        time.sleep(0.3)

    def later() -> None:
        meanwhile()
        board.server.pump()
        assert broker.in_the_slot() == []

    train(board, monkeypatch, meanwhile, later)
    until(board, lambda: noise <= set(broker.heard))
    until(board, lambda: board.entry_status(1) == "acked")
    assert broker.heard.count("packet 1") == 1, "the connection has lived through it"


def test_the_aggregators_call_is_not_answered_within_the_slot(
    bench: tuple[Bench, CuriousBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker says again that the board is to announce itself, and that the aggregator has connected anew."""
    board, broker = bench

    def call() -> None:
        server = board.server
        state = ServerState(server.epoch, "ready", server.identity.public_key)
        payload = encode_message(state, server.identity, federation="test")
        for number, topic in enumerate((TOPICS.down(DEVICE), TOPICS.server)):
            broker._send(topic, payload, FIRST_OF_NOISE - 2 + number)

    def meanwhile() -> None:
        call()
        time.sleep(0.3)

    before: list[int] = []

    def later() -> None:
        meanwhile()
        board.server.pump()
        assert broker.in_the_slot() == []
        before.append(broker.heard.count("ready"))

    train(board, monkeypatch, meanwhile, later)
    until(board, lambda: board.entry_status(1) == "acked" and broker.heard.count("ready") == before[0] + 5)

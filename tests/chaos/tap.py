"""A subscriber that reassembles every update that passes the broker, for the audit after the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from hushfleet.errors import HushfleetError, WireError
from hushfleet.secure.unmasking_share import is_answer, read_answer_header
from hushfleet.simulator.world.live import FEDERATION
from hushfleet.wire.format.chunks import Assembler, parse_frame
from hushfleet.wire.format.messages import Offer, decode_message
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.format.update import payload_digest, read_header

_TIMEOUT_S = 60.0


class Listener:
    """A client of the broker with a thread of its own; it connects again by itself."""

    def __init__(self, name: str, filters: list[str]) -> None:
        self.topics = Topics(FEDERATION)
        self._filters = filters
        self._subscribed = threading.Event()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=name)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.on_message = lambda client, data, message: self.hear(message.topic, bytes(message.payload))
        self._client.reconnect_delay_set(1, 1)

    def attach(self, url: str) -> None:
        """Connects; once more where it was connected before. Raises `HushfleetError` if the broker gives no answer."""
        self._leave()
        self._subscribed.clear()
        address = urlsplit(url)
        self._client.connect(address.hostname or "", address.port or 1883)
        self._client.loop_start()
        if not self._subscribed.wait(_TIMEOUT_S):
            raise HushfleetError("the broker does not answer a subscriber")

    def close(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def hear(self, topic: str, payload: bytes) -> None:
        """In the client's thread."""
        raise NotImplementedError

    def greet(self) -> None:
        """Connected, perhaps again."""

    def say(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self._client.publish(topic, payload, qos=1, retain=retain)

    def _on_connect(self, client: mqtt.Client, *_: Any) -> None:
        client.subscribe([(each, 1) for each in self._filters])
        self.greet()


@dataclass(frozen=True)
class Transfer:
    """One update blob that passed the broker, whole.

    :param topic_device: on whose topic; `device` is who the blob says that it is of.
    """

    topic_device: str
    device: str
    round: int
    digest: bytes
    payload: bytes
    data: bytes


@dataclass(frozen=True)
class Answered:
    """A committee member's answer that passed the broker, whole.

    :param included: digest of the set of devices that it is for.
    """

    device: str
    round: int
    included: bytes


class Tap(Listener):
    """After a restart of the broker it must be attached before devices come back, so as to miss nothing.

    :param is_forged: of messages that this run's own attackers made up; they are passed over.
    """

    def __init__(self, is_forged: Callable[[bytes], bool] = lambda payload: False) -> None:
        topics = Topics(FEDERATION)
        super().__init__("tap", [topics.all_chunks, topics.all_msgs])
        self.transfers: list[Transfer] = []
        self.answers: list[Answered] = []
        self.errors: list[tuple[str, bytes, Exception]] = []
        self._is_forged = is_forged
        self._open: dict[tuple[str, bytes], Assembler] = {}
        self._messages: set[tuple[str, bytes]] = set()
        self._lock = threading.Lock()

    @property
    def unfinished(self) -> set[tuple[str, bytes]]:
        """(device, digest) of blobs of which chunks are missing."""
        return set(self._open)

    def sent(self, device: str) -> int:
        """How many updates on the device's topic have passed whole."""
        return len({transfer.digest for transfer in self.transfers if transfer.topic_device == device})

    def offered(self, device: str, public_key: bytes) -> dict[bytes, Offer]:
        """Digest -> offer, of all that the owner of the key offered in the name of `device`."""
        offers = {}
        with self._lock:
            messages = [payload for name, payload in self._messages if name == device]
        for payload in messages:
            try:
                message = decode_message(payload, federation=FEDERATION, public_key=public_key)
            except WireError:
                continue
            if isinstance(message, Offer):
                offers[message.digest] = message
        return offers

    def hear(self, topic: str, payload: bytes) -> None:
        if self._is_forged(payload):
            return
        try:
            with self._lock:
                self._add(topic, payload)
        except Exception as error:
            self.errors.append((topic, payload[:16], error))

    def _add(self, topic: str, payload: bytes) -> None:
        parsed = self.topics.parse(topic)
        device = parsed.device
        if parsed.kind == "msg" and device is not None:
            self._messages.add((device, payload))
        if parsed.kind != "chunk" or device is None:
            return  # amqtt hands a new client retained messages that others have subscribed
        chunk = parse_frame(payload)
        key = (device, chunk.digest)
        assembler = self._open.setdefault(key, Assembler(chunk.digest, chunk.size))
        assembler.add(chunk)
        if assembler.complete:
            blob = self._open.pop(key).blob()
            if is_answer(blob):
                answer = read_answer_header(blob)
                self.answers.append(Answered(answer.device, answer.round, answer.included))
                return
            header = read_header(blob)
            transfer = Transfer(device, header.device, header.round, chunk.digest, payload_digest(blob), blob)
            self.transfers.append(transfer)

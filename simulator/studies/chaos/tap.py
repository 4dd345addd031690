"""A subscriber that reassembles every update that passes the broker, for the audit after the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import paho.mqtt.client as mqtt

from hushfleet.errors import HushfleetError, WireError
from hushfleet.simulator.engines.live.engine import FEDERATION
from hushfleet.wire.format.chunks import Assembler, parse_frame
from hushfleet.wire.format.messages import Offer, decode_message
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.format.update import payload_digest, read_header

_PATIENCE_S = 60.0


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


class Tap:
    """After a restart of the broker it must be attached again, for the broker has forgotten it.

    :param is_forged: of messages that this run's own attackers made up; they are passed over.
    """

    def __init__(self, is_forged: Callable[[bytes], bool] = lambda payload: False) -> None:
        self.transfers: list[Transfer] = []
        self.offers: set[tuple[str, bytes]] = set()
        self.errors: list[tuple[str, bytes, Exception]] = []
        self._is_forged = is_forged
        self._open: dict[tuple[str, bytes], Assembler] = {}
        self._messages: set[tuple[str, bytes]] = set()
        self._client: mqtt.Client | None = None
        self._topics = Topics(FEDERATION)
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

    def attach(self, url: str) -> None:
        """Raises `HushfleetError` where the broker gives no answer."""
        self.close()
        subscribed = threading.Event()
        client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="tap")
        client.on_message = self._on_message
        client.on_subscribe = lambda *_: subscribed.set()
        address = urlsplit(url)
        client.connect(address.hostname or "", address.port or 1883)
        client.subscribe([(self._topics.all_chunks, 1), (self._topics.all_msgs, 1)])
        client.loop_start()
        self._client = client
        if not subscribed.wait(_PATIENCE_S):
            raise HushfleetError("the broker does not answer the tap")

    def close(self) -> None:
        if self._client is not None:
            self._client.disconnect()
            self._client.loop_stop()
            self._client = None

    def _on_message(self, client: mqtt.Client, data: Any, message: mqtt.MQTTMessage) -> None:
        if self._is_forged(message.payload):
            return
        try:
            with self._lock:
                self._add(message.topic, message.payload)
        except Exception as error:
            self.errors.append((message.topic, message.payload[:16], error))

    def _add(self, topic: str, payload: bytes) -> None:
        parsed = self._topics.parse(topic)
        if parsed.kind == "msg" and parsed.device is not None:
            self._messages.add((parsed.device, payload))
        if parsed.kind != "chunk" or parsed.device is None:
            return  # amqtt hands a new client retained messages that others have subscribed
        device, chunk = parsed.device, parse_frame(payload)
        key = (device, chunk.digest)
        assembler = self._open.setdefault(key, Assembler(chunk.digest, chunk.size))
        assembler.add(chunk)
        if assembler.complete:
            blob = self._open.pop(key).blob()
            header = read_header(blob)
            self.transfers.append(
                Transfer(device, header.device, header.round, chunk.digest, payload_digest(blob), blob)
            )

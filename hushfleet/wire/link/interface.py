"""Defines the interface of a link to the broker, for the agent and the coordinator.

`mqtt.MqttLink` (paho-mqtt) implements it; tests have another implementation, in one process. The loss of the connection
is an event, not hidden state. While it is lost, `publish` raises `LinkLost` and queues nothing, because the application
itself acknowledges delivery (docs/wire.md).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from hushfleet.errors import BadInput


class Delivery(NamedTuple):
    """One message from the broker."""

    topic: str
    payload: bytes
    retained: bool


class LinkUp(NamedTuple):
    """The connection is there and all subscriptions are in place."""


class LinkDown(NamedTuple):
    """The connection was lost; the link reconnects by itself."""

    reason: str


class Will(NamedTuple):
    """Message that the broker publishes (retained, QoS 1) when the connection ends without a DISCONNECT."""

    topic: str
    payload: bytes


LinkEvent = Delivery | LinkUp | LinkDown

DEFAULT_MESSAGE_CAP_BYTES = 1 << 20


def check_filter(topic_filter: str) -> None:
    """Raises `BadInput` unless `+` and `#` are at places that MQTT allows (4.7.1)."""
    parts = topic_filter.split("/")
    misplaced = any(("+" in p or "#" in p) and p not in ("+", "#") for p in parts) or "#" in parts[:-1]
    if not topic_filter or misplaced:
        raise BadInput(f"{topic_filter!r} is not a topic filter: '+' and '#' stand alone, '#' at the end")


def publish_packet_bytes(topic: str, payload_bytes: int) -> int:
    """Returns the size in bytes of an MQTT 3.1.1 PUBLISH packet with QoS 1.

    >>> publish_packet_bytes("a/b", 100)
    109
    """
    remaining = 2 + len(topic.encode()) + 2 + payload_bytes
    length_bytes = 1 + (remaining >= 1 << 7) + (remaining >= 1 << 14) + (remaining >= 1 << 21)
    return 1 + length_bytes + remaining


class Link(Protocol):
    """One connection to a broker. Not thread-safe: one owner makes all calls.

    No `Delivery` comes between a `LinkDown` and the next `LinkUp`.
    """

    def open(self) -> None:
        """Starts to connect, and returns at once. `receive` returns `LinkUp` later."""

    def subscribe(self, topic_filter: str) -> None:
        """Subscribes with QoS 1, now and after every reconnect."""

    def unsubscribe(self, topic_filter: str) -> None:
        """Ends a subscription."""
        ...

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Sends with QoS 1. Blocks, for a limited time, while too many messages are in flight.

        Raises `LinkLost` when there is no connection and `TooLarge` above the link's message cap.
        """

    def receive(self, timeout_s: float) -> LinkEvent | None:
        """Returns the next event, or None after `timeout_s` seconds."""

    def pause(self) -> None:
        """Sends what is queued; then reads nothing from the network, and sends only keepalives.

        Returns when this state is reached. The broker then sees nothing that depends on how busy this machine is. A
        connection attempt is given up, and none is made until `resume`; the owner sends nothing meanwhile.
        """

    def resume(self) -> None:
        """Ends a `pause`: what has arrived meanwhile is read now. No effect if nothing is paused."""

    def close(self) -> None:
        """Disconnects properly (the will is not published) and releases everything."""

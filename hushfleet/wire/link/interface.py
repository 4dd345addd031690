"""A link to the broker, as the agent and the coordinator see it.

`mqtt.MqttLink` (paho-mqtt) is one; tests have another, in one process. The loss of the connection is an event, not
hidden state. While it is lost, `publish` raises `LinkLost` and queues nothing, because delivery is acknowledged by the
application (docs/wire.md).
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
    """Message that the broker publishes (retained, QoS 1) when the connection dies without a goodbye."""

    topic: str
    payload: bytes


LinkEvent = Delivery | LinkUp | LinkDown

DEFAULT_MESSAGE_CAP_BYTES = 1 << 20


def check_filter(topic_filter: str) -> None:
    """Raises `BadInput` unless `+` and `#` stand as MQTT allows (4.7.1)."""
    parts = topic_filter.split("/")
    misplaced = any(("+" in p or "#" in p) and p not in ("+", "#") for p in parts) or "#" in parts[:-1]
    if not topic_filter or misplaced:
        raise BadInput(f"{topic_filter!r} is not a topic filter: '+' and '#' stand alone, '#' at the end")


def publish_packet_bytes(topic: str, payload_bytes: int) -> int:
    """Bytes of an MQTT 3.1.1 PUBLISH packet with QoS 1."""
    remaining = 2 + len(topic.encode()) + 2 + payload_bytes
    length_bytes = 1 + (remaining >= 1 << 7) + (remaining >= 1 << 14) + (remaining >= 1 << 21)
    return 1 + length_bytes + remaining


class Link(Protocol):
    """One connection to a broker. Not thread-safe: one owner calls all of it.

    No `Delivery` comes between a `LinkDown` and the next `LinkUp`.
    """

    def open(self) -> None:
        """Start to connect; returns at once. `LinkUp` arrives by `receive`."""

    def subscribe(self, topic_filter: str) -> None:
        """Subscribe with QoS 1, now and after every reconnect."""

    def unsubscribe(self, topic_filter: str) -> None:
        """Ends a subscription."""
        ...

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Send with QoS 1. Blocks, bounded, while too much is in flight.

        Raises `LinkLost` when there is no connection and `TooLarge` above the link's message cap.
        """

    def receive(self, timeout_s: float) -> LinkEvent | None:
        """The next event, or None after `timeout_s` seconds."""

    def pause(self) -> None:
        """Send what is queued; from then on nothing is read from the network, and nothing but keepalives is sent.

        Returns once that is so. A broker then sees nothing that follows how busy this machine is. A connection that is
        being made is given up, and none is made, until `resume`; the owner sends nothing meanwhile.
        """

    def resume(self) -> None:
        """End of a `pause`: what has come meanwhile is read now. No effect where nothing is paused."""

    def close(self) -> None:
        """Say goodbye to the broker (the will is not published) and release everything."""

"""A broker in one process: MQTT's behaviour for tests, without sockets.

What is alike: retained messages, wildcards, wills, clean sessions, take-over by a second link with the same
client id, QoS 1 (at least once: with `Chaos` messages are also lost, doubled and reordered, as brokers do
when queues overflow or connections break). What is not: time passes only in the threads of the links.
"""

from __future__ import annotations

import queue
import random
import threading
from dataclasses import dataclass

from hushfleet.errors import LinkLost, TooLarge
from hushfleet.wire.link.interface import (
    DEFAULT_MESSAGE_CAP_BYTES,
    Delivery,
    LinkDown,
    LinkEvent,
    LinkUp,
    Will,
    check_filter,
)


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """Probabilities, per delivery of a message that is not retained, drawn from a seeded generator.

    :param drop: it never arrives.
    :param duplicate: it arrives twice.
    :param reorder: it arrives after the next one to the same link.
    """

    seed: int
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a message to `topic` goes to subscribers of `topic_filter` (MQTT 3.1.1, 4.7)."""
    wanted, given = topic_filter.split("/"), topic.split("/")
    if topic.startswith("$") and wanted[0] in ("+", "#"):
        return False
    for level, part in enumerate(wanted):
        if part == "#":
            return True
        if level >= len(given) or part not in ("+", given[level]):
            return False
    return len(wanted) == len(given)


class LocalHub:
    """The broker. All links of a test or a simulation are made by `link`.

    :param chaos: makes deliveries unreliable; None keeps every link's order and loses nothing.
    :param message_cap_bytes: links raise `TooLarge` for larger payloads.

    `denied` are client ids that an access list keeps out: they connect and subscribe, and neither hear nor are heard.
    """

    def __init__(self, *, chaos: Chaos | None = None, message_cap_bytes: int = DEFAULT_MESSAGE_CAP_BYTES) -> None:
        self.message_cap_bytes = message_cap_bytes
        self.retained: dict[str, bytes] = {}
        self.denied: set[str] = set()
        self._chaos = chaos
        self._random = random.Random(chaos.seed if chaos else 0)
        self.lock = threading.RLock()
        self.connected: dict[str, LocalLink] = {}
        self._cut: dict[str, LocalLink] = {}
        self._held: dict[LocalLink, Delivery] = {}
        # links in the order of their subscription, so that a seeded run repeats itself
        self._exact: dict[str, dict[LocalLink, None]] = {}
        self._wild: dict[str, dict[LocalLink, None]] = {}

    def link(self, client_id: str, will: Will | None = None) -> LocalLink:
        """A new link; it is connected by its `open`."""
        return LocalLink(self, client_id, will)

    def cut(self, client_id: str, reason: str = "the connection was cut") -> None:
        """Break a link as a power cut would: its will is published, it sees `LinkDown`."""
        with self.lock:
            link = self.connected.get(client_id)
            if link is not None:
                self.detach(link)
                self._cut[client_id] = link
                link.events.put(LinkDown(reason))
                if link.will is not None:
                    self.publish(link.will.topic, link.will.payload, retain=True)

    def restore(self, client_id: str) -> None:
        """Let a link that was cut connect again; nothing happens if it was not."""
        with self.lock:
            link = self._cut.get(client_id)
            if link is not None:
                self.attach(link)

    def attach(self, link: LocalLink) -> None:
        if self.connected.get(link.client_id) is link:
            return
        self.cut(link.client_id, "another link with the same client id connected")
        self._cut.pop(link.client_id, None)
        self.connected[link.client_id] = link
        link.events.put(LinkUp())
        for topic_filter in link.filters:
            self.subscribe(link, topic_filter)

    def detach(self, link: LocalLink) -> None:
        if self.connected.get(link.client_id) is link:
            del self.connected[link.client_id]
        if self._cut.get(link.client_id) is link:
            del self._cut[link.client_id]
        for topic_filter in link.filters:
            self.unsubscribe(link, topic_filter)
        self._held.pop(link, None)

    def _table(self, topic_filter: str) -> dict[str, dict[LocalLink, None]]:
        return self._wild if "+" in topic_filter or "#" in topic_filter else self._exact

    def subscribe(self, link: LocalLink, topic_filter: str) -> None:
        self._table(topic_filter).setdefault(topic_filter, {})[link] = None
        for topic, payload in self.retained.items():
            if matches(topic_filter, topic) and link.client_id not in self.denied:
                link.take(Delivery(topic, payload, True))

    def unsubscribe(self, link: LocalLink, topic_filter: str) -> None:
        table = self._table(topic_filter)
        links = table.get(topic_filter, {})
        links.pop(link, None)
        if not links:
            table.pop(topic_filter, None)

    def publish(self, topic: str, payload: bytes, *, retain: bool) -> None:
        if retain:
            self.retained.pop(topic, None)
            if payload:
                self.retained[topic] = payload
        receivers = dict(self._exact.get(topic, {}))
        for topic_filter, links in self._wild.items():
            if matches(topic_filter, topic):
                receivers.update(links)
        for link in receivers:
            if link.client_id in self.denied:
                continue
            self._deliver(link, Delivery(topic, payload, False), reliable=retain)

    def _deliver(self, link: LocalLink, delivery: Delivery, *, reliable: bool) -> None:
        chaos = self._chaos
        held = self._held.pop(link, None)
        if chaos is None or reliable:
            link.take(delivery)
        elif self._random.random() >= chaos.drop:
            copies = 2 if self._random.random() < chaos.duplicate else 1
            if held is None and self._random.random() < chaos.reorder:
                self._held[link] = delivery
                copies -= 1
            for _ in range(copies):
                link.take(delivery)
        if held is not None:
            link.take(held)

    def release(self, link: LocalLink) -> None:
        """Nothing else came, so what was held back to reorder it arrives now."""
        with self.lock:
            held = self._held.pop(link, None)
            if held is not None:
                link.take(held)


class LocalLink:
    """A `Link` to a `LocalHub`; see `hushfleet.wire.link.interface` for its contract."""

    def __init__(self, hub: LocalHub, client_id: str, will: Will | None) -> None:
        self.client_id = client_id
        self.will = will
        self._hub = hub
        self.events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self.filters: dict[str, None] = {}
        self.is_paused = False

    def open(self) -> None:
        with self._hub.lock:
            self._hub.attach(self)

    def subscribe(self, topic_filter: str) -> None:
        check_filter(topic_filter)
        with self._hub.lock:
            self.filters[topic_filter] = None
            if self._is_connected():
                self._hub.subscribe(self, topic_filter)

    def unsubscribe(self, topic_filter: str) -> None:
        with self._hub.lock:
            self.filters.pop(topic_filter, None)
            self._hub.unsubscribe(self, topic_filter)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        cap = self._hub.message_cap_bytes
        if len(payload) > cap:
            raise TooLarge(f"a message of {len(payload)} bytes is above the cap of {cap}; send it in chunks")
        assert not self.is_paused, "the owner of a paused link sends nothing"
        with self._hub.lock:
            if not self._is_connected():
                raise LinkLost(f"the link of {self.client_id!r} is not connected; nothing was sent")
            if self.client_id not in self._hub.denied:
                self._hub.publish(topic, bytes(payload), retain=retain)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def receive(self, timeout_s: float) -> LinkEvent | None:
        assert not self.is_paused, "the owner of a paused link hears nothing"
        try:
            return self.events.get_nowait()
        except queue.Empty:
            self._hub.release(self)
        try:
            return self.events.get(timeout=timeout_s) if timeout_s > 0 else self.events.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        with self._hub.lock:
            self._hub.detach(self)

    def _is_connected(self) -> bool:
        return self._hub.connected.get(self.client_id) is self

    def take(self, delivery: Delivery) -> None:
        self.events.put(delivery)

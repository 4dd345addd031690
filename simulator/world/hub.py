"""A broker in one process: MQTT's behaviour for simulations and tests, without sockets.

Alike are retained messages, wildcards, wills, clean sessions, take-over by a second link with the same client id, and
QoS 1 (at least once: with `Chaos` messages are also lost, doubled and reordered, as brokers do when queues overflow or
connections break). Messages of a link with a `Cable` take their time on a virtual clock; all others arrive at once.
"""

from __future__ import annotations

import math
import queue
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hushfleet.errors import LinkLost, TooLarge
from hushfleet.simulator.world.clock import WorldClock
from hushfleet.wire.link.interface import (
    DEFAULT_MESSAGE_CAP_BYTES,
    Delivery,
    LinkDown,
    LinkEvent,
    LinkUp,
    Will,
    check_filter,
    publish_packet_bytes,
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


MAX_IN_FLIGHT = 20
"""Messages that a device sends before the broker must acknowledge one (`hushfleet.wire.link.mqtt.MqttLink`)."""


@dataclass(frozen=True)
class Roughness:
    """The jitter and the stalls of a bad network, in each direction.

    TCP hides a lost packet, so a loss is a stall: nothing arrives for a while, and then everything in its order.

    :param jitter_s: largest additional delay of a packet.
    :param stall_every_s: mean seconds between stalls; 0: none.
    :param stall_s: mean length of a stall; each is 0.5 to 1.5 times as long.
    """

    jitter_s: float = 0.0
    stall_every_s: float = 0.0
    stall_s: float = 0.0


STEADY = Roughness()


class Cable:
    """One direction of a link: packets leave one after the other, and arrive in this order after the latency.

    :param s_per_byte: seconds for which a byte keeps the link busy.
    :param seed: of the draws of `rough`, which do not depend on those of other cables.

    `bytes` counts whole MQTT packets that have left, without TCP, TLS and radio.
    """

    def __init__(
        self,
        clock: WorldClock,
        *,
        latency_s: float,
        s_per_byte: float,
        rough: Roughness = STEADY,
        seed: str = "",
    ) -> None:
        self._clock, self.latency_s, self._s_per_byte = clock, latency_s, s_per_byte
        self.bytes = 0
        self.free_at = 0.0
        self._acked: deque[float] = deque()
        self._rough, self._arrived_at = rough, 0.0
        self._jitters, self._stalls = random.Random(f"jitter {seed}"), random.Random(f"stalls {seed}")
        self._stall_begins = self._stall_ends = 0.0 if rough.stall_every_s else math.inf

    @property
    def is_full(self) -> bool:
        """Returns whether the sender waits for an acknowledgement before the next packet."""
        while self._acked and self._acked[0] <= self._clock.now:
            self._acked.popleft()
        return len(self._acked) >= MAX_IN_FLIGHT

    @property
    def room_at(self) -> float:
        return self._acked[0] if self._acked else 0.0

    def hold(self, until: float) -> None:
        """Lets nothing leave before this time, because the sender computes."""
        self.free_at = max(self.free_at, until)

    def send(self, size: int, arrive: Callable[[], None]) -> None:
        """Sends a packet of this many bytes, and calls `arrive` when it is there."""
        self.bytes += size
        self.free_at = max(self.free_at, self._clock.now) + size * self._s_per_byte
        due_at = self.free_at + self.latency_s + self._jitters.uniform(0.0, self._rough.jitter_s)
        self._arrived_at = max(self._arrived_at, self._after_stall(due_at))
        self._acked.append(self._arrived_at + self.latency_s)
        self._clock.at(self._arrived_at, arrive)

    def _after_stall(self, due_at: float) -> float:
        while due_at >= self._stall_ends:
            self._stall_begins = self._stall_ends + self._stalls.expovariate(1 / self._rough.stall_every_s)
            self._stall_ends = self._stall_begins + self._rough.stall_s * self._stalls.uniform(0.5, 1.5)
        return self._stall_ends if due_at >= self._stall_begins else due_at


@dataclass(frozen=True)
class Cables:
    """Both directions of a client's link to the broker, for all its connections.

    :param connects_s: seconds from an attempt until the link is up.
    """

    up: Cable
    down: Cable
    connects_s: float = 0.0


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

    :param clock: the world's; None: the broker notices at once whatever happens.
    :param chaos: makes deliveries unreliable; None keeps every link's order and loses nothing.
    :param message_cap_bytes: links raise `TooLarge` for larger payloads.

    `denied` are client ids that an access list keeps out: they connect and subscribe, and neither hear nor are heard.
    """

    def __init__(
        self,
        *,
        clock: WorldClock | None = None,
        chaos: Chaos | None = None,
        message_cap_bytes: int = DEFAULT_MESSAGE_CAP_BYTES,
    ) -> None:
        self.clock = clock
        self.packet_bytes: Callable[[str, int], int] = publish_packet_bytes
        """Counts the bytes of a message with this topic and so many bytes of payload."""
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

    def link(self, client_id: str, will: Will | None = None, *, cables: Cables | None = None) -> LocalLink:
        """A new link; it is connected by its `open`.

        :param cables: let its messages take time; None: they arrive at once.
        """
        return LocalLink(self, client_id, will, cables)

    def cut(self, client_id: str, reason: str = "the connection was cut") -> None:
        """Break a link as a power cut would: its will is published, it sees `LinkDown`."""
        with self.lock:
            link = self.connected.get(client_id)
            if link is not None:
                self.detach(link)
                self._cut[client_id] = link
                link.put(LinkDown(reason))
                if link.will is not None:
                    self.publish(link.will.topic, link.will.payload, retain=True)

    def restore(self, client_id: str) -> None:
        """Let a link that was cut connect again; nothing happens if it was not."""
        with self.lock:
            link = self._cut.get(client_id)
            if link is not None:
                self.attach(link)

    def vanish(self, link: LocalLink, *, will_after_s: float = 0.0) -> None:
        """Breaks a link of which the broker hears no more: it publishes the will when it notices.

        Without a clock it notices at once.
        """
        if self.connected.get(link.client_id) is not link:
            return
        self.detach(link)
        if link.will is not None:
            if self.clock is None:
                self._miss(link)
            else:
                self.clock.at(self.clock.now + will_after_s, lambda: self._miss(link))

    def _miss(self, link: LocalLink) -> None:
        """Publishes the will of a link that is gone, unless its client has come back."""
        if link.client_id not in self.connected and link.will is not None:
            self.publish(link.will.topic, link.will.payload, retain=True)

    def crash(self) -> None:
        """Ends all connections, and forgets what is retained; no will is published."""
        with self.lock:
            for link in list(self.connected.values()):
                self.detach(link)
                link.put(LinkDown("the broker has ended"))
            self.retained.clear()

    def attach(self, link: LocalLink) -> None:
        if self.connected.get(link.client_id) is link:
            return
        self.cut(link.client_id, "another link with the same client id connected")
        self._cut.pop(link.client_id, None)
        self.connected[link.client_id] = link
        link.connection += 1
        link.put(LinkUp())
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
        if link.client_id in self.denied:
            return
        if self._table(topic_filter) is self._exact:  # thousands of devices are in `retained`
            if topic_filter in self.retained:
                link.take(Delivery(topic_filter, self.retained[topic_filter], True))
            return
        for topic, payload in self.retained.items():
            if matches(topic_filter, topic):
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

    def __init__(self, hub: LocalHub, client_id: str, will: Will | None, cables: Cables | None = None) -> None:
        self.client_id = client_id
        self.will = will
        self._hub, self._cables = hub, cables
        self.events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self.filters: dict[str, None] = {}
        self.is_paused = self._is_closed = False
        self.connection = 0  # the number of the present or last one
        self.on_event: Callable[[], None] | None = None
        """Is called when something has come: then `receive` never waits, and notes in `waits_s` how long it would."""
        self.waits_s: float | None = None
        self.on_publish: Callable[[], None] | None = None
        """Is called before each message leaves."""

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
            if self.client_id in self._hub.denied:
                return
            if self.on_publish is not None:
                self.on_publish()
            if self._cables is None:
                self._hub.publish(topic, bytes(payload), retain=retain)
            else:
                size, connection, data = self._hub.packet_bytes(topic, len(payload)), self.connection, bytes(payload)
                self._cables.up.send(size, lambda: self._arrives(topic, data, connection, retain=retain))

    def _arrives(self, topic: str, payload: bytes, connection: int, *, retain: bool) -> None:
        """Lets the broker have a message, unless the connection that it was sent on is over."""
        if connection == self.connection and (self._is_connected() or self._is_closed):
            self._hub.publish(topic, payload, retain=retain)

    @property
    def is_full(self) -> bool:
        """Returns whether so many messages are on their way that `publish` would block."""
        return self._cables is not None and self._cables.up.is_full

    @property
    def room_at(self) -> float:
        """When one of these messages is acknowledged."""
        return 0.0 if self._cables is None else self._cables.up.room_at

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
        if self.on_event is not None:
            if self.events.empty():
                self.waits_s = timeout_s
            timeout_s = 0.0
        try:
            return self.events.get(timeout=timeout_s) if timeout_s > 0 else self.events.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        with self._hub.lock:
            self._is_closed = self._is_connected()  # then what was sent before still arrives
            self._hub.detach(self)

    def _is_connected(self) -> bool:
        return self._hub.connected.get(self.client_id) is self

    def take(self, delivery: Delivery) -> None:
        if self._cables is None:
            self.put(delivery)
        else:
            size, connection = self._hub.packet_bytes(delivery.topic, len(delivery.payload)), self.connection
            self._cables.down.send(size, lambda: self._comes(delivery, connection))

    def _comes(self, delivery: Delivery, connection: int) -> None:
        if connection == self.connection and self._is_connected():
            self.put(delivery)

    def put(self, event: LinkEvent) -> None:
        """Adds an event for the owner."""
        self.events.put(event)
        if self.on_event is not None:
            self.on_event()

"""The fleet service: one thread with one loop over two brokers, the enrolment broker and the fleet's broker.

Its work is in its parts: enrolment here, others in their own files (`ServicePart`). It keeps no state that must
survive: it may be killed at any moment, and boards ask again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from hushfleet.aggregator.fleet.trust.enrolment import Enroller
from hushfleet.aggregator.storage.enrolment import TokenBucket
from hushfleet.errors import (
    BadSignature,
    HushfleetError,
    LinkLost,
    Malformed,
    OtherVersion,
    StoreError,
    TooLarge,
    WireError,
)
from hushfleet.wire.format.fleet_messages import EnrolAnswer, EnrolRequest
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Message, decode_as, encode_message
from hushfleet.wire.format.topics import ParsedTopic, Topics
from hushfleet.wire.link.interface import Delivery, Link, LinkDown, LinkEvent, LinkUp

REQUESTS_A_SECOND = 50.0
MAX_REQUESTS_BURST = 500
RENEWALS_A_SECOND = 1.0  # of one board
MAX_RENEWALS_BURST = 20
MAX_WARNED = 1000
WAIT_S = 0.1
APPLY_AGAIN_S = 5.0
REST = 5.0
"""The shortest time between the starts of a part's action and of its next one, in multiples of the first's duration.

A part that looks at 10,000 boards therefore acts less often, and leaves time for messages and other parts.
"""

log = logging.getLogger("hushfleet.fleet")


class ServicePart:
    """A task of the service besides enrolment.

    :cvar every_s: seconds between two calls of `act`; `again_s`: after an error.
    :cvar fails_as: what an error of `act` means, for the log.
    """

    every_s = again_s = 0.0
    fails_as = "a part of the fleet service fails"
    _act_at = 0.0
    _told = ""

    def filters(self, topics: Topics) -> Sequence[str]:
        """Returns the topic filters that the part needs at the fleet's broker."""
        return ()

    def take(self, service: FleetService, topic: ParsedTopic, delivery: Delivery) -> None:
        """Takes a message that matches a filter of this part or of another. Raises a `WireError` for a wrong one."""

    def advance(self, service: FleetService, now: float) -> None:
        """Acts if it is due; called several times a second while the link is up. `now`: monotonic seconds."""
        if now >= self._act_at:
            self._act_at, begun, failure = now + self.every_s, time.monotonic(), ""
            try:
                self.act(service, now)
            except LinkLost:
                raise
            except HushfleetError as error:  # boards must still be able to enrol
                failure, self._act_at = str(error), now + max(self.every_s, self.again_s)
            if failure and failure != self._told:
                log.error("%s: %s", self.fails_as, failure)
            self._told = failure
            self._act_at = max(self._act_at, now + REST * (time.monotonic() - begun))

    def act(self, service: FleetService, now: float) -> None:
        """Does what is due. A `HushfleetError` is logged, once until it changes; the other parts go on."""
        raise NotImplementedError

    def end(self, service: FleetService) -> None:
        """Called before the service ends."""


class FleetService:
    """Answers boards.

    :param enrolment_link: link to the broker that boards without a certificate reach.
    :param fleet: link to the broker of all others.
    :param identity: signs all messages to boards.
    :param apply: writes the files derived from the registry (`access.apply`); called at the start and after changes.
    :param was_changed: whether another process has changed the registry.
    """

    def __init__(
        self,
        *,
        federation: str,
        identity: Identity,
        enrolment_link: Link,
        fleet: Link,
        enroller: Enroller,
        apply: Callable[[], None],
        was_changed: Callable[[], bool],
        parts: Sequence[ServicePart] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topics = Topics(federation)
        self.parts = list(parts)
        self._identity, self._enrolment_link, self._fleet = identity, enrolment_link, fleet
        self._enroller, self._apply, self._was_changed, self._clock = enroller, apply, was_changed, clock
        self._requests = TokenBucket(REQUESTS_A_SECOND, MAX_REQUESTS_BURST, now=clock())
        # One bucket per board. At the fleet's broker a board needs a certificate, and writes only to its own topics.
        self._renewals = _BoardBuckets(clock)
        # The same at the enrolment broker, for boards whose certificate has ended. Anyone with a board's public key can
        # use these up, because no signature is checked before. So they are separate from the buckets above.
        self._returns = _BoardBuckets(clock)
        self._up = False
        self._other_versions = set[str]()
        self._stale, self._apply_at = False, 0.0  # whether `apply` has not written the newest changes yet

    def run(self, stop: threading.Event) -> None:
        """Runs until `stop` is set."""
        self.start()
        try:
            while not stop.is_set():
                self.step(WAIT_S)
        finally:
            for part in self.parts:
                part.end(self)
            self._enrolment_link.close()
            self._fleet.close()

    def start(self) -> None:
        self._apply()
        self._enrolment_link.subscribe(self.topics.all_requests)
        filters = [self.topics.all_renewals, *(each for part in self.parts for each in part.filters(self.topics))]
        for topic_filter in dict.fromkeys(filters):
            self._fleet.subscribe(topic_filter)
        self._enrolment_link.open()
        self._fleet.open()

    def step(self, longest_s: float) -> None:
        """Takes an event of each link, waiting at most `longest_s` seconds, and does what is due."""
        request = self._enrolment_link.receive(0.0)
        event = self._fleet.receive(0.0 if request is not None else longest_s)
        if request is not None:
            self._on_event(request, "the broker for enrolment", self._on_request)
        if event is not None:
            self._up = isinstance(event, Delivery | LinkUp)
            self._on_event(event, "the broker", self._on_delivery)
        try:
            self._apply_changes()
            for part in self.parts if self._up else ():
                part.advance(self, self._clock())
        except LinkLost:
            self._up = False
        except StoreError as error:
            log.error("%s", error)

    def _apply_changes(self) -> None:
        """Applies changes; a change that cannot be written (full disk) is written later. Raises `StoreError`."""
        self._stale |= self._was_changed()
        if self._stale and self._clock() >= self._apply_at:
            self._apply_at = self._clock() + APPLY_AGAIN_S
            self._apply()
            self._stale, self._apply_at = False, 0.0

    def publish(self, topic: str, message: Message, *, retain: bool = False) -> None:
        """Publishes at the fleet's broker, signed by the service's key. Raises `LinkLost`."""
        self._fleet.publish(topic, self._encoded(message), retain=retain)

    def send(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Publishes bytes as they are, such as chunks. Raises `LinkLost`."""
        self._fleet.publish(topic, payload, retain=retain)

    def clear(self, topic: str) -> None:
        """Clears what the fleet's broker retains of a topic. Raises `LinkLost`."""
        self._fleet.publish(topic, b"", retain=True)

    def _on_event(self, event: LinkEvent, name: str, take: Callable[[Delivery], None]) -> None:
        if isinstance(event, LinkUp):
            log.info("connected to %s", name)
        elif isinstance(event, LinkDown):
            log.warning("the connection to %s was lost: %s", name, event.reason)
        else:
            try:
                take(event)
            except (LinkLost, StoreError) as error:  # the board asks again
                self._stale |= isinstance(error, StoreError)  # a granted certificate may not be applied yet
                log.warning("%s", error)
            except OtherVersion as error:
                self._warn_of_version(event.topic, error)
            except WireError as error:
                log.debug("a message on %.120r was ignored: %s", event.topic, error)
            except Exception:  # no message may end the service
                log.exception("a message on %.120r could not be handled", event.topic)

    def _warn_of_version(self, topic: str, error: OtherVersion) -> None:
        """Warns once for each topic, and for no more topics than `MAX_WARNED`."""
        if topic not in self._other_versions and len(self._other_versions) < MAX_WARNED:
            self._other_versions.add(topic)
            log.warning("%.120s: %s. A board that has no certificate yet needs its card written anew", topic, error)

    def _on_request(self, delivery: Delivery) -> None:
        topic = self.topics.parse(delivery.topic)
        if topic.kind != "enrol-up" or topic.device is None:
            raise Malformed(f"no message is expected on {delivery.topic!r}")
        device, payload = topic.device, delivery.payload
        if not self._requests.take(self._clock()):
            _check_rate(self._enroller.names_known_key(device, payload) and self._returns.take(device))
        self._enrolment_link.publish(self.topics.answer(device), self._encoded(self._answered(device, payload)))

    def _on_delivery(self, delivery: Delivery) -> None:
        topic = self.topics.parse(delivery.topic)
        if not delivery.payload:
            return  # a retained message is cleared, by this service or by a board
        if topic.kind == "renew" and topic.device is not None:
            _check_rate(self._renewals.take(topic.device))
            self.publish(self.topics.fleet(topic.device), self._answered(topic.device, delivery.payload))
            return
        for part in self.parts:
            part.take(self, topic, delivery)

    def _answered(self, device: str, payload: bytes) -> EnrolAnswer:
        request = decode_as(EnrolRequest, payload, federation=self.topics.federation)
        if request.device != device:
            raise BadSignature(f"a request of {request.device} came on the topic of {device}")
        return self._enroller.answer(request)

    def _encoded(self, message: Message) -> bytes:
        return encode_message(message, self._identity, federation=self.topics.federation)


def _check_rate(has_token: bool) -> None:
    if not has_token:
        raise TooLarge("too many requests for certificates; this one is not read")


class _BoardBuckets:
    """A token bucket for each board."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._of = clock, dict[str, TokenBucket]()

    def take(self, device: str) -> bool:
        now = self._clock()
        if device not in self._of:
            self._of[device] = TokenBucket(RENEWALS_A_SECOND, MAX_RENEWALS_BURST, now=now)
        return self._of[device].take(now)

"""Provides `MqttLink`: a `Link` over paho-mqtt, MQTT 3.1.1, clean sessions, that reconnects by itself.

One thread makes connection after connection (`connection.Connection`), each with a new paho client. paho
would resend unacknowledged messages forever, even one that the broker does not accept (measured: once a
second, and all other messages wait behind it). Here unacknowledged messages are dropped with the connection:
the application itself acknowledges delivery, and asks for what is missing (docs/wire.md).

When that thread ends, for any reason, the connection ends: `publish` then raises `LinkLost`.
"""

from __future__ import annotations

import logging
import random
import threading
from dataclasses import replace
from operator import methodcaller

from hushfleet.errors import BadInput, TooLarge
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.connection import Connection, ConnectOptions, Timing
from hushfleet.wire.link.connection_errors import explained, explained_silence
from hushfleet.wire.link.interface import DEFAULT_MESSAGE_CAP_BYTES, LinkEvent, Will, check_filter
from hushfleet.wire.link.mailbox import Mailbox

log = logging.getLogger(__name__)

SHORT_LIFE_S = 5.0
SHORT_LIVES = 3
LEAST_KEEPALIVE_S = 15


class MqttLink:
    """A connection to an MQTT broker; see `hushfleet.wire.link.interface` for the contract.

    :param broker: its address, or `mqtt://[user:password@]host[:port]`, or `mqtts://...`; raises `BadInput`.
    :param client_id: unique at the broker; a second link with the same id takes over the connection.
    :param message_cap_bytes: `publish` raises `TooLarge` for a larger payload; at most the broker's own cap.
    :param keepalive_s: the longest time without a packet; shortened automatically, see `_shorten`.
    :param max_in_flight: messages sent but not yet acknowledged by the broker.
    """

    def __init__(
        self,
        broker: BrokerAddress | str,
        *,
        client_id: str,
        will: Will | None = None,
        message_cap_bytes: int = DEFAULT_MESSAGE_CAP_BYTES,
        max_in_flight: int = 20,
        keepalive_s: int = 60,
        timing: Timing | None = None,
    ) -> None:
        self.address = BrokerAddress.parse(broker) if isinstance(broker, str) else broker
        if not client_id or max_in_flight < 1 or keepalive_s < 1:
            raise BadInput("a link needs a client id, and at least 1 for max_in_flight and keepalive_s")
        self.client_id = client_id
        self.message_cap_bytes = message_cap_bytes
        self._timing = timing or Timing()
        self._options = ConnectOptions(
            address=self.address,
            client_id=client_id,
            will=will,
            max_in_flight=max_in_flight,
            keepalive_s=keepalive_s,
            timing=self._timing,
        )
        self._mailbox = Mailbox(max_in_flight=max_in_flight)
        self._thread: threading.Thread | None = None
        # for each recent connection that ended at once: the largest payload that the broker did not acknowledge
        self._short_lives: list[int] = []
        self._unanswered = 0  # consecutive connections that were made but got no answer to the login
        self._port_reason = ""

    def open(self) -> None:
        if self._thread is not None:
            raise BadInput("a link is opened once; make a new one")
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{self.client_id}", daemon=True)
        self._thread.start()

    def subscribe(self, topic_filter: str) -> None:
        check_filter(topic_filter)
        self._mailbox.subscribe(topic_filter)

    def unsubscribe(self, topic_filter: str) -> None:
        self._mailbox.unsubscribe(topic_filter)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        if len(payload) > self.message_cap_bytes:
            raise TooLarge(
                f"a message of {len(payload)} bytes is above the cap of {self.message_cap_bytes}; send it in chunks"
            )
        if not topic or "+" in topic or "#" in topic:
            raise BadInput(f"{topic!r} cannot be published to: it is empty or has a wildcard")
        order = methodcaller("publish", topic, payload, retain)
        self._mailbox.publish(order, timeout_s=self._timing.publish_s)

    def receive(self, timeout_s: float) -> LinkEvent | None:
        return self._mailbox.receive(timeout_s)

    def pause(self) -> None:
        self._mailbox.pause()
        # a connection attempt, or a broker that does not take the queued messages, delays it by less than a minute
        while self._thread is not None and self._thread.is_alive() and not self._mailbox.is_paused(within_s=1.0):
            pass

    def resume(self) -> None:
        self._mailbox.resume()

    def close(self) -> None:
        self._mailbox.close(within_s=self._timing.close_s)
        if self._thread is not None:
            self._thread.join(self._timing.close_s + 1.0)
            if self._thread.is_alive():
                return  # in a connection attempt: it cannot be cancelled, but its time is limited; a daemon thread
        self._mailbox.release()

    # the thread

    def _run(self) -> None:
        attempt = 0
        mailbox, timing = self._mailbox, self._timing
        try:
            while not mailbox.closing:
                mailbox.wait_resumed()
                if mailbox.closing:
                    break
                reason, lived_s = self._one_connection()
                mailbox.down(reason)
                attempt = 0 if lived_s >= timing.stable_s else attempt
                ceiling_s = min(timing.backoff_cap_s, timing.backoff_base_s * 2.0 ** min(attempt, 20))
                mailbox.wait_closing(random.uniform(0.0, ceiling_s))
                attempt += 1
        finally:
            if not mailbox.closing:
                mailbox.down("the link's thread ended, which is a defect; open a new link")

    def _one_connection(self) -> tuple[str, float]:
        """Runs one connection; returns why it ended, and how many seconds it lived."""
        try:
            connection = Connection(self._options, self._mailbox)
        except BadInput as error:  # a TLS file vanished since this link was made; it may come back
            return str(error), 0.0
        was_made = False
        try:
            reason = connection.serve()
            was_made = True
        except OSError as error:
            reason = explained(error, self.address)
        except Exception as error:  # paho raises some errors of its own; none may end the thread
            log.exception("unexpected error in the link's thread")
            reason = f"the connection to {self.address} failed: {type(error).__name__}: {error}"
        if connection.was_accepted:
            reason += self._shorten(connection) + self._diagnosis(connection)
        elif was_made:
            reason += self._asked_port(connection)
        return reason, connection.lived_s

    def _asked_port(self, connection: Connection) -> str:
        """Explains why logins are not answered, if it is known; probes the port once, at the second one in a row."""
        self._unanswered = 0 if connection.was_refused else self._unanswered + 1
        if self._unanswered == 2:
            self._port_reason = explained_silence(self.address)
        return self._port_reason if self._unanswered >= 2 else ""

    def _shorten(self, connection: Connection) -> str:
        """Shortens the keepalive if a router (NAT) may have dropped the idle connection and its later packets."""
        before = self._options.keepalive_s
        after = min(before, max(LEAST_KEEPALIVE_S, before // 3))
        if not connection.went_silent or after == before:
            return ""
        self._options = replace(self._options, keepalive_s=after)
        return (
            f"; a router on the way may forget idle connections, so something is sent every {after} s from now on "
            "(for a board: broker.keepalive_s)"
        )

    def _diagnosis(self, connection: Connection) -> str:
        """Explains why connection after connection ends as soon as it is made."""
        self._unanswered = 0
        # if two devices take the connection from each other, each waits longer and longer, and the other lives as long
        is_known = len(self._short_lives) == SHORT_LIVES
        if connection.lived_s >= (self._timing.backoff_cap_s if is_known else SHORT_LIFE_S):
            self._short_lives.clear()
            return ""
        self._short_lives = [*self._short_lives, connection.largest_unacknowledged][-SHORT_LIVES:]
        if len(self._short_lives) < SHORT_LIVES:
            return ""
        text = (
            f"; connection after connection ends soon: another device with the id {self.client_id!r} seems to be "
            "connected"
        )
        if min(self._short_lives) > 0:
            text += f", or the broker does not take messages of {min(self._short_lives)} bytes"
        return text

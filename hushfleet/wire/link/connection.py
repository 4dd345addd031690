"""Runs one connection to an MQTT broker, from the first packet to the last, with its own paho client.

paho is used through its external-loop interface, and by one thread only: callbacks never block and never wait.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.interface import Delivery, Will
from hushfleet.wire.link.mailbox import Mailbox
from hushfleet.wire.link.paho_client import CallbackAPIVersion, LogLevel, paho

FILTERS_A_PACKET = 8  # AWS IoT takes no more in one SUBSCRIBE
PACKETS_A_TURN = 64
PING_SPREAD = 1 / 4
"""In a pause, each PINGREQ is sent at a random moment within this part of a keepalive. A busy machine sends it some
milliseconds late; compared with 15 random seconds, this delay reveals almost nothing."""
_PINGREQ = b"\xc0\x00"
_drawn = random.SystemRandom()


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time limits in seconds.

    :param backoff_base_s: the n-th wait for a new attempt is drawn from 0 to base x 2^n (full jitter) ...
    :param backoff_cap_s: ... but never from more than this.
    :param stable_s: after a connection that lived this long, the backoff starts from its base again.
    :param connect_s: the limit for TCP, and again for the TLS handshake.
    :param answer_s: how long the broker may take for CONNACK, and for SUBACK.
    :param publish_s: how long `publish` waits for room among the messages in flight.
    :param close_s: how long `close` waits for the last acknowledgements.
    """

    backoff_base_s: float = 1.0
    backoff_cap_s: float = 120.0
    stable_s: float = 60.0
    connect_s: float = 10.0
    answer_s: float = 15.0
    publish_s: float = 30.0
    close_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class ConnectOptions:
    """Options of every connection of a link."""

    address: BrokerAddress
    client_id: str
    will: Will | None
    max_in_flight: int
    keepalive_s: int
    timing: Timing


class Connection:
    """One connection, used once: `serve` returns when the connection is over.

    :param mailbox: the source of orders and the destination of events.
    """

    def __init__(self, options: ConnectOptions, mailbox: Mailbox) -> None:
        self._options = options
        self._mailbox = mailbox
        self._client = self._new_client()
        self._accepted_at: float | None = None
        self.was_refused = False
        self.went_silent = False  # a PINGREQ was not answered: the network drops the sent packets
        self._up = False
        self._reason = ""
        self._paho_error = ""
        self._deadline = 0.0
        self._awaited: set[int] = set()  # SUBSCRIBE packets without SUBACK
        self._unacknowledged: dict[int, int] = {}  # packet id of a PUBLISH -> its payload bytes
        self._packets = 0

    @property
    def was_accepted(self) -> bool:
        """True if the broker accepted the login."""
        return self._accepted_at is not None

    @property
    def lived_s(self) -> float:
        """Seconds since the broker accepted the login; 0 if it did not."""
        return 0.0 if self._accepted_at is None else time.monotonic() - self._accepted_at

    @property
    def largest_unacknowledged(self) -> int:
        """Payload bytes of the largest message that the broker did not acknowledge."""
        return max(self._unacknowledged.values(), default=0)

    def serve(self) -> str:
        """Connects, and runs until the connection is lost, given up or closed; returns why.

        May raise the errors that sockets, ssl and paho raise while connecting.
        """
        address, timing = self._options.address, self._options.timing
        try:
            self._client.connect(address.host, address.port, self._options.keepalive_s)
            self._deadline = time.monotonic() + timing.answer_s
            with selectors.DefaultSelector() as selector:
                return self._loop(selector)
        finally:
            # without an earlier DISCONNECT this makes the broker publish the will
            left_open = self._client.socket()
            if left_open is not None:
                left_open.close()

    def _loop(self, selector: selectors.BaseSelector) -> str:
        client, mailbox = self._client, self._mailbox
        selector.register(mailbox.wake_reader, selectors.EVENT_READ)
        sock: Any = client.socket()
        if sock is None:  # the first packet could not be written
            return self._problem()
        # otherwise every small message after a PUBACK waits 40 ms for the broker's delayed TCP acknowledgement
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            number = mailbox.pause_wanted  # read before the orders: those from before the pause must be sent
            self._execute_orders()
            if mailbox.closing and self._said_goodbye():
                return "closed"
            problem = self._problem()
            if problem:
                return problem
            if number:
                if not (self._up and self._sent_all(selector, sock)):
                    return self._problem() or "the link was paused, and the connection was not ready for that"
                self._keep_pause(selector, sock, number)
                continue
            wanted = 0 if mailbox.is_full else selectors.EVENT_READ
            if client.want_write():
                wanted |= selectors.EVENT_WRITE
            self._wait(selector, sock, wanted)
            if wanted & selectors.EVENT_READ:
                self._read()
            if client.want_write():
                client.loop_write()
            client.loop_misc()

    def _sent_all(self, selector: selectors.BaseSelector, sock: Any) -> bool:
        """Sends everything queued within `answer_s` and reads nothing meanwhile; returns whether this succeeded."""
        client, limit = self._client, time.monotonic() + self._options.timing.answer_s
        while client.want_write() and client.socket() is not None and time.monotonic() < limit:
            self._wait(selector, sock, selectors.EVENT_WRITE)
            client.loop_write()
        return client.socket() is not None and not client.want_write()

    def _keep_pause(self, selector: selectors.BaseSelector, sock: Any, number: int) -> None:
        """Waits until the end of pause `number`, then reads what has arrived.

        The broker drops a client that has sent nothing for one and a half times the keepalive. So one PINGREQ per
        keepalive is sent without paho, which would wait for the answer. The later reading detects a lost connection.
        """
        mailbox, keepalive_s = self._mailbox, float(self._options.keepalive_s)
        if sock in selector.get_map():
            selector.unregister(sock)
        mailbox.paused(number)
        turn_at = time.monotonic() + keepalive_s
        ping_at = turn_at + _drawn.uniform(0.0, PING_SPREAD * keepalive_s)
        while mailbox.pause_wanted == number:
            if selector.select(max(0.0, ping_at - time.monotonic())):
                mailbox.drain_wake()
            elif time.monotonic() >= ping_at:
                with contextlib.suppress(OSError):
                    sock.send(_PINGREQ)
                turn_at += keepalive_s
                ping_at = turn_at + _drawn.uniform(0.0, PING_SPREAD * keepalive_s)
        self._deadline = time.monotonic() + self._options.timing.answer_s
        self._read()  # the answers to the PINGREQs, before paho checks its timeouts

    def _wait(self, selector: selectors.BaseSelector, sock: Any, wanted: int) -> None:
        registered = sock in selector.get_map()
        if wanted and registered:
            selector.modify(sock, wanted)
        elif wanted:
            selector.register(sock, wanted)
        elif registered:
            selector.unregister(sock)
        decrypted = wanted & selectors.EVENT_READ and _pending(sock)
        ready = selector.select(0.0 if decrypted else min(1.0, self._options.timing.answer_s / 4))
        if any(key.fileobj is self._mailbox.wake_reader for key, _ in ready):
            self._mailbox.drain_wake()

    def _read(self) -> None:
        """Reads what has arrived, but stops after `PACKETS_A_TURN` packets, so that sending is not delayed."""
        for _ in range(PACKETS_A_TURN):
            sock: Any = self._client.socket()
            if sock is None:
                return
            before = self._packets
            self._client.loop_read()
            if self._packets == before and not _pending(sock):
                return

    def _problem(self) -> str:
        """Returns why the connection must be given up; empty if there is no problem."""
        address, timing = self._options.address, self._options.timing
        if self._client.socket() is None:
            detail = f": {self._paho_error}" if self._paho_error else ""
            if address.tls and not self.was_accepted and not self.was_refused:
                # with TLS 1.3 the broker checks the certificate after the client's handshake is over
                detail += (
                    "; before the login this mostly means that it does not accept our certificate, which was locked "
                    "out or has ended; its operator knows why"
                )
            return (self._reason or f"the connection to {address} was lost") + detail
        if self._reason:
            return self._reason
        if (not self._up or self._awaited) and time.monotonic() > self._deadline:
            return f"{address} gave no answer for {timing.answer_s:g} s"
        return self._mailbox.take_give_up_reason()

    def _execute_orders(self) -> None:
        while self.was_accepted and (order := self._mailbox.next_order()) is not None:
            order(self)

    # orders

    def publish(self, topic: str, payload: bytes, retain: bool) -> None:
        """Sends a message."""
        info = self._client.publish(topic, payload, qos=1, retain=retain)
        self._unacknowledged[info.mid] = len(payload)

    def unsubscribe(self, topic_filter: str) -> None:
        """Ends a subscription."""
        self._client.unsubscribe(topic_filter)

    def subscribe(self, topic_filters: list[str]) -> None:
        """Subscribes; the connection is up once the broker has confirmed it."""
        code, packet_id = self._client.subscribe([(topic_filter, 1) for topic_filter in topic_filters])
        if packet_id is None:
            self._reason = self._reason or f"the subscription could not be sent ({code})"
            return
        self._awaited.add(packet_id)
        self._deadline = time.monotonic() + self._options.timing.answer_s

    def _said_goodbye(self) -> bool:
        """Sends DISCONNECT once nothing is in flight or the time is over, so that the will is not published."""
        close_by = self._mailbox.close_by
        if self._up and self._unacknowledged and time.monotonic() < close_by:
            return False
        self._client.disconnect()
        while self._client.want_write() and time.monotonic() < close_by:
            self._client.loop_write()
            time.sleep(0.001)
        return True

    def _up_if_ready(self) -> None:
        if self._up or self._awaited or self._reason:
            return
        self._up = True
        self._mailbox.up()

    # paho

    def _new_client(self) -> paho.Client:
        options = self._options
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=options.client_id,
            clean_session=True,
            protocol=paho.MQTTv311,
            reconnect_on_failure=False,
        )
        client.suppress_exceptions = True
        client.connect_timeout = options.timing.connect_s
        client.max_inflight_messages_set(options.max_in_flight)
        if options.address.username is not None:
            client.username_pw_set(options.address.username, options.address.password)
        if options.will is not None:
            client.will_set(options.will.topic, options.will.payload, qos=1, retain=True)
        context = options.address.tls_context()
        if context is not None:
            client.tls_set_context(context)
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_publish = self._on_publish
        client.on_message = self._on_message
        client.on_disconnect = self._on_disconnect
        client.on_log = self._on_log
        return client

    def _on_connect(self, _client: Any, _data: Any, _flags: Any, code: Any, _properties: Any) -> None:
        if code.is_failure:
            self.was_refused = True
            self._reason = f"the broker refused the login ({code}): check user name, password, certificate"
            return
        self._accepted_at = time.monotonic()
        filters = self._mailbox.accepted()
        for start in range(0, len(filters), FILTERS_A_PACKET):
            self.subscribe(filters[start : start + FILTERS_A_PACKET])
        self._up_if_ready()

    def _on_subscribe(self, _client: Any, _data: Any, mid: int, codes: Any, _properties: Any) -> None:
        if any(code.is_failure for code in codes):
            self._reason = "the broker refused a subscription: check its access list for this device"
        self._awaited.discard(mid)
        self._up_if_ready()

    def _on_publish(self, _client: Any, _data: Any, mid: int, _code: Any, _properties: Any) -> None:
        if self._unacknowledged.pop(mid, None) is not None:
            self._mailbox.acknowledged()

    def _on_message(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        self._packets += 1
        self._mailbox.put(Delivery(message.topic, bytes(message.payload), message.retain))

    def _on_disconnect(self, _client: Any, _data: Any, _flags: Any, code: Any, _properties: Any) -> None:
        self.went_silent = code == "Keep alive timeout"
        self._reason = self._reason or f"the connection to {self._options.address} was lost ({code})"

    def _on_log(self, _client: Any, _data: Any, level: int, text: str) -> None:
        if level == LogLevel.MQTT_LOG_ERR:
            self._paho_error = text


def _pending(sock: Any) -> int:
    """Returns the number of bytes that TLS has already decrypted; no selector reports them."""
    return sock.pending() if hasattr(sock, "pending") else 0

"""Holds the state that the owner of an MQTT link and the link's thread share, behind one lock.

The owner puts orders in and takes events out; the thread does the reverse. Nothing here uses the network.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from operator import methodcaller
from typing import Any

from hushfleet.errors import LinkLost
from hushfleet.wire.link.interface import Delivery, LinkDown, LinkEvent, LinkUp

RECEIVED_CAP_BYTES = 64 << 20
_DELIVERY_BYTES = 256  # approximate memory of a delivery besides its payload; empty payloads must count too


Order = Callable[[Any], None]
"""A call of the connection (`connection.Connection`), which the link's thread makes."""


class Mailbox:
    """Orders one way, events the other way, and the state of the connection.

    :param max_in_flight: how many messages may be without an acknowledgement.
    """

    def __init__(self, *, max_in_flight: int) -> None:
        self.closing = False
        self.close_by = 0.0
        # readable whenever the thread should look at the mailbox
        self.wake_reader, self._wake_writer = socket.socketpair()
        self.wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._max_in_flight = max_in_flight
        self._changed = threading.Condition()
        self._filters: dict[str, None] = {}
        self._received: deque[LinkEvent] = deque()
        self._early: list[Delivery] = []  # came before all subscriptions were confirmed
        self._received_bytes = 0
        self._outbox: deque[Order] = deque()
        self._in_flight = 0
        self._accepted = False
        self._up = False
        self._generation = 0
        self._give_up_reason = ""
        self._pauses = 0  # so far
        self._pause = self._paused = 0  # numbers of the pause that the owner wants (0: none), and that the thread is in

    # the owner's side

    def subscribe(self, topic_filter: str) -> None:
        """Orders a subscription, which every new connection repeats."""
        with self._changed:
            self._filters[topic_filter] = None
            if self._accepted:
                self._outbox.append(methodcaller("subscribe", [topic_filter]))
        self.wake()

    def unsubscribe(self, topic_filter: str) -> None:
        """Orders the end of a subscription."""
        with self._changed:
            self._filters.pop(topic_filter, None)
            if self._accepted:
                self._outbox.append(methodcaller("unsubscribe", topic_filter))
        self.wake()

    def publish(self, order: Order, *, timeout_s: float) -> None:
        """Waits for room among the messages in flight. Raises `LinkLost`; then nothing was queued."""
        with self._changed:
            if not self._up:
                raise LinkLost("there is no connection to the broker at present; nothing was sent")
            generation = self._generation
            has_room = self._changed.wait_for(
                lambda: generation != self._generation or self._in_flight < self._max_in_flight, timeout_s
            )
            if generation != self._generation:
                raise LinkLost("the connection to the broker was lost while waiting; nothing was sent")
            if not has_room:
                self._give_up_reason = f"the broker acknowledged nothing for {timeout_s:g} s"
                self.wake()
                raise LinkLost(f"{self._give_up_reason}; connecting anew")
            self._in_flight += 1
            self._outbox.append(order)
        self.wake()

    def receive(self, timeout_s: float) -> LinkEvent | None:
        """Returns the next event, or None after `timeout_s` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._received, max(timeout_s, 0.0)):
                return None
            event = self._received.popleft()
            if isinstance(event, Delivery):
                was_full = self._received_bytes >= RECEIVED_CAP_BYTES
                self._received_bytes -= _bytes_of(event)
                if was_full:
                    self.wake()
            return event

    def pause(self) -> None:
        """Asks the thread to send nothing; see `is_paused`."""
        with self._changed:
            self._pauses += 1
            self._pause = self._pauses
            self._changed.notify_all()
        self.wake()

    def is_paused(self, *, within_s: float) -> bool:
        """Waits until the thread sends nothing any more; returns whether this happened within `within_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._paused == self._pause, within_s)

    def resume(self) -> None:
        """Ends a pause."""
        with self._changed:
            self._pause = 0
            self._changed.notify_all()
        self.wake()

    def close(self, *, within_s: float) -> None:
        """Asks the thread to send what is queued, to disconnect and to end."""
        with self._changed:
            self._pause = 0
            self.closing = True
            self.close_by = time.monotonic() + within_s
            self._changed.notify_all()
        self.wake()

    def wake(self) -> None:
        """Wakes the thread of the link."""
        with contextlib.suppress(OSError):  # it is awake already, or released
            self._wake_writer.send(b"\0")

    def release(self) -> None:
        """Closes the sockets, once the thread has ended."""
        self.wake_reader.close()
        self._wake_writer.close()

    # the thread's side

    def accepted(self) -> list[str]:
        """Notes that the broker accepted the login, and returns the filters so far; later subscriptions are queued."""
        with self._changed:
            self._accepted = True
            return list(self._filters)

    def up(self) -> None:
        """Notes that the link is up, and delivers the messages that came before."""
        with self._changed:
            self._up = True
            self._received.append(LinkUp())
            self._received.extend(self._early)
            self._early = []
            self._changed.notify_all()

    def down(self, reason: str) -> None:
        """Drops the messages in flight: the application asks again for what did not arrive."""
        with self._changed:
            self._up = self._accepted = False
            self._generation += 1
            self._in_flight = 0
            self._outbox.clear()
            self._received_bytes -= sum(map(_bytes_of, self._early))
            self._early = []
            self._give_up_reason = ""
            if not self.closing:
                self._received.append(LinkDown(reason))
            self._changed.notify_all()

    def put(self, delivery: Delivery) -> None:
        """Adds a received message."""
        with self._changed:
            self._received_bytes += _bytes_of(delivery)
            if self._up:
                self._received.append(delivery)
            else:
                self._early.append(delivery)
            self._changed.notify_all()

    def acknowledged(self) -> None:
        """Notes that the broker has taken one message."""
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    def next_order(self) -> Order | None:
        """Takes the next order; None if there is none."""
        with self._changed:
            return self._outbox.popleft() if self._outbox else None

    def take_give_up_reason(self) -> str:
        """Takes the owner's reason for a new connection; empty if it wants none."""
        with self._changed:
            reason, self._give_up_reason = self._give_up_reason, ""
            return reason

    @property
    def is_full(self) -> bool:
        """True if the owner is so far behind that nothing more should be read from the network."""
        with self._changed:
            return self._received_bytes >= RECEIVED_CAP_BYTES

    @property
    def pause_wanted(self) -> int:
        """The number of the pause that the owner wants; 0: none."""
        with self._changed:
            return self._pause

    def paused(self, number: int) -> None:
        """Notes that pause `number` has begun: everything queued before it is sent, or there is no connection."""
        with self._changed:
            self._paused = number
            self._changed.notify_all()

    def wait_resumed(self) -> None:
        """Waits until no pause is wanted."""
        with self._changed:
            while self._pause:
                self._paused = self._pause
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._pause != self._paused)

    def wait_closing(self, timeout_s: float) -> None:
        """Waits for `timeout_s`, or until `close` or `pause` is called."""
        with self._changed:
            self._changed.wait_for(lambda: self.closing or self._pause > 0, timeout_s)

    def drain_wake(self) -> None:
        """Empties the socket that wakes the thread."""
        with contextlib.suppress(BlockingIOError):
            while self.wake_reader.recv(4096):
                pass


def _bytes_of(delivery: Delivery) -> int:
    return len(delivery.payload) + _DELIVERY_BYTES

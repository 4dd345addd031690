"""systemd's notification socket: READY once, WATCHDOG from the work loop; nothing where there is no systemd.

The work loop feeds the dog, not the network thread: a loop that hangs is what the dog is for.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping


class Supervisor:
    """:param address: the datagram socket; :param interval_s: feed at least this often. None: not wanted."""

    def __init__(
        self, address: str | None, interval_s: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = "\0" + address[1:] if address and address.startswith("@") else address
        self._interval_s = interval_s
        self._clock = clock
        self._fed_at = -float("inf")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Supervisor:
        """By NOTIFY_SOCKET and WATCHDOG_USEC, as systemd sets them; the dog is fed at a third of its time."""
        usec = environment.get("WATCHDOG_USEC", "")
        return cls(environment.get("NOTIFY_SOCKET") or None, int(usec) / 3e6 if usec.isdecimal() else None)

    def ready(self) -> None:
        self._send(b"READY=1")

    def stopping(self) -> None:
        self._send(b"STOPPING=1")

    def alive(self) -> None:
        """Cheap enough for every turn of the loop and every batch."""
        now = self._clock()
        if self._interval_s is not None and now - self._fed_at >= self._interval_s:
            self._fed_at = now
            self._send(b"WATCHDOG=1")

    def _send(self, message: bytes) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
                notify.sendto(message, self._address)
        except OSError:  # systemd went away or forbids it; training is no worse for that
            self._address = None

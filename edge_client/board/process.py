"""Handles the client's process on a board: systemd's watchdog, and memory that is returned to the system."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_MADV_PAGEOUT = 21
_LARGE_BYTES = 1 << 20  # model vectors are larger; the blocks of a training step are smaller, and in the heap
_KEPT_BYTES = 8 << 20  # free at the heap's end: with less, each step would need new pages


def return_freed_memory() -> None:
    """Returns freed vectors to the system from now on; does nothing if the C library is not glibc.

    After the first large array is freed, glibc's malloc takes all later ones from its heap, and free memory there
    stays with the process: 30 MiB after a round of the Fashion-MNIST network, on boards that have 512 MB.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def return_small_blocks() -> None:
    """Returns free pages inside the heap to the system now, in about a millisecond; call it after work done once.

    Loading a graph and computing features leave megabytes of free blocks that no later step uses.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(0)


def return_idle_code() -> None:
    """Returns the pages of all libraries to the system now; the system reads those again that are still needed.

    Most of them are needed only while a library is imported. Needs Linux 5.4; else nothing happens.
    """
    with suppress(OSError, AttributeError):
        madvise, maps = ctypes.CDLL(None).madvise, Path("/proc/self/maps").read_text().splitlines()
        for place, rights, _, _, inode, *_ in map(str.split, maps):
            if inode != "0" and "w" not in rights:
                begin, end = (int(each, 16) for each in place.split("-"))
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_PAGEOUT)


class Supervisor:
    """systemd's notification socket: READY once, then WATCHDOG from the work loop; nothing without systemd.

    The work loop sends it, not the network thread, because the watchdog must detect a work loop that hangs.

    :param address: the datagram socket; None if nothing is to be sent.
    :param interval_s: time between two WATCHDOG messages; None: never.
    """

    def __init__(
        self, address: str | None, interval_s: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = "\0" + address[1:] if address and address.startswith("@") else address
        self._interval_s = interval_s
        self._clock = clock
        self._sent_at = -float("inf")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Supervisor:
        """Reads NOTIFY_SOCKET and WATCHDOG_USEC as systemd sets them; WATCHDOG is sent at a third of its time."""
        usec = environment.get("WATCHDOG_USEC", "")
        return cls(environment.get("NOTIFY_SOCKET") or None, int(usec) / 3e6 if usec.isdecimal() else None)

    def ready(self) -> None:
        self._send(b"READY=1")

    def stopping(self) -> None:
        self._send(b"STOPPING=1")

    def alive(self) -> None:
        """Sends WATCHDOG when it is due; cheap enough for every turn of the loop and every batch."""
        now = self._clock()
        if self._interval_s is not None and now - self._sent_at >= self._interval_s:
            self._sent_at = now
            self._send(b"WATCHDOG=1")

    def _send(self, message: bytes) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
                notify.sendto(message, self._address)
        except OSError:  # the next one may arrive; systemd kills a process that stays silent
            pass

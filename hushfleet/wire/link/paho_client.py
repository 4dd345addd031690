"""Imports paho without `urllib.request`, `http` and `email`, which take 2 MiB of a board.

paho uses them only to look for a proxy, and only if PySocks is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

_PROXIES = "urllib.request"
_left_out = _PROXIES not in sys.modules and importlib.util.find_spec("socks") is None
if _left_out:
    sys.modules[_PROXIES] = ModuleType(_PROXIES)
try:
    import paho.mqtt.client as paho
    from paho.mqtt.enums import CallbackAPIVersion, LogLevel
finally:
    if _left_out:
        del sys.modules[_PROXIES]

__all__ = ["CallbackAPIVersion", "Client", "LogLevel", "paho"]

READ_BYTES = 1 << 16


class Client(paho.Client):
    """A paho client that reads what has come at once, and formats no text about a packet unless it is an error.

    paho reads the head of a packet byte by byte, and describes each packet to a log.
    """

    def _create_socket(self) -> Any:
        return _BufferedSocket(super()._create_socket())

    def _easy_log(self, level: LogLevel, fmt: str, *args: Any) -> None:
        if level == LogLevel.MQTT_LOG_ERR:
            super()._easy_log(level, fmt, *args)


class _BufferedSocket:
    """A socket whose `recv` takes from a buffer; `pending` says how many bytes no selector reports."""

    def __init__(self, sock: Any) -> None:
        self._sock, self._buffer, self._at = sock, b"", 0

    def recv(self, size: int) -> bytes:
        if self._at == len(self._buffer):
            if size >= READ_BYTES:
                return bytes(self._sock.recv(size))
            self._buffer, self._at = self._sock.recv(READ_BYTES), 0
        start, self._at = self._at, min(self._at + size, len(self._buffer))
        return self._buffer[start : self._at]

    def pending(self) -> int:
        decrypted = self._sock.pending() if hasattr(self._sock, "pending") else 0
        return len(self._buffer) - self._at + int(decrypted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

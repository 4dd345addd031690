"""Imports paho without `urllib.request`, `http` and `email`, which take 2 MiB of a board.

paho uses them only to look for a proxy, and only if PySocks is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

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

__all__ = ["CallbackAPIVersion", "LogLevel", "paho"]

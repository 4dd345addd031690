"""The fixtures of a device."""

from __future__ import annotations

from device_bench import config, make_bench, package

__all__ = ["config", "make_bench", "package"]

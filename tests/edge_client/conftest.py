"""The fixtures of a device."""

from __future__ import annotations

from support.device import config, make_bench, package

__all__ = ["config", "make_bench", "package"]

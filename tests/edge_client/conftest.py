"""The fixtures of a device."""

from __future__ import annotations

from support.device import config, linear, make_bench, package

__all__ = ["config", "linear", "make_bench", "package"]

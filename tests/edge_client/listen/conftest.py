"""A board that hears."""

from __future__ import annotations

from support.sound_board import device_toml, hearing, hears

__all__ = ["device_toml", "hearing", "hears"]

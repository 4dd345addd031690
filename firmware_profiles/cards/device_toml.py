"""Checks a card's DEVICE.toml, and the parts of it that fleet.toml has, by the board's own rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hushfleet.config.written import faults
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.schema import bare, hints, missing, parse_toml, require

_OF_FLEET = ("device", "broker", "data", "limits", "fleet")
"""The sections that fleet.toml may set. `simulation` would make the noise of every board predictable."""


def check_sections(sections: Mapping[str, Any], where: str) -> None:
    """Checks defaults for cards; keys that they lack may come from elsewhere. Raises `ValueError`.

    :param where: what comes before the names of sections in errors.
    """
    for section, values in sections.items():
        name = f"{where}.{section}"
        require(section in _OF_FLEET, name, values, f"left out; here may be the sections {', '.join(_OF_FLEET)}")
        require(isinstance(values, dict), name, values, "a section")
        kind = bare(hints(DeviceConfig)[section])
        lacking = [missing(key, name) for key in hints(kind)]
        if found := [fault for fault in faults(kind, values, name) if fault not in lacking]:
            raise ValueError("; ".join(found))


def faults_of(text: str) -> list[str]:
    """Finds everything for which a board would refuse this DEVICE.toml, each with the name of its key."""
    return faults(DeviceConfig, parse_toml(text))

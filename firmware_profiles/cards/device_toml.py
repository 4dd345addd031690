"""Checks a card's DEVICE.toml, the parts of it that fleet.toml has, and tasks for such cards, by the board's rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hushfleet.edge_client.board.config import DeviceConfig, LimitsSection
from hushfleet.edge_client.board.consent import check_stored, check_trust
from hushfleet.edge_client.storage.declines import Declined
from hushfleet.faults import faults
from hushfleet.field_types import hints
from hushfleet.privacy.charge import Charge
from hushfleet.refusals import bare, missing
from hushfleet.schema import from_plain, parse_toml, require
from hushfleet.wire.format.spec import SecureSpec

_OF_FLEET = ("device", "broker", "data", "limits", "fleet")
"""The sections that fleet.toml may set. `simulation` would make the noise of every board predictable."""


def check_sections(sections: Mapping[str, Any], where: str) -> None:
    """Checks defaults for cards; keys that they lack may come from elsewhere. Raises `ValueError`.

    :param where: what comes before the names of sections in errors.
    """
    for section, values in sections.items():
        name = f"{where}.{section[:40]}"
        require(section in _OF_FLEET, name, values, f"left out; here may be the sections {', '.join(_OF_FLEET)}")
        require(isinstance(values, dict), name, values, "a section")
        kind = bare(hints(DeviceConfig)[section])
        lacking = [missing(key, name) for key in hints(kind)]
        if found := [fault for fault in faults(kind, values, name) if fault not in lacking]:
            raise ValueError("; ".join(found))


def faults_of(text: str) -> Sequence[str]:
    """Finds everything for which a board would refuse this DEVICE.toml, each with the name of its key."""
    return faults(DeviceConfig, parse_toml(text))


def decline_of(limits: Mapping[str, Any], charge: Charge, method: str, secure: SecureSpec | None) -> str | None:
    """Returns the reason why a board with these `[limits]` declines each round of a task; None if it declines none.

    What the board has spent is not checked.

    :param charge: the charge of a round.
    """
    section = from_plain(LimitsSection, {"epsilon_server": math.inf, **limits})
    try:
        if secure is not None:
            check_trust(secure, section)
        check_stored(charge, method, section)
    except Declined as declined:
        return str(declined)
    return None

"""One-time tokens: what a card carries so that its board can come in by itself.

The registry keeps the SHA-256 alone. A token is 32 random bytes, so nobody finds it from that.
"""

from __future__ import annotations

import secrets

from hushfleet.aggregator.fleet.registry import FleetRegistry

DAY_S = 86400.0


def issue_token(registry: FleetRegistry, device: str, *, days: float, now: float) -> str:
    """A new token for the card of `device`, as its file holds it; the earlier ones hold no longer.

    :param now: unix seconds.
    """
    token = new_token()
    registry.add_token(device, token.encode(), expires=now + days * DAY_S)
    return token


def new_token() -> str:
    """It serves when the registry knows it (`FleetRegistry.add_token`)."""
    return secrets.token_urlsafe(32)

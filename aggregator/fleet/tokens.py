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
    token = secrets.token_urlsafe(32)
    registry.add_token(device, token.encode(), expires=now + days * DAY_S)
    return token

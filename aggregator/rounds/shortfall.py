"""Says what a round waits for while too few boards can take part, and what an operator can do."""

from __future__ import annotations

from hushfleet.aggregator.config.calendar import moment_text
from hushfleet.aggregator.results.fleet_state import Shortfall


def shortfall_text(waiting: Shortfall, *, now: float) -> str:
    """Says what a round waits for: `round 3 waits: 11 of the 20 boards that it needs can take part; 14 have spent ...`.

    :param now: unix seconds.
    """
    ends = "" if waiting.frees is None else moment_text(waiting.frees, now=now, zone=waiting.timezone)
    counts = (
        (waiting.spent, f"have spent their period, which ends {ends}"),
        (waiting.spent_for_good, "have spent all that their cards allow"),
        (waiting.declined, "have declined the last round"),
        (waiting.unlisted, "are not in the membership list"),
        (waiting.absent, "are not there"),
    )
    why = "".join(f"; {count} {words}" for count, words in counts if count)
    return f"round {waiting.round} waits: {waiting.able} of {waiting.needed} needed boards can take part{why}"


def shortfall_advice(waiting: Shortfall) -> str:
    """Says what an operator can do for a round that waits."""
    if waiting.spent_for_good:
        more = (
            "If owners allow more than their cards say ([limits] in DEVICE.toml), write it into [device.limits] of "
            "fleet.toml, too, and start the aggregator again"
        )
    elif waiting.unlisted:
        more = "Sign the next membership list: hushfleet fleet roster sign DIR"
    else:
        more = "Nothing, if more boards come by themselves or are free again"
    keys = [
        f"round.{key}={max(1, waiting.able)}"
        for key in ("min_devices", "min_updates")
        if getattr(waiting, key) > waiting.able
    ]
    if not waiting.able:
        return f"{more}."
    if waiting.able < waiting.least_updates:
        return f"{more}; fewer than {waiting.least_updates} cannot make a model of this task."
    return f"{more}; to open with those that can: hushfleet fleet set DIR {' '.join(keys)}."

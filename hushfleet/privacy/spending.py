"""Tells people what is spent and what is left: of a period, of a window of samples, and for how many more rounds."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hushfleet.durations import Period, describe_duration
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import LedgerEntry, epsilon_server_of


def rounds_left(charges: Sequence[Charge], following: Charge, *, delta: float, limit: float, at_most: int) -> int:
    """Returns how many more rounds, each with the charge `following`, stay within `limit`; at most `at_most`."""
    return rounds_that_fit(charges, [following] * at_most, delta=delta, limit=limit)


def rounds_that_fit(charges: Sequence[Charge], following: Sequence[Charge], *, delta: float, limit: float) -> int:
    """Returns how many of the following rounds, in their order, stay within `limit` after `charges`."""

    def exceeds(rounds: int) -> bool:
        more = [replace(each, steps=each.steps * count) for each, count in Counter(following[:rounds]).items()]
        return epsilon_server_of([*charges, *more], delta=delta) > limit

    return bisect_left(range(1, len(following) + 1), True, key=exceeds)


def describe_period(spent: float, budget: Budget, *, left_s: float, sure: bool = True) -> str:
    """Describes the current period: `1.2 of 2 in these 90 days, which end in 31 days`.

    :param spent: epsilon in it.
    :param left_s: seconds until it ends.
    :param sure: as in `Budget.charged_in_period`; if false, the period is the last 90 days.
    """
    if not sure:
        return f"{spent:.3g} of {budget.in_period:.3g} in the last {describe_duration(budget.period_s)}"
    length, left = describe_duration(budget.period_s), describe_duration(max(1.0, left_s))
    ending = f"in this {length[2:]}, which ends in" if length.startswith("1 ") else f"in these {length}, which end in"
    return f"{spent:.3g} of {budget.in_period:.3g} {ending} {left}"


def describe_since(at: int) -> str:
    """Describes since when something is counted, by the local clock: ` since May 2026`; empty if it is not known."""
    return time.strftime(" since %B %Y", time.localtime(at)) if at else ""


def windows_of(entries: Sequence[LedgerEntry]) -> list[Period]:
    """Returns the sample windows that were used for training, in order of time."""
    return sorted({entry.window for entry in entries if entry.window is not None})


def charges_on(window: Period, entries: Sequence[LedgerEntry]) -> list[Charge]:
    """Returns the charges that count for a person who appears only in this sample window.

    An entry without a window may have trained on any sample, so it counts in each window.
    """
    return [entry.charge for entry in entries if entry.window is None or entry.window.meets(window)]

"""Describes the fleet over time in sentences: which devices were slow, late or away, and which round was the worst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from hushfleet.aggregator.results.fleet_timeline import Activity, FleetTimeline
from hushfleet.aggregator.results.report.readable import number

_SMALL_FLEET = 20
OUTCOME_STATES: dict[str, tuple[Activity, str]] = {
    "a": ("accepted", "accepted"),
    "l": ("late", "late"),
    "d": ("declined", "declined"),
    "r": ("refused", "refused"),
    "x": ("lost", "lost"),
    ".": ("ready", "not asked"),
    "-": ("absent", "away"),
}
"""Letter of an outcome: the state whose colour it has, and its name in a legend."""


def describe_timeline(timeline: FleetTimeline) -> str:
    """Describes in one or two sentences which devices were slow, late or away."""
    counts = Counter("".join(timeline.outcomes))
    asked = sum(counts[letter] for letter in "aldrx")
    troubles = [
        f"{counts[letter]:,} {one if counts[letter] == 1 else many}"
        for letter, one, many in (
            ("l", "came too late", "came too late"),
            ("d", "was declined", "were declined"),
            ("r", "was refused", "were refused"),
            ("x", "was lost with its device", "were lost with their devices"),
        )
        if counts[letter]
    ]
    if troubles:
        listed = " and ".join([", ".join(troubles[:-1]), troubles[-1]] if troubles[1:] else troubles)
        told = f"Of {asked:,} updates that were asked for, {listed}"
    else:
        told = f"All {asked:,} updates that were asked for came in time"
    away = sum(is_long_away(letters) for letters in timeline.outcomes)
    if away:
        told += f"; {away:,} {'device was' if away == 1 else 'devices were'} away for more than a round"
    return f"{_pace(timeline)}{told}."


def _pace(timeline: FleetTimeline) -> str:
    rounds = sorted(
        (row.slowest_tenth_s / row.median_s, row.slowest_tenth_s, row.median_s)
        for row in timeline.rounds
        if row.median_s and row.slowest_tenth_s
    )
    if not rounds or len(timeline.devices) < 2:
        return ""
    ratio, slow, middle = rounds[(len(rounds) - 1) // 2]
    who = "slowest device" if len(timeline.devices) < _SMALL_FLEET else "slowest tenth of the devices"
    return (
        f"In the median round the {who} needed {number(ratio)} times as long as the median device "
        f"({number(slow)} s against {number(middle)} s). "
    )


def is_long_away(letters: str) -> bool:
    """Returns whether a device that had been present was then away in two consecutive rounds."""
    return any(one in "x-" and other == "-" for one, other in pairwise(letters.lstrip("-")))


def worst_round(timeline: FleetTimeline) -> int:
    """Returns the index of the worst round: the one with the most asked devices that failed, then the longest."""

    def badness(place: int) -> tuple[int, float]:
        row = timeline.rounds[place]
        return sum(letters[place] in "ldrx" for letters in timeline.outcomes), row.closed_s - row.opened_s

    return max(range(len(timeline.rounds)), key=badness)


def describe_worst(timeline: FleetTimeline, reasons: Mapping[str, str]) -> str:
    """Names the worst round and the reason; empty if no round differs from the others.

    :param reasons: why devices declined, by code.
    """
    place = worst_round(timeline)
    row, letters = timeline.rounds[place], Counter(outcome[place] for outcome in timeline.outcomes)
    asked = sum(letters[letter] for letter in "aldrx")
    why = [f"{letters[letter]:,} {OUTCOME_STATES[letter][1]}" for letter in "ldrx" if letters[letter]]
    if why:
        codes = f" (reasons in this run: {', '.join(sorted(reasons))})" if letters["d"] and reasons else ""
        return f"Round {row.round} went worst: of {asked:,} that were asked, {', '.join(why)}{codes}."
    if not timeline.timed or len(timeline.rounds) < 2:
        return ""
    return f"Round {row.round} took longest, {number(row.closed_s - row.opened_s)} s; nobody was missing."

"""Compares finished cells with a printed number, and gives the verdict by one rule for all tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

NEAR = 2.0
"""Largest distance in points between our number and the printed one, if two standard errors over seeds are not more."""
LEAD = 1.0, 1 / 3
"""Largest distance between our lead and the printed one: points, or a share of the printed lead if that is more."""
ELSEWHERE = {"own": 1.3, "global": 7.8}
"""Points by which another processor's rounding changes personalized models, and a global model, of the same cell
(measured)."""
FAR = 10.0
"""Distance in points from the printed number above which an order means nothing."""


class PlaceVerdict(NamedTuple):
    """:param because: why it is not "reproduced"; empty if it is, or if only the order counts and is not wrong."""

    word: Literal["reproduced", "order only", "not", "not testable"]
    because: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.because}" if self.because else self.word


def verdict(place: Any, column: Sequence[Any], *, only_order: bool, other_data: bool = False) -> PlaceVerdict | None:
    """Judges one line of `Block.places`. Returns None if it is open.

    :param column: all lines of its column, with `paper` and `ours` in percent, NaN if there is none. Lines with the
        same printed number have no lead over each other.
        `chance` is the accuracy of guessing, in percent; `private` says whether it has noise.
    :param only_order: numbers cannot be compared; without another method in the column, the line is then open.
    :param other_data: the data are not the paper's, so the distance to the printed number says nothing.
    """
    if math.isnan(place.paper) or math.isnan(place.ours):
        return None
    others = [
        other
        for other in column
        if other.row != place.row
        and not math.isnan(other.paper)
        and set(other.seeds) & set(place.seeds)
        and not set(other.runs) & set(place.runs)  # a run has no lead over itself
    ]
    if only_order and not others:
        return None
    rivals = [other for other in others if other.private]
    if place.private and rivals and all(_at_chance(each) for each in (place, *rivals)):
        return PlaceVerdict("not testable", "all private methods are at chance")
    error = place.spread / math.sqrt(len(place.seeds)) if len(place.seeds) > 1 else 0.0
    off = place.ours - place.paper
    leads = [(other.method, place.paper - other.paper, _lead(place, other)) for other in others]
    misled = [lead for lead in leads if lead[1] > 0 and abs(lead[2] - lead[1]) > max(LEAD[0], LEAD[1] * lead[1])]
    near = abs(off) <= max(NEAR, 2 * error)
    if near and not misled and not only_order:
        return PlaceVerdict("reproduced")
    apart = [lead for lead in leads if lead[1] != 0]
    wrong = [f"{'below' if paper > 0 else 'above'} {method}" for method, paper, ours in apart if paper * ours <= 0]
    if wrong:
        return PlaceVerdict("not", wrong[0])
    if _at_chance(place):
        return PlaceVerdict("not", "chance")
    if abs(off) > FAR and not other_data:
        return PlaceVerdict("not", f"{off:+.1f}")
    word: Literal["order only", "not"] = "order only" if apart else "not"
    if only_order:
        return PlaceVerdict(word)
    if not near:
        return PlaceVerdict(word, f"{off:+.1f}")
    method, paper, ours = max(misled, key=lambda lead: abs(lead[2] - lead[1]))
    return PlaceVerdict(word, f"{ours:.1f} above {method}, printed {paper:.1f}")


def _at_chance(place: Any) -> bool:
    return bool(place.ours <= place.chance + NEAR)


def _lead(place: Any, other: Any) -> float:
    """Returns the lead over the seeds that both have: a seed determines each device's images and the first model."""
    ours, theirs = (dict(zip(each.seeds, each.values, strict=True)) for each in (place, other))
    return float(fmean(ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()))

"""Gives a predicted gain its interval, by errors that were measured for this way to predict."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

import numpy as np

from hushfleet.aggregator.planning.gain_table import Estimate

Way = Literal["other data", "same data", "simulated"]
"""The table, for images of a kind that is not in it; the table, for a data set that is; `plan --data`."""
Answer = Literal["yes", "no", "perhaps"]
WORTH = 0.01
"""The smallest gain that is worth an epsilon: one percentage point."""


class Interval(NamedTuple):
    """A gain over training alone, from `low` to `high`; shares of 1."""

    low: float
    high: float

    @property
    def answer(self) -> Answer:
        """Whether each gain in this interval is worth it, none, or some. Gains all above 0 are never a no."""
        if self.low >= WORTH:
            return "yes"
        return "no" if self.high < WORTH and self.low <= 0 else "perhaps"

    def __str__(self) -> str:
        return f"{100 * self.low:+.1f} to {100 * self.high:+.1f} points"


class Intervals(NamedTuple):
    """The intervals of a fleet's two gains.

    :param own: of the devices' personalized heads, on their own mixes of labels.
    :param common: of the shared head, on a test set that is common to all devices.
    """

    own: Interval
    common: Interval


class GainErrors:
    """The measured errors.

    :param plain: as the script writes them.
    """

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self.made_by, self.share = plain["made_by"], plain["share"]
        self.ways: Mapping[Way, Mapping[str, Any]] = plain["ways"]

    def held(self, way: Way) -> tuple[int, int]:
        """Returns how many gains of personalized heads were in such intervals, and of how many, all of them left out
        before."""
        (held, gains), (more_held, more) = (self.ways[way][part]["own"] for part in ("fleets", "product"))
        return held + more_held, gains + more

    def intervals(self, way: Way, estimate: Estimate) -> Intervals:
        """Returns intervals that contain the gains in a `share` of fleets."""
        found, measured = estimate.accuracies, self.ways[way]
        of = {each["of"]: each for each in measured["errors"]}
        errors = of.get(kind_of(estimate.alpha, colour=estimate.colour)) or of.get(kind_of(estimate.alpha)) or of["any"]
        return Intervals(
            *(
                _around(gain, scale_of(measured["scale"][head], gain, found.spread), errors, head, estimate.signal)
                for head, gain in (("own", found.gain), ("common", found.gain_common))
            )
        )


def kind_of(alpha: float | None, *, colour: bool = False) -> str:
    """Returns the name of the errors of such fleets. With unequal labels only grey images of other kinds were tried."""
    return f"alpha {alpha:g}" if alpha is not None else "colour" if colour else "alike"


def scale_of(scale: Mapping[str, float], gain: float, spread: float) -> float:
    """Returns the unit of an error: `floor`, and factors of the size of the gain and of its spread over seeds."""
    return scale["floor"] + scale["gain"] * abs(gain) + scale["spread"] * spread


def _around(gain: float, scale: float, errors: Mapping[str, Any], head: str, signal: float) -> Interval:
    where = np.log(errors["signals"])
    below, above = (float(np.interp(math.log(signal), where, errors[head][side])) for side in ("below", "above"))
    return Interval(max(-1.0, gain - scale * below), min(1.0, gain + scale * above))


@cache
def gain_errors() -> GainErrors:
    """Returns the errors that come with the package."""
    text = resources.files("hushfleet.aggregator.planning").joinpath("gain_errors.json").read_text(encoding="utf-8")
    return GainErrors(json.loads(text))

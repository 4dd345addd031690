"""`benchmarks/gain_errors.py`: the intervals that ship are those of the errors, and contain what they claim."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from benchmarks.gain_errors import (
    SHARE,
    Error,
    MeasuredFleet,
    drawn_fleets,
    of_way,
    sides,
    stretches,
    summary,
)
from benchmarks.gain_sets import GREY, IN_TABLE, OTHERS, SETS, TINY, greyed, over_photographs, shrunk
from hushfleet.aggregator.planning.advice import Advice
from hushfleet.aggregator.planning.gain_errors import gain_errors
from support.documents import ROOT

LINES = [json.loads(line) for line in (ROOT / "docs" / "figures" / "gain_errors.jsonl").read_text("utf-8").splitlines()]


def test_what_ships_is_what_was_measured() -> None:
    found, shipped = summary(LINES), gain_errors()
    assert json.loads(json.dumps(found["ways"])) == shipped.ways
    assert found["share"] == shipped.share == 0.9
    assert {MeasuredFleet(**line["fleet"]) for line in LINES} >= set(drawn_fleets())


def test_every_kind_of_interval_contains_nine_of_ten_gains_that_were_left_out() -> None:
    ways = gain_errors().ways
    assert set(ways["other data"]["data"]) <= set(OTHERS)
    assert set(ways["same data"]["data"]) <= set(IN_TABLE)
    for way in ways:
        held, gains = gain_errors().held(way)
        assert held >= SHARE * gains > 0


def test_fleets_of_the_product_are_in_the_intervals_that_plan_prints() -> None:
    """By `Advice`, as a user sees it; `summary` counts by its own arithmetic."""
    counted: dict[str, list[bool]] = {"other data": [], "same data": []}
    for line in LINES:
        fleet = MeasuredFleet(**line["fleet"])
        for epsilon, measured in line["measured"].items() if fleet.part == "product" else ():
            advice = replace(Advice.on(fleet.question(float(epsilon))), data=fleet.data)
            if not advice.estimate.outside:
                low, high = advice.intervals.own
                counted[advice.way].append(low <= measured["own"] <= high)
    for way, held in counted.items():
        assert len(held) == gain_errors().ways[way]["product"]["own"][1]
        assert sum(held) >= 0.8 * len(held)


def errors(count: int, *, seed: int) -> list[Error]:
    """Errors of five data sets, from a normal distribution."""
    rng, alphas = np.random.default_rng(seed), cycle(("alike", "alpha 0.5"))
    found = []
    for place in range(count):
        name = f"set {place % 5}"
        values = float(rng.uniform(4, 400)), *rng.normal(0, 1, 2)
        found.append(Error("other data", ("fleets", "product")[place % 2], name, name, next(alphas), *values))
    return found


def test_quantiles_are_those_of_the_errors_near_a_signal() -> None:
    found = sides(errors(4000, seed=0), "other data", "own")
    assert list(found) == ["alike", "alpha 0.5"]
    assert all(each[side] == pytest.approx([1.645] * 8, abs=0.5) for each in found.values() for side in each)
    small = [replace(each, own=each.own / 10) if each.signal < 8 else each for each in errors(4000, seed=0)]
    assert sides(small, "other data", "own")["alike"]["below"][0] < 0.5


def test_intervals_are_stretched_until_they_hold_for_data_sets_that_were_left_out() -> None:
    apart = [replace(each, own=each.own + int(each.data[-1]) - 2) for each in errors(1000, seed=1)]
    plain = sides(errors(1000, seed=1), "other data", "own")["alike"]["above"][5]
    for tried, low, high in ((errors(1000, seed=1), 0.95, 1.1), (apart, 1.8, 5.0)):
        found = of_way(tried, "other data")
        held, gains = map(sum, zip(found["fleets"]["own"], found["product"]["own"], strict=True))
        assert (gains, found["product"]["own"][1]) == (1000, 500)
        assert held == pytest.approx(SHARE * 1000, abs=2)
        assert low < found["errors"][0]["own"]["above"][5] / plain < high


def test_a_data_set_is_left_out_when_its_errors_are_judged() -> None:
    odd = [replace(each, own=50.0) if each.data == "set 4" else each for each in errors(400, seed=0)]
    needed = stretches(odd, "other data", "own")
    assert all((needs > 20) == (error.data == "set 4") for error, needs in needed)


def test_changed_images_have_the_shapes_of_their_features() -> None:
    rng = np.random.default_rng(0)
    grey, colour = (rng.integers(0, 256, (4, *shape)).astype(np.uint8) for shape in (GREY, (3, 32, 32)))
    assert shrunk(grey).shape[1:] == TINY
    assert shrunk(np.full_like(grey, 7)).max() == 7
    assert greyed(colour).shape[1:] == GREY
    assert greyed(np.full_like(colour, 200)).min() == 200
    over = over_photographs(np.zeros_like(grey), colour)
    assert all(any(np.array_equal(each, photograph) for photograph in colour) for each in over)
    (behind_white,) = over_photographs(np.full_like(grey[:1], 255), colour[:1])
    assert np.array_equal(behind_white[:, 2:30, 2:30], 255 - colour[0, :, 2:30, 2:30])
    assert {wanted.features for wanted in SETS.values()} == {"scattering", "filters"}

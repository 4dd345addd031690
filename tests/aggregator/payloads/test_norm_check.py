"""The limits that updates are held to: kept by what they are computed for, and no wider than they must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.payloads.norm_check import FALSE_REFUSAL, exponent, square_limits, value_limit
from hushfleet.learning.optim import Adam, adam_reach
from hushfleet.methods import METHODS
from hushfleet.wire.format.codecs import codecs
from support.fleet import LAYOUT
from support.methods import WITH_RECORDS

MakeFleet = Callable[..., Any]
SENDING = sorted({*METHODS} - {"fedbn"})  # the network here has no normalisation layers; what is sent is as fedper's
UNNOISED = ("fedavg", "fedper", "fedrep", "lg-fedavg")


@pytest.mark.parametrize(
    ("method", "codec"),
    [
        (method, codec.name)
        for method in SENDING
        for codec in codecs()
        if not codec.needs_noise or method not in UNNOISED
    ],
)
def test_no_honest_update_of_any_method_is_refused(make_fleet: MakeFleet, method: str, codec: str) -> None:
    """Three rounds of ten devices each; the changes' norm is three times the clip norm, so each is at its bound."""
    multiplier = 0.0 if method in UNNOISED else 1.5
    for accounting in ("as-published", "strict"):
        if codec == "one-bit" and (method, accounting) == ("fedaddp", "as-published"):
            continue  # its noise follows the device's personalized model and is not declared
        fleet = make_fleet(
            method=method, multiplier=multiplier, accounting=accounting, devices=10, wire={"codec": codec}
        )
        for _ in range(3):
            fleet.run_round()


@pytest.mark.parametrize("method", sorted({*SENDING} & {*WITH_RECORDS}))
def test_no_honest_update_with_noise_in_its_gradients_is_refused(make_fleet: MakeFleet, method: str) -> None:
    unit = {"unit": "record", "sample_rate": 0.1, "delta": 1e-5}
    fleet = make_fleet(method=method, unit=unit, accounting="strict", devices=4)
    for _ in range(2):
        fleet.run_round()


@pytest.mark.parametrize(("k", "ratio", "signal"), [(1, 0.0, 0.5), (52, 1.0, 0.0), (400, 2.0, 3.0), (400, 0.5, 30.0)])
def test_the_limits_are_kept_as_often_as_they_say(k: int, ratio: float, signal: float) -> None:
    """At x = 3 each event fails with at most exp(-3) = 5 %; here three of them on either side together."""
    rng, turns, x = np.random.default_rng(7), 4000, 3.0
    direction = rng.normal(size=k)
    u = signal * direction / np.linalg.norm(direction)
    values = u + rng.normal(size=(turns, k)) + ratio * rng.uniform(-0.5, 0.5, size=(turns, k))
    squares = np.square(values).sum(axis=1)
    limits = square_limits((k,), (ratio,), signal, x=x)
    assert np.mean(squares > limits.most) < 3 * math.exp(-x)
    quiet = np.square(values - u).sum(axis=1)  # no signal at all is as honest as one at the bound
    assert np.mean(np.minimum(squares, quiet) < limits.least) < 3 * math.exp(-x)
    assert np.mean(np.abs(values).max(axis=1) > value_limit(k, ratio, signal, x=x)) < math.exp(-x)


def test_what_is_allowed_beyond_the_expected_norm_is_a_few_deviations() -> None:
    """Of 1.2 million values the norm is held to 0.5 %; before, to 8 deviations on one side and a half on the other."""
    x = exponent(8)
    assert math.exp(-x) * 7 * 9 == pytest.approx(FALSE_REFUSAL)
    limits = square_limits((1_199_882,), (1.0,), 0.5, x=x)
    expected = math.sqrt(1_199_882 * (1 + 1 / 12))
    assert 0.994 < math.sqrt(limits.least) / expected < 1 < math.sqrt(limits.most) / expected < 1.006


def test_nothing_overflows_where_a_device_names_almost_no_noise() -> None:
    limits = square_limits((10,), (0.0,), 1e300, x=24.0)
    assert (limits.least, limits.most) == (0.0, math.inf)


@pytest.mark.parametrize("steps", [1, 2, 10, 300])
def test_adam_moves_no_value_farther_than_its_reach(steps: int) -> None:
    """The gradients that move a parameter farthest are those that grow as the bound's equality asks for."""
    rng = np.random.default_rng(3)
    growth = np.concatenate([np.ones(200), np.full(200, 0.9 / 0.999), np.full(200, 1.1), rng.uniform(0.5, 2, 200)])
    adam, params, gradient = Adam(0.1), np.zeros(800, np.float64), np.ones(800)
    for _ in range(steps):
        adam.step(params, gradient)
        gradient = gradient * growth
    reach = adam_reach(0.1, steps)
    assert np.abs(params).max() <= reach * (1 + 1e-9)
    assert reach <= 0.1 * 7.3 * steps
    if steps == 1:
        assert reach == pytest.approx(0.1)


def test_values_beyond_what_training_can_reach_are_refused(make_fleet: MakeFleet) -> None:
    """With the unit `record` there was no limit but 2^20: 20 steps of Adam at 0.001 do not move a value by 1."""
    fleet = make_fleet(method="dp-fedavg", unit={"unit": "record", "sample_rate": 0.05, "delta": 1e-5})
    fleet.open()
    update = fleet.update("dev-0", advance=False)
    values = update.values.copy()
    values[LAYOUT.size - 1] = 1.0
    steps = tuple(float(np.sqrt(np.square(values).mean())) for _ in update.header.steps)
    forged = fleet.devices.sign("dev-0", update.header, values, update.counts, steps=steps)
    verdict = fleet.engine.accept("dev-0", forged.data)
    assert verdict.code == "out-of-bounds"
    assert "training can reach" in verdict.reason

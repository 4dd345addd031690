"""APDP-FL: the score by hand, the schedule, preferences, and what the ledger is told."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hushfleet.config.spec import PrivacySpec
from hushfleet.errors import Malformed
from hushfleet.methods import make_method
from hushfleet.methods.apdp_fl import score_of
from hushfleet.methods.method import TaskMethod
from hushfleet.methods.server import ClosedRound
from hushfleet.methods.state import RoundTerms
from hushfleet.model.params import ParamLayout
from hushfleet.privacy.noise import SeededNoise
from support.methods import context_of, penalty, released

LAYOUT = ParamLayout(("a.weight",), ((4,),))
RECORD = PrivacySpec("record", "as-published", 1.0, 5.0, 1e-5, sample_rate=0.5, batches=10)


def apdp(privacy: PrivacySpec = RECORD, *, rounds: int = 10, **config: Any) -> TaskMethod:
    return make_method("apdp-fl", {"batch_size": 20, **config}, privacy, LAYOUT, rounds=rounds)


def outcome(round: int, *, step: float = 1.0, accuracy: float | None = None, loss: float | None = None) -> ClosedRound:
    before = np.zeros(4, np.float32)
    return ClosedRound(round, before, before + np.float32(step) / 2, [], accuracy, loss)  # its length is `step`


@pytest.mark.parametrize(
    ("step", "loss_rose", "accuracy_fell", "progress", "score"),
    [
        (1.0, False, False, 0.0, 0.0),
        (0.5, False, False, 0.0, 0.0),
        (0.375, False, False, 0.0, 17.5),  # 2 (1 - 0.75) = 0.5 of 35
        (0.25, False, False, 0.0, 35.0),
        (0.0, False, False, 0.0, 35.0),
        (1.0, True, False, 0.0, 20.0),
        (1.0, False, True, 0.0, 25.0),
        (1.0, False, False, 0.25, 10.0),
        (1.0, False, False, 0.9, 20.0),
        (0.0, True, True, 1.0, 100.0),
    ],
)
def test_the_score_by_hand(step: float, loss_rose: bool, accuracy_fell: bool, progress: float, score: float) -> None:
    assert score_of(step, loss_rose=loss_rose, accuracy_fell=accuracy_fell, progress=progress) == score


def test_noise_falls_in_rounds_that_score_above_fifty() -> None:
    """Ten rounds without a validation set: a step of a quarter of the longest one is worth 35, rounds 20 t / 5."""
    method = apdp(decay=0.5)
    server, sigmas = method.server.initial(0), []
    for round, step in enumerate([8.0, 2.0, 2.0, 2.0, 8.0, 2.0], start=1):
        sigmas.append(method.server.controls(server, round)["noise_multiplier"])
        server = method.server.advance(server, outcome(round, step=step))
    # scores 4, 43, 47, 51, 20, 55: the noise of rounds 5 and 7 is half of that before
    assert sigmas == [5.0, 5.0, 5.0, 5.0, 2.5, 2.5]
    assert method.server.controls(server, 7) == {"noise_multiplier": 1.25}


def test_loss_and_accuracy_count_against_what_came_before() -> None:
    """20 for a loss that rose and 25 for an accuracy below the mean of the last five, which the sixth round has."""
    method = apdp(decay=0.5)
    server = method.server.initial(0)
    for round in range(1, 6):
        server = method.server.advance(server, outcome(round, accuracy=0.5, loss=1.0))
    assert float(server["noise_multiplier"]) == 5.0  # 20 at most so far: no step was shorter
    fell = method.server.advance(server, outcome(6, accuracy=0.4, loss=1.1))
    assert float(fell["noise_multiplier"]) == 2.5  # 20 + 20 + 25
    rose = method.server.advance(server, outcome(6, accuracy=0.6, loss=1.1))
    assert float(rose["noise_multiplier"]) == 5.0  # 20 + 20
    unseen = method.server.advance(server, outcome(6))
    assert float(unseen["noise_multiplier"]) == 5.0
    early = method.server.advance(method.server.initial(0), outcome(5, accuracy=0.1, loss=1.0))
    assert float(early["noise_multiplier"]) == 5.0  # a mean of five needs five


def test_without_decay_or_noise_nothing_changes() -> None:
    for method, sigma in ((apdp(decay=1.0), 5.0), (apdp(replace(RECORD, noise_multiplier=0.0)), 0.0)):
        server = method.server.initial(0)
        for round in range(1, 11):
            server = method.server.advance(server, outcome(round, step=1.0 / round))
        assert method.server.controls(server, 11) == {"noise_multiplier": sigma}


@pytest.mark.parametrize(("accounting", "divisor"), [("as-published", 20), ("strict", 1)])
def test_a_preference_scales_the_noise_of_the_round_and_the_charge_with_it(accounting: str, divisor: int) -> None:
    """As published the whole batch is clipped: of r = 20 samples one can move all, so sigma counts for sigma / r."""
    method = apdp(replace(RECORD, accounting=accounting))
    charge = method.charge(RoundTerms(10, {"noise_multiplier": 4.0}, preference=1.5))
    assert charge.noise_multiplier == pytest.approx(6.0 / divisor)
    assert (charge.unit, charge.sample_rate, charge.steps) == ("record", 0.5, 10)
    assert method.record_mechanism(RoundTerms()).clips == ("record" if accounting == "strict" else "batch")


def test_with_the_unit_device_the_update_is_noised_by_preference() -> None:
    method = apdp(replace(RECORD, unit="device", sample_rate=1.0, batches=1))
    terms = RoundTerms(4, {"noise_multiplier": 2.0}, preference=1.5)
    release = released(method, np.ones(4, np.float32), terms, SeededNoise(0, 0, 0))
    np.testing.assert_allclose(release.noise_stds, 1.5 * 2.0 * 1.0 / math.sqrt(4))
    assert release.charge.noise_multiplier == 1.5


def test_a_proximal_weight_pulls_towards_the_start() -> None:
    method, gradient = apdp(mu=0.5), np.ones(4, np.float32)
    start, params = np.zeros(4, np.float32), np.full(4, 2.0, np.float32)
    assert penalty(method, context_of(method, global_params=start), params, gradient).tolist() == [2.0] * 4


@pytest.mark.parametrize("wrong", [{"decay": 0.0}, {"decay": 1.1}, {"mu": -1.0}])
def test_settings_out_of_range_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(Malformed, match=next(iter(wrong))):
        apdp(**wrong)

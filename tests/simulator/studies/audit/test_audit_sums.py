"""`hushfleet audit` where a server sees sums alone: claims hold, and planted faults are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hushfleet.privacy.discrete_gaussian import DiscreteGaussian
from hushfleet.simulator.studies.audit import game
from hushfleet.simulator.studies.audit.finding import Finding
from hushfleet.simulator.studies.audit.games import Effort, findings
from hushfleet.simulator.studies.audit.subject import Subject
from hushfleet.wire.format.question import QuestionSpec
from hushfleet.wire.format.spec import SecureSpec

pytestmark = pytest.mark.slow


@pytest.fixture
def summed(audited: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Subject]:
    """Four devices, all of them needed in a sum and two of them counted on."""
    monkeypatch.setattr(game, "MEASURED", 16)

    def make(unit: str, noise_multiplier: float) -> Subject:
        privacy = {"unit": unit, "accounting": "secure", "noise_multiplier": noise_multiplier, "noise_split": 1}
        secure = SecureSpec(24, min_devices=4, honest_devices=2, honest_fraction=1.0)
        base = audited(codec="masked", secure=secure, **privacy)
        return replace(base, fleet=4)

    return make


def found(subject: Subject, trials: int) -> Finding:
    return next(findings(subject, Effort(trials)))


@pytest.mark.parametrize("unit", ["device", "record"])
def test_the_claim_of_a_sum_holds(unit: str, summed: Callable[..., Subject]) -> None:
    measured = found(summed(unit, 1.0), 200)
    assert measured.verdict == "holds"
    assert measured.unit == unit
    assert 0 < measured.measured_round_of_form < measured.claimed_round


def a_third_of_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    init = DiscreteGaussian.__init__
    monkeypatch.setattr(DiscreteGaussian, "__init__", lambda self, variance: init(self, variance / 9))


@pytest.mark.parametrize("unit", ["device", "record"])
def test_noise_that_is_missing_is_found(
    unit: str, summed: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_third_of_the_noise(monkeypatch)
    assert found(summed(unit, 0.6), 200).verdict == "VIOLATED"


def test_gradients_that_are_not_clipped_are_found(
    summed: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hushfleet.privacy.clipping.clip", lambda x, clip_norm, drop: x)
    assert found(summed("record", 1.0), 100).verdict == "VIOLATED"


@pytest.mark.parametrize("fault", [lambda monkeypatch: None, a_third_of_the_noise])
def test_noise_that_is_missing_in_the_sum_of_answers_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], summed: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise of a question is its own, and not that of the task."""
    fault(monkeypatch)
    subject = summed("device", 100.0)
    question = QuestionSpec("counts", every=1, noise_multiplier=0.6, bits=32, most=50)
    measured = found(replace(subject, spec=replace(subject.spec, question=question)), 200)
    assert measured.asks
    assert measured.noise_claimed == 0.6
    assert measured.verdict == ("VIOLATED" if fault is a_third_of_the_noise else "holds")

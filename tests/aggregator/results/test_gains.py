"""Gains beside their spread, what chance reaches, and who would be better off alone."""

from __future__ import annotations

import math

import pytest

from hushfleet.aggregator.report.readable import gained
from hushfleet.aggregator.report.verdict import judge
from hushfleet.aggregator.results.gains import (
    Gain,
    MeanAccuracies,
    chance,
    common_test,
    personalized_models,
    worse_than_local_only,
)
from hushfleet.aggregator.results.result import PersonalizedHead, Result
from support import report_samples

sample, bare, told = report_samples.sample, report_samples.bare, report_samples.told
SHARED = PersonalizedHead(images=12, shared=0.75, pulled=0.25, alone=0.0, right=11, right_shared=11, right_alone=6)
ALONE = PersonalizedHead(images=12, shared=0.25, pulled=0.25, alone=0.5, right=11, right_shared=3, right_alone=11)


def changed(result: Result, **details: object) -> Result:
    return result.with_details(**details)


def test_the_mean_and_its_standard_error_by_hand() -> None:
    gain = Gain.of([0.01, 0.03, 0.05])
    assert gain == Gain(pytest.approx(0.03), pytest.approx(0.02 / math.sqrt(3)), 3)
    assert Gain.of([]) is None
    assert Gain.of([0.5]) == Gain(0.5, None, 1)


@pytest.mark.parametrize(
    ("mean", "error", "outcome"),
    [
        (0.021, 0.01, "better"),
        (0.019, 0.01, "close"),
        (-0.019, 0.01, "close"),
        (-0.021, 0.01, "worse"),
        (0.3, None, "close"),
        (0.0004, 0.0, "close"),
        (0.0006, 0.0, "better"),
    ],
)
def test_two_standard_errors_are_sure(mean: float, error: float | None, outcome: str) -> None:
    assert Gain(mean, error).outcome == outcome


def test_in_words() -> None:
    assert gained(Gain(0.0321, 0.0042, 9)) == "+3.2 ± 0.4 points"
    assert gained(Gain(-0.01)) == "\N{MINUS SIGN}1.0 points"
    assert gained(None) == "not measured"


def test_a_gain_within_its_spread_is_never_said_to_beat_anything() -> None:
    result = changed(sample(4), local_only_common=[0.4, 1.0, 0.4, 1.0])
    assert judge(result).common.gain == Gain(pytest.approx(0.05), pytest.approx(0.1 * math.sqrt(3)), 4)
    words = told(result, "answer")
    assert words.startswith("Federating is too close to training alone to call: +5.0 ± 17.3 points on the common test")
    assert "it beats training alone: +2.0 ± 0.0 points on each device's own kind of data" in words
    assert "± one standard error over 4 devices, with one seed" in words
    assert "too close to call" in told(result, "trade", epsilon_server=2.0)


def test_chance_is_the_commonest_class() -> None:
    result = changed(sample(2), label_counts=[[8, 2, 0], [1, 1, 8]])
    assert chance(result) == (pytest.approx(9 / 20), pytest.approx(0.8))
    other = changed(result, confusion_global=[[4, 3, 3], [1, 19, 0], [6, 2, 2]])
    assert chance(other) == (pytest.approx(20 / 40), pytest.approx(0.8))
    assert chance(changed(sample(2), label_counts=[])) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert chance(bare(sample(2))) == (None, None)


@pytest.mark.parametrize(
    ("federated", "chance", "images", "gains", "verdict"),
    [
        (0.50, 0.10, 1000, (0.10, 0.12), "better"),
        (0.50, 0.10, 1000, (-0.10, -0.12), "worse"),
        (0.50, 0.10, 1000, (-0.10, 0.12), "close"),
        (0.50, 0.10, 1000, (), None),
        (0.042, 0.10, 360, (0.0, 0.0), "nothing"),
        (0.042, 0.10, 360, (), "nothing"),
        (0.115, 0.10, 1000, (0.10, 0.12), "nothing"),  # chance and its error: 10 % ± 0.95 % of 1000 images
        (0.125, 0.10, 1000, (0.10, 0.12), "better"),
        (0.125, 0.10, 100, (0.10, 0.12), "nothing"),
        (0.101, 0.10, 0, (0.10, 0.12), "better"),  # how many images is not known
        (0.042, None, 360, (0.10, 0.12), "better"),  # the classes are not known
        (None, 0.10, 360, (), None),
    ],
)
def test_the_verdict_is_one_rule(
    federated: float | None, chance: float | None, images: int, gains: tuple[float, ...], verdict: str | None
) -> None:
    alone = None if federated is None or not gains else federated - sum(gains) / len(gains)
    assert MeanAccuracies(federated, alone, gains, chance, images).verdict == verdict


def test_a_model_at_chance_has_learned_nothing_whatever_it_gained() -> None:
    result = changed(sample(2, own=0.4, alone=0.3), label_counts=[[8, 2, 0], [8, 2, 0]])
    words = told(result, "answer")
    assert words.startswith("Federating has learned nothing: 40.0 % on the common test set, where always giving the")
    assert "same answer reaches 80.0 %; it beats training alone: +2.0" in words
    assert "got a better model" not in words
    assert "(personalized models: learned nothing)" in told(result, "trade", epsilon_server=2.0)


def test_means_are_over_the_devices_that_were_measured_both_ways() -> None:
    result = changed(sample(3), local_only_common=[0.5, 0.7, None])
    found = common_test(result)
    assert (found.federated, found.local_only) == (pytest.approx(0.75), pytest.approx(0.6))
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(sum(found.gains) / 2)
    assert "over 2 of 3 devices" in told(result, "answer")
    own = changed(sample(3), accuracy_own_local=[[0.9, None, 0.9]] * 3, local_test_images=[10, 20, 40])
    assert personalized_models(own, "local").images == 50, "of the tested devices"


def test_a_fleet_with_personalized_heads_serves_the_common_test_with_the_shared_one() -> None:
    result = changed(sample(2), own_heads=[SHARED, ALONE], local_test_images=[100, 100])
    assert common_test(result).federated == 0.6
    assert common_test(result).gains == pytest.approx((-0.1, -0.1))
    assert [row.name for row in judge(result).rows] == [
        "shared head, common test", "personalized heads, own data", "personalized heads, common test",
    ]  # fmt: skip
    assert "The shared head is better than alone for none of 2 devices on the common test set." in told(
        result, "answer"
    )
    words = told(result, "own_heads")
    assert "on average 50.0 % the shared head, 25.0 % heads pulled to it, 25.0 % heads trained alone." in words
    assert "none of 2 devices are worse than alone" in words
    assert told(sample(2), "own_heads") == ""


def test_worse_is_by_more_than_the_own_tests_standard_error() -> None:
    own = [0.80, 0.80, 0.50, None]  # alone 0.88: sqrt(0.88 * 0.12 / 100) is 0.03
    result = changed(sample(4), accuracy_own_local=[own] * 3, local_test_images=[100, 3, 3, 100])
    assert worse_than_local_only(result) == (2, 3)
    assert worse_than_local_only(sample(2)) is None


def test_means_are_the_results_own() -> None:
    found = personalized_models(sample(3), "local")
    assert (found.federated, found.local_only) == (pytest.approx(0.9), pytest.approx(0.88))
    assert found.gains == pytest.approx((0.02, 0.02, 0.02))
    assert common_test(bare(sample(3))).gain is None


@pytest.mark.parametrize(
    ("accounting", "trust"), [("strict", "local"), ("secure", "secure-sum"), ("as-published", "as-published")]
)
def test_trust_has_one_name(accounting: str, trust: str) -> None:
    assert judge(sample().but(accounting=accounting, trust=None)).trust == trust

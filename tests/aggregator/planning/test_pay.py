"""Does a fleet pay? One function answers for each task, by what was measured or else predicted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.planning.advice import MONTH_S, Advice, Question
from hushfleet.aggregator.planning.evaluation_error import evaluation_error, useless_evaluation
from hushfleet.aggregator.planning.gain_table import gain_table
from hushfleet.aggregator.planning.pay import MeasuredGain, pay
from hushfleet.aggregator.results.answers import EvaluationRow, WithError
from hushfleet.errors import BadInput


def task(**changes: Any) -> Any:
    plain: dict[str, Any] = {
        "name": "t",
        "model": {"name": "linear", "features": "scattering"},
        "method": {"name": "hush"},
        "privacy": {"accounting": "secure", "epsilon": 2.0, "delta": 1e-5},
        "data": {"name": "digits", "devices": 100},
    }
    return parse_task(plain | changes)


def advice(asked: Any, **given: Any) -> Advice:
    found = pay(asked, **given)
    assert isinstance(found, Advice)
    return found


def row(gain: float, error: float) -> EvaluationRow:
    value = {name: WithError(value=0.5, error=0.1) for name in ("own", "alone", "shared", "gaining")}
    return EvaluationRow(round=3, devices=40, gain=WithError(value=gain, error=error), **value)


def test_a_task_is_judged_as_the_same_question() -> None:
    assert advice(task(), images=30).question == Question(devices=100, images=30, classes=10, epsilon=2.0)
    noised = task(privacy={"accounting": "secure", "noise_multiplier": 8.916, "delta": 1e-5}, round={"rounds": 20})
    assert advice(noised).question.epsilon == pytest.approx(2.0, rel=1e-3)


def test_classes_and_shape_are_those_of_the_data() -> None:
    own = {"name": "folder", "class_names": ["a", "b", "c"], "input_shape": [3, 32, 32], "devices": 100}
    for data, classes, shape in (
        ({"name": "emnist", "devices": 100}, 26, None),
        ({"name": "cifar10", "devices": 100}, 10, (3, 32, 32)),
        (own, 3, (3, 32, 32)),
    ):
        asked = advice(task(data=data)).question
        assert (asked.classes, asked.shape) == (classes, shape)
    assert advice(task(), described=(5, (3, 8, 8))).question.classes == 5
    assert pay(task(data={"name": "arrays", "path": "x.npz", "devices": 100})) is None, (
        "only the file knows its classes"
    )


def test_samples_without_features_were_not_measured() -> None:
    """They had the figures of images with scattering."""
    for model, said in (({"name": "linear"}, "'unit-norm'"), ({"name": "digits-cnn"}, "'of digits-cnn'")):
        found = advice(task(model=model), images=30)
        assert found.answer == "perhaps"
        assert f"features {said} were not measured" in found.in_words


def test_who_says_how_many_images_a_board_has_is_told() -> None:
    """`hushfleet aggregator` does not know it, and told `20 images each` as a fact."""
    planned = task(plan={"images": 24, "alpha": 0.5})
    assert "100 devices with 20 samples each (assumed), classes alike" in advice(task()).in_words
    assert "with 24 samples each (assumed), alpha 0.5" in advice(planned).in_words
    told = advice(planned, images=31, images_by="told by noised counts").in_words
    assert "with 31 samples each (told by noised counts)" in told
    assert "with 12 samples each, classes alike" in advice(task(), images=12, images_by="").in_words


def test_the_boards_that_exist_are_judged_and_not_those_of_the_task() -> None:
    """34 in the task, 24 enrolled: `fleet up` said what 34 would gain (F8)."""
    asked = task(round={"min_updates": 20}, data={"name": "digits", "devices": 34})
    planned, real = advice(asked), advice(asked, devices=24)
    assert real.question.devices == 24
    assert real.in_words.startswith("It may pay: 24 devices")
    assert real.estimate.accuracies.gain < planned.estimate.accuracies.gain
    assert real.estimate.signal == pytest.approx(planned.estimate.signal * math.sqrt(24 / 34))
    drawn = task(round={"cohort_size": 16, "min_updates": 12}, data={"name": "digits", "devices": 34})
    assert advice(drawn, devices=24).question.devices == 16, "as many are in a round"


def test_a_task_is_judged_by_the_noise_that_it_adds() -> None:
    """Smaller sums that may be opened, and cohorts that are drawn, leave fewer honest devices to count on."""
    for rules in ({}, {"min_updates": 20}, {"cohort_size": 50}):
        asked = task(round=rules, privacy={"accounting": "secure", "epsilon": 4.0, "delta": 1e-5})
        found = advice(asked, images=20)
        assert (found.answer == "yes") == (not rules)
        counted = math.sqrt(asked.cohort_size * asked.noise_split)
        as_much = Question(asked.cohort_size, 20, 10, 4.0).estimate(gain_table(), counted=counted)
        assert found.estimate == as_much


def test_an_evaluation_takes_its_share_of_the_budget_from_training() -> None:
    whole, rest = advice(task()), advice(task(evaluation={"share": 0.36}))
    assert rest.estimate.signal == pytest.approx(0.8 * whole.estimate.signal)
    assert rest.question.epsilon == whole.question.epsilon


def test_a_task_that_is_unlike_the_table_is_told_so() -> None:
    for changes, said in (
        (
            {"data": {"name": "digits", "devices": 100, "partition": "pathological", "classes_per_device": 2}},
            "pathological",
        ),
        ({"round": {"rounds": 5}}, "5 rounds with a clip norm of 13.5"),
        ({"privacy": {"accounting": "secure", "epsilon": 2.0, "delta": 1e-5, "clip_norm": 50.0}}, "a clip norm of 50"),
    ):
        found = advice(task(**changes), images=12)
        assert found.answer == "perhaps"
        assert said in found.in_words
    assert not advice(task(round={"rounds": 8}), images=12).estimate.outside, "the distance in all rounds is the same"


def test_other_methods_and_runs_without_noise_are_not_judged() -> None:
    plain = {"name": "t", "model": {"name": "digits-cnn"}, "data": {"name": "digits", "devices": 10}}
    assert pay(parse_task({**plain, "method": {"name": "dp-fedavg"}})) is None
    assert pay(task(privacy={"accounting": "strict", "noise_multiplier": 0.0})) is None


def test_what_was_measured_is_the_sentence_if_it_says_anything() -> None:
    """`[evaluation]` on 14 boards said "+25.4 +- 175.8 points" in place of the useful sentence (F7)."""
    predicted = advice(task()).in_words
    useless = pay(task(), evaluation=row(0.254, 1.758))
    assert useless is not None
    assert useless.in_words == predicted
    for gain, error, said in (
        (0.08, 0.03, "It pays: +5.0 to +11.0 points over staying alone, by noised answers of 40 boards after round 3"),
        (-0.05, 0.04, "It does not pay: -9.0 to -1.0 points"),
        (0.02, 0.09, "It may pay: -7.0 to +11.0 points"),
    ):
        found = pay(task(), evaluation=row(gain, error))
        assert isinstance(found, MeasuredGain)
        assert found.in_words.startswith(said)


def test_how_long_it_pays_is_told_first() -> None:
    """`plan --per 90d --lifetime 8` said "It pays" first, and "the budget ends after 3 periods" last (W8)."""
    asked = task(
        privacy={"accounting": "secure", "epsilon": 8.0, "delta": 1e-5}, data={"name": "mnist", "devices": 1000}
    )
    for lasts_s, said in (
        (270 * 86400.0, "It pays, for 9 months: 1000 devices"),
        (30 * MONTH_S, "It pays, for 2.5 years: 1000 devices"),
        (7 * 86400.0, "It pays, for 7 days: 1000 devices"),
        (None, "It pays: 1000 devices"),
    ):
        assert advice(asked, images=5, lasts_s=lasts_s).in_words.startswith(said)
    measured = pay(asked, evaluation=row(0.08, 0.03), lasts_s=270 * 86400.0)
    assert measured is not None
    assert measured.in_words.startswith("It pays, for 9 months: +5.0 to +11.0 points")
    few = task(
        privacy={"accounting": "secure", "epsilon": 0.5, "delta": 1e-5},
        data={"name": "mnist", "devices": 30},
        plan={"alpha": 0.1},
    )
    assert advice(few, lasts_s=1e7).in_words.startswith("It does not pay: 30 devices")


SIMULATED = {
    "measured_on": "450 images of photos/",
    "images": 20,
    "devices": 80.0,
    "alone": [0.6, 0.5],
    "points": [[1.0, 0.6, 0.3, 0.0], [2.0, 0.7, 0.5, 0.0], [4.0, 0.8, 0.7, 0.0]],
}


def test_a_simulation_of_the_plan_is_kept_in_the_task() -> None:
    data = {"name": "folder", "devices": 100, "class_names": list("abcdefghij"), "input_shape": [1, 28, 28]}
    found = advice(task(data=data, plan=SIMULATED))
    assert found.way == "simulated"
    assert found.answer == "yes"
    assert 0.05 < found.estimate.accuracies.gain < 0.15
    fewer = advice(task(data=data, plan=SIMULATED), devices=60)
    assert fewer.way == "simulated"
    assert fewer.estimate.accuracies.gain < found.estimate.accuracies.gain
    assert advice(task(data=data, plan=SIMULATED), images=31).way == "other data", "it was simulated with 20"
    with pytest.raises(BadInput, match="a simulation needs images, devices, two values"):
        task(data=data, plan={**SIMULATED, "alone": [0.5]})


@pytest.mark.parametrize("accounting", ["secure", "strict"])
def test_what_an_evaluation_needs_makes_it_useful(accounting: str) -> None:
    def of(boards: int, **section: Any) -> Any:
        data = {"name": "folder", "devices": boards, "class_names": ["a", "b"], "input_shape": [1, 28, 28]}
        privacy = {"accounting": accounting, "epsilon": 8.0, "delta": 1e-5}
        return evaluation_error(task(data=data, privacy=privacy, evaluation=section), devices=boards, images=60)

    few = of(50)
    assert not few.is_useful
    least = few.least_devices()
    assert least == pytest.approx(next(n for n in range(50, 9000) if of(n).is_useful), rel=0.03)
    if accounting == "secure":
        share = few.least_share()
        assert of(50, share=share).is_useful
        assert not of(50, share=share - 0.02).is_useful
        assert f"it needs {least} devices (data.devices), or share = {share:g}" in few.in_words
    else:
        assert few.least_share() is None
        assert few.in_words.endswith(f"it needs {least:,} devices (data.devices)")


def test_a_useless_evaluation_is_told_before() -> None:
    """On 14 boards it said "+25.4 +- 175.8 points" (at 19 of 20 cases), and nobody had warned (F7)."""
    data = {"name": "folder", "devices": 14, "class_names": list("abcdef"), "input_shape": [1, 28, 28]}
    asked = task(data=data, evaluation={}, plan={"images": 24})
    found = evaluation_error(asked, devices=14, images=24)
    assert found is not None
    assert 1.96 * found.standard_error == pytest.approx(1.758, rel=0.1)
    why = useless_evaluation(asked, devices=14, images=24)
    assert why is not None
    assert "tells the gain of 14 devices to ± " in why
    assert useless_evaluation(asked, devices=8000, images=24) is None
    assert useless_evaluation(replace(asked, evaluation=None), devices=14, images=24) is None

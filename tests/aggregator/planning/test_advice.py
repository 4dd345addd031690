"""Will it pay? The table that ships, what lies between its cells, and the words."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.planning.advice import Advice, Question, worth_it
from hushfleet.aggregator.planning.gain_table import Accuracies, Estimate, GainTable, gain_table
from hushfleet.errors import BadInput
from hushfleet.methods.hush_rule import signal


def table_of(*fleets: dict[str, Any]) -> GainTable:
    return GainTable(
        {"made_by": "a test", "date": "today", "seeds": [0], "delta": 1e-5, "features": {}, "fleets": fleets}
    )


def fleet(devices: int, images: int, chosen: float, *, classes: int = 10, alpha: float | None = None) -> dict[str, Any]:
    """One epsilon: 2."""
    point = {"epsilon": 2.0, "chosen": {"own": chosen}, "shared": {"common": chosen}, "gain_std": 0.0}
    who = {"features": "scattering", "devices": devices, "images": images, "classes": classes, "alpha": alpha}
    return who | {"honest": 1.0, "seeds": 1, "alone": {"own": 0.5, "common": 0.4}, "points": [point]}


def signal_of(devices: float) -> float:
    return signal(devices=devices, epsilon=2.0, delta=1e-5)


def test_between_cells_is_interpolated_in_logarithms() -> None:
    table = table_of(*(fleet(n, m, 0.1 * a) for n, m, a in ((10, 5, 2), (1000, 5, 4), (10, 20, 6), (1000, 20, 8))))

    def chosen(devices: float, images: int) -> float:
        found = table.estimate(features="scattering", signal=signal_of(devices), images=images, classes=10, alpha=None)
        assert not found.outside
        return found.accuracies.chosen

    assert chosen(10, 5) == pytest.approx(0.2)
    assert chosen(100, 5) == pytest.approx(0.3)
    assert chosen(100, 10) == pytest.approx(0.5)
    assert chosen(1000, 20) == pytest.approx(0.8)


def test_outside_of_the_table_the_nearest_cell_is_taken_and_it_is_said() -> None:
    table = table_of(fleet(10, 5, 0.2), fleet(1000, 5, 0.4))
    found = table.estimate(features="scattering", signal=signal_of(5000), images=500, classes=3, alpha=0.5)
    assert found.accuracies.chosen == pytest.approx(0.4)
    assert len(found.outside) == 4
    unknown = table.estimate(features="mine.onnx", signal=signal_of(100), images=5, classes=10, alpha=None)
    assert "mine.onnx" in unknown.outside[0]


def test_fleets_that_differ_are_judged_by_such() -> None:
    table = table_of(fleet(10, 5, 0.2), fleet(10, 5, 0.7, alpha=0.5))
    at = {"features": "scattering", "signal": signal_of(10), "images": 5, "classes": 10}
    assert table.estimate(**at, alpha=0.3).accuracies.chosen == pytest.approx(0.7)
    assert table.estimate(**at, alpha=100.0).accuracies.chosen == pytest.approx(0.2)
    assert table.estimate(**at, alpha=0.5).outside == table.estimate(**at, alpha=None).outside == ()
    for alpha, figures in ((0.3, "alpha 0.5"), (1.9, "alpha 0.5"), (2.0, "devices that are alike")):
        (said,) = table.estimate(**at, alpha=alpha).outside
        assert said == f"alpha {alpha:g} was not measured; these are the figures of {figures}"


def test_of_several_alphas_the_nearest_is_shown() -> None:
    table = table_of(*(fleet(10, 5, chosen, alpha=alpha) for alpha, chosen in ((None, 0.2), (0.5, 0.7), (0.1, 0.9))))
    at = {"features": "scattering", "signal": signal_of(10), "images": 5, "classes": 10}
    found = {alpha: table.estimate(**at, alpha=alpha) for alpha in (0.1, 0.15, 0.5, 1.0)}
    assert [round(each.accuracies.chosen, 9) for each in found.values()] == [0.9, 0.9, 0.7, 0.7]
    assert [len(each.outside) for each in found.values()] == [0, 1, 0, 1]


def test_a_gain_that_another_data_set_could_take_away_is_a_perhaps() -> None:
    question = Question(devices=100, images=20, classes=10, epsilon=2)
    for chosen, answer in ((0.505, "no"), (0.55, "perhaps"), (0.62, "yes")):
        accuracies = Accuracies(alone=0.5, chosen=chosen, alone_common=0.5, shared=chosen, spread=0.001)
        advice = Advice(question, Estimate(50.0, accuracies, (), ()), gain_table())
        assert advice.answer == answer
        assert ("images like yours: hushfleet plan --data" in advice.in_words) == (answer == "perhaps")


def test_below_an_r_of_twelve_the_answer_is_no_and_says_why() -> None:
    question = Question(devices=24, images=5, classes=10, epsilon=2, honest_fraction=1.0)
    advice = Advice.on(question)
    assert (advice.estimate.signal < 12, advice.estimate.accuracies.gain > 0.01, advice.answer) == (True, True, "no")
    assert f"r is {advice.estimate.signal:.1f}, and 12 are needed" in advice.in_words
    assert f"{100 * advice.estimate.accuracies.gain:+.1f} points" in advice.in_words
    assert Advice.on(dataclasses.replace(question, devices=30)).answer == "perhaps"


def test_what_was_measured_on_own_images_is_held_to_the_spread_of_seeds_alone() -> None:
    for chosen, spread, answer in ((0.505, 0.001, "no"), (0.55, 0.01, "yes"), (0.55, 0.03, "perhaps")):
        point = {"gain_std": spread, "epsilon": 2.0, "chosen": {"own": chosen}, "shared": {"common": 0.5}}
        plain = {"made_by": "a test", "date": "today", "seeds": [0], "delta": 1e-5, "features": {}}
        table = GainTable({**plain, "fleets": [fleet(10, 20, chosen) | {"points": [point]}]}, measured_on="mine")
        assert Advice.on(Question(devices=10, images=20, classes=10, epsilon=2), table).answer == answer


def test_colour_has_figures_of_its_own() -> None:
    grey, colour = fleet(100, 20, 0.6), fleet(100, 20, 0.8) | {"features": "scattering of colour"}
    asked = Question(devices=100, images=20, classes=10, epsilon=2)
    for shape, chosen in ((None, 0.6), ((1, 28, 28), 0.6), ((3, 32, 32), 0.8)):
        found = dataclasses.replace(asked, shape=shape).estimate(table_of(grey, colour))
        assert found.accuracies.chosen == pytest.approx(chosen)


def test_images_are_held_to_what_was_measured_with_the_neighbouring_classes() -> None:
    table = table_of(fleet(10, 5, 0.2), fleet(10, 20, 0.3), fleet(10, 20, 0.4, classes=26))
    at = {"features": "scattering", "signal": signal_of(10), "alpha": None}
    assert table.estimate(**at, images=10, classes=10).outside == ()
    assert table.estimate(**at, images=10, classes=18).outside == ("images a device 10 outside of 20 to 20",)


def test_the_table_that_ships_has_no_cell_without_noise_or_with_too_few_seeds() -> None:
    table = gain_table()
    assert table.made_by == "benchmarks/private_gain.py"
    assert len(table.seeds) >= 3
    assert {"scattering", "filters"} <= set(table.features)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (Question(devices=100, images=20, classes=10, epsilon=2), "yes"),
        (Question(devices=8, images=60, classes=10, epsilon=2), "no"),
        (Question(devices=100, images=20, classes=10, epsilon=2, local=True), "no"),
        (Question(devices=100, images=12, classes=10, epsilon=2, features="filters"), "yes"),
        (Question(devices=30, images=20, classes=26, epsilon=2), "no"),
    ],
)
def test_the_answer_on_fleets_that_were_measured(question: Question, answer: str) -> None:
    advice = Advice.on(question)
    assert advice.answer == answer
    assert (advice.warning is None) == (answer == "yes")


@given(
    st.integers(30, 3000),
    st.integers(3, 100),
    st.integers(2, 40),
    st.floats(0.3, 20),
    st.floats(0.5, 1),
    st.sampled_from([None, 0.3, 5.0]),
)
def test_any_fleet_has_an_answer(
    devices: int, images: int, classes: int, epsilon: float, honest: float, alpha: float | None
) -> None:
    try:
        advice = Advice.on(Question(devices, images, classes, epsilon, honest_fraction=honest, alpha=alpha))
    except BadInput:  # so few honest ones that a sum may have none
        assert honest < 0.95
        return
    found = advice.estimate.accuracies
    assert all(0 <= value <= 1 for value in dataclasses.astuple(found))
    assert str(devices) in advice.in_words


def test_break_even_is_where_the_answer_turns() -> None:
    advice = Advice.on(Question(devices=60, images=20, classes=10, epsilon=2))
    least = advice.least_devices()
    assert least is not None
    assert Advice.on(dataclasses.replace(advice.question, devices=least)).answer == "yes"
    fewer = dataclasses.replace(advice.question, devices=least - 1)
    assert Advice.on(fewer).answer != "yes"
    smallest = advice.least_epsilon()
    assert smallest is not None
    assert Advice.on(dataclasses.replace(advice.question, epsilon=smallest)).answer == "yes"


def test_fewer_honest_devices_count_for_less() -> None:
    def counted(honest: float) -> float:
        return Question(devices=100, images=20, classes=10, epsilon=2, honest_fraction=honest).counted

    assert counted(1.0) == pytest.approx(math.sqrt(100 * 90))
    assert counted(0.9) == pytest.approx(math.sqrt(100 * 80))
    with pytest.raises(BadInput, match="honest"):
        counted(0.05)


def task(**changes: Any) -> Any:
    plain: dict[str, Any] = {
        "name": "t",
        "model": {"name": "linear"},
        "method": {"name": "hush"},
        "privacy": {"accounting": "secure", "epsilon": 2.0, "delta": 1e-5},
        "data": {"name": "digits", "devices": 100},
    }
    return parse_task(plain | changes)


def test_a_task_is_judged_as_the_same_question() -> None:
    advice = worth_it(task(), classes=10, images=30)
    assert advice is not None
    assert advice.question == Question(devices=100, images=30, classes=10, epsilon=2.0)
    noised = task(privacy={"accounting": "secure", "noise_multiplier": 8.916, "delta": 1e-5}, round={"rounds": 20})
    found = worth_it(noised, classes=10)
    assert found is not None
    assert found.question.epsilon == pytest.approx(2.0, rel=1e-3)


def test_a_number_of_images_that_nobody_gave_is_told_as_assumed() -> None:
    """`hushfleet aggregator` does not know it, and told `20 images each` as a fact."""
    small = task(privacy={"accounting": "secure", "epsilon": 0.5, "delta": 1e-5})
    words = "how many images a device has is not known here"
    for images, told in ((None, True), (20, False)):
        advice = worth_it(small, classes=10, images=images)
        assert advice is not None
        assert advice.warning is not None
        assert (words in advice.warning) is told


def test_a_task_is_judged_by_the_noise_that_it_adds() -> None:
    """Smaller sums that may be opened, and cohorts that are drawn, leave fewer honest devices to count on."""
    for rules in ({}, {"min_updates": 20}, {"cohort_size": 50}):
        asked = task(round=rules)
        advice = worth_it(asked, classes=10, images=20)
        assert advice is not None
        assert (advice.answer == "yes") == (not rules)
        counted = math.sqrt(asked.cohort_size * asked.noise_split)
        as_much = Question(asked.cohort_size, 20, 10, 2.0).estimate(gain_table(), counted=counted)
        assert advice.estimate == as_much


def test_other_methods_and_runs_without_noise_are_not_judged() -> None:
    plain = {"name": "t", "model": {"name": "digits-cnn"}, "data": {"name": "digits", "devices": 10}}
    assert worth_it(parse_task({**plain, "method": {"name": "dp-fedavg"}}), classes=10) is None
    assert worth_it(task(privacy={"accounting": "strict", "noise_multiplier": 0.0}), classes=10) is None

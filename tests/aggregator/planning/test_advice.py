"""Will it pay? The table that ships, what lies between its cells, and the words."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.planning.advice import Advice, Question
from hushfleet.aggregator.planning.gain_errors import WORTH, GainErrors, Interval, Intervals
from hushfleet.aggregator.planning.gain_table import Accuracies, Estimate, GainTable, gain_table
from hushfleet.errors import BadInput
from hushfleet.methods.hush_rule import PAYS_FROM, signal


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


def advice_of(own: Interval, *, outside: tuple[str, ...] = ()) -> Advice:
    """Advice with an interval of its own."""
    question = Question(devices=100, images=20, classes=10, epsilon=2)
    accuracies = Accuracies(alone=0.5, chosen=0.55, alone_common=0.5, shared=0.55, spread=0.001)
    advice = Advice(question, Estimate(50.0, accuracies, (), outside), gain_table())
    vars(advice)["intervals"] = Intervals(own, own)
    return advice


def test_the_answer_follows_from_the_interval_alone() -> None:
    for low, high, answer, words in (
        (0.01, 0.2, "yes", "It pays"),
        (0.0099, 0.2, "perhaps", "It may pay"),
        (-0.05, 0.01, "perhaps", "It may pay"),
        (-0.05, 0.0099, "no", "It does not pay"),
        (0.001, 0.0099, "perhaps", "It may pay"),
    ):
        advice = advice_of(Interval(low, high))
        assert (advice.answer, advice.in_words.partition(":")[0]) == (answer, words)
        assert f"{100 * low:+.1f} to {100 * high:+.1f} points" in advice.in_words
        assert ("images like yours: hushfleet plan --data" in advice.in_words) == (answer == "perhaps")


@pytest.mark.parametrize(
    ("features", "shape", "said"),
    [
        ("scattering", None, "images like yours: hushfleet plan --data FOLDER, or"),
        ("sound:speech", (1, 1, 16000), "clips like yours: hushfleet plan --data FOLDER --features sound:speech"),
        ("of linear", (64, 1, 1), "data like yours: hushfleet simulate"),
        ("unit-norm", (1, 1, 64), "data like yours: hushfleet simulate"),
    ],
)
def test_it_names_a_command_that_takes_such_data(features: str, shape: tuple[int, int, int] | None, said: str) -> None:
    question = Question(devices=60, images=20, classes=4, epsilon=4, features=features, shape=shape)
    advice = dataclasses.replace(advice_of(Interval(0.0, 0.2), outside=("something",)), question=question)
    assert f"measure it with {said}" in advice.in_words


def test_a_fleet_that_was_not_measured_gets_no_answer() -> None:
    advice = advice_of(Interval(0.05, 0.2), outside=("alpha 0.3 was not measured",))
    assert advice.answer == "perhaps"
    assert advice.in_words.startswith("Not measured: 100 devices")
    assert "alpha 0.3 was not measured" in advice.in_words
    for changes, said in (
        ({"devices": 5000, "epsilon": 0.5}, "5,000 devices are outside of 8 to 2,000"),
        ({"epsilon": 16.0}, "epsilon 16 is outside of 0.5 to 8"),
        ({"devices": 1900, "epsilon": 8.0, "alpha": 0.1}, "the signal"),
        ({"features": "mine.onnx"}, "features 'mine.onnx' were not measured"),
    ):
        found = Advice.on(dataclasses.replace(advice.question, **changes))
        assert said in found.estimate.outside[0]
        assert (found.answer, found.in_words.startswith("Not measured")) == ("perhaps", True)


def test_each_way_has_its_own_interval() -> None:
    """The same accuracies are surer on the data set that was measured, and surest where the fleet was simulated."""
    question = Question(devices=100, images=20, classes=10, epsilon=2)
    other = Advice.on(question)
    same = dataclasses.replace(other, data="fashion-mnist")
    point = {"gain_std": 0.005, "epsilon": 2.0, "chosen": {"own": 0.7}, "shared": {"common": 0.7}}
    plain = {"made_by": "a test", "date": "today", "seeds": [0], "delta": 1e-5, "features": {}}
    fleets = [fleet(100, 20, 0.7) | {"points": [point]}]
    surest = other.estimate._replace(accuracies=dataclasses.replace(other.estimate.accuracies, spread=0.0))
    own = Advice(question, surest, GainTable({**plain, "fleets": fleets}, measured_on="mine"))
    assert [each.way for each in (other, same, own)] == ["other data", "same data", "simulated"]
    widths = [each.intervals.own.high - each.intervals.own.low for each in (other, same, own)]
    assert widths == sorted(widths, reverse=True)
    assert dataclasses.replace(other, data="mnist").way == "other data"


def test_a_simulation_is_held_to_the_spread_of_its_seeds_and_the_measured_errors() -> None:
    errors = GainErrors(
        {
            "made_by": "a test",
            "share": 0.9,
            "ways": {
                "simulated": {
                    "scale": {head: {"floor": 0.005, "gain": 0, "spread": 0.5} for head in ("own", "common")},
                    "errors": [
                        {"of": "any", "signals": [8, 32]}
                        | {head: {"below": [1, 2], "above": [0, 4]} for head in ("own", "common")}
                    ],
                }
            },
        }
    )
    accuracies = Accuracies(alone=0.5, chosen=0.6, alone_common=0.4, shared=0.7, spread=0.02)
    for r, below, above in ((4.0, 0.015, 0.0), (16.0, 0.0225, 0.03), (99.0, 0.03, 0.06)):
        found = errors.intervals("simulated", Estimate(r, accuracies, (), (), alpha=0.3))
        assert found.own == pytest.approx((0.1 - below, 0.1 + above))
        assert found.common == pytest.approx((0.3 - below, 0.3 + above))


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
    assert table.estimate(**at, images=10, classes=18).outside == ("samples a device 10 outside of 20 to 20",)


def test_what_a_fleet_gains_at_the_r_that_pays() -> None:
    found = gain_table().estimate(features="scattering", signal=PAYS_FROM, images=20, classes=10, alpha=None)
    assert found.accuracies.gain == pytest.approx(0.05, abs=0.01)


def test_the_table_that_ships_has_no_cell_without_noise_or_with_too_few_seeds() -> None:
    table = gain_table()
    assert table.made_by == "benchmarks/private_gain.py"
    assert len(table.seeds) >= 3
    assert {"scattering", "filters"} <= set(table.features)


@pytest.mark.parametrize(
    ("question", "gains"),
    [
        (Question(devices=50, images=20, classes=10, epsilon=2, alpha=0.1), (0.019, 0.007)),
        (Question(devices=400, images=20, classes=10, epsilon=8, alpha=0.1), (0.05,)),
    ],
)
def test_a_gain_that_was_measured_is_not_denied(question: Question, gains: tuple[float, ...]) -> None:
    """At alpha 0.1 it did not pay, "with no fleet up to 100,000 devices", where fleets had gained as much."""
    advice = Advice.on(question)
    low, high = (round(end, 3) for end in advice.intervals.own)  # to a tenth of a point, as both are told
    assert all(low <= gain <= high for gain in gains)
    assert advice.answer == "perhaps"
    assert "may pay" in advice.sizes_in_words
    assert "not measured above" in advice.sizes_in_words


@pytest.mark.parametrize(
    ("question", "data", "answer"),
    [
        (Question(devices=100, images=20, classes=10, epsilon=2), "fashion-mnist", "yes"),
        (Question(devices=100, images=12, classes=10, epsilon=2, features="filters"), "digits", "yes"),
        (Question(devices=30, images=20, classes=10, epsilon=0.5, alpha=0.1), "", "no"),
        (Question(devices=100, images=20, classes=10, epsilon=2, local=True), "", "perhaps"),
        (Question(devices=1000, images=5, classes=10, epsilon=8), "", "yes"),
        (Question(devices=50, images=20, classes=10, epsilon=8, alpha=0.5), "", "perhaps"),
    ],
)
def test_the_answer_on_fleets_that_were_measured(question: Question, data: str, answer: str) -> None:
    advice = dataclasses.replace(Advice.on(question), data=data)
    assert advice.answer == answer


_ANSWERS = {"pays": "yes", "does not pay": "no", "may pay": "perhaps"}


def read(words: str) -> list[tuple[str, float, float]]:
    """The answers that a line says, each with its first and last number; and the end of what was measured."""
    runs, end = words.split("; not measured above ")
    found = []
    for run in re.split(r", (?=[a-z])", runs):
        verb, first, last = re.fullmatch(r"([a-z ]+) ([\d.,]+)(?: to ([\d.,]+))?", run).groups()  # type: ignore[union-attr]
        numbers = [float(number.replace(",", "")) for number in (first, last or first)]
        found.append((_ANSWERS[verb], *numbers))
    assert found[-1][-1] == float(end.replace(",", ""))
    return found  # type: ignore[return-value]


@given(
    st.integers(8, 2000),
    st.integers(5, 60),
    st.sampled_from([2, 5, 10]),
    st.floats(0.5, 8),
    st.sampled_from([None, 0.1, 0.5]),
    st.sampled_from(["", "fashion-mnist"]),
)
@settings(max_examples=30, deadline=None)
def test_no_sentence_contradicts_a_row(
    devices: int, images: int, classes: int, epsilon: float, alpha: float | None, data: str
) -> None:
    question = Question(devices, images, classes, epsilon, alpha=alpha, honest_fraction=1.0)
    advice = dataclasses.replace(Advice.on(question), data=data)
    rows = {each.question.devices: each for each in advice.sizes}
    epsilons = {each.question.epsilon: each for each in advice.epsilons}
    for measured, words in ((rows, advice.sizes_in_words), (epsilons, advice.epsilons_in_words)):
        if not measured:
            assert words == "not measured"
            continue
        for number, row in measured.items():
            (said,) = {answer for answer, first, last in read(words) if first <= float(f"{number:g}") <= last}
            low, high = row.intervals.own
            assert said == ("yes" if low >= WORTH else "no" if low <= 0 and high < WORTH else "perhaps")
            assert row.estimate.outside == ()
    if devices in rows:
        assert rows[devices].in_words == advice.in_words
        verb = {"yes": "It pays", "no": "It does not pay", "perhaps": "It may pay"}[rows[devices].answer]
        assert advice.in_words.startswith(verb)


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


def test_fewer_honest_devices_count_for_less() -> None:
    def counted(honest: float) -> float:
        return Question(devices=100, images=20, classes=10, epsilon=2, honest_fraction=honest).counted

    assert counted(1.0) == pytest.approx(math.sqrt(100 * 90))
    assert counted(0.9) == pytest.approx(math.sqrt(100 * 80))
    with pytest.raises(BadInput, match="honest"):
        counted(0.05)

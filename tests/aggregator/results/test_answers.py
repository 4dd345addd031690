"""Estimates from noised answers: their errors against simulated fleets, and what the values are called."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hushfleet.aggregator.config.question import question_of
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.aggregator.results.answers import evaluation_of, statistic_of
from hushfleet.aggregator.results.metrics import RoundSummary
from hushfleet.aggregator.results.record import _statistic
from hushfleet.data.targets import Targets
from hushfleet.methods.answer_scale import scale_of
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.wire.format.question import QuestionSpec

FLEETS = 400


@pytest.mark.parametrize(
    ("boards", "held_out", "noise", "most"), [(40, 4, 0.1, 1.0), (200, 3, 0.02, 1.0), (40, 20, 0.02, 0.5)]
)
def test_the_truth_is_within_the_errors_in_nineteen_of_twenty_fleets(
    boards: int, held_out: int, noise: float, most: float
) -> None:
    """The slow way: boards drawn with accuracies of their own, each answers by few samples, and noise is added."""
    rng, scale = np.random.default_rng(0), scale_of(QuestionSpec("evaluation", 2, 1.0, most_gain=most), 5)

    def answers(count: int) -> np.ndarray:
        alone = np.clip(0.6 + 0.1 * rng.normal(size=count), 0, 1)
        own, shared = np.clip(alone + 0.1 + 0.05 * rng.normal(size=count), 0, 1), np.clip(alone - 0.05, 0, 1)
        right = [rng.binomial(held_out, each) / held_out for each in (own, alone, shared)]
        gain, gain_shared = (np.clip(each - right[1], -most, most) for each in (right[0], right[2]))
        return np.stack([right[0], gain, gain_shared, (np.sign(gain) + 1) / 2, gain**2], 1)

    own, gain, gain_shared, gaining, _ = answers(200_000).mean(0)
    truth = {"own": own, "alone": own - gain, "shared": own - gain + gain_shared, "gain": gain, "gaining": gaining}
    stds, within = noise / scale.unit, dict.fromkeys(truth, 0)
    for _ in range(FLEETS):
        sent = (answers(boards) - scale.middle) * scale.unit
        assert np.linalg.norm(sent, axis=1).max() <= 1 + 1e-9
        mean = (sent.mean(0) + noise * rng.normal(size=5)) / scale.unit + scale.middle
        found = evaluation_of(mean.tolist(), stds.tolist(), round=1, devices=boards)
        for name, value in truth.items():
            each = getattr(found, name)
            within[name] += abs(each.value - value) <= each.error
    assert min(within.values()) >= 0.92 * FLEETS, within


@pytest.mark.parametrize("accounting", ["strict", "secure"])
@pytest.mark.parametrize(("share", "every", "rounds"), [(0.05, None, 7), (0.5, 3, 10), (0.2, 1, 4), (0.05, 50, 1)])
def test_all_rounds_together_cost_the_epsilon_of_the_task(
    accounting: str, share: float, every: int | None, rounds: int
) -> None:
    plain = {
        "name": "asks",
        "model": {"name": "linear", "features": "scattering"},
        "method": {"name": "dp-fedavg"},
        "privacy": {"accounting": accounting, "epsilon": 4.0, "delta": 1e-5, "clip_norm": 1.0},
        "data": {"name": "digits", "devices": 60},
        "round": {"rounds": rounds},
        "evaluation": {"share": share, **({} if every is None else {"every": every})},
    }
    task = parse_task(plain)
    training = task.privacy_spec(size=100).noise_multiplier
    question = question_of(task, noise_multiplier=training, classes=10)
    assert question is not None
    numbers = range(1, task.total_rounds + 1)
    asked = [number for number in numbers if number % question.every == 0 or number == numbers[-1]]
    assert len(asked) == task.evaluations
    steps = [Step(question.noise_multiplier if number in asked else training, 1.0, 1) for number in numbers]
    assert epsilon(steps, delta=1e-5) == pytest.approx(4.0, rel=1e-4)


def test_bins_of_a_narrow_range_far_from_zero_have_names_of_their_own() -> None:
    question = QuestionSpec("histogram", 1, 1.0, low=101000.0, high=101010.0, bins=10)
    found = statistic_of(question, [0.1] * 10, [0.0] * 10, devices=4, class_names=())
    assert found.names[:2] == ["101000 to 101001", "101001 to 101002"]


@pytest.mark.parametrize(
    ("targets", "names", "called"),
    [
        (Targets("reconstruction", false_alarms=0.01), ("fault",), ["samples that train", "left out"]),
        (Targets("squared", tolerance=1.0), ("power",), ["samples of power", "left out"]),
        (Targets(), ("leaf", "stone"), ["leaf", "stone", "left out"]),
    ],
)
def test_counts_are_called_what_they_count(targets: Targets, names: tuple[str, ...], called: list[str]) -> None:
    """Where there are no classes, all samples are counted; `fault` would be read as a number of faults."""
    plain = {"name": "asked", "model": {"name": "linear"}, "method": {"name": "dp-fedavg"},
             "privacy": {"epsilon": 1.0, "delta": 1e-5, "clip_norm": 1.0}, "data": {"name": "digits", "devices": 4},
             "round": {"rounds": 1}, "statistic": {"kind": "counts"}}  # fmt: skip
    spec = prepare(parse_task(plain), run_id="test").spec
    spec = replace(spec, model=replace(spec.model, class_names=names, targets=targets))
    values = [0.5] * len(called)
    sizes = {"uplink_bytes": 0, "downlink_bytes": 0, "eq20_bytes": 0.0, "float32_bytes": 0}
    summary = RoundSummary(round=1, participants=4, cohort_size=4, multiplier_release=1.0, **sizes)
    found = _statistic(spec, [summary.but(asked="counts", answer=values, answer_stds=values)])
    assert found is not None
    assert found.names == called

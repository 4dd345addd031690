"""Drift: when a board calls its own head worse, and what many boards together say of it."""

from __future__ import annotations

import numpy as np
import pytest

from hushfleet.aggregator.results.answers import statistic_of
from hushfleet.config.question import QuestionSpec
from hushfleet.edge_client.board.drift import HeldOutTest, describe_drift, has_become_worse
from hushfleet.training.answer import drift_answer


@pytest.mark.parametrize(
    ("rights", "worse"),
    [([], None), ([(18, 20)], False), ([(18, 20), (16, 20)], False), ([(18, 20), (6, 20)], True), ([(0, 0)], None)],
)
def test_only_a_sure_fall_below_the_best_month_is_one(rights: list[tuple[int, int]], worse: bool | None) -> None:
    tests = [HeldOutTest(f"2026-{month:02}", *each) for month, each in enumerate(rights, start=1)]
    assert has_become_worse(tests) is worse
    assert ("have changed" in describe_drift(tests)) == (worse is True)


def test_the_sum_of_answers_counts_who_tells_and_who_has_become_worse() -> None:
    answers = np.array([drift_answer(worse) for worse in (True, False, True, None, False)])
    assert np.linalg.norm(answers, axis=1).max() <= 1 + 1e-6
    question = QuestionSpec("drift", 1, 0.5)
    assert question.size(classes=10) == answers.shape[1]
    found = statistic_of(question, answers.mean(0).tolist(), [0.1, 0.1], devices=5, class_names=["a", "b"])
    assert [each.value for each in found.values] == pytest.approx([4, 2])
    assert found.values[0].error == pytest.approx(1.96 * 0.1 * 5 * 2**0.5)

"""Drift: when a board calls its personalized head worse, and what many boards together say of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hushfleet.aggregator.results.answers import statistic_of
from hushfleet.edge_client.board.drift import (
    HeldOutTest,
    classes_key,
    describe_drift,
    has_become_worse,
    note_test,
    read_tests,
)
from hushfleet.methods.answer import drift_answer
from hushfleet.wire.format.question import QuestionSpec


@pytest.mark.parametrize(
    ("rights", "worse"),
    [([], None), ([(18, 20)], False), ([(18, 20), (16, 20)], False), ([(18, 20), (6, 20)], True), ([(0, 0)], None)],
)
def test_only_a_sure_fall_below_the_best_month_is_one(rights: list[tuple[int, int]], worse: bool | None) -> None:
    tests = [HeldOutTest(f"2026-{month:02}", *each) for month, each in enumerate(rights, start=1)]
    assert has_become_worse(tests) is worse
    assert ("have changed" in describe_drift(tests)) == (worse is True)


@pytest.mark.parametrize("months", [2, 12, 36])
def test_chance_alone_seldom_makes_a_board_worse_however_many_months_it_has(months: int) -> None:
    """The best of 36 months is better than the last one by two standard errors in one of four boards."""
    rng = np.random.default_rng(0)
    rights = rng.binomial(100, 0.8, (400, months)).tolist()
    boards = [[HeldOutTest(str(month), right, 100) for month, right in enumerate(board)] for board in rights]
    assert np.mean([has_become_worse(board) for board in boards]) < 0.05
    assert has_become_worse([*boards[0], HeldOutTest("last", 50, 100)])


def test_a_task_with_more_classes_is_no_drift(tmp_path: Path) -> None:
    few, more = classes_key(("a", "b")), classes_key(("a", "b", "c"))
    assert few != more
    for test in (HeldOutTest("2026-01", 95, 100, few), HeldOutTest("2026-02", 60, 100, more)):
        note_test(tmp_path, test)
        assert has_become_worse(read_tests(tmp_path)) is False
    assert "have changed" not in describe_drift(read_tests(tmp_path))
    note_test(tmp_path, HeldOutTest("2026-02", 50, 100, few))
    assert [test.classes for test in read_tests(tmp_path)] == [few, more, few]
    assert has_become_worse(read_tests(tmp_path))


def test_the_sum_of_answers_counts_who_tells_and_who_has_become_worse() -> None:
    answers = np.array([drift_answer(worse) for worse in (True, False, True, None, False)])
    assert np.linalg.norm(answers, axis=1).max() <= 1 + 1e-6
    question = QuestionSpec("drift", 1, 0.5)
    assert question.size(classes=10) == answers.shape[1]
    found = statistic_of(question, answers.mean(0).tolist(), [0.1, 0.1], devices=5, class_names=["a", "b"])
    assert [each.value for each in found.values] == pytest.approx([4, 2])
    assert found.values[0].error == pytest.approx(1.96 * 0.1 * 5 * 2**0.5)

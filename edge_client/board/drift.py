"""Detects drift: stores the accuracy of the board's personalized head on samples that never train, for each month, on
the board.

Only tests with the same classes are compared: with more classes a head is right less often, although nothing drifted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from hushfleet.edge_client.board.notes import Note
from hushfleet.edge_client.storage.state_files import HELD_OUT_TESTS

KEPT_MONTHS = 36
SURE = 0.0228
"""The probability that chance alone causes a reported difference: the probability of two standard errors."""


@dataclass(frozen=True)
class HeldOutTest:
    """The newest test of a month.

    :param month: like `2026-11`.
    :param right: how many of `samples` the personalized head got right.
    :param classes: the `classes_key` of the task; empty in tests of earlier versions.
    """

    month: str
    right: int
    samples: int
    classes: str = ""

    @property
    def share(self) -> float:
        """The accuracy with one right and one wrong answer added, so that few samples do not look certain."""
        return (self.right + 1) / (self.samples + 2)

    @property
    def variance(self) -> float:
        return self.share * (1 - self.share) / self.samples


def classes_key(names: Sequence[str]) -> str:
    """Returns a short key that distinguishes sets of classes."""
    return sha256("\n".join(names).encode()).hexdigest()[:8]


def note_test(state_dir: Path, test: HeldOutTest) -> None:
    """Stores a test; it replaces an earlier one of the same month and the same classes."""
    kept = [each for each in read_tests(state_dir) if (each.month, each.classes) != (test.month, test.classes)]
    Note(state_dir / HELD_OUT_TESTS).keep(json.dumps([asdict(each) for each in [*kept, test][-KEPT_MONTHS:]]))


def read_tests(state_dir: Path) -> list[HeldOutTest]:
    """Reads the stored tests, the oldest first; returns none if they cannot be read."""
    try:
        return [HeldOutTest(**plain) for plain in json.loads((state_dir / HELD_OUT_TESTS).read_text("utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def has_become_worse(tests: list[HeldOutTest]) -> bool | None:
    """Returns whether the last accuracy is significantly below the best month's; None if nothing was tested.

    The best of many months is partly best by chance, so with more months the difference must be larger.
    """
    tests = _comparable(tests)
    if not tests:
        return None
    last, best = tests[-1], max(tests, key=lambda test: test.share)
    from statistics import NormalDist

    deviations = NormalDist().inv_cdf(1 - SURE / max(1, len(tests) - 1))
    return best.share - last.share > deviations * math.sqrt(best.variance + last.variance)


def describe_drift(tests: list[HeldOutTest]) -> str:
    """Describes the last accuracy, and whether it is worse than in the best month; empty if nothing was tested."""
    tests = _comparable(tests)
    if not tests:
        return ""
    last, best = tests[-1], max(tests, key=lambda test: test.share)
    said = f"On its samples that never train it was right on {last.right} of {last.samples} in {last.month}"
    if has_become_worse(tests):
        said += f", and on {best.right} of {best.samples} in {best.month}: its data have changed, or their labels"
    return said


def _comparable(tests: list[HeldOutTest]) -> list[HeldOutTest]:
    """Returns the tests with the same classes as the last one."""
    tests = [test for test in tests if test.samples]
    return [test for test in tests if test.classes == tests[-1].classes]

"""Drift: how right the board's own head is on samples that never train, month by month. It stays on the board."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hushfleet import atomic_file
from hushfleet.errors import StoreError

FILE_NAME = "held_out.json"
KEPT_MONTHS = 36
SURE = 2.0
"""A difference of fewer standard errors is not called one."""


@dataclass(frozen=True)
class HeldOutTest:
    """The newest test of a month.

    :param month: like `2026-11`.
    :param right: how many of `samples` the own head got right.
    """

    month: str
    right: int
    samples: int

    @property
    def share(self) -> float:
        """The accuracy with one right and one wrong answer added, so that few samples are not taken for certain."""
        return (self.right + 1) / (self.samples + 2)

    @property
    def variance(self) -> float:
        return self.share * (1 - self.share) / self.samples


def note_test(state_dir: Path, test: HeldOutTest) -> None:
    """Keeps a test, in the place of an earlier one of the same month."""
    kept = [each for each in read_tests(state_dir) if each.month != test.month]
    text = json.dumps([asdict(each) for each in [*kept, test][-KEPT_MONTHS:]])
    with suppress(OSError, StoreError):  # a full disk is told elsewhere
        atomic_file.write_whole(state_dir / FILE_NAME, text.encode(), durable=False)


def read_tests(state_dir: Path) -> list[HeldOutTest]:
    """Reads what was kept, the oldest first; nothing where it cannot be read."""
    try:
        return [HeldOutTest(**plain) for plain in json.loads((state_dir / FILE_NAME).read_text("utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def has_become_worse(tests: list[HeldOutTest]) -> bool | None:
    """Whether the last month's accuracy is surely below that of the best one; None where nothing was tested."""
    tests = [test for test in tests if test.samples]
    if not tests:
        return None
    last, best = tests[-1], max(tests, key=lambda test: test.share)
    return best.share - last.share > SURE * math.sqrt(best.variance + last.variance)


def describe_drift(tests: list[HeldOutTest]) -> str:
    """Says how right the board was last, and whether it has become worse than in its best month; empty: not tested."""
    tests = [test for test in tests if test.samples]
    if not tests:
        return ""
    last, best = tests[-1], max(tests, key=lambda test: test.share)
    said = f"On its samples that never train it was right on {last.right} of {last.samples} in {last.month}"
    if has_become_worse(tests):
        said += f", and on {best.right} of {best.samples} in {best.month}: its data have changed, or their labels"
    return said

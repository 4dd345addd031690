"""`benchmarks/secure_fleet.py`: a tiny fleet opens its sum without the device that is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import secure_fleet

pytestmark = pytest.mark.slow


def test_a_sum_opens_without_who_is_lost(tmp_path: Path) -> None:
    words = f"--data digits --devices 12 --lost 0.1 --json {tmp_path}/f.json".split()
    assert secure_fleet.main(words) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    assert [finding["promise"] for finding in figures["findings"] if not finding["kept"]] == []
    assert figures["in the last sum"] in (10, 11, 12)
    assert {row["process"] for row in figures["processes"]} == {
        "aggregator",
        "broker",
        "generator-0",
        "generator-1",
        "lost",
    }

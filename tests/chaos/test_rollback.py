"""State folders are put back at random (`chaos.rollback`): no ledger is below the truth, and an audit would see it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from chaos.rollback import Rollbacks
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.edge_client.store_check import StoreCheck
from support.whole import prepared_digits

SEEDS = (0, 2, 3)


@pytest.fixture(scope="module")
def tasks() -> list[PreparedTask]:
    return [prepared_digits(season, rounds=2) for season in ("spring", "summer", "autumn")]


def play(folder: Path, tasks: list[PreparedTask], seeds: Sequence[int]) -> list[Rollbacks]:
    storms = [Rollbacks(folder / str(seed), tasks, seed) for seed in seeds]
    for storm in storms:
        storm.play()
    return storms


def test_no_ledger_is_below_the_truth(tmp_path: Path, tasks: list[PreparedTask]) -> None:
    storms = play(tmp_path, tasks, SEEDS)
    assert [finding for storm in storms for finding in storm.findings] == []
    stopped = [words for storm in storms for words in storm.stopped]
    assert sum(storm.lacking for storm in storms) >= 5
    assert any("the fleet has seen" in words for words in stopped)


def test_the_audit_finds_boards_that_look_at_the_present_run_alone(
    tmp_path: Path, tasks: list[PreparedTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreCheck, "_compare", lambda *_: None)
    found = [finding for storm in play(tmp_path, tasks, SEEDS[::2]) for finding in storm.findings]
    assert any("goes on with a ledger that lacks something" in each for each in found)
    assert any("trains in round" in each for each in found)

"""Two seasons of a small fleet (`chaos.seasons`): what a fleet's operator reads at the end of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.seasons import SeasonYears, check_seasons
from hushfleet.schema import read_file


@pytest.mark.timeout(300)
def test_a_fleet_learns_in_two_seasons_and_sleeps_in_the_third(tmp_path: Path) -> None:
    """Two seasons of epsilon 20 compose to 32: the third would exceed 40."""
    year = SeasonYears(tmp_path, boards=10, there=8, rounds=2, lifetime=40.0, epsilon=20.0, new_classes=2)
    year.play(3)
    first, second, third = year.ends
    assert [end.task for end in year.ends] == ["leaf", "leaf-2", "leaf-2"]
    assert [end.classes for end in year.ends] == [8, 10, 10]
    assert first.took_part == second.took_part == 10
    assert third.took_part == 0
    assert third.in_all == second.in_all
    assert read_file(year.desk.folder.task)["model"]["start"] == "runs/leaf"
    does, waits, spent, until = first.sentences
    assert does == "leaf-1: all 2 rounds are done; boards predict with their personalized heads"
    assert waits == "next season: tomorrow 01:03 (Europe/Berlin)"
    assert "which has spent most, stands at 20.0 of the 40.0 that its card allows" in spent
    assert until == "season 1 until 1 April 2027; learns until 30 June 2027; then each board goes on alone"
    assert second.sentences[1] == "waits for nothing"
    assert second.sentences[3].startswith("season 2 until 30 June 2027; learns until 30 June 2027")
    assert third.sentences[3] == "season 2 until 30 June 2027; has learned until 30 June 2027; each board goes on alone"
    check_seasons(year, epsilon=20.0, lifetime=40.0, worse=0.06)
    year.close()
